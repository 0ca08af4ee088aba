"""PyTorch equivalents of SGLang layers that exist only as GPU kernels, for models on a CPU.

They use the parameters of SGLang's own modules, so loading, sharding and names are SGLang's. Arithmetic is fp32 where
the GPU kernels accumulate in fp32. Outputs have the dtype of the input. Sources: mHC, paper section 2.2 and
`hc_split_sinkhorn`; routing, paper section 2.1; query norm and RoPE, SPEC 2.3.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from torch.nn import functional as F


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
    """Compute the weights that collapse, place and mix the residual streams.

    Args:
        x: [T, streams, hidden] residual streams.
        fn: [(2 + streams) * streams, streams * hidden] projection to the mixing logits.
        scale: [3] fp32 scales of the three parts of the logits.
        base: [(2 + streams) * streams] fp32 biases.
        iterations: Sinkhorn rounds. The first round starts from a row softmax.
        norm_eps: epsilon of the RMS norm of the streams.
        eps: added to the weights and their sums.

    Returns:
        `pre` [T, streams], `post` [T, streams] and the doubly stochastic `comb` [T, streams, streams].
    """
    streams, flat = x.shape[1], x.flatten(1).float()
    logits = F.linear(flat, fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    parts = [streams, streams, streams * streams]
    pre, post, comb = (
        part * factor + bias for part, factor, bias in zip(logits.split(parts, dim=-1), scale, base.split(parts))
    )
    comb = comb.unflatten(-1, (streams, streams)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), comb


def collapse(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum [T, hidden] of the streams `x [T, streams, hidden]` with `weights [T, streams]`."""
    return (weights.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


def collapse_flat(x_flat: torch.Tensor, pre: torch.Tensor, hc: int, out_dtype: torch.dtype) -> torch.Tensor:
    """REPLACE `mhc.mhc_combine`: return `collapse` of `x_flat [T, hc * hidden]`."""
    return collapse(x_flat.unflatten(1, (hc, -1)), pre).to(out_dtype)


def hyper_connection_post(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Add the output of a sublayer to the mixed residual streams.

    Args:
        x: [T, hidden] output of the sublayer.
        residual: [T, streams, hidden] residual streams before the sublayer.
        post: [T, streams] fp32 weights of `x` in each stream.
        comb: [T, streams, streams] fp32 mixing weights of the streams.

    Returns:
        [T, streams, hidden] in the dtype of `x`.
    """
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
    """Apply the RMS norm per head, without weight, and then RoPE (SPEC 2.3).

    Args:
        q: [T, heads, dim] queries.
        positions: [T] positions.
        rope: [positions, 64] fp32 table, cos and sin interleaved.
        eps: epsilon of the norm.

    Returns:
        [T, heads, dim] in the dtype of `q`.
    """
    q32 = q.float()
    q32 = q32 * torch.rsqrt(q32.square().mean(-1, keepdim=True) + eps)
    return rotate(q32, rope[positions]).to(q.dtype)


def route(mlp: Any, x: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token.

    Hash layers look up experts by token id; other layers take the experts with the best biased scores. The bias affects
    the choice of experts only, not their weights.

    Args:
        mlp: SGLang's MoE module.
        x: [T, hidden] input.
        input_ids: [T] token ids, for hash layers.

    Returns:
        Experts [T, k] int64 and their weights [T, k] fp32, scaling factor included.
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
    """Compute SwiGLU with DeepSeek-V4's clamp: the gate from above, the up projection on both sides.

    Args:
        x: [T, hidden] input.
        gate_up: [2 * intermediate, hidden] weights of gate and up projection.
        down: [hidden, intermediate] weights of the down projection.
        limit: bound of the clamp, or None.

    Returns:
        [T, hidden].
    """
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return F.linear(F.silu(gate) * up, down)


def mixture_of_experts(mlp: Any, x: torch.Tensor, input_ids: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Compute the MoE block of a layer. As `part_of_experts`, with the parts of all processes summed."""
    return tensor_model_parallel_all_reduce(part_of_experts(mlp, x, input_ids, limit)).to(x.dtype)


def part_of_experts(mlp: Any, x: torch.Tensor, input_ids: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Compute this process's part of the MoE block of a layer with unquantised experts.

    With several processes, each has some of the experts (expert parallelism), a part of each expert's intermediate
    dimension (tensor parallelism), or both.

    Args:
        mlp: SGLang's MoE module.
        x: [T, hidden] input.
        input_ids: [T] token ids, for hash layers.
        limit: bound of the clamp in `gated_mlp`, or None.

    Returns:
        [T, hidden] fp32.
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
    return out + gated_mlp(x, shared.gate_up_proj.weight, shared.down_proj.weight, limit)
