"""Run the lifecycle fuzzer (`tests/support/lifecycle.py`) against servers of every configuration, or a running server.

    python tests/fuzz.py --requests 25000 --seconds 540      # requests per configuration, seconds in total
    python tests/fuzz.py --configurations eagle --seed 7     # one configuration, a different list of operations
    python tests/fuzz.py --url http://127.0.0.1:30000        # a server with the option integrity_check

Without a GPU, or with --dry-run, the servers are small and run on the CPU. fuzz.json counts the events of each
configuration. A run that finds a violation exits with code 1 and prints the finding and the command that repeats it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.lifecycle import Driver, Shape, Wrong, play

from benchmarks import command_line, report, servers
from benchmarks.servers import Server
from dsv4_sglang.srt.launch.command import OPT_IN_FLAG, OPT_IN_KEY, server_command

HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1", "--speculative-num-steps", "3")
EAGLE += ("--speculative-num-draft-tokens", "4")
RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")


@dataclass(frozen=True)
class Configuration:
    """A configuration of a server.

    Attributes:
        flags: flags in addition to the common ones.
        ranks: ranks of DP attention.
        gpus: GPUs that the server needs on a machine with GPUs.
        nextn: the checkpoint has a NextN layer.
        v41: the checkpoint is DeepSeek-V4.1.
    """

    flags: tuple[str, ...] = ()
    ranks: int = 1
    gpus: int = 1
    nextn: bool = False
    v41: bool = False


CONFIGURATIONS = {
    "plain": Configuration(),
    "host": Configuration(HOST),
    "write back": Configuration((*HOST, "--hicache-write-policy", "write_back")),
    "eagle": Configuration(EAGLE, nextn=True),
    "eagle and host": Configuration((*EAGLE, *HOST), nextn=True),
    "ranks": Configuration(RANKS, ranks=2, gpus=2),
    "ranks and host": Configuration((*RANKS, *HOST), ranks=2, gpus=2),
    "eagle ranks and host": Configuration((*EAGLE, *RANKS, *HOST), ranks=2, gpus=2, nextn=True),
    "v4.1": Configuration(v41=True),
    "v4.1 and host": Configuration(HOST, v41=True),
    "v4.1 ranks and host": Configuration((*RANKS, *HOST), ranks=2, gpus=2, v41=True),
}
# The pools are so small that requests are retracted and cached state is evicted all the time. With prompts up to 512
# tokens the indexer selects all entries (docs/design/prefix_policy.md says why that matters), and short requests begin
# and end more often. Prefill steps are not graphs and take longest: several requests share one, and the end of a chunk
# splits one of them.
ON_GPU = Shape(context=512, burst=1000, together=96)
GPU_FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--max-total-tokens", "12288")
GPU_FLAGS += ("--context-length", "512", "--max-running-requests", "64", "--chunked-prefill-size", "1024")
GPU_FLAGS += ("--schedule-conservativeness", "0.1", "--cuda-graph-max-bs-decode", "64", "--grammar-backend", "none")
GPU_FLAGS += ("--sampling-backend", "pytorch")
GPU_OPTIONS = {"max_snapshots": 160}
ON_CPU = Shape(context=1024, burst=24, together=6)
CPU_FLAGS = ("--dtype", "float32", "--max-total-tokens", "1280", "--context-length", "1024")
CPU_FLAGS += ("--max-running-requests", "6", "--chunked-prefill-size", "256", "--schedule-conservativeness", "0.1")
CPU_FLAGS += ("--sleep-on-idle",)
CPU_OPTIONS = {"max_snapshots": 12}
EXACT = {"entry_format": "fp32", "indexer_format": "fp32"}
OPTIONS = {"integrity_check": True, "snapshot_interval": 512}
# Of log p on CPUs, with fp32 entries, and with the formats of V4.1, whose roundings sums of another order change.
TOLERANCE, TOLERANCE_V41 = 2e-3, 2e-2


def command(name: str, cpu: bool) -> list[str]:
    """Return the command that runs this program for one configuration."""
    return ["python", "tests/fuzz.py", *(["--dry-run"] if cpu else []), "--configurations", name]


def checkpoint(folder: Path, cpu: bool, **fields: Any) -> Path:
    """Return the folder of a tiny checkpoint with these fields of `TinySpec`, made if it does not exist."""
    from dsv4_sglang.testing.tiny import make_tiny
    from dsv4_sglang.testing.tiny_config import TinySpec

    if not folder.exists():
        heads, ratios = (16, (0, 4, 128)) if cpu else (64, (0, 4, 128, 4, 128, 4))
        make_tiny(folder, TinySpec(ratios=ratios, heads=heads, **fields))
    return folder


def checkpoint_v41(folder: Path) -> Path:
    """Return the folder of a tiny V4.1 checkpoint whose indexer selects all entries, made if it does not exist."""
    from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41

    if not folder.exists():
        make_tiny_v41(folder, TinyV41Spec(heads=8, index_topk=ON_CPU.context))
    return folder


def server(name: str, of: Configuration, model: Path, log: Path, cpu: bool) -> Server:
    """Return a server of a configuration, which is not started."""
    options = {**OPTIONS, **(CPU_OPTIONS if cpu else GPU_OPTIONS), **(EXACT if cpu and not of.v41 else {})}
    flags = [*(CPU_FLAGS if cpu else GPU_FLAGS), *of.flags, "--skip-server-warmup", "--enable-metrics"]
    made = server_command(str(model), [*flags, OPT_IN_FLAG, json.dumps({OPT_IN_KEY: options})], cpu)
    environment = {**made.environment, **(servers.CPU_ENVIRONMENT if cpu else {})}
    if not cpu:
        environment |= {**servers.GPU_ENVIRONMENT, "SGLANG_OPT_FP8_WO_A_GEMM": "0"}
    elif of.ranks > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = servers.one_core_each(of.ranks)
    return Server(name, made.argv, environment, log)


class Fuzz:
    def __init__(self, args: Any) -> None:
        self.args, self.cpu = args, args.dry_run or not torch.cuda.is_available()
        self.names = [name for name in args.configurations.split(",") if name] or [
            name for name, of in CONFIGURATIONS.items() if self.cpu or of.gpus <= torch.cuda.device_count()
        ]
        self.end, self.left = time.monotonic() + args.seconds, len(self.names)
        self.models, self.logs = report.scratch_folder("fuzz"), Path(args.out) / "logs"

    def configuration(self, name: str) -> Iterator[dict[str, Any]]:
        of, shape = CONFIGURATIONS[name], ON_CPU if self.cpu else ON_GPU
        limit = (self.end - time.monotonic()) / self.left  # an equal share of the remaining time
        self.left -= 1
        begin = time.monotonic()
        if of.v41:
            model = checkpoint_v41(self.models / "v41")
        else:
            model = checkpoint(self.models / ("nextn" if of.nextn else "plain"), self.cpu, nextn=of.nextn)
        log_file = self.logs / f"fuzz-{name.replace(' ', '-')}.log"
        with servers.running(server(name, of, model, log_file, self.cpu), timeout=900) as running:
            shape = Shape(shape.context, shape.burst, shape.together, of.ranks)
            tolerance = TOLERANCE_V41 if of.v41 else TOLERANCE
            driver = Driver(running.url, self.args.seed, shape, tolerance if self.cpu else None)
            found = self.play(driver, name, limit - (time.monotonic() - begin))
            log = running.lines()
            counted = {key: value for key, value in servers.metrics(running.url).items() if found is None}
        yield {
            **summary(driver, found),
            "retractions": log.count("Retract requests"),
            "host loads": counted.get("host_loaded_bytes", 0),
            "snapshots evicted": counted.get("snapshots_evicted", 0),
        }

    def url(self) -> Iterator[dict[str, Any]]:
        from dsv4_sglang.cli.client import Server as Asked

        ranks = len({one["dp_rank"] for one in Asked.at(self.args.url).integrity()})
        driver = Driver(self.args.url, self.args.seed, Shape(ranks=max(1, ranks), text=False))
        yield summary(driver, self.play(driver, "url", self.args.seconds))

    def play(self, driver: Driver, name: str, limit: float) -> str | None:
        """Play the operations. Print a violation with the command that repeats it.

        Args:
            driver: driver of the server.
            name: name of the configuration.
            limit: time limit in seconds.

        Returns:
            The violation, or None.
        """
        try:
            play(driver, self.args.requests, limit)
        except Wrong as error:
            again = ["python", "tests/fuzz.py", "--url", self.args.url] if self.args.url else command(name, self.cpu)
            again += ["--seed", str(self.args.seed), "--requests", str(self.args.requests)]
            print(f"{name}: {error}\nlogs: {self.logs}\nagain: {shlex.join(again)}", flush=True)
            return str(error)
        return None


def summary(driver: Driver, found: str | None) -> dict[str, Any]:
    worst = max((distance.worst for distance in driver.distances), default=None)
    return {"seed": driver.seed, "found": found, "worst distance": worst, **dict(sorted(driver.seen.items()))}


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--configurations", default="", help=f"some of {', '.join(CONFIGURATIONS)} (all that fit)")
    options.add_argument("--requests", type=int, default=25_000, help="requests per configuration (%(default)s)")
    options.add_argument("--seed", type=int, default=1, help="seed of the operations (%(default)s)")
    options.add_argument("--url", default="", help="use the running server at this URL instead")
    options.set_defaults(seconds=3600.0)
    args = options.parse_args(argv)
    fuzz = Fuzz(args)
    if unknown := [name for name in fuzz.names if name not in CONFIGURATIONS]:
        options.error(f"--configurations {unknown[0]!r}: expected some of {', '.join(CONFIGURATIONS)}")
    result = report.Report("fuzz", args, {"seed": args.seed, "requests": args.requests, "seconds": args.seconds})
    for name in ["url"] if args.url else fuzz.names:
        result.part(name, fuzz.url if args.url else partial(fuzz.configuration, name))
    columns = ["part", "requests", "bursts", "hits", "retractions", "host loads", "compared warm", "found"]
    result.table("events of the configurations", columns)
    found = any(row["found"] for row in result.rows) or bool(result.data["failures"])
    return result.close() or int(found)


if __name__ == "__main__":
    raise SystemExit(main())
