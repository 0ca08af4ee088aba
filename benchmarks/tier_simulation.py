"""Simulate the hit rate of a host cache against the working set, without a server.

    python -m benchmarks.tier_simulation               # figures to docs/benchmarks/
    python -m benchmarks.tier_simulation --what loop   # one study

The device holds 1.0 M tokens, the host 0, 2, 4 and 8 times as many bytes, in blocks and snapshots. Studies:

- "loop": conversations of 20,000 tokens, visited in round-robin order four times.
- "agents": agent conversations (`benchmarks.agent_trace`) of 2,000 to 80,000 tokens that start midway, five turns each.
- "share": other shares of snapshots in the same host bytes, in both loads.
- "bound": other hosts. They copy all device contents or none of them, share their bytes between blocks and snapshots,
  or know which conversation continues next.
- "grow": conversations of 10,000 tokens in round-robin order, one request at a time; first few enough to fit, then too
  many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.agent_trace import TraceConfig, Turn, growing, load, rounds
from benchmarks.prefix_simulation import (
    BLOCK_BYTES,
    INTERVAL,
    SNAPSHOT_BYTES,
    Running,
    Simulation,
    expected_blind,
    path_blocks,
)
from benchmarks.prefix_trace import live_tokens
from benchmarks.prefix_tree import FreeList, Match, Node, PrefixTree, TreeRegistry
from benchmarks.studies import Row, Rows, run_studies
from benchmarks.tier_tree import TieredTree
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.host_cache.sizing import host_demand
from dsv4_sglang.srt.memory.sizing import SNAPSHOT_SHARE
from dsv4_sglang.srt.prefix_cache.policy import SUPERSEDED, UNKNOWN

DEVICE_TOKENS = 1_000_000
RATIOS = (0, 2, 4, 8)
# Multiples of the device's tokens.
WORKING_SETS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0)
CONVERSATION = 20_000


class SharedTree(PrefixTree):
    """Prefix tree whose blocks and snapshots share one memory of `size` bytes.

    Eviction takes what has the lowest value per byte. The bytes of a snapshot at a leaf include the blocks since the
    previous snapshot.
    """

    def __init__(self, size: int, ahead: Sequence[Turn] = ()) -> None:
        """`ahead` are the future turns, for a policy that knows them."""
        super().__init__(FreeList(size // BLOCK_BYTES), FreeList(size // SNAPSHOT_BYTES))
        self.size = size
        if ahead:
            self.registry = Foresight(self.snapshot_pool.size, ahead, self._holder)

    def take_blocks(self, count: int) -> np.ndarray | None:
        while self._room() < count * BLOCK_BYTES:
            if not self._evict():
                return None
        return self.block_pool.alloc(count)

    def take_snapshot(self, *, needed: bool = True, saves: int = 0) -> int:
        interval = max(self.registry.mean_interval, 1.0)
        least = 0.0 if needed else SNAPSHOT_BYTES * interval / max(saves * SUPERSEDED, 1e-9)
        while self._room() < SNAPSHOT_BYTES:
            if not self._evict(least):
                return 0
        taken = self.snapshot_pool.alloc(1)
        assert taken is not None
        return int(taken[0])

    def _room(self) -> int:
        blocks, snapshots = self.block_pool, self.snapshot_pool
        used = (blocks.size - blocks.available_size()) * BLOCK_BYTES
        return self.size - used - (snapshots.size - snapshots.available_size()) * SNAPSHOT_BYTES

    def _evict(self, least: float = 0.0) -> bool:
        """Free the item of lowest value if its score exceeds `least`. Blocks without a later snapshot always go."""
        if not self._valueless:
            registry = self.registry
            saved = registry.length - registry.length[registry.previous]
            freed = SNAPSHOT_BYTES + np.where(registry.at_leaf, saved // BLOCK * BLOCK_BYTES, 0)
            free = registry.held & (registry.locks == 0)
            score = np.where(free, freed * registry.reuse_interval() / np.maximum(registry.recompute_cost, 1e-9), -1.0)
            slot = int(score.argmax())
            if not free[slot] or score[slot] <= least:
                return False
            self._drop(self._holder[slot])
            self.evicted_snapshots += 1
        while self._valueless:
            self._evict_leaf()
        return True


class Foresight(TreeRegistry):
    """Registry that knows when each conversation continues: what is needed last is evicted first."""

    def __init__(self, capacity: int, turns: Sequence[Turn], nodes: Mapping[int, Node]) -> None:
        """`nodes` maps a snapshot to its tree node, whose keys identify the conversation."""
        super().__init__(capacity)
        self._nodes = nodes
        self._next: dict[int, list[int]] = {}
        for now, turn in enumerate(turns):
            self._next.setdefault(turn.conversation, []).append(now)

    def reuse_interval(self) -> np.ndarray:
        """Return the requests until the conversation's next one. System prompts are always next."""
        wait = np.ones(len(self.held))
        for slot in np.flatnonzero(self.held):
            if (key := int(self._nodes[int(slot)].keys[-1])) > 0:
                times = self._next[((key >> 24) - 1) >> 8]
                at = bisect_right(times, self.now - 1)
                wait[slot] = max(1, times[at] - self.now) if at < len(times) else UNKNOWN
        return wait


