"""The cache contents that a router derives from the KV events of a server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK


class Mirror:
    """Blocks by medium and hash. Fails on an event that a router cannot apply."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {medium.value: set() for medium in (StorageMedium.GPU, StorageMedium.CPU)}
        # The hash of each block, by the hash of the previous block or the salt of the first one, and by the block's
        # tokens. All media use the same hashes.
        self._next: dict[tuple[int | str | None, tuple[int, ...]], int] = {}
        self.removed = self.cleared = 0

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.cleared += 1
                for blocks in self.blocks.values():
                    blocks.clear()
            elif isinstance(event, BlockRemoved):
                self.removed += len(event.block_hashes)
                assert self.blocks[event.medium].issuperset(event.block_hashes), "blocks that were never stored"
                self.blocks[event.medium].difference_update(event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent: int | str | None = event.parent_block_hash
        assert parent is None or any(parent in blocks for blocks in self.blocks.values()), "the block before is unknown"
        assert len(event.token_ids) == BLOCK * len(event.block_hashes) and event.block_size == BLOCK
        if parent is None:
            parent = event.cache_salt
        for i, name in enumerate(event.block_hashes):
            assert name not in self.blocks[event.medium], "stored twice"
            self.blocks[event.medium].add(name)
            self._next[parent, _page(event.token_ids, i)] = parent = name

    def found(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Return the number of tokens of a prompt that a router expects to be cached. `salt`: the request's
        `cache_salt`."""
        name: int | str | None = salt
        for i in range(len(tokens) // BLOCK):
            name = self._next.get((name, _page(tokens, i)))
            if name is None or not any(name in blocks for blocks in self.blocks.values()):
                return i * BLOCK
        return len(tokens) // BLOCK * BLOCK

    def totals(self) -> dict[str, dict[str, int]]:
        """Return the totals in the format of the integrity report."""
        return {medium: {"blocks": len(blocks), "sum": sum(blocks)} for medium, blocks in self.blocks.items()}


def _page(tokens: Sequence[int], i: int) -> tuple[int, ...]:
    return tuple(tokens[i * BLOCK : (i + 1) * BLOCK])
