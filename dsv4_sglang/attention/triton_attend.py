"""`attend` in Triton, for any CUDA device from sm_80: all KV formats, any number of heads (SPEC 2.2, 4.5).

A program takes one token, up to 64 of its heads and a share of its keys (a split): the tiles of the window list, then
those of the entry list. Rows are gathered by number, a row is key and value at once, the softmax is online. Few tokens
do not fill the GPU, so their lists are cut into splits; a second kernel merges them, adds the sink once and applies the
inverse RoPE to the output.

FP8 rows are decoded by integer arithmetic (`triton_rows`) to numbers that lack a factor of 2^120. For bf16 queries
these numbers are multiplied as they are, and what they lack goes half with the query, half with the row's scale to its
logit and its probability (`FOLD`): all powers of two, so the result is that of dequantised rows.

On the H200, where a multiprocessor holds one such program, instructions and latency bound it, not bytes (see
docs/benchmarks/limits.md). So a thread computes the address of one row alone, and pieces of 64 dims share a layout;
nothing of a row's address is computed in the layout of the products; rows are on their way two tiles ahead (five
stages: three loads depend on each other); and every product is waited for before an accumulator is touched, or ptxas
runs all wgmma instructions of the loop one by one.

Traffic: 584 B a row (1024 bf16, 2048 fp32) for each group of heads; partial results of a split 2 KiB a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.base import AttendInputs
from dsv4_sglang.attention.triton_entries import (
    AT1,
    AT2,
    DIM,
    E4M3_LACK,
    PIECE0,
    PIECE1,
    PIECE2,
    ROPE,
    e4m3_bits,
    exponent_to_scale,
    fp8_entry,
    load_pieces,
    rope_dims,
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


@triton.jit
def _piece(at, mask, DOT: tl.constexpr):
    """Dims of FP8 rows as `e4m3_bits` gives them."""
    return e4m3_bits(tl.load(at, mask=mask, other=0), DOT)


@triton.jit
def _beside(a, b, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] twice -> [ROWS, 2 * WIDTH]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [ROWS, 2 * WIDTH])


@triton.jit
def _select(condition, a, b):
    """Of two lists (table, rows, length, block stride, rows a block, its log2) the first where `condition`."""
    return (
        tl.where(condition, a[0], b[0]),
        tl.where(condition, a[1], b[1]),
        tl.where(condition, a[2], b[2]),
        tl.where(condition, a[3], b[3]),
        tl.where(condition, a[4], b[4]),
        tl.where(condition, a[5], b[5]),
    )


@triton.jit
def _load_fp8(row_at, is_row, multiplier, FOLD: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the pieces of FP8 entries. With FOLD those without RoPE are not multiplied by 2^120 and their scale."""
    d2 = tl.arange(0, PIECE2)[None, :]
    if FOLD:
        # Pieces of one width share one layout, so that a thread computes the address of one row.
        at = row_at + d2
        k0 = _beside(
            _beside(_piece(at, is_row, DOT), _piece(at + PIECE2, is_row, DOT), BLOCK_N, PIECE2),
            _beside(_piece(at + 2 * PIECE2, is_row, DOT), _piece(at + 3 * PIECE2, is_row, DOT), BLOCK_N, PIECE2),
            BLOCK_N,
            2 * PIECE2,
        )
        k1 = _beside(_piece(at + AT1, is_row, DOT), _piece(at + AT1 + PIECE2, is_row, DOT), BLOCK_N, PIECE2)
    else:
        # Triton 3.6 multiplies joined pieces wrongly on tf32 tensor cores.
        k0 = _piece(row_at + tl.arange(0, PIECE0)[None, :], is_row, DOT)
        k1 = _piece(row_at + AT1 + tl.arange(0, PIECE1)[None, :], is_row, DOT)
    k2 = _piece(row_at + AT2 + d2, is_row, DOT)
    k3 = tl.load(rope_dims(row_at) + tl.arange(0, ROPE)[None, :], mask=is_row, other=0.0).to(DOT)
    if not FOLD:
        k0 = k0 * E4M3_LACK * E4M3_LACK * multiplier[:, None]
        k1 = k1 * E4M3_LACK * E4M3_LACK * multiplier[:, None]
        k2 = k2 * E4M3_LACK * E4M3_LACK * multiplier[:, None]
    return k0, k1, k2, k3


