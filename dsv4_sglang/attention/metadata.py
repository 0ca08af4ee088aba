"""The `StepMetadata` of a server's step, from SGLang's tables of all requests.

Built once a step. A decode step is built by device work alone, into buffers of a fixed address where it is given some,
so that it can be recorded into a CUDA graph; a prefill step knows its sizes on the host. Letters as in `cache.step`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.cache.step import StepMetadata, prefill_window_size, ring_window, visible_entries, window_lens
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO, WINDOW
from dsv4_sglang.ops.schemas import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)

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


def gather_decode(
    buffers: DecodeBuffers,
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    state_slot_of_request: Tensor,
) -> None:
    """Copy what a decode step needs of SGLang's tables of all requests: state slots and block ids.

    The scheduler changes these tables for the next step as soon as a CUDA graph has been launched, so a graph must not
    read them: this runs before it. `seq_lens` [B] counts the tokens of the step; block ids behind them are left as they
    are.
    """
    _OPS.gather_tables(
        req_pool_indices, seq_lens, state_slot_of_request, req_to_token, buffers.owned, buffers.block_table
    )


def _fill_decode(
    buffers: DecodeBuffers,
    seq_lens: Tensor,
    before: int,
    track_mask: Tensor | None,
    track_slots: Tensor | None,
    top_k: int,
) -> None:
    """The values of `build_decode`, by PyTorch."""
    n, each = seq_lens.shape[0], buffers.each
    t = n * each
    owned = buffers.owned[:n]
    real = owned > 0
    prefix = (seq_lens.to(torch.int32) + before).masked_fill(~real, 0)
    buffers.slots[:n].copy_(owned.masked_fill(~real, -1))
    buffers.prefix_lens[:n].copy_(prefix)
    owner = buffers.token_request[:t].long()
    positions = prefix[owner] + torch.arange(t, dtype=torch.int32, device=prefix.device) % each
    buffers.positions[:t].copy_(positions)
    length = (positions + 1).masked_fill(~real[owner], 0)
    seen = (prefix + each).masked_fill(~real, 0)[owner] if buffers.sees_block else length
    buffers.window_lens[:t].copy_(window_lens(seen, buffers.reach))
    buffers.csa_lens[:t].copy_(visible_entries(length, CSA_RATIO, top_k))
    buffers.hca_lens[:t].copy_(visible_entries(length, HCA_RATIO))
    rows = ring_window(owned[owner], seen, buffers.ring_rows, buffers.reach)
    buffers.window_indices[:t, : buffers.reach].copy_(rows)
    if each > 1:
        visible = torch.arange(buffers.block_table.shape[1], device=length.device) < buffers.hca_lens[:t, None]
        buffers.hca_indices[:t].copy_(torch.where(visible, buffers.block_table[owner], buffers.hca_indices[:t]))
    if track_mask is not None and track_slots is not None:
        due = track_mask & real
        buffers.copy_src[:n].copy_(owned.masked_fill(~due, -1))
        buffers.copy_dst[:n].copy_(track_slots.masked_fill(~due, -1))


def build_decode(
    buffers: DecodeBuffers,
    *,
    seq_lens: Tensor,
    out_loc: Tensor,
    track_mask: Tensor | None,
    track_slots: Tensor | None,
    top_k: int,
    before: int = -1,
) -> StepMetadata:
    """`buffers.each` tokens a request, after `gather_decode`. Device work only: no size depends on a value, nothing
    is read back.

    `seq_lens` [B] and `before`: a request has seq_lens + before tokens in the cache before the step; -1 where
    `seq_lens` counts the new token. Rows that pad a CUDA graph carry request 0, whose state slot is 0: SGLang's dummy
    of both pools, which no request owns. Their slot becomes -1 and their lengths 0. `track_mask` [B] bool and
    `track_slots` [B] say which requests end a snapshot interval with this token and where its state goes.
    """
    if seq_lens.is_cuda:
        from dsv4_sglang.attention import triton_metadata

        triton_metadata.build(buffers, seq_lens, before, track_mask, track_slots, top_k)
    else:
        _fill_decode(buffers, seq_lens, before, track_mask, track_slots, top_k)
    tracks = track_mask is not None and track_slots is not None
    return step_of(buffers, seq_lens.shape[0], out_loc, tracks)


def step_of(buffers: DecodeBuffers, n: int, out_loc: Tensor, tracks: bool = False) -> StepMetadata:
    """What `build_decode` has written for the first `n` requests, which a CUDA graph's replay may have done."""
    t = n * buffers.each
    return StepMetadata(
        slots=buffers.slots[:n],
        prefix_lens=buffers.prefix_lens[:n],
        query_start=buffers.query_start[: n + 1],
        token_request=buffers.token_request[:t],
        positions=buffers.positions[:t],
        out_loc=out_loc,
        track_slots=None,
        block_table=buffers.block_table[:n],
        window_indices=buffers.window_indices[:t],
        window_lens=buffers.window_lens[:t],
        csa_lens=buffers.csa_lens[:t],
        hca_indices=buffers.hca_indices[:t],
        hca_lens=buffers.hca_lens[:t],
        copy_src=buffers.copy_src[:n] if tracks else None,
        copy_dst=buffers.copy_dst[:n] if tracks else None,
    )


