"""The command line of the programs: options, their defaults, and the models and servers that they name."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environment import ROOT
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.flag_names import reject_unknown

RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "benchmarks" / "configs"


@dataclass(frozen=True)
class Model:
    """A model with its defaults.

    Attributes:
        folder: folder with its config.json.
        memory: share of a GPU's memory for weights and cache.
        start_seconds: time limit of a start.
        gpus: least number of GPUs.
        fp4_experts: the experts are in FP4, else in the format of the other weights.
        flags: flags of every server of this model.
        requests: running requests of a server, over all its ranks.
        servers: flags of servers that only this model has, in addition to those of `SERVERS`.
    """

    folder: Path
    memory: float
    start_seconds: float
    gpus: int
    fp4_experts: bool = False
    flags: tuple[str, ...] = ()
    requests: int = 256
    servers: Mapping[str, str] = field(default_factory=dict)


# Prefill graphs of SGLang whose sizes fit the loads of `benchmarks.turns`.
BEST_FLAGS = "--cuda-graph-backend-prefill breakable --cuda-graph-bs-prefill 64 128 256 384 512 1088 1664 1920"
# SGLang keeps the windows of four prefixes per running request by default. Users raise it to this number.
TAILS_FLAGS = "--swa-prefix-tails 1024"
FULL_FLAG = "--no-enable-decoder-swa-bounded-replay"
# Modes of SGLang for DeepSeek-V4.1. By default it computes layers 20 to 39 only for the last 128 tokens of a prefill
# step, which is not exact; "full" computes them for all. "encoder-replay" keeps no window entries of a prefix and
# computes its last 128 tokens again at each hit. "best" adds the flags that users set for speed.
V41_SERVERS = {
    "sglang-full": FULL_FLAG,
    "sglang-tails": TAILS_FLAGS,
    "sglang-encoder-replay": "--enable-encoder-swa-bounded-replay",
    "sglang-best-tails": f"{TAILS_FLAGS} {BEST_FLAGS}",
    "sglang-best-full": f"{FULL_FLAG} {TAILS_FLAGS} {BEST_FLAGS}",
}
MODELS = {
    "flashshape": Model(CONFIGS / "flashshape", 0.6, 240, 1),
    "v4flash": Model(CONFIGS / "v4flash", 0.85, 420, 2),
    "v4flash_fp4": Model(CONFIGS / "v4flash_fp4", 0.85, 900, 4, True, ("--moe-runner-backend", "marlin")),
    "v41wide": Model(CONFIGS / "v41wide", 0.66, 540, 1, requests=64, servers=V41_SERVERS),
}
# Flags of each server in addition to those of the program. "in-tree" is "sglang", by the name that kernels have in the
# results.
SERVERS = {
    "ours": "",
    "ours-eager": "--cuda-graph-backend-prefill disabled",
    "in-tree": "",
    "sglang": "",
    "sglang-best": BEST_FLAGS,
    # What users set for more prefix hits.
    "sglang-windows": f"{BEST_FLAGS} --swa-full-tokens-ratio 0.5",
}


def flags_of_servers(model: str) -> dict[str, str]:
    """Return the flags of each server that a model has, as in `SERVERS`."""
    return {**SERVERS, **MODELS[model].servers}


def is_ours(server: str) -> bool:
    return server.startswith("ours")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this time")
    options.add_argument(
        "--dry-run", action="store_true", help="smallest sizes on the CPU, without the kernels and servers of SGLang"
    )
    return options


def report_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that writes a `report.Report`."""
    options = parser(description)
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file (%(default)s)")
    options.add_argument("--quick", action="store_true", help="the short set")
    options.add_argument("--parts", default="", help="only parts whose name contains one of these, separated by commas")
    options.add_argument("--resume", action="store_true", help="keep the parts in the JSON file, run the missing ones")
    return options