class TieredSimulation(Simulation):
    """The host cache as implemented: one tree over both tiers (`benchmarks.tier_tree`). The scheduler's passes are
    simulated at the ends of requests."""

    tree: TieredTree

    def __init__(self, blocks: int, snapshots: int, host_blocks: int, rows: int) -> None:
        super().__init__(blocks, snapshots, INTERVAL)
        self.tree = TieredTree(*map(FreeList, (blocks, snapshots, host_blocks, rows)))
        # Tokens loaded from the host; tokens whose blocks were in a tier without a snapshot after them.
        self.loaded_tokens = self.stateless_tokens = 0

    def _resume(self, keys: np.ndarray) -> Match:
        tree = self.tree
        match = tree.match(keys)
        self.stateless_tokens += BLOCK * (match.cached - match.resume)
        node, missing = match.node, tree.missing(match.node)
        if node.snapshot and not tree.slot(node):
            if tree.load(node):
                self.loaded_tokens += missing * BLOCK
            else:
                while node.snapshot != tree.slot(node) or (node is not tree.root and not node.snapshot):
                    assert node.parent is not None
                    node = node.parent
        held = Match(node, node.end, match.cached)
        tree.resume(held, keys)
        return held

    def _finish(self, request: Running) -> None:
        super()._finish(request)
        self.tree.save_ahead()


class CopyingSimulation(Simulation):
    """A host with its own tree and copies of everything that a request leaves at its end, even if the device has it.

    If the host has a longer prefix than the device, it is loaded. Each tree has its own registry. The host's registry
    sees every use, and a load also copies the conversation's reuse interval to the device's registry.
    """

    def __init__(
        self,
        blocks: int,
        snapshots: int,
        host_blocks: int,
        rows: int,
        *,
        shared: bool = False,
        ahead: Sequence[Turn] = (),
    ) -> None:
        """Create both trees.

        Args:
            blocks: number of blocks of the device.
            snapshots: number of snapshots of the device.
            host_blocks: number of blocks of the host.
            rows: number of snapshots of the host.
            shared: True if blocks and snapshots share the host's bytes.
            ahead: future turns, for a host that knows them.
        """
        super().__init__(blocks, snapshots, INTERVAL)
        self.host = PrefixTree(FreeList(host_blocks), FreeList(rows))
        if shared:
            self.host = SharedTree(host_blocks * BLOCK_BYTES + rows * SNAPSHOT_BYTES, ahead)
        self.loaded_tokens = self.stateless_tokens = 0

    def _resume(self, keys: np.ndarray) -> Match:
        match = self.tree.match(keys)
        self.tree.resume(match, keys)
        there = self.host.match(keys)
        self.stateless_tokens += BLOCK * (max(match.cached, there.cached) - max(match.resume, there.resume))
        self.host.resume(there, keys)
        loaded = self._load(keys, match, there) if there.resume > match.resume else None
        self.host.unlock(there.node)
        return loaded or match

    def _load(self, keys: np.ndarray, match: Match, there: Match) -> Match | None:
        """Load the host's prefix. Return what the request then resumes from, or None if running requests leave no room.

        Args:
            keys: block keys of the request.
            match: longest match on the device.
            there: longest match on the host.
        """
        fresh = self.tree.take_blocks(there.resume - match.resume)
        if fresh is None:
            return None
        slot = self.tree.take_snapshot()
        if not slot:
            self.tree.block_pool.free(fresh)
            return None
        blocks = np.concatenate([path_blocks(match.node), fresh])
        node = self.tree.insert(match.node, keys[: there.resume], blocks, [(there.resume, slot)])
        self.tree.registry.interval[slot] = self.host.registry.interval[there.node.snapshot]
        self.tree.lock(node)
        self.tree.unlock(match.node)
        self.loaded_tokens += (there.resume - match.resume) * BLOCK
        return Match(node, there.resume, max(there.resume, match.cached))

    def _finish(self, request: Running) -> None:
        super()._finish(request)
        if not request.taken:
            return
        host, keys = self.host, request.keys
        base = host.match(keys)
        host.lock(base.node)
        last = max(one.length for one in request.taken) // BLOCK
        if last > base.resume and (fresh := host.take_blocks(last - base.resume)) is not None:
            blocks = np.concatenate([path_blocks(base.node), fresh])
            new = [one for one in request.taken if one.length > base.resume * BLOCK]
            end = host.insert(base.node, keys, blocks, host.take_due(new, self.interval)).end
            host.block_pool.free(blocks[end:])
        host.unlock(base.node)


