"""The metadata of a decode step on a GPU, in Triton: one launch inside the CUDA graph.

It writes what `metadata.build_decode` says, a program a request. Lengths are read on the device, so nothing depends on
the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO, WINDOW

if TYPE_CHECKING:
    from dsv4_sglang.attention.metadata import DecodeBuffers


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
    ring_rows,
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
    column = tl.arange(0, WINDOW)
    position = tl.maximum(length - WINDOW, 0) + column
    tl.store(window_rows_ptr + b * WINDOW + column, owned * ring_rows + position % ring_rows)
    if TRACKS:
        due = real & (tl.load(track_mask_ptr + b) != 0)
        tl.store(copy_src_ptr + b, tl.where(due, owned, -1))
        tl.store(copy_dst_ptr + b, tl.where(due, tl.load(track_slots_ptr + b).to(tl.int32), -1))


def build(
    buffers: DecodeBuffers,
    seq_lens: Tensor,
    track_mask: Tensor | None,
    track_slots: Tensor | None,
    top_k: int,
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
        buffers.ring_rows,
        TRACKS=tracks,
        WINDOW=WINDOW,
        CSA_RATIO=CSA_RATIO,
        HCA_RATIO=HCA_RATIO,
        num_warps=1,
    )
