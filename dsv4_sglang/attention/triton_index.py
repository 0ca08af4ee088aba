"""`index_topk` in Triton, from sm_80: scores FP4 index keys and selects the best (SPEC 2.5, 4.1 to 4.3).

Three steps. The query is rotated, Hadamard-transformed and fake-quantised once. Scoring decodes the keys of a tile to
fp16, which holds every e2m1 x e4m3 product exactly, multiplies them with all heads on the tensor cores and sums the
weighted, rectified products over the heads. Selection
finds the score of rank k by bisection, in chunks whose winners meet in a second round.

Nothing depends on the order in which programs run. Launches depend on shapes only; lengths are read on the device.
Traffic of a decode step: 72 B a visible key, and its score (4 B) written and read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.ops.index_keys import FP4_WIDTH, INDEX_DIM, KEYS_PER_BLOCK, MXFP4, NVFP4

CSA_RATIO = tl.constexpr(4)
# Bits of an e2m1 number, moved to exponent and mantissa of an fp16, are that number times 2^-14; those of an e4m3
# scale, times 2^-8. Keys are kept times 2^-7: a scale of 448 then still fits, and the least product is a multiple of
# the least fp16.
SCALE_GAIN = tl.constexpr(2.0**15)
KEY_GAIN = tl.constexpr(2.0**7)
# The interpreter multiplies the bits of bf16 operands as if they were integers; there the products are taken in fp32.
_INTERPRETED = triton.knobs.runtime.interpret
_KEYS_A_TILE = 128
_TOKENS_A_TILE = 16
_STAGES = 3
_PROGRAMS_A_PROCESSOR = 4
# Scores that one program selects from, 16 a thread, and at most so many chunks: a compromise between the two rounds.
_CHUNK = 8192
_CHUNKS = 32


@triton.jit
def _bf16(x, ROUND: tl.constexpr):
    """One rounding stage of fp32 values: to the nearest bf16 for bf16 activations, none for fp32 ones."""
    if ROUND:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _e2m1(x):
    """Nearest e2m1 value, ties to even, saturating at 6. Adding 1.5 x 2^23 quanta leaves no bits below the quantum."""
    a = tl.minimum(tl.abs(x), 6.0)
    magic = tl.where(a < 2.0, 6291456.0, tl.where(a < 4.0, 12582912.0, 25165824.0))
    a = (a + magic) - magic
    return tl.where(x < 0, -a, a)


@triton.jit
def _e4m3(x):
    """Nearest e4m3 value of 2^-9 <= x <= 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    subnormal = (x + 24576.0) - 24576.0  # the quantum below 2^-6 is 2^-9
    return tl.where(x < 0.015625, subnormal, bits.to(tl.float32, bitcast=True))


