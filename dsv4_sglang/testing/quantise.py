"""Fake quantisation of KV entries, from the formulas only (SPEC 2.4, 6.3).

Deliberately independent of the ops: they are tested against an oracle that uses these functions.
"""

from __future__ import annotations

import torch

ROPE_DIM = 64
E4M3_MAX = 448.0


def power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two >= x, elementwise. x > 0, fp32, normal. Exact, because it uses the exponent."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 [..., n] to e4m3 with one power-of-two scale >= amax/448 (amax at least 1e-4) per n elements."""
    amax = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = power_of_two_at_least(amax * (1.0 / E4M3_MAX))
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def fp8_entries(rows: torch.Tensor) -> torch.Tensor:
    """Round fp32 [..., 512] to the values of a 584-byte entry. Returns fp32.

    The entry is rounded to bf16. Its first 448 dims become e4m3 with one scale; the RoPE dims stay bf16.
    """
    rows = rows.bfloat16().float()
    return torch.cat([round_e4m3(rows[..., :-ROPE_DIM]), rows[..., -ROPE_DIM:]], dim=-1)
