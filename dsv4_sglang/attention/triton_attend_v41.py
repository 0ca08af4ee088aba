"""`attend_v41` in Triton for any CUDA device from sm_80: entries of DeepSeek-V4.1 (SPEC 11.4, 11.6), any number of
heads.

The structure is that of `triton_attend`, with two KV formats: a program first processes its tiles of the window list
(FP8), then its tiles of the entry list (FP4). Entries are decoded to numbers that bf16 holds exactly: e4m3 and e2m1
values times their scales have at most six significant bits.

Traffic: 528 B per window entry and 288 B per compressed entry for each group of heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    LOG2_E,
    NO_LOGIT,
    add,
    device_limits,
    inverse_denominator,
    load_query,
    logits,
    merge_kernel,
    products,
    split_count,
    store_output,
    store_partial,
    tiling,
    weigh,
)
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
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
def _dims(
    block_at, inside, entries_per_block, is_entry, FIRST, WIDTH: tl.constexpr, FP4: tl.constexpr, DOT: tl.constexpr
):
    """Load dims FIRST .. FIRST + WIDTH - 1 of the entries `inside` [N, 1] of the blocks at `block_at` [N, 1]."""
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    if FP4:
        codes = tl.load(block_at + inside * FP4_DATA + dim // 2, mask=is_entry, other=0).to(tl.int32)
        scale_at = block_at + entries_per_block * FP4_DATA + inside * FP4_SCALES + dim // FP4_GROUP
        scale = e4m3(tl.load(scale_at, mask=is_entry, other=0))
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
    logit = logits(q0, q1, q2, q3, k0, k1, k2, k3, missing, False, PRECISION)
    logit = tl.where((index >= 0)[None, :], logit * (scale * LOG2_E), float("-inf"))
    p, rescale, top, total = weigh(logit, top, total)
    o0, o1, o2, o3 = add(p, k0, k1, k2, k3, missing, o0, o1, o2, o3, rescale[:, None], False, DOT, PRECISION)
    return top, total, o0, o1, o2, o3


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

    window_len = tl.load(window_lens_ptr + token)
    window_tiles = tl.cdiv(window_len, BLOCK_N)
    tiles = window_tiles
    if HAS_ENTRIES:
        entry_len = tl.load(entry_lens_ptr + token)
        tiles += tl.cdiv(entry_len, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    begin = tl.minimum(split * share, tiles)
    end = tl.minimum(begin + share, tiles)

    top, total = tl.full([BLOCK_H], NO_LOGIT, tl.float32), tl.zeros([BLOCK_H], tl.float32)
    o0, o1 = tl.zeros([BLOCK_H, PIECE0], tl.float32), tl.zeros([BLOCK_H, PIECE1], tl.float32)
    o2, o3 = tl.zeros([BLOCK_H, PIECE2], tl.float32), tl.zeros([BLOCK_H, ROPE], tl.float32)
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

    if SPLIT:
        at = (token * splits + split) * heads + head
        store_partial(partial_ptr, stats_ptr, at, is_head, begin < end, top, total, o0, o1, o2, o3, False)
    else:
        at = token * heads + head
        norm = inverse_denominator(tl.load(sink_ptr + head, mask=is_head, other=0.0), top, total)
        angle_at = rope_ptr + tl.load(positions_ptr + token) * ROPE
        store_output(out_ptr, at, is_head, norm, o0, o1, o2, o3, angle_at, False, BLOCK_H)


def _check(name: str, table: Tensor, stored: V41KVFormat) -> None:
    width = stored.row_bytes
    if table.dtype != torch.uint8 or table.shape[-1] != width:
        raise ValueError(
            f"{name} is {table.dtype} of width {table.shape[-1]}; expected torch.uint8 of {width} for V4.1's "
            f"{stored.value} entries"
        )
    odd_blocks = table.shape[0] > 1 and table.stride(0) % 16
    if table.stride()[1:] != (width, 1) or odd_blocks or table.data_ptr() % 16:
        raise ValueError(
            f"{name} has stride {table.stride()}; expected (a multiple of 16, {width}, 1) and 16 B alignment"
        )


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
    """
    if q.dim() != 3 or q.shape[-1] != ENTRY_DIM or q.stride(-1) != 1:
        raise ValueError(f"q is {tuple(q.shape)}; expected [tokens, heads, {ENTRY_DIM}] with inner stride 1")
    has_entries = entries is not None and entry_indices is not None and entry_lens is not None
    _check("window", window, V41KVFormat.FP8)
    if entries is None or entry_indices is None or entry_lens is None:
        entries, entry_indices, entry_lens = window, window_indices, window_lens
    else:
        _check("entries", entries, V41KVFormat.FP4)
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    dot, precision = products(q.dtype, KVFormat.FP8)
    shared_memory, processors = device_limits(q.device.index) if q.is_cuda else (0, 1)
    tile = tiling(heads, False, dot == tl.float32, shared_memory)
    groups = triton.cdiv(heads, tile.heads)
    if splits is None:
        listed = window_indices.shape[1] + (entry_indices.shape[1] if has_entries else 0)
        splits = split_count(tokens, groups, triton.cdiv(listed, tile.rows), processors)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(tokens, splits, heads, ENTRY_DIM, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, splits, heads, 2, dtype=torch.float32, device=q.device)
    _attend_v41_kernel[(tokens, splits, groups)](
        *(q, sink, window, window_indices, window_lens, entries, entry_indices, entry_lens),
        *(positions, rope, out, partial, stats, scale, heads, splits, q.stride(0), q.stride(1)),
        *(window_indices.stride(0), table_stride(window), window.shape[1]),
        *(entry_indices.stride(0), table_stride(entries), entries.shape[1]),
        HAS_ENTRIES=has_entries,
        SPLIT=splits > 1,
        DOT=dot,
        PRECISION=precision,
        BLOCK_H=tile.heads,
        BLOCK_N=tile.rows,
        num_warps=tile.warps,
    )
    if splits > 1:
        merge_kernel[(tokens, heads)](
            *(partial, stats, sink, positions, rope, out, heads, splits),
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out
