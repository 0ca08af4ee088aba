"""`index_topk` on CUDA: its three steps, kernels of the extension (csrc/index), which must have been loaded."""

import torch
from torch import Tensor

from dsv4_sglang.ops.schemas import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


def prepare_query(q: Tensor, positions: Tensor, rope: Tensor, quantised: bool, index_format: int) -> Tensor:
    """Raw index queries [T, Hi, 128] -> what `score` takes, [T, Hi, 128].

    fp16, which holds fake-quantised values exactly, in the order of places that `score` wants on this GPU for that many
    heads (csrc/index/layout.h); fp32 in order where not `quantised`. bf16 queries are rounded between the stages.
    """
    out = torch.empty(q.shape, dtype=torch.float16 if quantised else torch.float32, device=q.device)
    _OPS.index_query(q, positions, rope, index_format, out)
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
    _OPS.index_score(query, weights, index_keys, block_table, token_request, positions, top, scores)


def select(scores: Tensor, block_table: Tensor, token_request: Tensor, positions: Tensor, rows: Tensor) -> None:
    """Write the rows of the `rows.shape[1]` best visible entries of each token."""
    _OPS.index_select(scores, block_table, token_request, positions, rows)


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
    scored.
    """
    tokens, top = rows.shape
    if scores.numel() == 0:
        select(scores.view(0, 0), block_table, token_request, positions, rows)
        return
    query = prepare_query(q, positions, rope, index_keys.dtype == torch.uint8, index_format)
    at_once = scores.shape[0]
    if tokens <= at_once:
        score(query, weights, index_keys, block_table, token_request, positions, top, scores)
        select(scores, block_table, token_request, positions, rows)
        return
    for begin in range(0, tokens, at_once):
        part = slice(begin, begin + at_once)
        score(query[part], weights[part], index_keys, block_table, token_request[part], positions[part], top, scores)
        select(scores, block_table, token_request[part], positions[part], rows[part])
