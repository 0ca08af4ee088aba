"""`LayerKVSpec`: the storage of one layer. Pools, bytes and steps of every model follow from it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from dsv4_sglang.formats import KeyFormat, StorageFormat
from dsv4_sglang.model.geometry import BLOCK_TOKENS


class LayerKVSpec(ABC):
    """Storage of one layer: a window ring, compressed entries, index keys and a compressor state.

    A model has a subclass of it. `CacheLayout` derives tensors and bytes from it.

    Attributes:
        draft_tokens: maximum tokens per request in a verify step. 0 or 1: no speculation.
        key_format: format of index keys.
    """

    draft_tokens: int
    key_format: KeyFormat

    @property
    @abstractmethod
    def kind(self) -> enum.Enum:
        """The kind of the layer. Layers of one kind share tensors. Kinds are ordered as the enum lists them."""

    @property
    @abstractmethod
    def ratio(self) -> int:
        """Tokens per entry that this layer writes, 0 if it writes none."""

    @property
    @abstractmethod
    def ring_rows(self) -> int:
        """Entries of a slot's window ring. Position t is in entry t % ring_rows."""

    @property
    @abstractmethod
    def ring_format(self) -> StorageFormat:
        """The format of window entries."""

    @property
    @abstractmethod
    def entry_format(self) -> StorageFormat:
        """The format of compressed entries."""

    @property
    def entries_per_block(self) -> int:
        """Compressed entries of a block of 128 tokens."""
        return BLOCK_TOKENS // self.ratio if self.ratio else 0

    @property
    @abstractmethod
    def has_indexer(self) -> bool:
        """Return True if each entry has an index key."""

    @property
    def indexer_entries_per_block(self) -> int:
        """Index keys of a block of 128 tokens."""
        return self.entries_per_block if self.has_indexer else 0

    @property
    def is_flat(self) -> bool:
        """Return True if all blocks of this layer are entries of one block, which is then not padded per entry."""
        return False

    def entry_table_shape(self, blocks: int) -> tuple[int, int]:
        """Blocks and entries per block of the KV buffer that holds the entries of `blocks` blocks."""
        return (1, blocks * self.entries_per_block) if self.is_flat else (blocks, self.entries_per_block)

    @property
    @abstractmethod
    def compressor_state_shape(self) -> tuple[int, int] | None:
        """Rows and fp32 columns of a slot's compressor state. None without one."""

    @property
    def kept_units(self) -> tuple[int, ...]:
        """Units of four rows of the compressor state that a snapshot keeps (SPEC 6.6)."""
        return ()
