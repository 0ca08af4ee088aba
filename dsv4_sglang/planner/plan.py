"""The memory plan of a server: weights as SGLang builds them, the cache by the functions that size its pools."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from dsv4_sglang.cache.host_rows import host_block_bytes, host_row_bytes
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.planner.ask_sglang import REJECTIONS, in_tree_capacity
from dsv4_sglang.planner.choice import ENTRY_DTYPES, Choice
from dsv4_sglang.planner.gpus import BEFORE_WEIGHTS, BESIDE_WEIGHTS
from dsv4_sglang.planner.reserves import activation_bytes, graph_bytes, prefill_graph_bytes, token_table_bytes
from dsv4_sglang.planner.weights import count_weights
from dsv4_sglang.srt.host_cache.sizing import host_demand
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.memory.sizing import GIB, StateDemand, demand_of, memory_after_slots, tokens_of_pool


class Part(NamedTuple):
    """A part of one GPU's memory. `known` says how its size is known."""

    group: str
    name: str
    bytes: int
    known: str


@dataclass(frozen=True)
class Plan:
    """Capacity of a choice. `available_gib` (memory for the cache), `demand` and `tokens` are those of one process."""

    choice: Choice
    layout: CacheLayout
    weights: dict[str, int]
    available_gib: float
    demand: StateDemand
    tokens: int

    @property
    def replicas(self) -> int:
        """Number of independent caches: one per server, and under DP attention one per replica of a server."""
        return self.choice.count // self.choice.tp * self.choice.dp

    @property
    def total_tokens(self) -> int:
        return self.tokens * self.replicas

    @property
    def requests(self) -> int:
        """Number of requests of `choice.request` tokens whose blocks fit."""
        return self.tokens // (-(-self.choice.request // BLOCK) * BLOCK) * self.replicas

    @property
    def at_once(self) -> int:
        """Number of these requests that also have a state slot."""
        return min(self.requests, self.demand.running * self.replicas)

    @property
    def snapshots(self) -> int:
        return self.demand.snapshots * self.replicas

    @property
    def host_gb(self) -> int:
        """GB (10^9 bytes) of host memory of all caches. The processes of a cache share its copy on the host."""
        return self.choice.host_gb * self.replicas

    @property
    def host_tokens(self) -> int:
        """Tokens that fit in the host memory of all caches, without a storage."""
        schemas = [schema for schema in self.layout.schemas if schema.entries_per_block]
        blocks, _ = host_demand(
            device_blocks=self.tokens // BLOCK,
            device_snapshots=self.demand.snapshots,
            block_bytes=host_block_bytes([PagedKVPool(schema, 1, torch.device("cpu")) for schema in schemas]),
            snapshot_bytes=host_row_bytes(self.layout.snapshot_bytes, spare=0),
            ratio=0,
            size_gb=self.choice.host_gb,
            max_snapshots=self.choice.options.max_snapshots,
            host_snapshots=self.choice.options.host_snapshots,
        )
        return blocks * BLOCK * self.replicas

    @property
    def parts(self) -> list[Part]:
        """The whole memory of a GPU. Graphs and reserve are outside of `--mem-fraction-static`."""
        layout, demand = self.layout, self.demand
        blocks = sum(part.bytes for part in layout.block_parts(self.tokens // BLOCK + 1))  # with SGLang's dummy
        slots = (demand.slots + 1) * layout.slot_bytes  # with SGLang's dummy
        parts = [
            *(Part("weights", name, size, "computed") for name, size in self.weights.items()),
            Part("weights", "loaded beside them", BESIDE_WEIGHTS, "fitted to runs"),
            Part("state slots", f"{demand.running} requests, {demand.staging} staging", slots, "computed"),
            Part("snapshots", f"{demand.snapshots} snapshots", demand.snapshots * layout.snapshot_bytes, "computed"),
            Part("blocks", f"{self.tokens // BLOCK} blocks of {BLOCK} tokens", blocks, "computed"),
            Part("graphs", "CUDA graphs of decode", graph_bytes(self.choice), "SGLang's estimate"),
            Part("graphs", "CUDA graphs of prefill steps", prefill_graph_bytes(self.choice), "upper bound"),
            Part("reserve", "context, NCCL", BEFORE_WEIGHTS, "fitted to a run"),
            Part("reserve", "token tables of requests", token_table_bytes(self.choice), "computed"),
        ]
        left = self.choice.gpu.memory - sum(part.bytes for part in parts)
        return [*parts, Part("reserve", "activations, workspaces", left, "what is left")]

    @cached_property
    def in_tree_tokens(self) -> int | None:
        """Tokens of SGLang's own cache in all processes with the same flags and memory, None if SGLang rejects them."""
        choice = self.choice
        try:
            held = in_tree_capacity(choice.model.text, self.available_gib, **choice.sglang_fields())
        except REJECTIONS:
            return None
        return held.tokens * self.replicas

    def notes(self) -> Iterator[str]:
        """Yield the disadvantages of the choice."""
        if not self.has_room_for_activations:
            wanted = activation_bytes(self.choice)
            yield f"{self.parts[-1].bytes / GIB:.1f} GiB left for activations, SGLang expects {wanted / GIB:.1f}"

    @property
    def has_room_for_activations(self) -> bool:
        """True if the remaining memory is at least SGLang's estimate for activations."""
        return self.parts[-1].bytes >= activation_bytes(self.choice)


def planned_layout(choice: Choice) -> CacheLayout:
    """Return the layout of the cache that a server with this choice builds."""
    return served_layout(
        choice.model.config,
        ENTRY_DTYPES[choice.kv_cache_dtype],
        choice.options,
        "cpu",
        sm100=choice.gpu.sm100,
        draft_tokens=choice.draft_tokens,
        draft_layers=choice.draft_layers,
    )


def plan(choice: Choice) -> Plan:
    """Plan the memory of a choice.

    Raises:
        ValueError: the weights, the slots or one request of the context length do not fit. The message says what to do.
    """
    counted = count_weights(choice.model, choice.experts, choice.tp, choice.dp)
    weights, until_shared = dict(counted.parts), 0
    if choice.draft_tokens and counted.draft is not None:
        weights[counted.draft.name], until_shared = counted.draft.layer, counted.draft.until_shared
    # SGLang frees the draft model's own embedding after it has sized the cache: room for activations then.
    loaded = sum(weights.values()) + BESIDE_WEIGHTS + until_shared
    # SGLang: free memory after loading, less the share (1 - mem_fraction) of what was free before
    # (`KVCacheConfigurator._profile_available_bytes`).
    before = choice.gpu.memory - BEFORE_WEIGHTS
    available_gib = (before * choice.mem_fraction - loaded) / GIB
    if available_gib <= 0:
        raise ValueError(_too_large(choice, loaded, before))
    layout = planned_layout(choice)
    demand = demand_of(
        layout,
        available_gib,
        running=choice.running // choice.dp,
        step_tokens=choice.chunk // choice.dp,
        max_snapshots=choice.options.max_snapshots,
    )
    left_gib = memory_after_slots(layout, demand, available_gib)
    tokens = tokens_of_pool(layout, int(left_gib * GIB), choice.served_context)
    made = Plan(choice, layout, weights, available_gib, demand, tokens)
    if (left := made.parts[-1].bytes) < 0:
        raise ValueError(
            f"--mem-fraction-static {choice.mem_fraction:g} leaves {-left / GIB:.1f} GiB too little outside of it: "
            f"token tables of {choice.running // choice.dp} requests of {choice.served_context} tokens take "
            f"{token_table_bytes(choice) / GIB:.1f} GiB, CUDA graphs about "
            f"{(graph_bytes(choice) + prefill_graph_bytes(choice)) / GIB:.1f}. Lower it, --max-running-requests or "
            "--context-length"
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
    larger = (n for n in (2, 4, 8) if n > choice.tp and isinstance(attempt(choice, count=n, tp=n), Plan))
    fitting = next(larger, None)
    return f"{text}. {'Take larger GPUs' if fitting is None else f'What fits: --count {fitting}'}"


def attempt(choice: Choice, **changes: Any) -> Plan | str:
    """Return the plan of a choice with other fields, or the reason why there is none."""
    try:
        return plan(replace(choice, **changes))
    except ValueError as error:
        return str(error)