def simulate(
    turns: Iterable[Turn],
    ratio: float,
    host_share: float | None = None,
    tokens: int = DEVICE_TOKENS,
    copies: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Run a load and return its figures. Hits are shares of the tokens that an infinite cache would serve.

    Args:
        turns: the load.
        ratio: bytes of the host / bytes of the device.
        host_share: share of the host's bytes for snapshots (default: the server's).
        tokens: tokens of the device.
        copies: use `CopyingSimulation`.
        **options: further arguments of `CopyingSimulation`.
    """
    blocks = tokens // BLOCK
    snapshots = int(blocks * BLOCK_BYTES * SNAPSHOT_SHARE / (1 - SNAPSHOT_SHARE) / SNAPSHOT_BYTES)
    there = host_of(blocks, snapshots, ratio, host_share)
    simulation = (CopyingSimulation if copies else TieredSimulation)(blocks, snapshots, *there, **options)
    simulation.run(turns)
    ideal = simulation.ideal_tokens
    return {
        "ratio": ratio,
        "hit": round(simulation.hit_tokens / ideal, 4),
        "from_host": round(simulation.loaded_tokens / ideal, 4),
        "stateless": round(simulation.stateless_tokens / ideal, 4),
        "rejected": simulation.rejected,
        "prompt_tokens": simulation.prompt_tokens,
    }


def host_of(blocks: int, snapshots: int, ratio: float, share: float | None) -> tuple[int, int]:
    """Return the blocks and snapshots of a host of `ratio` times the device's bytes.

    Args:
        blocks: number of blocks of the device.
        snapshots: number of snapshots of the device.
        ratio: bytes of the host / bytes of the device.
        share: share of the host's bytes for snapshots (default: the server's).
    """
    size = ratio * (blocks * BLOCK_BYTES + snapshots * SNAPSHOT_BYTES)
    if share is not None or not ratio:
        share = share or 0.0
        return int(size * (1 - share) / BLOCK_BYTES), int(size * share / SNAPSHOT_BYTES)
    demand = host_demand(
        device_blocks=blocks,
        device_snapshots=snapshots,
        block_bytes=BLOCK_BYTES,
        snapshot_bytes=SNAPSHOT_BYTES,
        ratio=ratio,
        size_gb=0,
        max_snapshots=None,
        host_snapshots=None,
    )
    return demand.blocks, demand.snapshots


def study_loop() -> Iterator[Row]:
    for times in WORKING_SETS:
        count = max(1, round(times * DEVICE_TOKENS / CONVERSATION))
        for ratio in RATIOS:
            yield {"working_set": times, "conversations": count, **simulate(loop(times), ratio)}


def study_agents() -> Iterator[Row]:
    """Vary the working set. `blind` is the expected hit rate of a cache of the host's size (or of the device, without a
    host) that cannot know which conversation continues next."""
    for times in WORKING_SETS:
        turns, active = agents(times)
        for ratio in RATIOS:
            gigabytes = max(1, ratio) * DEVICE_TOKENS / BLOCK * BLOCK_BYTES / 1e9
            blind = expected_blind(turns, gigabytes, TraceConfig.systems)
            yield {"working_set": times, "active": active, **simulate(turns, ratio), **blind}


# (working set, ratio)
LOADS = ((2.0, 2), (3.0, 2), (4.0, 4), (8.0, 8), (10.0, 4), (10.0, 8))


def study_share() -> Iterator[Row]:
    """Vary the share of snapshots on the host, five seeds each."""
    for times, ratio in LOADS:
        loads = [agents(times, seed)[0] for seed in range(5)]
        for share in (1 / 12, 1 / 10, 1 / 9, 1 / 8):
            hits = [simulate(turns, ratio, share)["hit"] for turns in (*loads, loop(times))]
            row = {"working_set": times, "ratio": ratio, "share": round(share, 4)}
            yield {**row, "hit": hits[:-1], "hit_loop": hits[-1]}


def study_bound() -> Iterator[Row]:
    """Compare hosts, five seeds each.

    `copies` has blocks and snapshots in the device's proportion. `none` is as large as device and host together, as if
    the host had no copy of the device's contents.
    """
    for times, ratio in LOADS:
        loads = [agents(times, seed)[0] for seed in range(5)]
        for host in ("as it is", "copies", "shared", "none", "shared, none", "shared, knows"):
            shared, knows = host.startswith("shared"), host.endswith("knows")
            options: dict[str, Any] = {} if host == "as it is" else {"copies": True, "shared": shared}
            options["host_share"] = None if host in ("as it is", "none") else SNAPSHOT_SHARE
            size = ratio + host.endswith("none")
            hits = [simulate(turns, size, **options, **({"ahead": turns} if knows else {}))["hit"] for turns in loads]
            of_loop = {} if knows else {"hit_loop": simulate(loop(times), size, **options)["hit"]}
            yield {"working_set": times, "ratio": ratio, "host": host, "hit": hits, **of_loop}


# (conversations, visits of each)
GROWING = ((50, 3), (120, 6))


def study_grow() -> Iterator[Row]:
    """Return one row per visit. Both tiers have 9,284 blocks together. 120 conversations take 9,850 blocks in their
    first visit and 10,930 in their last."""
    return grow(TieredSimulation(1024, 12, 8260, 990), GROWING, 10_000)


def grow(simulation: Simulation, stages: Iterable[tuple[int, int]], tokens: int) -> Iterator[Row]:
    """Yield the hits of each visit as shares of the hits of an infinite cache.

    Args:
        simulation: simulation that serves the requests.
        stages: pairs of the number of conversations and the number of visits.
        tokens: length of a conversation.
    """
    simulation.concurrency = 1
    for number, turns in growing(stages, tokens):
        before = simulation.hit_tokens, simulation.ideal_tokens
        simulation.run(turns)
        if number:
            hit = (simulation.hit_tokens - before[0]) / (simulation.ideal_tokens - before[1])
            yield {"conversations": len(turns), "visit": number, "hit": round(hit, 4)}


def loop(times: float) -> list[Turn]:
    """Return round-robin visits to conversations with `times` the device's tokens."""
    return list(rounds(max(1, round(times * DEVICE_TOKENS / CONVERSATION)), CONVERSATION, 4))


