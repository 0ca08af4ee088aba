"""RMS norm and FP8 quantisation of the query latent in one launch (SPEC 2.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.tensor_checks import FLOATS, TensorChecker
from dsv4_sglang.formats.quantise import FP8_MAX

GROUP = 128  # channels that share a scale
SCALE_ALIGNMENT = 4  # rows: DeepGEMM loads columns of fp32 scales in units of 16 bytes


@triton.jit
def _norm_and_quantise_kernel(
    x_ptr, weight_ptr, codes_ptr, scales_ptr, x_stride, scales_stride, eps, FP8_MAX: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). GROUPS: groups of a row, rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < DIM
    x = tl.load(x_ptr + token * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(tl.sum(x * x, 1), 0)
    x = (x * tl.rsqrt(squares / DIM + eps) * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / FP8_MAX
    code = tl.minimum(tl.maximum(x / scale[:, None], -FP8_MAX), FP8_MAX)
    tl.store(codes_ptr + token * DIM + at, code.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + group * scales_stride + token, scale, mask=group * GROUP < DIM)


def norm_and_quantise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise the rows of `x`, and quantise them to FP8 as DeepGEMM expects its inputs on Hopper.

    Args:
        x: [T, dim], dim a multiple of 128, with inner stride 1. The norm is rounded to its dtype before quantisation.
        weight: [dim] weight of the norm.
        eps: epsilon of the norm.

    Returns:
        e4m3 codes [T, dim] and fp32 scales [T, dim / 128], the largest magnitude of 128 channels over 448. The scales
        are column-major, with columns aligned to 16 bytes.

    Raises:
        ValueError: a tensor has another dtype, shape, stride or device than the kernel reads.
    """
    tokens, dim = x.shape
    check = TensorChecker("norm_and_quantise", x.device)
    check.tensor("x", x, FLOATS, (None, dim // GROUP * GROUP), dense_from=1)
    check.tensor("weight", weight, FLOATS, (dim,))
    rows = -(-tokens // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    codes = torch.empty(tokens, dim, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(dim // GROUP, rows, dtype=torch.float32, device=x.device)
    _norm_and_quantise_kernel[(tokens,)](
        *(x, weight, codes, scales, x.stride(0), rows, eps),
        FP8_MAX=FP8_MAX,
        DIM=dim,
        GROUP=GROUP,
        GROUPS=triton.next_power_of_2(dim // GROUP),
        num_warps=4,
    )
    return codes, scales.T[:tokens]
