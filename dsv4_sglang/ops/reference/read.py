"""`index_topk` and `attend`: what the queries of a step read (SPEC 4)."""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KeyTable, RowFormat, RowTable
from dsv4_sglang.formats.index_keys import dequantise_keys, hadamard, quantise_keys
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.ops.rope import rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE

_TOKENS_AT_ONCE = 32  # bounds the memory of the gathered rows


def index_query(q: Tensor, positions: Tensor, rope: Tensor, key_format: KeyFormat) -> Tensor:
    """Raw index queries [T, Hi, 128] -> rotated, Hadamard-transformed and, for FP4 keys, fake-quantised; fp32 (SPEC
    2.5, 4.1)."""
    round_stage = rounding(q.dtype)
    y = hadamard(round_stage(rotate(q.float(), positions, rope)))
    if not key_format.is_fp4:
        return y
    return dequantise_keys(*quantise_keys(y, key_format))


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
    """Select for each token the `rows.shape[1]` visible entries of highest index score (SPEC 4.1 to 4.3).

    `q` [T, Hi, 128] raw index query before RoPE; `weights` [T, Hi] fp32, with the factors 128^-0.5 Hi^-0.5 or without,
    as a common factor selects the same; `index_keys` a key table
    of format `key_format`; `block_table` [B, blocks] int32 of the requests,
    `token_request` [T] int32, `positions` [T] int64; `scores` fp32 scratch [T, most visible entries] (unused here).
    Writes `rows` [T, K] int32: table rows of the selected entries in ascending entry order, -1 behind them. All visible
    entries if there are at most K; ties go to the lower entry.
    """
    top = rows.shape[1]
    rows.fill_(-1)
    visible = ((positions + 1) // CSA_RATIO).tolist()
    scored = [t for t, n in enumerate(visible) if n > top]
    table = KeyTable(index_keys, KeyFormat.from_code(key_format))
    keys_per_block = index_keys.shape[1]
    query = index_query(q[scored], positions[scored], rope, table.format)
    selected: dict[int, Tensor] = {}
    for request in torch.unique(token_request).tolist():
        tokens = torch.nonzero(token_request == request).squeeze(-1).tolist()
        most = max(visible[t] for t in tokens)
        entry = torch.arange(most)
        table_row = block_table[request].long()[entry // keys_per_block] * keys_per_block + entry % keys_per_block
        own = set(tokens)
        mine = [i for i, t in enumerate(scored) if t in own]
        keys = table.read(table_row) if mine else None
        for begin in range(0, len(mine), _TOKENS_AT_ONCE):
            assert keys is not None
            part = mine[begin : begin + _TOKENS_AT_ONCE]
            at = [scored[i] for i in part]
            score = ((query[part] @ keys.T).relu() * weights[at].float().unsqueeze(-1)).sum(1)
            score = score.masked_fill(entry >= torch.tensor([[visible[t]] for t in at]), float("-inf"))
            best = torch.sort(score, descending=True, stable=True).indices[:, :top].sort(1).values
            selected.update(zip(at, best))
        for t in tokens:
            chosen = selected.get(t, entry[: visible[t]])
            rows[t, : len(chosen)] = table_row[chosen].to(rows.dtype)


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
) -> Tensor:
    """Softmax attention of T tokens over [window rows | entry rows] with the sink; output de-rotated (SPEC 2.2, 4.4,
    4.5).

    `q` [T, H, 512] normalised and rotated; `sink` [H] fp32; `window`, `entries` row tables of format
    `row_format`; `window_rows` [T, 128],
    `entry_rows` [T, K] int32 rows of them (-1: none), of which the first `window_lens`, `entry_lens` [T] int32 count;
    `positions` [T] int64; `rope` [positions, 64] fp32. Returns [T, H, 512] in q's dtype; a token that sees nothing
    gives zeros.
    """
    stored = RowFormat.from_code(row_format)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin in range(0, q.shape[0], _TOKENS_AT_ONCE):
        part = slice(begin, begin + _TOKENS_AT_ONCE)
        keys, masks = [], []
        for table, rows, lens in ((window, window_rows, window_lens), (entries, entry_rows, entry_lens)):
            if table is None or rows is None or lens is None:
                continue
            width = min(rows.shape[1], int(lens[part].max()))
            row = rows[part, :width]
            valid = (row >= 0) & (torch.arange(width) < lens[part, None])
            keys.append(RowTable(table, stored).read(row.masked_fill(~valid, 0)).masked_fill(~valid[..., None], 0.0))
            masks.append(valid)
        k, mask = torch.cat(keys, 1), torch.cat(masks, 1)
        logits = torch.einsum("thd,tkd->thk", q[part].float(), k) * scale
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        logits = torch.cat([logits, sink.float().view(1, -1, 1).expand(logits.shape[0], -1, 1)], -1)
        # Where nothing is seen and the sink is -inf, the softmax has no number: what is not seen has no weight.
        weights = logits.softmax(-1)[..., :-1].masked_fill(~mask[:, None], 0.0)
        o = torch.einsum("thk,tkd->thd", weights, k)
        out[part] = rotate(o, positions[part], rope, inverse=True).to(q.dtype)
    return out


torch.library.impl(f"{NAMESPACE}::index_topk", "CPU", index_topk)
torch.library.impl(f"{NAMESPACE}::attend", "CPU", attend)
