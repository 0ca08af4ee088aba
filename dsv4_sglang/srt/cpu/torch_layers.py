"""PyTorch equivalents of the SGLang layers that exist only as GPU kernels, used when the model runs on a CPU.

They read the parameters of SGLang's own modules, so loading, sharding and names stay SGLang's. Arithmetic is fp32
where the GPU kernels accumulate in fp32; outputs come back in the dtype of the input. Sources: mHC, paper section 2.2
and `hc_split_sinkhorn`; routing, paper section 2.1; query norm and RoPE, SPEC 2.3.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from torch.nn import functional as F


def hyper_connection_weights(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, streams: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the mixing logits `[T, (2 + streams) * streams]` fp32 into collapse, placement and stream-mixing weights.

    Returns `pre [T, streams]`, `post [T, streams]` and `comb [T, streams, streams]`, the last one made doubly
    stochastic by `iterations` Sinkhorn rounds (the first round starts from a row softmax).
    """
    pre_logits, post_logits, comb_logits = mixes.split([streams, streams, streams * streams], dim=-1)
    pre_base, post_base, comb_base = base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre_logits * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post_logits * scale[1] + post_base)
    comb = (comb_logits * scale[2] + comb_base).unflatten(-1, (streams, streams)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def hyper_connection_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the residual streams `x [T, streams, hidden]` into a sublayer input `[T, hidden]`.

    Also returns `post` and `comb`, which `hyper_connection_post` needs.
    """
    pre, post, comb = hyper_connection_mixes(x, fn, scale, base, iterations=iterations, norm_eps=norm_eps, eps=eps)
    return collapse(x, pre), post, comb


def hyper_connection_mixes(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hyper_connection_weights` of the residual streams `x [T, streams, hidden]`."""
    flat = x.flatten(1).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return hyper_connection_weights(F.linear(flat, fn.float()) * inverse_rms, scale, base, x.shape[1], iterations, eps)


def collapse(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The streams `x [T, streams, hidden]` as one, `[T, hidden]`, by `weights [T, streams]`."""
    return (weights.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


def collapse_flat(x_flat: torch.Tensor, pre: torch.Tensor, hc: int, out_dtype: torch.dtype) -> torch.Tensor:
    """REPLACE `compat.COLLAPSE_STREAMS`: `collapse` of `x_flat [T, hc * hidden]`."""
    return collapse(x_flat.unflatten(1, (hc, -1)), pre).to(out_dtype)


def hyper_connection_post(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Place a sublayer output `x [T, hidden]` into the streams and mix the residual: `[T, streams, hidden]`."""
    mixed = torch.einsum("tij,tid->tjd", comb, residual.float())
    return (post.unsqueeze(-1) * x.unsqueeze(1) + mixed).to(x.dtype)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate the last 64 dims of `x [T, heads, dim]` fp32 by `rope [T, 64]` (cos and sin interleaved)."""
    width = rope.shape[-1]
    cos, sin = rope[:, None, 0::2], rope[:, None, 1::2]
    even, odd = x[..., -width::2], x[..., -width + 1 :: 2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-width], rotated], dim=-1)


def query_norm_rope(q: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, eps: float) -> torch.Tensor:
    """Per-head RMS normalisation without weight, then RoPE: `q [T, heads, dim]`, same dtype out (SPEC 2.3)."""
    q32 = q.float()
    q32 = q32 * torch.rsqrt(q32.square().mean(-1, keepdim=True) + eps)
    return rotate(q32, rope[positions]).to(q.dtype)


def route(mlp: Any, x: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts `[T, k]` and their weights `[T, k]` fp32 of SGLang's MoE module `mlp`, scaling factor included.

    Hash layers look the experts up by token id; the others take the best biased scores. The bias decides which experts
    run, never their weights.
    """
    scores = F.softplus(F.linear(x, mlp.gate.weight).float()).sqrt()
    if mlp.is_hash:
        experts = mlp.topk.tid2eid[input_ids].long()
    else:
        biased = scores + mlp.gate.e_score_correction_bias.float()
        experts = biased.topk(mlp.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * mlp.routed_scaling_factor


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None) -> torch.Tensor:
    """SwiGLU with DeepSeek-V4's clamp: the gate from above, the up projection on both sides."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return F.linear(F.silu(gate) * up, down)


def mixture_of_experts(mlp: Any, x: torch.Tensor, input_ids: torch.Tensor, limit: float | None) -> torch.Tensor:
    """The whole MoE block of one layer for unquantised experts: `x [T, hidden]` to `[T, hidden]`.

    With several processes one has some of the experts (expert parallelism), or a part of every expert's intermediate
    dims (tensor parallelism), or both; what they have is added.
    """
    experts, weights = route(mlp, x, input_ids)
    count = mlp.experts.num_local_experts
    experts = experts - count * mlp.experts.moe_ep_rank
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in experts[(experts >= 0) & (experts < count)].unique().tolist():
        token, rank = (experts == expert).nonzero(as_tuple=True)
        y = gated_mlp(x[token], mlp.experts.w13_weight[expert], mlp.experts.w2_weight[expert], limit)
        out.index_add_(0, token, y.float() * weights[token, rank, None])
    shared = mlp.shared_experts
    out += gated_mlp(x, shared.gate_up_proj.weight, shared.down_proj.weight, limit)
    return tensor_model_parallel_all_reduce(out).to(x.dtype)
