"""What DeepSeek-V4.1's layers store: rows a block, rows a state slot, bytes (SPEC 11.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.formats.rows import ENTRY_DIM
from dsv4_sglang.formats.v41_rows import V41RowFormat
from dsv4_sglang.model.geometry import BLOCK_TOKENS, WINDOW
from dsv4_sglang.model.v41 import Csa2Role, V41LayerSpec, pair_rows

_FP32_BYTES = 4


@dataclass(frozen=True)
class V41LayerSchema:
    """The storage of one layer. Only a layer of role FULL has entries, index keys and, at ratio 2, a tail."""

    ratio: int
    """Tokens of an entry that this layer writes; 0: it writes none."""
    draft_tokens: int = 0

    @property
    def ring_rows(self) -> int:
        """Rows of a slot's window ring: position t in row t mod `ring_rows`."""
        return WINDOW + (self.draft_tokens if self.draft_tokens > 1 else 0)

    @property
    def swa_bytes(self) -> int:
        return self.ring_rows * V41RowFormat.FP8.row_bytes

    @property
    def entries_per_block(self) -> int:
        """Entries of a block of 128 tokens, and as many index keys."""
        return BLOCK_TOKENS // self.ratio if self.ratio else 0

    @property
    def block_bytes(self) -> int:
        return self.entries_per_block * (V41RowFormat.FP4.row_bytes + KeyFormat.MXFP4.key_bytes)

    @property
    def tail_shape(self) -> tuple[int, int] | None:
        """Rows and fp32 columns (k, then the score) of a slot's tail; None without one."""
        return (pair_rows(self.draft_tokens), 2 * ENTRY_DIM) if self.ratio == 2 else None

    @property
    def tail_bytes(self) -> int:
        shape = self.tail_shape
        return shape[0] * shape[1] * _FP32_BYTES if shape else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot, without bookkeeping of positions."""
        return self.swa_bytes + self.tail_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """What lives on at a multiple of 128 tokens: the last 128 window rows. Every pair is complete there."""
        return WINDOW * V41RowFormat.FP8.row_bytes


def v41_schemas(schedule: Sequence[V41LayerSpec], draft_tokens: int = 0) -> list[V41LayerSchema]:
    """One of every layer, in order."""
    return [V41LayerSchema(spec.ratio if spec.role is Csa2Role.FULL else 0, draft_tokens) for spec in schedule]


class V41PagedPool:
    """`num_blocks` blocks of 128 tokens of a layer of role FULL, with the interface of `PagedKVPool`.

    `entries` uint8 [num_blocks, 128 / ratio, 288] and `index_keys` uint8 [num_blocks, 128 / ratio, 72], as the ops take
    them: entry i of a request in block i // (128 / ratio) of its table. `block_views`, `allocations`, `reset`,
    `memory_bytes` as `PagedKVPool` has them.
    """


class V41Layout:
    """What a block of 128 tokens and a state slot consist of, with the interface of `CacheLayout`, so that
    `StateStorage(layout, num_slots, checkpoints, positions=False)` and `make_paged_pools(layout, num_blocks)` take it:
    `schemas`, `device`, `draft_layers`, `ring_rows`, `layers(kind)`, `block_parts`, `state_parts`, `checkpoint_parts`,
    `block_bytes`, `token_bytes`, `slot_bytes`, `checkpoint_bytes`. Kinds of tails and of pools are `Csa2Role`s.

    `V41Layout.build(schedule, device, draft_tokens=0)`.
    """
