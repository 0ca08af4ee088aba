"""Chat with a server through the OpenAI client, streamed.

    dsv4-sglang serve --model-path DIR --enable-cache-report
    python examples/chat_client.py "Why is the sky blue?" "And at sunset?" --url http://127.0.0.1:30000

Each turn sends the whole conversation. The line after an answer shows how many prompt tokens came from the cache. Hits
are multiples of 128 tokens, so the system prompt is longer than that: the second turn hits it, and so does the first
turn of a later run. (A model from `make-tiny` has random weights and answers with random text.)
"""

from __future__ import annotations

import argparse
import sys

from openai import OpenAI, OpenAIError

# More than 128 tokens with any tokenizer.
SYSTEM_PROMPT = """You are the assistant of a small museum of natural history. Visitors of all ages ask you about \
nature, and most of them stand in front of a show-case while they do. Answer in one sentence of at most thirty words. \
Use plain words, and explain a technical term when you cannot avoid it. Give numbers in metric units and round them. \
Say so when you do not know something, and never invent a source, a date or a name. When a question is not about \
nature, answer it all the same, and as briefly. When a question is rude, stay friendly. Do not repeat the question, \
do not greet, and do not end with an offer of further help. When somebody asks in another language, answer in that \
language. When somebody asks for more, give two more sentences and the name of the room where the matter is shown. \
The rooms are: minerals, fossils, insects, birds, mammals, the sea, the weather, and the night sky."""


def chat(options: argparse.Namespace) -> None:
    """Ask the questions turn by turn. Raise OpenAIError if the server cannot be reached or rejects a request."""
    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key, max_retries=0)
    model = client.models.list().data[0].id
    messages: list = [{"role": "system", "content": SYSTEM_PROMPT}]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+", help="one question per conversation turn")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    try:
        chat(options)
    except OpenAIError as error:
        reason = " ".join(str(error).split())
        print(f"no answer from the server at {options.url}: {reason} (see --url and --api-key)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
