"""RMSNorm and rotary embedding in fp32, shared by the reference ops (SPEC 1.3, 2.1)."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4_sglang.formats.kv_entries import ROPE_DIM


def rope_table(positions: int, frequencies: Tensor) -> Tensor:
    """Return the cos/sin table fp32 [positions, 64], interleaved (cos_i, sin_i). Angles are fp32 products (SPEC
    1.3).
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=frequencies.device), frequencies.float())
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1)


def rotate(x: Tensor, positions: Tensor, rope: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 64 dims of `x` by interleaved pairs.

    Args:
        x: [N, ..., D] fp32.
        positions: [N].
        rope: [positions, 64] fp32, see `rope_table`.
        inverse: apply the inverse RoPE.
    """
    table = rope[positions.long()].unflatten(-1, (-1, 2))
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (ROPE_DIM // 2,)
    cos, sin = table[..., 0].view(shape), table[..., 1].view(shape)
    if inverse:
        sin = -sin
    even, odd = x[..., -ROPE_DIM::2], x[..., -ROPE_DIM + 1 :: 2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-ROPE_DIM], rotated], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension in fp32, multiplied with the weight in fp32 (SPEC 2.1)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def normalise_and_rotate(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, rope: Tensor, round_stage: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return RMSNorm, then RoPE, fp32, each rounded by `round_stage` (`rounding`). Arguments as in `rotate`."""
    return round_stage(rotate(round_stage(rms_norm(x, weight, eps)), positions, rope))


def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the rounding between stages (SPEC 2.1, 3.4): to bf16 for bf16 activations, none for fp32 activations.

    Raises:
        ValueError: any other dtype.
    """
    if dtype == torch.bfloat16:
        return lambda x: x.bfloat16().float()
    if dtype == torch.float32:
        return lambda x: x
    raise ValueError(f"activations are {dtype}; expected torch.bfloat16 or torch.float32")
