"""Tensors at fixed addresses from which CUDA graphs read the metadata of a step. Letters as in `cache.step`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.ops.schemas import NAMESPACE

gather_tables = getattr(torch.ops, NAMESPACE).gather_tables

# Row lists have widths that are multiples of this, as attention kernels on a GPU want them.
LIST_ALIGNMENT = 64


def align(width: int) -> int:
    """The next width that a row list may have."""
    return -(-width // LIST_ALIGNMENT) * LIST_ALIGNMENT


class DecodeBuffers:
    """Tensors of a decode step at fixed addresses: `each` tokens of up to `max_requests` requests, with rings of
    `ring_rows` rows. Speculation verifies several tokens a request in a step (docs/guides/speculation.md).

    `max_blocks` 0: for layers without entries, which read no block table. `sees_block`: the tokens of a request see the
    128 before the step and all of the step, as those of a block that is drafted at once (DSPARK); else each sees the
    128 that end with it.
    """

    def __init__(
        self,
        max_requests: int,
        max_blocks: int,
        device: torch.device | str,
        ring_rows: int = WINDOW,
        each: int = 1,
        sees_block: bool = False,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        tokens = max_requests * each
        self.ring_rows, self.each, self.sees_block = ring_rows, each, sees_block
        self.reach = WINDOW + each if sees_block else WINDOW
        self.owned = ints(max_requests)  # state slot of each request, 0 for padding
        self.slots, self.prefix_lens = ints(max_requests), ints(max_requests)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.window_indices, self.window_lens = ints(tokens, align(self.reach)), ints(tokens)
        self.csa_lens, self.hca_lens = ints(tokens), ints(tokens)
        self.block_table = ints(max_requests, align(max_blocks))
        # The HCA rows of a request's only token are its blocks.
        self.hca_indices = self.block_table if each == 1 else ints(tokens, align(max_blocks))
        self.copy_src, self.copy_dst = ints(max_requests), ints(max_requests)
        # As many tokens of each request: these never change.
        self.query_start = each * torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self.token_request = torch.arange(tokens, dtype=torch.int32, device=device) // each


class PrefillBuffers:
    """Tensors at fixed addresses of a prefill step that a CUDA graph records: up to `tokens` tokens of `requests`.

    A recorded step has one more request, the last: the padding request, which has no state slot and owns the tokens
    behind those of the batch. The kernels of the graph read the inputs (`owned` to `track_lens`).
    `metadata.build_recorded` derives everything else from them inside the graph. Shapes do not depend on the batch.

    Args:
        tokens: tokens of the largest recorded step.
        requests: most requests of a recorded step, R.
        max_blocks: blocks of the longest context; 0 for layers without entries.
        staging_slots: state slots that hold the snapshots of a step until its end.
        device: where the tensors are.
    """

    def __init__(
        self, tokens: int, requests: int, max_blocks: int, staging_slots: range, device: torch.device | str
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = requests + 1
        self.tokens, self.requests = tokens, requests
        # A request of n new tokens passes at most n / 128 + 1 multiples of 128.
        self.tracks = tokens // BLOCK + 1
        staging_slots = staging_slots[: tokens // BLOCK + requests]
        self.staging_slots = torch.tensor(staging_slots, dtype=torch.int32, device=device)
        # Inputs. `owned`: state slot of each request, 0 where there is none.
        self.inputs = ints(3, rows)
        self.owned, self.prefix_lens, self.chunk_lens = self.inputs
        self.block_table = ints(rows, align(max_blocks))
        self.track_slots, self.track_lens = ints(rows, self.tracks), ints(rows, self.tracks)
        self.snapshots = ints(len(staging_slots))
        # Derived in the graph.
        self.slots, self.query_start = ints(rows), ints(rows + 1)
        self.token_request, self.token_track = ints(tokens), ints(tokens)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.window_indices, self.window_lens = ints(tokens, WINDOW), ints(tokens)
        self.csa_lens, self.hca_lens = ints(tokens), ints(tokens)
        self.hca_indices = ints(tokens, align(max_blocks))

    def clear(self) -> None:
        """Make all tokens padding tokens, and no snapshot due."""
        self.inputs.zero_()
        self.track_slots.fill_(-1)
        self.snapshots.zero_()

    def fill(
        self,
        *,
        req_pool_indices: Tensor,
        prefix_lens: Tensor,
        chunk_lens: Tensor,
        req_to_token: Tensor,
        state_slot_of_request: Tensor,
        track_slots: Tensor | None,
        track_lens: Tensor | None,
        snapshots: Tensor | None,
    ) -> None:
        """Write the inputs of one batch, before its graph is replayed; arguments as those of `metadata.build_prefill`.

        `snapshots` [B * K] int32: the snapshot slot that each of `track_slots` moves to at the end of the step, below 1
        where none is due; None without snapshots. The staging slots in use are the first ones, in this order.
        The scheduler changes its tables for the next batch as soon as a graph is launched, so the graph reads copies.
        """
        n = req_pool_indices.shape[0]
        self.clear()
        self.prefix_lens[:n].copy_(prefix_lens)
        self.chunk_lens[:n].copy_(chunk_lens)
        gather_tables(
            req_pool_indices,
            prefix_lens + chunk_lens,
            state_slot_of_request,
            req_to_token,
            self.owned[:n],
            self.block_table[:n],
        )
        if track_slots is not None and track_lens is not None and snapshots is not None:
            self.track_slots[:n, : track_slots.shape[1]].copy_(track_slots)
            self.track_lens[:n, : track_lens.shape[1]].copy_(track_lens)
            # One more place takes what is not due.
            place = torch.where(track_slots >= 0, track_slots - self.staging_slots[0], len(self.snapshots))
            self.snapshots.copy_(pad(self.snapshots, (0, 1)).scatter_(0, place.flatten().long(), snapshots)[:-1])
