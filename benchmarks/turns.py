"""Measure time to first token and total time of conversation turns with a cached prefix; ours and SGLang's own.

    python -m benchmarks.turns --server ours,sglang-best,sglang --out OUT/turns.jsonl --seconds 540
    python -m benchmarks.turns --server ours --loads 20000+200x1,20000+200x8 --cold 8192,65536 --decode 1,16,64 --out F
    python -m benchmarks.turns --server ours,sglang --tier host --loads 20000+200x1,20000+200x8 --out F

Load 20000+200x8: eight conversations of 20,000 tokens send 200 new tokens each at the same moment and get 16 tokens.
A conversation is prefilled once. Each turn appends other random tokens to the same prefix, so no conversation grows.
Lengths are rounded down to whole pages of SGLang (256 tokens) plus 32 tokens, so that both servers hit the same tokens
and compute 32 and the new ones. `cached` counts the turns that hit exactly these tokens; `tier_share` is the share of
hit tokens from the requested tier.

Times are measured by the client over HTTP. A load first runs at least two untimed rounds, and more until a round is
less than 3x faster than the previous one. `slow_rounds` counts timed rounds that took more than 3x the median.

With --tier host the device holds just the largest load. Before each round other conversations fill it, which are loaded
from the host themselves. SGLang's host cache hits more with `--flags "--swa-full-tokens-ratio 0.5"`.

Servers run one after the other (benchmarks/configs, dummy weights) with the flags of `benchmarks.serve`, which also
measures cold prompts (--cold) and decode rates (--decode) after the turns. Rows are appended to --out as they come.
Nothing starts after --seconds; skipped loads are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import serve, serve_plan, servers
from benchmarks.environment import environment
from benchmarks.replay import Answer, Client

ANSWER_TOKENS = 16
# SGLang's page, and the tokens of a conversation after its last whole page.
PAGE, REMAINDER = 256, 32
# Longest prompt that fills the device before a round from the host.
FILLER_TOKENS = 131_072
HOST_RATIO, ROUNDS = 4, 9
BEST_FLAGS = "--cuda-graph-backend-prefill breakable --cuda-graph-bs-prefill 64 128 256 384 512 1088 1664 1920"
FLAGS = {
    "ours": "",
    "ours-eager": "--cuda-graph-backend-prefill disabled",
    "sglang": "",
    "sglang-best": BEST_FLAGS,
}
DRY_LOADS = "800+20x1,800+20x2"
LOADS = ",".join(
    f"{tokens}+{new}x{at_once}"
    for tokens, counts in ((20_000, (1, 8, 32)), (100_000, (1, 8)))
    for at_once in counts
    for new in (20, 200, 1000)
)


class Load(NamedTuple):
    """Conversations of `tokens` tokens, of which `at_once` send `new` tokens at the same time."""

    tokens: int
    new: int
    at_once: int

    @classmethod
    def parse(cls, text: str) -> Load:
        found = re.fullmatch(r"(\d+)\+(\d+)x(\d+)", text)
        load = cls(*map(int, found.groups())) if found else None
        if load is None or load.tokens < PAGE + REMAINDER or load.new < 1 or load.at_once < 1:
            raise argparse.ArgumentTypeError(
                f"load {text}: expected TOKENS+NEWxCOUNT with at least {PAGE + REMAINDER}+1x1, as in 20000+200x8"
            )
        return load

    def __str__(self) -> str:
        return f"{self.tokens}+{self.new}x{self.at_once}"

    @property
    def hit(self) -> int:
        """Tokens that a turn hits: whole pages of SGLang."""
        return (self.tokens - REMAINDER) // PAGE * PAGE

    @property
    def room(self) -> int:
        """Device tokens that the turns need, including partial pages."""
        return self.at_once * (self.hit + REMAINDER + self.new + ANSWER_TOKENS + 2 * PAGE)


class OutOfTime(Exception):
    """The time limit of --seconds is reached."""


def together(asks: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Send requests at the same moment, each from its own thread. Return the answers."""
    start = threading.Barrier(len(asks), timeout=60)

    def ask(one: Callable[[], Answer]) -> Answer:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(ask, asks))


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, p95, minimum and maximum in milliseconds."""
    times = sorted(1e3 * value for value in seconds)

    def at(share: float) -> float:
        return round(times[min(len(times) - 1, int(share * len(times)))], 2)

    return {"p50": round(statistics.median(times), 2), "p95": at(0.95), "low": at(0), "high": at(1)}


@dataclass
class Conversations:
    """Conversations in the cache of a server, and their turns.

    Args:
        client: client of the server.
        prompt: returns the given number of random tokens, different ones at each call.
        device_tokens: tokens that the device holds if turns are to hit the host, 0 to hit the device.
        rounds: timed rounds; a load of one conversation gets three times as many.
        deadline: time of `time.monotonic` after which nothing starts.
    """

    client: Client
    prompt: Callable[[int], list[int]]
    device_tokens: int = 0
    rounds: int = ROUNDS
    deadline: float = math.inf
    _prefixes: dict[int, list[array[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tier = "host" if self.device_tokens else "device"
        count = math.ceil(self.device_tokens / FILLER_TOKENS)
        self._fillers = [self._prefilled(self.device_tokens // count - 2 * PAGE) for _ in range(count)]

    def measure(self, load: Load) -> dict[str, Any]:
        """Return the row of a load. At the deadline it has fewer turns.

        Raises:
            OutOfTime: no timed round was possible.
        """
        seconds = [self._timed_round(load)[0] for _ in range(2)]
        while 3 * seconds[-1] < seconds[-2]:
            seconds.append(self._timed_round(load)[0])
        timed: list[tuple[float, list[Answer]]] = []
        wanted = self.rounds * (3 if load.at_once == 1 else 1)
        while len(timed) < wanted and not (timed and time.monotonic() > self.deadline):
            timed.append(self._timed_round(load))
        median = statistics.median(spent for spent, _ in timed)
        row = self._summary(load, [answer for _, answers in timed for answer in answers])
        return row | {"warm_rounds": len(seconds), "slow_rounds": sum(spent > 3 * median for spent, _ in timed)}

    def _summary(self, load: Load, turns: list[Answer]) -> dict[str, Any]:
        cached = [turn.cached for turn in turns]
        expected = sum(count == load.hit for count in cached)
        return {
            "measure": "turn",
            "load": str(load),
            **load._asdict(),
            "prompt_tokens": load.hit + REMAINDER + load.new,
            "tier": self.tier,
            "turns": len(turns),
            "first_token_ms": spread([turn.first_token_s for turn in turns]),
            "turn_ms": spread([turn.total_s for turn in turns]),
            "cached": {"expected": load.hit, "turns": expected, "low": min(cached), "high": max(cached)},
            "tier_share": round(sum(turn.of_tiers[self.tier] for turn in turns) / max(1, sum(cached)), 4),
        }

    def _timed_round(self, load: Load) -> tuple[float, list[Answer]]:
        """Run one turn of each conversation of a load. Return the seconds and the answers."""
        prefixes = self._prefixes.setdefault(load.tokens, [])
        while len(prefixes) < load.at_once:
            prefixes.append(self._prefilled(load.hit + REMAINDER))
        self._check_time()
        if self._fillers:
            together([self.client.prepared(filler, ANSWER_TOKENS) for filler in self._fillers])
        prompts = [prefix + array("i", self.prompt(load.new)) for prefix in prefixes[: load.at_once]]
        asks = [self.client.prepared(prompt, ANSWER_TOKENS) for prompt in prompts]
        begin = time.perf_counter()
        answers = together(asks)
        return time.perf_counter() - begin, answers

    def _prefilled(self, tokens: int) -> array[int]:
        self._check_time()
        made = array("i", self.prompt(tokens))
        self.client.generate(made, 1)
        return made

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def flags_of(subject: str, args: argparse.Namespace) -> str:
    """Return a server's flags in addition to those of `serve_plan`. --flags come last, so that they win."""
    found = FLAGS[subject]
    if args.tier == "host":
        room = math.ceil(max(load.room for load in args.loads) / PAGE) * PAGE
        requests = max(2, *(load.at_once for load in args.loads))
        found += f" --max-total-tokens {room} --max-running-requests {requests}"
        found += f" --enable-hierarchical-cache --hicache-ratio {HOST_RATIO}"
    return f"{found} {args.flags}".strip()


