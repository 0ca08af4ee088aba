"""Time to the first token, and of whole turns, of conversations whose prefix is found; ours and SGLang's own.

    python -m benchmarks.turns --server ours,sglang-best,sglang --out OUT/turns.jsonl --seconds 540
    python -m benchmarks.turns --server ours --loads 20000+200x1,20000+200x8 --cold 8192,65536 --decode 1,16,64 --out F
    python -m benchmarks.turns --server ours,sglang --tier host --loads 20000+200x1,20000+200x8 --out F

Load 20000+200x8: eight conversations of 20,000 tokens send 200 new tokens each at the same moment and get 16 tokens.
A conversation is prefilled once. Each turn appends other random tokens to the same prefix, so no conversation grows.
Lengths are rounded down to whole pages of SGLang (256 tokens) and 32 tokens, so that both servers find the same tokens
and compute 32 and the new ones. `cached` says how many turns found exactly that, `tier_share` how much of it was on the
tier asked for.

Times are the client's, over HTTP. A load first runs in at least two untimed rounds, and in more until a round is less
than 3x faster than the one before. `slow_rounds` counts timed rounds that took more than 3x the median one.

--tier host: the device holds the largest load and no more, and before each round other conversations fill it, which are
loaded from the host themselves. SGLang's host cache finds more with `--flags "--swa-full-tokens-ratio 0.5"`.

Servers run one after the other (benchmarks/configs, dummy weights) with the flags of `benchmarks.serve`, which also
measures cold prompts (--cold) and decode rates (--decode), behind the turns. Rows are appended to --out as they come.
Nothing begins after --seconds; what is left out is named.
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
PAGE, REMAINDER = 256, 32
"""SGLang's page, and the tokens behind the last whole page of a conversation."""
FILLER_TOKENS = 131_072
"""The longest prompt that fills the device in front of a round from the host."""
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
        """Tokens that a turn finds: the whole pages of SGLang."""
        return (self.tokens - REMAINDER) // PAGE * PAGE

    @property
    def room(self) -> int:
        """Tokens of the device that its turns need, with pages that are not full."""
        return self.at_once * (self.hit + REMAINDER + self.new + ANSWER_TOKENS + 2 * PAGE)


class OutOfTime(Exception):
    """The time of --seconds is over."""


def together(asks: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Send requests at the same moment, each from a thread of its own."""
    start = threading.Barrier(len(asks), timeout=60)

    def ask(one: Callable[[], Answer]) -> Answer:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(ask, asks))


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds of seconds."""
    times = sorted(1e3 * value for value in seconds)

    def at(share: float) -> float:
        return round(times[min(len(times) - 1, int(share * len(times)))], 2)

    return {"p50": round(statistics.median(times), 2), "p95": at(0.95), "low": at(0), "high": at(1)}


@dataclass
class Conversations:
    """Conversations that a server has in its cache, and their turns.

    Args:
        client: of the server.
        prompt: makes that many random tokens, other ones at each call.
        device_tokens: tokens that the device has room for if turns are to come from the host, 0 from the device.
        rounds: that are timed; three times as many of one conversation alone.
        deadline: of `time.monotonic`; nothing begins behind it.
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
        """Return the row of a load. Raises OutOfTime without a timed round; after one, the row has fewer turns."""
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
        """Seconds, and the answers, of one turn of each conversation of a load."""
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
    """Flags of a server beside those of `serve_plan`; of a flag given twice the last counts, so --flags come last."""
    found = args.best_flags if subject == "sglang-best" else FLAGS[subject]
    if args.tier == "host":
        room = math.ceil(max(load.room for load in args.loads) / PAGE) * PAGE
        requests = max(2, *(load.at_once for load in args.loads))
        found += f" --max-total-tokens {room} --max-running-requests {requests}"
        found += f" --enable-hierarchical-cache --hicache-ratio {HOST_RATIO}"
    return f"{found} {args.flags}".strip()


def measure(args: argparse.Namespace, subject: str, deadline: float) -> Generator[dict[str, Any], None, None]:
    """Rows of one server: its start, the loads, cold prompts, decode rates. Raises OutOfTime."""
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
    """A row on the screen."""
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
    options.add_argument("--loads", help=f"TOKENS+NEWxCOUNT, separated by commas; default: {LOADS}")
    options.add_argument("--tier", choices=("device", "host"), default="device", help="where prefixes are found")
    options.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds of a load (%(default)s)")
    options.add_argument("--cold", default="", help="also tokens of cold prompts, as in 8192,65536")
    options.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this time")
    options.add_argument("--best-flags", default=BEST_FLAGS, help="of sglang-best (%(default)s)")
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
        options.error("--tier host without --loads: expected the loads that are to come from the host")
    args.out = args.file.parent
    serve_plan.resolve(options, args)
    return args


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    args = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # let the server be stopped
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
            print(f"{subject}: {args.seconds:.0f} s are over, left out: {left}", flush=True)
        except (RuntimeError, OSError) as error:
            failed += 1
            print(f"{subject} failed: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
