"""KV formats: byte layout and quantisation of the 512 numbers of a window entry or a compressed entry.

A KV buffer is a tensor `[num_blocks, entries_per_block, width]`. Entry i is at index `i % entries_per_block` of block
`i // entries_per_block`. A `KVBuffer` is such a tensor with its format, which the dtype does not determine:

| format | dtype | width | bytes per entry | content |
| --- | --- | --- | --- | --- |
| FP8 | uint8 | 584 | 584 | 448 e4m3, 64 bf16; after all entries of the block 8 equal ue8m0 exponents each |
| BF16 | bfloat16 | 512 | 1024 | the entry |
| FP32 | float32 | 512 | 2048 | the entry |

In an FP8 buffer only `stride(0)`, the bytes of a block, describes memory. The two inner dimensions are the shape that
FlashMLA takes. An entry has one scale, a power of two. The values equal those with DeepSeek's seven scales per entry,
except for subnormals (SPEC 6.3). FlashMLA needs one exponent byte per tile of 64, hence the copies.
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

# FlashMLA needs entries that start at multiples of 16 B. With 584 B per entry that holds only for an even number of
# entries per block. On sm_100 the block stride must be a multiple of 576 B, the size of an entry without its scales.
_BLOCK_ALIGNMENT = 16
_SM100_BLOCK_ALIGNMENT = ROW_BYTES


class EntryFormat(Protocol):
    """Properties of the format of a 512-dim entry that pools use."""

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
    """Storage format of a 512-dim KV entry (window, CSA or HCA entry)."""

    # 448 e4m3, 64 bf16 and 8 equal ue8m0 exponent bytes: 584 B.
    FP8 = "fp8"
    # 1024 B, unquantised.
    BF16 = "bf16"
    # 2048 B, unquantised, for exact tests and CPU.
    FP32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return {KVFormat.FP8: torch.uint8, KVFormat.BF16: torch.bfloat16, KVFormat.FP32: torch.float32}[self]

    @property
    def width(self) -> int:
        """Size of the last dimension of a KV buffer."""
        return FP8_WIDTH if self is KVFormat.FP8 else ENTRY_DIM

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def block_stride_bytes(
    entries_per_block: int, kv_format: EntryFormat, device: torch.device, sm100: bool | None = None
) -> int:
    """Return the bytes from one block of a KV buffer to the next.

    Args:
        entries_per_block: entries of a block.
        kv_format: KV format.
        device: device of the buffer.
        sm100: overrides the device, to compute sizes for the GPU of another machine.
    """
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
    """Allocate zeroed KV buffers in one allocation.

    Args:
        tables: number of buffers.
        blocks: blocks per buffer.
        entries_per_block: entries per block.
        kv_format: KV format.
        device: device of the buffers; on sm_100 FP8 blocks have more padding.

    Returns:
        [tables, blocks, entries_per_block, width].
    """
    stride = block_stride_bytes(entries_per_block, kv_format, device) // kv_format.dtype.itemsize
    storage = torch.zeros(tables * blocks * stride, dtype=kv_format.dtype, device=device)
    width = kv_format.width
    return storage.as_strided((tables, blocks, entries_per_block, width), (blocks * stride, stride, width, 1))


@dataclass(frozen=True)
class EntryViews:
    """Views of the parts of an FP8 KV buffer `[blocks, entries, 584]`.

    Attributes:
        fp8: [blocks, entries, 448] uint8, e4m3 bits of the dims without RoPE.
        rope: [blocks, entries, 64] bfloat16, dims with RoPE.
        inv_scale: [blocks, entries] float8_e8m0fnu, the multiplier that dequantises `fp8`, a power of two (SPEC 6.3).
    """

    fp8: Tensor
    rope: Tensor
    inv_scale: Tensor


def block_and_index(data: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block and the index within it of entries that are counted through all blocks of `data`."""
    rows = rows.long()
    return rows // data.shape[1], rows % data.shape[1]


