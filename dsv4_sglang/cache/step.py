"""`Step`: who owns which token of a step, where it is written, and which rows it reads. The same for all layers."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS

WINDOW = 128
NO_BLOCK = -1
"""What a block table holds where a request has no block."""


class Step:
    """The tokens of one forward: T tokens of B requests, a request's tokens next to each other and in order.

    Making one only keeps the tensors given. What the ops need besides is derived when first asked for and then kept, so
    layers that share a step share that work. The first derivation waits for the device, to learn how many tokens each
    request has and to refuse (ValueError) a step that would write where it must not.

    Attributes:
        request_slots: [T] int32 state slot of each token's request, -1 for a token that only pads.
        positions: [T] int32 or int64 position of each token in its request.
        request_ids: [T] int, any number that tells the requests of the step apart.
        block_tables: [slots, blocks] int32 block ids of every state slot's request, -1 where it has none.
        has_blocks: False for a cache of SWA layers alone, whose tokens need no blocks.
    """

    def __init__(
        self,
        request_slots: Tensor,
        positions: Tensor,
        request_ids: Tensor,
        block_tables: Tensor,
        has_blocks: bool = True,
    ) -> None:
        for name, tensor in (("request_slots", request_slots), ("positions", positions), ("request_ids", request_ids)):
            if tensor.dim() != 1 or tensor.shape != request_slots.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; expected one value a token, [{request_slots.numel()}]"
                )
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} is {tensor.dtype}; expected torch.int32 or torch.int64")
            if tensor.device != block_tables.device:
                raise ValueError(f"{name} is on {tensor.device}; the cache is on {block_tables.device}")
        self.request_slots = request_slots
        self.positions = positions
        self.request_ids = request_ids
        self.block_tables = block_tables
        self.has_blocks = has_blocks

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Runs of equal request ids: the id [B] and the number [B] of each, and the run [T] of each token."""
        ids, owner, counts = torch.unique_consecutive(self.request_ids, return_inverse=True, return_counts=True)
        return ids, counts, owner

    @property
    def is_decode(self) -> bool:
        """One token a request: readers use the rings; otherwise they use the window workspace of `append`."""
        return len(self._runs[0]) == len(self.positions)

    @cached_property
    def counts(self) -> Tensor:
        """[B] int64 tokens of each request in the step. Where it is derived, the step is checked."""
        ids, counts, owner = self._runs
        first = counts.cumsum(0) - counts
        offset = torch.arange(len(owner), device=owner.device) - first[owner]
        at, slots = self.positions.long(), self.request_slots.long()
        if len(ids.unique()) < len(ids):
            raise ValueError("request_ids: a request's tokens are not next to each other")
        wrong = {
            "positions: a request's tokens are not consecutive": (at != at[first][owner] + offset).any(),
            "positions: a position is negative": (at < 0).any(),
            "request_slots: a request's tokens have several slots": (slots != slots[first][owner]).any(),
            f"request_slots: a slot is not in -1..{self.block_tables.shape[0] - 1}": (
                (slots < -1) | (slots >= self.block_tables.shape[0])
            ).any(),
        }
        for message, found in zip(wrong, torch.stack(list(wrong.values())).tolist()):
            if found:
                raise ValueError(message)
        return counts

    @property
    def owner(self) -> Tensor:
        """[T] int64 request of each token."""
        return self._runs[2]

    @property
    def workspace_rows(self) -> int:
        """Rows of the window workspace: every token's, and the 128 before each request's chunk."""
        return len(self.positions) + WINDOW * len(self.counts)

    @cached_property
    def first(self) -> Tensor:
        """[B] int64 index of each request's first token."""
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def query_start(self) -> Tensor:
        """[B + 1] int32 index of each request's first token, then T."""
        starts = torch.zeros(len(self.counts) + 1, dtype=torch.int32, device=self.counts.device)
        starts[1:] = self.counts.cumsum(0)
        return starts

    @cached_property
    def slots(self) -> Tensor:
        """[B] int32 state slot of each request."""
        return self.request_slots[self.first].int()

    @cached_property
    def prefix_lens(self) -> Tensor:
        """[B] int32 tokens of each request before the step."""
        return self.positions[self.first].int()

    @cached_property
    def token_request(self) -> Tensor:
        """[T] int32 request of each token."""
        return self.owner.int()

    @cached_property
    def block_table(self) -> Tensor:
        """[B, blocks] int32 block ids of each request; a padding request has some slot's, which nobody reads."""
        return self.block_tables[self.slots.long().clamp_min(0)]

    @cached_property
    def out_loc(self) -> Tensor:
        """[T] int64 pool slot of each token: block id * 128 + position mod 128. A token without a block is refused."""
        at = self.positions.long()
        if not self.has_blocks:
            return at
        index, width = at // BLOCK_SIZE_ORIGINAL_TOKENS, self.block_tables.shape[1]
        block = self.block_table[self.owner, index.clamp_max(width - 1)].long()
        missing = (self.request_slots >= 0) & ((block == NO_BLOCK) | (index >= width))
        if missing.any():
            slot, position = int(self.request_slots[missing][0]), int(at[missing][0])
            raise ValueError(
                f"position {position} of state slot {slot} has no block: allocate_block({slot}) once for every "
                f"{BLOCK_SIZE_ORIGINAL_TOKENS} tokens before they are written"
            )
        return block * BLOCK_SIZE_ORIGINAL_TOKENS + at % BLOCK_SIZE_ORIGINAL_TOKENS

    @cached_property
    def window_lens(self) -> Tensor:
        """[T] int32 tokens that each token sees through the window: min(t + 1, 128), 0 for padding (SPEC 4.4)."""
        return self.visible_entries(1).clamp_max(WINDOW)

    @cached_property
    def window_rows(self) -> Tensor:
        """[T, 128] int32 rows of the window: the first `window_lens` of each line are the visible ones.

        In a decode step rows of the ring, whose first min(t + 1, 128) rows are just the visible positions. Otherwise
        rows of the workspace: position p of request b is in row query_start[b] + 128 (b + 1) + p - prefix_lens[b].
        """
        if self.is_decode:
            begin = self.request_slots.long().clamp_min(0) * WINDOW
        else:
            oldest = (self.positions.long() - (WINDOW - 1)).clamp_min(0)
            begin = (self.first - self.prefix_lens.long())[self.owner] + WINDOW * (self.owner + 1) + oldest
        return (begin[:, None] + torch.arange(WINDOW, device=begin.device)).int()

    def visible_entries(self, ratio: int) -> Tensor:
        """[T] int32 entries visible to each token: floor((t + 1) / ratio), 0 for padding (SPEC 4.3)."""
        return ((self.positions + 1) // ratio).masked_fill(self.request_slots < 0, 0).int()
