"""`LayerKVSpec`: what one layer stores and which entries it attends to. Pools, bytes and steps follow from it.

A model is a list of specs: `cache.schema` makes that of DeepSeek-V4, `cache.specs_v41` that of DeepSeek-V4.1.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.model.layer_schedule import AttentionType


class Selection(enum.Enum):
    """Which of the visible entries a layer attends to."""

    # None: the layer has a sliding window only.
    NONE = "none"
    # All of them.
    ALL = "all"
    # Those that its indexer selects.
    TOP_K = "top-k"
    # Those that the latest layer with TOP_K selected.
    REUSE = "reuse"


class Candidates(NamedTuple):
    """Part of a layer in a selection of two levels (SPEC 11.6).

    Attributes:
        blocks: most candidate blocks of a token.
        block_size: entries of a candidate block.
        chooses: the layer chooses the candidate blocks. Otherwise it selects within them.
    """

    blocks: int
    block_size: int
    chooses: bool


@dataclass(frozen=True, kw_only=True)
class LayerKVSpec:
    """Storage of one layer, and the entries that it attends to.

    Attributes:
        kind: how the layer makes its entries. Layers of one kind share tensors.
        ring_rows: entries of a slot's window ring. Position t is in entry t % ring_rows.
        ring_format: format of window entries.
        entry_format: format of compressed entries.
        key_format: format of index keys.
        has_indexer: each entry that the layer writes has an index key.
        compressor_state_shape: rows and fp32 columns of a slot's compressor state, None without one.
        kept_units: units of four rows of the compressor state that a snapshot keeps (SPEC 6.6).
        draft_tokens: maximum tokens per request in a verify step (1 + drafts). All but the first may be rejected and
            rolled back by the next step. 0 or 1 means no speculation.
        kv_source: earlier layer whose entries this one attends to, None for its own.
        selection: which of these entries it attends to.
        hadamard: index keys and queries have the Hadamard transform.
        candidates: part of the layer in a selection of two levels, None in one of a single level.
    """

    kind: AttentionType
    ring_rows: int
    ring_format: KVFormat
    entry_format: KVFormat
    key_format: KeyFormat
    has_indexer: bool = False
    compressor_state_shape: tuple[int, int] | None = None
    kept_units: tuple[int, ...] = ()
    draft_tokens: int = 0
    kv_source: int | None = None
    selection: Selection = Selection.NONE
    hadamard: bool = True
    candidates: Candidates | None = None

    @cached_property
    def ratio(self) -> int:
        """Tokens per entry that this layer writes, 0 if it writes none."""
        return self.kind.ratio

    @property
    def entries_per_block(self) -> int:
        """Compressed entries of a block of 128 tokens."""
        return BLOCK_TOKENS // self.ratio if self.ratio else 0

    @property
    def indexer_entries_per_block(self) -> int:
        """Index keys of a block of 128 tokens."""
        return self.entries_per_block if self.has_indexer else 0

    @property
    def is_flat(self) -> bool:
        """Return True if all blocks of this layer are entries of one block, which is then not padded per entry: in
        layers with one entry per block (HCA), because FlashMLA's entries start at multiples of 16 B.
        """
        return self.entries_per_block == 1

    def entry_table_shape(self, blocks: int) -> tuple[int, int]:
        """Blocks and entries per block of the KV buffer that holds the entries of `blocks` blocks."""
        return (1, blocks * self.entries_per_block) if self.is_flat else (blocks, self.entries_per_block)


def source_of(specs: Sequence[LayerKVSpec], layer: int) -> int:
    """Return the layer whose entries `layer` attends to, possibly itself."""
    source = specs[layer].kv_source
    return layer if source is None else source


def entry_limits(specs: Sequence[LayerKVSpec], top_k: int) -> dict[int, int | None]:
    """Return the ratios of the entries that the layers of a model attend to, and the most of them that a token reads,
    None for all visible ones.

    Args:
        specs: layers of the model.
        top_k: entries that a token selects.

    Raises:
        ValueError: layers read entries of one ratio in different ways, so that one length per token is not enough, or
            all entries of a ratio other than 128, for which a step has no lists.
    """
    limits: dict[int, int | None] = {}
    for layer, spec in enumerate(specs):
        if spec.selection is Selection.NONE:
            continue
        ratio, limit = specs[source_of(specs, layer)].ratio, None if spec.selection is Selection.ALL else top_k
        if limit is None and ratio != BLOCK_TOKENS:
            raise ValueError(f"layer {layer} reads all entries of ratio {ratio}; expected ratio {BLOCK_TOKENS}")
        if limits.setdefault(ratio, limit) != limit:
            raise ValueError(
                f"layer {layer} reads {_described(limit)} entries of ratio {ratio}, an earlier layer "
                f"{_described(limits[ratio])}; a step has one length for each ratio"
            )
    return limits


def _described(limit: int | None) -> str:
    return "all" if limit is None else f"at most {limit}"
