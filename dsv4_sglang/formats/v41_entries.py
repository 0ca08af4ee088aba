"""KV entries of DeepSeek-V4.1 in the formats of training: window entries in FP8, compressed entries in FP4 (SPEC 11.4).

A KV buffer is a uint8 tensor `[blocks, entries_per_block, width]`. Entry i is at index `i % entries_per_block` of block
`i // entries_per_block`. A block stores the data of all its entries, then the scales of all its entries. The two inner
dimensions are only a shape; `strips` describes the bytes.

| format | bytes per entry | content |
| --- | --- | --- |
| FP8 | 528 | 512 e4m3, RoPE dims included; 16 ue8m0 scales, one per 32 |
| FP4 | 288 | 256 B of e2m1 pairs, element 2i in the low nibble; 32 e4m3 scales, one per 16 |
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.formats.index_keys import E4M3_MIN, FP4_MAX, e2m1_codes, e2m1_values
from dsv4_sglang.formats.kv_entries import (
    ENTRY_DIM,
    FP8_AMAX_FLOOR,
    FP8_MAX,
    block_and_index,
    bytes_at,
    ceil_pow2_exponent,
    e4m3_values,
    exp2_of_biased,
)


class V41KVFormat(enum.Enum):
    """Storage format of a 512-dim KV entry."""

    # Window entry.
    FP8 = "fp8"
    # Compressed entry.
    FP4 = "fp4"

    @property
    def data_bytes(self) -> int:
        return ENTRY_DIM if self is V41KVFormat.FP8 else ENTRY_DIM // 2

    @property
    def scale_bytes(self) -> int:
        return ENTRY_DIM // self.values_per_scale

    @property
    def values_per_scale(self) -> int:
        return 32 if self is V41KVFormat.FP8 else 16

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def width(self) -> int:
        """Size of a KV buffer's last dimension."""
        return self.row_bytes

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8


def quantise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise bf16 entries [N, 512] to e4m3 bytes [N, 512] and ue8m0 bytes [N, 16], both uint8."""
    x = x.bfloat16().float().unflatten(-1, (-1, V41KVFormat.FP8.values_per_scale))
    exponent = ceil_pow2_exponent(x.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR) * (1.0 / FP8_MAX))
    codes = (x / exp2_of_biased(exponent).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten(-2), exponent.to(torch.uint8)


def quantise_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise bf16 entries [N, 512] to e2m1 pairs [N, 256] and e4m3 scale bytes [N, 32], both uint8."""
    x = x.bfloat16().float().unflatten(-1, (-1, V41KVFormat.FP4.values_per_scale))
    scale = (x.abs().amax(-1) / FP4_MAX).clamp(E4M3_MIN, FP8_MAX).to(torch.float8_e4m3fn)
    codes = e2m1_codes((x / scale.float().unsqueeze(-1)).flatten(-2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.view(torch.uint8)


class V41Table(NamedTuple):
    """KV buffer `data` uint8 [blocks, entries_per_block, row_bytes] with its format.

    A block has no gaps. Indices count through all blocks.
    """

    data: Tensor
    format: V41KVFormat

    def strips(self) -> tuple[Tensor, Tensor]:
        """Return views of the data [blocks, entries, data_bytes] and of the scales [blocks, entries, scale_bytes]."""
        blocks, rows, _ = self.data.shape
        stride, offset = self.data.stride(0), self.data.storage_offset()
        data, scales = self.format.data_bytes, self.format.scale_bytes
        return (
            self.data.as_strided((blocks, rows, data), (stride, data, 1)),
            self.data.as_strided((blocks, rows, scales), (stride, scales, 1), offset + rows * data),
        )

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Quantise `values` [N, 512] and store them at the indices `rows` [N], which must be distinct."""
        at = block_and_index(self.data, rows)
        quantise = quantise_fp8 if self.format is V41KVFormat.FP8 else quantise_fp4
        for strip, part in zip(self.strips(), quantise(values)):
            strip[at] = part

    def read(self, rows: Tensor) -> Tensor:
        """Return the dequantised entries at the indices `rows`, fp32 [*rows.shape, 512]."""
        at = block_and_index(self.data, rows)
        data, scales = (bytes_at(strip, at) for strip in self.strips())
        if self.format is V41KVFormat.FP8:
            values, factors = e4m3_values(data), exp2_of_biased(scales)
        else:
            values, factors = e2m1_values(data), e4m3_values(scales)
        return (values.unflatten(-1, (factors.shape[-1], -1)) * factors.unsqueeze(-1)).flatten(-2)
