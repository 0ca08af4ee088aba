"""`index_topk` on CUDA. Its three steps are kernels of the extension (csrc/index).

Importing this module registers the op and needs no GPU. The extension must be loaded before the first call
(`ops.extension.load`).
"""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.ops.schemas import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


def prepare_query(
    q: Tensor, weights: Tensor, positions: Tensor, rope: Tensor, key_format: KeyFormat
) -> tuple[Tensor, Tensor]:
    """Prepare index queries and head weights for `score`.

    Args:
        q: [T, Hi, 128] bf16 or fp32, raw index queries. bf16 queries are rounded between the stages.
        weights: [T, Hi] fp32.
        positions: [T] int64.
        rope: [positions, 64] fp32.
        key_format: format of the keys.

    Returns:
        Fake-quantised queries and weights of the same shapes, in the form that `score` needs on this GPU for this
        format and number of heads (csrc/index/layout.h): fp16, two e4m3 in place of each (the rest is unused), or fp32
        in order for FP32 keys.
    """
    out = torch.empty(q.shape, dtype=torch.float16 if key_format.is_fp4 else torch.float32, device=q.device)
    out_weights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    _OPS.index_query(q, weights, positions, rope, key_format.code, out, out_weights)
    return out, out_weights


def score(
    query: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    key_format: KeyFormat,
    top: int,
    scores: Tensor,
) -> None:
    """Write the scores of all visible entries for each token that sees more than `top` entries.

    Args:
        query, weights: from `prepare_query`.
        index_keys, block_table, token_request, positions: as in `index_topk`.
        key_format: format of the keys.
        top: number of entries that a token selects.
        scores: fp32 [>= T, entries], receives `scores[t, i]` of entry i.
    """
    _OPS.index_score(query, weights, index_keys, block_table, token_request, positions, key_format.code, top, scores)


def select(scores: Tensor, block_table: Tensor, token_request: Tensor, positions: Tensor, rows: Tensor) -> None:
    """Write the indices of the best visible entries of each token.

    Args:
        scores: from `score`; without columns if no token sees more entries than it selects.
        block_table, token_request, positions: as in `index_topk`.
        rows: int32 [T, K], receives the buffer indices of the K best entries.
    """
    _OPS.index_select(scores, block_table, token_request, positions, rows)


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
    rows: Tensor,
) -> None:
    """Compute the op `index_topk` (`dsv4_sglang.ops.reference.read.index_topk` documents the tensors).

    `scores` may have fewer rows than there are tokens. Tokens are then processed in slices of that size, so a long
    prefill needs no scratch of tokens x entries. If `scores` has no columns (no token sees more entries than are
    selected), nothing is scored.
    """
    tokens, top = rows.shape
    if scores.numel() == 0:
        select(scores.view(0, 0), block_table, token_request, positions, rows)
        return
    keys = KeyFormat.from_code(key_format)
    query, weights = prepare_query(q, weights, positions, rope, keys)
    at_once = scores.shape[0]
    for begin in range(0, tokens, at_once):
        part = slice(begin, begin + at_once)
        owners, where = token_request[part], positions[part]
        score(query[part], weights[part], index_keys, block_table, owners, where, keys, top, scores)
        select(scores, block_table, owners, where, rows[part])


torch.library.impl(f"{NAMESPACE}::index_topk", "CUDA", index_topk)
