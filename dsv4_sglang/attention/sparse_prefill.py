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
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.flashmla import has_kernel, installed
from dsv4_sglang.attention.metadata import BLOCK, CSA_RATIO, StepMetadata
from dsv4_sglang.attention.triton_attend import E4M3_LACK, derotate, e4m3_bits, table_stride
from dsv4_sglang.formats import RowFormat
from dsv4_sglang.formats.rows import ENTRY_DIM

# The sparse kernel wants lists of such a width (64 suffices for 64 heads).
LIST_ALIGNMENT = 128
ENTRIES_A_BLOCK = BLOCK // CSA_RATIO
# Rows that are written out at most: 512 MiB. A step with more context reads its tables where they are.
MAX_ROWS = 1 << 19
# And at most this many for each token of the step, or writing them out takes longer than it saves: 0.5 ns a row
# against 0.2 us a token.
MAX_ROWS_A_TOKEN = 256
_ROWS_A_PROGRAM = 16


@triton.jit
def _write_out_kernel(
    window_ptr,
    entries_ptr,
    blocks_ptr,
    out_ptr,
    window_rows,
    rows,
    window_block_stride,
    entry_block_stride,
    window_rows_per_block,
    entry_rows_per_block,
    listed_rows,
    FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (groups of BLOCK_N rows): the window table from its first row on, then `listed_rows` rows of each block."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = at < rows
    in_window = at < window_rows
    item = tl.where(in_window, 0, at - window_rows)
    place = item // listed_rows
    listed = tl.load(blocks_ptr + place, mask=mask & (at >= window_rows), other=0)
    row = tl.where(in_window, at, listed * listed_rows + item - place * listed_rows)
    rows_per_block = tl.where(in_window, window_rows_per_block, entry_rows_per_block)
    stride = tl.where(in_window, window_block_stride, entry_block_stride)
    block = row // rows_per_block
    inside = row - block * rows_per_block
    block_at = tl.where(in_window, window_ptr, entries_ptr) + block.to(tl.int64) * stride
    d512 = tl.arange(0, 512)[None, :]
    is_row = mask[:, None]
    out_at = out_ptr + at.to(tl.int64)[:, None] * 512
    if FP8:
        row_at = (block_at + inside * 576)[:, None]
        scale_at = (block_at + (rows_per_block * 576 + inside * 8)).to(tl.pointer_type(tl.int32))
        exponent = tl.load(scale_at, mask=mask, other=0) & 0xFF
        multiplier = (exponent << 23).to(tl.float32, bitcast=True)[:, None]
        code = tl.load(row_at + d512, mask=is_row & (d512 < 448), other=0)
        value = e4m3_bits(code, tl.float32) * E4M3_LACK * E4M3_LACK * multiplier
        tl.store(out_at + d512, value.to(tl.bfloat16), mask=is_row & (d512 < 448))
        d64 = tl.arange(0, 64)[None, :]
        tail = tl.load((row_at + 448).to(tl.pointer_type(tl.bfloat16)) + d64, mask=is_row, other=0.0)
        tl.store(out_at + 448 + d64, tail, mask=is_row)
    else:
        tl.store(out_at + d512, tl.load((block_at + inside * 512)[:, None] + d512, mask=is_row, other=0.0), mask=is_row)


@triton.jit
def _join_kernel(
    entry_rows_ptr,
    entry_lens_ptr,
    window_rows_ptr,
    window_lens_ptr,
    places_ptr,
    out_ptr,
    out_lens_ptr,
    entry_rows_stride,
    window_rows_stride,
    width,
    window_size,
    listed_rows,
    COLUMNS: tl.constexpr,
):
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
        window_row = tl.load(window_rows_ptr + t * window_rows_stride + column - entries, mask=in_window, other=-1)
        tl.store(out_ptr + t * width + column, tl.where(found, entry, window_row), mask=column < width)


def supported(q: Tensor, row_format: RowFormat) -> bool:
    """Whether the sparse kernel takes these queries [T, H, 512] and rows of this format on this device."""
    return (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and q.shape[1] <= 128
        and row_format in (RowFormat.FP8, RowFormat.BF16)
        and has_kernel(q.device.index)
        and installed()
    )


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


class SparsePrefillReader:
    """Attention of one prefill step, layer by layer. Its memory grows to the largest step and stays.

    `blocks`: blocks of the entry tables.
    """

    def __init__(self, blocks: int, device: torch.device | str) -> None:
        self._places = torch.zeros(blocks, dtype=torch.int32, device=device)  # of a block among the step's
        self._table = torch.empty(0, ENTRY_DIM, dtype=torch.bfloat16, device=device)
        self._blocks: Tensor | None = None
        self._shared_lists: dict[int, tuple[Tensor, Tensor]] = {}
        self._window_size = 0

    def begin_step(self, step: StepMetadata, lengths: list[int]) -> bool:
        """Prepare for a step after which the requests have `lengths` tokens; False if it is better read elsewhere."""
        self._blocks = None
        self._shared_lists.clear()
        counts = [-(-length // BLOCK) for length in lengths]
        total = sum(counts)
        rows = step.window_size + ENTRIES_A_BLOCK * total
        if rows > min(MAX_ROWS, MAX_ROWS_A_TOKEN * step.positions.shape[0]):
            return False
        device = step.positions.device
        lens = step.prefix_lens + step.query_start.diff()
        count = (lens + (BLOCK - 1)) // BLOCK
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), count, output_size=total)
        place = torch.arange(total, device=device)
        column = place - (count.cumsum(0) - count)[owner]
        self._blocks = step.block_table[owner, column]
        # Requests that share a block put it in several places; any of them does.
        self._places[self._blocks.long()] = place.to(torch.int32)
        if self._table.shape[0] < rows:
            self._table = self._table.new_empty(rows, ENTRY_DIM)
        self._window_size = step.window_size
        return True

    @property
    def takes_step(self) -> bool:
        return self._blocks is not None

    def attend(
        self,
        q: Tensor,
        sink: Tensor,
        window: Tensor,
        window_rows: Tensor,
        window_lens: Tensor,
        entries: Tensor | None,
        entry_rows: Tensor | None,
        entry_lens: Tensor | None,
        positions: Tensor,
        rope: Tensor,
        scale: float,
        row_format: int,
        ratio: int,
        leave_rotated: bool = False,
    ) -> Tensor:
        """The op `attend` for one layer of compression `ratio` and all tokens of the step. `leave_rotated`: the caller
        derotates the output.
        """
        table = self._write_out(window, entries, row_format, BLOCK // ratio if ratio else 1)
        lists, lens = self._lists(window_rows, window_lens, entry_rows, entry_lens, ratio)
        heads = q.shape[1]
        padded = 64 if heads <= 64 else 128
        if padded != heads:
            q, sink = F.pad(q, (0, 0, 0, padded - heads)), F.pad(sink, (0, padded - heads))
        out = _sparse_attention(q, table, lists, lens, sink, scale)
        if padded != heads:
            out = out[:, :heads].contiguous()
        if not leave_rotated:
            derotate(out, positions, rope)
        return out

    def _write_out(self, window: Tensor, entries: Tensor | None, row_format: int, listed_rows: int) -> Tensor:
        """bf16 rows: the window workspace, then of each block of the step its `listed_rows` entries."""
        assert self._blocks is not None, "attend comes after a step that begin_step took"
        rows = self._window_size + (0 if entries is None else self._blocks.shape[0] * listed_rows)
        table = self._table[:rows]
        entries = window if entries is None else entries
        _write_out_kernel[(triton.cdiv(rows, _ROWS_A_PROGRAM),)](
            window,
            entries,
            self._blocks,
            table,
            self._window_size,
            rows,
            table_stride(window),
            table_stride(entries),
            window.shape[1],
            entries.shape[1],
            listed_rows,
            FP8=row_format == RowFormat.FP8.code,
            BLOCK_N=_ROWS_A_PROGRAM,
            num_warps=4,
        )
        return table

    def _lists(
        self,
        window_rows: Tensor,
        window_lens: Tensor,
        entry_rows: Tensor | None,
        entry_lens: Tensor | None,
        ratio: int,
    ) -> tuple[Tensor, Tensor]:
        """Places of a token's rows in the written table and their number; only CSA layers have lists of their own."""
        if ratio in self._shared_lists:
            return self._shared_lists[ratio]
        if entry_rows is None or entry_lens is None:
            entry_rows, entry_lens = window_rows[:, :0], torch.zeros_like(window_lens)
        tokens = entry_lens.shape[0]
        width = -(-(entry_rows.shape[1] + window_rows.shape[1]) // LIST_ALIGNMENT) * LIST_ALIGNMENT
        lists = window_rows.new_empty(tokens, width)
        lens = torch.empty_like(entry_lens)
        _join_kernel[(tokens,)](
            entry_rows,
            entry_lens,
            window_rows,
            window_lens,
            self._places,
            lists,
            lens,
            entry_rows.stride(0),
            window_rows.stride(0),
            width,
            self._window_size,
            BLOCK // ratio if ratio else 1,
            COLUMNS=256,
            num_warps=4,
        )
        if ratio != CSA_RATIO:
            self._shared_lists[ratio] = lists, lens
        return lists, lens