def measure(args: argparse.Namespace, subject: str, deadline: float) -> Generator[dict[str, Any], None, None]:
    """Yield the rows of one server: its start, the loads, cold prompts, decode rates.

    Args:
        args: the command line.
        subject: name of the server.
        deadline: time of `time.monotonic` after which nothing starts.

    Raises:
        OutOfTime: the deadline has passed.
    """
    if time.monotonic() > deadline:
        raise OutOfTime
    asked = argparse.Namespace(**{**vars(args), "flags": flags_of(subject, args)})
    bench = serve.Bench(asked)
    bench.plan = replace(bench.plan, ttft={tokens: 5 if tokens <= 8192 else 3 for tokens in args.cold})
    server = bench.server("ours" if subject.startswith("ours") else "in-tree", subject, args.memory)
    with servers.running(server, min(args.start_timeout, max(1, deadline - time.monotonic()))):
        tokens = servers.max_total_tokens(server.url)
        about = {"subject": subject, "flags": asked.flags, "max_total_num_tokens": tokens}
        about |= {"start_s": round(server.start_seconds, 1), **servers.sizes(server.lines())}
        yield {"measure": "tokens in the cache", "value": tokens, "server": about}
        from_host = tokens if args.tier == "host" else 0
        held = Conversations(Client(server.url), bench.prompt, from_host, rounds=args.rounds, deadline=deadline)
        for load in args.loads:
            yield {**held.measure(load), "server": about}
        for name, wanted, rows in (("ttft", args.cold, bench.ttft), ("decode", args.decode, bench.decode)):
            if wanted:
                bench.warm_up(server, [name])
                for row in rows(server):
                    yield {**row, "server": about}
                    if time.monotonic() > deadline:
                        raise OutOfTime


