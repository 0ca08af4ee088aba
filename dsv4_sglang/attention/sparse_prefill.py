"""`attend` of a prefill step through FlashMLA's sparse bf16 kernel, on sm_90 and sm_100 (SPEC 2.2, 4.5).

That kernel takes one contiguous bf16 buffer and one index list per token. So each layer first gathers its window
entries and the compressed entries of the step's requests into a bf16 buffer, block by block (entries of all formats are
exact in bf16). Layers of V4.1 that attend to the entries of one KV buffer gather them once. The index lists are
translated to positions in the bf16 buffer, compressed entries first. The sparse kernel multiplies about twice as fast
as the FP8 decode kernel. Gathering is cheap in comparison: 1.6 KB per entry of context, while every token of the step
reads up to 640 entries.

The host knows only an upper bound of the step's blocks, so that a CUDA graph can record a step: the buffers have a
fixed size, and a kernel counts and lists the blocks.

Bytes per layer: 584 read (528 or 288 of V4.1's) and 1024 written per gathered entry, 4 read and 4 written per list
item.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.base import AttendInputs
from dsv4_sglang.attention.flashmla import FlashMLAKernel
from dsv4_sglang.attention.triton_entries import (
    DIM,
    NOPE,
    ROPE,
    SQRT_E4M3_FACTOR,
    block_scaled_dims,
    e4m3_bits,
    exponent_to_scale,
    fp8_entry,
    rope_dims,
    table_stride,
)
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO

# Joined lists need a width that is a multiple of this (64 would do for 64 heads).
JOINED_ALIGNMENT = 128
# Maximum number of gathered entries, 512 MiB. A step with more context reads its KV buffers in place.
MAX_GATHERED = 1 << 19
# Maximum number of gathered entries per token of the step. Above it gathering costs more than it saves (0.5 ns an entry
# against 0.2 us a token).
MAX_GATHERED_PER_TOKEN = 256
# Maximum number of listed entries at a time, 64 MiB. With more, each layer lists them for some tokens after the other.
MAX_LISTED = 1 << 24
_ENTRIES_PER_PROGRAM = 16


# The numbers differ from step to step. Specialised to them, the kernels would be compiled during serving.
@triton.jit(do_not_specialize=["requests", "most_blocks"])
def _list_blocks_kernel(
    slots_ptr, prefix_lens_ptr, query_start_ptr, block_table_ptr, blocks_ptr, count_ptr, places_ptr,
    requests, block_table_stride, most_blocks,
    BLOCK: tl.constexpr, REQUESTS_AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (requests). List the blocks of all requests, request by request, and note the place of each in the list.

    A block that several requests share is listed several times. Any of its places will do.
    """
    b = tl.program_id(0)
    first, own, total = 0, 0, 0
    for begin in range(0, requests, REQUESTS_AT_ONCE):
        request = begin + tl.arange(0, REQUESTS_AT_ONCE)
        mask = request < requests
        has_slot = tl.load(slots_ptr + request, mask=mask, other=-1) >= 0
        start = tl.load(query_start_ptr + request, mask=mask, other=0)
        length = tl.load(query_start_ptr + request + 1, mask=mask, other=0) - start
        length += tl.load(prefix_lens_ptr + request, mask=mask, other=0)
        counts = tl.where(has_slot, tl.cdiv(length, BLOCK), 0)
        first += tl.sum(tl.where(request < b, counts, 0), 0)
        own += tl.sum(tl.where(request == b, counts, 0), 0)
        total += tl.sum(counts, 0)
    # The bound only keeps writes inside the list.
    end = tl.minimum(first + own, most_blocks)
    row_ptr = block_table_ptr + b.to(tl.int64) * block_table_stride
    for begin in range(first, end, COLUMNS):
        place = begin + tl.arange(0, COLUMNS)
        block = tl.load(row_ptr + place - first, mask=place < end, other=0)
        tl.store(blocks_ptr + place, block, mask=place < end)
        tl.store(places_ptr + block, place, mask=place < end)
    if b == 0:
        tl.store(count_ptr, tl.minimum(total, most_blocks))


