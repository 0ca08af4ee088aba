"""`attend_v41` in Triton for any CUDA device from sm_80: entries of DeepSeek-V4.1 (SPEC 11.4, 11.6), any number of
heads.

The structure is that of `triton_attend`, with two KV formats: a program first processes its tiles of the window list
(FP8), then its tiles of the entry list (FP4). Entries are decoded to numbers that bf16 holds exactly: e4m3 and e2m1
values times their scales have at most six significant bits.

Traffic: 528 B per window entry and 288 B per compressed entry for each group of heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.base import EntryList
from dsv4_sglang.attention.tensor_checks import TensorChecker
from dsv4_sglang.attention.triton_entries import (
    AT1,
    AT2,
    DIM,
    NOPE,
    PIECE0,
    PIECE1,
    PIECE2,
    ROPE,
    SQRT_E4M3_FACTOR,
    e4m3_bits,
    exponent_to_scale,
    table_stride,
)
from dsv4_sglang.attention.triton_softmax import (
    add_tile,
    empty_sums,
    load_query,
    plan_launch,
    products,
    store_sums,
    tiles_of_split,
)
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.v41_entries import V41KVFormat

FP8_SCALES = tl.constexpr(V41KVFormat.FP8.scale_bytes)
FP8_GROUP = tl.constexpr(V41KVFormat.FP8.values_per_scale)
FP4_DATA = tl.constexpr(V41KVFormat.FP4.data_bytes)
FP4_SCALES = tl.constexpr(V41KVFormat.FP4.scale_bytes)
FP4_GROUP = tl.constexpr(V41KVFormat.FP4.values_per_scale)


@triton.jit
def e2m1(code):
    """Convert 4-bit e2m1 codes to fp32."""
    magnitude = code & 7
    exponent = tl.maximum(magnitude >> 1, 1)
    mantissa = tl.where(magnitude < 2, magnitude, 2 + (magnitude & 1))
    halves = (mantissa << (exponent - 1)).to(tl.float32)
    return tl.where((code & 8) != 0, -0.5, 0.5) * halves


@triton.jit
def e4m3(code):
    """Convert e4m3 bytes to fp32."""
    return e4m3_bits(code, tl.float32) * SQRT_E4M3_FACTOR * SQRT_E4M3_FACTOR


@triton.jit
def _e4m3_scale(code):
    """Convert bytes of e4m3 scales to fp32. Unlike `e4m3` it keeps NaN, the scale of values that were not finite."""
    return tl.where((code & 0x7F) == 0x7F, float("nan"), e4m3(code))


@triton.jit
def _dims(
    block_at, inside, entries_per_block, is_entry, FIRST, WIDTH: tl.constexpr, FP4: tl.constexpr, DOT: tl.constexpr
):
    """Load dims FIRST .. FIRST + WIDTH - 1 of the entries `inside` [N, 1] of the blocks at `block_at` [N, 1]."""
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    if FP4:
        codes = tl.load(block_at + inside * FP4_DATA + dim // 2, mask=is_entry, other=0).to(tl.int32)
        scale_at = block_at + entries_per_block * FP4_DATA + inside * FP4_SCALES + dim // FP4_GROUP
        scale = _e4m3_scale(tl.load(scale_at, mask=is_entry, other=0))
        value = e2m1((codes >> (dim % 2 * 4)) & 15) * scale
    else:
        codes = tl.load(block_at + inside * DIM + dim, mask=is_entry, other=0)
        scale_at = block_at + entries_per_block * DIM + inside * FP8_SCALES + dim // FP8_GROUP
        exponent = tl.load(scale_at, mask=is_entry, other=127).to(tl.int32)
        value = e4m3(codes) * exponent_to_scale(exponent)
    return value.to(DOT)


@triton.jit
def _read_tile(
    carry, q0, q1, q2, q3, table, indices_at, length, first, block_stride, entries_per_block, scale,
    FP4: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Perform one step of the online softmax over the entries `first` .. `first` + BLOCK_N - 1 of a list."""
    top, total, o0, o1, o2, o3 = carry
    listed = first + tl.arange(0, BLOCK_N)
    index = tl.load(indices_at + listed, mask=listed < length, other=-1)
    is_entry = (index >= 0)[:, None]
    block = index // entries_per_block
    inside = (index - block * entries_per_block)[:, None]
    block_at = table + (block.to(tl.int64) * tl.multiple_of(block_stride, 16))[:, None]
    k0 = _dims(block_at, inside, entries_per_block, is_entry, 0, PIECE0, FP4, DOT)
    k1 = _dims(block_at, inside, entries_per_block, is_entry, AT1, PIECE1, FP4, DOT)
    k2 = _dims(block_at, inside, entries_per_block, is_entry, AT2, PIECE2, FP4, DOT)
    k3 = _dims(block_at, inside, entries_per_block, is_entry, NOPE, ROPE, FP4, DOT)
    missing = tl.full([BLOCK_N], 1.0, tl.float32)
    return add_tile(
        top, total, o0, o1, o2, o3, q0, q1, q2, q3, k0, k1, k2, k3, index >= 0, missing, scale, False, DOT, PRECISION
    )


