"""Replay a trace file in Mooncake's format and compare hits with a perfect cache; ours and SGLang's own.

    python -m benchmarks.trace TRACE.jsonl.xz --servers ours,sglang-best --closed 8,64 --out OUT/trace.jsonl
    python -m benchmarks.trace TRACE.jsonl.xz --url http://127.0.0.1:30000 --vocab 129280 --open 1,0.5 --out F
    python -m benchmarks.agent_trace --agents 32 --out agents.jsonl   # a seeded agent load in the same format

--closed: N clients, each of which starts the next session when its last one has ended. --open: sessions begin at the
trace's time stamps times a factor; 0.5 is twice the load. In both, the next request of a session follows the answer
after its `delay`, which open loop multiplies by the factor. A line without `session_id` is a session of its own.

Before the first load, prompts of the trace's lengths with other tokens run until their times settle, as many at once as
the largest load has and the server runs. The cache is flushed before each load. Each load appends a row to --out.
FILE.requests.jsonl beside it gets one line per request.

Ideal hits are those of an unbounded cache, and of optimal caches that know the future (Belady's, see `perfect_hits`)
and hold the tokens of the device, those of device and host together, or --capacity tokens. The host's are its bytes
over the bytes of a token. `live_tokens` are those that the unbounded cache holds for later requests, at most at a time.
Servers with host caches are compared at equal `host_gb`, 10^9 bytes by their logs.

Misses relative to the unbounded cache:

- `in_flight`: another request was computing the tokens when this one was sent.
- `partial_block`: the last tokens of the prefix, which fill no block of 128 tokens.
- `no_snapshot`: blocks were cached without a snapshot to resume from (from this package's metrics).
- `other`: the rest, which was evicted.

Nothing is sent after --seconds, and nothing of a load after --each seconds of it. In the first --fill seconds of a load
its conversations begin, with prompts that no cache has: requests sent then are in no figure, but fill the caches, also
the perfect ones. Both take one number, or one per load. Rates are those of the answers that end between --fill and the
last sending. `requests` is the number of requests sent since --fill, `of` the number in the trace.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count as counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import command_line, servers
from benchmarks.bench import Bench, append_rows, settle
from benchmarks.client import Client
from benchmarks.report import spread
from benchmarks.trace_file import HASH_BLOCK, Request, computed_hits, live_tokens, load, perfect_hits
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.launch.command import flag_value

WARM_REQUESTS, WARM_OUTPUT, WARM_ROUNDS = 48, 8, 5
# SGLang's default of --hicache-ratio.
HICACHE_RATIO = 2.0
# Clients that warm a server up for an open loop, which may send any number of requests at once.
OPEN_CLIENTS = 64
WARM_SEED = 1_000_000


@dataclass
class Done:
    """An answered request; times in seconds. `begin`: since the start of the load. `late`: after the trace's time."""

    begin: float
    late: float
    prompt: int
    output: int
    cached: int
    tiers: dict[str, int]
    first_token: float
    total: float
    between_tokens: float
    ideal: int = 0
    in_flight: int = 0
    partial_block: int = 0


