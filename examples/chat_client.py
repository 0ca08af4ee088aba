"""Chat with a server through the OpenAI client, streamed.

    dsv4-sglang serve --model-path DIR --enable-cache-report
    python examples/chat_client.py "Why is the sky blue?" --url http://127.0.0.1:30000

Each turn sends the whole conversation; what earlier turns left in the cache is not computed again, and the line after
an answer says how many tokens that were. (A checkpoint from `make-tiny` has random weights and answers with random
text.)
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+", help="what the user says, turn by turn")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    messages: list = [{"role": "system", "content": "You answer in one sentence."}]
    for question in options.questions:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=options.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer = ""
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                piece = choice.delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
        print()
        if usage is not None:
            details = usage.prompt_tokens_details  # only with --enable-cache-report
            cached = f", {details.cached_tokens} of them from the cache" if details is not None else ""
            print(f"[{usage.prompt_tokens} prompt tokens{cached}; {usage.completion_tokens} new]")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
