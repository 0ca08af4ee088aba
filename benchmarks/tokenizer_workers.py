"""Measure what requests cost before they reach the scheduler, for numbers of tokenizer workers. Needs no GPU.

    python -m benchmarks.tokenizer_workers [--workers 1,2,4] [--requests 1,8,32] [--tokens 20000]

N requests to /generate are sent at the same moment, as token ids and then as the same text. The scheduler rejects each
one when it arrives (--max-queued-requests 0), so no step of a model takes time. The server has a tiny model with the
vocabulary size of V4. Its tokenizer is a byte-level BPE of this size, trained on Python and text files of the
environment; V4's own merges differ, so its times do a little.

- rejected_ms: from sending to the rejection, of each request; `all_ms`: of the last one in a round.
- cpu_ms: CPU time for each request, by kind of process. `http` are the processes that accept, validate and tokenize
  requests: the main one, and with several workers these, while the main one is the `router` between them and the
  scheduler.

More workers than the machine has free cores do not lower the times, but the CPU times hold on any number of cores.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import site
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import command_line, report, servers
from benchmarks.report import spread
from benchmarks.servers import Server
from dsv4_sglang.srt.launch.command import OPT_IN_FLAG, OPT_IN_KEY, server_command
from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec
from dsv4_sglang.testing.tokenizer import CHAT_SPECIALS, LEADING_SPECIALS

VOCABULARY = 129_280
# Bytes of the text on which the tokenizer is trained. Prompts are cut from text that follows it.
TRAINED_BYTES = 24_000_000
START_SECONDS = 600
IDS, TEXT = KINDS = ("ids", "text")
REJECTED = b"queue is full"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the load.

    Attributes:
        workers: numbers of tokenizer workers.
        requests: numbers of requests at the same moment.
        tokens: tokens of a prompt.
        rounds: rounds of each number of requests. A round of few requests is repeated until it has had `least`.
        least: least number of requests of a row.
    """

    workers: Sequence[int]
    requests: Sequence[int]
    tokens: int
    rounds: int = 5
    least: int = 40


DRY = Plan((1,), (1, 2), 200, rounds=1, least=1)


def texts(least: int) -> Iterator[str]:
    """Yield the Python and text files of the environment in a fixed order, until they have `least` bytes each time."""
    for folder in sorted(site.getsitepackages()):
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".md", ".rst", ".txt")) and least > 0:
                    text = Path(parent, name).read_text(errors="ignore")
                    least -= len(text)
                    yield text


