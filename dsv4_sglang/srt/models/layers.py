"""Layers of DeepSeek-V4 as SGLang builds them, with their attention replaced.

Embedding, hyper-connections (mHC), MoE, hash routing, quantisation and the weight loader are SGLang's. On a CPU,
`dsv4_sglang.srt.cpu.torch_layers` replaces the layers that SGLang has as GPU kernels only.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import dp_attention
from sglang.srt.models import deepseek_v4 as in_tree
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from dsv4_sglang.srt.cpu import torch_layers
from dsv4_sglang.srt.models.attention import CachedAttention


class DecoderLayer(in_tree.DeepseekV4DecoderLayer):
    """SGLang's layer with this package's attention. On a CPU, hyper-connections and experts run in PyTorch."""

    attention = CachedAttention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_cpu = self.hc_attn_fn.device.type == "cpu"
        if self.on_cpu:
            self.use_fused_mhc_post_pre = False

    def _build_self_attn(
        self,
        *,
        config: Any,
        layer_id: int,
        quant_config: Any,
        prefix: str,
        alt_streams: list[torch.cuda.Stream] | None,
        compress_ratio_override: int | None = None,
    ) -> nn.Module:
        # SGLang overrides the ratio (window only) for the layers of a draft model.
        is_draft = compress_ratio_override is not None
        return self.attention(config, layer_id, quant_config, prefix, alt_streams, is_draft)

    def hc_pre(self, x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.on_cpu:
            return super().hc_pre(x, hc_fn, hc_scale, hc_base, *args, **kwargs)
        pre, post, comb = self.mixes_on_cpu(x, hc_fn, hc_scale, hc_base)
        return torch_layers.collapse(x, pre), post, comb, False

    def mixes_on_cpu(self, x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `torch_layers.hyper_connection_mixes` with the constants of this layer."""
        rounds = self.hc_sinkhorn_iters
        return torch_layers.hyper_connection_mixes(
            x, fn, scale, base, iterations=rounds, norm_eps=self.rms_norm_eps, eps=self.hc_eps
        )

    def hc_post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        if not self.on_cpu:
            return super().hc_post(x, residual, post, comb)
        return torch_layers.hyper_connection_post(x, residual, post, comb)

    def _run_moe_ffn_dp_sync(
        self,
        hidden_states: Tensor,
        forward_batch: Any,
        *,
        input_ids: Tensor,
        input_ids_global: Tensor,
        **arguments: Any,
    ) -> Tensor:
        if not self.on_cpu:
            arguments |= {"input_ids": input_ids, "input_ids_global": input_ids_global}
            return super()._run_moe_ffn_dp_sync(hidden_states, forward_batch, **arguments)
        limit = getattr(self.config, "swiglu_limit", None)
        if get_parallel().attn_dp_size == 1:
            return torch_layers.mixture_of_experts(self.mlp, hidden_states, input_ids, limit)
        # Experts are divided among all processes: each computes the tokens of all ranks and keeps those of its rank.
        everyones = dp_attention.get_global_dp_buffer(get_parallel().tp_group)
        dp_attention.dp_gather_replicate(everyones, hidden_states, forward_batch)
        out = torch_layers.mixture_of_experts(self.mlp, everyones, input_ids_global, limit)
        own = torch.empty_like(hidden_states)
        dp_attention.dp_scatter(own, out, forward_batch)
        return own
