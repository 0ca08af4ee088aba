"""Common parts of the Triton attention kernels: online softmax over tiles of entries, merge of splits, tile sizes.

An entry is both key and value and comes in four pieces (`triton_entries`). With `FOLD` the pieces without RoPE are too
small by a power of two. Half of this factor is applied to the query, half (`missing`) to the logits and the
probabilities (`triton_attend`).
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.triton_entries import (
    DIM,
    PIECE0,
    PIECE1,
    PIECE2,
    ROPE,
    SQRT_E4M3_FACTOR,
    angles,
    inverse_rope_dims,
    inverse_rope_pairs,
    load_pieces,
    store_pieces,
)
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM

LOG2_E = tl.constexpr(1.4426950408889634)
# Initial value of the online maximum. With -inf, -inf - (-inf) would give NaN.
NO_LOGIT = tl.constexpr(-1e30)
# Triton's interpreter multiplies the bits of bf16 operands as integers, so products are computed in fp32 there.
_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def tiles_of_split(
    window_lens_ptr, entry_lens_ptr, token, split, splits, HAS_ENTRIES: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the lengths of a token's two lists, the number of window tiles, and the first tile and end of a split.

    Tiles of the window list come first, then tiles of the entry list.
    """
    window_len = tl.load(window_lens_ptr + token)
    window_tiles = tl.cdiv(window_len, BLOCK_N)
    tiles = window_tiles
    entry_len = window_len
    if HAS_ENTRIES:
        entry_len = tl.load(entry_lens_ptr + token)
        tiles += tl.cdiv(entry_len, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    begin = tl.minimum(split * share, tiles)
    return window_len, entry_len, window_tiles, begin, tl.minimum(begin + share, tiles)


@triton.jit
def empty_sums(BLOCK_H: tl.constexpr):
    """Return the state of the online softmax before the first tile: maximum, sum, four accumulators."""
    top, total = tl.full([BLOCK_H], NO_LOGIT, tl.float32), tl.zeros([BLOCK_H], tl.float32)
    o0, o1 = tl.zeros([BLOCK_H, PIECE0], tl.float32), tl.zeros([BLOCK_H, PIECE1], tl.float32)
    return top, total, o0, o1, tl.zeros([BLOCK_H, PIECE2], tl.float32), tl.zeros([BLOCK_H, ROPE], tl.float32)


@triton.jit
def load_query(at, is_head, FOLD: tl.constexpr, DOT: tl.constexpr):
    """Load the query in four pieces, with FOLD multiplied by half of the factor that the keys are missing."""
    q0, q1, q2, q3 = load_pieces(at, is_head, DOT)
    if FOLD:
        # Exact. Also, a computed query reaches the tensor cores through registers, which is faster.
        q0 = (q0 * SQRT_E4M3_FACTOR).to(DOT)
        q1 = (q1 * SQRT_E4M3_FACTOR).to(DOT)
        q2 = (q2 * SQRT_E4M3_FACTOR).to(DOT)
    return q0, q1, q2, q3


@triton.jit
def logits(q0, q1, q2, q3, k0, k1, k2, k3, missing, FOLD: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products of queries and keys [BLOCK_H, BLOCK_N]."""
    logit = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    logit = tl.dot(q1, tl.trans(k1), logit, input_precision=PRECISION)
    logit = tl.dot(q2, tl.trans(k2), logit, input_precision=PRECISION)
    if FOLD:
        logit = logit * missing[None, :]
    return tl.dot(q3, tl.trans(k3), logit, input_precision=PRECISION)


@triton.jit
def add_tile(
    top, total, o0, o1, o2, o3, q0, q1, q2, q3, k0, k1, k2, k3, valid, missing, scale,
    FOLD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Perform one step of the online softmax over the `valid` ones of a tile's entries. Return its state after it."""
    logit = logits(q0, q1, q2, q3, k0, k1, k2, k3, missing, FOLD, PRECISION)
    logit = tl.where(valid[None, :], logit * (scale * LOG2_E), float("-inf"))
    new_top = tl.maximum(top, tl.max(logit, 1))
    rescale = tl.exp2(top - new_top)
    p = tl.exp2(logit - new_top[:, None])
    total = total * rescale + tl.sum(p, 1)
    rescale = rescale[:, None]
    tail_p = p.to(DOT)
    if FOLD:
        # Apply the second half of the missing factor after the product of keys, so that intermediate values stay far
        # from the subnormal range.
        p = p * missing[None, :]
    p = p.to(DOT)
    o0 = tl.dot(p, k0, o0 * rescale, input_precision=PRECISION)
    o1 = tl.dot(p, k1, o1 * rescale, input_precision=PRECISION)
    o2 = tl.dot(p, k2, o2 * rescale, input_precision=PRECISION)
    # Not accumulated by tl.dot: this product would overlap with that of the next tile, and ptxas would serialise all of
    # them.
    o3 = tl.fma(o3, rescale, tl.dot(tail_p, k3, input_precision=PRECISION))
    return new_top, total, o0, o1, o2, o3


@triton.jit
def inverse_denominator(sink, top, total):
    """Return 1 / (softmax denominator), given the maximum and sum over the keys and the sink.

    A token without keys gives 0, also if its sink is -inf.
    """
    return tl.where(total > 0, 1.0 / (total + tl.exp2(sink * LOG2_E - top)), 0.0)


@triton.jit
def store_sums(
    out_ptr, partial_ptr, stats_ptr, sink_ptr, positions_ptr, rope_ptr,
    token, split, splits, head, heads, is_head, has_keys, top, total, o0, o1, o2, o3,
    FOLD: tl.constexpr, SPLIT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Store the sums of entries, normalised and with the inverse RoPE applied. With SPLIT store a split for
    `merge_kernel`: maximum, sum and, if there were keys, the weighted sum of entries.
    """
    if SPLIT:
        at = (token * splits + split) * heads + head
        tl.store(stats_ptr + at * 2, top, mask=is_head)
        tl.store(stats_ptr + at * 2 + 1, total, mask=is_head)
        if FOLD:
            o0, o1, o2 = o0 * SQRT_E4M3_FACTOR, o1 * SQRT_E4M3_FACTOR, o2 * SQRT_E4M3_FACTOR
        store_pieces(partial_ptr + at[:, None] * DIM, o0, o1, o2, o3, is_head[:, None] & has_keys)
    else:
        at = token * heads + head
        norm = inverse_denominator(tl.load(sink_ptr + head, mask=is_head, other=0.0), top, total)
        angle_at = rope_ptr + tl.load(positions_ptr + token) * ROPE
        to = out_ptr + at[:, None] * DIM
        nope_norm = norm
        if FOLD:
            nope_norm = norm * SQRT_E4M3_FACTOR
        norm, nope_norm = norm[:, None], nope_norm[:, None]
        o3 = o3 * norm
        angle_at += tl.arange(0, ROPE // 2) * 2
        o3 = inverse_rope_dims(o3, tl.load(angle_at), tl.load(angle_at + 1), BLOCK_H)
        store_pieces(to, o0 * nope_norm, o1 * nope_norm, o2 * nope_norm, o3, is_head[:, None])


@triton.jit
def merge_kernel(
    partial_ptr, stats_ptr, sink_ptr, positions_ptr, rope_ptr, out_ptr, heads, splits, BLOCK_S: tl.constexpr
):
    """Grid (tokens, heads). Merge the splits of a head, weighted by their share of the softmax, and add the sink."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    at = ((token * splits + split) * heads + head) * 2
    top = tl.load(stats_ptr + at, mask=split < splits, other=NO_LOGIT)
    total = tl.load(stats_ptr + at + 1, mask=split < splits, other=0.0)
    highest = tl.max(top, 0)
    total = total * tl.exp2(top - highest)
    inverse = inverse_denominator(tl.load(sink_ptr + head), highest, tl.sum(total, 0))

    d = tl.arange(0, DIM)
    o = tl.zeros([DIM], tl.float32)
    for first in range(0, splits, 8):
        piece = first + tl.arange(0, 8)
        at_piece = (token * splits + piece) * heads + head
        seen = tl.load(stats_ptr + at_piece * 2 + 1, mask=piece < splits, other=0.0)
        peak = tl.load(stats_ptr + at_piece * 2, mask=piece < splits, other=NO_LOGIT)
        # A split without keys stored no partial sum.
        row = tl.load(partial_ptr + at_piece[:, None] * DIM + d[None, :], mask=(seen > 0)[:, None], other=0.0)
        o += tl.sum(row * tl.exp2(peak - highest)[:, None], 0)
    even, odd = tl.split(tl.reshape(o * inverse, [DIM // 2, 2]))
    cos, sin = angles(rope_ptr, tl.load(positions_ptr + token))
    o = tl.reshape(inverse_rope_pairs(even, odd, cos, sin), [DIM])
    tl.store(out_ptr + (token * heads + head) * DIM + d, o.to(out_ptr.dtype.element_ty))


class Tiling(NamedTuple):
    """Tile sizes of a program.

    Attributes:
        heads: heads per tile.
        rows: entries per tile.
        warps: warps per program.
        stages: stages of the software pipeline.
    """

    heads: int
    rows: int
    warps: int
    stages: int


def tiling(heads: int, fp8: bool, exact: bool, shared_memory: int) -> Tiling:
    """Return the tile sizes for a device.

    The output of a tile takes 2 KiB of registers per head. Shared memory holds q (1 KiB per head), the decoded entries
    (1 KiB each) and the entries in flight. Only from sm_90 do the tensor cores read both operands from shared memory,
    which leaves enough registers for 64 heads.

    Args:
        heads: number of query heads.
        fp8: entries are FP8.
        exact: products are fp32.
        shared_memory: bytes of shared memory available to a thread block.
    """
    padded = max(16, triton.next_power_of_2(heads))
    if exact:
        return Tiling(16, 16, 4, 1)
    if padded >= 64 and shared_memory >= 200 << 10:
        return Tiling(64, 64, 8, 5) if fp8 else Tiling(64, 32, 8, 3)
    return Tiling(min(padded, 32), 32, 8, 3 if fp8 else 2)


def split_count(tokens: int, head_groups: int, tiles: int, processors: int) -> int:
    """Return the number of splits that minimises the estimated run time.

    The time is estimated in tiles: each program costs its tiles plus one, and the merge costs half a tile plus 0.05 per
    partial result.

    Args:
        tokens: number of tokens.
        head_groups: programs per token and split.
        tiles: largest number of tiles of a token.
        processors: multiprocessors, which run one program at a time each.
    """

    def cost(splits: int) -> float:
        waves = -(-tokens * head_groups * splits // processors)
        return waves * (-(-tiles // splits) + 1) + (0.5 + 0.05 * splits if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, 128)) + 1), key=cost)


@functools.cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the bytes of shared memory available to a thread block and the number of multiprocessors."""
    if device.type == "cpu":  # Triton's interpreter
        return 0, 1
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"], properties["multiprocessor_count"]


def products(q: torch.dtype, stored: KVFormat) -> tuple[tl.dtype, str]:
    """Return dtype and input precision of the products of queries and entries.

    bf16 queries with fp8 and bf16 entries use bf16 tensor cores. fp16 queries use tf32 tensor cores, which represent
    both operands exactly. All fp32 products run without tensor cores.

    Args:
        q: dtype of the queries: bf16, fp16 or fp32.
        stored: format of the entries.
    """
    if stored is KVFormat.FP32 or q == torch.float32:
        return tl.float32, "ieee"
    if q == torch.bfloat16:
        return (tl.float32, "ieee") if _INTERPRETED else (tl.bfloat16, "tf32")
    return tl.float32, "tf32"


class Launch(NamedTuple):
    """A call of an attention kernel of this package: its grid, its tile sizes, and the tensors that it writes.

    Attributes:
        out: [T, H, 512], output.
        splits: programs that share the lists of a token.
        grid: (tokens, splits, groups of heads).
        tile: tile sizes of a program.
        partial, stats: fp32, partial results of the splits. Unused tensors with one split.
    """

    out: Tensor
    splits: int
    grid: tuple[int, int, int]
    tile: Tiling
    partial: Tensor
    stats: Tensor

    def merge(self, sink: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
        """Merge the partial results of the kernel, if there are several. Return `out`."""
        if self.splits > 1:
            tokens, heads, _ = self.out.shape
            merge_kernel[(tokens, heads)](
                *(self.partial, self.stats, sink, positions, rope, self.out, heads, self.splits),
                BLOCK_S=triton.next_power_of_2(self.splits),
                num_warps=4,
            )
        return self.out


def plan_launch(q: Tensor, listed: int, fp8: bool, exact: bool, splits: int | None) -> Launch:
    """Choose grid and tile sizes and allocate the output.

    Args:
        q: queries [T, H, 512].
        listed: largest number of entries that a token lists.
        fp8: entries are FP8.
        exact: products are fp32.
        splits: number of splits; None chooses it.
    """
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shared_memory, processors = device_limits(q.device)
    tile = tiling(heads, fp8, exact, shared_memory)
    groups = triton.cdiv(heads, tile.heads)
    if splits is None:
        splits = split_count(tokens, groups, triton.cdiv(listed, tile.rows), processors)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(tokens, splits, heads, ENTRY_DIM, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, splits, heads, 2, dtype=torch.float32, device=q.device)
    return Launch(out, splits, (tokens, splits, groups), tile, partial, stats)
