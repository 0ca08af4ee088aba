"""`index_topk` and `attend`: selection of entries and attention for the queries of a step (SPEC 4)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.formats import KeyFormat, KVBuffer, KVFormat
from dsv4_sglang.formats import index_keys as key_formats
from dsv4_sglang.formats.quantise import mxfp4_values
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.ops.rope import rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE

_TOKENS_AT_ONCE = 32  # bounds the memory of the gathered entries


def index_query(q: Tensor, positions: Tensor, rope: Tensor, key_format: KeyFormat, hadamard: bool = True) -> Tensor:
    """Prepare raw index queries for scoring: RoPE, Hadamard transform, fake quantisation for FP4 keys (SPEC 2.5, 4.1).

    Without the transform, queries are MXFP4 with an unlimited range of scales, because queries are not stored (SPEC
    11.4, 11.6).

    Args:
        q: [T, Hi, 128] bf16 or fp32.
        positions: [T].
        rope: [positions, 64] fp32.
        key_format: format of the keys.
        hadamard: the keys have the Hadamard transform.

    Returns:
        fp32 [T, Hi, 128].
    """
    rotated = rounding(q.dtype)(rotate(q.float(), positions, rope))
    if not hadamard:
        return mxfp4_values(rotated)
    return key_format.dequantise(*key_format.quantise(key_formats.hadamard(rotated)))


def reject_two_levels_at_once(kept: Tensor | None, within: Tensor | None) -> None:
    """Raise ValueError if `index_topk` gets both `kept` and `within`."""
    if kept is not None and within is not None:
        raise ValueError(
            "index_topk: both `kept` and `within` are given; a layer chooses candidates or selects within them"
        )


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
    ratio: int = CSA_RATIO,
    hadamard: bool = True,
    candidate_block: int = 0,
    kept: Tensor | None = None,
    within: Tensor | None = None,
) -> None:
    """Select the K visible entries with the highest index scores for each token (SPEC 4.1 to 4.3, 11.6).

    If at most K entries can be selected, all of them are. Of equal scores the entry, or block, with the lower number is
    selected.

    V4.1's selection has two levels. With `kept` the scores also choose the C best blocks of `candidate_block` entries.
    A block has the score of its best entry, and the block of the newest visible entry is always included. With `within`
    only entries of these blocks are selected.

    Args:
        q: [T, Hi, 128], raw index query before RoPE.
        weights: fp32 [T, Hi], with or without the factors 128^-0.5 Hi^-0.5, which do not change the selection.
        index_keys: key buffer.
        block_table: int32 [B, blocks], block ids of the requests.
        token_request: int32 [T].
        positions: int64 [T].
        rope: fp32 [positions, 64].
        key_format: code of the format of `index_keys`.
        scores: fp32 scratch, unused on a CPU. A CUDA device needs `ops.cuda_index.score_columns` columns and any number
            of rows.
        entry_indices: int32 [T, K], receives the buffer indices of the selected entries in ascending order of entries,
            then -1.
        ratio: tokens per entry. The token at position t selects among floor((t + 1) / ratio) entries.
        hadamard: the keys have the Hadamard transform. A CUDA device takes ratio 4 with it and without candidates, or
            ratios 1 and 2 of MXFP4 keys without it, at most 32 heads, and candidate blocks of 8 entries.
        candidate_block: entries of a candidate block, 0 without candidates.
        kept: int32 [T, C], receives the numbers of the candidate blocks in ascending order, then -1.
        within: int32 [T, C], candidate blocks that an earlier layer wrote to `kept`.

    Raises:
        ValueError: both `kept` and `within` are given.
    """
    reject_two_levels_at_once(kept, within)
    keys, blocks = KeyFormat.from_code(key_format), within if kept is None else kept
    select(
        lambda t: index_query(q[t], positions[t], rope, keys, hadamard),
        weights, KVBuffer(index_keys, keys), block_table, token_request, (positions + 1) // ratio, entry_indices,
        None if blocks is None else Candidates(candidate_block, blocks, choose=kept is not None),
    )  # fmt: skip


class Candidates(NamedTuple):
    """Candidate blocks of `size` entries of each token.

    Attributes:
        size: entries of a block.
        blocks: [T, C], numbers of the candidate blocks in ascending order, then -1.
        choose: True: write the C best blocks. False: read them, and select only entries in them.
    """

    size: int
    blocks: Tensor
    choose: bool


def select(
    query: Callable[[Tensor], Tensor],
    weights: Tensor,
    table: KVBuffer,
    block_table: Tensor,
    token_request: Tensor,
    visible: Tensor,
    entry_indices: Tensor,
    candidates: Candidates | None = None,
) -> None:
    """Select the entries with the highest scores. Scores are computed only if there is a choice.

    Args:
        query: returns the queries fp32 [n, Hi, 128] of tokens [n].
        weights, block_table, token_request: as in `index_topk`.
        table: buffer of the index keys.
        visible: [T]. A token selects among its first `visible` entries.
        entry_indices: int32 [T, K], receives the buffer indices of the K selected entries.
        candidates: candidate blocks to choose or to select within; None without.
    """
    top, per_block = entry_indices.shape[1], table.data.shape[1]
    for request in torch.unique(token_request).tolist():
        tokens = torch.nonzero(token_request == request).squeeze(-1)
        entry = torch.arange(int(visible[tokens].max()))
        indices = block_table[request].long()[entry // per_block] * per_block + entry % per_block
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
                # A skipped token may see entries of blocks that its request does not have. Their indices are negative.
                keys = table.read(indices.clamp_min(0)) if keys is None else keys
                score = ((query(part) @ keys.T).relu() * weights[part].float().unsqueeze(-1)).sum(1)
            score = score.masked_fill(~allowed, float("-inf"))
            if candidates is not None and candidates.choose:
                candidates.blocks[part] = _best_blocks(score, visible[part], candidates)
            best = _best(score, top)
            entry_indices[part] = torch.where(best >= 0, indices[best], -1).int() if len(entry) else -1


def _best(score: Tensor, top: int) -> Tensor:
    """Return [n, top], the columns of the highest scores above -inf of each row, in ascending order, then -1.

    Of equal scores the lower column is selected.
    """
    ordered = torch.sort(score, descending=True, stable=True)
    width = score.shape[1]
    best = ordered.indices[:, :top].masked_fill(ordered.values[:, :top] == float("-inf"), width).sort(1).values
    return pad(best.masked_fill(best == width, -1), (0, top - best.shape[1]), value=-1)


def _best_blocks(score: Tensor, visible: Tensor, candidates: Candidates) -> Tensor:
    """Return [n, C] numbers of the blocks with the best entries, always including the block of the newest entry."""
    size = candidates.size
    blocks = pad(score, (0, -score.shape[1] % size), value=float("-inf")).unflatten(1, (-1, size)).amax(-1)
    newest = torch.arange(blocks.shape[1]) == (visible[:, None] - 1) // size
    return _best(blocks.masked_fill(newest, float("inf")), candidates.blocks.shape[1]).int()


def _in_blocks(blocks: Tensor, size: int, entries: int) -> Tensor:
    """Return [n, entries] bool, True for entries in the blocks of `size` entries with the numbers `blocks` [n, C]."""
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
    entry_indices: Tensor | None,
    entry_lens: Tensor | None,
    positions: Tensor,
    rope: Tensor,
    scale: float,
    kv_format: int,
    entry_owner: Tensor | None = None,
    entry_format: int | None = None,
) -> Tensor:
    """Compute softmax attention over [window entries | compressed entries] with the sink; the inverse RoPE is applied
    (SPEC 2.2, 4.4, 4.5).

    Args:
        q: [T, H, 512], rotated, in V4 normalised too.
        sink: fp32 [H].
        window: KV buffer of the window entries.
        window_indices: int32 [T, W], indices of window entries, -1 for none. W is 128, or larger in a step whose tokens
            all attend to each other (`StepMetadata`).
        window_lens: int32 [T], number of valid window indices.
        entries: KV buffer of the compressed entries, None without.
        entry_indices: int32 [T, K], indices of compressed entries, -1 for none.
        entry_lens: int32 [T], number of valid entry indices.
        positions: int64 [T].
        rope: fp32 [positions, 64].
        scale: factor of the logits.
        kv_format: code of the format of `window`.
        entry_owner: int32 [T], row of `entry_indices` [B, K] that lists a token's entries, for tokens that share lists;
            None if row t belongs to token t.
        entry_format: code of the format of `entries`; None for that of `window`. A CUDA device takes one format for
            both, or MXFP8 window entries with NVFP4 entries.

    Returns:
        [T, H, 512] in q's dtype. The output of a token without keys is zero.
    """
    lists = [Listed(KVBuffer(window, KVFormat.from_code(kv_format)), window_indices, window_lens)]
    if entries is not None and entry_indices is not None and entry_lens is not None:
        stored = KVBuffer(entries, KVFormat.from_code(kv_format if entry_format is None else entry_format))
        lists.append(Listed(stored, entry_indices, entry_lens, entry_owner))
    return _attend_to(q, sink, lists, positions, rope, scale)


class Listed(NamedTuple):
    """Lists of the entries that T tokens attend to.

    Attributes:
        table: KV buffer.
        indices: [T, K], or [B, K] with `owner`.
        lens: [T], number of valid indices.
        owner: [T], row of `indices` for each token; None if row t belongs to token t.
    """

    table: KVBuffer
    indices: Tensor
    lens: Tensor
    owner: Tensor | None = None

    def of_tokens(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens [n, k], -1 for none, and a mask of those that are none."""
        lens = self.lens[part]
        width = min(self.indices.shape[1], int(lens.max()))
        indices = self.indices[part, :width] if self.owner is None else self.indices[self.owner[part].long(), :width]
        none = (indices < 0) | (torch.arange(width) >= lens[:, None])
        return indices.masked_fill(none, -1), none


