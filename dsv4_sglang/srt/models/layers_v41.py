"""Layers of DeepSeek-V4.1 as SGLang builds them, with their attention replaced.

SGLang uses V4's class for the model. Differences from V4: only few layers have a compressor and an indexer. The query
is not normalised per head. A sublayer collapses the residual streams with weights that the previous sublayer computed,
so that one pass over the streams serves both (single-pass hyper-connections).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.utils import add_prefix
from torch import Tensor, nn

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.formats.kv_entries import ROPE_DIM
from dsv4_sglang.srt.cpu import torch_layers
from dsv4_sglang.srt.models.attention import CachedAttention
from dsv4_sglang.srt.models.layers import DecoderLayer
from dsv4_sglang.srt.models.projections import Latent, ProjectedInput, linear, linear_fp32


class V41CompressorWeights(nn.Module):
    """Parameters of a compressor, with the names that SGLang's loader expects."""

    def __init__(self, config: Any, ratio: int, dim: int, prefix: str) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps=config.rms_norm_eps, weight_dtype=torch.float32)
        # SGLang's loader concatenates key and gate weights if it finds this name.
        name, width = ("wkv_gate", 2 * dim) if ratio == 2 else ("wkv", dim)
        self.add_module(name, linear(name, prefix, config.hidden_size, width))
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        """Return `Projections.kv_score`: [T, 1024] fp32 at ratio 2, [T, 512] in the dtype of `x` at ratio 1."""
        return linear_fp32(x, self.get_parameter("wkv_gate.weight")) if self.ratio == 2 else self.wkv(x)[0]


class V41IndexerWeights(nn.Module):
    """Parameters of an indexer and its projections. `owns_keys`: include those of the keys, in a layer with its own
    entries."""

    def __init__(self, config: Any, quant_config: Any, owns_keys: bool, prefix: str) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = linear("wq_b", prefix, config.q_lora_rank, self.heads * self.dim, quant_config)
        self.weights_proj = linear("weights_proj", prefix, config.hidden_size, self.heads)
        if owns_keys:
            self.wk = linear("wk", prefix, config.head_dim, self.dim)
            self.k_norm = RMSNorm(self.dim, eps=config.rms_norm_eps, weight_dtype=torch.float32)

    def forward(self, latent: Latent) -> Tensor:
        """Return raw index queries `[T, heads, 128]`."""
        return self.wq_b(latent)[0].view(-1, self.heads, self.dim)

    def keys(self, latents: Tensor) -> Tensor:
        """Return raw index keys `[T, 128]` of the compressor's latents `[T, 512]`."""
        return self.wk(latents.to(self.wk.weight.dtype))[0]


class V41Attention(CachedAttention):
    """Attention of a V4.1 layer over this cache."""

    def make_sources(self, config: Any, ratio: int, quant_config: Any, prefix: str) -> tuple[Any, Any]:
        owns, selects = self.layer_id in config.kv_source_layer_ids, self.layer_id in config.index_source_layer_ids
        return (
            V41CompressorWeights(config, ratio, self.head_dim, add_prefix("compressor", prefix)) if owns else None,
            V41IndexerWeights(config, quant_config, owns, add_prefix("indexer", prefix)) if selects else None,
        )

    def projections_of_x(self) -> list[ReplicatedLinear]:
        """Return an empty list: not all of V4.1's projections of x are fp32."""
        return []

    def project(self, x: Tensor) -> ProjectedInput:
        return ProjectedInput(
            kv_score=self.compressor(x) if self.compressor else None,
            index_weights=self.indexer.weights_proj(x)[0].float() if self.indexer else None,
        )

    @property
    def keys_of(self) -> Callable[[Tensor], Tensor] | None:
        return self.indexer.keys if self.compressor else None

    def cache_weights(self) -> LayerWeights:
        owns = self.compressor is not None
        return LayerWeights(
            kv_norm=self.kv_norm.weight,
            rope=self.rope,
            eps=self.eps,
            entry_norm=self.compressor.norm.weight if owns else None,
            index_norm=self.indexer.k_norm.weight if owns else None,
        )

    def _query(self, latent: Latent, positions: Tensor, out: Tensor) -> None:
        q = self.wq_b(latent)[0].view(-1, self.n_local_heads, self.head_dim)
        out = out[:, : self.n_local_heads]
        if q.is_cuda:
            from dsv4_sglang.srt.models.triton_query import query_rope

            query_rope(q, out, positions, self.rope)
            return
        out[..., :-ROPE_DIM] = q[..., :-ROPE_DIM]
        out[..., -ROPE_DIM:] = torch_layers.rotate(q[..., -ROPE_DIM:].float(), self.rope[positions])


class V41DecoderLayer(DecoderLayer):
    """SGLang's layer with this package's attention and, on a CPU, PyTorch hyper-connections."""

    attention = V41Attention

    def bind_next(self, next_layer: nn.Module | None) -> None:
        """Do nothing. SGLang's method makes the next layer a submodule of this one, and a weight update then does not
        find the parameters of the next layer."""

    def forward_hc_pre_from_prev(
        self, positions: Tensor, state: Any, input_ids: Tensor, forward_batch: Any, input_ids_global: Tensor
    ) -> Any:
        """Run a layer on SGLang's record of the residual streams, and return the new record.

        The record has the streams `[T, n, hidden]` and the weights `[T, n]` with which the next sublayer collapses
        them. The weights are None before the first layer, which takes the first stream. On a GPU SGLang does not call
        this method.
        """
        streams, taken = state.residual, state.pre
        pre, post, comb = self.mixes_on_cpu(streams, self.attn_hc.fn, self.attn_hc.scale, self.attn_hc.base)
        x = streams[:, 0] if taken is None else torch_layers.collapse(streams, taken)
        out = self.self_attn(positions, self.input_layernorm(x), forward_batch)
        streams = torch_layers.hyper_connection_post(out, streams, post, comb)

        x = self.post_attention_layernorm(torch_layers.collapse(streams, pre))
        pre, post, comb = self.mixes_on_cpu(streams, self.ffn_hc.fn, self.ffn_hc.scale, self.ffn_hc.base)
        out = self._run_moe_ffn_dp_sync(x, forward_batch, input_ids=input_ids, input_ids_global=input_ids_global)
        return type(state)(torch_layers.hyper_connection_post(out, streams, post, comb), pre)
