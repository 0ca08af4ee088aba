"""`index_topk_v41`: selection of entries for the queries of a step of DeepSeek-V4.1 (SPEC 11.6)."""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVBuffer
from dsv4_sglang.formats.quantise import mxfp4_values
from dsv4_sglang.ops.reference.read import Candidates, select
from dsv4_sglang.ops.rope import rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE


def index_query_v41(q: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
    """Rotate and fake-quantise raw index queries.

    MXFP4 in blocks of 32 with an unlimited range of scales, because queries are not stored (SPEC 11.4, 11.6).

    Args:
        q: [T, Hi, 128] bf16 or fp32.
        positions: [T].
        rope: [positions, 64] fp32.

    Returns:
        fp32 [T, Hi, 128].
    """
    return mxfp4_values(rounding(q.dtype)(rotate(q.float(), positions, rope)))


def reject_two_levels_at_once(kept: Tensor | None, within: Tensor | None) -> None:
    """Raise ValueError if `index_topk_v41` gets both `kept` and `within`."""
    if kept is not None and within is not None:
        raise ValueError(
            "index_topk_v41: both `kept` and `within` are given; a layer chooses candidates or selects within them"
        )


def index_topk_v41(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    rope: Tensor,
    ratio: int,
    candidate_block: int,
    kept: Tensor | None,
    within: Tensor | None,
    entry_indices: Tensor,
) -> None:
    """Select the K visible entries with the highest index scores for each token (SPEC 11.6).

    If at most K entries can be selected, all of them are. Of equal scores the entry, or block, with the lower number is
    selected.

    Selection has two levels. With `kept` the scores also choose the C best blocks of `candidate_block` entries. A block
    has the score of its best entry, and the block of the newest visible entry is always included. With `within` only
    entries of these blocks are selected.

    Args:
        q: [T, Hi, 128], raw index query before RoPE.
        weights: [T, Hi], with or without the factors 128^-0.5 Hi^-0.5.
        index_keys: uint8 [blocks, 128 / ratio, 72] of the layer that owns the entries.
        block_table: int32 [B, blocks], block ids of the requests.
        token_request: int32 [T].
        positions: int64 [T].
        rope: fp32 [positions, 64].
        ratio: 1 or 2. The token at position t selects among floor((t + 1) / ratio) entries.
        candidate_block: entries of a candidate block.
        kept: int32 [T, C], receives the numbers of the candidate blocks in ascending order, then -1.
        within: int32 [T, C], candidate blocks that an earlier layer wrote to `kept`.
        entry_indices: int32 [T, K], receives the buffer indices of the selected entries in ascending order of entries,
            then -1.

    Raises:
        ValueError: both `kept` and `within` are given.
    """
    reject_two_levels_at_once(kept, within)
    blocks = within if kept is None else kept
    select(
        lambda t: index_query_v41(q[t], positions[t], rope),
        weights,
        KVBuffer(index_keys, KeyFormat.MXFP4),
        block_table,
        token_request,
        (positions + 1) // ratio,
        entry_indices,
        None if blocks is None else Candidates(candidate_block, blocks, choose=kept is not None),
    )


torch.library.impl(f"{NAMESPACE}::index_topk_v41", "CPU", index_topk_v41)
