"""Measure time to first token and total time of conversation turns with a cached prefix; ours and SGLang's own.

    python -m benchmarks.turns --servers ours,sglang-best,sglang --out OUT/turns.jsonl --seconds 540
    python -m benchmarks.turns --servers ours --loads 20000+200x1,20000+200x8 --cold 8192,65536 --decode 1,16,64 --out F
    python -m benchmarks.turns --servers ours,sglang --tier host --loads 20000+200x1,20000+200x8 --out F
    python -m benchmarks.report F                          # a table over all starts in F

Load 20000+200x8: eight conversations of 20,000 tokens send 200 new tokens each at the same moment and get 16 tokens.
A conversation is prefilled once. Each turn appends other random tokens to the same prefix, so no conversation grows.
Lengths are rounded down to whole pages of SGLang (256 tokens) plus 32 tokens, so that both servers hit the same tokens
and compute 32 and the new ones. `cached` counts the turns that hit exactly these tokens; `tier_share` is the share of
hit tokens from the requested tier. Prompts are token ids (`input`), so no server tokenizes. With --dp conversations
take turns over the ranks, and the turns of a conversation go to its rank, as a cache-aware router sends them.

Times are measured by the client over HTTP. The first load runs once unmeasured, so that the warm-up of a server does
not count against it. Each load first computes every number of tokens that a step of it may have, then runs at least two
untimed rounds, and more until a round is less than 3x faster than the previous one. `slow_rounds` counts timed rounds
that took more than 3x the median.

With --tier host the device holds just the largest load. Before each round other conversations fill it, which are loaded
from the host themselves. SGLang's host cache hits more with `--flags "--swa-full-tokens-ratio 0.5"`.

Servers run one after the other, --starts times in alternating order, with the flags of `benchmarks.serve`, whose cold
prompts (--cold) and decode rates (--decode) are measured after the turns, and at last turnovers (--turnover): with
8192+1024x64, 64 clients each send one request after the other, all with new prompts of 8,192 tokens and answers of
1,024, at least 8 requests and 2 per client. Rows are appended to --out as they come, each
with the number of its start. Nothing starts after --seconds; skipped loads are printed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from benchmarks import command_line
from benchmarks.bench import Bench, OutOfTime, append_rows, settle
from benchmarks.client import Answer, Client
from benchmarks.report import spread
from benchmarks.turnover import Turnover
from dsv4_sglang.srt.memory.sizing import SPARE_TOKENS

ANSWER_TOKENS = 16
# SGLang's page, and the tokens of a conversation after its last whole page.
PAGE, REMAINDER = 256, 32
# Longest prompt that fills the device before a round from the host.
FILLER_TOKENS = 131_072
HOST_RATIO, ROUNDS, WARM_ROUNDS = 4, 9, 20
# Tokens of a prefill step, SGLang's default on an H200.
STEP_TOKENS = 8192
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
        numbers = command_line.load_of(text)
        load = cls(*numbers) if numbers else None
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


def together(asks: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Send requests at the same moment, each from its own thread. Return the answers."""
    start = threading.Barrier(len(asks), timeout=60)

    def ask(one: Callable[[], Answer]) -> Answer:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(ask, asks))


