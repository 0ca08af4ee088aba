"""What a launch would hold: weights from shapes, the cache by the functions that size a server's pools."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import torch

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS
from dsv4_sglang.srt.layout import served_layout
from dsv4_sglang.srt.options import KEY, Options
from dsv4_sglang.srt.sizing import GIB, StateDemand, demand_of, memory_after_slots, tokens_of_pool
from dsv4_sglang.srt.weights import (
    Format,
    Model,
    Split,
    check_split,
    draft_weight_bytes,
    dspark_weight_bytes,
    weight_bytes,
)

MIB = 1 << 20
BEFORE_WEIGHTS = int(1.65 * GIB)
"""CUDA context and NCCL: what of an H200 was not free when SGLang began to load, two GPUs; docs/recipes.md."""
BESIDE_WEIGHTS = int(0.90 * GIB)
"""What loading takes beyond the parameters (compiled kernels, workspaces): mean of four runs; docs/recipes.md."""
MOST_GPUS = 8
"""Of one host."""
DRAFT_TOKENS = 4
"""Of the launch with speculation that is compared with one without: EAGLE 3/1/4."""
ROWS = {"auto": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}


class Gpu(NamedTuple):
    """`memory` is what torch reports as `total_memory`, in bytes; `source` where that was seen (docs/recipes.md)."""

    name: str
    memory: int
    source: str
    sm100: bool = False
    expert_runner: str | None = None
    """SGLang's `--moe-runner-backend` for FP4 experts."""


GPUS = {
    "h100": Gpu("H100", 81089 * MIB, "public logs", expert_runner="marlin"),
    "h200": Gpu("H200", 150_109_880_320, "as torch reports", expert_runner="marlin"),
    "b200": Gpu("B200", 182631 * MIB, "public logs", sm100=True, expert_runner="flashinfer_mxfp4"),
}


