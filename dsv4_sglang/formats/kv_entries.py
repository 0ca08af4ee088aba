"""Row formats: where the 512 numbers of a window row or a compressed entry lie, and how they are quantised.

A table is one tensor `[num_blocks, entries_per_block, width]`; row r is row `r % entries_per_block` of block `r //
entries_per_block`. A `KVBuffer` is such a tensor with its format, which its dtype alone would not tell:

| format | dtype | width | bytes a row | content |
| --- | --- | --- | --- | --- |
| FP8 | uint8 | 584 | 584 | 448 e4m3, 64 bf16 a row; behind all rows of the block 8 equal ue8m0 exponent bytes a row |
| BF16 | bfloat16 | 512 | 1024 | the row |
| FP32 | float32 | 512 | 2048 | the row |

In an FP8 table only `stride(0)`, the bytes of a block, describes memory; the two inner dimensions are the shape that
FlashMLA takes. One scale an entry, a power of two: the same values as DeepSeek's seven scales a row up to subnormals
(SPEC 6.3), and readable by FlashMLA, which wants a byte per tile of 64.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4_sglang.formats.code import CodedFormat

ENTRY_DIM = 512
ROPE_DIM = 64
NOPE_DIM = ENTRY_DIM - ROPE_DIM
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM  # 576
SCALE_BYTES = 8
FP8_WIDTH = ROW_BYTES + SCALE_BYTES  # 584
FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4

# FlashMLA reads rows that start at multiples of 16 B, which 584 B a row keeps only for an even number of rows; on SM100
# the stride of its blocks must be a multiple of the 576 B of a row without its scales.
_BLOCK_ALIGNMENT = 16
_SM100_BLOCK_ALIGNMENT = ROW_BYTES


class EntryFormat(Protocol):
    """What pools ask of the format of a 512-dim entry."""

    @property
    def value(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def width(self) -> int:
        """Size of a KV buffer's last dimension."""

    @property
    def row_bytes(self) -> int:
        """Bytes of an entry."""


class KVFormat(CodedFormat):
    """Storage of one 512-dim row: window row, CSA entry or HCA entry."""

    FP8 = "fp8"
    """448 e4m3, 64 bf16 and 8 equal ue8m0 exponent bytes: 584 B."""
    BF16 = "bf16"
    """1024 B, unquantised."""
    FP32 = "fp32"
    """2048 B, unquantised, for exact tests and CPU."""

    @property
    def dtype(self) -> torch.dtype:
        return {KVFormat.FP8: torch.uint8, KVFormat.BF16: torch.bfloat16, KVFormat.FP32: torch.float32}[self]

    @property
    def width(self) -> int:
        """Size of a table's last dimension."""
        return FP8_WIDTH if self is KVFormat.FP8 else ENTRY_DIM

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def block_stride_bytes(
    entries_per_block: int, kv_format: EntryFormat, device: torch.device, sm100: bool | None = None
) -> int:
    """Bytes from one block of a KV buffer to the next on `device`, or on a GPU that is not there and is an `sm100`."""
    size = entries_per_block * kv_format.row_bytes
    if kv_format is not KVFormat.FP8:
        return size
    if sm100 is None:
        sm100 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    alignment = _SM100_BLOCK_ALIGNMENT if sm100 else _BLOCK_ALIGNMENT
    return math.ceil(size / alignment) * alignment


def make_kv_buffers(
    tables: int, blocks: int, entries_per_block: int, kv_format: EntryFormat, device: torch.device
) -> Tensor:
    """Zeroed KV buffers `[tables, blocks, entries_per_block, width]` in one allocation."""
    stride = block_stride_bytes(entries_per_block, kv_format, device) // kv_format.dtype.itemsize
    storage = torch.zeros(tables * blocks * stride, dtype=kv_format.dtype, device=device)
    width = kv_format.width
    return storage.as_strided((tables, blocks, entries_per_block, width), (blocks * stride, stride, width, 1))


@dataclass(frozen=True)
class RowViews:
    """An FP8 KV buffer `[blocks, rows, 584]` taken apart; all three share its memory."""

    fp8: Tensor
    """[blocks, rows, 448] uint8: e4m3 bits of the dims without RoPE."""
    rope: Tensor
    """[blocks, rows, 64] bfloat16: the dims with RoPE."""
    inv_scale: Tensor
    """[blocks, rows] float8_e8m0fnu: the multiplier that dequantises `fp8`, a power of two (SPEC 6.3)."""


