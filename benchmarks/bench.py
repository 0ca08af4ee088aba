"""Shared parts of the server programs: a model, its servers, random prompts, warm-up, decode rates and cold prompts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.client import Answer, Client
from benchmarks.command_line import MODELS, flags_of_servers, is_ours, orders
from benchmarks.environment import environment
from benchmarks.report import exit_on_time_limit, scratch_folder, spread
from benchmarks.servers import Server
from dsv4_sglang.cli.server import Endpoint
from dsv4_sglang.model.v41 import MODEL_TYPES as V41_MODEL_TYPES

GRAPH_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
WARM_UP_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        decode: concurrent requests -> tokens of each.
        ttft: prompt tokens -> repeats.
        prompt: tokens of the prompts of `decode`.
        log_interval: decode steps per line of a server's log.
    """

    decode: dict[int, int]
    ttft: dict[int, int]
    prompt: int = 1024
    log_interval: int = 20


FULL = Sizes({1: 256, 16: 512, 64: 512, 256: 384}, {8192: 5, 65536: 3})
# Seven decode log lines at each number of requests. At the real widths a step of 256 requests takes 18 ms.
SHORT = Sizes({1: 160, 16: 160, 64: 160, 256: 160}, {8192: 5, 65536: 3})
QUICK = Sizes({1: 128, 16: 256, 64: 256}, {8192: 3, 65536: 2})
DRY = Sizes({1: 24, 2: 24}, {64: 2}, prompt=20, log_interval=4)


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the sizes of a command line. --decode, --cold and --prompt replace parts of the default."""
    if args.dry_run:
        return DRY
    chosen = QUICK if args.quick else FULL if args.model == "flashshape" else SHORT
    if args.decode:
        chosen = dataclasses.replace(chosen, decode={n: chosen.decode.get(n, 160) for n in args.decode})
    else:
        chosen = dataclasses.replace(chosen, decode=at_most(chosen.decode, MODELS[args.model].requests))
    if args.cold:
        chosen = dataclasses.replace(chosen, ttft={n: chosen.ttft.get(n, 5 if n <= 8192 else 3) for n in args.cold})
    return dataclasses.replace(chosen, prompt=getattr(args, "prompt", chosen.prompt))


def at_most(sizes: dict[int, int], requests: int) -> dict[int, int]:
    """Return the sizes with keys up to the running requests of a server."""
    return {n: tokens for n, tokens in sizes.items() if n <= requests}


class OutOfTime(Exception):
    """The time limit of --seconds is reached. The argument, if any, names what was skipped."""


def tiny_model(folder: Path) -> Path:
    """Return the folder of a new tiny model of the same generation as the one in `folder`."""
    from dsv4_sglang.testing.tiny import make_tiny
    from dsv4_sglang.testing.tiny_config import TinySpec
    from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41

    made = scratch_folder("benchmark")
    if json.loads((folder / "config.json").read_text())["model_type"] in V41_MODEL_TYPES:
        return make_tiny_v41(made, TinyV41Spec(heads=8))
    return make_tiny(made, TinySpec(heads=8, ratios=(0, 4, 128)))


class Bench:
    """A model with dummy weights and servers of it. In a dry run it is a tiny model on the CPU.

    Args:
        args: the command line (`command_line.resolve`).
        folder: folder of the servers' logs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.sizes, self.folder, self.seed = args, sizes_of(args), folder, 0
        self.model = MODELS[args.model].folder
        if args.dry_run:
            self.model = tiny_model(self.model)
        if args.gpus:
            # This process uses a GPU too: it must be the first GPU of its own servers, not of a parallel benchmark.
            os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
        config = json.loads((self.model / "config.json").read_text())
        self.vocab: int = config.get("text_config", config)["vocab_size"]

    # Servers

    def base(self) -> list[str]:
        """Return the flags of a server for the model's number of requests, in a dry run for two.

        SGLang divides the requests by the data-parallel ranks itself. The batch size of a graph is that of one rank.
        """
        interval = ["--decode-log-interval", str(self.sizes.log_interval)]
        if self.args.dry_run:
            return ["--max-running-requests", "2", "--context-length", "4096", *interval]
        requests = MODELS[self.args.model].requests
        batches = [str(n) for n in GRAPH_BATCHES if n <= requests // self.args.dp]
        return [
            *("--mem-fraction-static", str(self.args.memory)),
            *("--max-running-requests", str(requests), "--cuda-graph-bs-decode", *batches),
            *interval,
        ]

    def flags(self, base: Sequence[str]) -> list[str]:
        """Return the flags of every server: `base`, then those of the options. --flags come last, so that they win."""
        args = self.args
        return [
            *(() if args.dry_run else ("--load-format", "dummy", *MODELS[args.model].flags)),
            *base,
            *(("--tp-size", str(args.tp)) if args.tp > 1 else ()),
            *(("--dp-size", str(args.dp), "--enable-dp-attention") if args.dp > 1 else ()),
            *(speculation(args.speculate) if args.speculate else ()),
        ]

    def environment(self) -> dict[str, str]:
        """Return additional variables of every server. With dummy weights no draft is right, so acceptance is
        simulated."""
        args, cores = self.args, {}
        if args.dry_run and args.tp > 1:
            cores = {"SGLANG_CPU_OMP_THREADS_BIND": servers.one_core_each(args.tp)}
        return {
            **cores,
            **({"SGLANG_DSV4_FP4_EXPERTS": "1"} if MODELS[args.model].fp4_experts else {}),
            **({"SGLANG_SIMULATE_ACC_LEN": str(args.accept_length)} if args.speculate else {}),
        }

    def added(self, subject: str) -> str:
        """Return the flags of one server in addition to those of every server."""
        return f"{flags_of_servers(self.args.model)[subject]} {self.args.flags}".strip()

    def server(self, subject: str, label: str, base: Sequence[str], **environment: str) -> Server:
        """Return a server that is not started yet.

        Args:
            subject: key of `command_line.flags_of_servers`.
            label: name of the log, and of the server in messages.
            base: flags of the program.
            **environment: additional variables of the server.
        """
        flags = [*self.flags(base), *shlex.split(self.added(subject))]
        argv, variables = servers.command(self.model, flags, is_ours(subject), self.args.dry_run)
        variables |= self.environment() | environment
        return Server(f"{subject} {label}", argv, variables, self.folder / "logs" / f"{label}-{subject}.log")

    @contextlib.contextmanager
    def serving(
        self, subject: str, label: str, base: Sequence[str], **environment: str
    ) -> Iterator[tuple[Server, dict[str, Any]]]:
        """Start a server, yield it with the facts of its rows, and stop it. Arguments as for `server`.

        The facts: name, flags beyond those of the program, whole command, seconds to start, sizes of the cache.

        Raises:
            OutOfTime: the time limit is reached.
            RuntimeError: the server does not start.
        """
        self.check_time()
        server = self.server(subject, label, base, **environment)
        with servers.running(server, min(self.args.start_timeout, self.seconds_left())):
            # Results name the model, not its folder on this machine.
            words = [self.args.model if word == str(self.model) else word for word in server.argv[1:]]
            facts = {
                "subject": subject,
                "flags": self.added(subject),
                "command": shlex.join(words),
                "start_s": round(server.start_seconds, 1),
                "max_total_num_tokens": servers.max_total_tokens(server.url),
            }
            yield server, facts | servers.sizes(server.lines())

    @contextlib.contextmanager
    def served(
        self, url: str, subject: str, label: str, base: Sequence[str]
    ) -> Iterator[tuple[Endpoint, dict[str, Any]]]:
        """Yield the running server at `url` with the facts of its rows; without a URL, do as `serving`."""
        if url:
            facts = {"subject": "running", "flags": "", "max_total_num_tokens": servers.max_total_tokens(url)}
            yield Endpoint(url), facts
            return
        with self.serving(subject, label, base) as (server, facts):
            yield server, facts

    def seconds_left(self) -> float:
        return max(1.0, self.args.deadline - time.monotonic())

    def check_time(self) -> None:
        if time.monotonic() > self.args.deadline:
            raise OutOfTime

    # Prompts

    def prompt(self, tokens: int) -> list[int]:
        """Return random token ids, different ones at each call."""
        self.seed += 1
        return servers.random_prompt(tokens, self.vocab, self.seed)

    def prompts(self, requests: int) -> list[list[int]]:
        return [self.prompt(self.sizes.prompt) for _ in range(requests)]

    def warm_up(self, server: Server, *, bursts: Iterable[int] = (), prompts: Iterable[int] = ()) -> None:
        """Run every measured size once with other tokens, because kernels compile when a shape first occurs.

        The number of prompts per prefill step of a burst is not controlled. That does not matter: decode log lines
        count only while all requests decode.

        Args:
            server: running server.
            bursts: numbers of concurrent requests.
            prompts: lengths of single prompts.
        """
        for requests in sorted({*bursts}):
            server.generate(self.prompts(requests), WARM_UP_TOKENS)
        # Each rank of DP attention loads its own kernels, and single prompts go to one rank only.
        ranks = [{"routed_dp_rank": rank} for rank in range(self.args.dp)] if self.args.dp > 1 else [{}]
        for tokens in sorted({*prompts}):
            for rank in ranks:
                server.generate(self.prompt(tokens), WARM_UP_TOKENS, **rank)

    # Measures

    def decode(self, server: Server) -> Iterator[dict[str, Any]]:
        """Yield the decode rate of each number of requests: that of the server's log, and the times between tokens as
        one of the clients sees them."""
        for requests, steps in self.sizes.decode.items():
            # Log lines count steps, and with speculation a step generates several tokens.
            tokens = int(steps * self.args.accept_length) if self.args.speculate else steps
            prompts = self.prompts(requests)
            mark, start = server.mark(), time.monotonic()
            answer = burst(server, prompts, tokens)
            seconds = time.monotonic() - start
            time.sleep(0.3)  # wait for the last lines of the log
            rate = servers.decode_rate(server.lines(mark), requests)
            yield {
                "measure": "decode tokens/s",
                "at": requests,
                **(dataclasses.asdict(rate) if rate else {"value": None}),
                "between_tokens_ms": between_tokens(answer),
                "with prefill": requests * tokens / seconds,
            }

    def ttft(self, server: Server) -> Iterator[dict[str, Any]]:
        """Yield the times to the first token of prompts that are sent alone and have no prefix in the cache."""
        for tokens, repeats in self.sizes.ttft.items():
            times = []
            for _ in range(repeats):
                prompt = self.prompt(tokens)
                start = time.monotonic()
                server.generate(prompt, 1)
                times.append(1e3 * (time.monotonic() - start))
            value = statistics.median(times)
            yield {"measure": "TTFT ms", "at": tokens, "value": value, "low": min(times), "high": max(times)}


def speculation(steps: int) -> tuple[str, ...]:
    """Return the flags for a chain of `steps` drafts by the model's own NextN layer."""
    return (
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)),
    )


