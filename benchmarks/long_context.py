"""Measure conversations of a million tokens: prefill, hits, decode, eviction to the host, retraction.

    python -m benchmarks.long_context --out OUT/long_context.jsonl --seconds 560
    python -m benchmarks.long_context --speculate 3 --out OUT/long_context.jsonl --seconds 560
    python -m benchmarks.long_context --tier host --out OUT/long_context.jsonl --seconds 560

Rows in this order, so that a run that ends early has the first ones:

- memory: tokens of the pool and bytes of the GPU that are in use, beside those that `dsv4-sglang plan` computes.
  Each later row has the bytes in use when it was written (`used_gib`).
- cold: time to first token of a prompt that no cache has.
- turn (--tier device): turns of 200 and of 8,160 new tokens, the latter a prefill step of 8,192 behind a million.
- decode tokens/s (--tier device): 1, 4 and 16 requests that share the whole conversation.
- two in turn: turns of two conversations, one after the other. Both must hit (`cached`). With --tier host the device
  holds one of them only, so each turn evicts one conversation and loads the other from the host.
- retraction (--tier host): a request of a million tokens is retracted, the other conversation takes its room, and the
  request resumes (columns of `benchmarks.retract`).

Lengths are rounded as in `benchmarks.turns`. --tokens sets another length.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import command_line, retract
from benchmarks.bench import append_rows
from benchmarks.client import Client
from benchmarks.command_line import MODELS
from benchmarks.environment import gpu, used_memory
from benchmarks.servers import Server
from benchmarks.turns import REMAINDER, Conversations, Load
from dsv4_sglang.srt.memory.sizing import tokens_of_context

TOKENS, DRY_TOKENS = 1_000_000, 1_000
# Tokens of the context beyond the conversation: new tokens and answers.
BEYOND, DRY_BEYOND = 48_576, 280
# With the rest of the conversation's last page, 8,160 new tokens are one prefill step of 8,192.
NEW, DRY_NEW = (200, 8_192 - REMAINDER), (20, 40)
REQUESTS, DRY_REQUESTS = 32, 4
GRAPH_BATCHES = (1, 2, 4, 8, 16, 32)
# Concurrent requests -> steps. The server parses each request for most of a second, so the first answers must be long
# enough to meet the last one. A speculative round takes about three times as long as a step.
DECODE = {1: 256, 4: 1024, 16: 3072}
STEPS_OF_A_ROUND = 3
ROUNDS, DRY_ROUNDS = 3, 1
HOST_RATIO = 4
# Prompt that is prefilled before the first cold one, so that no kernel is compiled in it.
WARM_UP_TOKENS, DRY_WARM_UP_TOKENS = 20_000, 300


def planned(config: Path, memory: int, args: argparse.Namespace, context: int, running: int) -> dict[str, float]:
    """Return what `dsv4-sglang plan` computes: tokens of the pool, and GiB of a GPU less what is left for activations.

    Args:
        config: folder of the model's config.json.
        memory: bytes of the GPU.
        args: the command line.
        context: --context-length of the server.
        running: its --max-running-requests.
    """
    from dsv4_sglang.planner import ask_sglang
    from dsv4_sglang.planner.choice import Choice
    from dsv4_sglang.planner.gpus import Gpu
    from dsv4_sglang.planner.models import Format, Model
    from dsv4_sglang.planner.plan import plan

    ask_sglang.import_sglang()
    model = Model.of(str(config))
    experts = Format.FP4 if MODELS[args.model].fp4_experts else Format.FP8
    made = plan(
        Choice(
            model=model,
            gpu=Gpu("GPU", memory, "as torch reports"),
            count=args.tp,
            tp=args.tp,
            dp=1,
            experts=experts if model.quantised else Format.BF16,
            running=running,
            mem_fraction=args.memory,
            context_length=context,
            request=context,
            draft_tokens=args.speculate + 1 if args.speculate else 0,
        )
    )
    return {"planned_tokens": made.tokens, "planned_gib": sum(part.bytes for part in made.parts[:-1]) / 2**30}


class Bench(retract.Bench):
    """Servers for conversations of `args.tokens` tokens."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__(args, folder)
        dry = args.dry_run
        self.context = args.tokens + (DRY_BEYOND if dry else BEYOND)
        self.running = DRY_REQUESTS if dry else REQUESTS
        self.new = DRY_NEW if dry else NEW
        self.from_host = args.tier == "host"
        self.conversation: list[int] = []
        if not dry:
            shorter = STEPS_OF_A_ROUND if args.speculate else 1
            self.sizes = dataclasses.replace(self.sizes, decode={n: steps // shorter for n, steps in DECODE.items()})

    @property
    def plan(self) -> retract.Plan:
        sizes = retract.DRY if self.args.dry_run else retract.FULL
        return dataclasses.replace(sizes, prompt=self.args.tokens, pool=self.context, rounds=1)

    def prompts(self, requests: int) -> list[list[int]]:
        """Return prompts that share the conversation and end differently."""
        return [[*self.conversation, *self.prompt(self.new[0])] for _ in range(requests)]

    def pools(self) -> list[str]:
        """Return the flags of a server. With --tier host its pool holds one conversation."""
        flags = ["--context-length", str(self.context), "--max-running-requests", str(self.running)]
        flags += ["--decode-log-interval", str(self.sizes.log_interval), "--enable-metrics"]
        if not self.args.dry_run:
            flags += ["--mem-fraction-static", str(self.args.memory)]
            flags += ["--cuda-graph-bs-decode", *map(str, GRAPH_BATCHES)]
        if self.from_host:
            flags += ["--max-total-tokens", str(tokens_of_context(self.context))]
            flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)]
        return flags

    def planned(self) -> dict[str, float]:
        """Return the figures of `planned`, {} without a GPU or with --tier host, whose pool is given.

        The planner hides the GPUs from its process, so it has one of its own.
        """
        if self.args.dry_run or self.from_host:
            return {}
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            made = partial(planned, self.model, gpu()["memory_bytes"], self.args, self.context, self.running)
            return pool.submit(made).result()

    def rows(self, subject: str, number: int) -> Generator[dict[str, Any], None, None]:
        """Yield the rows of one start of a server.

        Args:
            subject: name of the server.
            number: number of the start.

        Raises:
            OutOfTime: the time limit is reached.
        """
        beside = self.planned()
        of_host = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(self.plan.interval)}
        label, variables = f"long_context-{self.args.tier}-{number}", of_host if self.from_host else {}
        with self.serving(subject, label, self.pools(), **variables) as (server, facts):
            memory = {"measure": "memory", "tokens": facts["max_total_num_tokens"], **beside}
            for row in self._measured(server, memory):
                used = used_memory()
                more = {} if used is None else {"used_gib": round(used / 2**30, 2)}
                yield {**row, "at": row.get("at", self.args.tokens), **more, "server": facts}
                self.check_time()

    def _measured(self, server: Server, memory: dict[str, Any]) -> Iterator[dict[str, Any]]:
        args, rounds = self.args, DRY_ROUNDS if self.args.dry_run else ROUNDS
        held = Conversations(Client(server.url), self.prompt, args.tier, rounds=rounds, deadline=args.deadline)
        next_turn, *longer = [Load(args.tokens, new, 1) for new in self.new]
        yield memory
        self.warm_up(server, prompts=(DRY_WARM_UP_TOKENS if args.dry_run else WARM_UP_TOKENS,))
        server.flush()
        yield self._cold(held, next_turn)
        self.conversation = held.prefixes[args.tokens][0].tolist()
        if not self.from_host:
            for load in (next_turn, *longer):
                yield held.measure(load)
            yield from self.decode(server)
        yield self._cold(held, next_turn)
        yield self._in_turn(held, next_turn, rounds)
        if self.from_host:
            other = held.prefixes[args.tokens][1].tolist()
            both = [[*prefix, *self.prompt(self.new[0])] for prefix in (self.conversation, other)]
            for row in self.retractions(server, *both):
                yield {"measure": "retraction", **row}

    def _cold(self, held: Conversations, load: Load) -> dict[str, Any]:
        answer = held.begin(load)
        return {"measure": "cold", "value": round(1e3 * answer.first_token_s, 1), "cached": answer.cached}

    def _in_turn(self, held: Conversations, load: Load, rounds: int) -> dict[str, Any]:
        """Return the row of turns of two conversations, of which the first turn of each is not timed."""
        answers = [held.turn(load, number)() for _ in range(1 + rounds) for number in (0, 1)]
        return held.summary(load, answers[2:]) | {"measure": "two in turn"}


