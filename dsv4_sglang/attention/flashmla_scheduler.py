"""FlashMLA's tile scheduler for a decode step, in Triton: assigns tokens and blocks of 64 entries to SM parts.

FlashMLA's own scheduling kernel takes 26 us on an H200, and 72 us for 1,024 tokens, once a step for each kind of layer,
on the critical path. This one writes the same numbers (`flashmla.scheduler_config` compares them when a server starts).
The cost of a token is its number of blocks of 64 entries plus `fixed_overhead` blocks. Parts are filled in order: each
takes tokens up to a total cost of ceil(total cost / num_sm_parts) + `fixed_overhead`, and of the last token as many
blocks as still fit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# int32 fields of a part: first token, last token, first block of the first token, end block of the last token, index of
# the split that the first block belongs to, whether the first and the last token are shared with other parts, unused.
FIELDS = 8
# KV entries in a block, the unit of the schedule.
BLOCK_ENTRIES = 64


@triton.jit
def _blocks(window_lens_ptr, entry_lens_ptr, t, mask, HAS_ENTRIES: tl.constexpr, BLOCK_ENTRIES: tl.constexpr):
    """Return the number of blocks that each token t reads, 0 where not `mask`, else at least one: blocks of the window
    and blocks of the entries."""
    blocks = tl.cdiv(tl.maximum(tl.load(window_lens_ptr + t, mask=mask, other=0), 1), BLOCK_ENTRIES)
    if HAS_ENTRIES:
        blocks += tl.cdiv(tl.load(entry_lens_ptr + t, mask=mask, other=0), BLOCK_ENTRIES)
    return tl.where(mask, blocks, 0)


@triton.jit
def _at(values, numbers, n):
    """Return the element of `values` whose number is n, 0 if there is none."""
    return tl.sum(tl.where(numbers == n, values, 0))


@triton.jit
def _schedule_kernel(
    window_lens_ptr,
    entry_lens_ptr,
    parts_ptr,
    splits_ptr,
    tokens,
    num_sm_parts,
    fixed_overhead,
    HAS_ENTRIES: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (1), one warp. `LANES` tokens at a time, of which each iteration of the inner loop handles those up to the
    next token that does not fit into its part. `PARTS` is a power of two, at least `num_sm_parts`. Every field is
    written once."""
    lane = tl.arange(0, LANES)
    cost = tokens * fixed_overhead
    for begin in range(0, tokens, LANES):
        t = begin + lane
        cost += tl.sum(_blocks(window_lens_ptr, entry_lens_ptr, t, t < tokens, HAS_ENTRIES, BLOCK_ENTRIES))
    share = tl.cdiv(cost, num_sm_parts)

    # State of the current part: its index, its remaining budget, its first token and the first block within that token.
    part, left, first, first_cut = 0, share + fixed_overhead, 0, 0
    splits, before = 0, 0
    tl.store(parts_ptr, 0)
    tl.store(parts_ptr + 2, 0)
    tl.store(parts_ptr + 4, 0)
    tl.store(splits_ptr, 0)
    for begin in range(0, tokens, LANES):
        t = begin + lane
        is_token = t < tokens
        blocks = _blocks(window_lens_ptr, entry_lens_ptr, t, is_token, HAS_ENTRIES, BLOCK_ENTRIES)
        end_cost = tl.cumsum(tl.where(is_token, blocks + fixed_overhead, 0))
        token_splits = is_token.to(tl.int32)
        # `placed`: cost of the tokens up to the last one that did not fit. `n`: the next one that does not.
        placed = 0
        n = tl.sum((end_cost <= left).to(tl.int32))
        while n < LANES:
            token, token_blocks = begin + n, _at(blocks, lane, n)
            token_end = _at(end_cost, lane, n)
            before = tl.where(n > 0, _at(blocks, lane, n - 1), before)
            # The current part takes `head` blocks of this token. `more` parts begin inside it, at blocks `at`.
            head = tl.maximum(left - (token_end - token_blocks - placed), 0)
            more = tl.cdiv(token_blocks - head, share)
            for first_j in range(0, more, LANES):
                j = first_j + lane
                at = head + j * share
                begins = parts_ptr + (part + 1 + j) * FIELDS
                tl.store(begins, token, mask=j < more)
                tl.store(begins + 2, at, mask=j < more)
                tl.store(begins + 4, j + (head > 0), mask=j < more)
                # Each previous part ends where the next one begins.
                ends = begins - FIELDS
                cut = at > 0
                last = tl.where(cut, token, token - 1)
                begun_at, begun_cut = tl.where(j > 0, token, first), tl.where(j > 0, at > share, first_cut > 0)
                alone = (begun_at == last) & (begun_cut | cut)
                tl.store(ends + 1, last, mask=j < more)
                tl.store(ends + 3, tl.where(cut, at, before), mask=j < more)
                tl.store(ends + 5, (begun_cut | alone).to(tl.int32), mask=j < more)
                tl.store(ends + 6, (cut | alone).to(tl.int32), mask=j < more)
            part += more
            token_splits = tl.where(lane == n, more + (head > 0), token_splits)
            first = token
            first_cut = head + (more - 1) * share
            left = share - (token_blocks - first_cut)
            placed = token_end
            n = tl.sum((end_cost <= placed + left).to(tl.int32))
        left -= tl.max(end_cost) - placed
        before = _at(blocks, t, tl.minimum(begin + LANES, tokens) - 1)
        tl.store(splits_ptr + 1 + t, splits + tl.cumsum(token_splits), mask=is_token)
        splits += tl.sum(token_splits)
    # The last part with work, and the parts without work after it.
    j = tl.arange(0, PARTS)
    unused = (j > part) & (j < num_sm_parts)
    ends = parts_ptr + j * FIELDS
    tl.store(ends, tokens, mask=unused)
    tl.store(ends + 2, 0, mask=unused)
    tl.store(ends + 4, 0, mask=unused)
    alone = (j == part) & (first == tokens - 1) & (first_cut > 0)
    mask = (j >= part) & (j < num_sm_parts)
    tl.store(ends + 1, tokens - 1, mask=mask)
    tl.store(ends + 3, before, mask=mask)
    tl.store(ends + 5, ((j == part) & (first_cut > 0)).to(tl.int32), mask=mask)
    tl.store(ends + 6, alone.to(tl.int32), mask=mask)