def burst(server: Server, prompts: Sequence[list[int]], tokens: int) -> Answer:
    """Send prompts at once and wait for all answers. Return that of the last prompt, which is streamed."""
    *others, last = prompts
    streamed = Client(server.url).prepared(array("i", last), tokens)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(server.generate, others, tokens) if others else None
        answer = streamed()
        if rest is not None:
            rest.result()
    return answer


def between_tokens(answer: Answer) -> dict[str, float] | None:
    """Return the distribution of the times between deliveries of a stream, in ms.

    The first quarter is left out, because other requests of the burst are prefilled meanwhile. With speculation a
    delivery has the tokens of one round.
    """
    counted = answer.arrivals[len(answer.arrivals) // 4 :]
    gaps = [after - before for before, after in pairwise(counted)]
    return spread(gaps) if gaps else None


def settle(run: Callable[[], float], faster: float, most: int) -> int:
    """Repeat `run`, which returns its seconds, until it is not `faster` times as fast as before. Return the number of
    runs, from 2 to `most`."""
    times = [run()]
    while len(times) < most and (len(times) == 1 or faster * times[-1] < times[-2]):
        times.append(run())
    return len(times)


def append_rows(
    args: argparse.Namespace,
    measure: Callable[[str, int], Generator[dict[str, Any], None, None]],
    show: Callable[[dict[str, Any], str], None],
    **common: Any,
) -> int:
    """Start each server as often as asked, and append its rows to the file --out as they come.

    Args:
        args: the command line.
        measure: yields the rows of one start, given the server and the number of the start.
        show: prints a row, given the row and its line in the file.
        **common: further fields of each row.

    Returns:
        The exit status: 1 if a server failed.
    """
    exit_on_time_limit()
    failed = 0
    for number, subject in orders(args):
        added = {"start": number, "input": "ids", "environment": environment(), **common}
        try:
            with contextlib.closing(measure(subject, number)) as rows:
                for row in rows:
                    line = json.dumps({**row, **added})
                    if args.out is not None:
                        args.out.parent.mkdir(parents=True, exist_ok=True)
                        with args.out.open("a") as file:
                            file.write(line + "\n")
                    show(row, line)
        except OutOfTime as skipped:
            print(f"{subject}: --seconds {args.seconds:.0f} is over. {skipped}", file=sys.stderr, flush=True)
        except (RuntimeError, OSError) as error:
            failed += 1
            print(f"{subject} failed: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0
