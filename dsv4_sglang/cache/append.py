"""The cache writes of one layer in a step: the call of the op `append`, for `standalone` and for a server."""

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
    """The weights of a layer that `append` needs. Norm weights are bf16 or fp32, the others fp32.

    Attributes:
        kv_norm: [512].
        rope: [positions, 64], cos and sin interleaved, with the frequencies of this layer (SPEC 1.3).
        eps: epsilon of the norms.
        entry_norm: [512], CSA and HCA layers.
        ape: position bias, CSA [4, 1024] = [previous | current], HCA [128, 512].
        index_norm: [128], CSA layers.
        index_ape: [4, 256], CSA layers.
    """

    kv_norm: Tensor
    rope: Tensor
    eps: float = 1e-6
    entry_norm: Tensor | None = None
    ape: Tensor | None = None
    index_norm: Tensor | None = None
    index_ape: Tensor | None = None


class Projections(NamedTuple):
    """Raw projections of a step's tokens for one layer.

    Attributes:
        kv: [T, 512] bf16 or fp32.
        kv_score: fp32, CSA [T, 2048] = [k_prev | k_cur | z_prev | z_cur], HCA [T, 1024] = [k | z].
        index_kv_score: fp32 [T, 512], CSA layers: as `kv_score` with 128 columns per group.
    """

    kv: Tensor
    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None


class LayerTables(NamedTuple):
    """Cache tensors of one layer, None where its kind has none.

    The last three are only written for inspection: their values follow from the lengths of the requests.
    """

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
    """Write all cache contents that a layer keeps of the step's tokens. See `dsv4_sglang.ops.reference.append.append`.

    Args:
        schema: schema of the layer.
        tables: cache tensors of the layer.
        weights: weights of the layer.
        inputs: projections of the step's tokens.
        step: metadata of the step.
        window: window workspace of a prefill step, None in a decode step.
    """
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
        step.staging_slots,
        tables.ring,
        tables.compressor_state,
        tables.entries,
        tables.index_keys,
        window,
        tables.swa_pos,
        tables.swa_head,
        tables.tail_len,
    )