class PrefillBuffers:
    """Tensors at fixed addresses of a prefill step that a CUDA graph records: up to `tokens` tokens of `requests`.

    A recorded step has one more request, the last: the padding request, which has no state slot and owns the tokens
    behind those of the batch. The kernels of the graph read the inputs (`owned` to `track_lens`); `build_recorded`
    derives everything else from them inside the graph. Shapes do not depend on the batch.

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
        """Write the inputs of one batch, before its graph is replayed; arguments as those of `build_prefill`.

        `snapshots` [B * K] int32: the snapshot slot that each of `track_slots` moves to at the end of the step, below 1
        where none is due; None without snapshots. The staging slots in use are the first ones, in this order.
        The scheduler changes its tables for the next batch as soon as a graph is launched, so the graph reads copies.
        """
        n = req_pool_indices.shape[0]
        self.inputs.zero_()
        self.prefix_lens[:n].copy_(prefix_lens)
        self.chunk_lens[:n].copy_(chunk_lens)
        _OPS.gather_tables(
            req_pool_indices,
            prefix_lens + chunk_lens,
            state_slot_of_request,
            req_to_token,
            self.owned[:n],
            self.block_table[:n],
        )
        self.track_slots.fill_(-1)
        self.snapshots.zero_()
        if track_slots is not None and track_lens is not None and snapshots is not None:
            self.track_slots[:n, : track_slots.shape[1]].copy_(track_slots)
            self.track_lens[:n, : track_lens.shape[1]].copy_(track_lens)
            # One more place takes what is not due.
            place = torch.where(track_slots >= 0, track_slots - self.staging_slots[0], len(self.snapshots))
            self.snapshots.copy_(pad(self.snapshots, (0, 1)).scatter_(0, place.flatten().long(), snapshots)[:-1])


def _derive(buffers: PrefillBuffers, tokens: int, out_loc: Tensor, top_k: int) -> None:
    """The values of `build_recorded`, by PyTorch."""
    chunk_lens = buffers.chunk_lens.clone()
    chunk_lens[-1] = tokens - chunk_lens[:-1].sum()
    query_start = _starts(chunk_lens)
    owner = _owners(chunk_lens, tokens)
    positions = buffers.prefix_lens[owner] + torch.arange(tokens, device=owner.device) - query_start[owner]
    step = StepMetadata.build(
        slots=buffers.owned.masked_fill(buffers.owned == 0, -1),
        prefix_lens=buffers.prefix_lens,
        query_start=query_start,
        token_request=owner,
        positions=positions.long(),
        out_loc=out_loc,
        block_table=buffers.block_table,
        top_k=top_k,
    )
    for name in ("slots", "query_start"):
        getattr(buffers, name).copy_(getattr(step, name))
    for name in ("token_request", "positions", "window_indices", "window_lens", "csa_lens", "hca_indices", "hca_lens"):
        getattr(buffers, name)[:tokens].copy_(getattr(step, name))
    buffers.token_track[:tokens].copy_(_token_tracks(buffers.track_slots, buffers.track_lens, owner, positions))


def build_recorded(buffers: PrefillBuffers, tokens: int, out_loc: Tensor, top_k: int) -> StepMetadata:
    """The metadata of a step of `tokens` tokens from the inputs in `buffers`. Device work only, which a CUDA graph
    records.

    `out_loc` [tokens] int64: pool slot of each token.
    """
    if out_loc.is_cuda:
        from dsv4_sglang.attention import triton_metadata

        triton_metadata.build_prefill(buffers, tokens, top_k)
    else:
        _derive(buffers, tokens, out_loc, top_k)
    return recorded_step(buffers, tokens, out_loc)


def recorded_step(buffers: PrefillBuffers, tokens: int, out_loc: Tensor) -> StepMetadata:
    """What `build_recorded` has written for `tokens` tokens, which a CUDA graph's replay may have done."""
    rows = buffers.requests + 1
    return StepMetadata(
        slots=buffers.slots,
        prefix_lens=buffers.prefix_lens,
        query_start=buffers.query_start,
        token_request=buffers.token_request[:tokens],
        positions=buffers.positions[:tokens],
        out_loc=out_loc,
        track_slots=buffers.token_track[:tokens],
        block_table=buffers.block_table,
        window_indices=buffers.window_indices[:tokens],
        window_lens=buffers.window_lens[:tokens],
        csa_lens=buffers.csa_lens[:tokens],
        hca_indices=buffers.hca_indices[:tokens],
        hca_lens=buffers.hca_lens[:tokens],
        window_size=prefill_window_size(tokens, rows),
    )