class Replayer:
    """Sends a trace's sessions. The first error of any request ends the replay.

    Args:
        client: client of the server.
        vocab: token ids are below this.
        seed: seed of the tokens.
        cap: longest answer in tokens; 0: as in the trace.
        deadline: time of `time.monotonic` after which nothing is sent.
        progress: called after each answer.
    """

    def __init__(
        self,
        client: Client,
        vocab: int,
        seed: int = 0,
        cap: int = 0,
        deadline: float = math.inf,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.client, self.vocab, self.seed, self.cap, self.deadline = client, vocab, seed, cap, deadline
        self.progress = progress or (lambda: None)
        self._lock = threading.Lock()

    def closed(self, requests: Sequence[Request], clients: int) -> list[tuple[Request, Done]]:
        """Replay with `clients` sessions at a time. Return the requests in the order in which they were sent."""
        self._start()
        waiting = iter(sessions(requests))

        def work() -> None:
            while True:
                with self._lock:
                    session = next(waiting, None)
                if session is None or self._over():
                    return
                self._session(session, time.perf_counter() - self._began, 1.0)

        return self._finish([self._thread(work) for _ in range(clients)])

    def open(self, requests: Sequence[Request], factor: float) -> list[tuple[Request, Done]]:
        """Replay by time stamps times `factor`, with one thread per session that has begun."""
        self._start()
        threads = []
        first = min(one.at for one in requests)
        for session in sessions(requests):
            due = factor * (session[0].at - first)
            # Encoding a body takes milliseconds, so threads start early.
            self._sleep_until(due - 1.0)
            if self._over():
                break
            threads.append(self._thread(lambda one=session, at=due: self._session(one, at, factor)))
        return self._finish(threads)

    def _start(self) -> None:
        self._done: list[tuple[Request, Done]] = []
        self._error: BaseException | None = None
        self._began = time.perf_counter()

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = self._error or error

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _finish(self, threads: list[threading.Thread]) -> list[tuple[Request, Done]]:
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return sorted(self._done, key=lambda pair: pair[1].begin)

    def _over(self) -> bool:
        return self._error is not None or time.monotonic() > self.deadline

    def _sleep_until(self, due: float) -> None:
        while (left := due - (time.perf_counter() - self._began)) > 0 and not self._over():
            time.sleep(min(left, 1.0))

    def _session(self, session: list[Request], due: float, factor: float) -> None:
        for request in session:
            due += factor * request.delay
            output = min(request.output, self.cap or request.output)
            send = self.client.prepared(request.prompt(self.vocab, self.seed), output)
            self._sleep_until(due)
            if self._over():
                return
            begin = time.perf_counter() - self._began
            late = begin - due
            answer = send()
            due = time.perf_counter() - self._began
            gap = (answer.total_s - answer.first_token_s) / max(1, output - 1)
            times = answer.first_token_s, answer.total_s, gap
            done = Done(begin, late, request.tokens, output, answer.cached, answer.of_tiers, *times)
            with self._lock:
                self._done.append((request, done))
                self.progress()


def sessions(requests: Sequence[Request]) -> list[list[Request]]:
    """Return the requests by session, sessions in the order of their first requests."""
    found: dict[int, list[Request]] = {}
    for request in requests:
        found.setdefault(request.session, []).append(request)
    return list(found.values())


def warm_up(client: Client, requests: Sequence[Request], clients: int, vocab: int, count: int, most: int) -> int:
    """Run prompts of the trace's lengths until their times settle: first the beginnings of prompts, then the whole
    prompts, which hit.

    Args:
        client: client of the server.
        requests: the trace.
        clients: concurrent requests.
        vocab: token ids are below this.
        count: prompts per round.
        most: largest number of rounds.

    Returns:
        The number of rounds.
    """
    by_length = sorted(requests, key=lambda one: one.tokens)
    chosen = by_length[:: max(1, len(by_length) // count)]
    chosen = [*chosen, by_length[-1]]
    numbers = counter(1)

    def run() -> float:
        begin, seed = time.perf_counter(), WARM_SEED + next(numbers)
        for share in (0.7, 1.0):
            parts = [max(1, math.ceil(share * len(one.ids))) for one in chosen]
            round_ = [
                replace(one, ids=one.ids[:kept], tokens=min(one.tokens, HASH_BLOCK * kept), session=i, delay=0.0)
                for i, (one, kept) in enumerate(zip(chosen, parts, strict=True))
            ]
            Replayer(client, vocab, seed, WARM_OUTPUT).closed(round_, clients)
        return time.perf_counter() - begin

    return settle(run, 1.5, most)


def summary(
    pairs: Sequence[tuple[Request, Done]],
    capacities: Sequence[int],
    lost: float | None,
    fill: float = 0.0,
    until: float = math.inf,
) -> dict[str, Any]:
    """Return the figures of a load, and set `ideal`, `in_flight` and `partial_block` of each request.

    Args:
        pairs: requests and answers in the order of sending.
        capacities: tokens of bounded optimal caches.
        lost: tokens that the server computed again for lack of a snapshot; None if its metrics do not report them.
        fill: requests sent in these first seconds are in no figure. At least one is sent later.
        until: end of the sending in seconds.
    """
    requests, done = [one for one, _ in pairs], [one for _, one in pairs]
    ends = [one.begin + one.total for one in done]
    computed = computed_hits(requests, [one.begin for one in done], [one.begin + one.first_token for one in done])
    for one, ideal, known in zip(done, perfect_hits(requests), computed, strict=True):
        one.ideal = ideal
        one.in_flight = max(0, min(ideal - one.cached, ideal - known))
        one.partial_block = max(0, min(ideal - one.cached - one.in_flight, ideal % BLOCK))
    begun = next(number for number, one in enumerate(done) if one.begin >= fill)
    bounded = {str(tokens): sum(perfect_hits(requests, tokens)[begun:]) for tokens in capacities}
    until = min(until, max(ends))
    answered = [one for one, end in zip(done, ends, strict=True) if fill <= end <= until]
    seconds = until - fill
    done = done[begun:]
    prompts, cached, ideal = (sum(getattr(one, name) for one in done) for name in ("prompt", "cached", "ideal"))
    missed = sum(max(0, one.ideal - one.cached) for one in done)
    kinds = {name: sum(getattr(one, name) for one in done) for name in ("in_flight", "partial_block")}
    rest = missed - sum(kinds.values())
    misses: dict[str, Any] = {"tokens": missed, **kinds}
    if lost is not None:
        no_snapshot = min(round(lost), rest)
        misses |= {"no_snapshot": no_snapshot, "other": rest - no_snapshot}
    misses["share_of_computed"] = round(missed / max(1, prompts - cached), 4)
    return {
        "requests": len(done),
        "fill_seconds": fill,
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(answered) / seconds, 4),
        "output_tokens_per_s": round(sum(one.output for one in answered) / seconds, 2),
        "prompt_tokens_per_s": round(sum(one.prompt for one in answered) / seconds, 1),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "tiers": {tier: sum(one.tiers[tier] for one in done) for tier in done[0].tiers},
        "ideal_tokens": ideal,
        "live_tokens": live_tokens(requests),
        "hit_of_ideal": round(cached / ideal, 4) if ideal else None,
        "bounded_ideal_tokens": bounded,
        "hit_of_bounded": {size: round(cached / hit, 4) if hit else None for size, hit in bounded.items()},
        "missed": misses,
        "first_token_ms": spread([one.first_token for one in done]),
        "between_tokens_ms": spread([one.between_tokens for one in done if one.output > 1] or [0.0]),
        "late_ms": spread([one.late for one in done]),
    }


def held_tokens(facts: Mapping[str, Any]) -> list[int]:
    """Return the tokens that fit on the device of a server and, with a host cache whose tokens are known, on device and
    host together.

    Args:
        facts: facts of the server (`Bench.served`).
    """
    device = facts["max_total_num_tokens"]
    flags = shlex.split(facts.get("command", ""))
    if "--enable-hierarchical-cache" not in flags or not device:
        return [device]
    if size := float(flag_value(flags, "--hicache-size") or 0):
        bytes_a_token = facts.get("bytes_a_token")  # missing if the log has no sizes
        return [device, device + round(size * 1e9 / bytes_a_token)] if bytes_a_token else [device]
    return [device, device + round(float(flag_value(flags, "--hicache-ratio") or HICACHE_RATIO) * device)]


def warm_clients(facts: Mapping[str, Any], clients: int) -> int:
    """Return how many of the clients the server runs at once; the others would only wait.

    Args:
        facts: facts of the server (`Bench.served`).
        clients: largest number of clients of a load.
    """
    running = flag_value(shlex.split(facts.get("command", "")), "--max-running-requests")
    return min(clients, int(running)) if running else clients


class LostTokens:
    """Tokens that a server computes again for lack of a snapshot, counted from `fill` seconds after now on."""

    def __init__(self, url: str, fill: float) -> None:
        self._url = url
        self._timer = threading.Timer(fill, self._start)
        self._start()
        if fill:
            self._timer.start()

    def _start(self) -> None:
        self._before = self._read()

    def _read(self) -> float | None:
        return servers.metrics(self._url).get("lost_tokens")

    def counted(self) -> float | None:
        """Stop counting. Return None if the server's metrics do not report them."""
        self._timer.cancel()
        now = self._read()
        return None if now is None or self._before is None else now - self._before


def measure(args: argparse.Namespace, console: Console, subject: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each load of one server, and append its answers to FILE.requests.jsonl.

    Args:
        args: the command line.
        console: console of the progress bar.
        subject: name of the server.
        number: number of the start.

    Raises:
        OutOfTime: the time limit is reached.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bench, requests = Bench(args, args.out.parent), args.sent
    base = [*bench.base(), "--enable-metrics"]
    with bench.served(args.url, subject, f"trace-{number}", base) as (server, facts):
        client, url, vocab = Client(server.url), server.url, args.vocab if args.url else bench.vocab
        capacities = sorted({*held_tokens(facts), *args.capacity})
        clients = max([*args.closed, *([2 if args.dry_run else OPEN_CLIENTS] if args.open else [])])
        clients = warm_clients(facts, clients)
        most = (1, 1) if args.dry_run else (max(clients, WARM_REQUESTS), WARM_ROUNDS)
        rounds = warm_up(client, requests, clients, vocab, *most)
        loads = [("closed", n) for n in args.closed] + [("open", factor) for factor in args.open]
        for (loop, size), seconds, fill in zip(loads, args.each, args.fill, strict=True):
            bench.check_time()
            client.flush()
            lost = LostTokens(url, fill)
            begin = time.monotonic()
            with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
                task = bar.add_task(f"{subject} {loop} {size:g}", total=len(requests))
                deadline = min(args.deadline, begin + seconds)
                replayer = Replayer(client, vocab, 0, args.cap, deadline, partial(bar.advance, task))
                pairs = replayer.closed(requests, int(size)) if loop == "closed" else replayer.open(requests, size)
            counted = lost.counted()
            if not pairs or pairs[-1][1].begin < fill:
                console.print(f"{subject} {loop} {size:g}: no row, since nothing was sent after {fill:g} s")
                continue
            row = {"measure": "trace", "loop": loop, "load": size, "of": len(requests), "warm_rounds": rounds}
            row |= {**summary(pairs, capacities, counted, fill, deadline - begin), "server": facts}
            name = {"server": subject, "loop": loop, "load": size}
            with args.out.with_suffix(".requests.jsonl").open("a") as file:
                file.writelines(json.dumps(name | asdict(done)) + "\n" for _, done in pairs)
            yield row


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table("server", "load", "requests", "requests/s", "hits of ideal", "of a perfect cache", "missed")
    shown.add_column("first token ms, p50 / p95 / p99")
    shown.add_column("between tokens ms")
    for row in rows:
        bounded = ", ".join(f"{int(size) / 1e6:.3g}M {share}" for size, share in row["hit_of_bounded"].items())
        kinds = ("in_flight", "partial_block", "no_snapshot", "other")
        missed = ", ".join(f"{row['missed'][kind]} {kind}" for kind in kinds if kind in row["missed"])
        first = row["first_token_ms"]
        shown.add_row(
            row["server"]["subject"],
            f"{row['loop']} {row['load']:g}",
            f"{row['requests']} of {row['of']}",
            f"{row['requests_per_s']:.3g}",
            str(row["hit_of_ideal"]),
            bounded,
            missed,
            f"{first['p50']:.0f} / {first['p95']:.0f} / {first['p99']:.0f}",
            f"{row['between_tokens_ms']['p50']:.1f}",
        )
    return shown


def parsed(argv: list[str] | None) -> argparse.Namespace:
    options = command_line.lines_parser(__doc__)
    options.add_argument("trace", type=Path, help="JSON lines, also .xz or .gz")
    options.add_argument("--closed", default="", help="numbers of clients, one load each, as in 8,64")
    options.add_argument("--open", default="", help="factors of the time stamps, one load each, as in 1,0.5")
    options.add_argument("--requests", type=int, help="only the first N requests")
    options.add_argument("--longest", type=int, default=2**31, help="leave out longer prompts")
    options.add_argument("--cap", type=int, default=0, help="longest answer; 0: as in the trace")
    options.add_argument("--each", default="inf", help="longest time of a load in seconds, one for all or one per load")
    options.add_argument("--fill", default="0", help="first seconds of a load that are in no figure, as for --each")
    options.add_argument("--capacity", default="", help="capacities of further perfect caches in tokens")
    command_line.add_servers(options, "ours,sglang-best")
    command_line.add_url(options)
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    args.closed, args.capacity = (command_line.numbers(options, n, getattr(args, n)) for n in ("closed", "capacity"))
    seconds = {"each": args.each, "fill": args.fill}
    for name in ("open", *seconds):
        given = getattr(args, name)
        try:
            setattr(args, name, [float(text) for text in given.split(",") if text])
        except ValueError as error:
            options.error(f"--{name} {given}: {error}; expected numbers, separated by commas")
    if not args.closed + args.open or min(args.closed + args.open) <= 0:
        options.error(f"--closed {args.closed} --open {args.open}: expected at least one load, all above 0")
    loads = len(args.closed + args.open)
    for name, given in seconds.items():
        if len(getattr(args, name)) == 1:
            setattr(args, name, loads * getattr(args, name))
        if len(getattr(args, name)) != loads:
            options.error(f"--{name} {given}: expected one number of seconds, or one for each of {loads} loads")
    if any(not 0 <= fill < each for fill, each in zip(args.fill, args.each, strict=True)):
        options.error(f"--fill {seconds['fill']}: expected seconds from 0 on, fewer than --each {seconds['each']}")
    try:
        args.sent = [one for one in load(args.trace)[: args.requests] if one.tokens <= args.longest]
    except (OSError, ValueError) as error:
        options.error(str(error))
    if not args.sent:
        options.error(f"--longest {args.longest} --requests {args.requests}: no request of {args.trace} is left")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    arguments = {name: getattr(args, name) for name in ("model", "cap", "longest", "dry_run", "starts")}
    console, rows = Console(), []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"trace": args.trace.name, **arguments}
    failed = append_rows(args, partial(measure, args, console), lambda row, _: rows.append(row), settings=settings)
    console.print(table(rows))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
