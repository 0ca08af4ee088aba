"""`index_topk` of V4's CSA layers on CUDA. Its three steps are kernels of the extension (csrc/index).

The extension must be loaded before the first call (`ops.extension.load`).
"""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.ops.schemas import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


def prepare_query(
    q: Tensor, weights: Tensor, positions: Tensor, rope: Tensor, key_format: KeyFormat
) -> tuple[Tensor, Tensor]:
    """Prepare index queries and head weights for the kernel `index_score`.

    Args:
        q: [T, Hi, 128] bf16 or fp32, raw index queries. bf16 queries are rounded between the stages.
        weights: [T, Hi] fp32.
        positions: [T] int64.
        rope: [positions, 64] fp32.
        key_format: format of the keys.

    Returns:
        Fake-quantised queries and weights of the same shapes, in the form that `index_score` needs on this GPU for this
        format and number of heads (csrc/index/layout.h): fp16, two e4m3 in place of each (the rest is unused), or fp32
        in order for FP32 keys.
    """
    out = torch.empty(q.shape, dtype=torch.float16 if key_format.is_fp4 else torch.float32, device=q.device)
    out_weights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    _OPS.index_query(q, weights, positions, rope, key_format.code, out, out_weights)
    return out, out_weights


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
) -> None:
    """Compute the op `index_topk` at ratio 4 with the Hadamard transform (`dsv4_sglang.ops.reference.read.index_topk`
    documents the tensors).

    `scores` may have fewer rows than there are tokens. Tokens are then processed in slices of that size, so a long
    prefill needs no scratch of tokens x entries. If `scores` has no columns (no token sees more entries than are
    selected), nothing is scored.
    """
    if scores.numel() == 0:
        _OPS.index_select(scores.view(0, 0), block_table, token_request, positions, entry_indices)
        return
    query, weights = prepare_query(q, weights, positions, rope, KeyFormat.from_code(key_format))
    tokens, top = entry_indices.shape
    for begin in range(0, tokens, len(scores)):
        part = slice(begin, begin + len(scores))
        cache = index_keys, block_table, token_request[part], positions[part]
        # Scores of all visible entries of each token that sees more than `top`, then the indices of the best ones.
        _OPS.index_score(query[part], weights[part], *cache, key_format, top, scores)
        _OPS.index_select(scores, *cache[1:], entry_indices[part])
