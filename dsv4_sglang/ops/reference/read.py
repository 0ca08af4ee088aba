"""`index_topk` and `attend`: what the queries of a step read (SPEC 4)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.formats import KeyFormat, KeyTable, KVBuffer, KVFormat
from dsv4_sglang.formats.index_keys import dequantise_keys, hadamard, quantise_keys
from dsv4_sglang.formats.v41_entries import V41Table
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
    table = KeyTable(index_keys, KeyFormat.from_code(key_format))
    select(
        lambda t: index_query(q[t], positions[t], rope, table.format),
        weights, table, block_table, token_request, (positions + 1) // CSA_RATIO, rows,
    )  # fmt: skip


class Candidates(NamedTuple):
    """Blocks of `size` entries, of each token those whose numbers `blocks` [T, C] has, in ascending order and -1 behind
    them. With `choose` they are written, the C best, else read: only their entries may be selected."""

    size: int
    blocks: Tensor
    choose: bool


def select(
    query: Callable[[Tensor], Tensor],
    weights: Tensor,
    table: KeyTable,
    block_table: Tensor,
    token_request: Tensor,
    visible: Tensor,
    rows: Tensor,
    candidates: Candidates | None = None,
) -> None:
    """Of each token the `rows.shape[1]` entries of highest score among the first `visible` [T]; `query` gives the
    queries [n, Hi, 128] fp32 of tokens [n]. Nothing is scored where nothing is to be chosen."""
    top, per_block = rows.shape[1], table.data.shape[1]
    for request in torch.unique(token_request).tolist():
        tokens = torch.nonzero(token_request == request).squeeze(-1)
        entry = torch.arange(int(visible[tokens].max()))
        table_row = block_table[request].long()[entry // per_block] * per_block + entry % per_block
        keys = None
        for part in tokens.split(_TOKENS_AT_ONCE):
            allowed = entry < visible[part, None]
            chooses = int(visible[part].max()) > top
            if candidates is not None and candidates.choose:
                chooses |= -(-int(visible[part].max()) // candidates.size) > candidates.blocks.shape[1]
            elif candidates is not None:
                allowed &= _in_blocks(candidates.blocks[part], candidates.size, len(entry))
            score = torch.zeros(allowed.shape)
            if chooses:
                keys = table.read(table_row) if keys is None else keys
                score = ((query(part) @ keys.T).relu() * weights[part].float().unsqueeze(-1)).sum(1)
            score = score.masked_fill(~allowed, float("-inf"))
            if candidates is not None and candidates.choose:
                candidates.blocks[part] = _best_blocks(score, visible[part], candidates)
            best = _best(score, top)
            rows[part] = torch.where(best >= 0, table_row[best], -1).int() if len(entry) else -1


def _best(score: Tensor, top: int) -> Tensor:
    """[n, top] columns of the highest scores of each row above -inf, in ascending order, -1 behind them; of equal ones
    the lower."""
    ordered = torch.sort(score, descending=True, stable=True)
    width = score.shape[1]
    best = ordered.indices[:, :top].masked_fill(ordered.values[:, :top] == float("-inf"), width).sort(1).values
    return pad(best.masked_fill(best == width, -1), (0, top - best.shape[1]), value=-1)


def _best_blocks(score: Tensor, visible: Tensor, candidates: Candidates) -> Tensor:
    """[n, C] numbers of the blocks with the best entries, and of that with the newest of `visible` [n]."""
    size = candidates.size
    blocks = pad(score, (0, -score.shape[1] % size), value=float("-inf")).unflatten(1, (-1, size)).amax(-1)
    newest = torch.arange(blocks.shape[1]) == (visible[:, None] - 1) // size
    return _best(blocks.masked_fill(newest, float("inf")), candidates.blocks.shape[1]).int()


def _in_blocks(blocks: Tensor, size: int, entries: int) -> Tensor:
    """[n, entries] whether an entry lies in one of the blocks of `size` entries whose numbers `blocks` [n, C] has."""
    count = -(-entries // size)
    found = torch.zeros(len(blocks), count + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(blocks >= 0, blocks, count).long(), True)
    return found[:, torch.arange(entries) // size]


def attend(
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
    kv_format: int,
) -> Tensor:
    """Softmax attention of T tokens over [window rows | entry rows] with the sink; output de-rotated (SPEC 2.2, 4.4,
    4.5).

    `q` [T, H, 512] normalised and rotated; `sink` [H] fp32; `window`, `entries` KV buffers of format
    `kv_format`; `window_indices` [T, 128],
    `entry_rows` [T, K] int32 rows of them (-1: none), of which the first `window_lens`, `entry_lens` [T] int32 count;
    `positions` [T] int64; `rope` [positions, 64] fp32. Returns [T, H, 512] in q's dtype; a token that sees nothing
    gives zeros.
    """
    stored = KVFormat.from_code(kv_format)
    lists = [(KVBuffer(window, stored), window_indices, window_lens)]
    if entries is not None and entry_rows is not None and entry_lens is not None:
        lists.append((KVBuffer(entries, stored), entry_rows, entry_lens))
    return attend_to(q, sink, lists, positions, rope, scale)


class _Listed:
    """The rows of a table that T tokens list, `row` [T, K], with zeros for -1. Where they mostly list the same ones, as
    the tokens of a prompt do, each is read and multiplied once, for all of them: in the order of the lists, so that
    sums are the same wherever in the table the rows lie."""

    def __init__(self, table: KVBuffer | V41Table, row: Tensor) -> None:
        distinct, place = row.unique(return_inverse=True)
        self.place: Tensor | None = None
        if 2 * len(distinct) < row.numel():
            first = place.new_zeros(len(distinct))
            first.scatter_reduce_(0, place.flatten(), torch.arange(row.numel()), "amin", include_self=False)
            order = first.argsort()
            row, self.place = distinct[order], order.argsort()[place][:, None]
        self.values = table.read(row.clamp_min(0))
        self.values.view(-1, self.values.shape[-1]).index_fill_(0, (row < 0).flatten().nonzero().squeeze(-1), 0.0)
        if self.place is not None and not self.values.isfinite().all():
            # Zero times infinity is no number: it would reach tokens that do not list the row.
            self.values, self.place = self.values[self.place.squeeze(1)], None

    def products(self, q: Tensor) -> Tensor:
        """Of queries [T, H, D] and rows: [T, H, K]."""
        if self.place is None:
            return torch.einsum("thd,tkd->thk", q, self.values)
        return (q @ self.values.T).gather(-1, self.place.expand(-1, q.shape[1], -1))

    def sums(self, weights: Tensor) -> Tensor:
        """Of rows by `weights` [T, H, K]: [T, H, D]."""
        if self.place is None:
            return torch.einsum("thk,tkd->thd", weights, self.values)
        of_rows = weights.new_zeros(*weights.shape[:2], len(self.values))
        return of_rows.scatter_add_(-1, self.place.expand_as(weights), weights) @ self.values


def attend_to(
    q: Tensor,
    sink: Tensor,
    lists: Sequence[tuple[KVBuffer | V41Table, Tensor, Tensor]],
    positions: Tensor,
    rope: Tensor,
    scale: float,
) -> Tensor:
    """`attend` over any lists of rows: a table, the rows of it [T, K], and how many of them count [T]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin in range(0, q.shape[0], _TOKENS_AT_ONCE):
        part = slice(begin, begin + _TOKENS_AT_ONCE)
        listed, unseen = [], []
        for table, rows, lens in lists:
            width = min(rows.shape[1], int(lens[part].max()))
            row = rows[part, :width]
            unseen.append((row < 0) | (torch.arange(width) >= lens[part, None]))
            listed.append(_Listed(table, row.masked_fill(unseen[-1], -1)))
        none = torch.cat(unseen, 1)[:, None]
        logits = torch.cat([rows.products(q[part].float()) for rows in listed], -1) * scale
        logits = logits.masked_fill(none, float("-inf"))
        logits = torch.cat([logits, sink.float().view(1, -1, 1).expand(logits.shape[0], -1, 1)], -1)
        # Where nothing is seen and the sink is -inf, the softmax has no number: what is not seen has no weight.
        weights = logits.softmax(-1)[..., :-1].masked_fill(none, 0.0).split([seen.shape[1] for seen in unseen], -1)
        o = sum((rows.sums(w) for rows, w in zip(listed, weights)), torch.zeros(()))
        out[part] = rotate(o, positions[part], rope, inverse=True).to(q.dtype)
    return out


torch.library.impl(f"{NAMESPACE}::index_topk", "CPU", index_topk)
torch.library.impl(f"{NAMESPACE}::attend", "CPU", attend)