def train_tokenizer(folder: Path) -> Tokenizer:
    """Replace the tokenizer of a checkpoint by one with the vocabulary size of V4. Return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*LEADING_SPECIALS, *CHAT_SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(TRAINED_BYTES), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def prompts(tokenizer: Tokenizer, count: int, tokens: int) -> list[dict[str, Any]]:
    """Return different prompts of about `tokens` tokens, by kind. Both kinds have the same tokens."""
    found = []
    rest = [text for text in texts(TRAINED_BYTES + 16 * count * tokens) if len(text) > 2][::-1]
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < tokens:
            ids += tokenizer.encode(rest.pop()).ids
        text = tokenizer.decode(ids[:tokens])
        found.append({IDS: tokenizer.encode(text).ids, TEXT: text})
    return found


class Load:
    """Requests to one server, and the CPU time of its processes."""

    def __init__(self, server: Server, workers: int) -> None:
        assert server.process is not None
        self.server, self._workers = server, workers
        self._main = psutil.Process(server.process.pid)

    def cpu_seconds(self) -> Counter[str]:
        """Return the CPU time of the processes since their start, by kind."""
        found: Counter[str] = Counter({"http": 0.0})
        for process in (self._main, *self._main.children(recursive=True)):
            words, times = " ".join(process.cmdline()), process.cpu_times()
            kind = next((kind for kind in ("scheduler", "detokenizer") if kind in words), "http")
            if process == self._main and self._workers > 1:
                kind = "router"
            found[kind] += times.user + times.system
        return found

    def round(self, bodies: Sequence[bytes]) -> list[float]:
        """Send requests at the same moment. Return the seconds until each was rejected."""
        start = threading.Barrier(len(bodies))

        def send(body: bytes) -> float:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
            connection.connect()
            start.wait()
            begin = time.perf_counter()
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            said = response.read()
            seconds = time.perf_counter() - begin
            connection.close()
            if response.status != HTTPStatus.SERVICE_UNAVAILABLE or REJECTED not in said:
                raise RuntimeError(f"a request was answered {response.status} {said[:300]!r}; expected a rejection")
            return seconds

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(send, bodies))

    def measure(self, bodies: Sequence[bytes], plan: Plan) -> dict[str, Any]:
        """Return the figures of rounds with these requests. The first round is not counted."""
        self.round(bodies)
        rounds = max(plan.rounds, plan.least // len(bodies))
        before = self.cpu_seconds()
        times = [self.round(bodies) for _ in range(rounds)]
        spent = self.cpu_seconds()
        count = rounds * len(bodies)
        return {
            "at_once": len(bodies),
            "requests": count,
            "body_bytes": round(statistics.mean(map(len, bodies))),
            "rejected_ms": spread([seconds for one in times for seconds in one]),
            "all_ms": spread([max(one) for one in times]),
            "cpu_ms": {kind: round(1e3 * (spent[kind] - before[kind]) / count, 2) for kind in spent},
        }


def server_of(model: Path, tokens: int, workers: int, log: Path) -> Server:
    """Return a server that rejects all requests, not started yet."""
    flags = ["--context-length", str(2 * tokens), "--max-total-tokens", str(4 * tokens), "--max-queued-requests", "0"]
    flags += ["--max-running-requests", "2", "--skip-server-warmup", "--sleep-on-idle"]
    flags += ["--tokenizer-worker-num", str(workers), OPT_IN_FLAG, json.dumps({OPT_IN_KEY: {}})]
    made = server_command(str(model), flags, cpu=True)
    return Server(f"{workers} workers", made.argv, {**made.environment, **servers.CPU_ENVIRONMENT}, log)


def rows(model: Path, asked: list[dict[str, Any]], plan: Plan, workers: int, log: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one number of workers."""
    with servers.running(server_of(model, plan.tokens, workers, log), START_SECONDS) as server:
        while server.lines().count("Application startup complete") < workers:  # the first one answers earlier
            time.sleep(0.1)
        load, sampling = Load(server, workers), {"max_new_tokens": 1}
        for kind, field in ((IDS, "input_ids"), (TEXT, "text")):
            for count in plan.requests:
                bodies = [json.dumps({field: one[kind], "sampling_params": sampling}).encode() for one in asked[:count]]
                tokens = round(statistics.mean(len(one[IDS]) for one in asked[:count]))
                yield {"workers": workers, "kind": kind, "tokens": tokens, **load.measure(bodies, plan)}


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--workers", default="1,2,4", help="numbers of tokenizer workers (%(default)s)")
    options.add_argument("--requests", default="1,8,32", help="numbers of requests at once (%(default)s)")
    options.add_argument("--tokens", type=int, default=20_000, help="tokens of a prompt (%(default)s)")
    args = options.parse_args(argv)
    workers, counts = (command_line.numbers(options, name, getattr(args, name)) for name in ("workers", "requests"))
    plan = DRY if args.dry_run else Plan(workers, counts, args.tokens)
    model = report.scratch_folder("tokenizer_workers")
    vocabulary = TinySpec.vocab if args.dry_run else VOCABULARY
    make_tiny(model, TinySpec(ratios=(0, 4), heads=16, vocab=vocabulary, context=2 * plan.tokens))
    trained = Tokenizer.from_file(str(model / "tokenizer.json")) if args.dry_run else train_tokenizer(model)
    asked = prompts(trained, max(plan.requests), plan.tokens)
    result = report.Report("tokenizer_workers", args, {"model": "make-tiny", "vocabulary": vocabulary})
    for count in plan.workers:
        log = args.out / "logs" / f"tokenizer-workers-{count}.log"
        result.part(f"workers/{count}", partial(rows, model, asked, plan, count, log))
    shown = [
        {**row, **{f"{kind} CPU ms": ms for kind, ms in row["cpu_ms"].items()}, "all p50 ms": row["all_ms"]["p50"]}
        for row in result.rows
    ]
    columns = ["workers", "kind", "at_once", "all p50 ms", "http CPU ms", "router CPU ms", "scheduler CPU ms"]
    result.table("until the scheduler has requests", columns, shown)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
