"""Metadata of a recorded step on a GPU, in Triton: one kernel launch inside the CUDA graph.

The kernels compute what `metadata.build_decode` and `metadata.build_recorded` describe, one program per token. They
read lengths on the device, so nothing depends on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS, WINDOW

if TYPE_CHECKING:
    from dsv4_sglang.attention.step_buffers import DecodeBuffers, PrefillBuffers


@triton.jit
def _list_blocks(blocks_ptr, list_ptr, stop, COLUMNS_AT_ONCE: tl.constexpr):
    """Copy the first `stop` block ids of a request to the HCA list of one of its tokens."""
    at = tl.arange(0, COLUMNS_AT_ONCE)
    for begin in range(0, stop, COLUMNS_AT_ONCE):
        block = tl.load(blocks_ptr + begin + at, mask=begin + at < stop)
        tl.store(list_ptr + begin + at, block, mask=begin + at < stop)


@triton.jit
def _store_lens(at, visible, top_k, LIMITED: tl.constexpr):
    """Store how many entries a token reads: all visible ones, or at most the top k."""
    if LIMITED:
        visible = tl.minimum(visible, top_k)
    tl.store(at, visible)


# Arguments, B requests of TOKENS_PER_REQUEST tokens each, T tokens:
#   inputs of a request: state slot int32 [B], length [B], mask bool [B] and slot [B] of the snapshots that are due
#   (read if the step takes snapshots), block table int32 [B, table_columns]
#   outputs of a request: slots and prefix_lens int32 [B]
#   outputs of a token: positions int64 [T], window_indices int32 [T, LISTED], window lens int32 [T], entry lens int32
#   [T] of ratios A and B (0: none), hca_indices int32 [T, table_columns] (LISTS_BLOCKS and several tokens per request)
#   copies of snapshots: copy_src and copy_dst int32 [B]
#   numbers: length before the step minus given length, most entries of a ratio that is LIMITED, entries of a ring,
#   columns of the block table
@triton.jit
def _decode_kernel(
    state_slots_ptr,
    seq_lens_ptr,
    snapshot_mask_ptr,
    snapshot_slots_ptr,
    block_table_ptr,
    slots_ptr,
    prefix_lens_ptr,
    positions_ptr,
    window_indices_ptr,
    window_lens_ptr,
    lens_a_ptr,
    lens_b_ptr,
    hca_indices_ptr,
    copy_src_ptr,
    copy_dst_ptr,
    length_offset,
    top_k,
    ring_rows,
    table_columns,
    TOKENS_PER_REQUEST: tl.constexpr,
    SEES_BLOCK: tl.constexpr,
    TAKES_SNAPSHOTS: tl.constexpr,
    WINDOW_LEN: tl.constexpr,
    LISTED: tl.constexpr,
    COLUMNS: tl.constexpr,
    RATIO_A: tl.constexpr,
    RATIO_B: tl.constexpr,
    LIMITED_A: tl.constexpr,
    LIMITED_B: tl.constexpr,
    LISTS_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS_AT_ONCE: tl.constexpr,
):
    """Grid (tokens)."""
    t = tl.program_id(0)
    b = t // TOKENS_PER_REQUEST
    state_slots = tl.load(state_slots_ptr + b)
    real = state_slots > 0
    slot = tl.where(real, state_slots, -1)
    prefix = tl.where(real, tl.load(seq_lens_ptr + b).to(tl.int32) + length_offset, 0)
    position = prefix + t % TOKENS_PER_REQUEST
    length = tl.where(real, position + 1, 0)
    tl.store(positions_ptr + t, position.to(tl.int64))
    seen = tl.where(real, prefix + TOKENS_PER_REQUEST, 0) if SEES_BLOCK else length
    tl.store(window_lens_ptr + t, tl.minimum(seen, WINDOW_LEN))
    if RATIO_A:
        _store_lens(lens_a_ptr + t, length // RATIO_A, top_k, LIMITED_A)
    if RATIO_B:
        _store_lens(lens_b_ptr + t, length // RATIO_B, top_k, LIMITED_B)
    column = tl.arange(0, COLUMNS)
    entry = state_slots * ring_rows + (tl.maximum(seen - WINDOW_LEN, 0) + column) % ring_rows
    tl.store(window_indices_ptr + t * LISTED + column, entry, mask=column < WINDOW_LEN)
    if LISTS_BLOCKS and TOKENS_PER_REQUEST > 1:
        blocks_ptr, list_ptr = (
            block_table_ptr + b.to(tl.int64) * table_columns,
            hca_indices_ptr + t.to(tl.int64) * table_columns,
        )
        _list_blocks(blocks_ptr, list_ptr, tl.minimum(length // BLOCK, table_columns), COLUMNS_AT_ONCE)
    if t % TOKENS_PER_REQUEST == 0:
        tl.store(slots_ptr + b, slot)
        tl.store(prefix_lens_ptr + b, prefix)
        if TAKES_SNAPSHOTS:
            due = real & (tl.load(snapshot_mask_ptr + b) != 0)
            tl.store(copy_src_ptr + b, tl.where(due, state_slots, -1))
            tl.store(copy_dst_ptr + b, tl.where(due, tl.load(snapshot_slots_ptr + b).to(tl.int32), -1))


def build(
    buffers: DecodeBuffers,
    seq_lens: Tensor,
    length_offset: int,
    snapshot_mask: Tensor | None,
    snapshot_slots: Tensor | None,
) -> None:
    """Fill the buffers of a decode step.

    Args:
        buffers: receives the metadata. Without `snapshot_mask` and `snapshot_slots`, `copy_src` and `copy_dst` are not
            written.
        seq_lens, length_offset, snapshot_mask, snapshot_slots: as in `metadata.build_decode`.
    """
    takes_snapshots, listed = snapshot_mask is not None and snapshot_slots is not None, buffers.window_indices.shape[1]
    _decode_kernel[(seq_lens.shape[0] * buffers.tokens_per_request,)](
        buffers.state_slots,
        seq_lens,
        snapshot_mask if takes_snapshots else buffers.state_slots,
        snapshot_slots if takes_snapshots else buffers.state_slots,
        buffers.block_table,
        buffers.slots,
        buffers.prefix_lens,
        buffers.positions,
        buffers.window_indices,
        buffers.window_lens,
        *buffers.kernel_lens.tensors,
        buffers.hca_indices,
        buffers.copy_src,
        buffers.copy_dst,
        length_offset,
        buffers.kernel_lens.top_k,
        buffers.ring_rows,
        buffers.block_table.shape[1],
        TOKENS_PER_REQUEST=buffers.tokens_per_request,
        SEES_BLOCK=buffers.sees_block,
        TAKES_SNAPSHOTS=takes_snapshots,
        WINDOW_LEN=buffers.window_len,
        LISTED=listed,
        COLUMNS=triton.next_power_of_2(listed),
        **buffers.kernel_lens.constants,
        BLOCK=BLOCK_TOKENS,
        COLUMNS_AT_ONCE=256,
        num_warps=1,
    )


# Arguments, B = requests + 1 with the padding request, T tokens, K snapshots of a request:
#   inputs of a request: state slot, prefix length and chunk length int32 [B], block table int32 [B, table_columns]
#   inputs of its snapshots: staging slot and length int32 [B, K]
#   outputs of a request: slots int32 [B], query_start int32 [B + 1]
#   outputs of a token: request and staging slot int32 [T], positions int64 [T], window_indices int32 [T, WINDOW],
#   window lens int32 [T], entry lens int32 [T] of ratios A and B (0: none), hca_indices int32 [T, table_columns]
#   (LISTS_BLOCKS)
#   numbers: T, requests, K, most entries of a ratio that is LIMITED, columns of the block table
@triton.jit
def _prefill_kernel(
    state_slots_ptr,
    prefix_lens_ptr,
    chunk_lens_ptr,
    block_table_ptr,
    staging_slots_ptr,
    snapshot_lens_ptr,
    slots_ptr,
    query_start_ptr,
    token_request_ptr,
    token_staging_slots_ptr,
    positions_ptr,
    window_indices_ptr,
    window_lens_ptr,
    lens_a_ptr,
    lens_b_ptr,
    hca_indices_ptr,
    tokens,
    requests,
    most_snapshots,
    top_k,
    table_columns,
    REQUESTS: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    RATIO_A: tl.constexpr,
    RATIO_B: tl.constexpr,
    LIMITED_A: tl.constexpr,
    LIMITED_B: tl.constexpr,
    LISTS_BLOCKS: tl.constexpr,
    COLUMNS_AT_ONCE: tl.constexpr,
):
    """Grid (tokens). REQUESTS, above `requests`, and SNAPSHOTS, at least `most_snapshots`, are powers of two."""
    t = tl.program_id(0)
    request = tl.arange(0, REQUESTS)
    chunks = tl.load(chunk_lens_ptr + request, mask=request < requests, other=0)
    ends = tl.cumsum(chunks, 0)
    # Tokens after all chunks belong to the padding request, whose index is `requests`.
    b = tl.sum(((ends <= t) & (request < requests)).to(tl.int32), 0)
    start = tl.sum(tl.where(request < b, chunks, 0), 0)
    state_slots, prefix = tl.load(state_slots_ptr + b), tl.load(prefix_lens_ptr + b)
    position = prefix + t - start
    length = tl.where(state_slots > 0, position + 1, 0)
    tl.store(token_request_ptr + t, b)
    tl.store(positions_ptr + t, position.to(tl.int64))
    tl.store(window_lens_ptr + t, tl.minimum(length, WINDOW))
    if RATIO_A:
        _store_lens(lens_a_ptr + t, length // RATIO_A, top_k, LIMITED_A)
    if RATIO_B:
        _store_lens(lens_b_ptr + t, length // RATIO_B, top_k, LIMITED_B)
    column = tl.arange(0, WINDOW)
    first = start + WINDOW * (b + 1) - prefix + tl.maximum(length - WINDOW, 0)
    tl.store(window_indices_ptr + t * WINDOW + column, first + column)
    snapshot = tl.arange(0, SNAPSHOTS)
    at = b * most_snapshots + snapshot
    slot = tl.load(staging_slots_ptr + at, mask=snapshot < most_snapshots, other=-1)
    holds = tl.load(snapshot_lens_ptr + at, mask=snapshot < most_snapshots, other=0) // BLOCK == position // BLOCK + 1
    tl.store(token_staging_slots_ptr + t, tl.max(tl.where(holds, slot, -1), 0))
    if LISTS_BLOCKS:
        blocks_ptr = block_table_ptr + b.to(tl.int64) * table_columns
        list_ptr = hca_indices_ptr + t.to(tl.int64) * table_columns
        _list_blocks(blocks_ptr, list_ptr, tl.minimum(length // BLOCK, table_columns), COLUMNS_AT_ONCE)
    if t == 0:
        slots = tl.load(state_slots_ptr + request, mask=request <= requests, other=0)
        tl.store(slots_ptr + request, tl.where(slots > 0, slots, -1), mask=request <= requests)
        tl.store(query_start_ptr + request, ends - chunks, mask=request <= requests)
        tl.store(query_start_ptr + requests + 1, tokens)


def build_prefill(buffers: PrefillBuffers, tokens: int) -> None:
    """Derive the metadata of a prefill step from the inputs in `buffers`.

    Args:
        buffers: inputs and derived tensors.
        tokens: number of tokens of the step.
    """
    _prefill_kernel[(tokens,)](
        buffers.state_slots,
        buffers.prefix_lens,
        buffers.chunk_lens,
        buffers.block_table,
        buffers.staging_slots,
        buffers.snapshot_lens,
        buffers.slots,
        buffers.query_start,
        buffers.token_request,
        buffers.token_staging_slots,
        buffers.positions,
        buffers.window_indices,
        buffers.window_lens,
        *buffers.kernel_lens.tensors,
        buffers.hca_indices,
        tokens,
        buffers.requests,
        buffers.most_snapshots,
        buffers.kernel_lens.top_k,
        buffers.block_table.shape[1],
        REQUESTS=triton.next_power_of_2(buffers.requests + 1),
        SNAPSHOTS=triton.next_power_of_2(buffers.most_snapshots),
        WINDOW=WINDOW,
        BLOCK=BLOCK_TOKENS,
        **buffers.kernel_lens.constants,
        COLUMNS_AT_ONCE=256,
        num_warps=1,
    )