def agents(times: float, seed: int = 0) -> tuple[list[Turn], int]:
    """Return a load whose live conversations have about `times` the device's tokens, and their number."""
    active = max(2, round(times * 45))
    turns: list[Turn] = []
    for _ in range(4):
        turns = load(active, 5, seed=seed, tokens=(2_000, 80_000), generate=(8, 16))
        active = max(2, round(active * times * DEVICE_TOKENS / live_tokens(turns, active)))
    return turns, active


STUDIES: dict[str, Callable[[], Iterator[Row]]] = {
    "loop": study_loop,
    "agents": study_agents,
    "share": study_share,
    "bound": study_bound,
    "grow": study_grow,
}
TITLES = {"loop": "Conversations of 20,000 tokens visited in turn", "agents": "Agent conversations"}


def plot(pyplot: Any, results: dict[str, Rows]) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, (name, title) in zip(axes, TITLES.items()):
        for ratio in RATIOS:
            points = [(row["working_set"], row["hit"]) for row in results.get(name, []) if row["ratio"] == ratio]
            axis.plot(*zip(*points), marker="o", markersize=3, label=f"host ratio {ratio}" if ratio else "no host")
        axis.set(title=f"{title} (simulated)", xlabel="working set / tokens on the GPU (1.0 M)")
        axis.set(ylabel="hit tokens / infinite cache's", xscale="log", ylim=(0, 1.01))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    run_studies("tier_simulation", __doc__, STUDIES, plot)
