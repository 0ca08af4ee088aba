"""A simulated server: it admits requests, holds their blocks, and takes snapshots where the served cache takes them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent_trace import Ideal, Turn
from benchmarks.prefix_tree import Node, PrefixTree
from benchmarks.trace_file import HASH_BLOCK, Request, perfect_hits
from dsv4_sglang.cache.free_list import FreeList
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.hint_weights import Hint
from dsv4_sglang.srt.prefix_cache.placement import Due, due_in_prefill, is_kept
from dsv4_sglang.srt.prefix_cache.policy import EvictionPolicy
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.resume_points import ResumePoint

CONCURRENCY = 16
# Blocks of a hash id of a trace file.
PARTS = HASH_BLOCK // BLOCK


@dataclass
class Running:
    """A request between admission and end.

    Attributes:
        key: conversation and number of the request.
        keys: keys of its whole blocks.
        blocks: block ids of its whole length.
        node: node that it holds.
        pending: snapshots that are not in the tree yet.
    """

    key: tuple[int, int]
    keys: np.ndarray
    blocks: np.ndarray
    node: Node
    pending: list[tuple[int, int]]


class Simulation:
    """Serves requests with a `PrefixTree`. Up to `concurrency` requests hold memory at a time."""

    def __init__(
        self,
        blocks: int,
        snapshots: int,
        interval: int,
        *,
        concurrency: int = CONCURRENCY,
        policy: type[EvictionPolicy] = EvictionPolicy,
    ) -> None:
        # Hints on the ends of turns, by key.
        self.hints: dict[tuple[int, int], Hint] = {}
        # Time in seconds, for hints.
        self.seconds = 0.0
        self.tree = PrefixTree(FreeList(blocks), FreeList(snapshots, first=1))
        self.tree.registry = SnapshotRegistry(snapshots, policy=policy)
        self.interval, self.concurrency = interval, concurrency
        self.running: deque[Running] = deque()
        self._keys: dict[tuple[int, int], np.ndarray] = {}
        self.prompt_tokens = self.hit_tokens = self.ideal_tokens = self.lost_tokens = self.rejected = 0
        self._ideal = Ideal()
        self._answers = 0

    def keys(self, turn: Turn) -> np.ndarray:
        """Return the keys of the whole blocks of prompt and answer. The turn that fills a block determines its key."""
        count = turn.end // BLOCK
        kept = turn.cut // BLOCK
        if turn.base >= 0:
            base = self._keys[turn.conversation, turn.base][:kept]
        else:
            base = -1 - (np.arange(kept, dtype=np.int64) << 8 | turn.system)
        own = np.arange(len(base), count, dtype=np.int64)
        uid = (turn.conversation << 8) + turn.number + 1
        keys = np.concatenate([base, (np.int64(uid) << 24) + own])
        self._keys[turn.key] = keys
        return keys

    def run(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            self.serve(turn)
        while self.running:
            self._finish(self.running.popleft())

    def serve(self, turn: Turn) -> None:
        ideal = self._ideal.hit(turn)
        self._serve(turn.key, self.keys(turn), turn.prompt, turn.end, ideal)

    def replay(self, requests: Sequence[Request]) -> None:
        """Serve the requests of a trace file. Blocks of an answer are hit by no other request."""
        numbers = Counter[int]()
        for request, ideal in zip(requests, perfect_hits(requests), strict=True):
            number = numbers[request.session]
            numbers[request.session] += 1
            end = request.tokens + request.output
            ids = np.repeat(np.array(request.ids, dtype=np.int64), PARTS) * PARTS
            own = (ids + np.tile(np.arange(PARTS), len(request.ids)))[: request.tokens // BLOCK]
            answer = -1 - np.arange(self._answers, self._answers + end // BLOCK - len(own))
            self._answers += len(answer)
            keys = np.concatenate([own, answer])
            self._serve((request.session, number), keys, request.tokens, end, ideal)
        while self.running:
            self._finish(self.running.popleft())

    def _serve(self, key: tuple[int, int], keys: np.ndarray, prompt_tokens: int, end: int, ideal: int) -> None:
        """Serve one request.

        Args:
            key: conversation and number of the request. A conversation waits for its previous request.
            keys: keys of the whole blocks of prompt and answer.
            prompt_tokens: tokens of the prompt.
            end: tokens of prompt and answer.
            ideal: tokens that an infinite cache would have.
        """
        while len(self.running) >= self.concurrency or any(running.key[0] == key[0] for running in self.running):
            self._finish(self.running.popleft())
        tree = self.tree
        prompt = keys[: (prompt_tokens - 1) // BLOCK]
        match = tree.match(prompt)
        tree.resume(match, prompt)
        count = -(-end // BLOCK)
        while (fresh := tree.take_blocks(count - match.resume)) is None:
            if not self.running:
                tree.unlock(match.node)
                self.rejected += 1
                return
            self._finish(self.running.popleft())
        blocks = np.concatenate([path_blocks(match.node), fresh])
        self.prompt_tokens += prompt_tokens
        self.ideal_tokens += ideal
        self.hit_tokens += match.resume * BLOCK
        self.lost_tokens += (match.cached - match.resume) * BLOCK
        due = due_in_prefill(
            match.resume * BLOCK,
            prompt_tokens,
            prompt=prompt_tokens,
            interval=self.interval,
            branch=match.cached * BLOCK,
        )
        node = match.node
        if pending := tree.take_due(due, self.interval):
            node = tree.insert(node, keys, blocks, pending)
            tree.lock(node)
            tree.unlock(match.node)
        grid = range(prompt_tokens // BLOCK * BLOCK + BLOCK, end, BLOCK)
        kept = [
            Due(length, True, ResumePoint.ANSWER)
            for length in grid
            if is_kept(length, self.interval) or length == grid[-1]
        ]
        self.running.append(Running(key, keys, blocks, node, tree.take_due(kept, self.interval)))

    def finish(self, key: tuple[int, int]) -> None:
        """End a request, unless it ended before for lack of blocks."""
        for request in [running for running in self.running if running.key == key]:
            self.running.remove(request)
            self._finish(request)

    def _finish(self, request: Running) -> None:
        tree = self.tree
        end = tree.insert(request.node, request.keys, request.blocks, request.pending)
        hint, registry = self.hints.get(request.key), tree.registry
        if hint is not None and end.snapshot and registry.ends_branch(end.snapshot):
            registry.hint(end.snapshot, hint, self.seconds + hint.seconds if hint.seconds else None)
        tree.block_pool.give_back(request.blocks[end.end :].tolist())
        tree.unlock(request.node)


def path_blocks(node: Node) -> np.ndarray:
    parts = []
    at: Node | None = node
    while at is not None:
        parts.append(at.blocks)
        at = at.parent
    return np.concatenate(parts[::-1])
