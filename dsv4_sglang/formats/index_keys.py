"""Index keys: Hadamard rotation, FP4 quantisation, and the buffers that hold them (SPEC 2.5, 6.3).

A key buffer is `[blocks, n, width]` with n keys per block of 128 tokens: 32 in V4's CSA layers, 64 or 128 in V4.1. A
`KeyTable` is such a tensor with its format. The FP4 formats (uint8, width 72) use the NVFP4 container: a block holds
n x 64 B of e2m1 pairs (element 2i in the low nibble), then n x 8 B of e4m3 scales, one per 16 elements. There are two
quantisers for it. MXFP4 is the trained format: blocks of 32 elements with a power-of-two scale, its byte stored twice.
NVFP4 has blocks of 16 elements. FP32, width 128, holds unquantised keys for exact tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.formats.code import CodedFormat
from dsv4_sglang.formats.kv_entries import FP8_MAX, block_and_index, ceil_pow2_exponent, e4m3_values, exp2_of_biased

INDEX_DIM = 128
KEY_BYTES = INDEX_DIM // 2
KEY_SCALES = INDEX_DIM // 16
FP4_WIDTH = KEY_BYTES + KEY_SCALES  # 72
FP4_MAX = 6.0
E4M3_MIN = 2.0**-9  # smallest positive e4m3 number
# Range of powers of two that an e4m3 scale represents, as biased fp32 exponents: 2^-9 .. 2^8.
_MIN_EXPONENT, _MAX_EXPONENT = 127 - 9, 127 + 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class KeyFormat(CodedFormat):
    """Storage of one 128-dim index key."""

    # The trained format in the NVFP4 container: 64 B of e2m1, blocks of 32, each power-of-two scale stored twice: 72 B.
    MXFP4 = "mxfp4"
    # 64 B of e2m1 and 8 e4m3 scales, one per 16 elements: 72 B.
    NVFP4 = "nvfp4"
    # 512 B, unquantised, for exact tests and CPU.
    FP32 = "fp32"

    @property
    def is_fp4(self) -> bool:
        return self is not KeyFormat.FP32

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_fp4 else torch.float32

    @property
    def width(self) -> int:
        """Size of the last dimension of a key buffer."""
        return FP4_WIDTH if self.is_fp4 else INDEX_DIM

    @property
    def key_bytes(self) -> int:
        return self.width * self.dtype.itemsize


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


def quantise_keys(y: Tensor, key_format: KeyFormat) -> tuple[Tensor, Tensor]:
    """Quantise rotated keys.

    Args:
        y: [N, 128].
        key_format: MXFP4 or NVFP4.

    Returns:
        Packed e2m1 uint8 [N, 64] and e4m3 scale bytes uint8 [N, 8].

    Raises:
        ValueError: `key_format` is FP32.
    """
    y = y.bfloat16().float()
    if key_format is KeyFormat.MXFP4:
        amax = y.unflatten(-1, (-1, 32)).abs().amax(-1).clamp_min(FP4_MAX * 2.0**-126)
        e = ceil_pow2_exponent(amax * (1.0 / FP4_MAX)).clamp(_MIN_EXPONENT, _MAX_EXPONENT)
        scale = exp2_of_biased(e).repeat_interleave(2, -1)
    elif key_format is KeyFormat.NVFP4:
        amax = y.unflatten(-1, (-1, 16)).abs().amax(-1)
        scale = (amax * (1.0 / FP4_MAX)).clamp(E4M3_MIN, FP8_MAX).to(torch.float8_e4m3fn).float()
    else:
        raise ValueError(f"{key_format.value} keys are not quantised; expected mxfp4 or nvfp4")
    codes = e2m1_codes((y.unflatten(-1, (-1, 16)) / scale.unsqueeze(-1)).flatten(-2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.to(torch.float8_e4m3fn).view(torch.uint8)


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
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126)
    scale = exp2_of_biased(ceil_pow2_exponent(amax * (1.0 / FP4_MAX)))
    return (_e2m1_magnitude(blocks / scale).copysign(blocks) * scale).flatten(-2)


def dequantise_keys(packed: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantise_keys`. Return fp32 [N, 128]."""
    scale = e4m3_values(scales)
    return (e2m1_values(packed).unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class KeyViews:
    """Views of the parts of an FP4 key buffer `[blocks, n, 72]`.

    Attributes:
        fp4: [blocks, n, 64] uint8, two e2m1 values per byte, element 2i in the low nibble.
        scales: [blocks, n, 8] float8_e4m3fn, one multiplier per 16 elements.
    """

    fp4: Tensor
    scales: Tensor


class KeyTable(NamedTuple):
    """Buffer of index keys, `data` [blocks, n, width], with its format. Indices count through all blocks."""

    data: Tensor
    format: KeyFormat

    def views(self) -> KeyViews | None:
        """Return the parts of an FP4 buffer, None for the unquantised format."""
        if not self.format.is_fp4:
            return None
        blocks, keys, _ = self.data.shape
        stride = self.data.stride(0)
        fp4 = self.data.as_strided((blocks, keys, KEY_BYTES), (stride, KEY_BYTES, 1))
        scales = self.data.as_strided(
            (blocks, keys, KEY_SCALES), (stride, KEY_SCALES, 1), self.data.storage_offset() + keys * KEY_BYTES
        )
        return KeyViews(fp4, scales.view(torch.float8_e4m3fn))

    def write(self, rows: Tensor, y: Tensor) -> None:
        """Quantise rotated keys `y` [N, 128] and store them at the indices `rows` [N], which must be distinct."""
        at, views = block_and_index(self.data, rows), self.views()
        if views is None:
            self.data[at] = y.to(self.data.dtype)
            return
        packed, scales = quantise_keys(y, self.format)
        views.fp4[at] = packed
        views.scales.view(torch.uint8)[at] = scales

    def read(self, rows: Tensor) -> Tensor:
        """Return the dequantised keys at the indices `rows`, fp32 [*rows.shape, 128]."""
        at, views = block_and_index(self.data, rows), self.views()
        if views is None:
            return self.data[at].float()
        return dequantise_keys(views.fp4[at], views.scales.view(torch.uint8)[at])


def make_key_table(blocks: int, keys_per_block: int, key_format: KeyFormat, device: torch.device) -> Tensor:
    """Allocate a zeroed key buffer `[blocks, keys_per_block, width]`."""
    return torch.zeros(blocks, keys_per_block, key_format.width, dtype=key_format.dtype, device=device)