def bytes_at(strip: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """Return `strip[at]` of bytes [blocks, entries_per_block, n], where n and the bytes of a block are multiples of 8.

    Indexes words of 8 bytes, because indexing a byte takes as long.
    """
    return strip.view(torch.int64)[at].view(torch.uint8)


class Strips(Protocol):
    """KV buffer with views of its bytes. The second last dimension of each view is the entry."""

    @property
    def data(self) -> Tensor: ...
    def strips(self) -> tuple[Tensor, ...]: ...


def copy_entries(target: Strips, source: Strips, source_rows: Tensor, rows: Tensor) -> None:
    """Copy entries of a buffer of the same format without requantising.

    Args:
        target: destination buffer.
        source: source buffer.
        source_rows: [N], indices of the source entries.
        rows: [N], indices of the destination entries, which must be distinct.
    """
    there, here = block_and_index(source.data, source_rows), block_and_index(target.data, rows)
    for mine, theirs in zip(target.strips(), source.strips()):
        mine[here] = theirs[there]


class KVBuffer(NamedTuple):
    """Buffer of KV entries, `data` [blocks, entries_per_block, width], with its format. Indices count through all
    blocks.
    """

    data: Tensor
    format: KVFormat

    def strips(self) -> tuple[Tensor, ...]:
        """Return views that together hold all bytes. Their second last dimension is the entry.

        FP8: data [blocks, entries, 576] and exponent bytes [blocks, entries, 8]. Other formats: the buffer itself.
        """
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

    def views(self) -> EntryViews | None:
        """Return the parts of an FP8 buffer, None for the unquantised formats."""
        if self.format is not KVFormat.FP8:
            return None
        rows, exponents = self.strips()
        return EntryViews(
            fp8=rows[..., :NOPE_DIM],
            rope=rows[..., NOPE_DIM:].view(torch.bfloat16),
            inv_scale=exponents[..., 0].view(torch.float8_e8m0fnu),
        )

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Quantise `values` [N, 512] fp32 and store them at the indices `rows` [N], which must be distinct."""
        at = block_and_index(self.data, rows)
        if self.format is not KVFormat.FP8:
            self.data[at] = values.to(self.data.dtype)
            return
        data, exponents = self.strips()
        codes, exponent = quantise_nope(values[:, :NOPE_DIM])
        rope = values[:, NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
        data[at] = torch.cat([codes, rope], -1)
        exponents[at] = exponent.unsqueeze(-1).expand(-1, SCALE_BYTES)

    def read(self, rows: Tensor) -> Tensor:
        """Return the dequantised entries at the indices `rows`, fp32 [*rows.shape, 512]."""
        if self.format is not KVFormat.FP8:
            # Blocks have no gaps here. `index_select` copies whole entries; indexing would copy number by number.
            found = self.data.flatten(0, 1).index_select(0, rows.flatten().to(self.data.device))
            return found.view(*rows.shape, ENTRY_DIM).float()
        at = block_and_index(self.data, rows)
        row, exponents = (bytes_at(strip, at) for strip in self.strips())
        rope = row[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
        return torch.cat([e4m3_values(row[..., :NOPE_DIM]) * exp2_of_biased(exponents[..., :1]), rope], -1)


def ceil_pow2_exponent(x: Tensor) -> Tensor:
    """Return the biased exponent e (int32) of the smallest power of two 2^(e-127) that is at least x.

    x is fp32, positive and normal (SPEC 2.4).
    """
    bits = x.float().contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def e4m3_values(codes: Tensor) -> Tensor:
    """Convert e4m3 bytes (uint8) to fp32 of the same shape.

    A table lookup, which takes a quarter of the time of PyTorch's conversion on a CPU.
    """
    return _e4m3_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def exp2_of_biased(e: Tensor) -> Tensor:
    """Return 2^(e-127) as fp32 for a biased exponent 1 <= e <= 254."""
    return (e.int() << 23).view(torch.float32)


def quantise_nope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [N, 448] to e4m3 bytes uint8 [N, 448] and the biased exponent of the multiplier uint8 [N].

    The source of an FP8 row is always its bf16 rounding (SPEC 2.4).
    """
    x = x.bfloat16().float()
    amax = x.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
    e = ceil_pow2_exponent(amax * (1.0 / FP8_MAX))
    scaled = (x / exp2_of_biased(e).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), e.to(torch.uint8)
