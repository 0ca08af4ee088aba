"""The still rotated output of attention, derotated and quantised for an FP8 projection in one launch (SPEC 2.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.formats.rows import ENTRY_DIM, FP8_MAX

GROUP = 128  # channels that share a scale
_HEADS_A_PROGRAM = 4


@triton.jit
def _derotate_and_quantise_kernel(
    out_ptr,
    positions_ptr,
    rope_ptr,
    codes_ptr,
    scales_ptr,
    heads,
    FP8_MAX: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (tokens, groups of BLOCK_H heads). Channels are taken in pairs; those without RoPE rotate by nothing."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (head < heads)[:, None]
    at = (token * heads + head)[:, None] * 512 + tl.arange(0, 512)[None, :]
    x = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, 256, 2]))
    pair = tl.arange(0, 256) - 224
    angle_at = rope_ptr + tl.load(positions_ptr + token) * 64 + 2 * pair
    cos = tl.load(angle_at, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(angle_at + 1, mask=pair >= 0, other=0.0)[None, :]
    x = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [BLOCK_H, 4, 128])
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 2), 1e-10) / FP8_MAX
    code = tl.minimum(tl.maximum(x / scale[:, :, None], -FP8_MAX), FP8_MAX)
    code = tl.reshape(code.to(codes_ptr.dtype.element_ty), [BLOCK_H, 512])
    tl.store(codes_ptr + at, code, mask=mask)
    tl.store(scales_ptr + (token * heads + head)[:, None] * 4 + tl.arange(0, 4)[None, :], scale, mask=mask)


def derotate_and_quantise(out: Tensor, positions: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`out` [T, H, 512], contiguous and rotated at `positions` [T], to e4m3 codes [T, H, 512] and scales [T, H, 4].

    Scales are fp32, the largest magnitude of each 128 channels over 448. The values are rounded to the dtype of `out`
    after that, as `derotate` rounds them.
    """
    tokens, heads, _ = out.shape
    codes = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=out.device)
    scales = torch.empty(tokens, heads, ENTRY_DIM // GROUP, dtype=torch.float32, device=out.device)
    _derotate_and_quantise_kernel[(tokens, triton.cdiv(heads, _HEADS_A_PROGRAM))](
        out,
        positions,
        rope,
        codes,
        scales,
        heads,
        FP8_MAX=FP8_MAX,
        BLOCK_H=_HEADS_A_PROGRAM,
        num_warps=4,
    )
    return codes, scales
