"""Conversations that take turns on a real server, as in `benchmarks.prefix_trace revisit`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.agent_trace import Turn
from benchmarks.client import Client
from benchmarks.prefix_trace import run_rounds
from benchmarks.replay import Replay
from support.server import Server

VOCABULARY = 384


def take_turns(
    server: Server, conversations: int, tokens: int, concurrency: int, compared: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Serve each conversation once, and each again with 200 new tokens, in the same order.

    Args:
        server: running server, whose cache is emptied.
        conversations: their number.
        tokens: tokens of a first prompt.
        concurrency: concurrent requests.
        compared: number of conversations whose next prompts are returned, spread over all.

    Returns:
        (the figures of the second turns, as `prefix_trace.summary` describes them, prompts with 40 more tokens).
    """
    replay = Replay(Client(server.url), concurrency=concurrency, vocab=VOCABULARY)
    replay.restart()
    load = Namespace(conversations=conversations, rounds=2, tokens=tokens)
    *_, (_, _, figures) = run_rounds(replay, load)
    last = {served.turn.conversation: served.turn for served in replay.served}
    turns = [last[at] for at in range(0, conversations, -(-conversations // compared))]
    following = [Turn(turn.conversation, turn.number + 1, 0, turn.number, turn.end, 40, 16) for turn in turns]
    return figures, [replay.prompt(turn).tolist() for turn in following]
