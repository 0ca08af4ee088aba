"""Metadata of one step for all layers: requests and tokens, where they are written, and the entries that they attend
to.

Layers take a `StepMetadata` both from a server's step (`attention.metadata`) and from a cache without a server
(`standalone.step`); this module has the formulas for both. Letters in shapes: B requests, T tokens of the step, NB
blocks of the longest supported context, R entries of a window ring. A request of length L before the step has L tokens
in the cache. SPEC 4.3 and 4.4 define what position t attends to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO, WINDOW


def window_lens(lengths: Tensor, window_len: int = WINDOW) -> Tensor:
    """Return the number of tokens in the window of each token.

    `lengths` int32 is t + 1 for position t, 0 for padding tokens.
    """
    return lengths.clamp_max(window_len)


def window_positions(lengths: Tensor, window_len: int = WINDOW) -> Tensor:
    """Return [T, window_len], the positions in the window of each token, oldest first. Those after `window_lens` are
    invalid.
    """
    oldest = (lengths - window_len).clamp_min(0)
    return oldest[:, None] + torch.arange(window_len, dtype=lengths.dtype, device=lengths.device)


def ring_window(slots: Tensor, lengths: Tensor, ring_rows: int, window_len: int = WINDOW) -> Tensor:
    """Return the indices of the window entries of each token in the rings.

    Args:
        slots: int32 [T], state slot of each token.
        lengths: int32 [T], t + 1 for position t, 0 for padding tokens.
        ring_rows: entries of a ring, R.
        window_len: tokens of the window.

    Returns:
        int32 [T, window_len]. Position p of slot s has index s R + p mod R.
    """
    return slots[:, None] * ring_rows + window_positions(lengths, window_len) % ring_rows


def prefill_window_size(tokens: int, requests: int) -> int:
    """Return the entries of a prefill step's window workspace: its tokens, and 128 positions before each request's
    chunk.
    """
    return tokens + WINDOW * requests


def visible_entries(lengths: Tensor, ratio: int, limit: int | None = None) -> Tensor:
    """Return the number of compressed entries visible to each token, floor((t + 1) / ratio), at most `limit`.

    Args:
        lengths: int32 [T], t + 1 for position t, 0 for padding tokens.
        ratio: tokens per entry.
        limit: upper bound, None for none.
    """
    seen = lengths // ratio
    return seen if limit is None else seen.clamp_max(limit)


def v4_limits(top_k: int | None = None) -> dict[int, int | None]:
    """Return `layer_spec.entry_limits` of a V4 model with CSA and HCA layers."""
    return {CSA_RATIO: top_k, HCA_RATIO: None}


# Attributes of `StepMetadata` with an element or a row for each token, besides `out_loc`, `staging_slots` and
# `entry_lens`.
PER_TOKEN = ("token_request", "positions", "window_indices", "window_lens")


@dataclass
class StepMetadata:
    """Device tensors of one step.

    Attributes:
        slots: [B] int32, state slot of each request, -1 for padding requests.
        prefix_lens: [B] int32, tokens of the request before the step.
        query_start: [B + 1] int32, first token of each request in the step.
        token_request: [T] int32, request of each token.
        positions: [T] int64, position of each token in its request.
        out_loc: [T] int64, pool slot of each token, congruent to its position modulo 128.
        staging_slots: [T] int32, staging slot of the snapshot that holds this token's window entry, -1 for none; None
            if no snapshot is due.
        block_table: [B, NB] int32, block ids of each request. Undefined after its last block.
        window_indices: [T, W] int32, indices of window entries, oldest position first: in the rings in a decode step,
            in the step's window workspace in a prefill step. W is 128, or larger in a step whose tokens all attend to
            each other.
        window_lens: [T] int32, number of valid window indices.
        entry_lens: for each ratio of entries that layers of the model read, [T] int32, how many of them a token reads:
            all visible ones, or at most the top k.
        hca_indices: [T, NB] int32, indices of entries of ratio 128, in a CUDA graph. Entry i of a request has the index
            of its block i. None in other steps: the list of a token is row `token_request` of `block_table`, and a copy
            of it for each token would take 512 MiB for 16,384 tokens beside a request of a million.
        copy_src, copy_dst: [B] int32: state slots of decoding requests to copy after the last layer has written, and
            snapshot slots. A negative source or a target below 1 is skipped. None without copies.
        window_size: entries of the window workspace of a prefill step, 0 in a decode step.
    """

    slots: Tensor
    prefix_lens: Tensor
    query_start: Tensor
    token_request: Tensor
    positions: Tensor
    out_loc: Tensor
    staging_slots: Tensor | None
    block_table: Tensor
    window_indices: Tensor
    window_lens: Tensor
    entry_lens: dict[int, Tensor]
    hca_indices: Tensor | None = None
    copy_src: Tensor | None = None
    copy_dst: Tensor | None = None
    window_size: int = 0

    @property
    def is_decode(self) -> bool:
        return self.window_size == 0

    def first_tokens(self, tokens: Tensor) -> StepMetadata:
        """Return the metadata of the first n tokens of a prefill step, with the same requests.

        Args:
            tokens: int64 [n], pool slots of these tokens.
        """
        n = tokens.shape[0]
        parts = {name: getattr(self, name)[:n] for name in PER_TOKEN}
        for name in ("staging_slots", "hca_indices"):
            of_all = getattr(self, name)
            parts[name] = None if of_all is None else of_all[:n]
        lens = {ratio: of_all[:n] for ratio, of_all in self.entry_lens.items()}
        window_size = prefill_window_size(n, self.slots.shape[0])
        return replace(self, out_loc=tokens, window_size=window_size, entry_lens=lens, **parts)

    def hca_list(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the HCA entries of each token as in `EntryList`: indices, lengths, and the owner of each list."""
        if self.hca_indices is not None:
            return self.hca_indices, self.entry_lens[HCA_RATIO], None
        return self.block_table, self.entry_lens[HCA_RATIO], self.token_request

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
        limits: Mapping[int, int | None],
        staging_slots: Tensor | None = None,
        decode_ring_rows: int | None = None,
    ) -> StepMetadata:
        """Derive the index lists and lengths from requests and positions. Nothing is read back from the device.

        Arguments with the names of attributes are those attributes.

        Args:
            limits: most entries that a token reads, by their ratio (`layer_spec.entry_limits`).
            decode_ring_rows: R for a decode step with the same number of tokens in each request, which reads the window
                from the rings. None for a prefill step, which reads it from a workspace with the entries of all tokens
                and of 128 older positions before each chunk. There position p of request b has index query_start[b] +
                128 (b + 1) + p - prefix_lens[b].
        """
        owner = token_request.long()
        state_slots = slots[owner]
        lengths = (positions.int() + 1).masked_fill(state_slots < 0, 0)
        if decode_ring_rows is not None:
            window, window_size = ring_window(state_slots.clamp_min(0), lengths, decode_ring_rows), 0
        else:
            requests = len(slots)
            ends = WINDOW * torch.arange(1, requests + 1, dtype=torch.int32, device=slots.device)
            base = query_start[:-1] + ends - prefix_lens
            window = base[owner][:, None] + window_positions(lengths)
            window_size = prefill_window_size(len(positions), requests)
        return cls(
            slots=slots,
            prefix_lens=prefix_lens,
            query_start=query_start,
            token_request=token_request,
            positions=positions,
            out_loc=out_loc,
            staging_slots=staging_slots,
            block_table=block_table,
            window_indices=window,
            window_lens=window_lens(lengths),
            entry_lens={ratio: visible_entries(lengths, ratio, limit) for ratio, limit in limits.items()},
            window_size=window_size,
        )
