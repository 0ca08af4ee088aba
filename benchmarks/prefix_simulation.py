"""Simulate the hit rate against memory without a server: prefix tree, slots and policy under agent traces.

    python -m benchmarks.prefix_simulation [--parts loop,share] [--out DIR]

Studies: `loop` (conversations visited in turn), `interval` (of snapshots in long prefills), `share` (of snapshots in
memory), `memory` (and active conversations; half an hour, left out by --quick), `loads` (those of `prefix_trace`),
`hints` (of agents, right and wrong ones).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from benchmarks import command_line, report
from benchmarks.agent_trace import Ideal, TraceConfig, Turn, load, rounds, trace
from benchmarks.prefix_tree import Node, PrefixTree
from dsv4_sglang.cache.free_list import FreeList
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.hint_weights import DEMOTED, Hint
from dsv4_sglang.srt.prefix_cache.placement import Due, due_in_prefill, is_kept
from dsv4_sglang.srt.prefix_cache.policy import EvictionPolicy
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry

# V4-Flash with FP8 entries and 72-byte keys: 21 x 32 x (584 + 72) + 20 x 584.
BLOCK_BYTES = 452_512
SNAPSHOT_BYTES = 3_644_416
Row = dict[str, Any]
SHARE, INTERVAL, CONCURRENCY = 0.1, 4096, 16
# Memory of blocks and snapshots of the servers of `benchmarks/results/prefix_trace.jsonl` under agent traces.
LOAD_GIGABYTES = 3.22
# Hints of a trace, and the weight of retained turns.
NO_HINTS, RIGHT, WRONG, RANDOM = KINDS = ("none", "right", "wrong", "random")
RETAINED = 2.0


@dataclass
class Running:
    """A request between admission and end.

    Attributes:
        blocks: block ids of its whole length.
        pending: snapshots that are not in the tree yet.
    """

    turn: Turn
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
        weights: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """`weights`: those of the hints of turns."""
        self.weights = weights or {}
        self.tree = PrefixTree(FreeList(blocks), FreeList(snapshots, first=1))
        self.tree.registry = SnapshotRegistry(snapshots, policy=policy)
        self.interval, self.concurrency = interval, concurrency
        self.running: deque[Running] = deque()
        self._keys: dict[tuple[int, int], np.ndarray] = {}
        self._last_turn: dict[int, int] = {}
        self.prompt_tokens = self.hit_tokens = self.ideal_tokens = self.lost_tokens = self.rejected = 0
        self._ideal = Ideal()

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
        keys = self.keys(turn)
        while len(self.running) >= self.concurrency or any(
            r.turn.conversation == turn.conversation for r in self.running
        ):
            self._finish(self.running.popleft())
        tree = self.tree
        prompt = keys[: (turn.prompt - 1) // BLOCK]
        match = tree.match(prompt)
        tree.resume(match, prompt)
        count = -(-turn.end // BLOCK)
        while (fresh := tree.take_blocks(count - match.resume)) is None:
            if not self.running:
                tree.unlock(match.node)
                self.rejected += 1
                return
            self._finish(self.running.popleft())
        blocks = np.concatenate([path_blocks(match.node), fresh])
        self.prompt_tokens += turn.prompt
        self.ideal_tokens += ideal
        self.hit_tokens += match.resume * BLOCK
        self.lost_tokens += (match.cached - match.resume) * BLOCK
        due = due_in_prefill(
            match.resume * BLOCK, turn.prompt, prompt=turn.prompt, interval=self.interval, branch=match.cached * BLOCK
        )
        node = match.node
        if pending := tree.take_due(due, self.interval):
            node = tree.insert(node, keys, blocks, pending)
            tree.lock(node)
            tree.unlock(match.node)
        grid = range(turn.prompt // BLOCK * BLOCK + BLOCK, turn.end, BLOCK)
        kept = [Due(length, True) for length in grid if is_kept(length, self.interval) or length == grid[-1]]
        self.running.append(Running(turn, keys, blocks, node, tree.take_due(kept, self.interval)))

    def _finish(self, request: Running) -> None:
        tree = self.tree
        end = tree.insert(request.node, request.keys, request.blocks, request.pending)
        if (weight := self.weights.get(request.turn.key)) is not None and end.snapshot:
            tree.registry.hint(end.snapshot, Hint(weight, ""))
        tree.block_pool.give_back(request.blocks[end.end :].tolist())
        tree.unlock(request.node)


def path_blocks(node: Node) -> np.ndarray:
    parts = []
    at: Node | None = node
    while at is not None:
        parts.append(at.blocks)
        at = at.parent
    return np.concatenate(parts[::-1])


class LeastRecentlyUsed(EvictionPolicy):
    """Baseline: all snapshots have the same value, only their age counts."""

    def _interval(self, number: int) -> float:
        return 1.0

    def _cost(self, number: int) -> float:
        return 1.0

    def lowest_value(self, *, needed: bool, saves: int) -> int:
        return super().lowest_value(needed=True, saves=saves)


def simulate(
    turns: Iterable[Turn],
    gigabytes: float,
    share: float = SHARE,
    interval: int = INTERVAL,
    policy: type[EvictionPolicy] = EvictionPolicy,
    weights: Mapping[tuple[int, int], float] | None = None,
) -> dict[str, float]:
    """Run a trace and return its figures. Tokens are given as shares of what an infinite cache would serve.

    Args:
        turns: the trace.
        gigabytes: memory of the cache in GB.
        share: share of the memory for snapshots; the rest holds blocks.
        interval: tokens between the snapshots of long prefills.
        policy: eviction policy.
        weights: those of the hints of turns.
    """
    memory = gigabytes * 1e9
    blocks, snapshots = int(memory * (1 - share) / BLOCK_BYTES), int(memory * share / SNAPSHOT_BYTES)
    simulation = Simulation(blocks, snapshots, interval, policy=policy, weights=weights)
    begin = time.perf_counter()
    simulation.run(turns)
    took = time.perf_counter() - begin
    return {
        "gigabytes": gigabytes,
        "share": share,
        "interval": interval,
        "policy": "lru" if policy is LeastRecentlyUsed else "ours",
        "hit": round(simulation.hit_tokens / simulation.ideal_tokens, 4),
        "lost": round(simulation.lost_tokens / simulation.ideal_tokens, 4),
        "rejected": simulation.rejected,
        "prompt_tokens": simulation.prompt_tokens,
        "tokens_per_second": int(simulation.prompt_tokens / took),
    }


def study_memory() -> Iterator[Row]:
    """Vary the memory in multiples of 0.1 GB per active conversation, about the size of its tokens."""
    for active in (10, 100, 1000, 10_000):
        turns = list(trace(TraceConfig(conversations=max(active, min(6 * active, 1500)), active=active)))
        for factor in (0.125, 0.25, 0.5, 1.0, 2.0):
            for policy in (EvictionPolicy, LeastRecentlyUsed):
                yield {"active": active, **simulate(turns, factor * active / 10, policy=policy)}


def study_interval() -> Iterator[Row]:
    for active in (100, 250):
        turns = list(trace(TraceConfig(conversations=3 * active, active=active)))
        for share in (0.04, 0.08, 0.15):
            for interval in (256, 512, 1024, 2048, 4096, 8192, 16384, 1 << 20):
                yield {"active": active, **simulate(turns, 20.0, share, interval)}


def study_share() -> Iterator[Row]:
    """Vary the share of snapshots. Long conversations need blocks, short ones snapshots."""
    for tokens, active in (((2_000, 8_000), 800), ((2_000, 200_000), 250), ((50_000, 200_000), 80)):
        turns = list(trace(TraceConfig(conversations=2 * active, active=active, tokens=tokens)))
        for share in (0.02, 0.04, 0.08, 0.12, 0.16, 0.24, 0.32):
            yield {"active": active, "tokens": tokens, **simulate(turns, 20.0, share)}


def study_loop() -> Iterator[Row]:
    """Visit conversations of 20,000 tokens in round-robin order, six times. About 250 of them fit."""
    for count in (150, 200, 225, 250, 275, 300, 350, 400, 600, 1000):
        for policy in (EvictionPolicy, LeastRecentlyUsed):
            yield {"conversations": count, **simulate(rounds(count, 20_000, 6), 20.0, policy=policy)}


def study_loads() -> Iterator[Row]:
    """Run the loads of `prefix_trace trace` in the memory that `--mem-fraction-static 0.055` leaves on an H200."""
    for active, visits in ((28, 10), (155, 5), (365, 5), (790, 2), (790, 5)):
        turns = load(active, visits, tokens=(2_000, 80_000), generate=(8, 16))
        expected = expected_blind(turns, LOAD_GIGABYTES, TraceConfig.systems)
        for policy in (EvictionPolicy, LeastRecentlyUsed):
            row = simulate(turns, LOAD_GIGABYTES, policy=policy)
            yield {"active": active, "visits": visits, **row, **expected}


def hint_weights(turns: Sequence[Turn], kind: str) -> dict[tuple[int, int], float] | None:
    """Return the weights of the hints of turns, or None without hints.

    A right hint retains a turn that a later one continues, and demotes the others. A wrong one does the opposite.
    """
    if kind == NO_HINTS:
        return None
    if kind == RANDOM:
        rng = random.Random(0)
        return {turn.key: rng.choice((RETAINED, DEMOTED)) for turn in turns}
    continued = {(turn.conversation, turn.base) for turn in turns if turn.base >= 0}
    return {turn.key: RETAINED if (turn.key in continued) == (kind == RIGHT) else DEMOTED for turn in turns}


def study_hints() -> Iterator[Row]:
    """Vary the hints of agents, with memory for a half and a tenth of their conversations."""
    for active, visits, sizes in ((150, 8, (3.0, 0.6)), (600, 8, (12.0, 2.4))):
        turns = load(active, visits, tokens=(2_000, 80_000), generate=(8, 64))
        for gigabytes in sizes:
            for kind in KINDS:
                weights = hint_weights(turns, kind)
                yield {"active": active, "hints": kind, **simulate(turns, gigabytes, weights=weights)}


def expected_blind(turns: Sequence[Turn], gigabytes: float, sizes: Sequence[int]) -> dict[str, float]:
    """Return expected hit rates of a policy that cannot know which conversation continues next.

    `systems` is the share of the ideal hits that are system prompts. `blind` is the expected hit rate: such a policy
    always hits the system prompts. Of the rest it hits the fraction of waiting state that fits in memory beside the
    running requests, measured in tokens x turns of waiting. Replacing one conversation by another gains nothing,
    because in the trace the remaining pause does not depend on its length so far. In a short trace the hit rate can be
    a little higher: the first conversations stay, and more of their pauses end.

    Args:
        turns: the trace.
        gigabytes: memory of the cache in GB.
        sizes: lengths of the system prompts in tokens.
    """
    ideal = Ideal()
    total = systems = waited = 0
    left: dict[int, tuple[int, int]] = {}  # conversation -> (turn, tokens)
    for now, turn in enumerate(turns):
        hit = ideal.hit(turn)
        total += hit
        systems += min(hit, sizes[turn.system])
        when, tokens = left.get(turn.conversation, (now, 0))
        waited += (now - when) * tokens
        left[turn.conversation] = now, turn.end
    waited += sum((len(turns) - when) * tokens for when, tokens in left.values())
    running = CONCURRENCY * sum(turn.end for turn in turns) / len(turns)
    held = max(0.0, gigabytes * 1e9 / BLOCK_BYTES * BLOCK - sum(sizes) - running) * len(turns)
    blind = systems + (total - systems) * min(1.0, held / waited)
    return {"systems": round(systems / total, 4), "blind": round(blind / total, 4)}


STUDIES: dict[str, Callable[[], Iterator[Row]]] = {
    "loop": study_loop,
    "interval": study_interval,
    "share": study_share,
    "memory": study_memory,
    "loads": study_loads,
    "hints": study_hints,
}


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    result = report.Report("prefix_simulation", args, {"share": SHARE, "interval": INTERVAL})
    for name, study in STUDIES.items():
        if not (args.quick and name == "memory"):
            # A dry run simulates the first case of each study.
            result.part(name, partial(islice, study(), 1) if args.dry_run else study)
    columns = [
        "part",
        "active",
        "conversations",
        "tokens",
        "gigabytes",
        "share",
        "interval",
        "policy",
        "hints",
        "hit",
        "lost",
    ]
    result.table("share of the hits of an infinite cache", columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
