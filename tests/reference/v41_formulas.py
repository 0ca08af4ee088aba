"""Formulas of DeepSeek's own files for V4.1 (inference/model.py, inference/kernel.py; SPEC 11), one number at a time.
Tests compare with them, and nothing here comes from the package."""

import math

import torch

EPS = 1e-20
LENGTH = 300

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def nearest(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Return the nearest number of the grid with the sign of x. Ties go to the even code, and larger values to the
    largest number."""
    middles = (grid[1:] + grid[:-1]) / 2
    code = torch.searchsorted(middles, x.abs())
    tie = (code < len(middles)) & (middles[code.clamp(max=len(middles) - 1)] == x.abs())
    return torch.copysign(grid[code + (tie & (code % 2 == 1))], x)


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return 2.0 ** (exponent - (mantissa == 0.5).int()).double()


def act_quant(x: torch.Tensor) -> torch.Tensor:
    """Quantise as kernel.py: blocks of 32, amax at least 1e-4, scale 2^ceil(log2(amax / 448)), e4m3. All functions here
    use float64."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = ceil_pow2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    return (nearest(blocks / scale, E4M3) * scale).flatten(-2)


def fp4_act_quant(x: torch.Tensor, block_size: int, e4m3_scale: bool) -> torch.Tensor:
    """Quantise as kernel.py to e2m1 with scale e4m3(amax / 6), amax at least 6 * 2^-9, or with scale 2^ceil(log2(amax /
    6))."""
    blocks = x.unflatten(-1, (-1, block_size))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (
        nearest(amax.clamp(min=6 * 2.0**-9) / 6, E4M3) if e4m3_scale else ceil_pow2(amax.clamp(min=6 * 2.0**-126) / 6)
    )
    return (nearest(blocks / scale, E2M1) * scale).flatten(-2)


def angles(ratio: int, length: int) -> torch.Tensor:
    """Return the angles of precompute_freqs_cis (inference/model.py) with the published values, without YaRN if nothing
    is compressed."""
    base = 160000.0 if ratio else 10000.0
    freqs = 1.0 / (base ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    if ratio:

        def corrected_dim(rotations):
            return 64 * math.log(65536 / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(corrected_dim(32)), 0), min(math.ceil(corrected_dim(1)), 63)
        ramp = ((torch.arange(32, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freqs = freqs / 16 * ramp + freqs * (1 - ramp)
    return torch.outer(torch.arange(length), freqs)


def freqs_cis(ratio: int) -> torch.Tensor:
    turns = angles(ratio, LENGTH)
    return torch.polar(torch.ones_like(turns), turns)


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return (weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))).bfloat16()


def rotated(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x[..., -64:].float().unflatten(-1, (-1, 2)).contiguous()) * freqs
    return torch.cat([x[..., :-64], torch.view_as_real(turned).flatten(-2).bfloat16()], -1)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check equality except for a few numbers, which differ by one step because the last bit of a sum decides their
    rounding."""
    assert got.shape == wanted.shape
    if not got.numel():
        return
    apart = (got - wanted).abs()
    assert (apart > 0).float().mean() < 2e-3
    assert (apart <= 0.51 * wanted.abs().amax(-1, keepdim=True)).all()
