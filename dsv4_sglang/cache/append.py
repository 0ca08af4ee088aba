"""The cache writes of one layer in a step, for `standalone` and for a server: the ops `append` of V4 and V4.1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.layer_spec import LayerKVSpec
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import V4_KV_FORMATS


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The weights of a layer that `append` needs, in its order. Norm weights are bf16 or fp32, the others fp32.

    Attributes:
        kv_norm: [512].
        entry_norm: [512], layers that write entries.
        index_norm: [128], layers that write index keys.
        ape: position bias, CSA [4, 1024] = [previous | current], HCA [128, 512].
        index_ape: [4, 256], CSA layers.
        rope: [positions, 64], cos and sin interleaved, with the frequencies of this layer (SPEC 1.3).
        eps: epsilon of the norms.
    """

    kv_norm: Tensor
    entry_norm: Tensor | None = None
    index_norm: Tensor | None = None
    ape: Tensor | None = None
    index_ape: Tensor | None = None
    rope: Tensor
    eps: float = 1e-6


class Projections(NamedTuple):
    """Raw projections of a step's tokens for one layer.

    Attributes:
        kv: [T, 512] bf16 or fp32.
        kv_score: CSA fp32 [T, 2048] = [k_prev | k_cur | z_prev | z_cur], HCA fp32 [T, 1024] = [k | z], in V4.1 fp32
            [T, 1024] = [k | z] at ratio 2, bf16 [T, 512] = k at ratio 1.
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
    spec: LayerKVSpec,
    tables: LayerTables,
    weights: LayerWeights,
    inputs: Projections,
    step: StepMetadata,
    window: Tensor | None,
    keys_of: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Write all cache contents that a layer keeps of the step's tokens. See `dsv4_sglang.ops.reference.append.append`
    and `append_v41.append_v41`.

    Args:
        spec: spec of the layer.
        tables: cache tensors of the layer.
        weights: weights of the layer.
        inputs: projections of the step's tokens.
        step: metadata of the step.
        window: window workspace of a prefill step, None in a decode step.
        keys_of: in V4.1, maps entries before RoPE, [T, 512] bf16, to raw index keys [T, 128], in a layer with index
            keys. V4's keys come from a compressor of their own (`Projections.index_kv_score`).
    """
    if spec.ring_format not in V4_KV_FORMATS:
        _append_v41(spec, tables, weights, inputs, step, window, keys_of)
        return
    torch.ops.dsv4_sglang.append(
        *inputs,
        weights.kv_norm,
        weights.entry_norm,
        weights.index_norm,
        weights.ape,
        weights.index_ape,
        weights.rope,
        weights.eps,
        spec.ratio,
        spec.ring_format.code,
        spec.key_format.code,
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


def _append_v41(
    spec: LayerKVSpec,
    tables: LayerTables,
    weights: LayerWeights,
    inputs: Projections,
    step: StepMetadata,
    window: Tensor | None,
    keys_of: Callable[[Tensor], Tensor] | None,
) -> None:
    """Do as `append_layer` in a layer of V4.1, whose index keys are projections of its entries."""
    latents = torch.zeros_like(inputs.kv, dtype=torch.bfloat16) if spec.ratio else None
    tokens = step.slots, step.prefix_lens, step.query_start, step.token_request, step.out_loc
    torch.ops.dsv4_sglang.append_v41(
        inputs.kv,
        inputs.kv_score,
        weights.kv_norm,
        weights.entry_norm,
        weights.rope,
        weights.eps,
        spec.ratio,
        *tokens,
        step.staging_slots,
        tables.ring,
        tables.compressor_state,
        tables.entries,
        latents,
        window,
    )
    if latents is not None and keys_of is not None:
        torch.ops.dsv4_sglang.append_v41_keys(
            keys_of(latents), weights.index_norm, weights.rope, weights.eps, spec.ratio, *tokens, tables.index_keys
        )
