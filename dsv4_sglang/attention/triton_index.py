"""`index_topk` of V4.1 in Triton and PyTorch for any CUDA device from sm_80 (SPEC 11.6).

A kernel scores the visible entries or, in a layer that selects within candidate blocks, the entries of these blocks.
For each entry it writes a 64-bit sort key: the ordered bits of the score above the complement of the entry's number. So
all keys differ, and of equal scores the entry with the lower number comes first. Top-k of these keys gives the
selection.

Bytes: 72 per key and token, and 8 written per score. Scores are processed in slices of `MAX_SCORES`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.attention.tensor_checks import FLOATS, TensorChecker
from dsv4_sglang.attention.triton_entries import e2m1, e4m3, table_stride
from dsv4_sglang.attention.triton_softmax import products
from dsv4_sglang.formats import KeyFormat, KVFormat, index_keys
from dsv4_sglang.formats.index_keys import INDEX_DIM
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.ops.reference.read import index_query, reject_two_levels_at_once

# Number of scores that are processed at once, 256 MiB of sort keys.
MAX_SCORES = 1 << 25

_ENTRIES_PER_PROGRAM = 64

KEY_DIM = tl.constexpr(INDEX_DIM)
KEY_BYTES = tl.constexpr(index_keys.KEY_BYTES)
KEY_SCALES = tl.constexpr(index_keys.KEY_SCALES)
# Sort key of an entry that cannot be selected.
NO_ENTRY = -(1 << 63)


@triton.jit
def _score_kernel(
    query_ptr, weights_ptr, keys_ptr, block_table_ptr, token_request_ptr, positions_ptr, within_ptr, orders_ptr,
    heads, columns, per_block, block_stride, block_table_stride, within_stride,
    RATIO: tl.constexpr, WITHIN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of BLOCK_N columns). WITHIN is the number of entries of a candidate block; 0: columns are
    entries.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    visible = (tl.load(positions_ptr + token) + 1) // RATIO
    if WITHIN:
        block = tl.load(within_ptr + token * within_stride + column // WITHIN, mask=column < columns, other=-1)
        entry = block * WITHIN + column % WITHIN
    else:
        entry = column
    allowed = (entry >= 0) & (entry < visible) & (column < columns)
    request = tl.load(token_request_ptr + token)
    table_at = block_table_ptr + request.to(tl.int64) * block_table_stride
    block = tl.load(table_at + entry // per_block, mask=allowed, other=0)
    allowed = allowed & (block >= 0)  # at ratio 1 a padding token, at position 0, would see an entry
    inside = (entry % per_block)[:, None]
    block_at = keys_ptr + (block.to(tl.int64) * block_stride)[:, None]

    dim = tl.arange(0, KEY_DIM)[None, :]
    is_key = allowed[:, None]
    codes = tl.load(block_at + inside * KEY_BYTES + dim // 2, mask=is_key, other=0).to(tl.int32)
    scale_at = block_at + per_block * KEY_BYTES + inside * KEY_SCALES + dim // (KEY_DIM // KEY_SCALES)
    key = e2m1((codes >> (dim % 2 * 4)) & 15) * e4m3(tl.load(scale_at, mask=is_key, other=0))

    head = tl.arange(0, BLOCK_H)
    is_head = head < heads
    query_at = query_ptr + (token * heads + head[:, None]) * KEY_DIM + dim
    query = tl.load(query_at, mask=is_head[:, None], other=0.0).to(DOT)
    weight = tl.load(weights_ptr + token * heads + head, mask=is_head, other=0.0).to(tl.float32)
    product = tl.dot(key.to(DOT), tl.trans(query), input_precision=PRECISION)
    score = tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)

    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = (order.to(tl.int64) << 32) | (0xFFFFFFFF - entry.to(tl.int64))
    order = tl.where(allowed, order, -(1 << 63))
    tl.store(orders_ptr + token * columns + column, order, mask=column < columns)


def _best(orders: Tensor, top: int) -> Tensor:
    """Return [n, top] numbers of the entries with the largest keys, in ascending order, padded with -1."""
    values = orders.topk(min(top, orders.shape[1]), sorted=False).values
    none = 0xFFFFFFFF
    number = torch.where(values == NO_ENTRY, none, none - (values & none)).sort(1).values
    return pad(number.masked_fill(number == none, -1), (0, top - number.shape[1]), value=-1)


def _best_blocks(orders: Tensor, visible: Tensor, size: int, most: int) -> Tensor:
    """Return [n, most] numbers of the best blocks of `size` entries, always including the newest block."""
    blocks = pad(orders, (0, -orders.shape[1] % size), value=NO_ENTRY).unflatten(1, (-1, size)).amax(-1)
    number = torch.arange(blocks.shape[1], device=blocks.device)
    low = 0xFFFFFFFF - number
    newest = number == (visible[:, None] - 1) // size
    ordered = torch.where(newest, (0x7FFFFFFF << 32) | low, (blocks >> 32 << 32) | low)
    return _best(ordered.masked_fill(blocks == NO_ENTRY, NO_ENTRY), most)


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    rope: Tensor,
    key_format: int,
    scores: Tensor,
    entry_indices: Tensor,
    ratio: int,
    hadamard: bool,
    candidate_block: int,
    kept: Tensor | None,
    within: Tensor | None,
) -> None:
    """Compute the op `index_topk` for MXFP4 keys without the Hadamard transform
    (`dsv4_sglang.ops.reference.read.index_topk` documents the tensors). `scores` is not used.

    Launches depend on shapes only; lengths are read on the device.

    Raises:
        ValueError: the keys have another form, both `kept` and `within` are given, or a tensor has another dtype,
            shape, stride, alignment or device than the kernel reads.
    """
    if hadamard or key_format != KeyFormat.MXFP4.code:
        raise ValueError(
            f"index_topk: keys of ratio {ratio} in {KeyFormat.from_code(key_format).value}, "
            f"{'with' if hadamard else 'without'} the Hadamard transform; expected mxfp4 without it, or ratio 4 with "
            "it and without candidates"
        )
    reject_two_levels_at_once(kept, within)
    per_block = BLOCK_TOKENS // ratio
    columns = block_table.shape[1] * per_block if within is None else within.shape[1] * candidate_block
    check = TensorChecker("index_topk", q.device)
    check.tensor("q", q, FLOATS, (None, None, INDEX_DIM), dense_from=3)
    tokens, heads, _ = q.shape
    check.tensor("weights", weights, FLOATS, (tokens, heads), dense_from=2)
    check.table("index_keys", index_keys, KeyFormat.MXFP4, per_block)
    check.tensor("block_table", block_table, torch.int32, (None, None), dense_from=1)
    check.tensor("token_request", token_request, torch.int32, (tokens,))
    check.rotation(tokens, positions, rope)
    for name, blocks in (("kept", kept), ("within", within)):
        if blocks is not None:
            check.tensor(name, blocks, torch.int32, (tokens, None), dense_from=1)
    check.tensor("entry_indices", entry_indices, torch.int32, (tokens, None), dense_from=2)
    if tokens == 0 or columns == 0:
        entry_indices.fill_(-1)
        return
    # FP4 values are exact in bf16, and their products are exact in the fp32 sums.
    dot, precision = products(torch.bfloat16, KVFormat.FP8)
    at_once = max(1, MAX_SCORES // columns)
    for begin in range(0, tokens, at_once):
        part = slice(begin, begin + at_once)
        query = index_query(q[part], positions[part], rope, KeyFormat.MXFP4, hadamard=False).contiguous()
        orders = torch.empty(len(query), columns, dtype=torch.int64, device=q.device)
        chosen = None if within is None else within[part]
        _score_kernel[(len(query), triton.cdiv(columns, _ENTRIES_PER_PROGRAM))](
            *(query, weights[part].contiguous(), index_keys, block_table, token_request[part], positions[part]),
            *(block_table if chosen is None else chosen, orders, heads, columns, per_block),
            *(table_stride(index_keys), block_table.stride(0), 0 if chosen is None else chosen.stride(0)),
            RATIO=ratio,
            WITHIN=0 if chosen is None else candidate_block,
            DOT=dot,
            PRECISION=precision,
            BLOCK_H=max(16, triton.next_power_of_2(heads)),
            BLOCK_N=_ENTRIES_PER_PROGRAM,
            num_warps=4,
        )
        if kept is not None:
            visible = (positions[part] + 1) // ratio
            kept[part] = _best_blocks(orders, visible, candidate_block, kept.shape[1]).to(kept.dtype)
        entry = _best(orders, entry_indices.shape[1])
        seen = entry.clamp_min(0)
        block = block_table[token_request[part].long()].gather(1, seen // per_block)
        entry_indices[part] = (block * per_block + seen % per_block).masked_fill(entry < 0, -1).to(entry_indices.dtype)