@dataclass
class Conversations:
    """Conversations in the cache of a server, and their turns.

    Args:
        client: client of the server.
        prompt: returns the given number of random tokens, different ones at each call.
        tier: where turns are expected to hit, one of `client.TIERS`.
        device_tokens: tokens of other conversations that fill the device before each round; 0: none.
        rounds: timed rounds; a load of one conversation gets three times as many.
        deadline: time of `time.monotonic` after which nothing starts.
        ranks: data parallel ranks of the server.
        prefixes: prefilled conversations, by the tokens of their load.
    """

    client: Client
    prompt: Callable[[int], list[int]]
    tier: str = "device"
    device_tokens: int = 0
    rounds: int = ROUNDS
    deadline: float = math.inf
    ranks: int = 1
    prefixes: dict[int, list[array[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = math.ceil(self.device_tokens / FILLER_TOKENS)
        self._fillers = [self._prefilled(self.device_tokens // count - 2 * PAGE, {})[0] for _ in range(count)]

    def measure_all(self, loads: Sequence[Load]) -> Iterator[dict[str, Any]]:
        """Yield the row of each load. The first load runs once more before, unmeasured.

        Raises:
            OutOfTime: the deadline has passed. The message names the loads without a row.
        """
        rows = 0
        try:
            for load in loads[:1]:
                self.measure(load)
            for load in loads:
                yield self.measure(load)
                rows += 1
        except OutOfTime:
            raise OutOfTime(f"skipped: {', '.join(map(str, loads[rows:]))}") from None

    def measure(self, load: Load) -> dict[str, Any]:
        """Return the row of a load. At the deadline it has fewer turns.

        Raises:
            OutOfTime: no timed round was possible.
        """
        while len(self.prefixes.get(load.tokens, [])) < load.at_once:
            self.begin(load)
        self._warm_steps(load)
        warm = settle(lambda: self._timed_round(load)[0], 3, WARM_ROUNDS)
        timed: list[tuple[float, list[Answer]]] = []
        wanted = self.rounds * (3 if load.at_once == 1 else 1)
        while len(timed) < wanted and not (timed and time.monotonic() > self.deadline):
            timed.append(self._timed_round(load))
        median = statistics.median(spent for spent, _ in timed)
        row = self.summary(load, [answer for _, answers in timed for answer in answers])
        return row | {"warm_rounds": warm, "slow_rounds": sum(spent > 3 * median for spent, _ in timed)}

    def begin(self, load: Load) -> Answer:
        """Prefill one more conversation of a load. Return the answer, of one token."""
        conversations = self.prefixes.setdefault(load.tokens, [])
        prefix, answer = self._prefilled(load.hit + REMAINDER, self._rank(len(conversations)))
        conversations.append(prefix)
        return answer

    def turn(self, load: Load, number: int) -> Callable[[], Answer]:
        """Return a function that sends the next turn of conversation `number` of a load."""
        prompt = self.prefixes[load.tokens][number] + array("i", self.prompt(load.new))
        return self.client.prepared(prompt, ANSWER_TOKENS, **self._rank(number))

    def _rank(self, number: int) -> dict[str, int]:
        """Return the field of a request that sends conversation `number` to its rank."""
        return {"routed_dp_rank": number % self.ranks} if self.ranks > 1 else {}

    def summary(self, load: Load, turns: Sequence[Answer]) -> dict[str, Any]:
        """Return the row of the turns of a load."""
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

    def _warm_steps(self, load: Load) -> None:
        """Compute as many tokens as steps with two, three and more turns of a load have.

        When turns arrive decides how many a step has. The first step of a size loads kernels or its graph, which took
        up to two seconds on four GPUs.
        """
        of_turn = load.new + REMAINDER
        for turns in range(2, min(load.at_once, STEP_TOKENS // of_turn) + 1):
            self._check_time()
            prompt = self.prefixes[load.tokens][0] + array("i", self.prompt(turns * of_turn - REMAINDER))
            self.client.generate(prompt, 1, **self._rank(0))

    def _timed_round(self, load: Load) -> tuple[float, list[Answer]]:
        """Run one turn of each conversation of a load. Return the seconds and the answers."""
        self._check_time()
        if self._fillers:
            together([self.client.prepared(filler, ANSWER_TOKENS) for filler in self._fillers])
        asks = [self.turn(load, number) for number in range(load.at_once)]
        begin = time.perf_counter()
        answers = together(asks)
        return time.perf_counter() - begin, answers

    def _prefilled(self, tokens: int, rank: Mapping[str, int]) -> tuple[array[int], Answer]:
        self._check_time()
        made = array("i", self.prompt(tokens))
        return made, self.client.generate(made, 1, **rank)

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def tier_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags with which turns hit the requested tier."""
    if args.tier == "device":
        return []
    room = math.ceil(max(load.room for load in args.loads) / PAGE) * PAGE
    requests = max(2, *(load.at_once for load in args.loads))
    # The pool must serve a request of the context length. Fillers are the longest prompts, unless a load is longer.
    context = max(min(room, FILLER_TOKENS), *(load.room // load.at_once for load in args.loads)) - SPARE_TOKENS
    return [
        *("--max-total-tokens", str(room), "--max-running-requests", str(requests)),
        *("--context-length", str(context)),
        *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)),
    ]


def measure(args: argparse.Namespace, subject: str, number: int) -> Generator[dict[str, Any], None, None]:
    """Yield the rows of one start of a server: tokens in the cache, the loads, cold prompts, decode rates, turnovers.

    Args:
        args: the command line.
        subject: name of the server.
        number: number of the start.

    Raises:
        OutOfTime: the time limit is reached.
    """
    bench = Bench(args, args.out.parent)
    with bench.serving(subject, f"turns-{number}", [*bench.base(), *tier_flags(args)]) as (server, facts):
        tokens = facts["max_total_num_tokens"]
        yield {"measure": "tokens in the cache", "value": tokens, "server": facts}
        from_host = tokens if args.tier == "host" else 0
        client = Client(server.url)
        held = Conversations(client, bench.prompt, args.tier, from_host, args.rounds, args.deadline, args.dp)
        for row in held.measure_all(args.loads):
            yield {**row, "server": facts}
        sizes = bench.sizes
        for wanted, prompts, bursts, rows in (
            (args.cold, sizes.ttft, (), bench.ttft),
            (args.decode, (), sizes.decode, bench.decode),
        ):
            if wanted:
                bench.warm_up(server, prompts=prompts, bursts=bursts)
                for row in rows(server):
                    yield {**row, "server": facts}
                    bench.check_time()
        bench.warm_up(
            server, bursts=[load.clients for load in args.turnover], prompts=[load.prompt for load in args.turnover]
        )
        for load in args.turnover:
            bench.check_time()
            yield {**load.measure(server.url, bench.prompt, args.tp), "server": facts}


def line(row: dict[str, Any]) -> str:
    """Return a row as text for the screen."""
    begin = f"{row['server']['subject']:12}"
    if row["measure"] != "turn":
        figures = [f"{name} {row[name]:.6g}" for name in ("value", "low", "high", "step_ms") if row.get(name)]
        if gaps := row.get("between_tokens_ms"):
            figures.append(f"between tokens {gaps['p50']} (p95 {gaps['p95']}) ms")
        return " ".join([begin, row["measure"], str(row.get("at", row.get("load", ""))), *figures])
    first, turn, cached = row["first_token_ms"], row["turn_ms"], row["cached"]
    hits = f"{cached['turns']} of {row['turns']} found {cached['expected']}, {row['tier_share']:.0%} {row['tier']}"
    return (
        f"{begin} {row['load']:>15} first token {first['p50']:8.1f} (p95 {first['p95']:8.1f}) "
        f"turn {turn['p50']:8.1f} (p95 {turn['p95']:8.1f}) ms, {hits}, {row['slow_rounds']} slow rounds"
    )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    options = command_line.lines_parser(__doc__)
    options.add_argument("--loads", help=f"TOKENS+NEWxCOUNT, separated by commas (default: {LOADS})")
    options.add_argument("--tier", choices=("device", "host"), default="device", help="where prefixes hit")
    options.add_argument("--rounds", type=int, help=f"timed rounds of a load ({ROUNDS})")
    options.add_argument("--cold", default="", help="tokens of cold prompts to measure too, as in 8192,65536")
    options.add_argument("--turnover", default="", help="PROMPT+ANSWERxCLIENTS, as in 8192+1024x1,8192+1024x64")
    command_line.add_servers(options, "ours,sglang-best,sglang")
    command_line.add_decode(options)
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    try:
        loads = args.loads if args.loads is not None else DRY_LOADS if args.dry_run else LOADS
        args.loads = [Load.parse(text) for text in loads.split(",") if text]
        args.turnover = [Turnover.parse(text) for text in args.turnover.split(",") if text]
    except argparse.ArgumentTypeError as error:
        options.error(str(error))
    if args.tier == "host" and not args.loads:
        options.error("--tier host without --loads: expected at least one load")
    if args.tier == "host" and args.dp > 1:
        options.error(f"--tier host --dp {args.dp}: the device is filled on one rank only; expected no --dp")
    args.rounds = args.rounds if args.rounds is not None else 1 if args.dry_run else ROUNDS
    if args.rounds < 1:
        options.error(f"--rounds {args.rounds}: expected at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    names = ("model", "tp", "dp", "tier", "starts", "dry_run")
    settings = {name: getattr(args, name) for name in names}
    return append_rows(args, partial(measure, args), lambda row, _: print(line(row), flush=True), settings=settings)


if __name__ == "__main__":
    raise SystemExit(main())
