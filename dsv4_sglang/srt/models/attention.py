"""Attention of a layer over this cache. It projects its input, calls the backend through RadixAttention, and projects
the output after the inverse RoPE."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers import dp_attention
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner import get_is_capture_mode
from sglang.srt.models import deepseek_v4 as in_tree
from sglang.srt.utils import add_prefix
from torch import Tensor

from dsv4_sglang.attention.base import MOST_PADDED_HEADS, LayerOutput
from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.srt.attention.layer_ops import IndexQuery, LayerInputs
from dsv4_sglang.srt.cpu import torch_layers
from dsv4_sglang.srt.models.projections import (
    CompressorWeights,
    FusedProjections,
    IndexerWeights,
    Latent,
    ProjectedInput,
)
from dsv4_sglang.srt.models.streams import on_stream, progress_event, wait_for
from dsv4_sglang.srt.sglang.models import takes_quantised_input

# A tensor is complete. A named tuple (SGLang's `AttnOutput`) has this process's part of the sum.
AttentionOutput = Tensor | tuple[Tensor]


def _scales_are_fp32() -> bool:
    """Return True if DeepGEMM takes FP8 scales in fp32 (Hopper), False if as packed powers of two (Blackwell)."""
    from sglang.srt.layers import deep_gemm_wrapper

    return not deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0


def _with_room_for_drafts(config: Any) -> Any:
    """Return the config with additional positions for drafts after the end of the context. The RoPE tables have a row
    for each position.

    A verify step begins at most at the last position of the context. With overlap scheduling the next one is launched
    before the host knows that the request has ended, so it may begin after all tokens of that step.
    """
    from sglang.srt.runtime_context import get_spec

    if not (drafts := get_spec().speculative_num_draft_tokens):
        return config
    wider = copy.copy(config)
    wider.max_position_embeddings += 2 * drafts
    return wider


class GraphRecordedAttention(RadixAttention):
    """RadixAttention that is recorded into CUDA graphs of prefill steps. SGLang's ends the graph before attention and
    runs attention eagerly."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        forward_batch: Any,
        save_kv_cache: bool = True,
        key_value_num_tokens: int | None = None,
        **inputs: Any,
    ) -> LayerOutput:
        return get_attn_backend().forward(q, k, v, self, forward_batch, save_kv_cache, **inputs)


