"""`attend` in Triton, for any CUDA device from sm_80: all row formats, any number of heads (SPEC 2.2, 4.5).

A program takes one token, up to 64 of its heads and a share of its keys (a split): the tiles of the window list, then
those of the entry list. Rows are gathered by number, a row is key and value at once, the softmax is online. Few tokens
do not fill the GPU, so their lists are cut into splits; a second kernel merges them, adds the sink once and derotates
the output.

FP8 rows are decoded by integer arithmetic, which sm_80 can do too: the bits of an e4m3 number, moved to the exponent
and mantissa of a bf16, are that number times 2^-120. For bf16 queries these numbers are multiplied as they are, and
what they lack goes half with the query, half with the row's scale to its logit and its probability: all powers of two,
so the result is that of dequantised rows.

On the H200, where a multiprocessor holds one such program, instructions and latency bound it, not bytes (measured:
docs/performance.md). So a thread computes the address of one row alone, for which pieces of 64 dims share a layout;
nothing of a row's address is computed in the layout of the products; rows are on their way two tiles ahead (five
stages: three loads depend on each other); and every product is waited for before an accumulator is touched, or ptxas
runs all wgmma instructions of the loop one by one.

Traffic: 584 B a row (1024 bf16, 2048 fp32) for each group of heads; partial results of a split 2 KiB a head.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.formats import RowFormat
from dsv4_sglang.formats.rows import ENTRY_DIM

LOG2_E = tl.constexpr(1.4426950408889634)
# The online maximum starts here and not at -inf, whose difference with itself is no number.
NO_LOGIT = tl.constexpr(-1e30)
E4M3_LACK = tl.constexpr(2.0**60)  # the square root of what the moved bits of an e4m3 number lack as a bf16 one
# The interpreter multiplies the bits of bf16 operands as if they were integers; there the products are taken in fp32.
_INTERPRETED = triton.knobs.runtime.interpret


# Four codes in a register to four bf16 in two: each code into the upper byte of a half, then its exponent and mantissa
# four bits down and its sign kept.
_DECODE = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 $0, a, 0x80008000, c, 0xEA;
    lop3.b32 $1, b, 0x80008000, d, 0xEA;
    }"""
)


@triton.jit
def e4m3_bits(code, DOT: tl.constexpr):
    """uint8 e4m3 codes -> their values times 2^-120, bf16 or fp32 (whose exponents are the same)."""
    if DOT == tl.bfloat16:  # noqa: SIM300
        value = tl.inline_asm_elementwise(_DECODE, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = code.to(tl.uint32)
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _piece(at, mask, DOT: tl.constexpr):
    """Dims of FP8 rows as `e4m3_bits` gives them."""
    return e4m3_bits(tl.load(at, mask=mask, other=0), DOT)


@triton.jit
def _beside(a, b, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] twice -> [ROWS, 2 * WIDTH]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [ROWS, 2 * WIDTH])


@triton.jit
def _derotate(tail, cos, sin, BLOCK_H: tl.constexpr):
    """Inverse rotation of [BLOCK_H, 64] by interleaved pairs; cos and sin are [32]."""
    even, odd = tl.split(tl.reshape(tail, [BLOCK_H, 32, 2]))
    c, s = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [BLOCK_H, 64])


