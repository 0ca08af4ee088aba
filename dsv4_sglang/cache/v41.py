"""Storage of DeepSeek-V4.1's layers: entries per block and per state slot, bytes, pools (SPEC 11.5)."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.cache.layout import PoolPart, pool_part
from dsv4_sglang.cache.paged_cache import BlockPool
from dsv4_sglang.formats import KeyFormat, make_key_table
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.formats.v41_entries import V41KVFormat, make_v41_table
from dsv4_sglang.model.geometry import BLOCK_TOKENS, WINDOW
from dsv4_sglang.model.v41 import Csa2Role, V41LayerSpec, pair_rows

_FP32_BYTES = 4


class V41Kind(enum.Enum):
    """What a layer writes besides its window entry. The value is the ratio of its compressed entries."""

    # No compressed entries.
    WINDOW = 0
    # One entry and one index key per token.
    SINGLE = 1
    # One entry and one index key per two tokens. The first of the two waits in a compressor state.
    PAIR = 2


@dataclass(frozen=True)
class V41LayerSchema:
    """The storage of one layer. Only a layer of role FULL has entries, index keys and, at ratio 2, a compressor
    state.
    """

    # Tokens per compressed entry that this layer writes; 0 if it writes none.
    ratio: int
    draft_tokens: int = 0

    @property
    def kind(self) -> V41Kind:
        return V41Kind(self.ratio)

    @property
    def ring_rows(self) -> int:
        """Number of entries in a slot's window ring. Position t is at index t mod `ring_rows`."""
        return WINDOW + (self.draft_tokens if self.draft_tokens > 1 else 0)

    @property
    def swa_bytes(self) -> int:
        return self.ring_rows * V41KVFormat.FP8.row_bytes

    @property
    def entries_per_block(self) -> int:
        """Compressed entries, and index keys, in a block of 128 tokens."""
        return BLOCK_TOKENS // self.ratio if self.ratio else 0

    @property
    def block_bytes(self) -> int:
        return self.entries_per_block * (V41KVFormat.FP4.row_bytes + KeyFormat.MXFP4.key_bytes)

    @property
    def compressor_state_shape(self) -> tuple[int, int] | None:
        """Rows and fp32 columns (k, then the score) of a slot's compressor state; None without one."""
        return (pair_rows(self.draft_tokens), 2 * ENTRY_DIM) if self.ratio == 2 else None

    @property
    def compressor_state_bytes(self) -> int:
        shape = self.compressor_state_shape
        return shape[0] * shape[1] * _FP32_BYTES if shape else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot, without the bookkeeping of positions."""
        return self.swa_bytes + self.compressor_state_bytes


def v41_schemas(schedule: Sequence[V41LayerSpec], draft_tokens: int = 0) -> list[V41LayerSchema]:
    """Return one schema per layer, in order."""
    return [V41LayerSchema(spec.ratio if spec.role is Csa2Role.FULL else 0, draft_tokens) for spec in schedule]


@dataclass(frozen=True)
class V41Layout:
    """Contents of a block of 128 tokens and of a state slot, layer by layer, like `cache.layout.CacheLayout` for V4.

    The last `draft_layers` are DSPARK's stages. Raise ValueError for no layers or several numbers of draft tokens.
    """

    schemas: tuple[V41LayerSchema, ...]
    device: torch.device
    draft_layers: int = 0
    # V4.1 has no CSA compressor states in units, and no part of a compressor state is live at a multiple of 128.
    compressor_state_units = 0
    kept_units = ()

    def __post_init__(self) -> None:
        if not self.schemas:
            raise ValueError("no layers: a cache needs at least one schema")
        drafts = {schema.draft_tokens for schema in self.schemas}
        if len(drafts) > 1:
            raise ValueError(f"layers have several numbers of draft tokens {sorted(drafts)}; expected one")

    @classmethod
    def build(
        cls, schedule: Sequence[V41LayerSpec], device: torch.device, *, draft_tokens: int = 0, draft_layers: int = 0
    ) -> V41Layout:
        """Return the layout of a model.

        Args:
            schedule: roles of the layers, including DSPARK's stages.
            device: device of the pools.
            draft_tokens: maximum tokens per request in a verify step.
            draft_layers: number of layers, at the end of the schedule, that are DSPARK's stages.
        """
        return cls(tuple(v41_schemas(schedule, draft_tokens)), device, draft_layers)

    @property
    def kinds(self) -> tuple[V41Kind, ...]:
        """Kinds of layers that have compressed entries."""
        return V41Kind.SINGLE, V41Kind.PAIR

    def layers(self, kind: enum.Enum) -> list[int]:
        """Return the ids of the layers of a kind, in ascending order."""
        return [layer for layer, schema in enumerate(self.schemas) if schema.kind is kind]

    @property
    def ring_rows(self) -> int:
        """Number of entries in a slot's window ring, the same in every layer."""
        return self.schemas[0].ring_rows

    def block_parts(self, blocks: int) -> Iterator[PoolPart]:
        """Yield the paged part of the cache: compressed entries and index keys of `blocks` blocks."""
        for kind in self.kinds:
            if layers := self.layers(kind):
                shape = (len(layers), blocks, self.schemas[layers[0]].entries_per_block)
                yield pool_part(f"{kind.name} entries", (*shape, V41KVFormat.FP4.row_bytes), torch.uint8)
                yield pool_part(f"{kind.name} index keys", (*shape, KeyFormat.MXFP4.width), KeyFormat.MXFP4.dtype)

    def rings(self, slots: int, name: str = "window rings") -> PoolPart:
        """Return the window rings of all layers, [layers, slots, R, 528]."""
        return pool_part(name, (len(self.schemas), slots, self.ring_rows, V41KVFormat.FP8.row_bytes), torch.uint8)

    def make_rings(self, slots: int) -> Tensor:
        """Allocate zeroed `rings`."""
        return torch.zeros(self.rings(slots).shape, dtype=torch.uint8, device=self.device)

    def compressor_states(self, kind: enum.Enum, slots: int) -> PoolPart | None:
        """Return the compressor states [layers of the kind, slots, rows, 1024], None if the kind has none."""
        layers = self.layers(kind)
        compressor_state = self.schemas[layers[0]].compressor_state_shape if layers else None
        return (
            pool_part("pair compressor states", (len(layers), slots, *compressor_state), torch.float32)
            if compressor_state
            else None
        )

    def state_parts(self, slots: int) -> Iterator[PoolPart]:
        """Yield the part of constant size: window rings and compressor states of `slots` slots."""
        yield self.rings(slots)
        yield from filter(None, (self.compressor_states(kind, slots) for kind in self.kinds))

    def position_parts(self, slots: int) -> tuple[PoolPart, PoolPart, PoolPart]:
        raise ValueError(
            "V4.1's slots have no position tables (positions follow from lengths); expected positions=False"
        )

    def snapshot_parts(self, snapshots: int) -> Iterator[PoolPart]:
        """Yield the part of a state that is live at a multiple of 128: the rings. Every pair is complete there."""
        yield self.rings(snapshots, "snapshot rings")

    @property
    def block_bytes(self) -> int:
        return sum(part.bytes for part in self.block_parts(1))

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / BLOCK_TOKENS

    @property
    def slot_bytes(self) -> int:
        return sum(part.bytes for part in self.state_parts(1))

    @property
    def snapshot_bytes(self) -> int:
        return sum(part.bytes for part in self.snapshot_parts(1))


class V41PagedPool(BlockPool):
    """Pool of `num_blocks` blocks of 128 tokens of a layer that owns entries. Later layers may read them too.

    `entries` is uint8 [num_blocks, 128 / ratio, 288], `index_keys` uint8 [num_blocks, 128 / ratio, 72], as the ops take
    them. Entry i of a request is in block i // (128 / ratio) of its block table. A full block is never written again.
    """

    index_keys: Tensor

    def __init__(self, schema: V41LayerSchema, num_blocks: int, device: torch.device | str | None = None) -> None:
        if schema.entries_per_block == 0:
            raise ValueError("a layer that writes no entries has no paged pool")
        super().__init__(num_blocks, device)
        self.schema = schema
        self.entries = make_v41_table(num_blocks, schema.entries_per_block, V41KVFormat.FP4, self.device)
        self.index_keys = make_key_table(num_blocks, schema.entries_per_block, KeyFormat.MXFP4, self.device)


def make_v41_pools(layout: V41Layout, num_blocks: int) -> list[V41PagedPool | None]:
    """Return one pool per layer, None for layers without entries of their own."""
    return [
        V41PagedPool(schema, num_blocks, layout.device) if schema.entries_per_block else None
        for schema in layout.schemas
    ]
