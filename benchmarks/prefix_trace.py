"""Measure hit rate and time to first token of a server under traces of agent conversations.

    python -m benchmarks.prefix_trace trace --active 30 120 --visits 12 5 --url http://127.0.0.1:30000
    python -m benchmarks.prefix_trace alternate            # two conversations of 400,000 tokens that alternate
    python -m benchmarks.prefix_trace revisit              # 100 conversations of 20,000 tokens, visited three times
    python -m benchmarks.prefix_trace agents               # agents with pauses for tools, with and without hints
    python -m benchmarks.prefix_trace sweep                # hits and seconds per turn, 1 to 132 conversations of 10,000

`--servers ours,in-tree` starts servers of benchmarks/configs/flashshape (dummy weights) with `--flags "..."`, such as
"--enable-hierarchical-cache --hicache-ratio 4 --max-total-tokens 1000000". `--url` uses a running server. The cache is
flushed first. Hit rates are weighted by tokens and relative to an infinite cache. `device_tokens`,
`host_tokens` and `storage_tokens` split the hits by tier. With `--enable-metrics` among the flags each row also has the
bytes that the host cache had copied by then.

`sweep` takes about three minutes on an H200 after the start of the server. Its sizes are chosen for this device cache:

    python -m benchmarks.prefix_trace sweep --servers ours --out benchmarks/results/tier_sweep.jsonl \\
        --flags "--context-length 65280 --max-total-tokens 65536 --max-running-requests 4 --enable-metrics \\
            --enable-hierarchical-cache --hicache-ratio 8"

`agents` takes 13 minutes after the start of the server, two for each kind of hints (`--multiples 2` half of it):

    python -m benchmarks.prefix_trace agents --servers ours --out benchmarks/results/agents.jsonl \\
        --flags "--context-length 65280 --max-total-tokens 65536 --max-running-requests 16 --enable-metrics"

With `--servers in-tree`, `--hicache-ratio 4` gives equal host bytes, because the GPU has as many tokens and SGLang's
are more than twice as large. With equal memory on the GPU the ratios would have to be equal: compare `host_gb` of the
rows. `--max-running-requests` is small because running requests hold snapshots: 256 requests would make a device cache
of 65,536 tokens, and with it the host cache, nine times as large.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import command_line, servers
from benchmarks.agent_trace import Turn, growing, load
from benchmarks.bench import Bench, append_rows
from benchmarks.client import TIERS, Client
from benchmarks.replay import Replay, Served
from benchmarks.report import quantile
from benchmarks.tool_pauses import KINDS, NO_HINTS, Agents, Load, agent_lengths

# Tokens of a later visit.
NEW_TOKENS = {"append": 200, "generate": 16}
LOAD = ("concurrency", "seed", "conversations", "tokens", "rounds", "active", "visits", "shortest", "longest")
LOAD += ("generate", "steps", "vocab", "model", "starts", "dry_run")
LOAD += ("multiples", "agent_seconds", "most_agents", "speed", "weight")
# Agents that warm up a server hardly pause.
WARM_UP_SPEED, WARM_UP_SECONDS = 100.0, 15.0
# Lengths of single prompts with which a server that was just started is warmed up.
WARM_UP = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# (name, tokens in live conversations, figures)
Parts = Iterator[tuple[str, int, dict[str, Any]]]


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """Return the token-weighted hit rate and the distribution of the times to first token."""
    ideal = sum(s.ideal for s in served)
    cached = sum(s.cached for s in served)
    times = sorted(s.first_token_s for s in served)

    return {
        "turns": len(served),
        "prompt_tokens": sum(s.prompt for s in served),
        "cached_tokens": cached,
        **{f"{tier}_tokens": sum(s.of_tiers[tier] for s in served) for tier in TIERS},
        "ideal_tokens": ideal,
        "hit_of_ideal": round(cached / ideal, 4) if ideal else None,
        "first_token_s": {
            "mean": round(statistics.fmean(times), 4),
            **{f"p{percent}": round(quantile(times, percent / 100), 4) for percent in (50, 90, 99)},
        },
        "turn_s_p50": round(statistics.median(s.total_s for s in served), 4),
        "turn_s_mean": round(statistics.fmean(s.total_s for s in served), 4),
    }


def run_trace(replay: Replay, args: argparse.Namespace) -> Parts:
    """Run one load after the other, each on an empty cache.

    Conversations start midway, so their first visits miss, in an infinite cache as well.
    """
    for active, visits in zip(args.active, args.visits, strict=True):
        lengths = args.shortest, args.longest
        turns = load(active, visits, seed=args.seed, tokens=lengths, generate=(8, args.generate))
        replay.restart()
        yield f"{active} conversations", live_tokens(turns, active), summary(replay.run(turns))


def live_tokens(turns: Sequence[Turn], active: int) -> int:
    """Return the tokens of the `active` conversations that came last."""
    ends: dict[int, int] = {}
    for turn in reversed(turns):
        if len(ends) == active:
            break
        ends.setdefault(turn.conversation, turn.end)
    return sum(ends.values())


def run_rounds(replay: Replay, args: argparse.Namespace) -> Parts:
    """Visit every conversation in round-robin order, `--rounds` times. The first round fills the cache."""
    for number, turns in growing([(args.conversations, args.rounds - 1)], args.tokens, **NEW_TOKENS):
        yield f"round {number + 1}", sum(turn.end for turn in turns), summary(replay.run(turns))


def run_growing(replay: Replay, tokens: int, steps: Sequence[int]) -> Parts:
    """Grow the number of conversations to each of `steps` without emptying the cache, and visit all after each.

    Args:
        replay: sends the turns.
        tokens: length of a conversation.
        steps: ascending numbers of conversations.
    """
    # First visits only fill the cache: one answer token saves the decode steps, a quarter of the time.
    for visit, turns in growing([(count, 1) for count in steps], tokens, **NEW_TOKENS, first=1):
        served = replay.run(turns)
        if visit:
            yield f"{len(turns)} conversations", sum(turn.end for turn in turns), summary(served)


def run_sweep(replay: Replay, args: argparse.Namespace) -> Parts:
    """Try all sizes of `--steps`: 0.16, 0.3, 0.5, 1, 2, 4, 8, 12 and 21 times a device cache of 65,536 tokens.

    One request runs at a time, so the seconds of a turn are those of a single user. With `--concurrency` they include
    waiting for the chunks of others, and running requests take up cache.

    Every size visits each conversation. A sample would measure something else: if only a part of the conversations
    fits, their order decides which ones hit.
    """
    # What SGLang compiles depends on the number of new tokens and the length of their prefix. Both are the same for
    # all conversations at a given visit, so a few conversations warm up all visits and are flushed.
    for _ in run_growing(replay, args.tokens, [args.concurrency] * len(args.steps)):
        pass
    replay.restart()
    yield from run_growing(replay, args.tokens, args.steps)


def run_agents(replay: Replay, args: argparse.Namespace) -> Parts:
    """Run agents with pauses for tools (`benchmarks.tool_pauses`) at multiples of the device cache, with each kind of
    hints, each on an empty cache. Restarting the cache also forgets whose hints came true. Before the first kind agents
    run for a while untimed, so that no kernel is compiled in a load."""
    load = Load(agent_lengths(args.seed, (args.shortest, args.longest)), args.speed, args.agent_seconds, args.weight)
    before = servers.metrics(args.server_url)
    for multiple in args.multiples:
        tokens = multiple * args.device_tokens
        agents = min(load.agents(tokens), args.most_agents)
        warm_up = dataclasses.replace(load, speed=WARM_UP_SPEED, seconds=min(WARM_UP_SECONDS, load.seconds))
        Agents(replay, warm_up, NO_HINTS).run(agents)
        for kind in KINDS:
            replay.restart()
            row = summary(Agents(replay, load, kind).run(agents))
            after = servers.metrics(args.server_url)
            effects = {name: value - before.get(name, 0) for name, value in after.items() if name.startswith("hints_")}
            before = after
            yield f"{multiple} x, {kind}", tokens, {**row, "agents": agents, "hints": kind, "effects": effects}


def report(row: dict[str, Any]) -> None:
    hits = f"{row['cached_tokens']} of {row['ideal_tokens']} tokens hit ({row['hit_of_ideal']})"
    times = f"first token {row['first_token_s']}, turn {row['turn_s_p50']} s (mean {row['turn_s_mean']})"
    print(f"{row['part']}, {row['live_tokens'] / 1e6:.2f} M tokens: {hits}, {times}", file=sys.stderr, flush=True)


SCENARIOS = {
    "trace": run_trace,
    "alternate": run_rounds,
    "revisit": run_rounds,
    "sweep": run_sweep,
    "agents": run_agents,
}
DEFAULTS = {
    "alternate": {"conversations": 2, "tokens": 400_000, "concurrency": 1},
    "revisit": {"conversations": 100, "tokens": 20_000, "concurrency": 8},
    "sweep": {"tokens": 10_000, "concurrency": 1, "steps": [1, 2, 3, 6, 13, 25, 50, 75, 132]},
    "trace": {"concurrency": 16, "active": [100], "visits": [5], "longest": 200_000},
    "agents": {"concurrency": 16, "longest": 12_000, "agent_seconds": 120.0, "most_agents": 512, "multiples": [2, 10]},
}
DRY = {
    "alternate": {"conversations": 2, "tokens": 300, "concurrency": 1},
    "revisit": {"conversations": 3, "tokens": 300, "concurrency": 2},
    "sweep": {"tokens": 300, "concurrency": 1, "steps": [1, 3]},
    "trace": {"concurrency": 2, "active": [2], "visits": [2], "longest": 3_000},
    "agents": {"concurrency": 2, "longest": 3_000, "agent_seconds": 4.0, "most_agents": 2, "multiples": [2]},
}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    options = command_line.parser(__doc__)
    options.add_argument("scenario", choices=SCENARIOS)
    options.add_argument("--out", "--output", type=Path, help="JSON lines, appended; logs beside it")
    options.add_argument("--concurrency", type=int, help="concurrent requests")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--conversations", type=int)
    options.add_argument("--tokens", type=int, help="length of a conversation in the fixed scenarios")
    options.add_argument("--rounds", type=int, default=3)
    loads = "one load each (trace)"
    options.add_argument("--active", type=int, nargs="+", help=f"concurrent conversations, {loads}")
    options.add_argument("--visits", type=int, nargs="+", help=f"turns per active conversation, {loads}")
    options.add_argument("--shortest", type=int, default=2_000, help="length of the shortest conversation")
    options.add_argument("--longest", type=int, help="length of the longest conversation")
    options.add_argument("--generate", type=int, default=64, help="longest answer (trace)")
    options.add_argument("--steps", type=int, nargs="+", help="ascending numbers of conversations (sweep)")
    options.add_argument("--multiples", type=int, nargs="+", help="tokens of agents in device caches, one load each")
    options.add_argument("--agent-seconds", type=float, help="duration of a load of agents")
    options.add_argument("--most-agents", type=int, help="largest number of agents")
    options.add_argument("--speed", type=float, default=1.0, help="pauses for tools are shorter by it (agents)")
    options.add_argument("--weight", type=int, default=2, help="weight of retained conversations (agents)")
    command_line.add_servers(options, "ours,in-tree")
    command_line.add_url(options)
    options.set_defaults(quick=False)
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    for name, value in (DRY if args.dry_run else DEFAULTS)[args.scenario].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.steps and (args.steps[0] < 1 or any(a >= b for a, b in pairwise(args.steps))):
        options.error(f"--steps is {args.steps}; expected numbers of conversations in strictly ascending order")
    if args.scenario == "trace" and len(args.active) != len(args.visits):
        options.error(f"--active {args.active} --visits {args.visits}: expected as many visits as loads")
    return args


def measure(args: argparse.Namespace, subject: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of the scenario.

    Args:
        args: the command line.
        subject: name of the server.
        number: number of the start.

    Raises:
        OutOfTime: the time limit is reached.
    """
    bench = Bench(args, args.out.parent if args.out else Path())
    base = ["--context-length", "16384"] if args.dry_run else ["--mem-fraction-static", str(args.memory)]
    with bench.served(args.url, subject, f"prefix-{number}", base) as (server, facts):
        if isinstance(server, servers.Server):
            bench.warm_up(server, prompts=WARM_UP[:8] if args.dry_run else WARM_UP)
        vocab = args.vocab if args.url else min(args.vocab, bench.vocab)
        replay = Replay(Client(server.url), concurrency=args.concurrency, vocab=vocab, seed=args.seed)
        replay.restart()
        args.device_tokens, args.server_url = facts["max_total_num_tokens"], server.url
        begin = time.perf_counter()
        for part, tokens, row in SCENARIOS[args.scenario](replay, args):
            row = {"part": part, "live_tokens": tokens, **row, "seconds": round(time.perf_counter() - begin, 1)}
            if copies := servers.host_copies(server.url):
                row["host_copies"] = copies
            yield {**row, "scenario": args.scenario, "server": facts}
            bench.check_time()


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)

    def show(row: dict[str, Any], line: str) -> None:
        report(row)
        print(line, flush=True)

    return append_rows(args, partial(measure, args), show, arguments={name: getattr(args, name) for name in LOAD})


if __name__ == "__main__":
    raise SystemExit(main())