def line(row: dict[str, Any]) -> str:
    """Return a row as text for the screen."""
    left_out = {"server", "measure", "at", "load", "tier", "warm_rounds", "slow_rounds", "low", "high", "lines"}
    figures = {name: value for name, value in row.items() if name not in left_out}
    return f"{row['server']['subject']:12} {row['measure']} {row['at']} {json.dumps(figures)}"


def parsed(argv: list[str] | None) -> argparse.Namespace:
    options = command_line.lines_parser(__doc__)
    options.add_argument("--tier", choices=("device", "host"), default="device", help="where conversations hit")
    options.add_argument("--tokens", type=int, help=f"tokens of a conversation ({TOKENS})")
    command_line.add_servers(options, "ours")
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    args.tokens = args.tokens if args.tokens is not None else DRY_TOKENS if args.dry_run else TOKENS
    if not DRY_TOKENS <= args.tokens <= TOKENS:
        options.error(f"--tokens {args.tokens}: expected {DRY_TOKENS} to {TOKENS}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    settings = {name: getattr(args, name) for name in ("model", "tp", "tier", "tokens", "speculate", "dry_run")}
    made = Bench(args, args.out.parent)
    return append_rows(args, made.rows, lambda row, _: print(line(row), flush=True), settings=settings)


if __name__ == "__main__":
    raise SystemExit(main())
