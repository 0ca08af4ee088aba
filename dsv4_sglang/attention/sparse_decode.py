"""`attend` of a decode or verify step through FlashMLA's sparse bf16 kernel, for V4.1 (SPEC 11.6).

FlashMLA's decode kernels do not read V4.1's formats on sm_90. Here the listed entries of each token are decoded to a
bf16 buffer, where they are consecutive, and the sparse kernel reads that buffer (entries of all formats are exact in
bf16). Selected entries are decoded when a layer selects them, and stay for the layers that reuse the selection. Window
entries are decoded in each layer. The kernel does not split lists, so few tokens do not fill the GPU. Even so a step of
one token is not slower than with the Triton kernel, which reads the KV buffers in place and decodes in every layer.

Bytes per token: 528 read and 1024 written per window entry and layer, 288 read and 1024 written per selected entry and
selecting layer, 1024 read per entry and layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.base import AttendInputs, EntryList
from dsv4_sglang.attention.flashmla import FlashMLAKernel
from dsv4_sglang.attention.sparse_prefill import JOINED_ALIGNMENT, MAX_GATHERED, sparse_attention
from dsv4_sglang.attention.triton_entries import DIM, block_scaled_dims, table_stride
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM

_ENTRIES_PER_PROGRAM = 16


@triton.jit
def _decode_kernel(
    table_ptr, indices_ptr, lens_ptr, out_ptr, indices_stride, width, block_stride, entries_per_block,
    FP4: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, groups of BLOCK_N columns). Decode the listed entries of a token to rows of `width` entries. FP4:
    they are NVFP4 entries, else MXFP8."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    listed = column < tl.load(lens_ptr + t)
    index = tl.load(indices_ptr + t * indices_stride + column, mask=listed, other=-1)
    is_entry = (index >= 0)[:, None]
    block = index // entries_per_block
    inside = (index - block * entries_per_block)[:, None]
    block_at = table_ptr + (block.to(tl.int64) * block_stride)[:, None]
    value = block_scaled_dims(block_at, inside, entries_per_block, is_entry, 0, DIM, FP4, tl.bfloat16)
    out_at = out_ptr + (t * width + column)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out_at, value, mask=is_entry)


@triton.jit
def _number_kernel(
    entry_indices_ptr, entry_lens_ptr, window_indices_ptr, window_lens_ptr, out_ptr, out_lens_ptr,
    entry_indices_stride, window_indices_stride, width, entry_width, window_width, first_entry,
    HAS_ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). Write the token's list in the decoded buffer: compressed entries, window entries, then -1."""
    t = tl.program_id(0).to(tl.int64)
    entries = tl.load(entry_lens_ptr + t) if HAS_ENTRIES else 0
    total = entries + tl.load(window_lens_ptr + t)
    tl.store(out_lens_ptr + t, total)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_entry = column < entries
        index = tl.load(entry_indices_ptr + t * entry_indices_stride + column, mask=is_entry, other=-1)
        in_window = (column >= entries) & (column < total)
        at = window_indices_ptr + t * window_indices_stride + column - entries
        window_index = tl.load(at, mask=in_window, other=-1)
        entry = tl.where(index >= 0, first_entry + t * entry_width + column, -1)
        window_entry = tl.where(window_index >= 0, t * window_width + column - entries, -1)
        tl.store(
            out_ptr + t * width + column,
            tl.where(is_entry, entry, window_entry).to(tl.int32),
            mask=column < width,
        )


class SparseDecodeAttention(FlashMLAKernel):
    """Attention of one decode or verify step.

    The buffers of a step are allocated when it begins, in the graph's own memory if it is recorded.

    Args:
        top_k: entries that a token selects.
    """

    kv_formats = (KVFormat.MXFP8,)

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._table: Tensor | None = None  # bf16, window entries of all tokens, then their selected entries
        self._lists: dict[bool, tuple[Tensor, Tensor]] = {}

    def begin_step(self, step: StepMetadata, most_blocks: int | None) -> bool:
        """Allocate the buffer. Return False for a prefill step, and for very many tokens."""
        self.free_scratch()
        tokens, window = step.window_indices.shape
        total = tokens * (window + self._top_k)
        if not step.is_decode or total > MAX_GATHERED:
            return False
        self._table = torch.empty(total, ENTRY_DIM, dtype=torch.bfloat16, device=step.positions.device)
        return True

    def free_scratch(self) -> None:
        self._table = None
        self._lists.clear()

    def _rotated(self, q: Tensor, inputs: AttendInputs) -> Tensor:
        assert self._table is not None, "call `begin_step` before `attend`"
        window, entries = inputs.window, inputs.entries
        first_entry = window.indices.numel()
        self._decode(window, inputs.kv_format, self._table[:first_entry])
        has_entries = entries is not None
        if inputs.selects or has_entries not in self._lists:
            if entries is not None:
                self._decode(entries, inputs.entry_format, self._table[first_entry:])
            self._lists[has_entries] = _numbered(window, entries)
        return sparse_attention(q, self._table, *self._lists[has_entries], inputs.sink, inputs.scale)

    def _decode(self, listed: EntryList, stored: KVFormat, out: Tensor) -> None:
        """Decode the entries of `listed` to `out`, a row of its width for each token."""
        tokens, width = listed.indices.shape
        _decode_kernel[(tokens, triton.cdiv(width, _ENTRIES_PER_PROGRAM))](
            *(listed.table, listed.indices, listed.topk_length, out, listed.indices.stride(0), width),
            *(table_stride(listed.table), listed.table.shape[1]),
            FP4=stored is KVFormat.NVFP4,
            BLOCK_N=_ENTRIES_PER_PROGRAM,
            num_warps=4,
        )


def _numbered(window: EntryList, entries: EntryList | None) -> tuple[Tensor, Tensor]:
    """Return the lists of all tokens in the decoded buffer [T, n] and their lengths [T]."""
    tokens, window_width = window.indices.shape
    entry_width = 0 if entries is None else entries.indices.shape[1]
    width = -(-(window_width + entry_width) // JOINED_ALIGNMENT) * JOINED_ALIGNMENT
    lists, lens = window.indices.new_empty(tokens, width), torch.empty_like(window.topk_length)
    of_entries = window if entries is None else entries
    _number_kernel[(tokens,)](
        *(of_entries.indices, of_entries.topk_length, window.indices, window.topk_length, lists, lens),
        *(of_entries.indices.stride(0), window.indices.stride(0), width, entry_width, window_width),
        window.indices.numel(),
        HAS_ENTRIES=entries is not None,
        COLUMNS=256,
        num_warps=4,
    )
    return lists, lens
