"""`CacheLayout`: shapes and bytes of the pools of all layers, for allocation and for dividing memory."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.cache.schema import HcaState, LayerCacheSchema, build_schema
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.formats.kv_entries import block_stride_bytes, make_kv_buffers
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType, LayerSpec

COMPRESSED = (AttentionType.CSA, AttentionType.HCA)


class PoolPart(NamedTuple):
    """One kind of content of a pool, for all layers together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class CacheLayout:
    """Contents of a block of 128 tokens and of a state slot, layer by layer.

    Attributes:
        schemas: one schema per layer. The layers must share tensors, so they have one KV format, one number of draft
            tokens, and one shape of compressor state per kind; otherwise ValueError.
        device: device of the pools. It determines the padding of FP8 blocks.
        sm100: overrides the device's padding, to compute sizes for the GPU of another machine.
        draft_layers: number of layers, at the end, that belong to a draft model.
    """

    schemas: tuple[LayerCacheSchema, ...]
    device: torch.device
    sm100: bool | None = None
    draft_layers: int = 0

    def __post_init__(self) -> None:
        if not self.schemas:
            raise ValueError("no layers: a cache needs at least one schema")
        formats = {schema.kv_format.value for schema in self.schemas}
        if len(formats) > 1:
            raise ValueError(f"layers have several KV formats {sorted(formats)}; expected one")
        drafts = {schema.draft_tokens for schema in self.schemas}
        if len(drafts) > 1:
            raise ValueError(f"layers have several numbers of draft tokens {sorted(drafts)}; expected one")
        for kind in COMPRESSED:
            shapes = {schema.compressor_state_shape for schema in self.schemas if schema.attn is kind}
            if len(shapes) > 1:
                raise ValueError(f"{kind.name} compressor states have several shapes {shapes}; expected one")

    @classmethod
    def build(
        cls,
        config: DSV4Config,
        schedule: Sequence[LayerSpec],
        device: torch.device,
        *,
        kv_format: KVFormat | str = KVFormat.FP8,
        key_format: KeyFormat | str = KeyFormat.MXFP4,
        hca_state: HcaState | str = HcaState.RAW,
        draft_tokens: int = 0,
        sm100: bool | None = None,
        draft_layers: int = 0,
    ) -> CacheLayout:
        """Return the layout of a model.

        Args:
            config: configuration of the model.
            schedule: kinds of the layers, including those of a draft model.
            device: device of the pools.
            kv_format, key_format, hca_state, draft_tokens: as in `build_schema`.
            sm100: overrides the device's padding, see `CacheLayout`.
            draft_layers: number of layers, at the end of the schedule, that belong to a draft model.
        """
        schemas = [
            build_schema(
                config,
                spec,
                kv_format=kv_format,
                key_format=key_format,
                hca_state=hca_state,
                draft_tokens=draft_tokens,
            )
            for spec in schedule
        ]
        return cls(tuple(schemas), device, sm100, draft_layers)

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        """Kinds of layers that have compressed entries."""
        return COMPRESSED

    def layers(self, kind: enum.Enum) -> list[int]:
        """Return the ids of the layers of a kind, in ascending order."""
        return [layer for layer, schema in enumerate(self.schemas) if schema.attn is kind]

    @property
    def kv_format(self) -> KVFormat:
        return self.schemas[0].kv_format

    @property
    def ring_rows(self) -> int:
        """Number of entries in a slot's window ring, the same in every layer."""
        return self.schemas[0].ring_rows

    @property
    def compressor_state_units(self) -> int:
        """Number of units (groups of four rows) in a slot's CSA compressor state."""
        return self.schemas[0].rows.csa.rows // CSA_RATIO

    @property
    def kept_units(self) -> tuple[int, int]:
        """Indices of the two units that a snapshot must save: the last unit of the previous stream's k and of its z.

        Snapshots are taken at multiples of 128 and ring sizes divide 128, so the last four rows are always in these
        units.
        """
        compressor_state = self.schemas[0].rows.csa
        return compressor_state.previous_z // CSA_RATIO - 1, compressor_state.rows // CSA_RATIO - 1

    def block_parts(self, blocks: int) -> Iterator[PoolPart]:
        """Yield the paged part of the cache: compressed entries and index keys of `blocks` blocks."""
        for kind in COMPRESSED:
            layers = self.layers(kind)
            if not layers:
                continue
            schema, count = self.schemas[layers[0]], len(layers)
            yield self._kv_buffers(f"{kind.name} entries", count, *schema.entry_table_shape(blocks))
            if schema.has_indexer:
                shape = (count, blocks, schema.indexer_entries_per_block, schema.key_format.width)
                yield pool_part("index keys", shape, schema.key_format.dtype)

    def rings(self, slots: int, name: str = "window rings") -> PoolPart:
        """Return the window rings of all layers, [layers, slots, R, width]."""
        return self._kv_buffers(name, len(self.schemas), slots, self.ring_rows)

    def make_rings(self, slots: int) -> Tensor:
        """Allocate zeroed `rings`."""
        return make_kv_buffers(len(self.schemas), slots, self.ring_rows, self.kv_format, self.device)

    def compressor_states(self, kind: enum.Enum, slots: int) -> PoolPart | None:
        """Return the compressor states [layers of the kind, slots, ...], None if there are no such layers."""
        layers = self.layers(kind)
        compressor_state = self.schemas[layers[0]].compressor_state_shape if layers else None
        return (
            None
            if compressor_state is None
            else pool_part(f"{kind.name} compressor states", (len(layers), slots, *compressor_state), torch.float32)
        )

    def state_parts(self, slots: int) -> Iterator[PoolPart]:
        """Yield the part of constant size: window rings and compressor states of `slots` slots."""
        yield self.rings(slots)
        yield from filter(None, (self.compressor_states(kind, slots) for kind in COMPRESSED))

    def position_parts(self, slots: int) -> tuple[PoolPart, PoolPart, PoolPart]:
        """Return the bookkeeping of `slots` slots: positions of ring entries, heads of rings, tokens in the open
        windows.

        It follows from the lengths of the requests, so a server does not allocate it.
        """
        layers, compressed = len(self.schemas), sum(len(self.layers(kind)) for kind in COMPRESSED)
        return (
            pool_part("ring positions", (layers, slots, self.ring_rows), torch.int32),
            pool_part("ring heads", (layers, slots), torch.int32),
            pool_part("compressor state lengths", (compressed, slots), torch.int32),
        )

    def snapshot_parts(self, snapshots: int) -> Iterator[PoolPart]:
        """Yield the part of a state that is live at a multiple of 128 (SPEC 6.6): the rings, and for each CSA
        compressor the last four rows of k and z of the previous window.
        """
        yield self.rings(snapshots, "snapshot rings")
        if csa := self.compressor_states(AttentionType.CSA, snapshots):
            layers, _, _, columns = csa.shape
            rows = len(self.kept_units) * CSA_RATIO
            yield pool_part("snapshot compressor states", (layers, snapshots, rows, columns), csa.dtype)

    def _kv_buffers(self, name: str, tables: int, blocks: int, entries_per_block: int) -> PoolPart:
        """Return the size of KV buffers, including the padding after blocks."""
        size = tables * blocks * block_stride_bytes(entries_per_block, self.kv_format, self.device, self.sm100)
        shape = (tables, blocks, entries_per_block, self.kv_format.width)
        return PoolPart(name, shape, self.kv_format.dtype, size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one additional block. An HCA layer is one flat buffer, whose padding does not grow with its
        entries.
        """
        csa = [self.schemas[layer] for layer in self.layers(AttentionType.CSA)]
        strides = [
            block_stride_bytes(schema.entries_per_block, self.kv_format, self.device, self.sm100) for schema in csa
        ]
        keys = sum(schema.indexer_entries_per_block * schema.indexer_entry_bytes for schema in csa)
        return sum(strides) + keys + len(self.layers(AttentionType.HCA)) * self.kv_format.row_bytes

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
