"""The metadata of a decode step on a GPU, in Triton: one launch before a CUDA graph and one inside it.

They write what `metadata.snapshot_decode` and `metadata.build_decode` say, a program a request. Lengths are read on the
device, so nothing depends on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dsv4_sglang.attention.metadata import DecodeBuffers

# Block ids that one program copies.
_COLUMNS = 1024


@triton.jit
def _snapshot_kernel(
    requests_ptr,
    seq_lens_ptr,
    state_slot_ptr,
    req_to_token_ptr,
    owned_ptr,
    table_ptr,
    token_stride,
    table_stride,
    columns,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (requests, groups of COLUMNS blocks): a program without a block of its request below the length is idle."""
    b = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + b).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(owned_ptr + b, tl.load(state_slot_ptr + request))
    blocks = tl.cdiv(tl.load(seq_lens_ptr + b), BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (column < blocks) & (column < columns)
    slot = tl.load(req_to_token_ptr + request * token_stride + column * BLOCK, mask=mask, other=0)
    tl.store(table_ptr + b * table_stride + column, slot // BLOCK, mask=mask)


@triton.jit
def _decode_kernel(
    owned_ptr,
    seq_lens_ptr,
    track_mask_ptr,
    track_slots_ptr,
    slots_ptr,
    prefix_lens_ptr,
    window_rows_ptr,
    window_lens_ptr,
    csa_lens_ptr,
    hca_lens_ptr,
    copy_src_ptr,
    copy_dst_ptr,
    top_k,
    TRACKS: tl.constexpr,
    WINDOW: tl.constexpr,
    CSA_RATIO: tl.constexpr,
    HCA_RATIO: tl.constexpr,
):
    """Grid (requests)."""
    b = tl.program_id(0)
    owned = tl.load(owned_ptr + b)
    real = owned > 0
    slot = tl.where(real, owned, -1)
    length = tl.where(real, tl.load(seq_lens_ptr + b).to(tl.int32), 0)
    tl.store(slots_ptr + b, slot)
    tl.store(prefix_lens_ptr + b, tl.maximum(length - 1, 0))
    tl.store(window_lens_ptr + b, tl.minimum(length, WINDOW))
    tl.store(csa_lens_ptr + b, tl.minimum(length // CSA_RATIO, top_k))
    tl.store(hca_lens_ptr + b, length // HCA_RATIO)
    row = tl.arange(0, WINDOW)
    tl.store(window_rows_ptr + b * WINDOW + row, owned * WINDOW + row)
    if TRACKS:
        due = real & (tl.load(track_mask_ptr + b) != 0)
        tl.store(copy_src_ptr + b, tl.where(due, owned, -1))
        tl.store(copy_dst_ptr + b, tl.where(due, tl.load(track_slots_ptr + b).to(tl.int32), -1))


def snapshot(
    requests: Tensor,
    seq_lens: Tensor,
    state_slot_of_request: Tensor,
    req_to_token: Tensor,
    owned: Tensor,
    block_table: Tensor,
    block: int,
) -> None:
    """State slots of `requests` [B] into `owned` [>= B] and ids of the blocks below `seq_lens` into `block_table`."""
    columns = min(block_table.shape[1], -(-req_to_token.shape[1] // block))
    _snapshot_kernel[(requests.shape[0], triton.cdiv(columns, _COLUMNS))](
        requests,
        seq_lens,
        state_slot_of_request,
        req_to_token,
        owned,
        block_table,
        req_to_token.stride(0),
        block_table.stride(0),
        columns,
        BLOCK=block,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


def build(
    buffers: DecodeBuffers,
    seq_lens: Tensor,
    track_mask: Tensor | None,
    track_slots: Tensor | None,
    top_k: int,
    csa_ratio: int,
    hca_ratio: int,
) -> None:
    """Fill the buffers for the requests of `seq_lens` [B]. Without a mask the copies are left as they are."""
    tracks = track_mask is not None and track_slots is not None
    _decode_kernel[(seq_lens.shape[0],)](
        buffers.owned,
        seq_lens,
        track_mask if tracks else buffers.owned,
        track_slots if tracks else buffers.owned,
        buffers.slots,
        buffers.prefix_lens,
        buffers.window_rows,
        buffers.window_lens,
        buffers.csa_lens,
        buffers.hca_lens,
        buffers.copy_src,
        buffers.copy_dst,
        top_k,
        TRACKS=tracks,
        WINDOW=buffers.window_rows.shape[1],
        CSA_RATIO=csa_ratio,
        HCA_RATIO=hca_ratio,
        num_warps=1,
    )
