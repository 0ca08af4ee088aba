"""`index_topk_v41` and `attend_v41`: what the queries of a step of DeepSeek-V4.1 read (SPEC 11.6)."""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KeyTable
from dsv4_sglang.formats.index_keys import mxfp4_values
from dsv4_sglang.formats.v41_entries import V41KVFormat, V41Table
from dsv4_sglang.ops.reference.read import Candidates, attend_to, select
from dsv4_sglang.ops.rope import rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE


def index_query_v41(q: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
    """Raw index queries [T, Hi, 128] -> rotated and fake-quantised, fp32: MXFP4 of blocks of 32 with every scale, as
    they are not stored (SPEC 11.4, 11.6)."""
    return mxfp4_values(rounding(q.dtype)(rotate(q.float(), positions, rope)))


def reject_two_levels_at_once(kept: Tensor | None, within: Tensor | None) -> None:
    """Raises ValueError where `index_topk_v41` is given both."""
    if kept is not None and within is not None:
        raise ValueError(
            "index_topk_v41: both `kept` and `within` are given; a layer chooses candidates or keeps to them"
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
    rows: Tensor,
) -> None:
    """Select for each token the `rows.shape[1]` visible entries of highest index score (SPEC 11.6).

    `q` [T, Hi, 128] raw index query before RoPE; `weights` [T, Hi], with the factors 128^-0.5 Hi^-0.5 or without;
    `index_keys` uint8 [blocks, 128 / ratio, 72] of the layer that owns the entries; `block_table` [B, blocks] int32,
    `token_request` [T] int32, `positions` [T] int64; `ratio` 1 or 2: the token at t sees floor((t + 1) / ratio)
    entries. Writes `rows` [T, K] int32: table rows of the selected entries in ascending entry order, -1 behind them.
    All entries that may be selected if there are at most K; ties go to the lower entry.

    Two levels: with `kept` [T, C] int32 the layer's scores also choose the C best blocks of `candidate_block` entries,
    a block by its best entry and the one with the newest visible entry always; their numbers are written in ascending
    order, -1 behind them; ties go to the lower block. With `within` [T, C] int32, written so by an earlier layer, only
    their entries are selected. ValueError for both at once.
    """
    reject_two_levels_at_once(kept, within)
    blocks = within if kept is None else kept
    select(
        lambda t: index_query_v41(q[t], positions[t], rope),
        weights,
        KeyTable(index_keys, KeyFormat.MXFP4),
        block_table,
        token_request,
        (positions + 1) // ratio,
        rows,
        None if blocks is None else Candidates(candidate_block, blocks, choose=kept is not None),
    )


def attend_v41(
    q: Tensor,
    sink: Tensor,
    window: Tensor,
    window_indices: Tensor,
    window_lens: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_lens: Tensor | None,
    positions: Tensor,
    rope: Tensor,
    scale: float,
) -> Tensor:
    """`attend` (`ops.reference.read`) over window rows of 528 B, `window` uint8 [.., .., 528], and entries of 288 B,
    `entries` uint8 [.., .., 288] (SPEC 11.4): all 512 dims of both are rotated ones and quantised. `q` [T, H, 512] is
    rotated and not normalised; the output is rotated back."""
    lists = [(V41Table(window, V41KVFormat.FP8), window_indices, window_lens)]
    if entries is not None and entry_rows is not None and entry_lens is not None:
        lists.append((V41Table(entries, V41KVFormat.FP4), entry_rows, entry_lens))
    return attend_to(q, sink, lists, positions, rope, scale)


torch.library.impl(f"{NAMESPACE}::index_topk_v41", "CPU", index_topk_v41)
torch.library.impl(f"{NAMESPACE}::attend_v41", "CPU", attend_v41)
