"""Inverse RoPE of the attention output, optionally fused with its quantisation for an FP8 projection (SPEC 2.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.tensor_checks import FLOATS, TensorChecker
from dsv4_sglang.attention.triton_entries import DIM, FP8_MAX, NOPE, ROPE, angles, inverse_rope_dims, inverse_rope_pairs
from dsv4_sglang.formats.kv_entries import ENTRY_DIM

GROUP = 128  # channels that share a scale
_GROUP = tl.constexpr(GROUP)
_GROUPS = tl.constexpr(ENTRY_DIM // GROUP)
_HEADS_PER_PROGRAM = 4


@triton.jit
def _inverse_rope_kernel(out_ptr, positions_ptr, rope_ptr, heads, token_stride, BLOCK_H: tl.constexpr):
    """Grid (tokens, groups of BLOCK_H heads), in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = out_ptr + token * token_stride + head[:, None] * DIM + NOPE + tl.arange(0, ROPE)[None, :]
    mask = (head < heads)[:, None]
    rope_part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    angle_at = rope_ptr + tl.load(positions_ptr + token) * ROPE + 2 * tl.arange(0, ROPE // 2)
    rope_part = inverse_rope_dims(rope_part, tl.load(angle_at), tl.load(angle_at + 1), BLOCK_H)
    tl.store(at, rope_part.to(out_ptr.dtype.element_ty), mask=mask)


def _check(op: str, out: Tensor, positions: Tensor, rope: Tensor) -> None:
    check = TensorChecker(op, out.device)
    check.tensor("out", out, FLOATS, (None, None, ENTRY_DIM), dense_from=1)
    check.rotation(out.shape[0], positions, rope)


def inverse_rope(out: Tensor, positions: Tensor, rope: Tensor) -> None:
    """Apply the inverse RoPE to the last 64 dims of `out` in place.

    Args:
        out: [T, H, 512]. The heads of a token are contiguous.
        positions: [T], positions of the tokens.
        rope: fp32 [positions, 64], RoPE table.

    Raises:
        ValueError: a tensor has another dtype, shape, stride or device than the kernel reads.
    """
    _check("inverse_rope", out, positions, rope)
    tokens, heads, _ = out.shape
    block = min(triton.next_power_of_2(heads), 32)
    _inverse_rope_kernel[(tokens, triton.cdiv(heads, block))](
        out, positions, rope, heads, out.stride(0), BLOCK_H=block, num_warps=4
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
    """Apply the inverse RoPE to `out` and quantise the result to e4m3.

    A scale is the largest magnitude of 128 channels divided by 448. Before that the values are rounded to the dtype of
    `out`, as `inverse_rope` rounds them.

    Args:
        out: [T, H, 512], rotated. The heads of a token are contiguous.
        positions: [T], positions of the tokens.
        rope: fp32 [positions, 64], RoPE table.

    Returns:
        e4m3 codes [T, H, 512] and fp32 scales [T, H, 4], both contiguous.

    Raises:
        ValueError: as in `inverse_rope`.
    """
    _check("inverse_rope_and_quantise", out, positions, rope)
    tokens, heads, _ = out.shape
    codes = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=out.device)
    scales = torch.empty(tokens, heads, ENTRY_DIM // GROUP, dtype=torch.float32, device=out.device)
    _inverse_rope_and_quantise_kernel[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        out, positions, rope, codes, scales, heads, out.stride(0), BLOCK_H=_HEADS_PER_PROGRAM, num_warps=4
    )
    return codes, scales
