"""Measure hit rate and time to first token of a server under traces of agent conversations.

    python -m benchmarks.prefix_trace trace --active 30 120 --visits 12 5 --url http://127.0.0.1:30000
    python -m benchmarks.prefix_trace alternate            # two conversations of 400,000 tokens that alternate
    python -m benchmarks.prefix_trace revisit              # 100 conversations of 20,000 tokens, visited three times
    python -m benchmarks.prefix_trace sweep                # hits and seconds per turn, 1 to 132 conversations of 10,000

`--serve ours` or `--serve in-tree` starts a server of benchmarks/configs/flashshape (dummy weights) with `--flags
"..."`, such as "--enable-hierarchical-cache --hicache-ratio 4 --max-total-tokens 1000000". `--url` uses a running
server. The cache is flushed first. Hit rates are weighted by tokens and relative to an infinite cache. `device_tokens`,
`host_tokens` and `storage_tokens` split the hits by tier. With `--enable-metrics` among the flags each row also has the
bytes that the host cache had copied by then.

`sweep` takes about three minutes on an H200 after the start of the server. Its sizes are chosen for this device cache:

    python -m benchmarks.prefix_trace sweep --serve ours --output benchmarks/results/tier_sweep.jsonl \\
        --flags "--context-length 65536 --max-total-tokens 65536 --max-running-requests 4 --enable-metrics \\
            --enable-hierarchical-cache --hicache-ratio 8"

With `--serve in-tree`, `--hicache-ratio 4` gives the same number of host bytes, because SGLang's tokens are more than
twice as large. `benchmarks.plots` draws the file once it has rows of both servers. `--max-running-requests` is small
because running requests hold snapshots: 256 requests would make a device cache of 65,536 tokens, and with it the host
cache, nine times as large.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.agent_trace import Turn, growing, load
from benchmarks.environment import ROOT, environment
from benchmarks.replay import TIERS, Client, Replay, Served

# Tokens of a later visit.
NEW_TOKENS = {"append": 200, "generate": 16}
MODEL = ROOT / "benchmarks" / "configs" / "flashshape"
START_SECONDS = 240
NOT_OF_THE_LOAD = ("output", "url", "scenario", "serve", "flags", "log")
# (name, tokens in live conversations, figures)
Parts = Iterator[tuple[str, int, dict[str, Any]]]


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """Return the token-weighted hit rate and the distribution of the times to first token."""
    ideal = sum(s.ideal for s in served)
    cached = sum(s.cached for s in served)
    times = sorted(s.first_token_s for s in served)

    def at(share: float) -> float:
        return round(times[min(len(times) - 1, int(share * len(times)))], 4)

    return {
        "turns": len(served),
        "prompt_tokens": sum(s.prompt for s in served),
        "cached_tokens": cached,
        **{f"{tier}_tokens": sum(s.of_tiers[tier] for s in served) for tier in TIERS},
        "ideal_tokens": ideal,
        "hit_of_ideal": round(cached / ideal, 4) if ideal else None,
        "first_token_s": {"mean": round(statistics.fmean(times), 4), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)},
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


def report(part: str, row: dict[str, Any]) -> None:
    print(
        f"{part}, {row['live_tokens'] / 1e6:.2f} M tokens: {row['cached_tokens']} of {row['ideal_tokens']} tokens hit "
        f"({row['hit_of_ideal']}), first token {row['first_token_s']}, turn {row['turn_s_p50']} s "
        f"(mean {row['turn_s_mean']})",
        file=sys.stderr,
        flush=True,
    )


SCENARIOS = {
    "trace": run_trace,
    "alternate": run_rounds,
    "revisit": run_rounds,
    "sweep": run_sweep,
}
DEFAULTS = {
    "alternate": {"conversations": 2, "tokens": 400_000, "concurrency": 1},
    "revisit": {"conversations": 100, "tokens": 20_000, "concurrency": 8},
    "sweep": {"tokens": 10_000, "concurrency": 1, "steps": [1, 2, 3, 6, 13, 25, 50, 75, 132]},
    "trace": {"concurrency": 16},
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("scenario", choices=SCENARIOS)
    p.add_argument("--url", default="http://127.0.0.1:30000", help="a running server")
    p.add_argument("--serve", choices=("ours", "in-tree"), help="start a server instead")
    p.add_argument("--flags", default="", help="more flags of the server that --serve starts")
    p.add_argument("--log", type=Path, default=Path("prefix_server.log"), help="log of the server that --serve starts")
    p.add_argument("--vocab", type=int, default=4_000, help="token ids are below this")
    p.add_argument("--concurrency", type=int, help="concurrent requests")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--conversations", type=int)
    p.add_argument("--tokens", type=int, help="length of a conversation in the fixed scenarios")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument(
        "--active", type=int, nargs="+", default=[100], help="concurrent conversations, one load each (trace)"
    )
    p.add_argument(
        "--visits", type=int, nargs="+", default=[5], help="turns per active conversation, one load each (trace)"
    )
    p.add_argument("--shortest", type=int, default=2_000, help="final length of the shortest conversation (trace)")
    p.add_argument("--longest", type=int, default=200_000)
    p.add_argument("--generate", type=int, default=64, help="longest answer (trace)")
    p.add_argument("--steps", type=int, nargs="+", help="ascending numbers of conversations (sweep)")
    p.add_argument("--output", type=Path, help="append the results to this JSON-lines file")
    return p


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the URL of the server, and its cache sizes from the log if this starts it."""
    if args.serve is None:
        yield args.url, {}
        return
    flags = ["--load-format", "dummy", *shlex.split(args.flags)]
    argv, variables = servers.command(MODEL, flags, args.serve == "ours", cpu=False)
    with servers.running(servers.Server(args.serve, argv, variables, args.log), START_SECONDS) as server:
        yield server.url, servers.sizes(server.lines())


def warm_up(client: Client, vocab: int) -> None:
    """Send one prompt of each batch size. SGLang's matrix kernels compile when a size first occurs."""
    for tokens in (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192):
        client.generate(array("i", servers.random_prompt(tokens, vocab, seed=tokens)), 2)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for name, value in DEFAULTS[args.scenario].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.steps and (args.steps[0] < 1 or any(a >= b for a, b in pairwise(args.steps))):
        parser().error(f"--steps is {args.steps}; expected numbers of conversations in strictly ascending order")
    with serving(args) as (url, sizes):
        client = Client(url)
        if args.serve:
            warm_up(client, args.vocab)
        replay = Replay(client, concurrency=args.concurrency, vocab=args.vocab, seed=args.seed)
        replay.restart()
        common = {
            "scenario": args.scenario,
            "server": {
                "subject": args.serve,
                "flags": args.flags,
                **sizes,
                "max_total_num_tokens": servers.max_total_tokens(url),
            },
            "arguments": {k: v for k, v in vars(args).items() if k not in NOT_OF_THE_LOAD},
            "environment": environment(),
        }
        begin = time.perf_counter()
        for part, tokens, row in SCENARIOS[args.scenario](replay, args):
            row = {"part": part, "live_tokens": tokens, **row, "seconds": round(time.perf_counter() - begin, 1)}
            if copies := servers.host_copies(url):
                row["host_copies"] = copies
            report(part, row)
            # Write each part at once, so that an interrupted run keeps its results.
            line = json.dumps({**row, **common})
            print(line)
            if args.output:
                with args.output.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
