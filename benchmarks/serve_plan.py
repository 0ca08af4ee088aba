"""Plan of `benchmarks.serve`: models, sizes, flags of both servers."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.environment import ROOT

CONFIGS = ROOT / "benchmarks" / "configs"
# Requests of the whole server, over all its ranks.
MAX_REQUESTS = 256
GRAPH_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
PROMPT = 1024
FIT_PROMPT, FIT_TOKENS = 32768, 64


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its defaults. `memory` is the share of a GPU for weights and cache."""

    folder: Path
    memory: float
    start_seconds: float
    measures: str


MODELS = {
    "flashshape": Model(CONFIGS / "flashshape", 0.6, 240, "decode,ttft,fit"),
    "v4flash": Model(CONFIGS / "v4flash", 0.85, 420, "decode,ttft"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Attributes:
        decode: concurrent requests -> tokens of each.
        ttft: prompt tokens -> repeats.
        profile: numbers of concurrent requests.
        profile_tokens: tokens of each, enough to find the requests running in the log and then to profile them.
        turnover: clients -> mean tokens of an answer.
    """

    decode: dict[int, int]
    ttft: dict[int, int]
    fit_requests: int = 48
    fit_memory: float = 0.075
    prompt: int = PROMPT
    fit_prompt: int = FIT_PROMPT
    profile: tuple[int, ...] = (1, 16, 64, 256)
    profile_tokens: int = 256
    profile_prompt: int = 8192
    log_interval: int = 20
    turnover: dict[int, int] = dataclasses.field(default_factory=lambda: {64: 512})
    requests_a_client: int = 4


FULL = Plan({1: 256, 16: 512, 64: 512, 256: 384}, {8192: 5, 65536: 3})
# Seven decode log lines at each number of requests. At the real widths a step of 256 requests takes 18 ms.
SHORT = Plan({1: 160, 16: 160, 64: 160, 256: 160}, {8192: 5, 65536: 3})
QUICK = Plan({1: 128, 16: 256, 64: 256}, {8192: 3, 65536: 2}, profile=(1, 64))
DRY = Plan(
    {1: 24, 2: 24},
    {64: 2},
    fit_requests=3,
    fit_memory=0.1,
    prompt=20,
    fit_prompt=100,
    profile=(1, 2),
    profile_tokens=80,
    profile_prompt=64,
    log_interval=4,
    turnover={2: 16},
    requests_a_client=2,
)


def plan(args: argparse.Namespace) -> Plan:
    if args.dry_run:
        return DRY
    chosen = QUICK if args.quick else SHORT if args.model == "v4flash" else FULL
    chosen = dataclasses.replace(chosen, prompt=args.prompt)
    if not args.decode:
        return chosen
    return dataclasses.replace(chosen, decode={int(n): chosen.decode.get(int(n), 160) for n in args.decode.split(",")})


def tokens_of_burst(args: argparse.Namespace, tokens: int) -> int:
    """Return the tokens to request. Log lines count steps, and with speculation a step generates several tokens."""
    return int(tokens * args.accept_length) if args.speculate else tokens


def flags(args: argparse.Namespace, memory: float) -> list[str]:
    """Return the flags of either server. SGLang divides the requests by the data-parallel ranks itself; the batch size
    of a graph is that of one rank."""
    interval = ["--decode-log-interval", str(plan(args).log_interval)]
    if args.dry_run:
        return ["--max-running-requests", "2", "--context-length", "4096", *interval, *args.flags.split()]
    batches = [str(n) for n in GRAPH_BATCHES if n <= MAX_REQUESTS // args.dp]
    return [
        *("--load-format", "dummy", "--mem-fraction-static", str(memory)),
        *("--max-running-requests", str(MAX_REQUESTS), "--cuda-graph-bs-decode", *batches),
        *(("--tp-size", str(args.tp)) if args.tp > 1 else ()),
        *(("--dp-size", str(args.dp), "--enable-dp-attention") if args.dp > 1 else ()),
        *(speculation(args.speculate) if args.speculate else ()),
        *interval,
        *args.flags.split(),
    ]


def speculation(steps: int) -> tuple[str, ...]:
    """Return the flags for a chain of `steps` drafts by the model's own NextN layer."""
    return (
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)),
    )


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of either server. With dummy weights no draft is right, so SGLang simulates acceptance."""
    return {"SGLANG_SIMULATE_ACC_LEN": str(args.accept_length)} if args.speculate else {}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--model", choices=MODELS, default="flashshape", help="in benchmarks/configs (%(default)s)")
    options.add_argument("--decode", default="", help="concurrent requests, as in 64,256 (default: 1,16,64,256)")
    options.add_argument("--prompt", type=int, default=PROMPT, help="tokens of their prompts (%(default)s)")
    options.add_argument("--tp", type=int, default=1, help="GPUs of a server (%(default)s)")
    options.add_argument("--dp", type=int, default=1, help="ranks of DP attention among them (%(default)s)")
    options.add_argument("--gpus", default="", help="the servers' GPUs, as in 2,3 (default: the first ones)")
    options.add_argument("--speculate", type=int, default=0, help="EAGLE drafts per round, as in 3 (default: none)")
    options.add_argument(
        "--accept-length", type=float, default=2.49, help="accepted tokens per speculative round (%(default)s)"
    )
    options.add_argument(
        "--mem-fraction-static", type=float, dest="memory", help="default: 0.6 flashshape, 0.85 v4flash"
    )
    options.add_argument("--start-timeout", type=float, help="seconds to start (default: 240 flashshape, 420 v4flash)")


def resolve(options: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in defaults that depend on the model, and reject options that do not fit together."""
    model = MODELS[args.model]
    args.memory = model.memory if args.memory is None else args.memory
    args.start_timeout = model.start_seconds if args.start_timeout is None else args.start_timeout
    args.measure = model.measures if args.measure is None else args.measure
    if args.decode and not all(n.isdigit() and 0 < int(n) <= MAX_REQUESTS for n in args.decode.split(",")):
        options.error(f"--decode {args.decode}: expected numbers of 1 to {MAX_REQUESTS} requests, separated by commas")
    measures = args.measure.split(",")
    if unknown := set(measures) - {"decode", "ttft", "fit", "turnover", "profile"}:
        options.error(f"--measure {min(unknown)}: expected some of decode, ttft, fit, turnover, profile")
    if unknown := set(args.servers.split(",")) - {"ours", "in-tree"}:
        options.error(f"--servers {min(unknown)}: expected ours, in-tree or both")
    if args.dp < 1 or args.tp < 1 or args.tp % args.dp:
        options.error(f"--tp {args.tp} --dp {args.dp}: expected --dp to divide the {args.tp} GPUs evenly")
    if args.dry_run and (args.tp > 1 or args.gpus):
        options.error("--dry-run has one process on the CPU: leave out --tp, --dp and --gpus")
    if args.gpus and (not args.gpus.replace(",", "").isdigit() or len(args.gpus.split(",")) != args.tp):
        options.error(
            f"--gpus {args.gpus}: expected the numbers of {args.tp} GPUs, separated by commas, for --tp {args.tp}"
        )
    if "fit" in measures and args.model != "flashshape":
        options.error(f"--measure fit needs the small weights of flashshape; --model is {args.model}")
