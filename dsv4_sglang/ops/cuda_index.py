"""`index_topk` on CUDA. Its steps are kernels of the extension (csrc/index).

The extension must be loaded before the first call (`ops.extension.load`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.ops.reference.read import reject_two_levels_at_once
from dsv4_sglang.ops.schemas import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)

# Entries of a candidate block and most heads in a selection of two levels (csrc/index/index.h). Without candidates,
# `index_topk` at ratios 1 and 2 scores blocks of this size first.
CANDIDATE_ENTRIES = 8
CANDIDATE_HEADS = 32
# From this number of tokens on, a layer that chooses candidates scores the entries of fewer blocks, the best ones:
# the scores of the other candidates would cost more than the launch that selects the best blocks.
MANY_TOKENS = 32


def score_columns(visible: int, top: int, listed_blocks: int) -> int:
    """Return the fp32 scores per token that `index_topk` needs as scratch.

    Args:
        visible: most visible entries.
        top: entries that a token selects.
        listed_blocks: most candidate blocks whose entries are scored (`listed_blocks`), 0 if all visible entries are.
    """
    if visible <= top:
        return 0
    if listed_blocks == 0:
        return visible
    blocks = -(-visible // CANDIDATE_ENTRIES)
    return max(blocks, CANDIDATE_ENTRIES * min(blocks, listed_blocks))


def listed_blocks(top: int, candidates: int) -> int:
    """Return the number of candidate blocks that contain the best `top` entries, and whose entries are scored.

    The best `top` blocks contain them. If `candidates` blocks are chosen, one of which may be the block of the newest
    entry instead, one more is needed.
    """
    return max(candidates, top + 1) if candidates else top


def prepare_query(
    q: Tensor, weights: Tensor, positions: Tensor, rope: Tensor, key_format: KeyFormat, hadamard: bool = True
) -> tuple[Tensor, Tensor]:
    """Prepare index queries and head weights for the kernels that score.

    Args:
        q: [T, Hi, 128] bf16 or fp32, raw index queries. bf16 queries are rounded between the stages.
        weights: [T, Hi] fp32.
        positions: [T] int64.
        rope: [positions, 64] fp32.
        key_format: format of the keys.
        hadamard: the keys have the Hadamard transform.

    Returns:
        Fake-quantised queries and weights of the same shapes, in the form that the kernels need on this GPU for this
        format and number of heads (csrc/index/layout.h): fp16, two e4m3 in place of each (the rest is unused), or fp32
        in order for FP32 keys.
    """
    out = torch.empty(q.shape, dtype=torch.float16 if key_format.is_fp4 else torch.float32, device=q.device)
    out_weights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    _OPS.index_query(q, weights, positions, rope, key_format.code, hadamard, out, out_weights)
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
    top = entry_indices.shape[1]
    for part in _slices(scores, entry_indices):
        cache = index_keys, block_table, token_request[part], positions[part]
        # Scores of all visible entries of each token that sees more than `top`, then the indices of the best ones.
        _OPS.index_score(query[part], weights[part], *cache, key_format, top, scores)
        _OPS.index_select(scores, *cache[1:], entry_indices[part])


def index_topk_of_blocks(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    rope: Tensor,
    scores: Tensor,
    entry_indices: Tensor,
    ratio: int,
    kept: Tensor | None,
    within: Tensor | None,
) -> None:
    """Compute the op `index_topk` at ratios 1 and 2, for MXFP4 keys without the Hadamard transform and candidate blocks
    of `CANDIDATE_ENTRIES` entries.

    The best entries are in the best blocks: an entry of another block has a lower score than the best entry of each of
    `top` blocks, or the same and a higher number. So the scores of all visible entries are never stored: first the best
    score of each block, then the scores of the entries of the best blocks, which may be `kept` for a few tokens.

    `scores` has at least `score_columns` columns, and may have fewer rows than there are tokens, as in `index_topk`.

    Raises:
        ValueError: both `kept` and `within` are given.
    """
    reject_two_levels_at_once(kept, within)
    tokens, top = entry_indices.shape
    visible = block_table.shape[1] * index_keys.shape[1]
    blocks = -(-visible // CANDIDATE_ENTRIES)
    if within is not None and blocks <= within.shape[1] and tokens >= MANY_TOKENS:
        within = None  # all blocks are candidates, and the scores of blocks share the decoded keys of many tokens
    query, weights = prepare_query(q, weights, positions, rope, KeyFormat.MXFP4, hadamard=False)
    lists = within
    if lists is None:
        kept_suffices = kept is not None and kept.shape[1] > top and tokens < MANY_TOKENS
        lists = kept if kept_suffices else entry_indices.new_empty(tokens, listed_blocks(top, 0 if kept is None else 1))
    assert lists is not None
    for part in _slices(scores, entry_indices):
        cache = index_keys, block_table, token_request[part], positions[part]
        if within is None:
            chosen = [lists[part]] if kept is None or kept is lists else [lists[part], kept[part]]
            best, fewest = scores[:, :blocks], min(numbers.shape[1] for numbers in chosen)
            if blocks > fewest:
                _OPS.index_score_blocks(query[part], weights[part], *cache, ratio, fewest, kept is not None, best)
            for numbers in chosen:
                _OPS.index_select_blocks(best, positions[part], ratio, numbers)
        listed = lists[part, :blocks]
        if visible > top:
            _OPS.index_score_listed(query[part], weights[part], *cache, ratio, listed, top, scores)
        _OPS.index_select_listed(scores, *cache[1:], ratio, listed, entry_indices[part])


def _slices(scores: Tensor, entry_indices: Tensor) -> Iterator[slice]:
    """Yield the tokens whose scores fit into the scratch at once."""
    tokens = len(entry_indices)
    at_once = len(scores) if scores.numel() else max(tokens, 1)
    return (slice(begin, begin + at_once) for begin in range(0, tokens, at_once))