def lines_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that appends rows to a file (`report.Lines`)."""
    options = parser(description)
    options.add_argument("--out", "--output", type=Path, required=True, help="JSON lines, appended; logs beside it")
    options.set_defaults(quick=False)
    return options


def add_model(options: argparse.ArgumentParser) -> None:
    """Add the options of a program that starts servers of one model."""
    options.add_argument("--model", choices=MODELS, default="flashshape", help="in benchmarks/configs (%(default)s)")
    options.add_argument("--flags", default="", help='more flags for all servers, as in --flags="--sleep-on-idle"')
    options.add_argument("--mem-fraction-static", type=float, dest="memory", help="default: 0.6 to 0.85, by the model")
    options.add_argument("--start-timeout", type=float, help="seconds to start (default: that of the model)")
    options.set_defaults(servers="", starts=1, tp=1, dp=1, gpus="", speculate=0, decode="", cold="", url="")


def add_servers(options: argparse.ArgumentParser, default: str) -> None:
    """Add the options of a program that compares servers. `default` names the servers."""
    add_model(options)
    names = ", ".join(SERVERS)
    own = "; ".join(f"{name}: {', '.join(model.servers)}" for name, model in MODELS.items() if model.servers)
    started = f"in the order of the first start (%(default)s): {names}; only of {own}"
    options.add_argument("--servers", default=default, help=started)
    options.add_argument("--starts", type=int, default=1, help="starts of each server, in alternating order")
    options.add_argument("--tp", type=int, default=1, help="GPUs of a server (%(default)s)")
    options.add_argument("--dp", type=int, default=1, help="ranks of DP attention among them (%(default)s)")
    options.add_argument("--gpus", default="", help="the servers' GPUs, as in 2,3 (default: the first ones)")
    options.add_argument("--speculate", type=int, default=0, help="EAGLE drafts per round, as in 3 (default: none)")
    options.add_argument(
        "--accept-length", type=float, default=2.49, help="accepted tokens per speculative round (%(default)s)"
    )


def add_url(options: argparse.ArgumentParser) -> None:
    """Add the options of a program that can use a running server."""
    options.add_argument("--url", default="", help="use the running server at this URL instead of starting any")
    options.add_argument("--vocab", type=int, default=4_000, help="token ids are below this (%(default)s)")


def add_decode(options: argparse.ArgumentParser) -> None:
    options.add_argument("--decode", default="", help="concurrent requests, as in 64,256 (default: 1,16,64,256)")
    options.add_argument("--prompt", type=int, default=1024, help="tokens of their prompts (%(default)s)")


def resolve(options: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Replace lists by their parts, fill in what depends on the model, and reject what does not fit together.

    Nothing has started by then, so that a wrong word costs no time of a GPU.
    """
    model = MODELS[args.model]
    args.memory = model.memory if args.memory is None else args.memory
    args.start_timeout = model.start_seconds if args.start_timeout is None else args.start_timeout
    args.deadline = time.monotonic() + args.seconds
    args.servers = [name for name in args.servers.split(",") if name]
    if unknown := set(args.servers) - flags_of_servers(args.model).keys():
        known = ", ".join(flags_of_servers(args.model))
        options.error(f"--servers {min(unknown)}: expected some of {known} with --model {args.model}")
    if args.url:
        args.servers, args.starts = ["running"], 1
    elif args.dry_run:
        args.servers = ["ours"]
    args.decode = numbers(options, "decode", args.decode, most=model.requests)
    args.cold = numbers(options, "cold", args.cold)
    if args.starts < 1:
        options.error(f"--starts {args.starts}: expected at least 1")
    if args.dp < 1 or args.tp < 1 or args.tp % args.dp:
        options.error(f"--tp {args.tp} --dp {args.dp}: expected --dp to divide the {args.tp} GPUs evenly")
    if args.dry_run and (args.tp > 1 or args.gpus):
        options.error("--dry-run has one process on the CPU: leave out --tp, --dp and --gpus")
    if args.tp < model.gpus and not (args.dry_run or args.url):
        options.error(f"--model {args.model} --tp {args.tp}: expected at least {model.gpus} GPUs")
    if args.gpus and (not args.gpus.replace(",", "").isdigit() or len(args.gpus.split(",")) != args.tp):
        options.error(
            f"--gpus {args.gpus}: expected the numbers of {args.tp} GPUs, separated by commas, for --tp {args.tp}"
        )
    try:
        reject_unknown(shlex.split(args.flags))
    except (LaunchError, ValueError) as error:
        options.error(f"--flags {args.flags!r}: {error}")


def numbers(options: argparse.ArgumentParser, name: str, text: str, most: int | None = None) -> list[int]:
    """Return the positive numbers in the value `text` of the option `name`, which are separated by commas."""
    words = [word for word in text.split(",") if word]
    if not all(word.isdigit() and 0 < int(word) <= (most or math.inf) for word in words):
        bound = f"numbers of 1 to {most} requests" if most else "positive numbers"
        options.error(f"--{name} {text}: expected {bound}, separated by commas")
    return [int(word) for word in words]


def load_of(text: str) -> tuple[int, int, int] | None:
    """Return the three numbers of a load, which is written as 20000+200x8; None for any other text."""
    found = re.fullmatch(r"(\d+)\+(\d+)x(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def orders(args: argparse.Namespace) -> list[tuple[int, str]]:
    """Return (number of the start, server) in execution order. Every second start reverses the order of the servers."""
    return [
        (number, server)
        for number in range(1, args.starts + 1)
        for server in (args.servers if number % 2 else args.servers[::-1])
    ]
