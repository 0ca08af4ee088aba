"""Schemas of layers, and the storage that a number of requests needs.

A layer's schema is that of `cache.schema`, which servers use too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import torch

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import HcaState, LayerCacheSchema, SchemaOptions, build_schema, v4_specs
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.model.layer_schedule import AttentionType, LayerSpec

if TYPE_CHECKING:
    from typing import Unpack

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "BlockBudget",
    "HcaState",
    "LayerCacheSchema",
    "build_schema",
    "compute_block_budget",
]

# Tokens of a block, before compression: lcm(4, 128).
BLOCK_SIZE_ORIGINAL_TOKENS = BLOCK_TOKENS


class BlockBudget(TypedDict):
    """Storage that a load needs.

    `csa` and `hca` count the entries of a layer of that kind, which compress 4 or 128 tokens each; 0 if the schedule
    has no such layer. `blocks` counts blocks of 128 tokens, which all layers share: 32 of `csa` and one of `hca` are in
    each. `KVCacheManager` takes `blocks` for both kinds of layers.

    `block_bytes` and `state_bytes` are the bytes of one block and of one state slot in all layers, `bytes` those of all
    blocks and slots.
    """

    csa: int
    hca: int
    blocks: int
    state_slots: int
    block_bytes: int
    state_bytes: int
    bytes: int


def compute_block_budget(
    config: DSV4Config,
    schedule: Sequence[LayerSpec],
    max_context_len: int,
    max_requests: int,
    **options: Unpack[SchemaOptions],
) -> BlockBudget:
    """Return the storage for a number of requests of equal length.

    A block is allocated with its first token, so a request takes ceil(max_context_len / 128) blocks.

    Args:
        config: configuration of the model.
        schedule: kinds of the layers.
        max_context_len: tokens of each request.
        max_requests: number of requests.
        options: as in `build_schema`.

    Raises:
        ValueError: as in `build_schema`, or a length or number below 1.
    """
    for name, value in (("max_context_len", max_context_len), ("max_requests", max_requests)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    layout = CacheLayout(v4_specs(config, schedule, **options), torch.device("cpu"))
    blocks = max_requests * math.ceil(max_context_len / BLOCK_SIZE_ORIGINAL_TOKENS)
    entries = {schema.kind: blocks * schema.entries_per_block for schema in layout.schemas}
    return BlockBudget(
        csa=entries.get(AttentionType.CSA, 0),
        hca=entries.get(AttentionType.HCA, 0),
        blocks=blocks,
        state_slots=max_requests,
        block_bytes=layout.block_bytes,
        state_bytes=layout.slot_bytes,
        bytes=blocks * layout.block_bytes + max_requests * layout.slot_bytes,
    )
