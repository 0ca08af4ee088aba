"""What a layer writes in a step: the one call of the op `append`, for `standalone` and for a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.schema import LayerCacheSchema
from dsv4_sglang.cache.step import StepMetadata


@dataclass(frozen=True)
class LayerWeights:
    """What `append` takes of a layer's weights. Norm weights bf16 or fp32, the rest fp32."""

    kv_norm: Tensor
    """[512]"""
    rope: Tensor
    """[positions, 64] cos and sin interleaved, of this layer's frequencies (SPEC 1.3)."""
    eps: float = 1e-6
    entry_norm: Tensor | None = None
    """[512], CSA and HCA."""
    ape: Tensor | None = None
    """Position bias: CSA [4, 1024] = [previous | current], HCA [128, 512]."""
    index_norm: Tensor | None = None
    """[128], CSA."""
    index_ape: Tensor | None = None
    """[4, 256], CSA."""


class Projections(NamedTuple):
    """A step's raw projections for one layer: `kv` [T, 512] bf16 or fp32; `kv_score` fp32, CSA [T, 2048] = [k_prev |
    k_cur | z_prev | z_cur], HCA [T, 1024] = [k | z]; `index_kv_score` fp32 [T, 512] like CSA's with 128 a group.
    """

    kv: Tensor
    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None


class LayerTables(NamedTuple):
    """Where a layer's rows, compressor states, entries and keys lie; None what its kind does not have. The last three
    are kept for who reads them: they follow from the lengths of the requests."""

    ring: Tensor
    compressor_state: Tensor | None
    entries: Tensor | None
    index_keys: Tensor | None
    swa_pos: Tensor | None = None
    swa_head: Tensor | None = None
    tail_len: Tensor | None = None


def append_layer(
    schema: LayerCacheSchema,
    tables: LayerTables,
    weights: LayerWeights,
    inputs: Projections,
    step: StepMetadata,
    window: Tensor | None,
) -> None:
    """Write everything that the layer keeps of the step's tokens; `window`: the workspace of a prefill step, None in a
    decode step. What each tensor is: `dsv4_sglang.ops.reference.append.append`."""
    torch.ops.dsv4_sglang.append(
        *inputs,
        weights.kv_norm,
        weights.entry_norm,
        weights.index_norm,
        weights.ape,
        weights.index_ape,
        weights.rope,
        weights.eps,
        schema.ratio,
        schema.kv_format.code,
        schema.key_format.code,
        step.slots,
        step.prefix_lens,
        step.query_start,
        step.token_request,
        step.out_loc,
        step.track_slots,
        tables.ring,
        tables.compressor_state,
        tables.entries,
        tables.index_keys,
        window,
        tables.swa_pos,
        tables.swa_head,
        tables.tail_len,
    )
