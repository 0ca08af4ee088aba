"""What one step says to every layer: who owns which token, where it is written, which rows it reads.

`StepMetadata` is what layers take, from a server's step (`attention.metadata`) as from one of the library (`Step`); the
formulas are here, once. Letters: B requests, T tokens of the step, NB blocks of the longest context considered, R rows
of a window ring. A request of length L before the step has L tokens in the cache; SPEC 4.3 and 4.4 say what is visible
to position t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, WINDOW, state_rows

NO_BLOCK = -1
"""What a block table holds where a request has no block."""


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
        track_slots: [T] int32 state slot of the checkpoint that holds this token's row, -1: none; None: none is due.
        block_table: [B, NB] int32 block ids of each request; anything behind its last block.
        window_rows: [T, W] int32 rows of the window table, oldest position first: in decode rows of the ring, in
            prefill rows of the step's window workspace. W is 128, more in a step whose tokens all see each other.
        window_lens: [T] int32 how many of them are visible.
        csa_lens: [T] int32 entries that a CSA layer reads, at most its top k; all visible ones where none is given.
        hca_rows: [T, NB] int32 rows of the HCA table; entry i of a request lies in the row of its block i.
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
    window_rows: Tensor
    window_lens: Tensor
    csa_lens: Tensor
    hca_rows: Tensor
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
        own = ("token_request", "positions", "window_rows", "window_lens", "csa_lens", "hca_rows", "hca_lens")
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

        `decode_ring_rows`: R of a decode step, as many tokens of each request, whose readers use the rings. None: a
        prefill step, whose readers use a workspace with the rows of all tokens and, before each chunk, of 128 older
        positions: position p of request b is in row query_start[b] + 128 (b + 1) + p - prefix_lens[b].
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
            window_rows=rows,
            window_lens=window_lens(lengths),
            csa_lens=visible_entries(lengths, CSA_RATIO, top_k),
            hca_rows=block_table[owner],
            hca_lens=visible_entries(lengths, HCA_RATIO),
            window_size=window_size,
        )


class Step:
    """The tokens of one forward: T tokens of B requests, a request's tokens next to each other and in order.

    Making one only keeps the tensors given. What layers take, `metadata`, is derived when first asked for and then
    kept, so layers that share a step share that work. The derivation waits for the device, to learn how many tokens
    each request has and to refuse (ValueError) a step that would write where it must not.

    Attributes:
        request_slots: [T] int32 state slot of each token's request, -1 for a token that only pads.
        positions: [T] int32 or int64 position of each token in its request.
        request_ids: [T] int, any number that tells the requests of the step apart.
        block_tables: [slots, blocks] int32 block ids of every state slot's request, -1 where it has none.
        draft_tokens: tokens of a request that a decode step may write and the next one take back (`state_rows`): that
            one then simply begins at an earlier position.
        ring_rows: rows of a slot's window ring, by default those that V4 has for so many draft tokens.
        has_blocks: False for a cache of SWA layers alone, whose tokens need no blocks.
    """

    def __init__(
        self,
        request_slots: Tensor,
        positions: Tensor,
        request_ids: Tensor,
        block_tables: Tensor,
        draft_tokens: int = 0,
        has_blocks: bool = True,
        ring_rows: int | None = None,
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
        self.draft_tokens = draft_tokens
        self.has_blocks = has_blocks
        self.ring_rows = state_rows(draft_tokens).ring if ring_rows is None else ring_rows

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Runs of equal request ids: the id [B] and the number [B] of each, and the run [T] of each token."""
        ids, owner, counts = torch.unique_consecutive(self.request_ids, return_inverse=True, return_counts=True)
        return ids, counts, owner

    @property
    def is_decode(self) -> bool:
        """One token a request, or as many of each as a cache for drafts takes: readers use the rings; otherwise they
        use the window workspace of `append`."""
        return self._is_decode

    @cached_property
    def _is_decode(self) -> bool:
        ids, counts, _ = self._runs
        each, rest = divmod(len(self.positions), max(len(ids), 1))
        if rest or each > max(self.draft_tokens, 1):
            return False
        return each <= 1 or bool((counts == each).all())

    @cached_property
    def metadata(self) -> StepMetadata:
        """What layers take. Its `out_loc` is negative where a position has no block; the one below refuses that."""
        _, counts, owner = self._runs
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
        starts[1:] = counts.cumsum(0)
        first = starts[:-1].long()
        self._check(first)
        slots, at = self.request_slots[first].int(), self.positions.long()
        # A padding request has some slot's blocks, which nobody reads.
        block_table = self.block_tables[slots.long().clamp_min(0)]
        return StepMetadata.build(
            slots=slots,
            prefix_lens=self.positions[first].int(),
            query_start=starts,
            token_request=owner.int(),
            positions=at,
            out_loc=self._out_loc(block_table[owner], at) if self.has_blocks else at,
            block_table=block_table,
            decode_ring_rows=self.ring_rows if self.is_decode else None,
        )

    def _check(self, first: Tensor) -> None:
        """Refuse a step whose tokens do not belong together; `first` [B]: each request's first token."""
        ids, _, owner = self._runs
        offset = torch.arange(len(owner), device=owner.device) - first[owner]
        at, slots = self.positions.long(), self.request_slots.long()
        if len(ids.unique()) < len(ids):
            raise ValueError("request_ids: a request's tokens are not next to each other")
        taken, order = slots[first].sort(stable=True)
        shared = (taken[1:] == taken[:-1]) & (taken[1:] >= 0)
        wrong = {
            "positions: a request's tokens are not consecutive": (at != at[first][owner] + offset).any(),
            "positions: a position is negative": (at < 0).any(),
            "request_slots: a request's tokens have several slots": (slots != slots[first][owner]).any(),
            f"request_slots: a slot is not in -1..{self.block_tables.shape[0] - 1}": (
                (slots < -1) | (slots >= self.block_tables.shape[0])
            ).any(),
        }
        *found, is_shared = torch.stack([*wrong.values(), shared.any()]).tolist()
        for message, is_wrong in zip(wrong, found):
            if is_wrong:
                raise ValueError(message)
        if is_shared:
            at_slot = int(shared.nonzero()[0])
            one, other = ids[order[at_slot : at_slot + 2]].tolist()
            raise ValueError(
                f"request_slots: requests {one} and {other} are both in state slot {int(taken[at_slot])}; "
                "a slot belongs to one request"
            )

    @staticmethod
    def _out_loc(blocks: Tensor, at: Tensor) -> Tensor:
        """[T] int64: block id * 128 + position mod 128; negative where `blocks` [T, blocks] has no block for it."""
        index = at // BLOCK_TOKENS
        block = blocks.gather(1, index.clamp_max(blocks.shape[1] - 1)[:, None]).squeeze(1).long()
        block = block.masked_fill(index >= blocks.shape[1], NO_BLOCK)
        return block * BLOCK_TOKENS + at % BLOCK_TOKENS

    @cached_property
    def out_loc(self) -> Tensor:
        """The `out_loc` of `metadata`. Refuses (ValueError) a step with a token that has no block to be written to."""
        out_loc = self.metadata.out_loc
        missing = (self.request_slots >= 0) & (out_loc < 0)
        if missing.any():
            slot, position = int(self.request_slots[missing][0]), int(self.positions[missing][0])
            raise ValueError(
                f"position {position} of state slot {slot} has no block: allocate_block({slot}) once for every "
                f"{BLOCK_TOKENS} tokens before they are written"
            )
        return out_loc
