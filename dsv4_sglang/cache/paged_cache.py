"""`PagedKVPool`: compressed entries and index keys of one layer, the part of the cache that grows with the tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4_sglang.cache.device import clear_memory, resolve_device
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import LayerCacheSchema
from dsv4_sglang.formats import KeyTable, KVBuffer, make_key_table, make_kv_buffers
from dsv4_sglang.model.layer_schedule import AttentionType


class BlockPool:
    """Pool of `num_blocks` blocks of 128 tokens of one layer.

    Attributes:
        entries: buffer of compressed entries, one row of the buffer per block.
        index_keys: buffer of index keys, None if the layer has no indexer.
    """

    entries: Tensor
    index_keys: Tensor | None = None

    def __init__(self, num_blocks: int, device: torch.device | str | None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; expected at least 1")
        self.num_blocks = num_blocks
        self.device = resolve_device(device)

    def block_views(self) -> list[Tensor]:
        """Return views [num_blocks, n] with one block per row and no gaps inside a row. Together they hold all bytes of
        a block.
        """
        views = []
        for table in self.allocations:
            block = table.shape[1] * table.shape[2]
            views.append(table.as_strided((self.num_blocks, block), (table.stride(0), 1)))
        return views

    @property
    def allocations(self) -> list[Tensor]:
        """One view of each allocated piece of memory."""
        return [self.entries] + ([self.index_keys] if self.index_keys is not None else [])

    def reset(self) -> None:
        """Zero all blocks in place, whatever the memory contains."""
        for table in self.allocations:
            clear_memory(table)

    def memory_bytes(self) -> int:
        """Return the bytes of the allocations, block padding included."""
        return sum(table.untyped_storage().nbytes() for table in self.allocations)


class PagedKVPool(BlockPool):
    """Pool of `num_blocks` blocks of 128 tokens of a CSA or HCA layer.

    Buffers, as the ops take them:
    - `entries`: CSA [num_blocks, 32, width], where entry i of a request is in block i // 32 of its block table, at
      index i % 32; HCA [1, num_blocks, width], one entry per block (`LayerCacheSchema.entry_table_shape`).
    - `index_keys`: CSA [num_blocks, 32, width], otherwise None.

    Views of the same memory, None in the unquantised formats:
    - `entries_fp8` [num_blocks, n, 448] uint8, `entries_rope` [num_blocks, n, 64] bf16, `inv_scale` [num_blocks, n]
      float8_e8m0fnu (the multiplier that dequantises), n = 32 (CSA) or 1 (HCA).
    - `indexer_keys_fp4` [num_blocks, 32, 64] uint8, `indexer_scales` [num_blocks, 32, 8] float8_e4m3fn; also None if
      the layer has no indexer.
    - `flashmla_view`: `entries` with FlashMLA's head dimension, [.., .., 1, 584] uint8.

    A full block is never written again. Unwritten entries are never read, because attention kernels read only the first
    floor((t + 1) / ratio) entries.
    """

    def __init__(self, schema: LayerCacheSchema, num_blocks: int, device: torch.device | str | None = None) -> None:
        if schema.entries_per_block == 0:
            raise ValueError(f"a {schema.attn.name} layer has no compressed entries, so no paged pool")
        super().__init__(num_blocks, device)
        self.schema = schema

        shape = schema.entry_table_shape(num_blocks)
        self.entries = make_kv_buffers(1, *shape, schema.kv_format, self.device)[0]
        if schema.has_indexer:
            self.index_keys = make_key_table(
                num_blocks, schema.indexer_entries_per_block, schema.key_format, self.device
            )

        self.entries_fp8: Tensor | None = None
        self.entries_rope: Tensor | None = None
        self.inv_scale: Tensor | None = None
        self.flashmla_view: Tensor | None = None
        views = KVBuffer(self.entries, schema.kv_format).views()
        if views is not None:
            flat = schema.attn is AttentionType.HCA
            by_block = [view.transpose(0, 1) if flat else view for view in (views.fp8, views.rope, views.inv_scale)]
            self.entries_fp8, self.entries_rope, self.inv_scale = by_block
            self.flashmla_view = self.entries.unsqueeze(2)

        keys = KeyTable(self.index_keys, schema.key_format).views() if self.index_keys is not None else None
        self.indexer_keys_fp4: Tensor | None = keys.fp4 if keys else None
        self.indexer_scales: Tensor | None = keys.scales if keys else None

    def block_views(self) -> list[Tensor]:
        """Return views [num_blocks, n] with one block per row and no gaps inside a row. Together they hold all bytes of
        a block.

        An HCA layer has two views, because its flat block stores all FP8 values before all exponents.
        """
        if self.schema.attn is AttentionType.HCA:
            return [strip[0] for strip in KVBuffer(self.entries, self.schema.kv_format).strips()]
        return super().block_views()


def make_paged_pools(layout: CacheLayout, blocks: Mapping[AttentionType, int]) -> list[PagedKVPool | None]:
    """Return the pools of all layers, None for SWA layers. `blocks` is the number of blocks by kind of layer."""
    return [
        PagedKVPool(schema, blocks[schema.attn], layout.device) if schema.entries_per_block else None
        for schema in layout.schemas
    ]