@triton.jit
def _load_rows(
    row, table, block_stride, entries_per_block, shift,
    SHIFT: tl.constexpr, FP8: tl.constexpr, FOLD: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Four pieces of rows [BLOCK_N] by number, which of them exist, and with FOLD half of what they lack."""
    valid = row >= 0
    is_row = valid[:, None]
    if SHIFT:
        block = row >> shift
        inside = row - (block << shift)
    else:
        block = row // entries_per_block
        inside = row - block * entries_per_block
    block_at = table + block.to(tl.int64) * tl.multiple_of(block_stride, 16)
    lack = tl.full([BLOCK_N], 1.0, tl.float32)
    if FP8:
        row_at, scale_at = fp8_entry(block_at, inside, entries_per_block)
        # All bytes of the strip are equal, and none is 0: the least amax is 1e-4. The reduction keeps the layout of the
        # products from reaching back to the addresses.
        word = tl.load(scale_at[:, None] + tl.arange(0, 2)[None, :], mask=is_row, other=0)
        exponent = tl.max(word & 0xFF, 1)
        valid = exponent > 0
        multiplier = exponent_to_scale(exponent)
        k0, k1, k2, k3 = _load_fp8(row_at[:, None], is_row, multiplier, FOLD, DOT, BLOCK_N)
        lack = multiplier * E4M3_LACK
    else:
        k0, k1, k2, k3 = load_pieces((block_at + inside * DIM)[:, None], is_row, DOT)
    return k0, k1, k2, k3, valid, lack


@triton.jit
def _attend_kernel(
    q_ptr, sink_ptr,
    window_ptr, window_indices_ptr, window_lens_ptr,
    entries_ptr, entry_rows_ptr, entry_lens_ptr,
    positions_ptr, rope_ptr, out_ptr, partial_ptr, stats_ptr,
    scale, heads, splits, q_token_stride, q_head_stride,
    window_indices_stride, window_block_stride, window_entries_per_block, window_shift,
    entry_rows_stride, entry_block_stride, compressed_entries_per_block, entry_shift,
    SHIFT: tl.constexpr, FP8: tl.constexpr, FOLD: tl.constexpr, HAS_ENTRIES: tl.constexpr, SPLIT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, splits, groups of BLOCK_H heads)."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < heads
    q_at = q_ptr + token * q_token_stride + head[:, None] * q_head_stride
    q0, q1, q2, q3 = load_query(q_at, is_head[:, None], FOLD, DOT)

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
    for tile in tl.range(begin, end, num_stages=STAGES):
        rows_at = window_indices_ptr + token * window_indices_stride
        chosen = (window_ptr, rows_at, window_len, window_block_stride, window_entries_per_block, window_shift)
        first = tile * BLOCK_N
        if HAS_ENTRIES:
            rows_at = entry_rows_ptr + token * entry_rows_stride
            entries = (entries_ptr, rows_at, entry_len, entry_block_stride, compressed_entries_per_block, entry_shift)
            in_window = tile < window_tiles
            chosen = _select(in_window, chosen, entries)
            first = tl.where(in_window, first, first - window_tiles * BLOCK_N)
        table, rows_at, length, block_stride, entries_per_block, shift = chosen
        listed = first + tl.arange(0, BLOCK_N)
        row = tl.load(rows_at + listed, mask=listed < length, other=-1)
        k0, k1, k2, k3, valid, lack = _load_rows(
            row, table, block_stride, entries_per_block, shift, SHIFT, FP8, FOLD, DOT, BLOCK_N
        )
        logit = logits(q0, q1, q2, q3, k0, k1, k2, k3, lack, FOLD, PRECISION)
        logit = tl.where(valid[None, :], logit * (scale * LOG2_E), float("-inf"))
        p, rescale, top, total = weigh(logit, top, total)
        o0, o1, o2, o3 = add(p, k0, k1, k2, k3, lack, o0, o1, o2, o3, rescale[:, None], FOLD, DOT, PRECISION)

    if SPLIT:
        at = (token * splits + split) * heads + head
        store_partial(partial_ptr, stats_ptr, at, is_head, begin < end, top, total, o0, o1, o2, o3, FOLD)
    else:
        at = token * heads + head
        norm = inverse_denominator(tl.load(sink_ptr + head, mask=is_head, other=0.0), top, total)
        angle_at = rope_ptr + tl.load(positions_ptr + token) * ROPE
        store_output(out_ptr, at, is_head, norm, o0, o1, o2, o3, angle_at, FOLD, BLOCK_H)


def _block_shift(table: Tensor) -> int:
    """Return log2 of the entries per block, -1 if it is no power of two. A buffer of one block may have any size."""
    if table.shape[0] == 1:
        return 30
    rows = table.shape[1]
    return rows.bit_length() - 1 if rows & (rows - 1) == 0 else -1


def _check(q: Tensor, inputs: AttendInputs) -> None:
    if q.dim() != 3 or q.shape[-1] != ENTRY_DIM or q.stride(-1) != 1:
        raise ValueError(
            f"q is {tuple(q.shape)}, stride {q.stride()}; expected [tokens, heads, {ENTRY_DIM}] with inner stride 1"
        )
    stored = inputs.kv_format
    for name, listed in (("window", inputs.window), ("entries", inputs.entries)):
        if listed is None:
            continue
        table, width = listed.table, stored.width
        if table.dtype != stored.dtype or table.shape[-1] != width:
            raise ValueError(
                f"{name} is {table.dtype} of width {table.shape[-1]}; expected {stored.dtype} of {width} for "
                f"{stored.value} rows"
            )
        odd_blocks = table.shape[0] > 1 and table.stride(0) * table.element_size() % 16
        if table.stride(-1) != 1 or table.stride(-2) != width or odd_blocks or table.data_ptr() % 16:
            raise ValueError(
                f"{name} has stride {table.stride()}; expected (a multiple of 16 B, {width}, 1) and 16 B alignment"
            )


def attend(q: Tensor, inputs: AttendInputs, splits: int | None = None) -> Tensor:
    """The op `attend`; `dsv4_sglang.ops.reference.read.attend` says what the tensors are. `splits` fixes their number.

    Sums are fp32. Launches depend on shapes only, so the call can be captured into a CUDA graph; lengths are read on
    the device.
    """
    _check(q, inputs)
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    fp8 = inputs.kv_format is KVFormat.FP8
    dot, precision = products(q.dtype, inputs.kv_format)
    shared_memory, processors = device_limits(q.device.index) if q.is_cuda else (0, 1)
    tile = tiling(heads, fp8, dot == tl.float32, shared_memory)
    groups = triton.cdiv(heads, tile.heads)
    window, entries = inputs.window, inputs.entries or inputs.window
    if splits is None:
        listed = window.indices.shape[1] + (entries.indices.shape[1] if inputs.entries else 0)
        splits = split_count(tokens, groups, triton.cdiv(listed, tile.rows), processors)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(tokens, splits, heads, ENTRY_DIM, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, splits, heads, 2, dtype=torch.float32, device=q.device)
    tables = [
        (listed.indices.stride(0), table_stride(listed.table), listed.table.shape[1], _block_shift(listed.table))
        for listed in (window, entries)
    ]
    _attend_kernel[(tokens, splits, groups)](
        *(q, inputs.sink, *window, *entries, inputs.positions, inputs.rope, out, partial, stats),
        *(inputs.scale, heads, splits, q.stride(0), q.stride(1), *tables[0], *tables[1]),
        SHIFT=all(shift >= 0 for *_, shift in tables),
        FP8=fp8,
        FOLD=fp8 and q.dtype == torch.bfloat16,
        HAS_ENTRIES=inputs.entries is not None,
        SPLIT=splits > 1,
        DOT=dot,
        PRECISION=precision,
        BLOCK_H=tile.heads,
        BLOCK_N=tile.rows,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if splits > 1:
        merge_kernel[(tokens, heads)](
            *(partial, stats, inputs.sink, inputs.positions, inputs.rope, out, heads, splits),
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out
