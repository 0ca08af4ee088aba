"""A conversation of two turns with a running server, and its effect on the cache."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dsv4_sglang.cli.client import Answer, Pools, Server

QUESTION = "What are the two halves of the cache?"
SECOND_QUESTION = "Say that again in one sentence."
# Long enough for blocks and a snapshot: more than 128 tokens with any tokenizer.
TEXT = """Answer questions about this text. DeepSeek-V4 caches two kinds of data about the tokens that it has read. \
The first is entries: a CSA layer compresses every 4 tokens into one entry, an HCA layer every 128. Entries are \
stored in blocks of 128 tokens, and requests with the same beginning share their blocks. The second is state: for \
each running request the entries of the last 128 tokens in every layer, and the tokens that do not fill a compressed \
entry yet, in one slot of constant size. A request cannot resume from blocks alone, so a copy of the state, a \
snapshot, is kept where a prompt ends. When a conversation continues, the next request finds the blocks of its \
earlier turns, loads the snapshot at their end and computes only the tokens that are new. The cache evicts first what \
is least likely to be reused."""
# An idle SGLang publishes its pools at once after decode steps that it reported, else within 30 seconds.
SETTLE_SECONDS = 35.0


def is_tiny(model_path: str) -> bool:
    """Return True if the folder holds a model of `make-tiny`: no released model has as few experts."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):  # not a folder
        return False
    from dsv4_sglang.testing.tiny import EXPERTS  # imports torch

    return isinstance(config, dict) and config.get("n_routed_experts") == EXPERTS


def settled(server: Server) -> Pools:
    """Return the pools once no request runs, or after SETTLE_SECONDS in case others use the server."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (pools := server.pools()).used and time.monotonic() < deadline:
        time.sleep(0.1)
    return pools


def _say(line: str) -> None:
    print(f"dsv4-sglang: {line}", flush=True)


def _show(turn: int, question: str, answer: Answer, pools: Pools) -> None:
    _say(f"turn {turn}: {question!r} -> {answer.text!r}")
    _say(
        f"turn {turn}: {answer.prompt_tokens} prompt tokens, {answer.cached_tokens} of them from the cache; "
        f"first token after {answer.first_token_seconds:.2f} s, {answer.new_tokens} tokens after {answer.seconds:.2f} s"
    )
    _say(f"pools after turn {turn}: {pools}")


def converse(server: Server, model_path: str, question: str, max_tokens: int) -> None:
    """Ask two questions about a text in one conversation, and print the prefix hits and the pools.

    Errors of `Server.generate` and `Server.pools` propagate.

    Args:
        server: running server.
        model_path: model path of the server.
        question: question of the first conversation turn.
        max_tokens: largest number of tokens of an answer.
    """
    _say("two conversation turns; the times of the first include one-time work of the server, such as compiling")
    prompt = TEXT
    for turn, asked in enumerate((question, SECOND_QUESTION), 1):
        prompt += f"\n\nUser: {asked}\n\nAssistant:"
        answer = server.generate(prompt, max_tokens)
        _show(turn, asked, answer, settled(server))
        prompt += answer.text
    if is_tiny(model_path):
        _say("the answers are noise: this model is tiny and has random weights")
