"""Base class of all storage formats, and the buffers that hold entries in them.

A buffer is a tensor `[num_blocks, entries_per_block, width]`. Entry i is at index `i % entries_per_block` of block
`i // entries_per_block`. A block stores the data of all its entries, then the scales of all its entries. For a format
with scales, the two inner dimensions are only a shape; `KVBuffer.strips` describes the bytes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import Self


class StorageFormat(enum.Enum):
    """A format of entries or index keys. The value of a member is its name.

    Attributes:
        data_bytes: bytes of an entry without its scales.
        scale_bytes: bytes of its scales, 0 in a format that is not quantised.
        dtype: dtype of a buffer.
        code: index among the members, as in the enum of the same name in csrc/entries.h. The ops identify formats by
            it.
    """

    data_bytes: int
    scale_bytes: int
    dtype: torch.dtype
    code: int

    def __new__(
        cls, name: str, data_bytes: int = 0, scale_bytes: int = 0, dtype: torch.dtype = torch.uint8
    ) -> StorageFormat:
        member = object.__new__(cls)
        member._value_ = name
        member.data_bytes, member.scale_bytes, member.dtype = data_bytes, scale_bytes, dtype
        member.code = len(cls.__members__)
        return member

    @property
    def row_bytes(self) -> int:
        """Bytes of an entry."""
        return self.data_bytes + self.scale_bytes

    @property
    def width(self) -> int:
        """Size of a buffer's last dimension."""
        return self.row_bytes // self.dtype.itemsize

    @classmethod
    def from_code(cls, code: int) -> Self:
        """Return the format with this code. Raise ValueError for an unknown code."""
        for member in cls:
            if member.code == code:
                return member
        known = ", ".join(f"{member.code} ({member.value})" for member in cls)
        raise ValueError(f"{cls.__name__} {code}; expected {known}")

    def quantise(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return what a buffer stores of `values` [N, D]: the data and, in a format with scales, the scales."""
        return (values.to(self.dtype),)

    def dequantise(self, data: Tensor, *scales: Tensor) -> Tensor:
        """Invert `quantise`. Return fp32 [..., D]."""
        return data.float()


class KVBuffer(NamedTuple):
    """Buffer of entries or index keys, `data` [blocks, entries_per_block, width], with its format.

    The dtype does not determine the format. Indices count through all blocks.
    """

    data: Tensor
    format: StorageFormat

    def strips(self) -> tuple[Tensor, ...]:
        """Return views that together hold all bytes. Their second last dimension is the entry.

        Data [blocks, entries, data_bytes] and scales [blocks, entries, scale_bytes]; without scales the buffer itself.
        """
        if not self.format.scale_bytes:
            return (self.data,)
        blocks, entries, _ = self.data.shape
        stride, offset = self.data.stride(0), self.data.storage_offset()
        data, scales = self.format.data_bytes, self.format.scale_bytes
        return (
            self.data.as_strided((blocks, entries, data), (stride, data, 1)),
            self.data.as_strided((blocks, entries, scales), (stride, scales, 1), offset + entries * data),
        )

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Quantise `values` [N, D] and store them at the indices `rows` [N], which must be distinct."""
        at = self._block_and_index(rows)
        for strip, part in zip(self.strips(), self.format.quantise(values)):
            strip[at] = part

    def read(self, rows: Tensor) -> Tensor:
        """Return the dequantised entries at the indices `rows`, fp32 [*rows.shape, D]."""
        if not self.format.scale_bytes:
            # Blocks have no gaps here. `index_select` copies whole entries; indexing would copy number by number.
            found = self.data.flatten(0, 1).index_select(0, rows.flatten().to(self.data.device))
            return self.format.dequantise(found.view(*rows.shape, self.data.shape[-1]))
        at = self._block_and_index(rows)
        # Indexing a byte takes as long as indexing a word of 8 bytes.
        return self.format.dequantise(*(strip.view(torch.int64)[at].view(torch.uint8) for strip in self.strips()))

    def copy_entries(self, source: KVBuffer, source_rows: Tensor, rows: Tensor) -> None:
        """Copy entries of a buffer of the same format without requantising.

        Args:
            source: source buffer.
            source_rows: [N], indices of the source entries.
            rows: [N], indices of the destination entries, which must be distinct.
        """
        there, here = source._block_and_index(source_rows), self._block_and_index(rows)
        for mine, theirs in zip(self.strips(), source.strips()):
            mine[here] = theirs[there]

    def _block_and_index(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.long()
        return rows // self.data.shape[1], rows % self.data.shape[1]
