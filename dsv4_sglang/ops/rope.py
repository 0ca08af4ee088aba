"""RMSNorm and rotary embedding in fp32, shared by the reference ops (SPEC 1.3, 2.1)."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4_sglang.formats.kv_entries import ROPE_DIM


def rope_table(positions: int, frequencies: Tensor) -> Tensor:
    """cos/sin table [positions, 64] fp32, interleaved (cos_i, sin_i); angles are fp32 products (SPEC 1.3)."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=frequencies.device), frequencies.float())
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1)


def rotate(x: Tensor, positions: Tensor, rope: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 64 dims of x [N, ..., D] fp32 by interleaved pairs at `positions` [N]; `inverse` applies the
    inverse RoPE to."""
    table = rope[positions.long()].unflatten(-1, (-1, 2))
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (ROPE_DIM // 2,)
    cos, sin = table[..., 0].view(shape), table[..., 1].view(shape)
    if inverse:
        sin = -sin
    even, odd = x[..., -ROPE_DIM::2], x[..., -ROPE_DIM + 1 :: 2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-ROPE_DIM], rotated], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in fp32, weight multiplied in fp32 (SPEC 2.1)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The rounding between stages (SPEC 2.1, 3.4): to bf16 for bf16 activations, none for fp32 ones."""
    if dtype == torch.bfloat16:
        return lambda x: x.bfloat16().float()
    if dtype == torch.float32:
        return lambda x: x
    raise ValueError(f"activations are {dtype}; expected torch.bfloat16 or torch.float32")
