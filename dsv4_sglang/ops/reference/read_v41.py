"""`index_topk_v41` and `attend_v41`: what the queries of a step of DeepSeek-V4.1 read (SPEC 11.6)."""

from torch import Tensor


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
    entries. Writes `rows` [T, K] int32: table rows of the selected entries in ascending entry order, -1 behind them. All
    entries that may be selected if there are at most K; ties go to the lower entry.

    Two levels: with `kept` [T, C] int32 the layer's scores also choose the C best blocks of `candidate_block` entries,
    a block by its best entry and the one with the newest visible entry always; their numbers are written in ascending
    order, -1 behind them. With `within` [T, C] int32, written so by an earlier layer, only their entries are selected.
    """
    raise NotImplementedError


def attend_v41(
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
) -> Tensor:
    """`attend` (`ops.reference.read`) over window rows of 528 B, `window` uint8 [.., .., 528], and entries of 288 B,
    `entries` uint8 [.., .., 288] (SPEC 11.4): all 512 dims of both are rotated ones and quantised. `q` [T, H, 512] is
    rotated and not normalised; the output is rotated back."""
    raise NotImplementedError
