"""Simulate the hit rate against memory without a server: prefix tree, slots and policy under agent traces.

    python -m benchmarks.prefix_simulation [--parts loop,share] [--out DIR]
    python -m benchmarks.prefix_simulation --parts trace --trace TRACE.jsonl.xz [--out DIR]

Studies: `loop` (conversations visited in turn), `interval` (of snapshots in long prefills), `share` (of snapshots in
memory), `memory` (and active conversations; half an hour, left out by --quick), `loads` (those of `prefix_trace`),
`hints` (of agents with pauses for tools), `chats` (that repeat their answers, or leave out the reasoning), `trace` (a
trace file of `benchmarks.trace`). The last two have rows that do not learn where conversations go on.

In `trace`, `live` is the file's live tokens over the tokens that the blocks hold, `optimal` the hit rate of an optimal
cache of these blocks, and `lost` what was computed again for lack of a snapshot. Rows with `slots` unlimited lose only
where no snapshot was ever taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from benchmarks import command_line, report
from benchmarks.agent_trace import Ideal, TraceConfig, Turn, load, rounds, trace, without_reasoning
from benchmarks.simulated_agents import KINDS, SimulatedAgents
from benchmarks.simulated_server import CONCURRENCY, Simulation
from benchmarks.tool_pauses import Load, agent_lengths
from benchmarks.trace_file import Request, live_tokens, perfect_hits
from benchmarks.trace_file import load as read
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.memory.sizing import SNAPSHOT_SHARE as SERVED_SHARE
from dsv4_sglang.srt.prefix_cache.policy import EvictionPolicy
from dsv4_sglang.srt.prefix_cache.resume_points import ResumeEstimate, ResumePoint

# V4-Flash with FP8 entries and 72-byte keys: 21 x 32 x (584 + 72) + 20 x 584.
BLOCK_BYTES = 452_512
SNAPSHOT_BYTES = 3_644_416
Row = dict[str, Any]
SHARE, INTERVAL = 0.1, 4096
# More snapshots than any trace file takes.
UNLIMITED = 1 << 17
# Live tokens of a trace file over those that the blocks hold.
LIVE = (0.5, 2, 8, 20)
# Memory of blocks and snapshots in the study `loads`.
LOAD_GIGABYTES = 3.22
# Cache of the server in the study `hints`, for 16 running requests, and the weight of retained conversations.
AGENT_BLOCKS, AGENT_SNAPSHOTS = 512, 32
RETAINED = 2


class LeastRecentlyUsed(EvictionPolicy):
    """Baseline: all snapshots have the same value, only their age counts."""

    def _interval(self, number: int) -> float:
        return 1.0

    def _cost(self, number: int) -> float:
        return 1.0

    def lowest_value(self, *, needed: bool, saves: int) -> int:
        return super().lowest_value(needed=True, saves=saves)


class AnswersRepeated(ResumeEstimate):
    """Baseline: all conversations go on at the end of the last answer."""

    def __init__(self) -> None:
        super().__init__()
        self.probability = [float(point == ResumePoint.ANSWER) for point in ResumePoint]

    def count(self, point: ResumePoint) -> None:
        pass


def simulate(
    turns: Iterable[Turn],
    gigabytes: float,
    share: float = SHARE,
    interval: int = INTERVAL,
    policy: type[EvictionPolicy] = EvictionPolicy,
    resumes: type[ResumeEstimate] = ResumeEstimate,
) -> dict[str, float]:
    """Run a trace and return its figures. Tokens are given as shares of what an infinite cache would serve.

    Args:
        turns: the trace.
        gigabytes: memory of the cache in GB.
        share: share of the memory for snapshots; the rest holds blocks.
        interval: tokens between the snapshots of long prefills.
        policy: eviction policy.
        resumes: estimate of where conversations go on.
    """
    memory = gigabytes * 1e9
    blocks, snapshots = int(memory * (1 - share) / BLOCK_BYTES), int(memory * share / SNAPSHOT_BYTES)
    simulation = Simulation(blocks, snapshots, interval, policy=policy)
    simulation.tree.registry.resumes = resumes()
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
    for tokens, active in (((50_000, 200_000), 80), ((2_000, 200_000), 250), ((2_000, 8_000), 800)):
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


def study_chats() -> Iterator[Row]:
    """Vary the memory of 60 chats with long answers, some of which leave out the reasoning of earlier turns."""
    config = TraceConfig(160, 60, turns=(10, 40), tokens=(10_000, 120_000), generate=(200, 2_000))
    repeating = list(trace(config))
    leaving = list(without_reasoning(repeating))
    mixed = [(a if a.conversation % 2 else b) for a, b in zip(repeating, leaving, strict=True)]
    loads = {"all": repeating, "half": mixed, "none": leaving}
    for (repeated, turns), gigabytes, resumes in product(loads.items(), (2, 4, 8), (ResumeEstimate, AnswersRepeated)):
        row = simulate(turns, gigabytes, SERVED_SHARE, resumes=resumes)
        yield {"active": config.active, "repeated": repeated, "learns": resumes is ResumeEstimate, **row}


def study_trace(requests: Sequence[Request]) -> Iterator[Row]:
    """Vary the memory and the share of snapshots under the requests of a trace file.

    Rows of one `live` have the same memory in all, so a larger share of snapshots leaves fewer blocks. With unlimited
    slots the snapshots take no memory.
    """
    live, ideal = live_tokens(requests), sum(perfect_hits(requests))
    for factor in LIVE:
        memory = live / factor / BLOCK * BLOCK_BYTES / (1 - SERVED_SHARE)
        cases = (SERVED_SHARE, True), (SERVED_SHARE, False), (2 * SERVED_SHARE, True), (None, True)
        for share, learns in cases:
            blocks = int(memory * (1 - (share or SERVED_SHARE)) / BLOCK_BYTES)
            slots = UNLIMITED if share is None else max(2 * CONCURRENCY, int(memory * share / SNAPSHOT_BYTES))
            simulation = Simulation(blocks, slots, INTERVAL)
            if not learns:
                simulation.tree.registry.resumes = AnswersRepeated()
            simulation.replay(requests)
            yield {
                "requests": len(requests),
                "live": factor,
                "gigabytes": round(memory / 1e9, 3),
                "share": share,
                "slots": "unlimited" if share is None else slots,
                "learns": learns,
                "hit": round(simulation.hit_tokens / ideal, 4),
                "optimal": round(sum(perfect_hits(requests, blocks * BLOCK)) / ideal, 4),
                "lost": round(simulation.lost_tokens / ideal, 4),
                "rejected": simulation.rejected,
            }


def simulate_agents(multiple: int, kind: str, seconds: float, seed: int = 0) -> dict[str, float]:
    """Run agents with pauses for tools, as `benchmarks.prefix_trace agents` does on a server. Return their figures.

    Args:
        multiple: tokens of the agents' conversations in those of the cache.
        kind: hints of the agents, one of `simulated_agents.KINDS`.
        seconds: duration in simulated time.
        seed: seed of the conversations.
    """
    load = Load(agent_lengths(seed), 1.0, seconds, weight=RETAINED)
    simulation = Simulation(AGENT_BLOCKS, AGENT_SNAPSHOTS, INTERVAL)
    SimulatedAgents(simulation, load, kind).run(load.agents(multiple * AGENT_BLOCKS * BLOCK))
    return {
        "hit": round(simulation.hit_tokens / simulation.ideal_tokens, 4),
        "lost": round(simulation.lost_tokens / simulation.ideal_tokens, 4),
        "prompt_tokens": simulation.prompt_tokens,
    }


def study_hints() -> Iterator[Row]:
    """Vary the hints of agents. Two minutes are what `prefix_trace agents` runs; in ten conversations end, too."""
    for seconds, multiple, seed, kind in product((120.0, 600.0), (2, 10), range(3), KINDS):
        row = simulate_agents(multiple, kind, seconds, seed)
        yield {"live": multiple, "seconds": seconds, "seed": seed, "hints": kind, **row}


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
    "chats": study_chats,
}


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--trace", type=Path, help="trace file of the study `trace`, which is left out without one")
    options.add_argument("--requests", type=int, help="only its first N requests")
    args = options.parse_args(argv)
    studies = dict(STUDIES)
    if args.trace is not None:
        try:
            studies["trace"] = partial(study_trace, read(args.trace)[: args.requests])
        except (OSError, ValueError) as error:
            options.error(str(error))
    result = report.Report("prefix_simulation", args, {"share": SHARE, "interval": INTERVAL})
    for name, study in studies.items():
        if not (args.quick and name == "memory"):
            # A dry run simulates the first case of each study.
            result.part(name, partial(islice, study(), 1) if args.dry_run else study)
    columns = [
        "part",
        "active",
        "conversations",
        "tokens",
        "gigabytes",
        "live",
        "share",
        "slots",
        "interval",
        "policy",
        "repeated",
        "learns",
        "seconds",
        "seed",
        "hints",
        "hit",
        "optimal",
        "lost",
    ]
    result.table("share of the hits of an infinite cache", columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
