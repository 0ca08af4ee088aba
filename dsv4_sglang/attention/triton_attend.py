"""`attend` in Triton for any CUDA device from sm_80: all KV formats, any number of heads (SPEC 2.2, 4.5).

A program processes one token, up to 64 of its heads and one split of its keys: tiles of the window list, then tiles of
the entry list. Entries are gathered by index, each entry is both key and value, and the softmax is online. With few
tokens the lists are divided into splits to fill the GPU. A second kernel merges the splits, adds the sink once and
applies the inverse RoPE to the output.

Window entries and compressed entries have one format, or MXFP8 and NVFP4 (`BLOCK_SCALED`). The latter two are read in
two loops and decoded to numbers that bf16 holds exactly: values times their scales have at most six significant bits.

FP8 entries are decoded by integer arithmetic (`triton_entries`) to numbers that are too small by a factor of 2^120. For
bf16 queries (`FOLD`) these numbers are multiplied as they are. Half of the missing factor is applied to the query; the
other half, together with the entry's scale, is applied to its logit and its probability (`missing`). All factors are
powers of two, so the result equals that of dequantised entries.

On the H200 one such program occupies a multiprocessor, and the kernel is bound by instructions and latency, not by
bandwidth (docs/benchmarks/results.md, "Kernels"). Therefore:

- Pieces of 64 dims share a layout, so a thread computes the address of only one entry, and no address is computed in
  the layout of the products.
- Entries are loaded two tiles ahead (five stages, because three loads depend on each other).
- Every product is waited for before an accumulator is used. Otherwise ptxas serialises all wgmma instructions of the
  loop.

Traffic: 584 B per FP8 entry (1024 bf16, 2048 fp32, 528 MXFP8, 288 NVFP4) for each group of heads; partial results take
2 KiB per split and head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.base import AttendInputs
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
    block_scaled_dims,
    e4m3_bits,
    exponent_to_scale,
    fp8_entry,
    load_pieces,
    rope_dims,
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


@triton.jit
def _piece(at, mask, DOT: tl.constexpr):
    """Load dims of FP8 entries in the scaling of `e4m3_bits`."""
    return e4m3_bits(tl.load(at, mask=mask, other=0), DOT)


@triton.jit
def _beside(a, b, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Concatenate two tensors [ROWS, WIDTH] to [ROWS, 2 * WIDTH]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [ROWS, 2 * WIDTH])


@triton.jit
def _select(condition, a, b):
    """Return list `a` if `condition`, else `b`; a list is (buffer, indices, length, block stride, entries per block,
    its log2).
    """
    return (
        tl.where(condition, a[0], b[0]),
        tl.where(condition, a[1], b[1]),
        tl.where(condition, a[2], b[2]),
        tl.where(condition, a[3], b[3]),
        tl.where(condition, a[4], b[4]),
        tl.where(condition, a[5], b[5]),
    )


@triton.jit
def _load_fp8(entry_at, is_entry, multiplier, FOLD: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the pieces of FP8 entries. With FOLD those without RoPE are not multiplied by 2^120 and their scale."""
    d2 = tl.arange(0, PIECE2)[None, :]
    if FOLD:
        # Pieces of the same width share a layout, so a thread computes the address of one entry.
        at = entry_at + d2
        k0 = _beside(
            _beside(_piece(at, is_entry, DOT), _piece(at + PIECE2, is_entry, DOT), BLOCK_N, PIECE2),
            _beside(_piece(at + 2 * PIECE2, is_entry, DOT), _piece(at + 3 * PIECE2, is_entry, DOT), BLOCK_N, PIECE2),
            BLOCK_N,
            2 * PIECE2,
        )
        k1 = _beside(_piece(at + AT1, is_entry, DOT), _piece(at + AT1 + PIECE2, is_entry, DOT), BLOCK_N, PIECE2)
    else:
        # Triton 3.6 computes wrong products of joined pieces on tf32 tensor cores.
        k0 = _piece(entry_at + tl.arange(0, PIECE0)[None, :], is_entry, DOT)
        k1 = _piece(entry_at + AT1 + tl.arange(0, PIECE1)[None, :], is_entry, DOT)
    k2 = _piece(entry_at + AT2 + d2, is_entry, DOT)
    k3 = tl.load(rope_dims(entry_at) + tl.arange(0, ROPE)[None, :], mask=is_entry, other=0.0).to(DOT)
    if not FOLD:
        k0 = k0 * SQRT_E4M3_FACTOR * SQRT_E4M3_FACTOR * multiplier[:, None]
        k1 = k1 * SQRT_E4M3_FACTOR * SQRT_E4M3_FACTOR * multiplier[:, None]
        k2 = k2 * SQRT_E4M3_FACTOR * SQRT_E4M3_FACTOR * multiplier[:, None]
    return k0, k1, k2, k3


