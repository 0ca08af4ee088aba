"""`copy_state`, `gather_tables`, `swap_blocks`, `update_rows`: moving state, tables, blocks and rows.

Two of them take what to move from the device, where nothing can be raised without waiting: a launch that is given
something wrong writes nothing at all, ends nothing, and leaves in `rejected` [1] int32, if given, the index of the
first pair or slice that is wrong, -1 if none is. Read it where waiting is allowed; every call and every replay of a
graph writes it anew. Without `rejected` the kernel prints what is wrong to stdout. On a CPU both raise ValueError at
once.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.ops.schemas import NAMESPACE


def _reject(rejected: Tensor | None, op: str, wrong: dict[int, str]) -> None:
    """Note the first of `wrong`, problems by index, and raise it."""
    first = min(wrong, default=-1)
    if rejected is not None:
        rejected.fill_(first)
    if wrong:
        raise ValueError(f"{op}: {wrong[first]}; nothing is written")


def copy_state(src: Tensor, dst: Tensor, tensors: Sequence[Tensor], rejected: Tensor | None = None) -> None:
    """Copy the state of slot `src[i]` to slot `dst[i]` ([n] int32, a negative one in either skips) in every tensor
    [layers, slots, ...].

    Rejected are a pair with a slot that one of the tensors does not have, and pairs with the same destination. Nothing
    is written then, except that a GPU still writes the other pairs beside pairs with the same destination. `rejected`:
    see the module. No slot may be both a source and a destination, which is not checked.
    """
    slots = min((tensor.shape[1] for tensor in tensors), default=0)
    pairs = {i: (s, d) for i, (s, d) in enumerate(zip(src.tolist(), dst.tolist())) if tensors and min(s, d) >= 0}
    named, wrong = Counter(d for _, d in pairs.values()), {}
    for i, (s, d) in pairs.items():
        if max(s, d) >= slots:
            wrong[i] = f"pair {i}, slot {s} to slot {d}, leaves tensors of {slots} slots"
        elif named[d] > 1:
            wrong[i] = f"pair {i}, slot {s} to slot {d}, has the destination of another"
    _reject(rejected, "copy_state", wrong)
    valid = (src >= 0) & (dst >= 0)
    src, dst = src[valid].long(), dst[valid].long()
    for tensor in tensors:
        tensor[:, dst] = tensor[:, src]


def gather_tables(
    requests: Tensor,
    seq_lens: Tensor,
    state_slot_of_request: Tensor,
    req_to_token: Tensor,
    owned: Tensor,
    block_table: Tensor,
) -> None:
    """Copy what a decode step needs of the tables of all requests.

    `requests` [B] int64 or int32: rows of `state_slot_of_request` [R] int32 and `req_to_token` [R, tokens] int32 (pool
    slots). State slots go to `owned` [>= B] int32, ids of the blocks below `seq_lens` [B] to `block_table` [>= B, NB]
    int32; ids behind them are left as they are.
    """
    owned[: requests.shape[0]] = state_slot_of_request[requests]
    for row, request, length in zip(block_table, requests.tolist(), seq_lens.tolist()):
        slots = req_to_token[request, :length:BLOCK_TOKENS][: row.shape[0]]
        row[: slots.shape[0]] = slots // BLOCK_TOKENS


def swap_blocks(
    pools: Sequence[Tensor], host: Tensor, blocks: Tensor, rows: Tensor, to_host: bool, offsets: Sequence[int]
) -> None:
    """Copy block `blocks[i]` of every pool to or from row `rows[i]` of `host`.

    `pools`: [blocks, ...] of any dtype, the last dimensions without gaps. In a row of `host` [rows, bytes] uint8 a
    block of `pools[k]` begins at byte `offsets[k]`; that they lie side by side is not checked. `blocks` [n] int64 on
    the device of the pools, each once, which is not checked; `rows` [n] int64 on the CPU, each once. `host` is pinned,
    or on the device of the pools.

    Raises ValueError for rows and bytes that `host` has not, and nothing has moved. On a CPU the same for blocks; a
    GPU leaves out a block that a pool has not, and prints it.
    """
    views = [pool.flatten(1).view(torch.uint8) for pool in pools]
    if len(offsets) != len(views):
        raise ValueError(f"swap_blocks: {len(offsets)} offsets for {len(views)} pools")
    spans = [(offset, offset + view.shape[1]) for offset, view in zip(offsets, views)]
    for begin, end in spans:
        if not 0 <= begin <= end <= host.shape[1]:
            raise ValueError(f"swap_blocks: bytes {begin}..{end} of host rows of {host.shape[1]}")
    if rows.shape != blocks.shape:
        raise ValueError(f"swap_blocks: {blocks.numel()} blocks and {rows.numel()} host rows")
    if rows.unique().numel() != rows.numel():
        raise ValueError(f"swap_blocks: a host row is named twice in {rows.tolist()}")
    for name, ids, size in (("host row", rows, host.shape[0]), *(("block", blocks, view.shape[0]) for view in views)):
        if (bad := ids[(ids < 0) | (ids >= size)]).numel():
            raise ValueError(f"swap_blocks: {name} {int(bad[0])} is not in 0..{size - 1}")
    for view, (begin, end) in zip(views, spans):
        if to_host:
            host[rows, begin:end] = view[blocks]
        else:
            view[blocks] = host[rows, begin:end]


def update_rows(
    pool: Tensor, new_rows: Tensor, slices: Tensor, n_valid: Tensor, rejected: Tensor | None = None
) -> None:
    """Write slices of `new_rows` [N, ...] into `pool` [R, ...].

    `slices` [3, n] int64: destination start, source start, length; the first `n_valid` [1] int32 of them count. If one
    of those leaves either tensor or overlaps another in the destination, all are rejected and nothing is written;
    `rejected`: see the module.
    """
    valid = slices[:, : max(0, int(n_valid))].T.tolist()
    wrong = {
        i: f"slice {i} (destination {d}, source {s}, length {n}) leaves a pool of {pool.shape[0]} or "
        f"{new_rows.shape[0]} new rows"
        for i, (d, s, n) in enumerate(valid)
        if min(d, s, n) < 0 or d + n > pool.shape[0] or s + n > new_rows.shape[0]
    }
    spans = sorted((d, d + n, i) for i, (d, _, n) in enumerate(valid) if i not in wrong)
    reached = 0
    for k, (begin, end, i) in enumerate(spans):
        following = spans[k + 1][0] if k + 1 < len(spans) else end
        if begin < reached or following < end:
            wrong[i] = f"slice {i} of destination rows {begin}..{end - 1} overlaps another"
        reached = max(reached, end)
    _reject(rejected, "update_rows", wrong)
    for d, s, n in valid:
        pool[d : d + n] = new_rows[s : s + n]


torch.library.impl(f"{NAMESPACE}::copy_state", "CPU", copy_state)
torch.library.impl(f"{NAMESPACE}::gather_tables", "CPU", gather_tables)
torch.library.impl(f"{NAMESPACE}::swap_blocks", "CPU", swap_blocks)
torch.library.impl(f"{NAMESPACE}::update_rows", "CPU", update_rows)
