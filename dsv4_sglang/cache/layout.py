"""`CacheLayout`: shapes and bytes of the pools of all layers, for allocation and for dividing memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.cache.layer_spec import LayerKVSpec
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import block_stride_bytes, make_kv_buffers
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType


class PoolPart(NamedTuple):
    """One kind of content of a pool, for all layers together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class CacheLayout:
    """What a block of 128 tokens and a state slot consist of, layer by layer.

    Args:
        schemas: one spec per layer, in order. Formats and `draft_tokens` are equal in all of them, and layers of one
            kind have compressor states of one shape, so that layers can share tensors.
        device: device of the pools. The padding of FP8 blocks depends on it.
        sm100: for a layout whose bytes are only computed, True if its device is an sm_100 GPU. None: query `device`.
        draft_layers: number of layers of a draft model, which are the last ones.

    Raises:
        ValueError: there are no layers.
    """

    schemas: tuple[LayerKVSpec, ...]
    device: torch.device
    sm100: bool | None = None
    draft_layers: int = 0

    def __post_init__(self) -> None:
        if not self.schemas:
            raise ValueError("no layers: a cache needs at least one schema")

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        """Kinds of layers that write entries, in the order of their enum."""
        return tuple(kind for kind in AttentionType if kind.ratio and any(s.kind is kind for s in self.schemas))

    def layers(self, kind: AttentionType) -> list[int]:
        """Return the ids of the layers of a kind, in order."""
        return [layer for layer, schema in enumerate(self.schemas) if schema.kind is kind]

    @property
    def ring_format(self) -> KVFormat:
        """The format of window entries, in every layer."""
        return self.schemas[0].ring_format

    @property
    def ring_rows(self) -> int:
        """Entries of a slot's window ring, in every layer."""
        return self.schemas[0].ring_rows

    @property
    def kept(self) -> LayerKVSpec | None:
        """The spec whose compressor states snapshots keep in part. None: snapshots are rings alone."""
        return next((schema for schema in self.schemas if schema.kept_units), None)

    def block_parts(self, blocks: int) -> Iterator[PoolPart]:
        """Yield the parts that grow with the tokens: entries and index keys of `blocks` blocks."""
        for kind in self.kinds:
            layers = self.layers(kind)
            schema, count = self.schemas[layers[0]], len(layers)
            yield self._entries(f"{kind.name} entries", count, *schema.entry_table_shape(blocks), schema.entry_format)
            if keys := schema.indexer_entries_per_block:
                shape = (count, blocks, keys, schema.key_format.width)
                yield pool_part(f"{kind.name} index keys", shape, schema.key_format.dtype)

    def rings(self, slots: int, name: str = "window rings") -> PoolPart:
        """Return the window rings of `slots` slots, [layers, slots, R, width]."""
        return self._entries(name, len(self.schemas), slots, self.ring_rows, self.ring_format)

    def make_rings(self, slots: int) -> Tensor:
        """Allocate `rings`, zeroed."""
        return make_kv_buffers(len(self.schemas), slots, self.ring_rows, self.ring_format, self.device)

    def compressor_states(self, kind: AttentionType, slots: int) -> PoolPart | None:
        """Return the compressor states of `slots` slots, fp32 [layers of the kind, slots, rows, columns], or None."""
        layers = self.layers(kind)
        shape = self.schemas[layers[0]].compressor_state_shape
        return shape and pool_part(f"{kind.name} compressor states", (len(layers), slots, *shape), torch.float32)

    def state_parts(self, slots: int) -> Iterator[PoolPart]:
        """Yield the parts of constant size: window rings and compressor states of `slots` slots."""
        yield self.rings(slots)
        yield from filter(None, (self.compressor_states(kind, slots) for kind in self.kinds))

    def snapshot_parts(self, snapshots: int) -> Iterator[PoolPart]:
        """Yield the parts of a state that are live at a multiple of 128 (SPEC 6.6): rings and kept units of compressor
        states.
        """
        yield self.rings(snapshots, "snapshot rings")
        if self.kept and (states := self.compressor_states(self.kept.kind, snapshots)):
            layers, _, _, columns = states.shape
            rows = len(self.kept.kept_units) * CSA_RATIO
            yield pool_part("snapshot compressor states", (layers, snapshots, rows, columns), states.dtype)

    def _entries(self, name: str, tables: int, blocks: int, entries: int, entry_format: KVFormat) -> PoolPart:
        """Return KV buffers, with the padding after each block."""
        size = tables * blocks * block_stride_bytes(entries, entry_format, self.device, self.sm100)
        return PoolPart(name, (tables, blocks, entries, entry_format.width), entry_format.dtype, size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one more block. The padding of a flat layer does not grow with its blocks."""
        size = 0
        for schema in self.schemas:
            entries, entry_format = schema.entries_per_block, schema.entry_format
            if schema.is_flat:
                size += entries * entry_format.row_bytes
            elif entries:
                size += block_stride_bytes(entries, entry_format, self.device, self.sm100)
            size += schema.indexer_entries_per_block * schema.key_format.row_bytes
        return size

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / BLOCK_TOKENS

    @property
    def slot_bytes(self) -> int:
        return sum(part.bytes for part in self.state_parts(1))

    @property
    def snapshot_bytes(self) -> int:
        return sum(part.bytes for part in self.snapshot_parts(1))


def pool_part(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> PoolPart:
    """Return a `PoolPart` of tensors without padding."""
    return PoolPart(name, shape, dtype, math.prod(shape) * dtype.itemsize)