@triton.jit(do_not_specialize=["window_entries", "most_entries"])
def _gather_kernel(
    window_ptr, entries_ptr, blocks_ptr, count_ptr, out_ptr, window_entries, most_entries,
    window_block_stride, entry_block_stride, window_entries_per_block, compressed_entries_per_block, per_block,
    FP8: tl.constexpr, BLOCK_SCALED: tl.constexpr, FP4: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups of BLOCK_N entries of `out`). Gather `window_entries` window entries, then each listed block.

    `most_entries` is the size of `out`, without compressed entries `window_entries`. `per_block` is the number of
    compressed entries of a block. BLOCK_SCALED: all are NVFP4 entries (FP4) or MXFP8 ones.
    """
    total = tl.minimum(window_entries + tl.load(count_ptr) * per_block, most_entries)
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(0) * BLOCK_N >= total:
        return
    mask = index < total
    in_window = index < window_entries
    item = tl.where(in_window, 0, index - window_entries)
    place = item // per_block
    listed = tl.load(blocks_ptr + place, mask=mask & (index >= window_entries), other=0)
    entry = tl.where(in_window, index, listed * per_block + item - place * per_block)
    entries_per_block = tl.where(in_window, window_entries_per_block, compressed_entries_per_block)
    stride = tl.where(in_window, window_block_stride, entry_block_stride)
    block = entry // entries_per_block
    inside = entry - block * entries_per_block
    block_at = tl.where(in_window, window_ptr, entries_ptr) + block.to(tl.int64) * stride
    dims = tl.arange(0, DIM)[None, :]
    is_entry = mask[:, None]
    out_at = out_ptr + index.to(tl.int64)[:, None] * DIM
    if BLOCK_SCALED:
        place_at, of_block = block_at[:, None], entries_per_block[:, None]
        value = block_scaled_dims(place_at, inside[:, None], of_block, is_entry, 0, DIM, FP4, tl.bfloat16)
        tl.store(out_at + dims, value, mask=is_entry)
    elif FP8:
        entry_at, scale_at = fp8_entry(block_at, inside, entries_per_block)
        entry_at = entry_at[:, None]
        multiplier = exponent_to_scale(tl.load(scale_at, mask=mask, other=0) & 0xFF)[:, None]
        code = tl.load(entry_at + dims, mask=is_entry & (dims < NOPE), other=0)
        value = e4m3_bits(code, tl.float32) * SQRT_E4M3_FACTOR * SQRT_E4M3_FACTOR * multiplier
        tl.store(out_at + dims, value.to(tl.bfloat16), mask=is_entry & (dims < NOPE))
        dims_with_rope = tl.arange(0, ROPE)[None, :]
        rope_part = tl.load(rope_dims(entry_at) + dims_with_rope, mask=is_entry, other=0.0)
        tl.store(out_at + NOPE + dims_with_rope, rope_part, mask=is_entry)
    else:
        tl.store(
            out_at + dims, tl.load((block_at + inside * DIM)[:, None] + dims, mask=is_entry, other=0.0), mask=is_entry
        )


@triton.jit(do_not_specialize=["window_size"])
def _join_kernel(
    entry_indices_ptr, entry_lens_ptr, entry_owner_ptr, window_indices_ptr, window_lens_ptr, places_ptr, out_ptr,
    out_lens_ptr, entry_indices_stride, window_indices_stride, width, window_size, per_block,
    SHARED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). Write the token's list in the gathered buffer: compressed entries, window entries, then -1.
    SHARED: tokens of a request share the list of entries."""
    t = tl.program_id(0).to(tl.int64)
    entry_list = tl.load(entry_owner_ptr + t).to(tl.int64) if SHARED else t
    entries = tl.load(entry_lens_ptr + t)
    total = entries + tl.load(window_lens_ptr + t)
    tl.store(out_lens_ptr + t, total)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_entry = column < entries
        index = tl.load(entry_indices_ptr + entry_list * entry_indices_stride + column, mask=is_entry, other=-1)
        found = is_entry & (index >= 0)
        block = index // per_block
        place = tl.load(places_ptr + block, mask=found, other=0)
        entry = window_size + place * per_block + index - block * per_block
        in_window = (column >= entries) & (column < total)
        window_index = tl.load(
            window_indices_ptr + t * window_indices_stride + column - entries, mask=in_window, other=-1
        )
        tl.store(out_ptr + t * width + column, tl.where(found, entry, window_index), mask=column < width)


def sparse_attention(q: Tensor, table: Tensor, lists: Tensor, lens: Tensor, sink: Tensor, scale: float) -> Tensor:
    from flash_mla import flash_mla_sparse_fwd

    return flash_mla_sparse_fwd(
        q=q,
        kv=table.unsqueeze(1),
        indices=lists.unsqueeze(1),
        sm_scale=scale,
        d_v=ENTRY_DIM,
        attn_sink=sink,
        topk_length=lens,
        use_legacy=True,
        return_log2_lse=False,
    )[0]


