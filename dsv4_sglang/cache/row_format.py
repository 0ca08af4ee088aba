"""Tables of entries and of index keys: their bytes, how they are made, and the views that split them without a copy.

An entry table is `[blocks, rows, width]`, an index key table `[blocks, 32, width]`; the dtype says the format. Where
the bytes of a block lie is written down in `dsv4_sglang.ops.rows` and `dsv4_sglang.ops.index_keys`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.ops import index_keys, rows

# FlashMLA reads rows that start at multiples of 16 B, which 584 B a row keeps only for an even number of rows; on SM100
# the stride of its blocks must be a multiple of the 576 B of a row without its scales.
_BLOCK_ALIGNMENT = 16
_SM100_BLOCK_ALIGNMENT = rows.ROW_BYTES


class RowFormat(enum.Enum):
    """Storage of one 512-dim entry: window row, CSA entry or HCA entry."""

    FP8 = "fp8"
    """448 e4m3, 64 bf16 and 8 equal ue8m0 exponent bytes: 584 B."""
    BF16 = "bf16"
    """1024 B, unquantised."""
    FP32 = "fp32"
    """2048 B, unquantised, for exact tests and CPU."""

    @property
    def dtype(self) -> torch.dtype:
        return {RowFormat.FP8: torch.uint8, RowFormat.BF16: torch.bfloat16, RowFormat.FP32: torch.float32}[self]

    @property
    def width(self) -> int:
        """Size of a table's last dimension."""
        return rows.FP8_WIDTH if self is RowFormat.FP8 else rows.ENTRY_DIM

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class KeyFormat(enum.Enum):
    """Storage of one 128-dim index key."""

    MXFP4 = "mxfp4"
    """The trained format in the NVFP4 container: 64 B of e2m1, blocks of 32, each power-of-two scale twice: 72 B."""
    NVFP4 = "nvfp4"
    """64 B of e2m1 and 8 e4m3 scales, one per 16: 72 B."""
    FP32 = "fp32"
    """512 B, unquantised, for exact tests and CPU."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self is KeyFormat.FP32 else torch.uint8

    @property
    def width(self) -> int:
        return index_keys.INDEX_DIM if self is KeyFormat.FP32 else index_keys.FP4_WIDTH

    @property
    def key_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def index_format(self) -> int:
        """The ops' argument of that name; an FP32 table is recognised by its dtype and ignores it."""
        return index_keys.NVFP4 if self is KeyFormat.NVFP4 else index_keys.MXFP4


def block_stride_bytes(rows_per_block: int, row_format: RowFormat, device: torch.device) -> int:
    """Bytes from one block of an entry table to the next on `device`."""
    size = rows_per_block * row_format.row_bytes
    if row_format is not RowFormat.FP8:
        return size
    on_sm100 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    alignment = _SM100_BLOCK_ALIGNMENT if on_sm100 else _BLOCK_ALIGNMENT
    return math.ceil(size / alignment) * alignment


def make_row_tables(
    tables: int, blocks: int, rows_per_block: int, row_format: RowFormat, device: torch.device
) -> Tensor:
    """Zeroed entry tables `[tables, blocks, rows_per_block, width]` in one allocation."""
    stride = block_stride_bytes(rows_per_block, row_format, device) // row_format.dtype.itemsize
    storage = torch.zeros(tables * blocks * stride, dtype=row_format.dtype, device=device)
    width = row_format.width
    return storage.as_strided((tables, blocks, rows_per_block, width), (blocks * stride, stride, width, 1))


def make_key_table(blocks: int, keys_per_block: int, key_format: KeyFormat, device: torch.device) -> Tensor:
    """Zeroed index key table `[blocks, keys_per_block, width]`."""
    return torch.zeros(blocks, keys_per_block, key_format.width, dtype=key_format.dtype, device=device)


@dataclass(frozen=True)
class RowViews:
    """An FP8 entry table `[blocks, rows, 584]` taken apart; all three share its memory."""

    fp8: Tensor
    """[blocks, rows, 448] uint8: e4m3 bits of the dims without RoPE."""
    rope: Tensor
    """[blocks, rows, 64] bfloat16: the dims with RoPE."""
    inv_scale: Tensor
    """[blocks, rows] float8_e8m0fnu: the multiplier that dequantises `fp8`, a power of two (SPEC 6.3)."""


def split_rows(table: Tensor) -> RowViews | None:
    """The parts of an FP8 entry table; None for the unquantised formats, which have none."""
    if table.dtype != torch.uint8:
        return None
    data, exponents = rows.strips(table)
    return RowViews(
        fp8=data[..., : rows.NOPE_DIM],
        rope=data[..., rows.NOPE_DIM :].view(torch.bfloat16),
        inv_scale=exponents[..., 0].view(torch.float8_e8m0fnu),
    )


@dataclass(frozen=True)
class KeyViews:
    """An FP4 index key table `[blocks, 32, 72]` taken apart; both share its memory."""

    fp4: Tensor
    """[blocks, 32, 64] uint8: two e2m1 values a byte, element 2i in the low nibble."""
    scales: Tensor
    """[blocks, 32, 8] float8_e4m3fn: one multiplier per 16 elements."""


def split_keys(table: Tensor) -> KeyViews | None:
    """The parts of an FP4 index key table; None for the unquantised format."""
    if table.dtype != torch.uint8:
        return None
    data, scales = index_keys.strips(table)
    return KeyViews(fp4=data, scales=scales.view(torch.float8_e4m3fn))
