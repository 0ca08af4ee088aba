"""`Step`: who owns which token of a step, where it is written, and which rows it reads. The same for all layers."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS

WINDOW = 128


class Step:
    """The tokens of one forward: T tokens of B requests, a request's tokens next to each other in ascending order.

    Making one only keeps the tensors given. What the ops need besides is derived when first asked for and then kept, so
    layers that share a step share that work; deriving reads the token counts on the host once.

    Attributes:
        request_slots: [T] int32 state slot of each token's request, -1 for a token that only pads.
        positions: [T] int32 or int64 position of each token in its request.
        request_ids: [T] int: the number of each token's request within the step, 0, 1, ... without gaps.
        block_tables: [slots, blocks] int32 block ids of every state slot's request.
    """

    def __init__(self, request_slots: Tensor, positions: Tensor, request_ids: Tensor, block_tables: Tensor) -> None:
        for name, tensor in (("request_slots", request_slots), ("positions", positions), ("request_ids", request_ids)):
            if tensor.dim() != 1 or tensor.shape != request_slots.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; expected one value a token, [{request_slots.shape[0]}]"
                )
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} is {tensor.dtype}; expected torch.int32 or torch.int64")
            if tensor.device != block_tables.device:
                raise ValueError(f"{name} is on {tensor.device}; the cache is on {block_tables.device}")
        self.request_slots = request_slots
        self.positions = positions
        self.request_ids = request_ids
        self.block_tables = block_tables

    @cached_property
    def counts(self) -> Tensor:
        """[B] int64 tokens of each request in the step."""
        return torch.bincount(self.request_ids)

    @cached_property
    def is_decode(self) -> bool:
        """One token a request: readers use the rings; otherwise they use the window workspace of `append`."""
        return self.counts.shape[0] == self.positions.shape[0]

    @cached_property
    def query_start(self) -> Tensor:
        """[B + 1] int32 first token of each request."""
        starts = torch.zeros(self.counts.shape[0] + 1, dtype=torch.int32, device=self.positions.device)
        torch.cumsum(self.counts, 0, dtype=torch.int32, out=starts[1:])
        return starts

    @cached_property
    def first(self) -> Tensor:
        """[B] int64 index of each request's first token."""
        return self.query_start[:-1].long()

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
        return self.request_ids.int()

    @cached_property
    def block_table(self) -> Tensor:
        """[B, blocks] int32 block ids of each request; a padding request has some request's, which nobody reads."""
        return self.block_tables[self.slots.long().clamp_min(0)]

    @cached_property
    def out_loc(self) -> Tensor:
        """[T] int64 pool slot of each token: block id * 128 + position mod 128."""
        at = self.positions.long()
        block = self.block_table[self.request_ids.long(), at // BLOCK_SIZE_ORIGINAL_TOKENS].long()
        return block * BLOCK_SIZE_ORIGINAL_TOKENS + at % BLOCK_SIZE_ORIGINAL_TOKENS

    @cached_property
    def window_lens(self) -> Tensor:
        """[T] int32 tokens that each token sees through the window: min(t + 1, 128), 0 for padding (SPEC 4.4)."""
        seen = (self.positions + 1).clamp_max(WINDOW).int()
        return torch.where(self.request_slots >= 0, seen, torch.zeros_like(seen))

    @cached_property
    def window_rows(self) -> Tensor:
        """[T, 128] int32 rows that each token sees, of the ring in a decode step and of the workspace otherwise."""
        column = torch.arange(WINDOW, dtype=torch.int64, device=self.positions.device)
        if self.is_decode:
            # The first min(t + 1, 128) rows of the ring are exactly the visible ones, in ring order.
            first = self.request_slots.long().clamp_min(0) * WINDOW
        else:
            owner = self.request_ids.long()
            oldest = (self.positions.long() - (WINDOW - 1)).clamp_min(0)
            first = workspace_start(self.first, owner) + oldest - self.prefix_lens.long()[owner]
        return (first[:, None] + column).int()

    def workspace_rows(self) -> int:
        """Rows of the window workspace: every token's, and the 128 before each request's chunk."""
        return self.positions.shape[0] + WINDOW * self.counts.shape[0]

    def visible_entries(self, ratio: int) -> Tensor:
        """[T] int32 entries visible to each token: floor((t + 1) / ratio), 0 for padding (SPEC 4.3)."""
        seen = ((self.positions + 1) // ratio).int()
        return torch.where(self.request_slots >= 0, seen, torch.zeros_like(seen))


def workspace_start(first: Tensor, owner: Tensor) -> Tensor:
    """Row of the window workspace that holds position `prefix_lens[b]` of request b = `owner`: its first new token's."""
    return first[owner] + WINDOW * (owner + 1)
