"""`CacheLayout`: shapes and bytes of the pools of all layers. Pools allocate from it, a server divides memory by it."""

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
    """One kind of content of a pool, all layers together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class CacheLayout:
    """What a block of 128 tokens and a state slot consist of, layer by layer. `device` decides the padding of FP8
    blocks; in a layout that is only counted, `sm100` does, so that it may be that of another machine's GPU. The last
    `draft_layers` are those of a draft model.

    Raises ValueError for no layers, and for layers that cannot share tensors: rows of several formats, several numbers
    of draft tokens, compressor states of a kind of several shapes.
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
            raise ValueError(f"window rings of several formats {sorted(formats)}; expected one")
        drafts = {schema.draft_tokens for schema in self.schemas}
        if len(drafts) > 1:
            raise ValueError(f"layers for several numbers of draft tokens {sorted(drafts)}; expected one")
        for kind in COMPRESSED:
            shapes = {schema.compressor_state_shape for schema in self.schemas if schema.attn is kind}
            if len(shapes) > 1:
                raise ValueError(f"{kind.name} compressor states of several shapes {shapes}; expected one")

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
        """The layout of a model; options as `build_schema` takes them. `draft_layers` of the schedule's are those of a
        draft model, the last ones."""
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
        """Kinds of layers that have entries, and perhaps compressor states."""
        return COMPRESSED

    def layers(self, kind: enum.Enum) -> list[int]:
        """Ids of the layers of a kind, in order."""
        return [layer for layer, schema in enumerate(self.schemas) if schema.attn is kind]

    @property
    def kv_format(self) -> KVFormat:
        return self.schemas[0].kv_format

    @property
    def ring_rows(self) -> int:
        """Rows of a slot's window ring, in every layer."""
        return self.schemas[0].ring_rows

    @property
    def compressor_state_units(self) -> int:
        """Units of four rows in a slot's CSA compressor state."""
        return self.schemas[0].rows.csa.rows // CSA_RATIO

    @property
    def kept_units(self) -> tuple[int, int]:
        """Those alive at a multiple of 128, and with them the four rows before it: the last unit of the previous
        stream's k and that of its z, because their rings divide 128."""
        compressor_state = self.schemas[0].rows.csa
        return compressor_state.previous_z // CSA_RATIO - 1, compressor_state.rows // CSA_RATIO - 1

    def block_parts(self, blocks: int) -> Iterator[PoolPart]:
        """The paged half: entries and index keys of `blocks` blocks."""
        for kind in COMPRESSED:
            layers = self.layers(kind)
            if not layers:
                continue
            schema, count = self.schemas[layers[0]], len(layers)
            yield self._rows(f"{kind.name} entries", count, *schema.entry_table_shape(blocks))
            if schema.has_indexer:
                shape = (count, blocks, schema.indexer_entries_per_block, schema.key_format.width)
                yield pool_part("index keys", shape, schema.key_format.dtype)

    def rings(self, slots: int, name: str = "window rings") -> PoolPart:
        """[layers, slots, R, width]"""
        return self._rows(name, len(self.schemas), slots, self.ring_rows)

    def make_rings(self, slots: int) -> Tensor:
        """Zeroed `rings`."""
        return make_kv_buffers(len(self.schemas), slots, self.ring_rows, self.kv_format, self.device)

    def compressor_states(self, kind: enum.Enum, slots: int) -> PoolPart | None:
        """[layers of the kind, slots, ...] of its compressors, None without such layers."""
        layers = self.layers(kind)
        compressor_state = self.schemas[layers[0]].compressor_state_shape if layers else None
        return (
            None
            if compressor_state is None
            else pool_part(f"{kind.name} compressor states", (len(layers), slots, *compressor_state), torch.float32)
        )

    def state_parts(self, slots: int) -> Iterator[PoolPart]:
        """The half that does not grow: window rings and compressor states of `slots` slots."""
        yield self.rings(slots)
        yield from filter(None, (self.compressor_states(kind, slots) for kind in COMPRESSED))

    def position_parts(self, slots: int) -> tuple[PoolPart, PoolPart, PoolPart]:
        """Bookkeeping of `slots` slots: positions of ring rows, heads of rings, tokens in the open windows. It follows
        from the lengths of the requests, so a server does without.
        """
        layers, compressed = len(self.schemas), sum(len(self.layers(kind)) for kind in COMPRESSED)
        return (
            pool_part("ring positions", (layers, slots, self.ring_rows), torch.int32),
            pool_part("ring heads", (layers, slots), torch.int32),
            pool_part("compressor state lengths", (compressed, slots), torch.int32),
        )

    def snapshot_parts(self, snapshots: int) -> Iterator[PoolPart]:
        """What is alive of a state at a multiple of 128 (SPEC 6.6): the rings, and of each CSA compressor the last four
        rows of k and of z of the previous window.
        """
        yield self.rings(snapshots, "snapshot rings")
        if csa := self.compressor_states(AttentionType.CSA, snapshots):
            layers, _, _, columns = csa.shape
            rows = len(self.kept_units) * CSA_RATIO
            yield pool_part("snapshot compressor states", (layers, snapshots, rows, columns), csa.dtype)

    def _rows(self, name: str, tables: int, blocks: int, entries_per_block: int) -> PoolPart:
        """Row tables, with the padding behind blocks."""
        size = tables * blocks * block_stride_bytes(entries_per_block, self.kv_format, self.device, self.sm100)
        shape = (tables, blocks, entries_per_block, self.kv_format.width)
        return PoolPart(name, shape, self.kv_format.dtype, size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one more block. An HCA layer is one flat table, whose padding does not grow with its rows."""
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
    """Of tensors without padding."""
    return PoolPart(name, shape, dtype, math.prod(shape) * dtype.itemsize)
