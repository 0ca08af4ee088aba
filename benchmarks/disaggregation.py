"""Compare prefill-decode disaggregation with one server on the same GPUs, under the same load.

    python -m benchmarks.disaggregation [--rate 4] [--out DIR]
    python -m benchmarks.disaggregation --model v4flash_fp4 --tp 4 --sides apart --mem-fraction-static 0.85 --out DIR

Sides (dummy weights, FP8 entries):

- apart: prefill on the first half of the --tp GPUs and decode on the second half, connected by NIXL,
- tp: one server on all of them, which uses them all in every step.

All servers start together, with 0.4 of the memory each; the others stay idle while one side is measured. A model too
large for that runs one of --sides a call.

Decode: --streams requests with prompts of 1024 random tokens run first undisturbed, then while prompts of 8192 tokens
that ask for one token arrive at a fixed rate, the same for all sides. The results are tokens/s of all streams and the
time between tokens as a client sees it (median, p99, longest). Tokens of one chunk of a stream count as simultaneous.

Transfer: single prompts of 8K and 64K tokens, sent as new and then as hits of the prefill server's cache. Bytes and
times come from SGLang's metrics of the prefill server. The time runs from the first send to the end. For a new prompt
it includes the computation of the later prefill chunks. The time to first token is measured for all sides.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import re
import shlex
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import bench, command_line, ports, report
from benchmarks.client import deliveries
from benchmarks.servers import Server
from dsv4_sglang.cli.client import samples

SIDES = ("apart", "tp")
# Transfer backend on GPUs and in a dry run, and the module that it needs. No dependency installs one.
NIXL, MOONCAKE = ("nixl", "nixl"), ("mooncake_tcp", "mooncake")
TRANSFERS = "sglang:kv_transfer_"
TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the load.

    Attributes:
        prompt: tokens of a stream's prompt.
        stream: tokens that a stream requests, more than arrive before it is aborted.
        windows: seconds without prefills, and with them.
        disturbing: tokens of a disturbing prompt.
        transfer: prompt tokens -> repeats.
    """

    prompt: int = 1024
    stream: int = 1 << 14
    windows: tuple[float, float] = (6, 12)
    disturbing: int = 8192
    transfer: dict[int, int] = dataclasses.field(default_factory=lambda: {8192: 3, 65536: 2})


DRY = Plan(prompt=20, stream=4000, windows=(2, 4), disturbing=200, transfer={64: 1, 300: 1})


