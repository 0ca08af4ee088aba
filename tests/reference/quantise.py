"""Fake quantisation of the oracles' entries and index keys, from the formulas only (SPEC 2.4, 2.5, 6.3, 11.4)."""

from __future__ import annotations

import math

import torch

from dsv4_sglang.testing.quantise import E4M3_MAX, power_of_two_at_least, round_e4m3

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Range of powers of two that the e4m3 scale bytes of the key container represent.
KEY_SCALE_MIN, KEY_SCALE_MAX = 2.0**-9, 2.0**8


def bf16_entries(rows: torch.Tensor) -> torch.Tensor:
    """Round fp32 [..., 512] to bf16. Returns fp32."""
    return rows.bfloat16().float()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply [..., n] by the orthonormal Sylvester matrix of size n, a power of two."""
    n = x.shape[-1]
    for stride in (2**i for i in range(n.bit_length() - 1)):
        pairs = x.unflatten(-1, (n // (2 * stride), 2, stride))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
    return x / math.sqrt(n)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 in [-6, 6] to the nearest e2m1 value, ties to the even code."""
    values = torch.tensor(E2M1_VALUES, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    code = torch.bucketize(x.abs(), middles)  # a tie goes to the lower code ...
    tie = (x.abs() == middles[code.clamp(max=len(middles) - 1)]) & (code < len(middles))
    code = code + (tie & (code % 2 == 1)).to(code.dtype)  # ... unless the lower code is odd
    return values[code].copysign(x)


def mxfp4_keys(keys: torch.Tensor) -> torch.Tensor:
    """Apply the Hadamard transform to keys [..., 128] after RoPE and round them to MXFP4. Returns fp32. For index
    queries too.
    """
    return v41_keys(hadamard(keys.bfloat16().float()))


def v41_keys(keys: torch.Tensor) -> torch.Tensor:
    """Round V4.1's keys to MXFP4, without the transform. Its index queries are not stored: bf16, then `mxfp4`."""
    return mxfp4(keys.bfloat16().float(), KEY_SCALE_MIN, KEY_SCALE_MAX)


def mxfp4(x: torch.Tensor, least: float = 2.0**-126, most: float = 2.0**127) -> torch.Tensor:
    """Round to e2m1 with a power-of-two scale per 32 elements.

    Args:
        x: fp32 [..., n].
        least: smallest scale.
        most: largest scale.
    """
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    scale = power_of_two_at_least(amax / E2M1_MAX).clamp(least, most)
    return (round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2)


def v41_rows(rows: torch.Tensor) -> torch.Tensor:
    """Round fp32 [..., 512] to the values of a window entry of V4.1. Returns fp32.

    Rounded to bf16, then e4m3 with one scale per 32 dims.
    """
    return round_e4m3(rows.bfloat16().float().unflatten(-1, (-1, 32))).flatten(-2)


def v41_entries(rows: torch.Tensor) -> torch.Tensor:
    """Round fp32 [..., 512] to the values of a compressed entry of V4.1. Returns fp32.

    Rounded to bf16, then e2m1 with an e4m3 scale amax/6 (at least 2^-9) per 16 dims.
    """
    blocks = rows.bfloat16().float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX).clamp(2.0**-9, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    return (round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2)
