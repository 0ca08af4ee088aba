"""What one step says to every layer: who owns which token, where it is written, which rows it reads.

`StepMetadata` is what layers take, from a server's step (`attention.metadata`) as from one of a cache without a server
(`standalone.step`); the formulas are here, once. Letters: B requests, T tokens of the step, NB blocks of the longest
context considered, R rows of a window ring. A request of length L before the step has L tokens in the cache; SPEC 4.3
and 4.4 say what is visible to position t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO, WINDOW


def window_lens(lengths: Tensor, reach: int = WINDOW) -> Tensor:
    """Tokens that a token sees through a window of `reach` tokens; `lengths` int32 counts them from the request's first
    on: t + 1, 0 for padding."""
    return lengths.clamp_max(reach)


def window_positions(lengths: Tensor, reach: int = WINDOW) -> Tensor:
    """[T, reach] the positions in the window of each token, oldest first; those behind `window_lens` are not
    visible."""
    oldest = (lengths - reach).clamp_min(0)
    return oldest[:, None] + torch.arange(reach, dtype=lengths.dtype, device=lengths.device)


def ring_window(slots: Tensor, lengths: Tensor, ring_rows: int, reach: int = WINDOW) -> Tensor:
    """[T, reach] int32 rows of the rings where the window of each token lies: position p of slot s in row
    s R + p mod R."""
    return slots[:, None] * ring_rows + window_positions(lengths, reach) % ring_rows


def prefill_window_size(tokens: int, requests: int) -> int:
    """Rows of the window workspace of a prefill step: its tokens, and the 128 positions before each request's chunk."""
    return tokens + WINDOW * requests


def visible_entries(lengths: Tensor, ratio: int, top_k: int | None = None) -> Tensor:
    """[T] int32 entries of a compressor that each token sees, floor((t + 1) / ratio), at most `top_k` of them."""
    seen = lengths // ratio
    return seen if top_k is None else seen.clamp_max(top_k)


@dataclass
class StepMetadata:
    """Device tensors of one step.

    Attributes:
        slots: [B] int32 state slot of each request, -1 for one that only pads.
        prefix_lens: [B] int32 tokens of the request before the step.
        query_start: [B + 1] int32 first token of each request in the step.
        token_request: [T] int32 request of each token.
        positions: [T] int64 position of each token in its request.
        out_loc: [T] int64 pool slot of each token; congruent to its position modulo 128.
        track_slots: [T] int32 state slot of the snapshot that holds this token's row, -1: none; None: none is due.
        block_table: [B, NB] int32 block ids of each request; anything behind its last block.
        window_indices: [T, W] int32 rows of the window table, oldest position first: in decode rows of the ring, in
            prefill rows of the step's window workspace. W is 128, more in a step whose tokens all see each other.
        window_lens: [T] int32 how many of them are visible.
        csa_lens: [T] int32 entries that a CSA layer reads, at most its top k; all visible ones where none is given.
        hca_indices: [T, NB] int32 rows of the HCA table; entry i of a request lies in the row of its block i.
        hca_lens: [T] int32 how many of them are visible.
        copy_src, copy_dst: [B] int32, decode only: state slots to copy after the last layer has written, -1 to skip.
        window_size: rows of the window workspace of a prefill step, 0 in a decode step.
    """

    slots: Tensor
    prefix_lens: Tensor
    query_start: Tensor
    token_request: Tensor
    positions: Tensor
    out_loc: Tensor
    track_slots: Tensor | None
    block_table: Tensor
    window_indices: Tensor
    window_lens: Tensor
    csa_lens: Tensor
    hca_indices: Tensor
    hca_lens: Tensor
    copy_src: Tensor | None = None
    copy_dst: Tensor | None = None
    window_size: int = 0

    @property
    def is_decode(self) -> bool:
        return self.window_size == 0

    def first_tokens(self, tokens: Tensor) -> StepMetadata:
        """A prefill step for the first tokens of this one, whose pool slots are `tokens` [n] int64; requests stay."""
        n = tokens.shape[0]
        own = ("token_request", "positions", "window_indices", "window_lens", "csa_lens", "hca_indices", "hca_lens")
        parts = {name: getattr(self, name)[:n] for name in own}
        track_slots = None if self.track_slots is None else self.track_slots[:n]
        return replace(self, out_loc=tokens, track_slots=track_slots, **parts)

    def entry_lens(self, ratio: int, top_k: int | None = None) -> Tensor:
        """[T] int32 entries of any ratio that each token sees, none for padding, at most `top_k` of them."""
        lengths = (self.positions.int() + 1).masked_fill(self.slots[self.token_request.long()] < 0, 0)
        return visible_entries(lengths, ratio, top_k)

    @classmethod
    def build(
        cls,
        *,
        slots: Tensor,
        prefix_lens: Tensor,
        query_start: Tensor,
        token_request: Tensor,
        positions: Tensor,
        out_loc: Tensor,
        block_table: Tensor,
        track_slots: Tensor | None = None,
        top_k: int | None = None,
        decode_ring_rows: int | None = None,
    ) -> StepMetadata:
        """Derive what layers read from who owns what. Nothing is read back from the device.

        `decode_ring_rows`: R of a decode step, as many tokens of each request, whose attention kernels use the rings.
        None: a prefill step, whose attention kernels use a workspace with the rows of all tokens and, before each
        chunk, of 128 older positions: position p of request b is in row query_start[b] + 128 (b + 1) + p -
        prefix_lens[b].
        """
        owner = token_request.long()
        owned = slots[owner]
        lengths = (positions.int() + 1).masked_fill(owned < 0, 0)
        if decode_ring_rows is not None:
            rows, window_size = ring_window(owned.clamp_min(0), lengths, decode_ring_rows), 0
        else:
            requests = len(slots)
            ends = WINDOW * torch.arange(1, requests + 1, dtype=torch.int32, device=slots.device)
            base = query_start[:-1] + ends - prefix_lens
            rows = base[owner][:, None] + window_positions(lengths)
            window_size = prefill_window_size(len(positions), requests)
        return cls(
            slots=slots,
            prefix_lens=prefix_lens,
            query_start=query_start,
            token_request=token_request,
            positions=positions,
            out_loc=out_loc,
            track_slots=track_slots,
            block_table=block_table,
            window_indices=rows,
            window_lens=window_lens(lengths),
            csa_lens=visible_entries(lengths, CSA_RATIO, top_k),
            hca_indices=block_table[owner],
            hca_lens=visible_entries(lengths, HCA_RATIO),
            window_size=window_size,
        )
