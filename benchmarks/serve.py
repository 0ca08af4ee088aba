"""Benchmark serving with `launch_server`, ours and SGLang's own.

    python -m benchmarks.serve [--servers ours,in-tree] [--rounds 1] [--measure decode,ttft,fit] [--out DIR]
    python -m benchmarks.serve --model v4flash --tp 2 --measure decode,ttft,profile
    python -m benchmarks.serve --model v4flash --tp 4 --dp 4
    python -m benchmarks.serve --speculate 3 --measure decode,ttft
    python -m benchmarks.serve --model v4flash --tp 2 --servers in-tree --gpus 2,3 --out DIR2   # parallel to GPUs 0,1

Models (benchmarks/configs, dummy weights):

- flashshape: 43 layers with the ratios of V4-Flash and small widths,
- v4flash: V4-Flash at its real widths with 128 of its 256 experts in FP8, for two or more GPUs.

One server runs at a time on the same GPUs, both with the same flags. A round starts each server once; rounds alternate
the order. Every size runs once with other tokens before it is timed, because kernels compile when a shape first occurs.
Measures:

- decode: N prompts (of 1024 random tokens, or --prompt) at once. The rate is the median of the server's own decode log
  lines, added over the ranks of DP attention. The time of a step is reported too: with speculation, tokens/s depends on
  the random acceptance length, and the time of a speculative round does not.
- ttft: one prompt alone, one token.
- fit: a second start with the same small memory for both, and more 32K prompts than it holds. The result is the largest
  number of requests that ran at once.
- turnover: N clients, each sending one request after the other, with answers of different lengths. Tokens/s includes
  all prefills, and with `--flags "--enable-hierarchical-cache ..."` all writes to the host.
- profile: a decode step at each number of requests and one prefill, kernel by kernel. Read the result with
  `python -m benchmarks.profile_steps`.

Logs are stored beside the JSON file, which is updated after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import profile_steps, report, serve_plan, servers
from benchmarks.serve_plan import FIT_PROMPT, FIT_TOKENS, MAX_REQUESTS
from benchmarks.servers import Server

WARM_UP_TOKENS = 4


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.plan = serve_plan.plan(args)
        self.model = serve_plan.MODELS[args.model].folder
        self.seed = 0
        if args.dry_run:
            from dsv4_sglang.testing.tiny import TinySpec, make_tiny

            self.model = make_tiny(report.scratch_folder("serve"), TinySpec(ratios=(0, 4, 128)))
        self.vocab = json.loads((self.model / "config.json").read_text())["vocab_size"]

    def flags(self, memory: float) -> list[str]:
        return serve_plan.flags(self.args, memory)

    def server(self, subject: str, label: str, memory: float) -> Server:
        argv, environment = servers.command(self.model, self.flags(memory), subject == "ours", self.args.dry_run)
        environment |= serve_plan.environment(self.args)
        log = Path(self.args.out) / "logs" / f"serve-{subject}-{label}.log"
        return Server(f"{subject} {label}", argv, environment, log)

    def prompt(self, tokens: int) -> list[int]:
        self.seed += 1
        return servers.random_prompt(tokens, self.vocab, self.seed)

    def prompts(self, requests: int) -> list[list[int]]:
        return [self.prompt(self.plan.prompt) for _ in range(requests)]

    def decode(self, server: Server) -> Iterator[dict[str, Any]]:
        for requests, steps in self.plan.decode.items():
            tokens = serve_plan.tokens_of_burst(self.args, steps)
            prompts = self.prompts(requests)
            mark, start = server.mark(), time.monotonic()
            server.generate(prompts, tokens)
            seconds = time.monotonic() - start
            time.sleep(0.3)  # wait for the last lines of the log
            rate = servers.decode_rate(server.lines(mark), requests)
            yield {
                "measure": "decode tokens/s",
                "at": requests,
                **(dataclasses.asdict(rate) if rate else {"value": None}),
                "with prefill": requests * tokens / seconds,
            }

    def turnover(self, server: Server) -> Iterator[dict[str, Any]]:
        for clients, tokens in self.plan.turnover.items():
            # Answers of 0.5 to 1.5 times the length, so that requests end and are saved all the time.
            lengths = [tokens // 2 + tokens * (7 * i % 16) // 16 for i in range(self.plan.requests_a_client * clients)]
            asked = [(self.prompt(self.plan.prompt), length) for length in lengths]
            before, start = servers.host_copies(server.url), time.monotonic()
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(lambda one: server.generate(*one), asked))
            seconds = time.monotonic() - start
            row = {"measure": "turnover tokens/s", "at": clients, "value": sum(lengths) / seconds, "seconds": seconds}
            server.generate(self.prompt(self.plan.prompt), 1)  # counters are published when requests start and end
            copies = {name: value - before[name] for name, value in servers.host_copies(server.url).items()}
            yield row | ({"host copies": copies} if copies else {})

    def ttft(self, server: Server) -> Iterator[dict[str, Any]]:
        for tokens, repeats in self.plan.ttft.items():
            times = []
            for _ in range(repeats):
                prompt = self.prompt(tokens)
                start = time.monotonic()
                server.generate(prompt, 1)
                times.append(1e3 * (time.monotonic() - start))
            value = statistics.median(times)
            yield {"measure": "TTFT ms", "at": tokens, "value": value, "low": min(times), "high": max(times)}

    def profile(self, server: Server) -> Iterator[dict[str, Any]]:
        taken = {
            f"decode {n}": partial(profile_steps.decode, server, self.prompts(n), self.plan.profile_tokens)
            for n in self.plan.profile
        }
        prompt = self.plan.profile_prompt
        taken[f"prefill {prompt}"] = partial(profile_steps.prefill, server, self.prompt(prompt))
        for at, take in taken.items():
            row = {"measure": profile_steps.MEASURE, "at": at}
            try:
                summary = take()
            except RuntimeError as error:  # the next profile may succeed
                yield row | {"value": None, "error": f"{type(error).__name__}: {error}"}
            else:
                yield row | {"value": summary.period_us or None, **dataclasses.asdict(summary)}

    def warm_up(self, server: Server, measures: list[str]) -> None:
        """Run every measured size once.

        The number of prompts per prefill step of a burst is not controlled. That does not matter: decode log lines
        count only while all requests decode.
        """
        bursts = {*(self.plan.decode if "decode" in measures else ())}
        bursts |= {*(self.plan.turnover if "turnover" in measures else ())}
        bursts |= {*(self.plan.profile if "profile" in measures else ())}
        for requests in sorted(bursts):
            server.generate(self.prompts(requests), WARM_UP_TOKENS)
        prompts = {*(self.plan.ttft if "ttft" in measures else ())}
        prompts |= {self.plan.profile_prompt} if "profile" in measures else set()
        # Each rank of DP attention loads its own kernels, and single prompts go to one rank only.
        ranks = [{"routed_dp_rank": rank} for rank in range(self.args.dp)] if self.args.dp > 1 else [{}]
        for tokens in sorted(prompts):
            for rank in ranks:
                server.generate(self.prompt(tokens), 1, **rank)

    def main_start(self, subject: str, number: int, measures: list[str]) -> Generator[dict[str, Any], None, None]:
        """Start a server, measure everything except `fit`, and stop it.

        Args:
            subject: "ours" or "in-tree".
            number: number of the round.
            measures: names of the measures.
        """
        server = self.server(subject, str(number), self.args.memory)
        base = {"subject": subject, "round": number}
        with servers.running(server, self.args.start_timeout):
            yield base | {"measure": "start s", "at": "", "value": server.start_seconds}
            ranks = servers.cache_tokens(server.request("/server_info"), self.args.dp)
            row = {"measure": "tokens in the cache", "at": "", "value": sum(ranks), **servers.sizes(server.lines())}
            if len(ranks) > 1:
                row["note"] = (
                    f"value: sum over the {len(ranks)} ranks, each with a cache of its own; the rest: one rank"
                )
                row["of ranks"] = ranks
            yield base | row
            fits = min(MAX_REQUESTS, sum(tokens // (FIT_PROMPT + FIT_TOKENS) for tokens in ranks))
            yield base | {"measure": "32K requests that fit (computed)", "at": "", "value": fits}
            start = time.monotonic()
            self.warm_up(server, measures)
            yield base | {"measure": "warm-up s", "at": "", "value": time.monotonic() - start}
            for measure in ("decode", "turnover", "ttft", "profile"):
                if measure in measures:
                    yield from (base | row for row in getattr(self, measure)(server))

    def fit_start(self, subject: str, number: int) -> Generator[dict[str, Any], None, None]:
        """Start with memory for a few 32K requests, and with fewer request slots, because each slot costs state."""
        server = self.server(subject, f"fit-{number}", self.plan.fit_memory)
        if not self.args.dry_run:
            server.argv[server.argv.index("--max-running-requests") + 1] = "64"
            server.argv += ["--context-length", str(2 * FIT_PROMPT)]
        with servers.running(server, self.args.start_timeout):
            mark = server.mark()
            prompts = [self.prompt(self.plan.fit_prompt) for _ in range(self.plan.fit_requests)]
            start = time.monotonic()
            server.generate(prompts, FIT_TOKENS if not self.args.dry_run else 8)
            seconds = time.monotonic() - start
            time.sleep(0.3)
            row = {"subject": subject, "round": number, "measure": "32K requests at once (measured)", "at": ""}
            yield row | {
                "value": servers.most_running(server.lines(mark)),
                "seconds for all": seconds,
                "cache": server.request("/server_info").get("max_total_num_tokens"),
                **servers.sizes(server.lines()),
            }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over the rounds, ours beside in-tree."""
    found: dict[tuple[str, Any], dict[str, list[float]]] = {}
    for row in rows:
        if row.get("value") is not None:
            found.setdefault((row["measure"], row["at"]), {}).setdefault(row["subject"], []).append(row["value"])
        if "step_ms" in row:
            found.setdefault(("ms per step or speculative round", row["at"]), {}).setdefault(row["subject"], []).append(
                row["step_ms"]
            )
    lines = []
    for (measure, at), values in found.items():
        line: dict[str, Any] = {"measure": measure, "at": at}
        line |= {subject: statistics.fmean(of_subject) for subject, of_subject in values.items()}
        line |= {f"{subject} rounds": [round(v, 1) for v in of_subject] for subject, of_subject in values.items()}
        if line.get("ours") and line.get("in-tree"):
            line["ours / in-tree"] = line["ours"] / line["in-tree"]
        lines.append(line)
    return lines


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__)
    options.add_argument("--servers", default="ours,in-tree", help="servers, in the order of the first round")
    options.add_argument(
        "--measure", help="some of decode,ttft,fit,turnover,profile (default: those of the first three for the model)"
    )
    options.add_argument("--rounds", type=int, default=1, help="starts of each server (%(default)s)")
    options.add_argument("--flags", default="", help="more flags for both servers")
    serve_plan.add_options(options)
    args = options.parse_args(argv)
    serve_plan.resolve(options, args)
    if args.gpus:
        # This process uses a GPU too: it must be the first GPU of its own servers, not of a parallel benchmark.
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
    bench = Bench(args)
    measures = args.measure.split(",")
    settings = {"flags": bench.flags(args.memory), "model": args.model, "tp": args.tp, "dp": args.dp, "gpus": args.gpus}
    settings |= serve_plan.environment(args)
    result = report.Report("serve", args, settings)

    def shown(rows: Generator[dict[str, Any], None, None]) -> Iterator[dict[str, Any]]:
        """Print rows as they come."""
        with contextlib.closing(rows):
            for row in rows:
                figures = [
                    f"{name} {row[name]:.6g}"
                    for name in ("value", "low", "high", "step_ms")
                    if row.get(name) is not None
                ]
                why = row.get("error") or row.get("split", "no figure")
                print(row["subject"], row["measure"], row["at"], *(figures or [why]), flush=True)
                yield row

    subjects = ["ours"] if args.dry_run else args.servers.split(",")
    for number in range(1, args.rounds + 1):
        order = subjects if number % 2 else subjects[::-1]
        for subject in order:
            if set(measures) - {"fit"}:
                rows = bench.main_start(subject, number, measures)
                result.part(f"serve/{subject}/{number}", partial(shown, rows))
        for subject in order:
            if "fit" in measures:
                result.part(f"fit/{subject}/{number}", partial(shown, bench.fit_start(subject, number)))
    columns = ["measure", "at", "ours", "in-tree", "ours / in-tree", "ours rounds", "in-tree rounds"]
    result.table("serving", columns, compare(result.rows))
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
