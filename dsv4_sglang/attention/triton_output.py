"""The still rotated output of attention: with the inverse RoPE applied, or with the inverse RoPE applied and quantised
for an FP8 projection, in one launch (SPEC 2.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.triton_entries import DIM, FP8_MAX, NOPE, ROPE, angles, inverse_rope_pairs, inverse_rope_tail
from dsv4_sglang.formats.kv_entries import ENTRY_DIM

GROUP = 128  # channels that share a scale
_GROUP = tl.constexpr(GROUP)
_GROUPS = tl.constexpr(ENTRY_DIM // GROUP)
_HEADS_A_PROGRAM = 4


def _token_stride(out: Tensor) -> int:
    """ValueError where a token's heads do not lie in a row: the kernels here would read others."""
    if out.stride()[1:] != (ENTRY_DIM, 1):
        raise ValueError(f"out has stride {out.stride()}; expected (any, {ENTRY_DIM}, 1)")
    return out.stride(0)


@triton.jit
def _inverse_rope_kernel(out_ptr, positions_ptr, rope_ptr, heads, token_stride, BLOCK_H: tl.constexpr):
    """Grid (tokens, groups of BLOCK_H heads), in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = out_ptr + token * token_stride + head[:, None] * DIM + NOPE + tl.arange(0, ROPE)[None, :]
    mask = (head < heads)[:, None]
    tail = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    angle_at = rope_ptr + tl.load(positions_ptr + token) * ROPE + 2 * tl.arange(0, ROPE // 2)
    tail = inverse_rope_tail(tail, tl.load(angle_at), tl.load(angle_at + 1), BLOCK_H)
    tl.store(at, tail.to(out_ptr.dtype.element_ty), mask=mask)


def inverse_rope(out: Tensor, positions: Tensor, rope: Tensor) -> None:
    """Undo the rotation of the last 64 dims of `out` [T, H, 512] at `positions` [T], in place. A token's heads lie in a
    row."""
    tokens, heads, _ = out.shape
    block = min(triton.next_power_of_2(heads), 32)
    _inverse_rope_kernel[(tokens, triton.cdiv(heads, block))](
        out, positions, rope, heads, _token_stride(out), BLOCK_H=block, num_warps=4
    )


@triton.jit
def _inverse_rope_and_quantise_kernel(
    out_ptr, positions_ptr, rope_ptr, codes_ptr, scales_ptr, heads, token_stride, BLOCK_H: tl.constexpr
):
    """Grid (tokens, groups of BLOCK_H heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (head < heads)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    x = tl.load(out_ptr + token * token_stride + head[:, None] * DIM + dims, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, DIM // 2, 2]))
    cos, sin = angles(rope_ptr, tl.load(positions_ptr + token))
    x = tl.reshape(inverse_rope_pairs(even, odd, cos[None, :], sin[None, :]), [BLOCK_H, _GROUPS, _GROUP])
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 2), 1e-10) / FP8_MAX
    code = tl.minimum(tl.maximum(x / scale[:, :, None], -FP8_MAX), FP8_MAX)
    code = tl.reshape(code.to(codes_ptr.dtype.element_ty), [BLOCK_H, DIM])
    tl.store(codes_ptr + (token * heads + head)[:, None] * DIM + dims, code, mask=mask)
    scale_at = scales_ptr + (token * heads + head)[:, None] * _GROUPS + tl.arange(0, _GROUPS)[None, :]
    tl.store(scale_at, scale, mask=mask)


def inverse_rope_and_quantise(out: Tensor, positions: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`out` [T, H, 512], rotated at `positions` [T], to e4m3 codes [T, H, 512] and scales [T, H, 4], both contiguous.

    A token's heads lie in a row in `out`. Scales are fp32, the largest magnitude of each 128 channels over 448. The
    values are rounded to the dtype of `out` after that, as `inverse_rope` rounds them.
    """
    tokens, heads, _ = out.shape
    codes = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=out.device)
    scales = torch.empty(tokens, heads, ENTRY_DIM // GROUP, dtype=torch.float32, device=out.device)
    _inverse_rope_and_quantise_kernel[(tokens, triton.cdiv(heads, _HEADS_A_PROGRAM))](
        out, positions, rope, codes, scales, heads, _token_stride(out), BLOCK_H=_HEADS_A_PROGRAM, num_warps=4
    )
    return codes, scales