@dataclass(frozen=True)
class Choice:
    """A launch: `count` GPUs in servers of `tp` each. Raises ValueError for what no server would take."""

    model: Model
    gpu: Gpu
    count: int
    tp: int
    dp: int
    experts: Format
    running: int = 256
    """--max-running-requests of a server."""
    mem_fraction: float = 0.85
    kv_cache_dtype: str = "auto"
    options: Options = field(default_factory=Options)
    chunk: int = 8192
    """--chunked-prefill-size"""
    context_length: int | None = None
    """None: the model's."""
    request: int = 32768
    """Tokens of the requests that are counted."""
    draft_tokens: int = 0
    """Tokens of a verify step: --speculative-num-draft-tokens of EAGLE, one more than a block of DSPARK, which a model
    with such a head drafts with; 0: no speculation."""

    def __post_init__(self) -> None:
        for flag, value in (("--count", self.count), ("--tp", self.tp), ("--dp", self.dp), ("--context", self.request)):
            if value < 1:
                raise ValueError(f"{flag} is {value}; expected at least 1")
        if self.count % self.tp:
            raise ValueError(f"--count {self.count} is no multiple of --tp {self.tp}: servers have {self.tp} GPUs each")
        check_split(self.model, self.split)
        if self.running < self.dp:
            raise ValueError(
                f"--max-running-requests {self.running} is divided by --dp {self.dp}; expected at least {self.dp}"
            )
        if not 0 < self.mem_fraction < 1:
            raise ValueError(f"--mem-fraction-static is {self.mem_fraction:g}; expected more than 0 and less than 1")
        if self.kv_cache_dtype not in ROWS:
            raise ValueError(f"--kv-cache-dtype is {self.kv_cache_dtype!r}; expected one of {', '.join(ROWS)}")
        if self.chunk < 1 or self.chunk % (self.dp * BLOCK):
            raise ValueError(
                f"--chunked-prefill-size {self.chunk} is {self.chunk / self.dp:g} tokens for each of --dp {self.dp}; "
                f"expected a multiple of {BLOCK}"
            )
        if self.experts is not Format.BF16 and not self.model.quantised:
            raise ValueError(
                f"--experts {self.experts.value}: the weights of {self.model.name} are not quantised, and this package "
                "serves them as they are; give bf16"
            )
        if self.draft_tokens:
            self._check_drafts()
        most = self.model.config.max_position_embeddings
        if not 1 <= self.served_context <= most:
            raise ValueError(f"--context-length is {self.served_context}; expected 1 to {most}, the model's positions")
        if self.request > self.served_context:
            raise ValueError(
                f"--context {self.request} is longer than a request may be: {self.served_context} tokens "
                "(--context-length)"
            )

    def _check_drafts(self) -> None:
        head, given = self.model.dspark, f"--speculative-num-draft-tokens {self.draft_tokens}"
        if head is not None:
            given = f"--speculative-dspark-block-size {self.draft_tokens - 1}"
            if not 2 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
                raise ValueError(f"{given}: expected 1 to {MAX_DRAFT_TOKENS - 1}, the tokens of a block")
            if self.dp > 1:
                raise ValueError(f"{given}: DSPARK with --dp {self.dp} is refused at start; give --dp 1")
        elif not 2 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"{given}: expected 2 to {MAX_DRAFT_TOKENS}, a token and its drafts, or 0 for no speculation"
            )
        elif not self.model.config.num_nextn_predict_layers:
            raise ValueError(f"{given}: {self.model.name} has no NextN layer to draft with (num_nextn_predict_layers)")
        if self.options.hca_state == "raw":
            raise ValueError(f"{given}: rejected drafts cannot be taken back from --hca-state raw; give online")

    @property
    def split(self) -> Split:
        return Split(self.tp, self.dp)

    @property
    def draft_layers(self) -> int:
        """Layers of the draft model, each with a ring in every slot."""
        if not self.draft_tokens:
            return 0
        return 1 if self.model.dspark is None else self.model.dspark.stages

    @property
    def served_context(self) -> int:
        return self.model.config.max_position_embeddings if self.context_length is None else self.context_length

    def gpus(self, count: int) -> Choice:
        """The same with one server of `count` GPUs."""
        return replace(self, count=count, tp=count)

    def command(self) -> str:
        """Of one server."""
        released = self.model.path.startswith("deepseek-ai/")  # with experts in FP4
        path = "CHECKPOINT-WITH-FP8-EXPERTS" if released and self.experts is Format.FP8 else self.model.path
        words = ["dsv4-sglang", "serve", "--model-path", path, "--tp-size", str(self.tp)]
        if self.dp > 1:
            words += ["--dp-size", str(self.dp), "--enable-dp-attention"]
        if self.experts is Format.FP4 and self.gpu.expert_runner:
            words += ["--moe-runner-backend", self.gpu.expert_runner]
        if self.kv_cache_dtype != "auto":
            words += ["--kv-cache-dtype", self.kv_cache_dtype]
        words += ["--max-running-requests", str(self.running), "--chunked-prefill-size", str(self.chunk)]
        words += ["--mem-fraction-static", f"{self.mem_fraction:g}"]
        if self.draft_tokens and (head := self.model.dspark):
            words += ["--speculative-algorithm", "DSPARK"]
            if (block := self.draft_tokens - 1) != head.block:
                words += ["--speculative-dspark-block-size", str(block)]
        elif self.draft_tokens:
            words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(self.draft_tokens - 1)]
            words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(self.draft_tokens)]
        if self.context_length is not None:
            words += ["--context-length", str(self.context_length)]
        given = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        if chosen := {name: value for name, value in given.items() if value != getattr(Options(), name)}:
            words += ["--json-model-override-args", json.dumps({KEY: chosen})]
        return shlex.join(words)


class Part(NamedTuple):
    """A piece of one GPU's memory; `known` says how."""

    group: str
    name: str
    bytes: int
    known: str