@triton.jit
def _attend_kernel(
    q_ptr,
    sink_ptr,
    window_ptr,
    window_rows_ptr,
    window_lens_ptr,
    entries_ptr,
    entry_rows_ptr,
    entry_lens_ptr,
    positions_ptr,
    rope_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale,
    heads,
    splits,
    q_token_stride,
    q_head_stride,
    window_rows_stride,
    entry_rows_stride,
    window_block_stride,
    entry_block_stride,
    window_rows_per_block,
    entry_rows_per_block,
    window_shift,
    entry_shift,
    SHIFT: tl.constexpr,
    FP8: tl.constexpr,
    FOLD: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tokens, splits, groups of BLOCK_H heads).

    The 512 dims are handled as 256 + 128 + 64 (without RoPE) + 64 (RoPE): powers of two, and the border of the two
    formats of an FP8 row.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (head < heads)[:, None]
    d256 = tl.arange(0, 256)[None, :]
    d128 = tl.arange(0, 128)[None, :]
    d64 = tl.arange(0, 64)[None, :]

    q_at = q_ptr + token * q_token_stride + head[:, None] * q_head_stride
    q0 = tl.load(q_at + d256, mask=is_head, other=0.0).to(DOT)
    q1 = tl.load(q_at + 256 + d128, mask=is_head, other=0.0).to(DOT)
    q2 = tl.load(q_at + 384 + d64, mask=is_head, other=0.0).to(DOT)
    q3 = tl.load(q_at + 448 + d64, mask=is_head, other=0.0).to(DOT)

    if FOLD:
        # Exact, and a query that is computed goes to the tensor cores by registers, which is faster.
        q0 = (q0 * E4M3_LACK).to(DOT)
        q1 = (q1 * E4M3_LACK).to(DOT)
        q2 = (q2 * E4M3_LACK).to(DOT)

    window_len = tl.load(window_lens_ptr + token)
    window_tiles = tl.cdiv(window_len, BLOCK_N)
    tiles = window_tiles
    if HAS_ENTRIES:
        entry_len = tl.load(entry_lens_ptr + token)
        tiles += tl.cdiv(entry_len, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    begin = tl.minimum(split * share, tiles)
    end = tl.minimum(begin + share, tiles)

    top = tl.full([BLOCK_H], NO_LOGIT, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    o0 = tl.zeros([BLOCK_H, 256], tl.float32)
    o1 = tl.zeros([BLOCK_H, 128], tl.float32)
    o2 = tl.zeros([BLOCK_H, 64], tl.float32)
    o3 = tl.zeros([BLOCK_H, 64], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        table = window_ptr
        rows_at = window_rows_ptr + token * window_rows_stride
        first = tile * BLOCK_N
        length = window_len
        block_stride = window_block_stride
        rows_per_block = window_rows_per_block
        shift = window_shift
        if HAS_ENTRIES:
            in_window = tile < window_tiles
            table = tl.where(in_window, table, entries_ptr)
            rows_at = tl.where(in_window, rows_at, entry_rows_ptr + token * entry_rows_stride)
            first = tl.where(in_window, first, first - window_tiles * BLOCK_N)
            length = tl.where(in_window, length, entry_len)
            block_stride = tl.where(in_window, block_stride, entry_block_stride)
            rows_per_block = tl.where(in_window, rows_per_block, entry_rows_per_block)
            shift = tl.where(in_window, shift, entry_shift)
        listed = first + tl.arange(0, BLOCK_N)
        row = tl.load(rows_at + listed, mask=listed < length, other=-1)
        valid = row >= 0
        is_row = valid[:, None]
        if SHIFT:
            block = row >> shift
            inside = row - (block << shift)
        else:
            block = row // rows_per_block
            inside = row - block * rows_per_block
        block_at = table + block.to(tl.int64) * tl.multiple_of(block_stride, 16)
        if FP8:
            row_at = (block_at + inside * 576)[:, None]
            scale_at = (block_at + (rows_per_block * 576 + inside * 8)).to(tl.pointer_type(tl.int32))
            # All bytes of the strip are equal, and none is 0: the least amax is 1e-4. The reduction keeps the layout of
            # the products from reaching back to the addresses.
            word = tl.load(scale_at[:, None] + tl.arange(0, 2)[None, :], mask=is_row, other=0)
            exponent = tl.max(word & 0xFF, 1)
            valid = exponent > 0
            multiplier = (exponent << 23).to(tl.float32, bitcast=True)
            if FOLD:
                # Pieces of one width share one layout, so that a thread computes the address of one row.
                piece_at = row_at + d64
                k0 = _beside(
                    _beside(_piece(piece_at, is_row, DOT), _piece(piece_at + 64, is_row, DOT), BLOCK_N, 64),
                    _beside(_piece(piece_at + 128, is_row, DOT), _piece(piece_at + 192, is_row, DOT), BLOCK_N, 64),
                    BLOCK_N,
                    128,
                )
                k1 = _beside(_piece(piece_at + 256, is_row, DOT), _piece(piece_at + 320, is_row, DOT), BLOCK_N, 64)
            else:
                # Triton 3.6 multiplies joined pieces wrongly on tf32 tensor cores.
                k0 = _piece(row_at + d256, is_row, DOT)
                k1 = _piece(row_at + 256 + d128, is_row, DOT)
            k2 = _piece(row_at + 384 + d64, is_row, DOT)
            tail_at = (row_at + 448).to(tl.pointer_type(tl.bfloat16))
            k3 = tl.load(tail_at + d64, mask=is_row, other=0.0).to(DOT)
            if not FOLD:
                k0 = k0 * E4M3_LACK * E4M3_LACK * multiplier[:, None]
                k1 = k1 * E4M3_LACK * E4M3_LACK * multiplier[:, None]
                k2 = k2 * E4M3_LACK * E4M3_LACK * multiplier[:, None]
        else:
            row_at = (block_at + inside * 512)[:, None]
            k0 = tl.load(row_at + d256, mask=is_row, other=0.0).to(DOT)
            k1 = tl.load(row_at + 256 + d128, mask=is_row, other=0.0).to(DOT)
            k2 = tl.load(row_at + 384 + d64, mask=is_row, other=0.0).to(DOT)
            k3 = tl.load(row_at + 448 + d64, mask=is_row, other=0.0).to(DOT)

        logit = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        logit = tl.dot(q1, tl.trans(k1), logit, input_precision=PRECISION)
        logit = tl.dot(q2, tl.trans(k2), logit, input_precision=PRECISION)
        if FOLD:
            multiplier = multiplier * E4M3_LACK
            logit = logit * multiplier[None, :]
        logit = tl.dot(q3, tl.trans(k3), logit, input_precision=PRECISION)
        logit = tl.where(valid[None, :], logit * (scale * LOG2_E), float("-inf"))

        new_top = tl.maximum(top, tl.max(logit, 1))
        rescale = tl.exp2(top - new_top)
        p = tl.exp2(logit - new_top[:, None])
        total = total * rescale + tl.sum(p, 1)
        top = new_top
        rescale = rescale[:, None]
        tail_p = p.to(DOT)
        if FOLD:
            # The other half of what the rows lack comes after the sum: their products shall stay far from subnormal.
            p = p * multiplier[None, :]
        p = p.to(DOT)
        o0 = tl.dot(p, k0, o0 * rescale, input_precision=PRECISION)
        o1 = tl.dot(p, k1, o1 * rescale, input_precision=PRECISION)
        o2 = tl.dot(p, k2, o2 * rescale, input_precision=PRECISION)
        # Not into the accumulator: this product would then run into the next tile's, and ptxas serialise them all.
        o3 = tl.fma(o3, rescale, tl.dot(tail_p, k3, input_precision=PRECISION))

    at = token * heads + head
    if SPLIT:
        at = (token * splits + split) * heads + head
        tl.store(stats_ptr + at * 2, top, mask=head < heads)
        tl.store(stats_ptr + at * 2 + 1, total, mask=head < heads)
        is_head = is_head & (begin < end)
        norm = tl.full([BLOCK_H], 1.0, tl.float32)
        to = partial_ptr + at[:, None] * 512
    else:
        sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0)
        denominator = total + tl.exp2(sink * LOG2_E - top)
        # A token that sees nothing gives zeros, with a sink of -inf too.
        norm = tl.where(total > 0, 1.0 / denominator, 0.0)
        to = out_ptr + at[:, None] * 512
    nope_norm = norm
    if FOLD:
        nope_norm = norm * E4M3_LACK
    norm, nope_norm = norm[:, None], nope_norm[:, None]
    o3 = o3 * norm
    if not SPLIT:
        at_position = rope_ptr + tl.load(positions_ptr + token) * 64 + tl.arange(0, 32) * 2
        o3 = _derotate(o3, tl.load(at_position), tl.load(at_position + 1), BLOCK_H)
    dtype = to.dtype.element_ty
    tl.store(to + d256, (o0 * nope_norm).to(dtype), mask=is_head)
    tl.store(to + 256 + d128, (o1 * nope_norm).to(dtype), mask=is_head)
    tl.store(to + 384 + d64, (o2 * nope_norm).to(dtype), mask=is_head)
    tl.store(to + 448 + d64, o3.to(dtype), mask=is_head)


@triton.jit
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    sink_ptr,
    positions_ptr,
    rope_ptr,
    out_ptr,
    heads,
    splits,
    BLOCK_S: tl.constexpr,
):
    """Grid (tokens, heads): the splits of one head, weighted by their share of the softmax; the sink counts once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    at = ((token * splits + split) * heads + head) * 2
    top = tl.load(stats_ptr + at, mask=split < splits, other=NO_LOGIT)
    total = tl.load(stats_ptr + at + 1, mask=split < splits, other=0.0)
    highest = tl.max(top, 0)
    total = total * tl.exp2(top - highest)
    denominator = tl.sum(total, 0) + tl.exp2(tl.load(sink_ptr + head) * LOG2_E - highest)
    inverse = tl.where(tl.sum(total, 0) > 0, 1.0 / denominator, 0.0)

    d = tl.arange(0, 512)
    o = tl.zeros([512], tl.float32)
    for first in range(0, splits, 8):
        piece = first + tl.arange(0, 8)
        at_piece = (token * splits + piece) * heads + head
        seen = tl.load(stats_ptr + at_piece * 2 + 1, mask=piece < splits, other=0.0)
        peak = tl.load(stats_ptr + at_piece * 2, mask=piece < splits, other=NO_LOGIT)
        # A split without keys wrote no row.
        row = tl.load(partial_ptr + at_piece[:, None] * 512 + d[None, :], mask=(seen > 0)[:, None], other=0.0)
        o += tl.sum(row * tl.exp2(peak - highest)[:, None], 0)
    o = o * inverse

    pair = tl.reshape(o, [256, 2])
    even, odd = tl.split(pair)
    i = tl.arange(0, 256) - 224
    at_position = rope_ptr + tl.load(positions_ptr + token) * 64 + i * 2
    cos = tl.load(at_position, mask=i >= 0, other=1.0)
    sin = tl.load(at_position + 1, mask=i >= 0, other=0.0)
    o = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [512])
    tl.store(out_ptr + (token * heads + head) * 512 + d, o.to(out_ptr.dtype.element_ty))


@triton.jit
def _derotate_kernel(out_ptr, positions_ptr, rope_ptr, heads, BLOCK_H: tl.constexpr):
    """Grid (tokens, groups of heads): inverse rotation of the last 64 dims of contiguous [T, H, 512], in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = out_ptr + (token * heads + head[:, None]) * 512 + 448 + tl.arange(0, 64)[None, :]
    mask = (head < heads)[:, None]
    tail = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    angle_at = rope_ptr + tl.load(positions_ptr + token) * 64 + 2 * tl.arange(0, 32)
    tail = _derotate(tail, tl.load(angle_at), tl.load(angle_at + 1), BLOCK_H)
    tl.store(at, tail.to(out_ptr.dtype.element_ty), mask=mask)


def derotate(out: Tensor, positions: Tensor, rope: Tensor) -> None:
    """Undo the rotation of the last 64 dims of contiguous `out` [T, H, 512] at `positions` [T], in place (SPEC 2.2)."""
    tokens, heads, _ = out.shape
    block = min(triton.next_power_of_2(heads), 32)
    _derotate_kernel[(tokens, triton.cdiv(heads, block))](out, positions, rope, heads, BLOCK_H=block, num_warps=4)


class Tiling(NamedTuple):
    """Shape of a program: heads and rows a tile, warps, stages of the software pipeline."""

    heads: int
    rows: int
    warps: int
    stages: int


def tiling(heads: int, fp8: bool, exact: bool, shared_memory: int) -> Tiling:
    """The tile that fits the device. `exact`: fp32 products; `shared_memory`: bytes that a block may have.

    The output of a tile takes 2 KiB of registers a head; in shared memory lie q (1 KiB a head), the decoded rows (1
    KiB each) and the rows in flight. Only from sm_90 up are q and the rows read from there by the tensor cores and
    registers left for 64 heads.
    """
    padded = max(16, triton.next_power_of_2(heads))
    if exact:
        return Tiling(16, 16, 4, 1)
    if padded >= 64 and shared_memory >= 200 << 10:
        return Tiling(64, 64, 8, 5) if fp8 else Tiling(64, 32, 8, 3)
    return Tiling(min(padded, 32), 32, 8, 3 if fp8 else 2)


def split_count(tokens: int, head_groups: int, tiles: int, processors: int) -> int:
    """Number of splits of a list of at most `tiles` tiles, one program per processor at a time.

    Takes the count with the shortest chain of work, in tiles: a program costs one more than it reads, the merge half a
    tile and a little for each partial result.
    """

    def cost(splits: int) -> float:
        waves = -(-tokens * head_groups * splits // processors)
        return waves * (-(-tiles // splits) + 1) + (0.5 + 0.05 * splits if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, 128)) + 1), key=cost)


@functools.cache
def _device(index: int) -> tuple[int, int]:
    """Shared memory that a block may have, in bytes, and the number of multiprocessors."""
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["max_shared_mem"], properties["multiprocessor_count"]


def table_stride(table: Tensor) -> int:
    # A table of one block may have a size that no block stride may have.
    return table.stride(0) if table.shape[0] > 1 else 0


def _block_shift(table: Tensor) -> int:
    """log2 of the rows of a block; a table of one block may have any number. -1 where it is no power of two."""
    if table.shape[0] == 1:
        return 30
    rows = table.shape[1]
    return rows.bit_length() - 1 if rows & (rows - 1) == 0 else -1


def _check(q: Tensor, window: Tensor, entries: Tensor | None, row_format: RowFormat) -> None:
    if q.dim() != 3 or q.shape[-1] != ENTRY_DIM or q.stride(-1) != 1:
        raise ValueError(
            f"q is {tuple(q.shape)}, stride {q.stride()}; expected [tokens, heads, {ENTRY_DIM}] with inner stride 1"
        )
    for name, table in (("window", window), ("entries", entries)):
        if table is None:
            continue
        width = row_format.width
        if table.dtype != row_format.dtype or table.shape[-1] != width:
            raise ValueError(
                f"{name} is {table.dtype} of width {table.shape[-1]}; expected {row_format.dtype} of {width} for "
                f"{row_format.value} rows"
            )
        odd_blocks = table.shape[0] > 1 and table.stride(0) * table.element_size() % 16
        if table.stride(-1) != 1 or table.stride(-2) != width or odd_blocks or table.data_ptr() % 16:
            raise ValueError(
                f"{name} has stride {table.stride()}; expected (a multiple of 16 B, {width}, 1) and 16 B alignment"
            )


def attend(
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
    splits: int | None = None,
) -> Tensor:
    """The op `attend`; `dsv4_sglang.ops.reference.read.attend` says what the tensors are. `splits` fixes their number.

    bf16 queries on fp8 and bf16 rows are multiplied on bf16 tensor cores, fp16 queries on tf32 ones (which hold both
    exactly), everything fp32 without tensor cores. Sums are fp32. Launches depend on shapes only, so the call can be
    captured into a CUDA graph; lengths are read on the device.
    """
    stored = RowFormat.from_code(row_format)
    _check(q, window, entries, stored)
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    fp8 = stored is RowFormat.FP8
    if stored is RowFormat.FP32 or q.dtype == torch.float32:
        dot, precision = tl.float32, "ieee"
    elif q.dtype == torch.bfloat16:
        dot, precision = (tl.float32, "ieee") if _INTERPRETED else (tl.bfloat16, "tf32")
    elif q.dtype == torch.float16:
        dot, precision = tl.float32, "tf32"
    else:
        raise ValueError(f"q is {q.dtype}; expected bfloat16, float16 or float32")
    shared_memory, processors = _device(q.device.index) if q.is_cuda else (0, 1)
    tile = tiling(heads, fp8, dot == tl.float32, shared_memory)
    groups = triton.cdiv(heads, tile.heads)
    listed = window_rows.shape[1] + (entry_rows.shape[1] if entries is not None and entry_rows is not None else 0)
    if splits is None:
        splits = split_count(tokens, groups, triton.cdiv(listed, tile.rows), processors)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(tokens, splits, heads, ENTRY_DIM, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, splits, heads, 2, dtype=torch.float32, device=q.device)
    if entries is None or entry_rows is None or entry_lens is None:
        entries_args = (window, window_rows, window_lens)
    else:
        entries_args = (entries, entry_rows, entry_lens)
    shifts = [_block_shift(table) for table in (window, entries_args[0])]
    _attend_kernel[(tokens, splits, groups)](
        q,
        sink,
        window,
        window_rows,
        window_lens,
        *entries_args,
        positions,
        rope,
        out,
        partial,
        stats,
        scale,
        heads,
        splits,
        q.stride(0),
        q.stride(1),
        window_rows.stride(0),
        entries_args[1].stride(0),
        table_stride(window),
        table_stride(entries_args[0]),
        window.shape[1],
        entries_args[0].shape[1],
        *shifts,
        SHIFT=-1 not in shifts,
        FP8=fp8,
        FOLD=fp8 and q.dtype == torch.bfloat16,
        HAS_ENTRIES=entries is not None,
        SPLIT=splits > 1,
        DOT=dot,
        PRECISION=precision,
        BLOCK_H=tile.heads,
        BLOCK_N=tile.rows,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if splits > 1:
        _merge_kernel[(tokens, heads)](
            partial,
            stats,
            sink,
            positions,
            rope,
            out,
            heads,
            splits,
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out
