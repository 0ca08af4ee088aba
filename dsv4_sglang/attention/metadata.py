"""Build the `StepMetadata` of a server's step from SGLang's tables of all requests, once a step.

A decode step is built by device work alone, into buffers of fixed addresses if given, so it can be recorded into a CUDA
graph. The sizes of a prefill step are known on the host. Letters for shapes are those of `cache.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.attention.step_buffers import DecodeBuffers, PrefillBuffers, align, gather_tables
from dsv4_sglang.cache.step import (
    PER_TOKEN,
    StepMetadata,
    prefill_window_size,
    ring_window,
    visible_entries,
    window_lens,
)
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import HCA_RATIO


def gather_decode(
    buffers: DecodeBuffers,
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    state_slot_of_request: Tensor,
) -> None:
    """Copy the state slots and block ids of a decode step from SGLang's tables of all requests.

    Call this before launching a CUDA graph: the scheduler updates these tables for the next step as soon as the graph
    is launched, so the graph must not read them.

    Args:
        buffers: receives the copies.
        req_pool_indices: [B], requests of the step.
        seq_lens: [B], lengths including the tokens of the step. Block ids beyond them are not written.
        req_to_token: SGLang's table of pool slots by request.
        state_slot_of_request: state slots by request.
    """
    gather_tables(
        req_pool_indices, seq_lens, state_slot_of_request, req_to_token, buffers.state_slots, buffers.block_table
    )


def _fill_decode(
    buffers: DecodeBuffers,
    seq_lens: Tensor,
    length_offset: int,
    snapshot_mask: Tensor | None,
    snapshot_slots: Tensor | None,
) -> None:
    """Fill the buffers of `build_decode` with PyTorch ops."""
    n, per_request = seq_lens.shape[0], buffers.tokens_per_request
    t = n * per_request
    state_slots = buffers.state_slots[:n]
    real = state_slots > 0
    prefix = (seq_lens.to(torch.int32) + length_offset).masked_fill(~real, 0)
    buffers.slots[:n].copy_(state_slots.masked_fill(~real, -1))
    buffers.prefix_lens[:n].copy_(prefix)
    owner = buffers.token_request[:t].long()
    positions = prefix[owner] + torch.arange(t, dtype=torch.int32, device=prefix.device) % per_request
    buffers.positions[:t].copy_(positions)
    length = (positions + 1).masked_fill(~real[owner], 0)
    seen = (prefix + per_request).masked_fill(~real, 0)[owner] if buffers.sees_block else length
    buffers.window_lens[:t].copy_(window_lens(seen, buffers.window_len))
    for ratio, limit in buffers.limits.items():
        buffers.entry_lens[ratio][:t].copy_(visible_entries(length, ratio, limit))
    window = ring_window(state_slots[owner], seen, buffers.ring_rows, buffers.window_len)
    buffers.window_indices[:t, : buffers.window_len].copy_(window)
    if per_request > 1 and HCA_RATIO in buffers.limits:
        lens = buffers.entry_lens[HCA_RATIO][:t, None]
        visible = torch.arange(buffers.block_table.shape[1], device=length.device) < lens
        buffers.hca_indices[:t].copy_(torch.where(visible, buffers.block_table[owner], buffers.hca_indices[:t]))
    if snapshot_mask is not None and snapshot_slots is not None:
        due = snapshot_mask & real
        buffers.copy_src[:n].copy_(state_slots.masked_fill(~due, -1))
        buffers.copy_dst[:n].copy_(snapshot_slots.masked_fill(~due, -1))


def build_decode(
    buffers: DecodeBuffers,
    *,
    seq_lens: Tensor,
    out_loc: Tensor,
    snapshot_mask: Tensor | None,
    snapshot_slots: Tensor | None,
    length_offset: int = -1,
) -> StepMetadata:
    """Build the metadata of a decode step. Call `gather_decode` first.

    Each request has `buffers.tokens_per_request` tokens. Device work only: no shape depends on a value, and nothing is
    read back. Padding requests of a CUDA graph carry request 0, whose state slot 0 is SGLang's dummy slot in both
    pools. Their slot becomes -1 and their lengths 0.

    Args:
        buffers: receives the metadata.
        seq_lens: [B], lengths of the requests.
        out_loc: int64 [T], pool slot of each token.
        snapshot_mask: bool [B], True for requests that end a snapshot interval with this token.
        snapshot_slots: [B], slots of these snapshots.
        length_offset: a request has seq_lens + length_offset tokens before the step; -1 if `seq_lens` counts the new
            token.
    """
    if seq_lens.is_cuda:
        from dsv4_sglang.attention import triton_metadata

        triton_metadata.build(buffers, seq_lens, length_offset, snapshot_mask, snapshot_slots)
    else:
        _fill_decode(buffers, seq_lens, length_offset, snapshot_mask, snapshot_slots)
    takes_snapshots = snapshot_mask is not None and snapshot_slots is not None
    return step_of(buffers, seq_lens.shape[0], out_loc, takes_snapshots)


def _step_in(
    buffers: DecodeBuffers | PrefillBuffers, requests: int, tokens: int, out_loc: Tensor, **more: Any
) -> StepMetadata:
    """Return the metadata of the first requests and tokens in `buffers`."""
    return StepMetadata(
        slots=buffers.slots[:requests],
        prefix_lens=buffers.prefix_lens[:requests],
        query_start=buffers.query_start[: requests + 1],
        out_loc=out_loc,
        block_table=buffers.block_table[:requests],
        **{name: getattr(buffers, name)[:tokens] for name in PER_TOKEN},
        entry_lens={ratio: lens[:tokens] for ratio, lens in buffers.entry_lens.items()},
        hca_indices=buffers.hca_indices[:tokens],
        **more,
    )


def step_of(buffers: DecodeBuffers, n: int, out_loc: Tensor, takes_snapshots: bool = False) -> StepMetadata:
    """Return the metadata of a decode step in `buffers`, as written by `build_decode` or by a graph replay.

    Args:
        buffers: written by `build_decode`.
        n: number of requests.
        out_loc: int64 [T], pool slot of each token.
        takes_snapshots: the step takes snapshots.
    """
    copies = {"copy_src": buffers.copy_src[:n], "copy_dst": buffers.copy_dst[:n]} if takes_snapshots else {}
    return _step_in(buffers, n, n * buffers.tokens_per_request, out_loc, staging_slots=None, **copies)


def _derive(buffers: PrefillBuffers, tokens: int, out_loc: Tensor) -> None:
    """Compute the values of `build_recorded` with PyTorch ops."""
    chunk_lens = buffers.chunk_lens.clone()
    chunk_lens[-1] = tokens - chunk_lens[:-1].sum()
    query_start = _starts(chunk_lens)
    owner = _owners(chunk_lens, tokens)
    positions = buffers.prefix_lens[owner] + torch.arange(tokens, device=owner.device) - query_start[owner]
    step = StepMetadata.build(
        slots=buffers.state_slots.masked_fill(buffers.state_slots == 0, -1),
        prefix_lens=buffers.prefix_lens,
        query_start=query_start,
        token_request=owner,
        positions=positions.long(),
        out_loc=out_loc,
        block_table=buffers.block_table,
        limits=buffers.limits,
    )
    for name in ("slots", "query_start"):
        getattr(buffers, name).copy_(getattr(step, name))
    for name in PER_TOKEN:
        getattr(buffers, name)[:tokens].copy_(getattr(step, name))
    for ratio, lens in step.entry_lens.items():
        buffers.entry_lens[ratio][:tokens].copy_(lens)
    if HCA_RATIO in buffers.limits:
        buffers.hca_indices[:tokens].copy_(buffers.block_table[owner])
    buffers.token_staging_slots[:tokens].copy_(
        _token_staging_slots(buffers.staging_slots, buffers.snapshot_lens, owner, positions)
    )


def build_recorded(buffers: PrefillBuffers, tokens: int, out_loc: Tensor) -> None:
    """Derive the metadata of a step from the inputs in `buffers`; `recorded_step` returns it.

    This is device work only, so a CUDA graph can record it.

    Args:
        buffers: inputs and derived tensors.
        tokens: number of tokens of the step.
        out_loc: int64 [tokens], pool slot of each token.
    """
    if out_loc.is_cuda:
        from dsv4_sglang.attention import triton_metadata

        triton_metadata.build_prefill(buffers, tokens)
    else:
        _derive(buffers, tokens, out_loc)


def recorded_step(buffers: PrefillBuffers, tokens: int, out_loc: Tensor) -> StepMetadata:
    """Return the metadata of a prefill step in `buffers`, as written by `build_recorded` or by a graph replay.

    Args:
        buffers: written by `build_recorded`.
        tokens: number of tokens, T.
        out_loc: int64 [T], pool slot of each token.
    """
    requests = buffers.requests + 1
    window_size = prefill_window_size(tokens, requests)
    return _step_in(
        buffers,
        requests,
        tokens,
        out_loc,
        staging_slots=buffers.token_staging_slots[:tokens],
        copy_src=buffers.slots,
        copy_dst=buffers.rolling_dst,
        window_size=window_size,
    )


def _starts(chunk_lens: Tensor) -> Tensor:
    """Return int32 [B + 1], the first token of each request in a step of chunks `chunk_lens` int32 [B]."""
    return pad(chunk_lens.cumsum(0, dtype=torch.int32), (1, 0))


def _owners(chunk_lens: Tensor, tokens: int) -> Tensor:
    """Return int32 [tokens], the request of each token. `tokens` is the sum of `chunk_lens` int32 [B], known on the
    host.
    """
    requests = torch.arange(chunk_lens.shape[0], dtype=torch.int32, device=chunk_lens.device)
    return torch.repeat_interleave(requests, chunk_lens, output_size=tokens)


def _token_staging_slots(staging_slots: Tensor, snapshot_lens: Tensor, owner: Tensor, positions: Tensor) -> Tensor:
    """Return int32 [T], the staging slot of the snapshot that holds each token's window entry, -1 for none.

    A snapshot of length L, a multiple of 128, holds the positions [L - 128, L).

    Args:
        staging_slots: [B, K], staging slots of the snapshots, -1 for none.
        snapshot_lens: [B, K], their lengths.
        owner: [T], request of each token.
        positions: [T], position of each token.
    """
    holds = snapshot_lens[owner.long()] // BLOCK == (positions // BLOCK + 1)[:, None]
    return torch.where(holds, staging_slots[owner.long()], -1).amax(1).to(torch.int32)


def build_prefill(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    chunk_lens: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    req_to_token: Tensor,
    state_slot_of_request: Tensor,
    staging_slots: Tensor | None,
    snapshot_lens: Tensor | None,
    limits: Mapping[int, int | None],
    max_length: int,
    padding: int = 0,
) -> StepMetadata:
    """Build the metadata of a prefill step: chunks of any lengths from any starts.

    All shapes come from the host (`positions`, `max_length`, `padding`), so there is no synchronisation.

    Args:
        req_pool_indices: [B], requests of the step.
        prefix_lens: [B], length of each request before the step.
        chunk_lens: [B], tokens of each request in the step.
        positions: int64 [T], position of each token.
        out_loc: int64 [T], pool slot of each token.
        req_to_token: SGLang's table of pool slots by request.
        state_slot_of_request: state slots by request.
        staging_slots: [B, K], state slots that hold the snapshots until the end of the step, -1 for none.
        snapshot_lens: [B, K], lengths of these snapshots, multiples of 128. A snapshot holds the window entries of
            positions [snapshot_lens - 128, snapshot_lens), which must all be in this chunk.
        limits: most entries that a token reads, by their ratio (`layer_spec.entry_limits`).
        max_length: length of the longest request after the step.
        padding: number of padding tokens at the end of `positions`. They belong to one more request, which is SGLang's
            request 0. It has no state slot, so they write nothing and attend to nothing.
    """
    if padding:
        req_pool_indices, prefix_lens = pad(req_pool_indices, (0, 1)), pad(prefix_lens, (0, 1))
        chunk_lens = pad(chunk_lens, (0, 1), value=padding)
        if staging_slots is not None and snapshot_lens is not None:
            staging_slots, snapshot_lens = pad(staging_slots, (0, 0, 0, 1), value=-1), pad(snapshot_lens, (0, 0, 0, 1))
    tokens, requests = positions.shape[0], req_pool_indices.shape[0]
    chunk_lens, prefix_lens = chunk_lens.to(torch.int32), prefix_lens.to(torch.int32)
    token_request = _owners(chunk_lens, tokens)
    width = align(-(-max_length // BLOCK))
    first_slots = req_to_token[:, : width * BLOCK : BLOCK]
    block_table = torch.zeros((requests, width), dtype=torch.int32, device=positions.device)
    block_table[:, : first_slots.shape[1]] = first_slots[req_pool_indices] // BLOCK
    token_staging_slots = None
    if staging_slots is not None and snapshot_lens is not None:
        token_staging_slots = _token_staging_slots(staging_slots, snapshot_lens, token_request, positions)
    state_slots = state_slot_of_request[req_pool_indices].to(torch.int32)
    return StepMetadata.build(
        slots=state_slots.masked_fill(state_slots == 0, -1),
        prefix_lens=prefix_lens,
        query_start=_starts(chunk_lens),
        token_request=token_request,
        positions=positions,
        out_loc=out_loc,
        block_table=block_table,
        staging_slots=token_staging_slots,
        limits=limits,
    )
