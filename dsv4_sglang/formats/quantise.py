"""Quantisers to e4m3 and e2m1 codes with their scales, for all storage formats (SPEC 2.4, 2.5, 11.4)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
FP4_MAX = 6.0
E4M3_MIN = 2.0**-9  # smallest positive e4m3 number
# Range of powers of two that an e4m3 scale represents, as biased fp32 exponents: 2^-9 .. 2^8.
_MIN_EXPONENT, _MAX_EXPONENT = 127 - 9, 127 + 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ceil_pow2_exponent(x: Tensor) -> Tensor:
    """Return the biased exponent e (int32) of the smallest power of two 2^(e-127) that is at least x.

    x is fp32, positive and normal (SPEC 2.4). For an infinite x and for NaN e is 255, the NaN of ue8m0, so that what is
    scaled by it reads as NaN.
    """
    bits = x.float().contiguous().view(torch.int32)
    return (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()).clamp_max(255)


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def e4m3_values(codes: Tensor) -> Tensor:
    """Convert e4m3 bytes (uint8) to fp32 of the same shape.

    A table lookup, which takes a quarter of the time of PyTorch's conversion on a CPU.
    """
    return _e4m3_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def exp2_of_biased(e: Tensor) -> Tensor:
    """Return 2^(e-127) as fp32 for a biased exponent 1 <= e <= 254, infinity for 255."""
    return (e.int() << 23).view(torch.float32)


def quantise_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise vectors that have one scale each, a power of two.

    The source of an FP8 entry is always its bf16 rounding (SPEC 2.4).

    Args:
        x: [..., n].

    Returns:
        e4m3 bytes uint8 [..., n] and the biased exponents of the multipliers uint8 [...].
    """
    x = x.bfloat16().float()
    e = ceil_pow2_exponent(x.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR) * (1.0 / FP8_MAX))
    scaled = (x / exp2_of_biased(e).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), e.to(torch.uint8)


def _e2m1_magnitude(x: Tensor) -> Tensor:
    """Round |x| to the nearest e2m1 number, ties to even, saturating at 6."""
    a = x.abs().clamp_max(FP4_MAX)
    return torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))


def e2m1_codes(x: Tensor) -> Tensor:
    """Convert fp32 to 4-bit e2m1 codes (sign in bit 3), rounding to nearest even, saturating at 6."""
    grid = _e2m1_magnitude(x)
    code = torch.where(grid < 2, grid * 2, torch.where(grid < 4, grid + 2, grid / 2 + 4)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def _fp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return e2m1 pairs and e4m3 scale bytes of `x` [..., n], divided by `scale` [..., n / 16] per 16 elements."""
    codes = e2m1_codes((x.unflatten(-1, (-1, 16)) / scale.unsqueeze(-1)).flatten(-2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.to(torch.float8_e4m3fn).view(torch.uint8)


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., n] in blocks of 32 to packed e2m1 uint8 [..., n / 2] and e4m3 scale bytes uint8 [..., n / 16]."""
    x = x.bfloat16().float()
    e = _mxfp4_exponent(x.unflatten(-1, (-1, 32))).clamp(_MIN_EXPONENT, _MAX_EXPONENT)
    return _fp4(x, exp2_of_biased(e).repeat_interleave(2, -1))


def quantise_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., n] in blocks of 16 to packed e2m1 uint8 [..., n / 2] and e4m3 scale bytes uint8 [..., n / 16]."""
    x = x.bfloat16().float()
    amax = x.unflatten(-1, (-1, 16)).abs().amax(-1)
    return _fp4(x, (amax * (1.0 / FP4_MAX)).clamp(E4M3_MIN, FP8_MAX).to(torch.float8_e4m3fn).float())


def dequantise_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantise_mxfp4` or `quantise_nvfp4`. Return fp32 [..., n]."""
    return (e2m1_values(packed).unflatten(-1, (-1, 16)) * e4m3_values(scales).unsqueeze(-1)).flatten(-2)


def _mxfp4_exponent(blocks: Tensor) -> Tensor:
    """Return the biased exponents of the scales of fp32 blocks [..., 32]."""
    return ceil_pow2_exponent(blocks.abs().amax(-1).clamp_min(FP4_MAX * 2.0**-126) * (1.0 / FP4_MAX))


@functools.cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=device)


def e2m1_values(packed: Tensor) -> Tensor:
    """Convert bytes of two e2m1 codes each, the first in the low nibble, [..., n], to fp32 [..., 2 n]."""
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    return _e2m1_table(packed.device).index_select(0, codes.flatten().int()).view(codes.shape)


def mxfp4_values(y: Tensor) -> Tensor:
    """Round [..., 128] to MXFP4 and return fp32. Blocks of 32, scales are not limited to the range of the container."""
    blocks = y.bfloat16().float().unflatten(-1, (-1, 32))
    scale = exp2_of_biased(_mxfp4_exponent(blocks)).unsqueeze(-1)
    return (_e2m1_magnitude(blocks / scale).copysign(blocks) * scale).flatten(-2)