def _starts(chunk_lens: Tensor) -> Tensor:
    """[B + 1] int32 first token of each request in a step of chunks `chunk_lens` [B] int32."""
    return pad(chunk_lens.cumsum(0, dtype=torch.int32), (1, 0))


def _owners(chunk_lens: Tensor, tokens: int) -> Tensor:
    """[tokens] int32 request of each token; `tokens` is the sum of `chunk_lens` [B] int32, known to the host."""
    requests = torch.arange(chunk_lens.shape[0], dtype=torch.int32, device=chunk_lens.device)
    return torch.repeat_interleave(requests, chunk_lens, output_size=tokens)


def _token_tracks(track_slots: Tensor, track_lens: Tensor, owner: Tensor, positions: Tensor) -> Tensor:
    """[T] int32 state slot of the snapshot that holds each token's window entry, -1: none.

    A snapshot of length L, a multiple of 128, holds the positions [L - 128, L). `track_slots` (-1: none) and
    `track_lens` [B, K], `owner` and `positions` [T].
    """
    holds = track_lens[owner.long()] // BLOCK == (positions // BLOCK + 1)[:, None]
    return torch.where(holds, track_slots[owner.long()], -1).amax(1).to(torch.int32)


def build_prefill(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    chunk_lens: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    req_to_token: Tensor,
    state_slot_of_request: Tensor,
    track_slots: Tensor | None,
    track_lens: Tensor | None,
    top_k: int,
    max_length: int,
    padding: int = 0,
) -> StepMetadata:
    """Chunks of any lengths from any starts. Sizes come from the host (`positions`, `max_length`, `padding`): no
    synchronisation.

    `prefix_lens`, `chunk_lens` [B]; `max_length` the longest request after the step. `track_slots` [B, K] (-1: none)
    and `track_lens` [B, K]: a snapshot holds the request's state at length `track_lens`, a multiple of 128, so it
    takes the rows of positions [track_lens - 128, track_lens), which must all be in this chunk.

    `padding`: tokens of `positions` behind those of the chunks, which only fill the step up. They are those of one
    more request, SGLang's request 0: it has no state slot, so its tokens write nothing and see nothing.
    """
    if padding:
        req_pool_indices, prefix_lens = pad(req_pool_indices, (0, 1)), pad(prefix_lens, (0, 1))
        chunk_lens = pad(chunk_lens, (0, 1), value=padding)
        if track_slots is not None and track_lens is not None:
            track_slots, track_lens = pad(track_slots, (0, 0, 0, 1), value=-1), pad(track_lens, (0, 0, 0, 1))
    tokens, requests = positions.shape[0], req_pool_indices.shape[0]
    chunk_lens, prefix_lens = chunk_lens.to(torch.int32), prefix_lens.to(torch.int32)
    token_request = _owners(chunk_lens, tokens)
    width = align(-(-max_length // BLOCK))
    first_slots = req_to_token[:, : width * BLOCK : BLOCK]
    block_table = torch.zeros((requests, width), dtype=torch.int32, device=positions.device)
    block_table[:, : first_slots.shape[1]] = first_slots[req_pool_indices] // BLOCK
    token_track = None
    if track_slots is not None and track_lens is not None:
        token_track = _token_tracks(track_slots, track_lens, token_request, positions)
    owned = state_slot_of_request[req_pool_indices].to(torch.int32)
    return StepMetadata.build(
        slots=owned.masked_fill(owned == 0, -1),
        prefix_lens=prefix_lens,
        query_start=_starts(chunk_lens),
        token_request=token_request,
        positions=positions,
        out_loc=out_loc,
        block_table=block_table,
        track_slots=token_track,
        top_k=top_k,
    )