class CachedAttention(in_tree.MqaAttentionBase):
    """Attention of a layer over this cache. The projections and their parameters are SGLang's."""

    # Maximum batch size for several streams, SGLang's limit. Larger batches fill the GPU with a single projection.
    overlap_limit = 64

    def __init__(
        self,
        config: Any,
        layer_id: int,
        quant_config: Any,
        prefix: str,
        streams: list[torch.cuda.Stream] | None,
        is_draft: bool = False,
        **projections: bool,
    ) -> None:
        """Build the attention of a layer.

        Args:
            config: SGLang's config of the model.
            layer_id: number of the layer.
            quant_config: SGLang's quantisation config.
            prefix: prefix of the parameter names.
            streams: CUDA streams for overlap, or None.
            is_draft: the layer belongs to the draft model and has a window only.
            projections: arguments for SGLang's base class that differ from its defaults.
        """
        ratio = 0 if is_draft else config.compress_ratios[layer_id]
        cache_layer = config.num_hidden_layers + layer_id if is_draft else layer_id
        # SGLang would apply YaRN to window-only layers too; the released model does not (SPEC 1.3).
        plain = {} if ratio else {"rope_original_seq_len": 0}
        super().__init__(
            _with_room_for_drafts(config), layer_id, quant_config, prefix, compress_ratio=ratio, **plain, **projections
        )
        self.rope = torch.view_as_real(self.freqs_cis).flatten(1)
        self.compressor, self.indexer = self.make_sources(config, ratio, quant_config, prefix)
        self.attn_mqa = GraphRecordedAttention(
            self.n_local_heads, self.head_dim, self.softmax_scale, num_kv_heads=1, layer_id=cache_layer
        )
        # A draft model may have only one stream.
        overlaps = streams and envs.SGLANG_OPT_USE_MULTI_STREAM_OVERLAP.get()
        self.streams = (*streams, None)[:2] if streams and overlaps else (None, None)
        # SGLang runs the first output projection in FP8 if its weights were loaded with scales.
        self.fp8_wo_a = hasattr(self.wo_a, "weight_scale_inv")
        self.quantises_output = self.fp8_wo_a and _scales_are_fp32()
        # The sinks are padded for kernels that take more heads than this process has. The parameter remains a view of
        # the padded tensor, so that weights that are loaded later arrive here.
        sinks = self.attn_sink.data.new_zeros(self.n_heads + MOST_PADDED_HEADS)
        self.attn_sink.data, self._sinks = sinks[: self.n_heads], sinks[self.attn_tp_rank * self.n_local_heads :]
        self.projections = FusedProjections(self.projections_of_x())

    def make_sources(self, config: Any, ratio: int, quant_config: Any, prefix: str) -> tuple[Any, Any]:
        """Return the modules of the layer's compressor and indexer, or None where it has none."""
        return (
            CompressorWeights(config, ratio, self.head_dim, add_prefix("compressor", prefix)) if ratio else None,
            IndexerWeights(config, quant_config, add_prefix("indexer", prefix)) if ratio == CSA_RATIO else None,
        )

    def maybe_use_decode_attn_tp(self, forward_batch: Any) -> Any:
        """Return a null context: layers are never split over processes here."""
        return nullcontext()

    def projections_of_x(self) -> list[ReplicatedLinear]:
        """Return the fp32 projections of x: main compressor, indexer compressor, index head weights. Those that the
        layer lacks are left out."""
        linears = [self.compressor.wkv_gate] if self.compressor else []
        if self.indexer:
            linears += [self.indexer.compressor.wkv_gate, self.indexer.weights_proj]
        return linears

    def accepts_mxfp8_swizzled_input(self) -> bool:
        """Return False: no quantised form of `x` is accepted."""
        return False

    def accepts_deepgemm_mxfp8_input(self) -> bool:
        return False

    def forward(
        self, positions: Tensor, x: Tensor, forward_batch: Any, x_quant: Any = None, defer_all_reduce: bool = False
    ) -> AttentionOutput:
        """Compute the attention of a layer.

        A CUDA graph of a small batch uses three streams. The backend waits for each result where it first reads it.

        | stream | work | waits for |
        | --- | --- | --- |
        | side | projections of x: inputs of the compressors, index head weights | |
        | current | query latent and raw window projection | |
        | query | norm of the latent, query | query latent |
        | side | index query | norm |
        | current | append | projections of x |
        | current | index scores and selection, then attention | index query, query |

        An append needs few SMs, and the index scores depend on its output, so it begins early. The GEMMs of query and
        index query use the whole GPU. That of the query comes first, so that neither delays scores and selection.

        Args:
            positions: [T] positions of the tokens.
            x: [T, hidden], after the input norm.
            forward_batch: SGLang's batch.
            x_quant: unused.
            defer_all_reduce: if attention is split over processes and the projection does not sum their parts, return
                this process's part for the caller to sum.

        Returns:
            [T, hidden], or SGLang's `AttnOutput` of this process's part [T, hidden].
        """
        if x.shape[0] == 0:
            return x
        query_stream, side_stream = self.streams if self._overlaps(x) else (None, None)
        q = get_attn_backend().query_buffer(x.shape[0])
        side_stream = side_stream if self.compressor else None
        with on_stream(side_stream, progress_event(side_stream)):
            projected = self.project(x)
            all_projected = progress_event(side_stream)
        q_lora, kv = self._down(x)
        with on_stream(query_stream, progress_event(query_stream)):
            latent = self._latent(q_lora)
            normed = progress_event(query_stream)
            self._query(latent, positions, q)
            wait_for_query = partial(wait_for, progress_event(query_stream))
        index_query = None
        if self.indexer:
            with on_stream(side_stream, normed):
                query = self.indexer(latent)
                assert projected.index_weights is not None
                index_query = IndexQuery(query, projected.index_weights, partial(wait_for, progress_event(side_stream)))
        wait_for(all_projected)
        inputs = LayerInputs(
            weights=self.cache_weights(),
            sink=self._sinks,
            wait_for_query=wait_for_query,
            accepts_rotated_output=self.quantises_output,
            kv_score=projected.kv_score,
            index_kv_score=projected.index_kv_score,
            index_query=index_query,
            keys_of=self.keys_of,
        )
        out = self.attn_mqa(q, kv, kv, forward_batch, inputs=inputs)
        return self._project_out(out, positions, defer_all_reduce)

    def project(self, x: Tensor) -> ProjectedInput:
        """Return the projections of x [T, hidden] that compressor and indexer take, in one GEMM."""
        projected = self.projections(x)
        if self.indexer:
            return ProjectedInput(*projected)
        return ProjectedInput(projected[0]) if projected else ProjectedInput()

    @property
    def keys_of(self) -> Callable[[Tensor], Tensor] | None:
        """As in `cache.append.append_layer`."""
        return None

    def cache_weights(self) -> LayerWeights:
        """Return the weights that the cache ops of this layer use."""
        main, index = self.compressor, self.indexer.compressor if self.indexer else None
        return LayerWeights(
            kv_norm=self.kv_norm.weight,
            rope=self.rope,
            eps=self.eps,
            entry_norm=main.norm.weight if main else None,
            ape=main.ape if main else None,
            index_norm=index.norm.weight if index else None,
            index_ape=index.ape if index else None,
        )

    def _overlaps(self, x: Tensor) -> bool:
        return x.is_cuda and get_is_capture_mode() and x.shape[0] <= self.overlap_limit

    @cached_property
    def quantises_latent(self) -> bool:
        """True if the latent is quantised once, together with its norm, for all projections from it."""
        projections = [self.wq_b, *([self.indexer.wq_b] if self.indexer else [])]
        return all(map(takes_quantised_input, projections))

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query latent before its norm `[T, q_lora_rank]` and the raw window projection `[T, 512]`."""
        if not self.fuse_wqa_wkv:
            return self.wq_a(x)[0], self.wkv(x)[0]
        q_lora, kv = self.wqkv_a(x)[0].split([self.q_lora_rank, self.head_dim], dim=-1)
        return q_lora, kv

    def _latent(self, q_lora: Tensor) -> Latent:
        if self.quantises_latent:
            from dsv4_sglang.srt.models.triton_latent import norm_and_quantise

            return norm_and_quantise(q_lora, self.q_norm.weight, self.q_norm.variance_epsilon)
        return self.q_norm(q_lora)

    def _query(self, latent: Latent, positions: Tensor, out: Tensor) -> None:
        """Write the queries, after norm and RoPE, to the first heads of `out` [T, H, 512], H >= `n_local_heads`."""
        q, _ = self.wq_b(latent)
        q, out = q.view(-1, self.n_local_heads, self.head_dim), out[:, : self.n_local_heads]
        if q.is_cuda:
            in_tree.fused_q_norm_rope(q, out, self.eps, self.freqs_cis, positions)
        else:
            out.copy_(torch_layers.query_norm_rope(q, positions, self.rope, self.eps))

    def _project_out(self, out: LayerOutput, positions: Tensor, defer_all_reduce: bool) -> AttentionOutput:
        """Apply the grouped output projection to the heads `[T, heads, 512]`. Return as `forward` does."""
        grouped = out.values.view(out.values.shape[0], self.n_local_groups, -1)
        if out.rotated or self.fp8_wo_a:
            projected = self._fp8_wo_a(grouped, positions if out.rotated else None)
        else:
            weight = self.wo_a.weight.data.view(self.n_local_groups, self.o_lora_rank, -1).to(grouped.dtype)
            projected = grouped.new_empty(grouped.shape[0], self.n_local_groups, self.o_lora_rank)
            # One GEMM per group, written in token-major order. einsum would write group-major and wo_b copy the result.
            torch.bmm(grouped.transpose(0, 1), weight.transpose(1, 2), out=projected.transpose(0, 1))
        y, _ = self.wo_b(projected.flatten(1))
        if self.attn_tp_size == 1 or self.wo_b.reduce_results:
            return y
        # Each process has its part of the sum. SGLang's CUDA layer sums it, and only if the type says so.
        return in_tree.mhc.AttnOutput(y) if defer_all_reduce else dp_attention.attn_tp_all_reduce(y)

    def _fp8_wo_a(self, grouped: Tensor, inverse_rope_from: Tensor | None) -> Tensor:
        """Apply the first output projection in FP8 by DeepGEMM, with the scale format of the architecture.

        Args:
            grouped: [T, groups, dim].
            inverse_rope_from: [T] positions if the inverse RoPE must be applied to the heads first, else None.

        Returns:
            [T, groups, o_lora_rank] bfloat16.
        """
        import deep_gemm

        tokens, groups, dim = grouped.shape
        recipe = (1, 128, 128)
        if inverse_rope_from is not None:
            from dsv4_sglang.attention.triton_output import inverse_rope_and_quantise

            heads = grouped.view(tokens, -1, self.head_dim)
            codes, scales = inverse_rope_and_quantise(heads, inverse_rope_from, self.rope)
            codes, scales = codes.view(tokens, groups, dim), scales.view(tokens, groups, -1)
        elif _scales_are_fp32():
            codes, scales = in_tree.sglang_per_token_group_quant_fp8(
                grouped.reshape(tokens * groups, dim), group_size=128, scale_ue8m0=False
            )
            codes, scales = codes.view(tokens, groups, dim), scales.view(tokens, groups, -1)
        else:
            codes, scales = in_tree.sglang_per_token_group_quant_fp8_dsv4_wo_a(grouped)
            recipe = (1, 1, 128)
        out = torch.empty(tokens, groups, self.o_lora_rank, device=grouped.device, dtype=torch.bfloat16)
        weight = self.wo_a.weight.view(groups, self.o_lora_rank, dim)
        deep_gemm.fp8_einsum(
            "bhr,hdr->bhd", (codes, scales), (weight, self.wo_a.weight_scale_inv.data), out, recipe=recipe
        )
        return out
