"""Measure the cost of retracting and resuming a request of 32,768 tokens, from the device and from the host.

    python -m benchmarks.retract [--servers ours,in-tree] [--flags "--enable-hierarchical-cache --hicache-ratio 4"]

A server of benchmarks/configs/flashshape (dummy weights) has a pool for one such request and a short one. It is made to
retract a request every N steps (SGLANG_TEST_RETRACT). A short request decodes all the time. The long request has fewer
output tokens, so it is the one that is retracted. A second long request waits from the beginning and takes the room
that the first retraction frees. The retracted request resumes when the second has ended, from the host if there is a
host cache.

Columns:

- "resume ms": from the end of the request that took the room to the next token. If none took it: from the last token
  before the retraction.
- "computed again": tokens after the snapshot from which the request resumed, as a mean over the retractions of a round.
  Only servers of this package report it.
- "step ms": time of a decode step.
- "pause ms": the longest time meanwhile between two tokens of the short request, which is one prefill step and one
  decode step.
- "hit ms": time to first token of a request that was never retracted, with the same tokens (prompt and answer) cached
  on the device. It has its own "hit pause ms" and "hit computed". It includes the HTTP transfer of the prompt.

A retracted request resumes with a prefill step, which takes longer than a decode step even for a few tokens. So the
cost of a retraction is "resume ms" - "hit pause ms" compared with a request that hits the same tokens on the device,
and "resume ms" - "step ms" compared with a request that keeps decoding.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import bench, command_line, report, servers
from benchmarks.client import deliveries
from benchmarks.servers import Server
from dsv4_sglang.srt.memory.sizing import SPARE_TOKENS


@dataclass(frozen=True)
class Plan:
    """Tokens of the long prompts, of the answers of the long and the short request, and of the pool; steps between two
    retractions; number of rounds."""

    prompt: int
    answer: int
    short_answer: int
    pool: int
    interval: int
    rounds: int


FULL = Plan(32_768, 1_000, 2_500, 32_768 + 8_192, 400, 3)
DRY = Plan(512, 60, 150, 1_280, 25, 1)


@dataclass
class Stream:
    """A request that streams in a thread.

    Attributes:
        answer: token ids so far.
        times: arrival time of each token.
        retractions: number of retractions of the request when each token arrived.
        cached: prompt tokens found in the cache when the request first began.
    """

    server: Server
    prompt: list[int]
    count: int
    answer: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    retractions: list[int] = field(default_factory=list)
    cached: int = 0
    _error: Exception | None = None

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for_first(self) -> None:
        self._first.wait()
        self._raise()

    def result(self) -> None:
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._ask()
        except Exception as error:
            self._error = error
        finally:
            self._first.set()

    def _ask(self) -> None:
        sampling = {"temperature": 0, "max_new_tokens": self.count, "ignore_eos": True}
        body = {"input_ids": self.prompt, "sampling_params": sampling, "stream": True}
        with self.server.send("/generate", body, timeout=600) as response:
            for now, line in deliveries(response):
                message = json.loads(line[6:])
                meta, self.answer = message["meta_info"], message["output_ids"]
                if not self.times:
                    self.cached = meta["cached_tokens"]
                new = meta["completion_tokens"] - len(self.times)
                self.times += [now] * new
                self.retractions += [meta.get("num_retractions") or 0] * new
                self._first.set()


def resumed(
    times: Sequence[float], retractions: Sequence[int], took_room_until: float
) -> tuple[float, list[dict[str, Any]]]:
    """Return the milliseconds of a step and a row for each retraction.

    A row says if another request took the room, since when the request could resume, when it did, and the tokens of
    the answer by then.

    Args:
        times: arrival time of each token.
        retractions: number of retractions when each token arrived.
        took_room_until: end of the request that takes the room.
    """
    step = statistics.median(after - before for before, after in itertools.pairwise(times))
    rows = []
    for i in range(1, len(times)):
        if retractions[i] == retractions[i - 1]:
            continue
        taken = times[i - 1] < took_room_until < times[i]
        since = took_room_until if taken else times[i - 1]
        rows.append({"room taken": taken, "since": since, "until": times[i], "tokens": i})
    return 1e3 * step, rows


def longest_pause(times: Sequence[float], begin: float, end: float) -> float | None:
    """Return the longest gap between tokens in an interval.

    Args:
        times: arrival times of the tokens.
        begin: begin of the interval.
        end: end of the interval.

    Returns:
        Milliseconds, or None if there were no tokens before or after the interval.
    """
    pauses = [min(after, end) - max(before, begin) for before, after in itertools.pairwise(times)]
    longest = max(pauses, default=0.0)
    return 1e3 * longest if longest > 0 else None


class Bench(bench.Bench):
    @property
    def plan(self) -> Plan:
        return DRY if self.args.dry_run else FULL

    def pools(self) -> list[str]:
        """Return the flags of a server whose pool has room for one long and one short request."""
        flags = ["--max-total-tokens", str(self.plan.pool), "--context-length", str(self.plan.pool - SPARE_TOKENS)]
        flags += ["--max-running-requests", "8", "--enable-metrics"]
        if self.args.dry_run:
            return flags
        return [*flags, "--mem-fraction-static", str(self.args.memory), "--cuda-graph-bs-decode", "1", "2", "4"]

    def stream(self, server: Server, tokens: int, count: int) -> Stream:
        return Stream(server, self.prompt(tokens), count)

    def rounds(self, subject: str, number: int) -> Iterator[dict[str, Any]]:
        every = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(self.plan.interval)}
        with self.serving(subject, f"retract-{number}", self.pools(), **every) as (server, facts):
            self.warm_up(server, prompts=(16, 128, self.plan.prompt))
            for each in range(self.plan.rounds):
                for row in self.round(server):
                    yield {"subject": subject, "start": number, "round": each + 1, **row, "command": facts["command"]}

    def round(self, server: Server) -> Iterator[dict[str, Any]]:
        server.flush()
        yield from self.retractions(server, self.prompt(self.plan.prompt), self.prompt(self.plan.prompt))

    def retractions(self, server: Server, long_prompt: list[int], other_prompt: list[int]) -> Iterator[dict[str, Any]]:
        """Yield a row for each retraction of a request, beside a short one.

        Args:
            server: running server, with a pool for one long and one short request.
            long_prompt: prompt of the request that is retracted.
            other_prompt: prompt of the request that takes its room.
        """
        plan = self.plan
        before = servers.metrics(server.url)
        short = self.stream(server, 100, plan.short_answer)
        short.wait_for_first()
        long = Stream(server, long_prompt, plan.answer)
        long.wait_for_first()
        other = Stream(server, other_prompt, 1)
        for stream in (other, long):
            stream.result()
        hit = Stream(server, long.prompt + long.answer[:-1], 1)
        for stream in (hit, short):
            stream.result()
        step, rows = resumed(long.times, long.retractions, other.times[-1])
        self.stream(server, 16, 1).result()  # counters are published when requests start and end
        hits = servers.metrics(server.url).get("hit_tokens", 0) - before.get("hit_tokens", 0)
        hits -= hit.cached + long.cached + other.cached
        again = None
        if before:
            again = (sum(len(long_prompt) + row["tokens"] for row in rows) - hits) / max(1, len(rows))
        for row in rows:
            since, until = row.pop("since"), row.pop("until")
            yield {
                "prompt": len(long_prompt),
                "step ms": step,
                **row,
                "resume ms": 1e3 * (until - since),
                "pause ms": longest_pause(short.times, since, until),
                "computed again": again,
                "hit ms": 1e3 * (hit.times[0] - hit.began),
                "hit pause ms": longest_pause(short.times, hit.began, hit.times[0]),
                "hit computed": len(hit.prompt) - hit.cached,
            }


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    command_line.add_servers(options, "ours,in-tree")
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    made = Bench(args, args.out)
    result = report.Report("retract", args, {"flags": args.flags, "starts": args.starts, **vars(made.plan)})
    for number, subject in command_line.orders(args):
        name = f"retract/{subject}" + (f"/{number}" if args.starts > 1 else "")
        result.part(name, partial(made.rounds, subject, number))
    columns = ["subject", "round", "tokens", "room taken", "step ms", "resume ms", "pause ms", "computed again"]
    columns += ["hit ms", "hit pause ms", "hit computed"]
    result.table("a retracted request resumes", columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