# Arguments, T tokens, H heads, S splits:
#   q [T, H, 512], sink fp32 [H]
#   window: FP8 KV buffer [blocks, entries per block, width], indices int32 [T, K], lens int32 [T]
#   entries: as window, FP4; without HAS_ENTRIES not read
#   positions int64 [T], rope fp32 [positions, 64], out [T, H, 512], with SPLIT partial fp32 [T, S, H, 512] and stats
#   fp32 [T, S, H, 2]
#   scale of the logits, H, S, strides of q in elements
#   window: strides of indices and blocks in elements, entries per block
#   entries: the same three
@triton.jit
def _attend_v41_kernel(
    q_ptr, sink_ptr,
    window_ptr, window_indices_ptr, window_lens_ptr,
    entries_ptr, entry_indices_ptr, entry_lens_ptr,
    positions_ptr, rope_ptr, out_ptr, partial_ptr, stats_ptr,
    scale, heads, splits, q_token_stride, q_head_stride,
    window_indices_stride, window_block_stride, window_entries_per_block,
    entry_indices_stride, entry_block_stride, compressed_entries_per_block,
    HAS_ENTRIES: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, splits, groups of BLOCK_H heads)."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < heads
    q_at = q_ptr + token * q_token_stride + head[:, None] * q_head_stride
    q0, q1, q2, q3 = load_query(q_at, is_head[:, None], False, DOT)
    window_len, entry_len, window_tiles, begin, end = tiles_of_split(
        window_lens_ptr, entry_lens_ptr, token, split, splits, HAS_ENTRIES, BLOCK_N
    )
    top, total, o0, o1, o2, o3 = empty_sums(BLOCK_H)
    for tile in tl.range(begin, tl.minimum(end, window_tiles)):
        top, total, o0, o1, o2, o3 = _read_tile(
            (top, total, o0, o1, o2, o3), q0, q1, q2, q3,
            window_ptr, window_indices_ptr + token * window_indices_stride, window_len, tile * BLOCK_N,
            window_block_stride, window_entries_per_block, scale, False, DOT, PRECISION, BLOCK_N,
        )  # fmt: skip
    if HAS_ENTRIES:
        for tile in tl.range(tl.maximum(begin, window_tiles), end):
            top, total, o0, o1, o2, o3 = _read_tile(
                (top, total, o0, o1, o2, o3), q0, q1, q2, q3,
                entries_ptr, entry_indices_ptr + token * entry_indices_stride, entry_len,
                (tile - window_tiles) * BLOCK_N, entry_block_stride, compressed_entries_per_block,
                scale, True, DOT, PRECISION, BLOCK_N,
            )  # fmt: skip
    store_sums(
        out_ptr, partial_ptr, stats_ptr, sink_ptr, positions_ptr, rope_ptr,
        token, split, splits, head, heads, is_head, begin < end, top, total, o0, o1, o2, o3, False, SPLIT, BLOCK_H,
    )  # fmt: skip


def attend_v41(
    q: Tensor,
    sink: Tensor,
    window: Tensor,
    window_indices: Tensor,
    window_lens: Tensor,
    entries: Tensor | None,
    entry_indices: Tensor | None,
    entry_lens: Tensor | None,
    positions: Tensor,
    rope: Tensor,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """Compute the op `attend_v41` (`dsv4_sglang.ops.reference.read_v41` documents the tensors).

    Kernel launches depend on shapes only and lengths are read on the device, so CUDA graphs can capture the call.
    `splits` is the number of splits; None chooses it.

    Returns:
        Output [T, H, 512] in the dtype of `q`.

    Raises:
        ValueError: a tensor has another dtype, shape, stride, alignment or device than the kernel reads.
    """
    check = TensorChecker("attend_v41", q.device)
    check.query(q, sink)
    check.rotation(q.shape[0], positions, rope)
    check.listed("window", EntryList(window, window_indices, window_lens), V41KVFormat.FP8, q.shape[0])
    has_entries = entries is not None and entry_indices is not None and entry_lens is not None
    if entries is None or entry_indices is None or entry_lens is None:
        entries, entry_indices, entry_lens = window, window_indices, window_lens
    else:
        check.listed("entries", EntryList(entries, entry_indices, entry_lens), V41KVFormat.FP4, q.shape[0])
    dot, precision = products(q.dtype, KVFormat.FP8)
    listed = window_indices.shape[1] + (entry_indices.shape[1] if has_entries else 0)
    launch = plan_launch(q, listed, False, dot == tl.float32, splits)
    if q.shape[0] == 0:
        return launch.out
    _attend_v41_kernel[launch.grid](
        *(q, sink, window, window_indices, window_lens, entries, entry_indices, entry_lens),
        *(positions, rope, launch.out, launch.partial, launch.stats),
        *(scale, q.shape[1], launch.splits, q.stride(0), q.stride(1)),
        *(window_indices.stride(0), table_stride(window), window.shape[1]),
        *(entry_indices.stride(0), table_stride(entries), entries.shape[1]),
        HAS_ENTRIES=has_entries,
        SPLIT=launch.splits > 1,
        DOT=dot,
        PRECISION=precision,
        BLOCK_H=launch.tile.heads,
        BLOCK_N=launch.tile.rows,
        num_warps=launch.tile.warps,
    )
    return launch.merge(sink, positions, rope)
