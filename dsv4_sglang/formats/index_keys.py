"""Index keys: Hadamard rotation, FP4 quantisation, and the buffers that hold them (SPEC 2.5, 6.3).

A key buffer is `[blocks, n, width]` with n keys per block of 128 tokens: 32 in V4's CSA layers, 64 or 128 in V4.1. The
FP4 formats (uint8, width 72) use the NVFP4 container: a block holds n x 64 B of e2m1 pairs (element 2i in the low
nibble), then n x 8 B of e4m3 scales, one per 16 elements. There are two quantisers for it. MXFP4 is the trained format:
blocks of 32 elements with a power-of-two scale, its byte stored twice. NVFP4 has blocks of 16 elements. FP32, width
128, holds unquantised keys for exact tests.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dsv4_sglang.formats.buffers import StorageFormat
from dsv4_sglang.formats.kv_entries import FP8_MAX, ceil_pow2_exponent, e4m3_values, exp2_of_biased

INDEX_DIM = 128
KEY_BYTES = INDEX_DIM // 2
KEY_SCALES = INDEX_DIM // 16
FP4_MAX = 6.0
E4M3_MIN = 2.0**-9  # smallest positive e4m3 number
# Range of powers of two that an e4m3 scale represents, as biased fp32 exponents: 2^-9 .. 2^8.
_MIN_EXPONENT, _MAX_EXPONENT = 127 - 9, 127 + 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class KeyFormat(StorageFormat):
    """Storage of one 128-dim index key."""

    # The trained format in the NVFP4 container: 64 B of e2m1, blocks of 32, each power-of-two scale stored twice: 72 B.
    MXFP4 = "mxfp4", KEY_BYTES, KEY_SCALES
    # 64 B of e2m1 and 8 e4m3 scales, one per 16 elements: 72 B.
    NVFP4 = "nvfp4", KEY_BYTES, KEY_SCALES
    # 512 B, unquantised, for exact tests and CPU.
    FP32 = "fp32", 4 * INDEX_DIM, 0, torch.float32

    @property
    def is_fp4(self) -> bool:
        return self is not KeyFormat.FP32

    def quantise(self, values: Tensor) -> tuple[Tensor, ...]:
        """Quantise rotated keys [..., 128] to packed e2m1 uint8 [..., 64] and e4m3 scale bytes uint8 [..., 8]."""
        if self is KeyFormat.MXFP4:
            return quantise_mxfp4(values)
        return quantise_nvfp4(values) if self is KeyFormat.NVFP4 else super().quantise(values)

    def dequantise(self, data: Tensor, *scales: Tensor) -> Tensor:
        return dequantise_fp4(data, scales[0]) if scales else super().dequantise(data)


@functools.cache
def _hadamard_matrix(device: torch.device) -> Tensor:
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < INDEX_DIM:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / INDEX_DIM**0.5


def hadamard(x: Tensor) -> Tensor:
    """Return the Sylvester-ordered orthonormal Hadamard transform of the last dimension (128), in fp32 (SPEC 2.5)."""
    return x.float() @ _hadamard_matrix(x.device)


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
