"""`PagedKVPool`: compressed entries and index keys of one layer, the part of the cache that grows with the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4_sglang.cache.contracts import BlockPool
from dsv4_sglang.cache.device import clear_memory, resolve_device
from dsv4_sglang.cache.layer_spec import LayerKVSpec
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.formats import KVBuffer, KVFormat, make_kv_buffers
from dsv4_sglang.formats.kv_entries import fp8_views


class PagedKVPool(BlockPool):
    """`num_blocks` blocks of 128 tokens of a layer that writes entries.

    Tables, as the ops take them:
    - `entries` [num_blocks, n, width], n = 128 / ratio: entry i of a request is entry i % n of block i // n of its
      table. A flat layer (HCA) has [1, num_blocks, width], one entry per block (`LayerKVSpec.entry_table_shape`).
    - `index_keys` [num_blocks, n, width]: None in a layer without an indexer.

    Views of the same memory:
    - `entries_fp8` [num_blocks, n, 448] uint8, `entries_rope` [num_blocks, n, 64] bf16, `inv_scale` [num_blocks, n]
      float8_e8m0fnu (the multiplier that dequantises), n = 32 (CSA) or 1 (HCA). None unless the format is V4's FP8.
    - `indexer_keys_fp4` [num_blocks, n, 64] uint8, `indexer_scales` [num_blocks, n, 8] float8_e4m3fn. None without an
      indexer or with unquantised keys.

    Raises:
        ValueError: the layer writes no entries, or `num_blocks` is below 1.
    """

    def __init__(self, schema: LayerKVSpec, num_blocks: int, device: torch.device | str | None = None) -> None:
        if schema.entries_per_block == 0:
            raise ValueError(f"a {schema.kind.name} layer has no compressed entries, so no paged pool")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; expected at least 1")
        self.schema, self.num_blocks, self.device = schema, num_blocks, resolve_device(device)

        shape = schema.entry_table_shape(num_blocks)
        self.entries = make_kv_buffers(1, *shape, schema.entry_format, self.device)[0]
        self.index_keys: Tensor | None = None
        if keys := schema.indexer_entries_per_block:
            self.index_keys = make_kv_buffers(1, num_blocks, keys, schema.key_format, self.device)[0]

        self.entries_fp8: Tensor | None = None
        self.entries_rope: Tensor | None = None
        self.inv_scale: Tensor | None = None
        if schema.entry_format is KVFormat.FP8:
            by_block = [view.transpose(0, 1) if schema.is_flat else view for view in fp8_views(self.entries)]
            self.entries_fp8, self.entries_rope, self.inv_scale = by_block

        self.indexer_keys_fp4: Tensor | None = None
        self.indexer_scales: Tensor | None = None
        if self.index_keys is not None and schema.key_format.is_fp4:
            self.indexer_keys_fp4, scales = KVBuffer(self.index_keys, schema.key_format).strips()
            self.indexer_scales = scales.view(torch.float8_e4m3fn)

    def block_views(self) -> list[Tensor]:
        # In a flat FP8 layer the entries and their exponents are apart, so they are two views.
        if self.schema.is_flat:
            return [strip[0] for strip in KVBuffer(self.entries, self.schema.entry_format).strips()]
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
        for table in self.allocations:
            clear_memory(table)

    def memory_bytes(self) -> int:
        return sum(table.untyped_storage().nbytes() for table in self.allocations)


def make_paged_pools(layout: CacheLayout, blocks: Mapping[Any, int]) -> list[PagedKVPool | None]:
    """Return the pools of all layers, None for a layer without entries. `blocks`: of each layer, by its kind."""
    return [
        PagedKVPool(schema, blocks[schema.kind], layout.device) if schema.entries_per_block else None
        for schema in layout.schemas
    ]
