"""Serving with `launch_server`: decode tokens/s, time to the first token, 32K requests at once; ours and SGLang's own.

    python -m benchmarks.serve [--servers ours,in-tree] [--rounds 1] [--measure decode,ttft,fit] [--out DIR]

The model is benchmarks/configs/flashshape: 43 layers with the ratios of V4-Flash and small widths, dummy weights. One
server at a time on the whole GPU, both with the same flags; a round starts each once, rounds alternate the order.
Decode: that many prompts of 1024 random tokens at once, the median of the server's own decode lines. TTFT: one prompt
alone, one token. Fit: a second start with little memory, the same for both, and more 32K prompts than it holds: the
most that ran at once. Logs are kept beside the JSON file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report, servers
from benchmarks.environment import ROOT
from benchmarks.servers import Server

MODEL = ROOT / "benchmarks" / "configs" / "flashshape"
MAX_REQUESTS = 256
PROMPT = 1024
FIT_PROMPT, FIT_TOKENS = 32768, 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a run. `decode`: requests at once, tokens each. `ttft`: prompt tokens, repeats. Memory: fractions."""

    decode: dict[int, int]
    ttft: dict[int, int]
    memory: float
    fit_memory: float
    fit_requests: int
    prompt: int = PROMPT
    fit_prompt: int = FIT_PROMPT


FULL = Plan({1: 256, 16: 512, 64: 512, 256: 384}, {8192: 5, 65536: 3}, 0.6, 0.075, 48)
QUICK = Plan({1: 128, 16: 256, 64: 256}, {8192: 3, 65536: 2}, 0.6, 0.075, 48)
DRY = Plan({1: 24, 2: 24}, {64: 2}, 0.6, 0.1, 3, prompt=20, fit_prompt=100)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.plan = DRY if args.dry_run else QUICK if args.quick else FULL
        self.model = MODEL
        self.seed = 0
        if args.dry_run:
            from dsv4_sglang.testing.tiny import TinySpec, make_tiny

            self.model = make_tiny(Path(tempfile.mkdtemp(prefix="serve_")), TinySpec(ratios=(0, 4, 128)))
        self.vocab = json.loads((self.model / "config.json").read_text())["vocab_size"]

    def flags(self, memory: float) -> list[str]:
        if self.args.dry_run:
            return ["--max-running-requests", "2", "--context-length", "4096", "--decode-log-interval", "4"]
        batches = [str(n) for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)]
        return [
            *("--load-format", "dummy", "--mem-fraction-static", str(memory)),
            *("--max-running-requests", str(MAX_REQUESTS), "--cuda-graph-bs-decode", *batches),
            *("--decode-log-interval", "20", *self.args.flags.split()),
        ]

    def server(self, subject: str, label: str, memory: float) -> Server:
        argv, environment = servers.command(self.model, self.flags(memory), subject == "ours", self.args.dry_run)
        log = Path(self.args.out) / "logs" / f"serve-{subject}-{label}.log"
        return Server(f"{subject} {label}", argv, environment, log)

    def prompt(self, tokens: int) -> list[int]:
        self.seed += 1
        return servers.random_prompt(tokens, self.vocab, self.seed)

    def decode(self, server: Server) -> Iterator[dict[str, Any]]:
        for requests, tokens in self.plan.decode.items():
            mark, start = server.mark(), time.monotonic()
            server.generate([self.prompt(self.plan.prompt) for _ in range(requests)], tokens)
            seconds = time.monotonic() - start
            time.sleep(0.3)  # the log's last lines
            yield {
                "measure": "decode tokens/s",
                "at": requests,
                "value": servers.decode_throughput(server.lines(mark), requests),
                "with prefill": requests * tokens / seconds,
            }

    def ttft(self, server: Server) -> Iterator[dict[str, Any]]:
        for tokens, repeats in self.plan.ttft.items():
            times = []
            for _ in range(repeats):
                prompt = self.prompt(tokens)
                start = time.monotonic()
                server.generate(prompt, 1)
                times.append(1e3 * (time.monotonic() - start))
            yield {"measure": "TTFT ms", "at": tokens, "value": statistics.median(times), "low": min(times)}

    def warm_up(self, server: Server) -> None:
        """First requests compile kernels: every size that is measured goes through once."""
        largest = max(self.plan.decode)
        server.generate([self.prompt(self.plan.prompt) for _ in range(largest)], 4)
        for requests in self.plan.decode:
            server.generate([self.prompt(40) for _ in range(requests)], 4)
        for tokens in self.plan.ttft:
            server.generate(self.prompt(tokens), 2)

    def main_start(self, subject: str, number: int, measures: list[str]) -> Iterator[dict[str, Any]]:
        server = self.server(subject, str(number), self.plan.memory)
        with servers.running(server, self.args.start_timeout):
            base = {"subject": subject, "round": number}
            yield base | {"measure": "start s", "at": "", "value": server.start_seconds}
            info = server.request("/server_info")
            tokens = info.get("max_total_num_tokens")
            yield base | {"measure": "tokens in the cache", "at": "", "value": tokens, **servers.sizes(server.lines())}
            fits = min(info.get("max_running_requests") or MAX_REQUESTS, (tokens or 0) // (FIT_PROMPT + FIT_TOKENS))
            yield base | {"measure": "32K requests that fit (computed)", "at": "", "value": fits}
            self.warm_up(server)
            if "decode" in measures:
                yield from (base | row for row in self.decode(server))
            if "ttft" in measures:
                yield from (base | row for row in self.ttft(server))

    def fit_start(self, subject: str, number: int) -> Iterator[dict[str, Any]]:
        """Fewer requests slots, since each costs state in both servers, and memory for a few 32K requests only."""
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
    """Means over the rounds, ours beside in-tree."""
    found: dict[tuple[str, Any], dict[str, list[float]]] = {}
    for row in rows:
        if row.get("value") is not None:
            found.setdefault((row["measure"], row["at"]), {}).setdefault(row["subject"], []).append(row["value"])
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
    options.add_argument("--servers", default="ours,in-tree", help="which, in the order of the first round")
    options.add_argument("--measure", default="decode,ttft,fit", help="which measures")
    options.add_argument("--rounds", type=int, default=1, help="starts of each server; the issue asks for 2")
    options.add_argument("--first-round", type=int, default=1, help="number of the first round, for a run in pieces")
    options.add_argument("--flags", default="", help="more flags for both servers")
    options.add_argument("--start-timeout", type=float, default=240, help="seconds a server may take to start")
    args = options.parse_args(argv)
    bench = Bench(args)
    measures = args.measure.split(",")
    result = report.Report("serve", args, {"flags": bench.flags(bench.plan.memory), "model": bench.model.name})
    subjects = ["ours"] if args.dry_run else args.servers.split(",")
    for number in range(args.first_round, args.first_round + args.rounds):
        order = subjects if number % 2 else subjects[::-1]
        for subject in order:
            if "decode" in measures or "ttft" in measures:
                result.part(f"serve/{subject}/{number}", partial(bench.main_start, subject, number, measures))
        for subject in order:
            if "fit" in measures:
                result.part(f"fit/{subject}/{number}", partial(bench.fit_start, subject, number))
    columns = ["measure", "at", "ours", "in-tree", "ours / in-tree", "ours rounds", "in-tree rounds"]
    result.table("serving", columns, compare(result.rows))
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
