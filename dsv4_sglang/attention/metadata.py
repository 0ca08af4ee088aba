"""The `StepMetadata` of a server's step, from SGLang's tables of all requests.

Built once a step. A decode step is built by device work alone, into buffers of a fixed address where it is given some,
so that it can be recorded into a CUDA graph; a prefill step knows its sizes on the host. Letters as in `cache.step`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.attention.step_buffers import DecodeBuffers, PrefillBuffers, align, gather_tables
from dsv4_sglang.cache.step import StepMetadata, prefill_window_size, ring_window, visible_entries, window_lens
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO


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
    gather_tables(req_pool_indices, seq_lens, state_slot_of_request, req_to_token, buffers.owned, buffers.block_table)


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
    window = ring_window(owned[owner], seen, buffers.ring_rows, buffers.reach)
    buffers.window_indices[:t, : buffers.reach].copy_(window)
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


def build_recorded(buffers: PrefillBuffers, tokens: int, out_loc: Tensor, top_k: int) -> None:
    """Derive the metadata of a step of `tokens` tokens from the inputs in `buffers`. `recorded_step` returns it.

    This is device work only, which a CUDA graph records.

    `out_loc` [tokens] int64: pool slot of each token.
    """
    if out_loc.is_cuda:
        from dsv4_sglang.attention import triton_metadata

        triton_metadata.build_prefill(buffers, tokens, top_k)
    else:
        _derive(buffers, tokens, out_loc, top_k)


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