@dataclass(frozen=True)
class Plan:
    """What `choice` gives; `demand` and `tokens` are those of one process."""

    choice: Choice
    layout: CacheLayout
    weights: dict[str, int]
    available_gib: float
    """For the cache, in one process."""
    demand: StateDemand
    tokens: int

    @property
    def replicas(self) -> int:
        """Caches that hold different requests: every server's, and under DP attention each of its replicas'."""
        return self.choice.count // self.choice.tp * self.choice.dp

    @property
    def total_tokens(self) -> int:
        return self.tokens * self.replicas

    @property
    def requests(self) -> int:
        """Those of `choice.request` tokens each whose blocks fit."""
        return self.tokens // (-(-self.choice.request // BLOCK) * BLOCK) * self.replicas

    @property
    def at_once(self) -> int:
        """Those of them that have a state slot."""
        return min(self.requests, self.demand.running * self.replicas)

    @property
    def checkpoints(self) -> int:
        return self.demand.checkpoints * self.replicas

    @property
    def parts(self) -> list[Part]:
        """The whole memory of a GPU. Graphs and reserve lie outside of `--mem-fraction-static`."""
        layout, demand = self.layout, self.demand
        blocks = sum(part.bytes for part in layout.block_parts(self.tokens // BLOCK + 1))  # with SGLang's dummy
        parts = [
            *(Part("weights", name, size, "computed") for name, size in self.weights.items()),
            Part("weights", "loaded beside them", BESIDE_WEIGHTS, "fitted to runs"),
            Part(
                "state slots",
                f"{demand.running} requests, {demand.staging} staging",
                (demand.slots + 1) * layout.slot_bytes,
                "computed",
            ),
            Part(
                "checkpoints",
                f"{demand.checkpoints} checkpoints",
                demand.checkpoints * layout.checkpoint_bytes,
                "computed",
            ),
            Part("blocks", f"{self.tokens // BLOCK} blocks of {BLOCK} tokens", blocks, "computed"),
            Part("graphs", "CUDA graphs of decode", graph_bytes(self.choice), "SGLang's estimate"),
            Part("reserve", "context, NCCL", BEFORE_WEIGHTS, "fitted to a run"),
            Part("reserve", "token tables of requests", token_table_bytes(self.choice), "computed"),
        ]
        left = self.choice.gpu.memory - sum(part.bytes for part in parts)
        return [*parts, Part("reserve", "activations, workspaces", left, "what is left")]

    def notes(self) -> Iterator[str]:
        """What speaks against the choice."""
        choice = self.choice
        wanted = activation_bytes(choice)
        if (left := self.parts[-1].bytes) < wanted:
            yield f"{left / GIB:.1f} GiB left for activations, SGLang reckons with {wanted / GIB:.1f}"


def token_table_bytes(choice: Choice) -> int:
    """SGLang's `req_to_token`: an int32 for every token that each request may have, and a row for none. It is built
    behind the division of memory, so it lies in what `--mem-fraction-static` leaves. Behind the context there is room
    for the tokens of two verify steps, up to the end of a block (`get_req_to_token_extra_context_len`)."""
    extra = 2 * choice.draft_tokens + BLOCK - 1 if choice.draft_tokens else 4
    return (choice.running // choice.dp + 1) * (choice.served_context + extra) * 4


def graph_bytes(choice: Choice) -> int:
    """What SGLang 0.5.17 reckons with (`ServerArgs.reserve_for_graph_mb`): 2 MiB a request of the largest batch that is
    recorded, more under DP attention."""
    recorded = 512 if choice.tp >= 4 or choice.gpu.memory >= 160 * GIB else 256
    requests = min(choice.running // choice.dp, recorded)
    of_dp = 0.0 if choice.dp == 1 else choice.dp * (4.5 if requests > 300 else 3)
    return int(requests * (2 + of_dp)) * MIB


def activation_bytes(choice: Choice) -> int:
    """What SGLang 0.5.17 reckons with (`ServerArgs.pre_capture_activation_reserve_mb`): 1.5 MiB a token of a chunk and
    some more, on large GPUs at least 10 GiB."""
    mib = 512 + max(choice.chunk, 2048) * 3 // 2 + choice.tp * 128
    return max(mib, 10 * 1024 if choice.gpu.memory > 60 * GIB else 0) * MIB


def plan(choice: Choice) -> Plan:
    """ValueError, with what to do, if the weights, the slots or one request of the context length do not fit."""
    weights, until_shared = weight_bytes(choice.model, choice.split, choice.experts), 0
    if choice.draft_tokens and choice.model.dspark:
        weights["DSPARK head"] = dspark_weight_bytes(choice.model, choice.split, choice.experts)
    elif choice.draft_tokens:
        weights["NextN layer"], until_shared = draft_weight_bytes(choice.model, choice.split, choice.experts)
    # What is shared later is free then, and part of what is left for activations.
    loaded = sum(weights.values()) + BESIDE_WEIGHTS + until_shared
    # SGLang: free memory after loading, less the share (1 - mem_fraction) of what was free before
    # (`KVCacheConfigurator._profile_available_bytes`).
    before = choice.gpu.memory - BEFORE_WEIGHTS
    available_gib = (before * choice.mem_fraction - loaded) / GIB
    if available_gib <= 0:
        raise ValueError(_too_large(choice, loaded, before))
    layout = served_layout(
        choice.model.config,
        ROWS[choice.kv_cache_dtype],
        choice.options,
        "cpu",
        sm100=choice.gpu.sm100,
        draft_tokens=choice.draft_tokens,
        draft_layers=choice.draft_layers,
    )
    demand = demand_of(
        layout,
        available_gib,
        running=choice.running // choice.dp,
        step_tokens=choice.chunk // choice.dp,
        max_checkpoints=choice.options.max_checkpoints,
    )
    left_gib = memory_after_slots(layout, demand, available_gib)
    tokens = tokens_of_pool(layout, int(left_gib * GIB), choice.served_context)
    made = Plan(choice, layout, weights, available_gib, demand, tokens)
    if (left := made.parts[-1].bytes) < 0:
        raise ValueError(
            f"--mem-fraction-static {choice.mem_fraction:g} leaves {-left / GIB:.1f} GiB too little for what lies "
            f"outside: token tables of {choice.running // choice.dp} requests of {choice.served_context} tokens take "
            f"{token_table_bytes(choice) / GIB:.1f} GiB, CUDA graphs about {graph_bytes(choice) / GIB:.1f}. Lower it, "
            "--max-running-requests or --context-length"
        )
    return made


def _too_large(choice: Choice, loaded: int, before: int) -> str:
    text = (
        f"{choice.model.name} does not fit into {choice.tp} {choice.gpu.name}: its weights take {loaded / GIB:.1f} GiB "
        f"of a GPU with experts in {choice.experts.value}, and --mem-fraction-static {choice.mem_fraction:g} allows "
        f"{before * choice.mem_fraction / GIB:.1f} of {choice.gpu.memory / GIB:.1f} GiB"
    )
    if loaded / before < 0.9:
        return f"{text}. Raise --mem-fraction-static above {math.ceil(loaded / before * 1000) / 1000:g}"
    larger = next((n for n in (2, 4, 8) if n > choice.tp and _fits(choice, n)), None)
    return f"{text}. {'Take larger GPUs' if larger is None else f'What fits: --count {larger}'}"


def _fits(choice: Choice, count: int) -> bool:
    try:
        plan(choice.gpus(count))
    except ValueError:
        return False
    return True


def others(choice: Choice) -> Iterator[tuple[str, Choice]]:
    """The next smaller and larger choices of each kind, by what changes; some may not fit."""
    config, head = choice.model.config, choice.model.dspark
    for running in (choice.running // 2, choice.running * 2):
        if running >= choice.dp:
            yield f"--max-running-requests {running}", replace(choice, running=running)
    for fraction in (choice.mem_fraction - 0.05, choice.mem_fraction + 0.05):
        if 0 < fraction < 0.97:
            yield f"--mem-fraction-static {fraction:.2f}", replace(choice, mem_fraction=round(fraction, 4))
    rows = "auto" if choice.kv_cache_dtype == "bfloat16" else "bfloat16"
    yield f"--kv-cache-dtype {rows}", replace(choice, kv_cache_dtype=rows)
    state: Literal["online", "raw"] = "online" if choice.options.hca_state == "raw" else "raw"
    if choice.draft_tokens:
        yield "no speculation", replace(choice, draft_tokens=0)
    else:
        yield f"--hca-state {state}", replace(choice, options=replace(choice.options, hca_state=state))
        if head is not None and choice.dp == 1 and state == "raw" and head.block < MAX_DRAFT_TOKENS:
            yield "--speculative-algorithm DSPARK", replace(choice, draft_tokens=head.block + 1)
        elif head is None and config.num_nextn_predict_layers and state == "raw":
            yield f"--speculative-num-draft-tokens {DRAFT_TOKENS}", replace(choice, draft_tokens=DRAFT_TOKENS)
    for dp in (1,) if head is not None and choice.draft_tokens else (1, choice.tp):
        if dp != choice.dp and choice.running >= dp and config.o_groups % (choice.tp // dp) == 0:
            yield f"--dp {dp}", replace(choice, dp=dp)
    for gpus in (choice.tp // 2, choice.tp * 2):
        if gpus < choice.dp or gpus > MOST_GPUS or config.o_groups % max(gpus // choice.dp, 1):
            continue
        if choice.count % gpus == 0:
            yield f"--tp {gpus}", replace(choice, tp=gpus)
        if choice.count == choice.tp:
            yield f"--count {gpus}", choice.gpus(gpus)