def _entries_per_block(ratio: int) -> int:
    """Return the number of entries of a KV buffer that belong to one block."""
    return BLOCK_TOKENS // ratio if ratio else 1


def _joined_width(inputs: AttendInputs) -> int:
    """Return the width of the lists of `inputs` in the gathered buffer."""
    width = inputs.window.indices.shape[1] + (inputs.entries.indices.shape[1] if inputs.entries else 0)
    return -(-width // JOINED_ALIGNMENT) * JOINED_ALIGNMENT


class _Gathered(NamedTuple):
    """Memory for the gathered entries of a step.

    Attributes:
        table: bf16 [entries, 512], the window entries, then the compressed entries of each listed block.
        blocks: int32 [N], ids of the step's blocks.
        block_count: int32 [1], number of the step's blocks.
    """

    table: Tensor
    blocks: Tensor
    block_count: Tensor

    @classmethod
    def allocate(cls, entries: int, blocks: int, device: torch.device) -> _Gathered:
        return cls(
            torch.empty(entries, ENTRY_DIM, dtype=torch.bfloat16, device=device),
            torch.empty(blocks, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )

    def has_room(self, entries: int, blocks: int) -> bool:
        return self.table.shape[0] >= entries and self.blocks.shape[0] >= blocks


class SparsePrefillAttention(FlashMLAKernel):
    """Attention of one prefill step. Its scratch memory grows to the largest step and is kept.

    Args:
        blocks: number of blocks of the entry buffers.
        entries_per_block: most entries of a block in a layer.
    """

    kv_formats = (KVFormat.FP8, KVFormat.BF16, KVFormat.MXFP8)

    def __init__(self, blocks: int, entries_per_block: int = BLOCK_TOKENS // CSA_RATIO) -> None:
        self._block_count, self._entries_per_block = blocks, entries_per_block
        self._places: Tensor | None = None  # int32 [block_count], place of a block among the step's blocks
        self._reserved: _Gathered | None = None
        self._growing: _Gathered | None = None
        # Of the current step.
        self._gathered: _Gathered | None = None
        self._most_blocks = self._window_size = 0
        self._shared_lists: dict[int, tuple[Tensor, Tensor]] = {}
        self._gathered_from: Tensor | None = None  # buffer of the gathered entries, if other layers read it too

    def begin_step(self, step: StepMetadata, most_blocks: int | None) -> bool:
        """Collect the step's blocks. Return False for a decode step or if gathering costs more than it saves."""
        self._gathered = self._gathered_from = None
        self._shared_lists.clear()
        if most_blocks is None:
            return False
        entries = step.window_size + self._entries_per_block * most_blocks
        if entries > min(MAX_GATHERED, MAX_GATHERED_PER_TOKEN * step.positions.shape[0]):
            return False
        device = step.positions.device
        self._allocate_places(device)
        self._gathered = self._memory(entries, most_blocks, device)
        self._most_blocks, self._window_size = most_blocks, step.window_size
        requests = step.slots.shape[0]
        _list_blocks_kernel[(requests,)](
            *(step.slots, step.prefix_lens, step.query_start, step.block_table),
            *(self._gathered.blocks, self._gathered.block_count, self._places),
            *(requests, step.block_table.stride(0), most_blocks),
            BLOCK=BLOCK_TOKENS,
            REQUESTS_AT_ONCE=64,
            COLUMNS=256,
            num_warps=4,
        )
        return True

    def reserve(self, window_size: int, blocks: int, device: torch.device) -> None:
        self._allocate_places(device)
        self._reserved = _Gathered.allocate(window_size + self._entries_per_block * blocks, blocks, device)

    def free_scratch(self) -> None:
        self._growing = self._gathered = self._gathered_from = None
        self._shared_lists.clear()

    def _allocate_places(self, device: torch.device) -> None:
        if self._places is None:
            self._places = torch.zeros(self._block_count, dtype=torch.int32, device=device)

    def _memory(self, entries: int, blocks: int, device: torch.device) -> _Gathered:
        """Return memory for the gathered entries of a step: that of recorded steps, or one that grows."""
        for memory in (self._reserved, self._growing):
            if memory is not None and memory.has_room(entries, blocks):
                return memory
        self._growing = None  # frees it first
        self._growing = _Gathered.allocate(entries, blocks, device)
        return self._growing

    def _rotated(self, q: Tensor, inputs: AttendInputs) -> Tensor:
        table, tokens = self._gather(inputs), q.shape[0]
        at_once = max(1, MAX_LISTED // _joined_width(inputs))
        if tokens <= at_once:
            return sparse_attention(q, table, *self._shared_or_joined_lists(inputs), inputs.sink, inputs.scale)
        out = torch.empty_like(q)
        for begin in range(0, tokens, at_once):
            part = slice(begin, begin + at_once)
            lists = self._joined_lists(inputs, part)
            out[part] = sparse_attention(q[part], table, *lists, inputs.sink, inputs.scale)
        return out

    def _gather(self, inputs: AttendInputs) -> Tensor:
        """Gather bf16 entries: the window workspace, then the compressed entries of each block of the step."""
        assert self._gathered is not None, "call `begin_step` before `attend`"
        most_entries = self._most_blocks * _entries_per_block(inputs.ratio) if inputs.entries else 0
        table = self._gathered.table[: self._window_size + most_entries]
        if inputs.kv_format is not KVFormat.MXFP8:
            self._launch_gather(inputs, table, self._window_size, inputs.kv_format)
            return table
        # The formats differ, so each has a launch.
        self._launch_gather(inputs, table[: self._window_size], self._window_size, inputs.kv_format)
        if inputs.entries and self._gathered_from is not inputs.entries.table:
            self._launch_gather(inputs, table[self._window_size :], 0, inputs.entry_format)
            self._gathered_from = inputs.entries.table
        return table

    def _launch_gather(self, inputs: AttendInputs, table: Tensor, window_entries: int, stored: KVFormat) -> None:
        """Fill `table` with the first `window_entries` of the window workspace and the compressed entries of the step's
        blocks, all in the format `stored`."""
        assert self._gathered is not None
        window, entries = inputs.window.table, (inputs.entries or inputs.window).table
        most_entries, per_block = table.shape[0], _entries_per_block(inputs.ratio)
        _gather_kernel[(triton.cdiv(most_entries, _ENTRIES_PER_PROGRAM),)](
            *(window, entries, self._gathered.blocks, self._gathered.block_count, table, window_entries, most_entries),
            *(table_stride(window), table_stride(entries), window.shape[1], entries.shape[1], per_block),
            FP8=stored is KVFormat.FP8,
            BLOCK_SCALED=stored in (KVFormat.MXFP8, KVFormat.NVFP4),
            FP4=stored is KVFormat.NVFP4,
            BLOCK_N=_ENTRIES_PER_PROGRAM,
            num_warps=4,
        )

    def _shared_or_joined_lists(self, inputs: AttendInputs) -> tuple[Tensor, Tensor]:
        """Return the lists of all tokens. CSA layers share none, other layers those of the latest selection."""
        if inputs.ratio == CSA_RATIO:
            return self._joined_lists(inputs, slice(None))
        if inputs.selects or inputs.ratio not in self._shared_lists:
            self._shared_lists[inputs.ratio] = self._joined_lists(inputs, slice(None))
        return self._shared_lists[inputs.ratio]

    def _joined_lists(self, inputs: AttendInputs, part: slice) -> tuple[Tensor, Tensor]:
        """Return the list in the gathered buffer of each token in `part`, and its length."""
        window_indices, window_lens = inputs.window.indices[part], inputs.window.topk_length[part]
        if inputs.entries:
            _, entry_indices, entry_lens, owner = inputs.entries
            entry_lens = entry_lens[part]
            entry_indices, owner = (entry_indices[part], owner) if owner is None else (entry_indices, owner[part])
        else:
            entry_indices, entry_lens, owner = window_indices[:, :0], torch.zeros_like(window_lens), None
        tokens, width = entry_lens.shape[0], _joined_width(inputs)
        lists = window_indices.new_empty(tokens, width)
        lens = torch.empty_like(entry_lens)
        _join_kernel[(tokens,)](
            *(entry_indices, entry_lens, entry_lens if owner is None else owner, window_indices, window_lens),
            *(self._places, lists, lens),
            *(
                entry_indices.stride(0),
                window_indices.stride(0),
                width,
                self._window_size,
                _entries_per_block(inputs.ratio),
            ),
            SHARED=owner is not None,
            COLUMNS=256,
            num_warps=4,
        )
        return lists, lens
