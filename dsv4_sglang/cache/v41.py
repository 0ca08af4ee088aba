"""Storage of a layer of DeepSeek-V4.1: `LayerKVSpec` of its kinds, and the layout of a model (SPEC 11.5)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_sglang.cache.layer_spec import LayerKVSpec
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.model.v41 import Csa2Role, V41LayerSpec, pair_rows


class V41Kind(enum.Enum):
    """What a layer writes besides its window entries. The value is the ratio of its entries."""

    WINDOW = 0  # nothing
    SINGLE = 1  # an entry and an index key for each token
    PAIR = 2  # an entry and an index key for two tokens, the first of which waits in a compressor state


@dataclass(frozen=True)
class V41LayerSchema(LayerKVSpec):
    """The storage of one layer. Only a layer of role FULL has entries, index keys and, at ratio 2, a compressor state.

    Snapshots keep nothing of a compressor state: at a multiple of 128 every pair is complete.
    """

    writes: V41Kind
    draft_tokens: int = 0
    key_format = KeyFormat.MXFP4

    @property
    def kind(self) -> V41Kind:
        return self.writes

    @property
    def ratio(self) -> int:
        return self.writes.value

    @property
    def ring_format(self) -> KVFormat:
        return KVFormat.MXFP8

    @property
    def entry_format(self) -> KVFormat:
        return KVFormat.NVFP4

    @property
    def ring_rows(self) -> int:
        return WINDOW + (self.draft_tokens if self.draft_tokens > 1 else 0)

    @property
    def has_indexer(self) -> bool:
        return self.ratio > 0

    @property
    def compressor_state_shape(self) -> tuple[int, int] | None:
        """Rows and fp32 columns (k, then the score) of a slot's compressor state. None without one."""
        return (pair_rows(self.draft_tokens), 2 * ENTRY_DIM) if self.writes is V41Kind.PAIR else None


def v41_layout(
    schedule: Sequence[V41LayerSpec], device: torch.device, *, draft_tokens: int = 0, draft_layers: int = 0
) -> CacheLayout:
    """Return the layout of a model.

    Args:
        schedule: roles of the layers.
        device: device of the pools.
        draft_tokens: as in `LayerKVSpec`.
        draft_layers: number of DSPARK's stages, the last layers of `schedule`.
    """
    kinds = [V41Kind(spec.ratio) if spec.role is Csa2Role.FULL else V41Kind.WINDOW for spec in schedule]
    schemas = tuple(V41LayerSchema(kind, draft_tokens) for kind in kinds)
    return CacheLayout(schemas, device, draft_layers=draft_layers)