class _Entries:
    """The entries of a KV buffer that T tokens list, `row` [T, K], with zeros for -1.

    If tokens mostly list the same entries, as those of a prompt do, each distinct entry is read and multiplied once for
    all of them, in the order of the lists. So sums do not depend on the location of the entries in the buffer.
    """

    def __init__(self, table: KVBuffer, row: Tensor) -> None:
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
            # 0 * inf is NaN, which would reach tokens that do not list the entry.
            self.values, self.place = self.values[self.place.squeeze(1)], None

    def products(self, q: Tensor) -> Tensor:
        """Return the products of queries [T, H, D] and entries, [T, H, K]."""
        if self.place is None:
            return torch.einsum("thd,tkd->thk", q, self.values)
        return (q @ self.values.T).gather(-1, self.place.expand(-1, q.shape[1], -1))

    def sums(self, weights: Tensor) -> Tensor:
        """Return the sums of entries weighted by `weights` [T, H, K], [T, H, D]."""
        if self.place is None:
            return torch.einsum("thk,tkd->thd", weights, self.values)
        of_rows = weights.new_zeros(*weights.shape[:2], len(self.values))
        return of_rows.scatter_add_(-1, self.place.expand_as(weights), weights) @ self.values


def _attend_to(
    q: Tensor,
    sink: Tensor,
    lists: Sequence[Listed],
    positions: Tensor,
    rope: Tensor,
    scale: float,
) -> Tensor:
    """Compute `attend` over any lists of entries.

    Args:
        q, sink, positions, rope, scale: as in `attend`.
        lists: the lists, whose softmax is joint.

    Returns:
        [T, H, 512] in q's dtype.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin in range(0, q.shape[0], _TOKENS_AT_ONCE):
        part = slice(begin, begin + _TOKENS_AT_ONCE)
        listed, unseen = [], []
        for entries in lists:
            indices, hidden = entries.of_tokens(part)
            unseen.append(hidden)
            listed.append(_Entries(entries.table, indices))
        none = torch.cat(unseen, 1)[:, None]
        logits = torch.cat([rows.products(q[part].float()) for rows in listed], -1) * scale
        logits = logits.masked_fill(none, float("-inf"))
        logits = torch.cat([logits, sink.float().view(1, -1, 1).expand(logits.shape[0], -1, 1)], -1)
        # If a token sees nothing and the sink is -inf, the softmax is NaN. Invisible entries get weight 0.
        weights = logits.softmax(-1)[..., :-1].masked_fill(none, 0.0).split([seen.shape[1] for seen in unseen], -1)
        o = sum((rows.sums(w) for rows, w in zip(listed, weights)), torch.zeros(()))
        out[part] = rotate(o, positions[part], rope, inverse=True).to(q.dtype)
    return out


torch.library.impl(f"{NAMESPACE}::index_topk", "CPU", index_topk)
torch.library.impl(f"{NAMESPACE}::attend", "CPU", attend)