def build(
    window_lens: Tensor, entry_lens: Tensor | None, num_sm_parts: int, fixed_overhead: int
) -> tuple[Tensor, Tensor]:
    """Return FlashMLA's `tile_scheduler_metadata` and `num_splits` for T >= 1 tokens. Device work only.

    Args:
        window_lens: int32 [T], window entries of each token.
        entry_lens: int32 [T], compressed entries of each token; None if the layer has none.
        num_sm_parts: see `flashmla.SchedulerConfig`.
        fixed_overhead: see `flashmla.SchedulerConfig`.

    Returns:
        Parts int32 [num_sm_parts, 8] and cumulative splits int32 [T + 1].
    """
    tokens = window_lens.shape[0]
    metadata, splits = window_lens.new_empty(num_sm_parts, FIELDS), window_lens.new_empty(tokens + 1)
    _schedule_kernel[(1,)](
        window_lens,
        window_lens if entry_lens is None else entry_lens,
        metadata,
        splits,
        tokens,
        num_sm_parts,
        fixed_overhead,
        HAS_ENTRIES=entry_lens is not None,
        BLOCK_ENTRIES=BLOCK_ENTRIES,
        FIELDS=FIELDS,
        PARTS=triton.next_power_of_2(num_sm_parts),
        LANES=32,
        num_warps=1,
    )
    return metadata, splits