@dataclasses.dataclass
class Side:
    """The servers of a side: one server, or a decode server (`server`) and its prefill server (`prefill`)."""

    name: str
    server: Server
    prefill: Server | None = None
    bootstrap: int = 0
    sent: list[Future[Any]] = dataclasses.field(default_factory=list)
    pool: ThreadPoolExecutor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(256))
    rooms: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def body(self, ids: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Return the body of a request to the side's server. A prefill server has been sent its request by then.

        Args:
            ids: token ids of the prompt.
            tokens: length of the answer.
            **more: further fields of the body.
        """
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, **more}
        if self.prefill is not None:
            body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap}
            body["bootstrap_room"] = next(self.rooms)
            # The prefill request ends with its first token.
            self.sent.append(self.pool.submit(self.prefill.request, "/generate", body | {"stream": False}, 300))
        return body

    def generate(self, ids: Sequence[int], tokens: int) -> float:
        """Return the seconds until the answer was complete."""
        start = time.perf_counter()
        self.server.request("/generate", self.body(ids, tokens), 300)
        return time.perf_counter() - start

    def stream(self, ids: Sequence[int], tokens: int, came: list[tuple[float, int]], end: threading.Event) -> None:
        """Record arrival times and token counts in `came` until `end` is set.

        Args:
            ids: prompt.
            tokens: number of tokens to request.
            came: gets (time, tokens so far) of each chunk.
            end: set when the measurement is over.

        Raises:
            RuntimeError: the stream ended before the measurement.
        """
        with self.server.send("/generate", self.body(ids, tokens, stream=True)) as answer:
            last = b""
            for now, last in deliveries(answer):
                if end.is_set():
                    return
                if found := TOKENS.search(last):
                    came.append((now, int(found[1])))
        if not end.is_set():
            raise RuntimeError(f"a stream ended before its measurement was over; its last line: {last[:300]!r}")

    def abort(self) -> None:
        """Abort all requests and wait until none is running."""
        for server in filter(None, (self.server, self.prefill)):
            server.request("/abort_request", {"rid": "", "abort_all": True})
            while any(rank["num_running_reqs"] for rank in server.request("/v1/loads")["loads"]):
                time.sleep(0.05)

    def transfers(self) -> dict[str, float]:
        """Return sums and counts of SGLang's transfer histograms since the start of the prefill server."""
        if self.prefill is None:
            return {}
        found = samples(self.prefill.request("/metrics", timeout=30), TRANSFERS)
        return {sample.name.removeprefix(TRANSFERS): sample.value for sample in found if "le" not in sample.labels}


def gaps(came: Sequence[Sequence[tuple[float, int]]], start: float, end: float) -> list[float]:
    """Return the seconds between tokens of each stream in an interval.

    Args:
        came: (time, tokens so far) of each chunk, per stream.
        start: begin of the interval.
        end: end of the interval.

    Returns:
        The gap before each token. Tokens after the first of a chunk have gap 0.
    """
    found = []
    for stream in came:
        for (before, had), (now, has) in itertools.pairwise(stream):
            if start <= now < end and has > had:
                found += [now - before, *[0.0] * (has - had - 1)]
    return found


def of_gaps(found: Sequence[float], seconds: float) -> dict[str, float]:
    """Return tokens/s of all streams, and statistics of the time between tokens in ms."""
    at = sorted(found)
    return {
        "tokens/s": len(at) / seconds,
        "ms between tokens": 1e3 * statistics.median(at),
        "p99": 1e3 * at[int(0.99 * len(at))],
        "longest": 1e3 * at[-1],
    }


class Bench(bench.Bench):
    @property
    def plan(self) -> Plan:
        return DRY if self.args.dry_run else Plan()

    def base(self) -> list[str]:
        """Return the flags of every server."""
        most = str(2 * self.args.streams)
        if self.args.dry_run:
            return ["--max-running-requests", most, "--context-length", "4096"]
        return [
            *("--mem-fraction-static", str(self.args.memory), "--max-total-tokens", str(1 << 19)),
            *("--context-length", str(1 << 17)),
            *("--max-running-requests", most, "--cuda-graph-max-bs-decode", most, "--enable-metrics"),
            "--sleep-on-idle",
        ]

    def of_side(self, name: str, *flags: str) -> Server:
        # The servers of all sides share the GPUs, so free memory differs between ranks.
        unequal = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
        server = self.server("ours", f"apart-{name}", [*self.base(), *flags], **unequal)
        server.name = name
        return server

    def side(self, name: str, bootstrap: int) -> Side:
        """Return the servers of one side. A prefill and decode pair connects through the port `bootstrap`."""
        if name != "apart":
            return Side(name, self.of_side(name))
        half = copy.copy(self)
        half.args = argparse.Namespace(**vars(self.args) | {"tp": max(1, self.args.tp // 2)})
        backend = (MOONCAKE if self.args.dry_run else NIXL)[0]
        decode = () if self.args.dry_run else ("--base-gpu-id", str(half.args.tp))
        shared = "--disaggregation-transfer-backend", backend, "--disaggregation-bootstrap-port", str(bootstrap)
        return Side(
            name,
            half.of_side("decode", *shared, "--disaggregation-mode", "decode", *decode),
            half.of_side("prefill", *shared, "--disaggregation-mode", "prefill", "--enable-metrics"),
            bootstrap,
        )

    def started(self, side: Side) -> Iterator[dict[str, Any]]:
        for server in filter(None, (side.prefill, side.server)):
            server.wait(self.args.start_timeout)
            yield {"measure": "start s", "side": side.name, "at": server.name, "value": server.start_seconds}
        start = time.perf_counter()
        # Run every measured shape once: kernels compile on first use, and the servers of a pair connect.
        for tokens in (self.plan.prompt, self.plan.disturbing, *self.plan.transfer):
            for _ in range(2):
                side.generate(self.prompt(tokens), 4)
        with ThreadPoolExecutor(self.args.streams) as pool:
            prompts = [self.prompt(self.plan.prompt) for _ in range(self.args.streams)]
            list(pool.map(lambda ids: side.generate(ids, 32), prompts))
        yield {"measure": "warm-up s", "side": side.name, "value": time.perf_counter() - start}

    def disturb(self, side: Side, seconds: float) -> list[float]:
        """Send prompts at the given rate without waiting for answers. Return the seconds to the first token of each."""
        period, start = 1 / self.args.rate, time.perf_counter()
        with ThreadPoolExecutor(256) as pool:
            waiting = []
            for i in range(int(seconds * self.args.rate)):
                time.sleep(max(0.0, start + i * period - time.perf_counter()))
                waiting.append(pool.submit(side.generate, self.prompt(self.plan.disturbing), 1))
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
            self.ended = time.perf_counter()
            return [one.result() for one in waiting]

    def decode(self, side: Side) -> Iterator[dict[str, Any]]:
        came: list[list[tuple[float, int]]] = [[] for _ in range(self.args.streams)]
        end, row = threading.Event(), {"measure": "decode", "side": side.name}
        quiet, busy = self.plan.windows
        with ThreadPoolExecutor(self.args.streams) as pool:
            asked = [self.prompt(self.plan.prompt) for _ in came]
            streams = [pool.submit(side.stream, ids, self.plan.stream, one, end) for ids, one in zip(asked, came)]
            try:
                while not all(len(one) > 1 for one in came):
                    for stream in streams:
                        if stream.done():
                            stream.result()
                    time.sleep(0.02)
                start = time.perf_counter()
                time.sleep(quiet)
                middle = time.perf_counter()
                first = self.disturb(side, busy)
                for stream in streams:
                    if stream.done():
                        stream.result()
            finally:
                end.set()
                side.abort()
        yield row | {"at": "undisturbed", **of_gaps(gaps(came, start, middle), middle - start)}
        disturbed = of_gaps(gaps(came, middle, self.ended), self.ended - middle)
        prefilled = {"prefills": len(first), "TTFT ms": 1e3 * statistics.median(first)}
        yield row | {"at": f"{self.args.rate} x {self.plan.disturbing} a second", **disturbed, **prefilled}

    def transfer(self, side: Side) -> Iterator[dict[str, Any]]:
        for tokens, repeats in self.plan.transfer.items():
            prompts = [self.prompt(tokens) for _ in range(repeats)]
            for at in ("new", "in the cache"):
                before = side.transfers()
                seconds = [side.generate(ids, 1) for ids in prompts]
                row = {"measure": "transfer", "side": side.name, "at": f"{tokens} {at}"}
                row["TTFT ms"] = 1e3 * statistics.median(seconds)
                if side.prefill is not None:
                    for one in side.sent:
                        one.result()
                    after = side.transfers()
                    change = {name: value - before.get(name, 0) for name, value in after.items()}
                    count = change["latency_ms_count"]
                    row["MB"] = change["total_mb_sum"] / count * 2**20 / 1e6
                    row["transfer ms"] = change["latency_ms_sum"] / count
                    row["GB/s"] = row["MB"] / row["transfer ms"]
                yield row


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--streams", type=int, default=32, help="requests that decode (%(default)s)")
    options.add_argument("--rate", type=float, default=4, help="disturbing prompts per second (%(default)s)")
    options.add_argument("--sides", default=",".join(SIDES), help="some of %(default)s")
    options.add_argument("--tp", type=int, help="GPUs of a side (2)")
    command_line.add_model(options)
    options.set_defaults(memory=0.4, tp=None)
    args = options.parse_args(argv)
    args.tp = args.tp or (1 if args.dry_run else 2)
    if args.tp % 2 and not args.dry_run:
        options.error(f"--tp {args.tp}: expected an even number of GPUs")
    command_line.resolve(options, args)
    if args.streams < 1 or args.rate <= 0:
        options.error(f"--streams {args.streams} --rate {args.rate}: expected numbers above 0")
    sides = args.sides.split(",")
    if unknown := {*sides} - {*SIDES}:
        options.error(f"--sides {min(unknown)}: expected some of {', '.join(SIDES)}")
    backend, module = MOONCAKE if args.dry_run else NIXL
    if find_spec(module) is None:
        options.error(f"the transfer backend {backend} is not installed, see docs/guides/disaggregation.md")
    if args.dry_run:
        args.streams = min(args.streams, 2)
    made = Bench(args, args.out)
    flags = [*made.base(), *shlex.split(args.flags)]
    settings = {"model": args.model, "gpus": args.tp, "flags": flags, "streams": args.streams, "rate": args.rate}
    result = report.Report("apart", args, settings)
    with ExitStack() as stack:
        started, bootstrap = [], stack.enter_context(ports.reserved())
        for name in sides:
            started.append(side := made.side(name, bootstrap))
            for server in filter(None, (side.prefill, side.server)):
                stack.callback(server.stop)
                server.launch()
        for side in started:
            result.part(f"start/{side.name}", partial(made.started, side), setup=True)
            result.part(f"transfer/{side.name}", partial(made.transfer, side))
            result.part(f"decode/{side.name}", partial(made.decode, side))
    of = {measure: [row for row in result.rows if row["measure"] == measure] for measure in ("decode", "transfer")}
    columns = ["side", "at", "tokens/s", "ms between tokens", "p99", "longest", "prefills", "TTFT ms"]
    result.table("decode", columns, of["decode"])
    result.table("transfer", ["side", "at", "MB", "transfer ms", "GB/s", "TTFT ms"], of["transfer"])
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
