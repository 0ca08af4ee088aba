"""`attend` of a prefill step through FlashMLA's sparse bf16 kernel, for sm_90 and sm_100 (SPEC 2.2, 4.5).

That kernel reads one contiguous bf16 table and one list of rows a token. So each layer's window rows and the entries of
the step's requests are written out as bf16, which FP8 rows become exactly, block after block; lists of table rows
become lists of places in that table, entries first. It multiplies about twice as fast as the FP8 kernel for decode, and
the writing out is small against that: 1.6 KB a row of context, once a layer, while every token of the step reads up to
640 rows.

Bytes a layer: 584 read and 1024 written a row that is written out; 4 read and written an item of a list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.base import AttendInputs
from dsv4_sglang.attention.flashmla import FlashMLAKernel
from dsv4_sglang.attention.triton_entries import (
    DIM,
    E4M3_LACK,
    NOPE,
    ROPE,
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

# The sparse kernel wants joined lists of such a width (64 suffices for 64 heads).
JOINED_ALIGNMENT = 128
# Rows that are written out at most: 512 MiB. A step with more context reads its tables where they are.
MAX_ROWS = 1 << 19
# And at most this many for each token of the step, or writing them out takes longer than it saves: 0.5 ns a row
# against 0.2 us a token.
MAX_ROWS_A_TOKEN = 256
_ROWS_A_PROGRAM = 16


@triton.jit
def _write_out_kernel(
    window_ptr, entries_ptr, blocks_ptr, out_ptr, window_indices, rows,
    window_block_stride, entry_block_stride, window_entries_per_block, compressed_entries_per_block, listed_rows,
    FP8: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups of BLOCK_N rows): the window table from its first row on, then `listed_rows` rows of each block."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = at < rows
    in_window = at < window_indices
    item = tl.where(in_window, 0, at - window_indices)
    place = item // listed_rows
    listed = tl.load(blocks_ptr + place, mask=mask & (at >= window_indices), other=0)
    row = tl.where(in_window, at, listed * listed_rows + item - place * listed_rows)
    entries_per_block = tl.where(in_window, window_entries_per_block, compressed_entries_per_block)
    stride = tl.where(in_window, window_block_stride, entry_block_stride)
    block = row // entries_per_block
    inside = row - block * entries_per_block
    block_at = tl.where(in_window, window_ptr, entries_ptr) + block.to(tl.int64) * stride
    dims = tl.arange(0, DIM)[None, :]
    is_row = mask[:, None]
    out_at = out_ptr + at.to(tl.int64)[:, None] * DIM
    if FP8:
        row_at, scale_at = fp8_entry(block_at, inside, entries_per_block)
        row_at = row_at[:, None]
        multiplier = exponent_to_scale(tl.load(scale_at, mask=mask, other=0) & 0xFF)[:, None]
        code = tl.load(row_at + dims, mask=is_row & (dims < NOPE), other=0)
        value = e4m3_bits(code, tl.float32) * E4M3_LACK * E4M3_LACK * multiplier
        tl.store(out_at + dims, value.to(tl.bfloat16), mask=is_row & (dims < NOPE))
        tail_dims = tl.arange(0, ROPE)[None, :]
        tail = tl.load(rope_dims(row_at) + tail_dims, mask=is_row, other=0.0)
        tl.store(out_at + NOPE + tail_dims, tail, mask=is_row)
    else:
        tl.store(out_at + dims, tl.load((block_at + inside * DIM)[:, None] + dims, mask=is_row, other=0.0), mask=is_row)


@triton.jit
def _join_kernel(
    entry_rows_ptr, entry_lens_ptr, window_indices_ptr, window_lens_ptr, places_ptr, out_ptr, out_lens_ptr,
    entry_rows_stride, window_indices_stride, width, window_size, listed_rows,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens): a token's entries, found in the written table by the place of their block, then its window, then
    -1.
    """
    t = tl.program_id(0).to(tl.int64)
    entries = tl.load(entry_lens_ptr + t)
    total = entries + tl.load(window_lens_ptr + t)
    tl.store(out_lens_ptr + t, total)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_entry = column < entries
        row = tl.load(entry_rows_ptr + t * entry_rows_stride + column, mask=is_entry, other=-1)
        found = is_entry & (row >= 0)
        block = row // listed_rows
        place = tl.load(places_ptr + block, mask=found, other=0)
        entry = window_size + place * listed_rows + row - block * listed_rows
        in_window = (column >= entries) & (column < total)
        window_row = tl.load(
            window_indices_ptr + t * window_indices_stride + column - entries, mask=in_window, other=-1
        )
        tl.store(out_ptr + t * width + column, tl.where(found, entry, window_row), mask=column < width)


def _sparse_attention(q: Tensor, table: Tensor, lists: Tensor, lens: Tensor, sink: Tensor, scale: float) -> Tensor:
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd

    return flash_mla_sparse_fwd(
        q=q,
        kv=table.unsqueeze(1),
        indices=lists.unsqueeze(1),
        sm_scale=scale,
        d_v=ENTRY_DIM,
        attn_sink=sink,
        topk_length=lens,
    )[0]