@triton.jit
def _query_kernel(
    q_ptr,
    positions_ptr,
    rope_ptr,
    out_ptr,
    heads,
    q_token_stride,
    q_head_stride,
    ROUND: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (tokens, groups of BLOCK_H heads). Writes a head as its 64 even elements, then its 64 odd ones.

    FORMAT: 0 mxfp4, 1 nvfp4, -1 not quantised. With even and odd elements apart, the Hadamard transform of order 128
    is that of order 64 on their sum and on their difference.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (head < heads)[:, None]
    j = tl.arange(0, 64)
    at = q_ptr + token * q_token_stride + head[:, None] * q_head_stride + 2 * j[None, :]
    even = tl.load(at, mask=is_head, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=is_head, other=0.0).to(tl.float32)
    turn = rope_ptr + tl.load(positions_ptr + token) * 64 + 2 * (j - 32)
    cos = tl.load(turn, mask=j >= 32, other=1.0)[None, :]
    sin = tl.load(turn + 1, mask=j >= 32, other=0.0)[None, :]
    turned_even = _bf16(even * cos - odd * sin, ROUND)
    turned_odd = _bf16(odd * cos + even * sin, ROUND)

    parity = j[:, None] & j[None, :]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    hadamard = (1 - 2 * parity).to(DOT)
    even = tl.dot(turned_even.to(DOT), hadamard, input_precision="ieee")
    odd = tl.dot(turned_odd.to(DOT), hadamard, input_precision="ieee")
    y_even = (even + odd) * 0.08838834764831845
    y_odd = (even - odd) * 0.08838834764831845

    if FORMAT >= 0:
        y_even, y_odd = _bf16(y_even, True), _bf16(y_odd, True)
        GROUPS: tl.constexpr = 4 if FORMAT == 0 else 8
        amax = tl.maximum(tl.abs(y_even), tl.abs(y_odd))
        amax = tl.max(tl.reshape(amax, [BLOCK_H, GROUPS, 64 // GROUPS]), 2)
        if FORMAT == 0:
            bits = (tl.maximum(amax, 6.0 * 2.0**-126) * (1.0 / 6.0)).to(tl.int32, bitcast=True)
            exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
            exponent = tl.minimum(tl.maximum(exponent, 118), 135)
            scale = (exponent << 23).to(tl.float32, bitcast=True)
        else:
            scale = _e4m3(tl.minimum(tl.maximum(amax * (1.0 / 6.0), 0.001953125), 448.0))
        scale = tl.broadcast_to(scale[:, :, None], [BLOCK_H, GROUPS, 64 // GROUPS])
        scale = tl.reshape(scale, [BLOCK_H, 64])
        y_even = _e2m1(tl.math.div_rn(y_even, scale)) * scale
        y_odd = _e2m1(tl.math.div_rn(y_odd, scale)) * scale

    to = out_ptr + (token * heads + head[:, None]) * 128 + j[None, :]
    tl.store(to, y_even.to(out_ptr.dtype.element_ty), mask=is_head)
    tl.store(to + 64, y_odd.to(out_ptr.dtype.element_ty), mask=is_head)


@triton.jit
def _visible(position, top, width):
    """Entries to score for tokens at `position`: none where all visible ones are taken anyway (SPEC 4.2, 4.3)."""
    visible = tl.minimum((position + 1) // CSA_RATIO, width).to(tl.int32)
    return tl.where(visible > top, visible, 0)


# The same as _fp16_of_e2m1 on four bytes at once: two bytes to the upper halves of the two 16-bit lanes of a register,
# then the sign of a nibble to bit 15 and its other bits to 11..9. Even elements leave in $0 and $1, odd ones in $2 and
# $3. The input is read before an output is written: they may share a register.
_DECODE_FOUR_BYTES = tl.constexpr(
    "{ .reg .b32 t0, t1, s, u; prmt.b32 t0, $4, 0, 0x1404; prmt.b32 t1, $4, 0, 0x3424;"
    + "".join(
        f"shl.b32 s, t{i}, 1; and.b32 s, s, 0x0E000E00; shl.b32 u, t{i}, 4;"
        f"lop3.b32 ${i}, u, 0x80008000, s, 0xEA;"
        f"shr.b32 s, t{i}, 3; and.b32 s, s, 0x0E000E00;"
        f"lop3.b32 ${i + 2}, t{i}, 0x80008000, s, 0xEA;"
        for i in (0, 1)
    )
    + "}"
)


@triton.jit
def _fp16_of_e2m1(nibble):
    """4-bit codes in uint16 -> fp16 values times 2^-14."""
    return (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def _decode(code, INTERPRETED: tl.constexpr):
    """Bytes of two e2m1 codes -> the even and the odd elements, fp16 times 2^-14."""
    if INTERPRETED:
        code = code.to(tl.uint16)
        even, odd = _fp16_of_e2m1(code & 0xF), _fp16_of_e2m1(code >> 4)
    else:
        even, odd = tl.inline_asm_elementwise(
            _DECODE_FOUR_BYTES, "=r,=r,=r,=r,r", [code], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return even, odd


@triton.jit
def _load_keys(
    keys_ptr, table_at, key, visible, block_stride, FP4: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Even and odd elements of the keys `key` of a request, [BLOCK_N, 64] each: fp16 times 2^-7 from FP4, else fp32."""
    ok = key < visible
    block = tl.load(table_at + key // 32, mask=ok, other=0).to(tl.int64)
    block_at = keys_ptr + block * tl.multiple_of(block_stride, 16)
    slot = key % 32
    if FP4:
        group = tl.arange(0, 8)
        scale_at = block_at[:, None] + (2048 + slot[:, None] * 8 + group[None, :])
        scale = tl.load(scale_at, mask=ok[:, None], other=0).to(tl.uint16)
        scale = (scale << 7).to(tl.float16, bitcast=True) * SCALE_GAIN
        scale = scale[:, :, None]
        inner = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        code = tl.load(block_at[:, None, None] + (slot[:, None, None] * 64 + inner), mask=ok[:, None, None], other=0)
        even, odd = _decode(code, INTERPRETED)
        even = tl.reshape(even * scale, [BLOCK_N, 64])
        odd = tl.reshape(odd * scale, [BLOCK_N, 64])
    else:
        at = block_at[:, None] + slot[:, None] * 128 + 2 * tl.arange(0, 64)[None, :]
        even = tl.load(at, mask=ok[:, None], other=0.0)
        odd = tl.load(at + 1, mask=ok[:, None], other=0.0)
    return even, odd


@triton.jit
def _load_query(query_ptr, weights_ptr, token, heads, weights_stride, FP4: tl.constexpr, BLOCK_H: tl.constexpr):
    """Even and odd elements of the heads of a token, [64, BLOCK_H] each, and the weights of the heads."""
    head = tl.arange(0, BLOCK_H)
    is_head = head < heads
    at = query_ptr + (token * heads + head[None, :]) * 128 + tl.arange(0, 64)[:, None]
    even = tl.load(at, mask=is_head[None, :], other=0.0)
    odd = tl.load(at + 64, mask=is_head[None, :], other=0.0)
    weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0)
    if FP4:
        weight = weight * KEY_GAIN
    return even, odd, weight


@triton.jit
def _scores(k_even, k_odd, q_even, q_odd, weight):
    """sum over heads of weight x ReLU(key . query), fp32 (SPEC 4.1)."""
    product = tl.dot(k_even, q_even, input_precision="ieee")
    product = tl.dot(k_odd, q_odd, product, input_precision="ieee")
    return tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)


@triton.jit
def _score_decode_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    request_ptr,
    positions_ptr,
    scores_ptr,
    tokens,
    heads,
    top,
    width,
    weights_stride,
    table_stride,
    scores_stride,
    block_stride,
    FP4: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Any number of programs: each takes an equal stretch of the tiles of all tokens, one token after the other."""
    t = tl.arange(0, BLOCK_T)
    tiles = tl.cdiv(_visible(tl.load(positions_ptr + t, mask=t < tokens, other=-1), top, width), BLOCK_N)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    share = tl.cdiv(total, tl.num_programs(0))
    at = tl.minimum(tl.program_id(0) * share, total)
    stop = tl.minimum(at + share, total)
    while at < stop:
        number = tl.sum((ends <= at).to(tl.int32), 0)
        first = tl.sum(tl.where(t < number, tiles, 0), 0)
        until = tl.minimum(first + tl.sum(tl.where(t == number, tiles, 0), 0), stop)
        token = number.to(tl.int64)
        visible = _visible(tl.load(positions_ptr + token), top, width)
        table_at = table_ptr + tl.load(request_ptr + token).to(tl.int64) * table_stride
        q_even, q_odd, weight = _load_query(query_ptr, weights_ptr, token, heads, weights_stride, FP4, BLOCK_H)
        for tile in tl.range(at - first, until - first, num_stages=STAGES):
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            k_even, k_odd = _load_keys(keys_ptr, table_at, key, visible, block_stride, FP4, BLOCK_N, INTERPRETED)
            score = _scores(k_even, k_odd, q_even, q_odd, weight)
            tl.store(scores_ptr + token * scores_stride + key, score, mask=key < visible)
        at = until


@triton.jit
def _score_prefill_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    request_ptr,
    positions_ptr,
    scores_ptr,
    tokens,
    heads,
    top,
    width,
    weights_stride,
    table_stride,
    scores_stride,
    block_stride,
    FP4: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (groups of BLOCK_T tokens, splits): a key tile is decoded once for the tokens of one request."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    request = tl.load(request_ptr + t, mask=t < tokens, other=-1)
    visible = _visible(tl.load(positions_ptr + t, mask=t < tokens, other=-1), top, width)
    at = tl.program_id(0) * BLOCK_T
    stop = tl.minimum(at + BLOCK_T, tokens)
    while at < stop:
        number = tl.max(tl.where(t == at, request, -1), 0)
        same = (t >= at) & (request == number)
        until = at + tl.sum(same.to(tl.int32), 0)
        most = tl.max(tl.where(same, visible, 0), 0)
        table_at = table_ptr + number.to(tl.int64) * table_stride
        for tile in range(tl.program_id(1), tl.cdiv(most, BLOCK_N), tl.num_programs(1)):
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            k_even, k_odd = _load_keys(keys_ptr, table_at, key, most, block_stride, FP4, BLOCK_N, INTERPRETED)
            for i in range(at, until):
                token = tl.cast(i, tl.int64)
                seen = tl.max(tl.where(t == i, visible, 0), 0)
                q_even, q_odd, weight = _load_query(query_ptr, weights_ptr, token, heads, weights_stride, FP4, BLOCK_H)
                score = _scores(k_even, k_odd, q_even, q_odd, weight)
                tl.store(scores_ptr + token * scores_stride + key, score, mask=key < seen)
        at = until


@triton.jit
def _take_largest(score, valid, count):
    """Mask of the `count` largest of the valid scores (at least that many), the first of equal ones.

    Halves the interval in which the score of rank `count` lies until it holds one number or divides the scores right.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    # Integers in the order of the scores: the magnitude of negative numbers turned round; what is not valid below all.
    key = tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        found = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        low = tl.where(found >= count, middle, low)
        high = tl.where(found > count, high, tl.where(found == count, middle, middle - 1))
    least = low.to(tl.int32)
    above = key > least
    equal = valid & (key == least)
    left = count - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))


@triton.jit
def _write_rows(rows_at, table_at, entry, taken, count, top, TOP: tl.constexpr):
    """Table rows of the taken entries in their order, -1 behind them."""
    row = tl.load(table_at + entry // 32, mask=taken, other=0) * 32 + entry % 32
    tl.store(rows_at + tl.cumsum(taken.to(tl.int32), 0) - 1, row, mask=taken)
    i = tl.arange(0, TOP)
    tl.store(rows_at + i, -1, mask=(i >= count) & (i < top))


@triton.jit
def _select_kernel(
    scores_ptr,
    table_ptr,
    request_ptr,
    positions_ptr,
    rows_ptr,
    winners_ptr,
    winner_scores_ptr,
    top,
    width,
    table_stride,
    scores_stride,
    rows_stride,
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
):
    """Grid (tokens, chunks): the rows of a token that fits one chunk, else the `top` winners of each chunk."""
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    visible = ((tl.load(positions_ptr + token) + 1) // CSA_RATIO).to(tl.int32)
    table_at = table_ptr + tl.load(request_ptr + token).to(tl.int64) * table_stride
    rows_at = rows_ptr + token * rows_stride
    i = tl.arange(0, CHUNK)
    if visible <= top:
        if chunk == 0:
            _write_rows(rows_at, table_at, i, i < visible, visible, top, TOP)
    else:
        visible = tl.minimum(visible, width)
        entry = chunk * CHUNK + i
        mine = tl.minimum(visible - chunk * CHUNK, CHUNK)
        if mine > 0:
            count = tl.minimum(mine, top)
            score = tl.load(scores_ptr + token * scores_stride + entry, mask=i < mine, other=0.0)
            taken = _take_largest(score, i < mine, count)
            if visible <= CHUNK:
                _write_rows(rows_at, table_at, entry, taken, count, top, TOP)
            else:
                to = (token * tl.num_programs(1) + chunk) * top + tl.cumsum(taken.to(tl.int32), 0) - 1
                tl.store(winners_ptr + to, entry, mask=taken)
                tl.store(winner_scores_ptr + to, score, mask=taken)


@triton.jit
def _take_winners(
    rows_at,
    table_at,
    winners_at,
    winner_scores_at,
    top,
    visible,
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
    N: tl.constexpr,
):
    """Select from the first N places of the winners of a token's chunks."""
    i = tl.arange(0, N)
    chunk = i // top
    valid = i - chunk * top < visible - chunk * CHUNK
    score = tl.load(winner_scores_at + i, mask=valid, other=0.0)
    entry = tl.load(winners_at + i, mask=valid, other=0)
    _write_rows(rows_at, table_at, entry, _take_largest(score, valid, top), top, top, TOP)


@triton.jit
def _final_kernel(
    table_ptr,
    request_ptr,
    positions_ptr,
    rows_ptr,
    winners_ptr,
    winner_scores_ptr,
    top,
    width,
    chunks,
    table_stride,
    rows_stride,
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
    FEW: tl.constexpr,
    WINNERS: tl.constexpr,
):
    """Grid (tokens): the rows of a token of more than one chunk, from the winners of its chunks.

    A captured graph reckons with the longest context; most tokens have FEW winners, at a fraction of the work.
    """
    token = tl.program_id(0).to(tl.int64)
    visible = tl.minimum((tl.load(positions_ptr + token) + 1) // CSA_RATIO, width).to(tl.int32)
    if visible > tl.maximum(top, CHUNK):
        table_at = table_ptr + tl.load(request_ptr + token).to(tl.int64) * table_stride
        rows_at = rows_ptr + token * rows_stride
        winners_at = winners_ptr + token * chunks * top
        scores_at = winner_scores_ptr + token * chunks * top
        if tl.cdiv(visible, CHUNK) * top <= FEW:
            _take_winners(rows_at, table_at, winners_at, scores_at, top, visible, CHUNK, TOP, FEW)
        else:
            _take_winners(rows_at, table_at, winners_at, scores_at, top, visible, CHUNK, TOP, WINNERS)


@functools.cache
def _processors(index: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(index)["multiprocessor_count"]


def prepare_query(q: Tensor, positions: Tensor, rope: Tensor, quantised: bool, index_format: int) -> Tensor:
    """Raw index queries [T, Hi, 128] -> what keys are multiplied with, [T, Hi, 2, 64]: even elements, then odd ones.

    fp16, which holds fake-quantised values exactly; fp32 where not `quantised`. bf16 queries are rounded between the
    stages.
    """
    tokens, heads, _ = q.shape
    rounded = q.dtype == torch.bfloat16
    out = torch.empty(tokens, heads, 2, 64, dtype=torch.float16 if quantised else torch.float32, device=q.device)
    block = min(max(16, triton.next_power_of_2(heads)), 64 if rounded else 16)
    _query_kernel[(tokens, triton.cdiv(heads, block))](
        q,
        positions,
        rope,
        out,
        heads,
        q.stride(0),
        q.stride(1),
        ROUND=rounded,
        FORMAT=index_format if quantised else -1,
        DOT=tl.bfloat16 if rounded and not _INTERPRETED else tl.float32,
        BLOCK_H=block,
        num_warps=4,
    )
    return out


def score(
    query: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    top: int,
    scores: Tensor,
) -> None:
    """Write `scores[t, i]` of every visible entry i of each token that sees more than `top`; `query` is prepared."""
    tokens, heads = query.shape[:2]
    fp4 = index_keys.dtype == torch.uint8
    keys = _KEYS_A_TILE if fp4 else 16
    processors = _processors(query.device.index) if query.is_cuda else 2
    args = (
        query,
        weights,
        index_keys,
        block_table,
        token_request,
        positions,
        scores,
        tokens,
        heads,
        top,
        scores.shape[1],
    )
    strides = (weights.stride(0), block_table.stride(0), scores.stride(0), index_keys.stride(0))
    block_h = max(16, triton.next_power_of_2(heads))
    tiles = triton.cdiv(scores.shape[1], keys)
    if tokens == block_table.shape[0] and tokens <= 1024:
        _score_decode_kernel[(min(tokens * tiles, _PROGRAMS_A_PROCESSOR * processors),)](
            *args,
            *strides,
            FP4=fp4,
            BLOCK_T=triton.next_power_of_2(tokens),
            BLOCK_H=block_h,
            BLOCK_N=keys,
            STAGES=_STAGES,
            INTERPRETED=_INTERPRETED,
            num_warps=4,
        )
    else:
        groups = triton.cdiv(tokens, _TOKENS_A_TILE)
        _score_prefill_kernel[(groups, min(tiles, triton.cdiv(8 * processors, groups)))](
            *args,
            *strides,
            FP4=fp4,
            BLOCK_T=_TOKENS_A_TILE,
            BLOCK_H=block_h,
            BLOCK_N=keys,
            INTERPRETED=_INTERPRETED,
            num_warps=4,
        )


def select(
    scores: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    rows: Tensor,
    chunk: int | None = None,
) -> None:
    """Write the rows of the `rows.shape[1]` best visible entries of each token; `chunk` scores go to one program."""
    tokens, top = rows.shape
    width = scores.shape[1]
    if chunk is None:
        chunk = max(min(width, _CHUNK), -(-width // _CHUNKS))
    chunk = triton.next_power_of_2(max(chunk, top))
    chunks = max(1, triton.cdiv(width, chunk))
    top_block = triton.next_power_of_2(top)
    winners = torch.empty(tokens, chunks if chunks > 1 else 0, top, dtype=torch.int32, device=rows.device)
    winner_scores = torch.empty(winners.shape, dtype=torch.float32, device=rows.device)
    _select_kernel[(tokens, chunks)](
        scores,
        block_table,
        token_request,
        positions,
        rows,
        winners,
        winner_scores,
        top,
        width,
        block_table.stride(0),
        scores.stride(0),
        rows.stride(0),
        CHUNK=chunk,
        TOP=top_block,
        num_warps=min(max(chunk // 512, 4), 32),
    )
    if chunks > 1:
        candidates = triton.next_power_of_2(chunks * top)
        few = min(candidates, triton.next_power_of_2(8 * top))
        _final_kernel[(tokens,)](
            block_table,
            token_request,
            positions,
            rows,
            winners,
            winner_scores,
            top,
            width,
            chunks,
            block_table.stride(0),
            rows.stride(0),
            CHUNK=chunk,
            TOP=top_block,
            FEW=few,
            WINNERS=candidates,
            num_warps=min(max(candidates // 512, 4), 32),
        )


def _check(q: Tensor, index_keys: Tensor, index_format: int, rows: Tensor) -> None:
    if q.dim() != 3 or q.shape[-1] != INDEX_DIM or q.stride(-1) != 1 or q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)}; "
            f"expected bfloat16 or float32 [tokens, heads, {INDEX_DIM}] with inner stride 1"
        )
    width = FP4_WIDTH if index_keys.dtype == torch.uint8 else INDEX_DIM
    if index_keys.dtype not in (torch.uint8, torch.float32) or index_keys.shape[1:] != (KEYS_PER_BLOCK, width):
        raise ValueError(
            f"index_keys is {index_keys.dtype} {tuple(index_keys.shape)}; expected [blocks, {KEYS_PER_BLOCK}, width], "
            f"uint8 of width {FP4_WIDTH} or float32 of width {INDEX_DIM}"
        )
    if index_format not in (MXFP4, NVFP4):
        raise ValueError(f"index_format is {index_format}; expected {MXFP4} (mxfp4) or {NVFP4} (nvfp4)")
    if rows.dtype != torch.int32 or rows.stride(1) != 1:
        raise ValueError(f"rows is {rows.dtype} with stride {rows.stride()}; expected int32 with inner stride 1")


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    rope: Tensor,
    index_format: int,
    scores: Tensor,
    rows: Tensor,
) -> None:
    """The op `index_topk` (`dsv4_sglang.ops.reference.read.index_topk` says what the tensors are).

    `scores` may have fewer rows than there are tokens: they are then handled in slices of that many, so a long prefill
    needs no scratch of tokens x entries. Without columns (no token sees more entries than are selected) nothing is
    scored. The tokens of a request lie together.
    """
    _check(q, index_keys, index_format, rows)
    tokens, top = rows.shape
    if tokens == 0:
        return
    at_once = scores.shape[0] if scores.numel() else tokens
    query = None
    if scores.numel():
        query = prepare_query(q, positions, rope, index_keys.dtype == torch.uint8, index_format)
    for begin in range(0, tokens, at_once):
        part = slice(begin, min(begin + at_once, tokens))
        own = scores[: part.stop - begin] if scores.numel() else scores.view(0, 0)
        if query is not None:
            score(query[part], weights[part], index_keys, block_table, token_request[part], positions[part], top, own)
        select(own, block_table, token_request[part], positions[part], rows[part])