def block_and_row(data: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where rows that count through all blocks of `data` [blocks, entries_per_block, ...] lie: block, and row in it."""
    rows = rows.long()
    return rows // data.shape[1], rows % data.shape[1]


def bytes_at(strip: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """`strip[at]` of a strip of bytes [blocks, entries_per_block, n], n and the bytes of a block multiples of 8: a word
    at a time, since indexing takes as long for a byte."""
    return strip.view(torch.int64)[at].view(torch.uint8)


class KVBuffer(NamedTuple):
    """Rows in blocks, `data` [blocks, entries_per_block, width], and what their bytes mean. Row numbers count through
    all blocks."""

    data: Tensor
    format: KVFormat

    def strips(self) -> tuple[Tensor, ...]:
        """Zero-copy views that hold all bytes, rows last but one: of FP8 rows [blocks, rows, 576] and exponent bytes
        [blocks, rows, 8], of the others the table itself."""
        if self.format is not KVFormat.FP8:
            return (self.data,)
        blocks, entries_per_block, _ = self.data.shape
        stride = self.data.stride(0)
        rows = self.data.as_strided((blocks, entries_per_block, ROW_BYTES), (stride, ROW_BYTES, 1))
        exponents = self.data.as_strided(
            (blocks, entries_per_block, SCALE_BYTES),
            (stride, SCALE_BYTES, 1),
            self.data.storage_offset() + entries_per_block * ROW_BYTES,
        )
        return rows, exponents

    def views(self) -> RowViews | None:
        """The parts of an FP8 table; None for the unquantised formats, which have none."""
        if self.format is not KVFormat.FP8:
            return None
        rows, exponents = self.strips()
        return RowViews(
            fp8=rows[..., :NOPE_DIM],
            rope=rows[..., NOPE_DIM:].view(torch.bfloat16),
            inv_scale=exponents[..., 0].view(torch.float8_e8m0fnu),
        )

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Quantise `values` [N, 512] fp32 into the rows `rows` [N], which must not repeat."""
        at = block_and_row(self.data, rows)
        if self.format is not KVFormat.FP8:
            self.data[at] = values.to(self.data.dtype)
            return
        data, exponents = self.strips()
        codes, exponent = quantise_nope(values[:, :NOPE_DIM])
        rope = values[:, NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
        data[at] = torch.cat([codes, rope], -1)
        exponents[at] = exponent.unsqueeze(-1).expand(-1, SCALE_BYTES)

    def read(self, rows: Tensor) -> Tensor:
        """Dequantised rows, fp32 [*rows.shape, 512]."""
        if self.format is not KVFormat.FP8:
            # Their blocks have no gaps. `index_select` copies rows as a whole, which indexing does number by number.
            found = self.data.flatten(0, 1).index_select(0, rows.flatten().to(self.data.device))
            return found.view(*rows.shape, ENTRY_DIM).float()
        at = block_and_row(self.data, rows)
        row, exponents = (bytes_at(strip, at) for strip in self.strips())
        rope = row[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
        return torch.cat([e4m3_values(row[..., :NOPE_DIM]) * exp2_of_biased(exponents[..., :1]), rope], -1)

    def copy_from(self, other: KVBuffer, other_rows: Tensor, rows: Tensor) -> None:
        """Copy rows of a table of the same format without requantising; `rows` must not repeat."""
        source, target = block_and_row(other.data, other_rows), block_and_row(self.data, rows)
        for mine, theirs in zip(self.strips(), other.strips()):
            mine[target] = theirs[source]


def ceil_pow2_exponent(x: Tensor) -> Tensor:
    """Biased exponent e (int32) of the smallest power of two 2^(e-127) that is at least x; x fp32, positive, normal
    (SPEC 2.4)."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def e4m3_values(codes: Tensor) -> Tensor:
    """e4m3 bytes, uint8, -> fp32 of the same shape. Looked up: a quarter of the time of PyTorch's conversion on a
    CPU."""
    return _e4m3_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def exp2_of_biased(e: Tensor) -> Tensor:
    """2^(e-127) as fp32 for a biased exponent 1 <= e <= 254."""
    return (e.int() << 23).view(torch.float32)


def quantise_nope(x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 448] -> e4m3 bytes [N, 448] uint8 and the biased exponent of the multiplier [N] uint8 (SPEC 2.4, one scale
    an entry).

    The source of an FP8 row is always its bf16 rounding (SPEC 2.4).
    """
    x = x.bfloat16().float()
    amax = x.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
    e = ceil_pow2_exponent(amax * (1.0 / FP8_MAX))
    scaled = (x / exp2_of_biased(e).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), e.to(torch.uint8)
