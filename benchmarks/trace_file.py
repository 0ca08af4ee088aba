"""Trace files in Mooncake's format: requests, their prompts, and the hits of perfect caches."""

from __future__ import annotations

import gzip
import heapq
import json
import lzma
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

# Tokens per hash id in Mooncake's trace format.
HASH_BLOCK = 512
# Smaller ids are special tokens.
FIRST_TOKEN_ID = 10
OPEN: dict[str, Callable[..., IO[Any]]] = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True)
class Request:
    """One request of a trace. Times are in seconds.

    Attributes:
        at: time stamp of the trace.
        tokens: length of the prompt.
        output: length of the answer.
        ids: hash ids of the prompt's blocks of 512 tokens; equal ids mean equal tokens.
        session: requests of one session run one after the other.
        delay: pause after the session's previous answer.
    """

    at: float
    tokens: int
    output: int
    ids: tuple[int, ...]
    session: int
    delay: float = 0.0

    def prompt(self, vocab: int, seed: int) -> array[int]:
        """Return the prompt's token ids. The tokens of a hash id are random, determined by `seed` and the id."""
        blocks = [np.random.default_rng((seed, one)).integers(FIRST_TOKEN_ID, vocab, HASH_BLOCK) for one in self.ids]
        return array("i", np.concatenate(blocks)[: self.tokens].tolist())

    def blocks(self) -> list[tuple[int, int]]:
        """Return (id, tokens) of each block. The last block may be partial."""
        return [(one, min(HASH_BLOCK, self.tokens - HASH_BLOCK * i)) for i, one in enumerate(self.ids)]


def load(path: Path) -> list[Request]:
    """Read a trace: JSON lines, optionally compressed (.xz, .gz). A line without `session_id` is its own session.

    Raises:
        ValueError: a line is not a request. The message names the file, the line and what was expected.
    """
    found = []
    with OPEN.get(path.suffix, open)(path, mode="rt") as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                one = Request(
                    line["timestamp"] / 1e3,
                    line["input_length"],
                    line["output_length"],
                    tuple(line["hash_ids"]),
                    line.get("session_id", -number),
                    line.get("delay", 0) / 1e3,
                )
                valid = one.tokens > 0 and one.output > 0 and len(one.ids) == -(-one.tokens // HASH_BLOCK)
            except (KeyError, TypeError, ValueError):
                valid = False
            if not valid:
                raise ValueError(
                    f"{path}, line {number}: {text[:100]!r}; expected timestamp (ms), input_length, output_length and "
                    f"hash_ids with one id per {HASH_BLOCK} tokens of the prompt"
                )
            found.append(one)
    if not found:
        raise ValueError(f"{path} is empty; expected one request per line")
    return found


def known_tokens(request: Request, known: Callable[[int], int]) -> int:
    """Return the prompt tokens that a cache has. `known` maps a hash id to the number of cached tokens.

    The last token of a prompt is always computed.
    """
    total = 0
    for one, tokens in request.blocks():
        found = min(tokens, known(one))
        total += found
        if found < HASH_BLOCK:
            break
    return min(total, request.tokens - 1)


def perfect_hits(requests: Sequence[Request], capacity: float = math.inf) -> list[int]:
    """Return the hit tokens of each request in an optimal cache: an upper bound of every eviction policy.

    The cache knows the future (Belady): when it is full, it drops the block whose next use is farthest. A block's
    children are never used before the block itself, so a prefix is dropped from its end. Running requests take no
    room, and a request hits the prompts of all requests sent before it.

    Args:
        requests: requests in the order of sending.
        capacity: tokens that the cache holds.
    """
    room = capacity // HASH_BLOCK
    following: dict[int, float] = {}
    uses: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([following.get(one, math.inf) for one in requests[number].ids])
        following.update(dict.fromkeys(requests[number].ids, number))
    held: dict[int, tuple[float, int]] = {}  # id -> (next use, tokens)
    farthest: list[tuple[float, int, int]] = []  # heap of (-next use, -depth, id); stale items are skipped
    hits = []
    for request, nexts in zip(requests, reversed(uses), strict=True):
        hits.append(known_tokens(request, lambda one: held.get(one, (0.0, 0))[1]))
        for depth, ((one, tokens), then) in enumerate(zip(request.blocks(), nexts, strict=True)):
            before = held.pop(one, (0.0, 0))[1]
            if then < math.inf:
                held[one] = then, max(before, tokens)
                heapq.heappush(farthest, (-then, -depth, one))
        while len(held) > room:
            then, _, one = heapq.heappop(farthest)
            if held.get(one, (0.0, 0))[0] == -then:
                del held[one]
    return hits


def live_tokens(requests: Sequence[Request]) -> int:
    """Return the largest number of tokens that an unbounded cache holds for later requests at a time.

    Args:
        requests: requests in the order of sending.
    """
    last = {one: number for number, request in enumerate(requests) for one in request.ids}
    held: set[int] = set()
    most = 0
    for number, request in enumerate(requests):
        for one in request.ids:
            (held.add if last[one] > number else held.discard)(one)
        most = max(most, len(held))
    return most * HASH_BLOCK


def computed_hits(requests: Sequence[Request], begins: Sequence[float], computed: Sequence[float]) -> list[int]:
    """Return the hit tokens of each request if it hits only prompts that were computed before it was sent.

    Args:
        requests: requests in the order of sending.
        begins: when each was sent, in seconds.
        computed: when each had its first token.
    """
    known: dict[int, int] = {}
    running: list[tuple[float, int]] = []
    hits = []
    for number, (request, begin) in enumerate(zip(requests, begins, strict=True)):
        while running and running[0][0] <= begin:
            for one, tokens in requests[heapq.heappop(running)[1]].blocks():
                known[one] = max(known.get(one, 0), tokens)
        hits.append(known_tokens(request, lambda one: cast(int, known.get(one, 0))))
        heapq.heappush(running, (computed[number], number))
    return hits
