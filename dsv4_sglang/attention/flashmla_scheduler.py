"""FlashMLA's schedule of a decode step in Triton: which part of its lists each of FlashMLA's parts reads.

FlashMLA's own kernel for it takes 26 us on an H200, once a step for each kind of layer, and every layer waits for it.
This one writes the same numbers (`flashmla.shares` compares them when a server starts): a token costs its blocks of 64
rows and `overhead` blocks more, and each part in turn takes tokens of together ceil(cost of all / parts) + `overhead`,
of the last as many blocks as that leaves room for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FIELDS = 8
"""int32 numbers of a part: first and last token; first block of the first, end block of the last; number of the split
that the first block begins; whether the first and whether the last token is read by other parts, too; nothing."""
BLOCK_ROWS = 64


@triton.jit
def _blocks(window_lens_ptr, entry_lens_ptr, t, mask, HAS_ENTRIES: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Blocks that token t reads, at least one: those of the window, then those of the entries."""
    blocks = tl.cdiv(tl.maximum(tl.load(window_lens_ptr + t, mask=mask, other=0), 1), BLOCK_ROWS)
    if HAS_ENTRIES:
        blocks += tl.cdiv(tl.load(entry_lens_ptr + t, mask=mask, other=0), BLOCK_ROWS)
    return blocks


@triton.jit
def _schedule_kernel(
    window_lens_ptr,
    entry_lens_ptr,
    parts_ptr,
    splits_ptr,
    tokens,
    parts,
    overhead,
    HAS_ENTRIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS_AT_ONCE: tl.constexpr,
):
    """Grid (1). `PARTS`: a power of two, at least `parts`. Every number is written once."""
    cost = tokens * overhead
    for begin in range(0, tokens, TOKENS_AT_ONCE):
        t = begin + tl.arange(0, TOKENS_AT_ONCE)
        blocks = _blocks(window_lens_ptr, entry_lens_ptr, t, t < tokens, HAS_ENTRIES, BLOCK_ROWS)
        cost += tl.sum(tl.where(t < tokens, blocks, 0))
    share = tl.cdiv(cost, parts)

    j = tl.arange(0, PARTS)
    # The part under way: its number, what it may still take, the token that it began with, and whether inside of it.
    part, left, first, first_cut = 0, share + overhead, 0, 0
    splits, before = 0, 0
    tl.store(parts_ptr, 0)
    tl.store(parts_ptr + 2, 0)
    tl.store(parts_ptr + 4, 0)
    tl.store(splits_ptr, 0)
    for t in range(tokens):
        blocks = _blocks(window_lens_ptr, entry_lens_ptr, t, True, HAS_ENTRIES, BLOCK_ROWS)
        if left >= blocks + overhead:
            left -= blocks + overhead
            splits += 1
        else:
            # The part under way takes `head` blocks; `more` parts begin in this token, at blocks `at`.
            head = tl.maximum(left - overhead, 0)
            more = tl.cdiv(blocks - head, share)
            at = head + j * share
            begins = parts_ptr + (part + 1 + j) * FIELDS
            tl.store(begins, t, mask=j < more)
            tl.store(begins + 2, at, mask=j < more)
            tl.store(begins + 4, j + (head > 0), mask=j < more)
            # The part before each ends where it begins.
            ends = begins - FIELDS
            cut = at > 0
            last = tl.where(cut, t, t - 1)
            begun_at, begun_cut = tl.where(j > 0, t, first), tl.where(j > 0, at > share, first_cut > 0)
            alone = (begun_at == last) & (begun_cut | cut)
            tl.store(ends + 1, last, mask=j < more)
            tl.store(ends + 3, tl.where(cut, at, before), mask=j < more)
            tl.store(ends + 5, (begun_cut | alone).to(tl.int32), mask=j < more)
            tl.store(ends + 6, (cut | alone).to(tl.int32), mask=j < more)
            part += more
            splits += more + (head > 0)
            first = t
            first_cut = head + (more - 1) * share
            left = share - (blocks - first_cut)
        before = blocks
        tl.store(splits_ptr + t + 1, splits)
    # The last part that reads anything, and those behind it.
    unused = (j > part) & (j < parts)
    ends = parts_ptr + j * FIELDS
    tl.store(ends, tokens, mask=unused)
    tl.store(ends + 2, 0, mask=unused)
    tl.store(ends + 4, 0, mask=unused)
    alone = (j == part) & (first == tokens - 1) & (first_cut > 0)
    mask = (j >= part) & (j < parts)
    tl.store(ends + 1, tokens - 1, mask=mask)
    tl.store(ends + 3, before, mask=mask)
    tl.store(ends + 5, ((j == part) & (first_cut > 0)).to(tl.int32), mask=mask)
    tl.store(ends + 6, alone.to(tl.int32), mask=mask)


def build(window_lens: Tensor, entry_lens: Tensor | None, parts: int, overhead: int) -> tuple[Tensor, Tensor]:
    """What FlashMLA takes, (parts [parts, 8], splits [T + 1]), int32: the splits of all tokens before each.

    Of T >= 1 tokens that read `window_lens` [T] and `entry_lens` [T] int32 rows. Device work only.
    """
    tokens = window_lens.shape[0]
    metadata, splits = window_lens.new_empty(parts, FIELDS), window_lens.new_empty(tokens + 1)
    _schedule_kernel[(1,)](
        window_lens,
        window_lens if entry_lens is None else entry_lens,
        metadata,
        splits,
        tokens,
        parts,
        overhead,
        HAS_ENTRIES=entry_lens is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        FIELDS=FIELDS,
        PARTS=triton.next_power_of_2(parts),
        TOKENS_AT_ONCE=128,
        num_warps=1,
    )
    return metadata, splits
