"""Benchmark serving with `launch_server`, ours and SGLang's own.

    python -m benchmarks.serve [--servers ours,in-tree] [--starts 1] [--measure decode,ttft] [--out DIR]
    python -m benchmarks.serve --model v4flash --tp 2 --measure decode,ttft,profile
    python -m benchmarks.serve --model v4flash_fp4 --tp 4 --dp 4
    python -m benchmarks.serve --speculate 3 --measure decode,ttft
    python -m benchmarks.serve --model v4flash --tp 2 --servers in-tree --gpus 2,3 --out DIR2   # parallel to GPUs 0,1

Models (benchmarks/configs, dummy weights):

- flashshape: 43 layers with the ratios of V4-Flash and small widths,
- v4flash: V4-Flash at its real widths with 128 of its 256 experts in FP8, for two or more GPUs,
- v4flash_fp4: the same with all 256 experts in FP4, as it was released, for four or more GPUs,
- v41wide: the 40 layers of V4.1-Flash and its widths except those of the experts, without Engram layers. Servers have
  64 requests. SGLang has modes for it: `--servers ours,sglang,sglang-full,sglang-tails,sglang-encoder-replay,
  sglang-best-tails,sglang-best-full`, which are its default, all layers for all tokens, 1,024 windows of prefixes, none
  of them, and prefill graphs beside 1,024, without and with all layers.

One server runs at a time on the same GPUs, both with the same flags. Every size runs once with other tokens before it
is timed. Measures:

- decode: N prompts (of 1024 random tokens, or --prompt) at once. The rate is the median of the server's own decode log
  lines, added over the ranks of DP attention. The time of a step is reported too: with speculation, tokens/s depends on
  the random acceptance length, and the time of a speculative round does not. One of the N answers is streamed;
  `between_tokens_ms` has the times between its tokens (with speculation, its rounds) as the client sees them.
- ttft: one prompt alone, one token (--cold: other lengths).
- profile: a decode step at each number of requests, one prefill, and the prefill of prompts that hit most of their
  tokens, kernel by kernel. Read the result with `python -m benchmarks.profile_steps`.

Logs are stored beside the JSON file, which is updated after every row. `python -m benchmarks.report` merges starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from benchmarks import bench, command_line, profile_steps, report, servers
from benchmarks.servers import Server

MEASURES = ("decode", "ttft", "profile")


@dataclasses.dataclass(frozen=True)
class Load:
    """Sizes of the measure `profile`.

    Attributes:
        requests: numbers of concurrent requests.
        tokens: tokens of each, enough to find the requests running in the log and then to profile them.
        prompt: tokens of the profiled prefill.
        cached: tokens of the prompts that are stored before the profiled hits.
        hits: new tokens of each hit, and their number at once.
    """

    requests: tuple[int, ...]
    tokens: int
    prompt: int
    cached: int
    hits: tuple[tuple[int, int], ...]


FULL = Load((1, 16, 64, 256), 256, 8192, 20_000, ((200, 1), (1000, 1), (200, 8), (1000, 8)))
QUICK = Load((1, 64), 256, 8192, 20_000, ((1000, 1), (200, 8)))
DRY = Load((1, 2), 80, 64, 300, ((20, 2),))


class Bench(bench.Bench):
    @property
    def load(self) -> Load:
        chosen = DRY if self.args.dry_run else QUICK if self.args.quick else FULL
        most = command_line.MODELS[self.args.model].requests
        return dataclasses.replace(chosen, requests=tuple(n for n in chosen.requests if n <= most))

    def profile(self, server: Server) -> Iterator[dict[str, Any]]:
        load = self.load
        taken = {
            f"decode {n}": partial(profile_steps.decode, server, self.prompts(n), load.tokens) for n in load.requests
        }
        taken[f"prefill {load.prompt}"] = partial(profile_steps.prefill, server, [self.prompt(load.prompt)])
        taken |= {f"{load.cached}+{new}x{n}": partial(self.profile_hits, server, new, n) for new, n in load.hits}
        for at, take in taken.items():
            row = {"measure": profile_steps.MEASURE, "at": at}
            try:
                summary = take()
            except RuntimeError as error:  # the next profile may succeed
                yield row | {"value": None, "error": f"{type(error).__name__}: {error}"}
            else:
                yield row | {"value": summary.period_us or None, **dataclasses.asdict(summary)}

    def profile_hits(self, server: Server, new: int, at_once: int) -> profile_steps.Summary:
        """Profile the prefill of `at_once` prompts that hit all but their last `new` tokens and what a page leaves."""
        stored = [self.prompt(self.load.cached) for _ in range(at_once)]
        for prompt in stored:
            server.generate(prompt, 1)
        first, second = ([[*prompt, *self.prompt(new)] for prompt in stored] for _ in range(2))
        server.generate(first, 1)  # kernels compile when a shape first occurs
        return profile_steps.prefill(server, second)

    def start(self, subject: str, number: int) -> Generator[dict[str, Any], None, None]:
        """Start a server, measure, and stop it.

        Args:
            subject: key of `command_line.flags_of_servers`.
            number: number of the start.
        """
        base = {"subject": subject, "round": number, "flags": self.added(subject)}
        wanted = self.args.measure
        with self.serving(subject, f"serve-{number}", self.base()) as (server, facts):
            yield base | {"measure": "start s", "at": "", "value": server.start_seconds}
            ranks = servers.cache_tokens(server.request("/server_info"), self.args.dp)
            row = {"measure": "tokens in the cache", "at": "", "value": sum(ranks), **servers.sizes(server.lines())}
            row["command"] = facts["command"]
            if len(ranks) > 1:
                row["note"] = (
                    f"value: sum over the {len(ranks)} ranks, each with a cache of its own; the rest: one rank"
                )
                row["of ranks"] = ranks
            yield base | row
            start, sizes, load = time.monotonic(), self.sizes, self.load
            bursts = {"decode": sizes.decode, "profile": load.requests}
            prompts = {"ttft": sizes.ttft, "profile": (load.prompt,)}
            self.warm_up(
                server,
                bursts=[n for name, found in bursts.items() if name in wanted for n in found],
                prompts=[n for name, found in prompts.items() if name in wanted for n in found],
            )
            yield base | {"measure": "warm-up s", "at": "", "value": time.monotonic() - start}
            for measure in MEASURES:
                if measure in wanted:
                    yield from (base | row for row in getattr(self, measure)(server))


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--measure", default="decode,ttft", help=f"some of {', '.join(MEASURES)} (%(default)s)")
    options.add_argument("--cold", default="", help="tokens of the prompts of ttft, as in 8192,65536 (the default)")
    command_line.add_servers(options, "ours,in-tree")
    command_line.add_decode(options)
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    args.measure = args.measure.split(",")
    if unknown := set(args.measure) - {*MEASURES}:
        options.error(f"--measure {min(unknown)}: expected some of {', '.join(MEASURES)}")
    made = Bench(args, args.out)
    flags = [*made.flags(made.base()), *shlex.split(args.flags)]
    settings = {"flags": flags, "model": args.model, "tp": args.tp, "dp": args.dp, "gpus": args.gpus}
    result = report.Report("serve", args, settings | made.environment() | {"starts": args.starts, "input": "ids"})

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

    for number, subject in command_line.orders(args):
        result.part(f"serve/{subject}/{number}", partial(shown, made.start(subject, number)))
    status = result.close()
    for name in args.servers:
        if name != "ours":
            print(*report.merged(report.figures(result.path), ("ours", name)), sep="\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
