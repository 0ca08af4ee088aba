"""Fake quantisation of cache rows and index keys, written from the formulas alone (SPEC 2.4, 2.5, 6.3, 11.4).

Independent of the ops on purpose: these make the oracle that the ops are measured against.
"""

from __future__ import annotations

import math

import torch

ROPE_DIM = 64
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Powers of two that the e4m3 scale bytes of the key container can hold.
KEY_SCALE_MIN, KEY_SCALE_MAX = 2.0**-9, 2.0**8


def _power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x, elementwise; x > 0, fp32, normal. By exponent, so exact."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def fp8_entries(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 512] -> the values that a 584-byte row holds, fp32.

    The row is rounded to bf16; its first 448 dims become e4m3 with one power-of-two scale >= amax/448 (amax at least
    1e-4), the RoPE dims stay bf16.
    """
    rows = rows.bfloat16().float()
    plain, rope = rows[..., :-ROPE_DIM], rows[..., -ROPE_DIM:]
    amax = plain.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = _power_of_two_at_least(amax * (1.0 / E4M3_MAX))
    stored = (plain / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.cat([(stored * scale).bfloat16().float(), rope], dim=-1)


def bf16_entries(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 512] -> rounded to bf16, as fp32."""
    return rows.bfloat16().float()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """[..., n] times the orthonormal Sylvester matrix of size n, a power of two."""
    n = x.shape[-1]
    for stride in (2**i for i in range(n.bit_length() - 1)):
        pairs = x.unflatten(-1, (n // (2 * stride), 2, stride))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
    return x / math.sqrt(n)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 in [-6, 6] -> nearest e2m1 value, ties to the even code."""
    values = torch.tensor(E2M1_VALUES, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    code = torch.bucketize(x.abs(), middles)  # a tie goes to the lower code ...
    tie = (x.abs() == middles[code.clamp(max=len(middles) - 1)]) & (code < len(middles))
    code = code + (tie & (code % 2 == 1)).to(code.dtype)  # ... unless that one is odd
    return values[code].copysign(x)


def mxfp4_keys(keys: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 128], after RoPE -> rotated keys as MXFP4 holds them, fp32. Index queries go the same way."""
    return _stored_mxfp4(hadamard(keys.bfloat16().float()))


def v41_keys(keys: torch.Tensor) -> torch.Tensor:
    """The same for V4.1, without the rotation. Its index queries are not stored: bf16, then `mxfp4`."""
    return _stored_mxfp4(keys)


def _stored_mxfp4(keys: torch.Tensor) -> torch.Tensor:
    return mxfp4(keys.bfloat16().float(), KEY_SCALE_MIN, KEY_SCALE_MAX)


def mxfp4(x: torch.Tensor, least: float = 2.0**-126, most: float = 2.0**127) -> torch.Tensor:
    """fp32 [..., n] -> rounded to e2m1 with a power-of-two scale, `least` to `most`, per 32."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    scale = _power_of_two_at_least(amax / E2M1_MAX).clamp(least, most)
    return (round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2)


def v41_rows(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 512] -> the values that a window row of V4.1 holds, fp32: rounded to bf16, then e4m3 with one
    power-of-two scale >= amax/448 (amax at least 1e-4) per 32 dims."""
    blocks = rows.bfloat16().float().unflatten(-1, (-1, 32))
    scale = _power_of_two_at_least(blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) * (1.0 / E4M3_MAX))
    stored = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (stored * scale).flatten(-2)


def v41_entries(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 512] -> the values that an entry of V4.1 holds, fp32: rounded to bf16, then e2m1 with an e4m3 scale
    amax/6 (at least 2^-9) per 16 dims."""
    blocks = rows.bfloat16().float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX).clamp(2.0**-9, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    return (round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2)
