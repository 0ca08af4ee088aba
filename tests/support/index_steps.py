"""The steps of `index_topk` in a selection of two levels, in PyTorch: for each op of the extension (csrc/index) a
function that writes the same. What an op leaves alone stays as it was."""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVBuffer
from dsv4_sglang.ops.reference import read

SIZE = 8


def index_query(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    rope: Tensor,
    key_format: int,
    hadamard: bool,
    out: Tensor,
    gain: Tensor,
) -> None:
    out.copy_(read.index_query(q, positions, rope, KeyFormat.from_code(key_format), hadamard))
    gain.copy_(weights)


def _blocks(positions: Tensor, ratio: int) -> Tensor:
    """Return the number of candidate blocks that each token sees."""
    return -(-((positions + 1) // ratio) // SIZE)


def _rows(entry: Tensor, table: Tensor, ratio: int) -> Tensor:
    per_block = 128 // ratio
    return table[entry // per_block].long() * per_block + entry % per_block


def _scores(query: Tensor, weight: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    values = KVBuffer(keys, KeyFormat.MXFP4).read(rows)
    return ((query.float() @ values.T).relu() * weight.unsqueeze(-1)).sum(0)


def _listed(blocks: Tensor, visible: int) -> Tensor:
    """Return the visible entries of the blocks of a list."""
    count = min(len(blocks), -(-visible // SIZE))
    entry = (blocks[:count].long()[:, None] * SIZE + torch.arange(SIZE)).flatten()
    return entry[entry < visible]


def _best(scores: Tensor, top: int) -> Tensor:
    return torch.sort(scores, descending=True, stable=True).indices[:top].sort().values


def index_score_blocks(
    query: Tensor, weights: Tensor, index_keys: Tensor, block_table: Tensor, token_request: Tensor, positions: Tensor,
    ratio: int, top: int, newest: bool, scores: Tensor,
) -> None:  # fmt: skip
    for t, (position, blocks) in enumerate(zip(positions.tolist(), _blocks(positions, ratio).tolist())):
        if blocks <= top:
            continue
        visible = (position + 1) // ratio
        rows = _rows(torch.arange(visible), block_table[int(token_request[t])], ratio)
        all_ = torch.full((blocks * SIZE,), float("-inf"))
        all_[:visible] = _scores(query[t], weights[t], index_keys, rows)
        scores[t, :blocks] = all_.view(-1, SIZE).amax(1)
        if newest:
            scores[t, blocks - 1] = float("inf")


def index_select_blocks(scores: Tensor, positions: Tensor, ratio: int, blocks: Tensor) -> None:
    for t, count in enumerate(_blocks(positions, ratio).tolist()):
        top = blocks.shape[1]
        best = torch.arange(count) if count <= top else _best(scores[t, :count], top)
        blocks[t] = -1
        blocks[t, : len(best)] = best.int()


def index_score_listed(
    query: Tensor, weights: Tensor, index_keys: Tensor, block_table: Tensor, token_request: Tensor, positions: Tensor,
    ratio: int, blocks: Tensor, top: int, scores: Tensor,
) -> None:  # fmt: skip
    assert scores.shape[1] >= SIZE * blocks.shape[1]
    for t, position in enumerate(positions.tolist()):
        entry = _listed(blocks[t], (position + 1) // ratio)
        if len(entry) > top:
            rows = _rows(entry, block_table[int(token_request[t])], ratio)
            scores[t, : len(entry)] = _scores(query[t], weights[t], index_keys, rows)


def index_select_listed(
    scores: Tensor, block_table: Tensor, token_request: Tensor, positions: Tensor, ratio: int, blocks: Tensor,
    entry_indices: Tensor,
) -> None:  # fmt: skip
    top = entry_indices.shape[1]
    for t, position in enumerate(positions.tolist()):
        entry = _listed(blocks[t], (position + 1) // ratio)
        if len(entry) > top:
            entry = entry[_best(scores[t, : len(entry)], top)]
        entry_indices[t] = -1
        entry_indices[t, : len(entry)] = _rows(entry, block_table[int(token_request[t])], ratio).int()