def _entries_a_block(ratio: int | None) -> int:
    """Rows of an entry table that belong to a block."""
    if ratio is None:
        raise ValueError("ratio is None; expected the layer's, 0, 4 or 128, which says whose block an entry is")
    return BLOCK_TOKENS // ratio if ratio else 1


class SparsePrefillAttention(FlashMLAKernel):
    """Attention of one prefill step. Its memory grows to the largest step and stays.

    `blocks`: blocks of the entry tables.
    """

    kv_formats = (KVFormat.FP8, KVFormat.BF16)

    def __init__(self, blocks: int) -> None:
        self._block_count = blocks
        self._places: Tensor | None = None  # [block_count] int32, of a block among the step's
        self._table: Tensor | None = None
        self._blocks: Tensor | None = None
        self._shared_lists: dict[int | None, tuple[Tensor, Tensor]] = {}
        self._window_size = 0

    def begin_step(self, step: StepMetadata, lengths: list[int] | None) -> bool:
        """Find the step's blocks; False for a decode step and where writing out takes longer than it saves."""
        self._blocks = None
        self._shared_lists.clear()
        if lengths is None:
            return False
        counts = [-(-length // BLOCK_TOKENS) for length in lengths]
        total = sum(counts)
        rows = step.window_size + _entries_a_block(CSA_RATIO) * total
        if rows > min(MAX_ROWS, MAX_ROWS_A_TOKEN * step.positions.shape[0]):
            return False
        device = step.positions.device
        lens = step.prefix_lens + step.query_start.diff()
        count = (lens + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), count, output_size=total)
        place = torch.arange(total, device=device)
        column = place - (count.cumsum(0) - count)[owner]
        self._blocks = step.block_table[owner, column]
        if self._places is None:
            self._places = torch.zeros(self._block_count, dtype=torch.int32, device=device)
        # Requests that share a block put it in several places; any of them does.
        self._places[self._blocks.long()] = place.to(torch.int32)
        if self._table is None or self._table.shape[0] < rows:
            self._table = torch.empty(rows, ENTRY_DIM, dtype=torch.bfloat16, device=device)
        self._window_size = step.window_size
        return True

    def forget_scratch(self) -> None:
        self._places = self._table = self._blocks = None
        self._shared_lists.clear()

    def _rotated(self, q: Tensor, inputs: AttendInputs) -> Tensor:
        table, (lists, lens) = self._write_out(inputs), self._joined_lists(inputs)
        return _sparse_attention(q, table, lists, lens, inputs.sink, inputs.scale)

    def _write_out(self, inputs: AttendInputs) -> Tensor:
        """bf16 rows: the window workspace, then of each block of the step its entries."""
        assert self._blocks is not None and self._table is not None, "attend comes after a step that begin_step took"
        listed_rows = _entries_a_block(inputs.ratio)
        rows = self._window_size + (self._blocks.shape[0] * listed_rows if inputs.entries else 0)
        table = self._table[:rows]
        window, entries = inputs.window.table, (inputs.entries or inputs.window).table
        _write_out_kernel[(triton.cdiv(rows, _ROWS_A_PROGRAM),)](
            *(window, entries, self._blocks, table, self._window_size, rows),
            *(table_stride(window), table_stride(entries), window.shape[1], entries.shape[1], listed_rows),
            FP8=inputs.kv_format is KVFormat.FP8,
            BLOCK_N=_ROWS_A_PROGRAM,
            num_warps=4,
        )
        return table

    def _joined_lists(self, inputs: AttendInputs) -> tuple[Tensor, Tensor]:
        """Places of a token's rows in the written table and their number; only CSA layers have lists of their own."""
        if inputs.ratio in self._shared_lists:
            return self._shared_lists[inputs.ratio]
        _, window_indices, window_lens = inputs.window
        if inputs.entries:
            _, entry_rows, entry_lens = inputs.entries
        else:
            entry_rows, entry_lens = window_indices[:, :0], torch.zeros_like(window_lens)
        tokens = entry_lens.shape[0]
        width = -(-(entry_rows.shape[1] + window_indices.shape[1]) // JOINED_ALIGNMENT) * JOINED_ALIGNMENT
        lists = window_indices.new_empty(tokens, width)
        lens = torch.empty_like(entry_lens)
        _join_kernel[(tokens,)](
            *(entry_rows, entry_lens, window_indices, window_lens, self._places, lists, lens),
            *(entry_rows.stride(0), window_indices.stride(0), width, self._window_size, _entries_a_block(inputs.ratio)),
            COLUMNS=256,
            num_warps=4,
        )
        if inputs.ratio != CSA_RATIO:
            self._shared_lists[inputs.ratio] = lists, lens
        return lists, lens