def line(row: dict[str, Any]) -> str:
    """Return a row as text for the screen."""
    begin = f"{row['server']['subject']:12}"
    if row["measure"] != "turn":
        figures = [f"{name} {row[name]:.6g}" for name in ("value", "low", "high", "step_ms") if row.get(name)]
        return " ".join([begin, row["measure"], str(row.get("at", "")), *figures])
    first, turn, cached = row["first_token_ms"], row["turn_ms"], row["cached"]
    hits = f"{cached['turns']} of {row['turns']} found {cached['expected']}, {row['tier_share']:.0%} {row['tier']}"
    return (
        f"{begin} {row['load']:>15} first token {first['p50']:8.1f} (p95 {first['p95']:8.1f}) "
        f"turn {turn['p50']:8.1f} (p95 {turn['p95']:8.1f}) ms, {hits}, {row['slow_rounds']} slow rounds"
    )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--server", default="ours,sglang-best,sglang", help=f"some of {', '.join(FLAGS)}")
    options.add_argument("--loads", help=f"TOKENS+NEWxCOUNT, separated by commas (default: {LOADS})")
    options.add_argument("--tier", choices=("device", "host"), default="device", help="where prefixes hit")
    options.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds of a load (%(default)s)")
    options.add_argument("--cold", default="", help="tokens of cold prompts to measure too, as in 8192,65536")
    options.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this time")
    options.add_argument("--flags", default="", help="more flags for all servers")
    options.add_argument("--out", type=Path, required=True, dest="file", help="JSON lines, appended; logs beside it")
    options.add_argument("--dry-run", action="store_true", help="a small model and small loads on the CPU, ours only")
    serve_plan.add_options(options)
    options.set_defaults(quick=False, servers="ours", measure="decode,ttft")
    args = options.parse_args(argv)
    args.server = ["ours"] if args.dry_run else args.server.split(",")
    if unknown := set(args.server) - {*FLAGS}:
        options.error(f"--server {min(unknown)}: expected some of {', '.join(FLAGS)}")
    try:
        loads = args.loads if args.loads is not None else DRY_LOADS if args.dry_run else LOADS
        args.loads = [Load.parse(text) for text in loads.split(",") if text]
        args.cold = [int(text) for text in args.cold.split(",") if text]
    except (argparse.ArgumentTypeError, ValueError) as error:
        options.error(str(error))
    if args.tier == "host" and not args.loads:
        options.error("--tier host without --loads: expected at least one load")
    args.out = args.file.parent
    serve_plan.resolve(options, args)
    return args


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    args = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit through the context managers to stop the server
    settings = {"model": args.model, "tier": args.tier, "dry_run": args.dry_run}
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for subject in args.server:
        common = {"environment": environment(), "settings": settings}
        measured = 0
        try:
            with contextlib.closing(measure(args, subject, began + args.seconds)) as rows:
                for row in rows:
                    measured += row["measure"] == "turn"
                    print(line(row), flush=True)
                    with args.file.open("a") as file:
                        file.write(json.dumps({**row, **common}) + "\n")
        except OutOfTime:
            left = ", ".join(map(str, args.loads[measured:])) or "cold prompts or decode rates"
            print(f"{subject}: --seconds {args.seconds:.0f} is over, skipped: {left}", flush=True)
        except (RuntimeError, OSError) as error:
            failed += 1
            print(f"{subject} failed: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