@triton.jit
def _load_entries(
    index, table, block_stride, entries_per_block, shift,
    SHIFT: tl.constexpr, FP8: tl.constexpr, FOLD: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load entries [BLOCK_N] by index.

    Returns four pieces of the entries, a mask of valid entries, and with FOLD half of the missing factor of each entry.
    """
    valid = index >= 0
    is_entry = valid[:, None]
    if SHIFT:
        block = index >> shift
        inside = index - (block << shift)
    else:
        block = index // entries_per_block
        inside = index - block * entries_per_block
    block_at = table + block.to(tl.int64) * tl.multiple_of(block_stride, 16)
    missing = tl.full([BLOCK_N], 1.0, tl.float32)
    if FP8:
        entry_at, scale_at = fp8_entry(block_at, inside, entries_per_block)
        # All scale bytes of an entry are equal and nonzero, because the smallest amax is 1e-4. The reduction stops the
        # layout of the products from propagating to the address computation.
        word = tl.load(scale_at[:, None] + tl.arange(0, 2)[None, :], mask=is_entry, other=0)
        exponent = tl.max(word & 0xFF, 1)
        valid = exponent > 0
        multiplier = exponent_to_scale(exponent)
        k0, k1, k2, k3 = _load_fp8(entry_at[:, None], is_entry, multiplier, FOLD, DOT, BLOCK_N)
        missing = multiplier * SQRT_E4M3_FACTOR
    else:
        k0, k1, k2, k3 = load_pieces((block_at + inside * DIM)[:, None], is_entry, DOT)
    return k0, k1, k2, k3, valid, missing


@triton.jit
def _add_block_scaled_tile(
    carry, q0, q1, q2, q3, table, indices_at, length, first, block_stride, entries_per_block, scale,
    FP4: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Perform one step of the online softmax over the entries `first` .. `first` + BLOCK_N - 1 of a list of NVFP4
    entries (FP4) or MXFP8 entries."""
    top, total, o0, o1, o2, o3 = carry
    listed = first + tl.arange(0, BLOCK_N)
    index = tl.load(indices_at + listed, mask=listed < length, other=-1)
    is_entry = (index >= 0)[:, None]
    block = index // entries_per_block
    inside = (index - block * entries_per_block)[:, None]
    block_at = table + (block.to(tl.int64) * tl.multiple_of(block_stride, 16))[:, None]
    k0 = block_scaled_dims(block_at, inside, entries_per_block, is_entry, 0, PIECE0, FP4, DOT)
    k1 = block_scaled_dims(block_at, inside, entries_per_block, is_entry, AT1, PIECE1, FP4, DOT)
    k2 = block_scaled_dims(block_at, inside, entries_per_block, is_entry, AT2, PIECE2, FP4, DOT)
    k3 = block_scaled_dims(block_at, inside, entries_per_block, is_entry, NOPE, ROPE, FP4, DOT)
    missing = tl.full([BLOCK_N], 1.0, tl.float32)
    return add_tile(
        top, total, o0, o1, o2, o3, q0, q1, q2, q3, k0, k1, k2, k3, index >= 0, missing, scale, False, DOT, PRECISION
    )


# Arguments, T tokens, H heads, S splits:
#   q [T, H, 512], sink fp32 [H]
#   window: KV buffer [blocks, entries per block, width], indices int32 [T, K], lens int32 [T]
#   entries: as window. SHARED: indices [B, K], and owner int32 [T] has the row of each token; else owner is not read
#   positions int64 [T], rope fp32 [positions, 64], out [T, H, 512], with SPLIT partial fp32 [T, S, H, 512] and stats
#   fp32 [T, S, H, 2]
#   scale of the logits, H, S, strides of q in elements
#   window: strides of indices and blocks in elements, entries per block and, with SHIFT, its log2
#   entries: the same four; without HAS_ENTRIES those of the window
@triton.jit
def _attend_kernel(
    q_ptr, sink_ptr,
    window_ptr, window_indices_ptr, window_lens_ptr,
    entries_ptr, entry_indices_ptr, entry_lens_ptr, entry_owner_ptr,
    positions_ptr, rope_ptr, out_ptr, partial_ptr, stats_ptr,
    scale, heads, splits, q_token_stride, q_head_stride,
    window_indices_stride, window_block_stride, window_entries_per_block, window_shift,
    entry_indices_stride, entry_block_stride, compressed_entries_per_block, entry_shift,
    SHIFT: tl.constexpr, FP8: tl.constexpr, BLOCK_SCALED: tl.constexpr, FOLD: tl.constexpr,
    HAS_ENTRIES: tl.constexpr, SHARED: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, splits, groups of BLOCK_H heads). SHARED: tokens of a request share the list of entries.
    BLOCK_SCALED: window entries are MXFP8, compressed entries NVFP4."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < heads
    q_at = q_ptr + token * q_token_stride + head[:, None] * q_head_stride
    q0, q1, q2, q3 = load_query(q_at, is_head[:, None], FOLD, DOT)
    window_len, entry_len, window_tiles, begin, end = tiles_of_split(
        window_lens_ptr, entry_lens_ptr, token, split, splits, HAS_ENTRIES, BLOCK_N
    )
    entry_list = tl.load(entry_owner_ptr + token).to(tl.int64) if SHARED else token
    top, total, o0, o1, o2, o3 = empty_sums(BLOCK_H)
    if BLOCK_SCALED:
        for tile in tl.range(begin, tl.minimum(end, window_tiles)):
            top, total, o0, o1, o2, o3 = _add_block_scaled_tile(
                (top, total, o0, o1, o2, o3), q0, q1, q2, q3,
                window_ptr, window_indices_ptr + token * window_indices_stride, window_len, tile * BLOCK_N,
                window_block_stride, window_entries_per_block, scale, False, DOT, PRECISION, BLOCK_N,
            )  # fmt: skip
        if HAS_ENTRIES:
            for tile in tl.range(tl.maximum(begin, window_tiles), end):
                top, total, o0, o1, o2, o3 = _add_block_scaled_tile(
                    (top, total, o0, o1, o2, o3), q0, q1, q2, q3,
                    entries_ptr, entry_indices_ptr + entry_list * entry_indices_stride, entry_len,
                    (tile - window_tiles) * BLOCK_N, entry_block_stride, compressed_entries_per_block,
                    scale, True, DOT, PRECISION, BLOCK_N,
                )  # fmt: skip
    else:
        for tile in tl.range(begin, end, num_stages=STAGES):
            indices_at = window_indices_ptr + token * window_indices_stride
            chosen = (window_ptr, indices_at, window_len, window_block_stride, window_entries_per_block, window_shift)
            first = tile * BLOCK_N
            if HAS_ENTRIES:
                indices_at = entry_indices_ptr + entry_list * entry_indices_stride
                entries = (
                    entries_ptr,
                    indices_at,
                    entry_len,
                    entry_block_stride,
                    compressed_entries_per_block,
                    entry_shift,
                )
                in_window = tile < window_tiles
                chosen = _select(in_window, chosen, entries)
                first = tl.where(in_window, first, first - window_tiles * BLOCK_N)
            table, indices_at, length, block_stride, entries_per_block, shift = chosen
            listed = first + tl.arange(0, BLOCK_N)
            index = tl.load(indices_at + listed, mask=listed < length, other=-1)
            k0, k1, k2, k3, valid, missing = _load_entries(
                index, table, block_stride, entries_per_block, shift, SHIFT, FP8, FOLD, DOT, BLOCK_N
            )
            top, total, o0, o1, o2, o3 = add_tile(
                top, total, o0, o1, o2, o3, q0, q1, q2, q3, k0, k1, k2, k3, valid, missing, scale, FOLD, DOT, PRECISION
            )
    store_sums(
        out_ptr, partial_ptr, stats_ptr, sink_ptr, positions_ptr, rope_ptr,
        token, split, splits, head, heads, is_head, begin < end, top, total, o0, o1, o2, o3, FOLD, SPLIT, BLOCK_H,
    )  # fmt: skip


def _block_shift(table: Tensor) -> int:
    """Return log2 of the entries per block, -1 if it is no power of two. A buffer of one block may have any size."""
    if table.shape[0] == 1:
        return 30
    rows = table.shape[1]
    return rows.bit_length() - 1 if rows & (rows - 1) == 0 else -1


def attend(q: Tensor, inputs: AttendInputs, splits: int | None = None) -> Tensor:
    """Compute the op `attend` (`dsv4_sglang.ops.reference.read.attend` documents the tensors). Sums are fp32.

    Kernel launches depend on shapes only and lengths are read on the device, so CUDA graphs can capture the call.

    Args:
        q: queries [T, heads, 512].
        inputs: the other arguments.
        splits: number of splits; None chooses it.

    Returns:
        Output [T, heads, 512] in the dtype of `q`.

    Raises:
        ValueError: a tensor has another dtype, shape, stride, alignment or device than the kernel reads.
    """
    fp8, block_scaled = inputs.kv_format is KVFormat.FP8, inputs.kv_format is KVFormat.MXFP8
    window, entries = inputs.window, inputs.entries or inputs.window
    check = TensorChecker("attend", q.device)
    check.query(q, inputs.sink)
    check.rotation(q.shape[0], inputs.positions, inputs.rope)
    check.listed("window", window, inputs.kv_format, q.shape[0])
    if inputs.entries:
        check.formats(inputs.kv_format, inputs.entry_format)
        check.listed("entries", entries, inputs.entry_format, q.shape[0])
    dot, precision = products(q.dtype, inputs.kv_format)
    listed = window.indices.shape[1] + (entries.indices.shape[1] if inputs.entries else 0)
    launch = plan_launch(q, listed, fp8, dot == tl.float32, splits)
    if q.shape[0] == 0:
        return launch.out
    tables = [
        (listed.indices.stride(0), table_stride(listed.table), listed.table.shape[1], _block_shift(listed.table))
        for listed in (window, entries)
    ]
    _attend_kernel[launch.grid](
        *(q, inputs.sink, *window[:3], *entries[:3], entries.topk_length if entries.owner is None else entries.owner),
        *(inputs.positions, inputs.rope, launch.out, launch.partial, launch.stats),
        *(inputs.scale, q.shape[1], launch.splits, q.stride(0), q.stride(1), *tables[0], *tables[1]),
        SHIFT=all(shift >= 0 for *_, shift in tables),
        FP8=fp8,
        BLOCK_SCALED=block_scaled,
        FOLD=fp8 and q.dtype == torch.bfloat16,
        HAS_ENTRIES=inputs.entries is not None,
        SHARED=entries.owner is not None,
        SPLIT=launch.splits > 1,
        DOT=dot,
        PRECISION=precision,
        BLOCK_H=launch.tile.heads,
        BLOCK_N=launch.tile.rows,
        STAGES=launch.tile.stages,
        num_warps=launch.tile.warps,
    )
    return launch.merge(inputs.sink, inputs.positions, inputs.rope)
