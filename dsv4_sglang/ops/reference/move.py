"""`copy_state`, `gather_tables`, `swap_blocks`: copies of state, tables and blocks.

`copy_state` reads the list of copies on the device, where an error cannot be raised without waiting. A launch with
invalid input writes nothing and stores in `rejected` [1] int32, if given, the index of the first invalid pair, -1 if
there is none. Read it where waiting is allowed; every call and every replay of a graph overwrites it. Without
`rejected` the kernel prints the error to stdout. On a CPU the op raises ValueError. Shapes and dtypes are checked on
the host: a GPU raises RuntimeError for them.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.ops.schemas import NAMESPACE


def copy_state(src: Tensor, dst: Tensor, tensors: Sequence[Tensor], rejected: Tensor | None = None) -> None:
    """Copy the state of slot `src[i]` to slot `dst[i]` in every tensor.

    A pair with a slot that one of the tensors does not have, and pairs with equal destinations, are rejected. Nothing
    is written then, except that a GPU still copies the other pairs if only destinations are equal.

    Args:
        src: int32 [n]; a negative slot skips the pair.
        dst: int32 [n]; a negative slot skips the pair. No slot may be both a source and a destination, which is not
            checked.
        tensors: [layers, slots, ...] each.
        rejected: see the module.
    """
    slots = min((tensor.shape[1] for tensor in tensors), default=0)
    pairs = {i: (s, d) for i, (s, d) in enumerate(zip(src.tolist(), dst.tolist())) if tensors and min(s, d) >= 0}
    named, wrong = Counter(d for _, d in pairs.values()), {}
    for i, (s, d) in pairs.items():
        if max(s, d) >= slots:
            wrong[i] = f"pair {i}, slot {s} to slot {d}, is out of range for tensors of {slots} slots"
        elif named[d] > 1:
            wrong[i] = f"pair {i}, slot {s} to slot {d}, has the same destination as another pair"
    first = min(wrong, default=-1)
    if rejected is not None:
        rejected.fill_(first)
    if wrong:
        raise ValueError(f"copy_state: {wrong[first]}; nothing is written")
    valid = (src >= 0) & (dst >= 0)
    src, dst = src[valid].long(), dst[valid].long()
    for tensor in tensors:
        tensor[:, dst] = tensor[:, src]


def gather_tables(
    requests: Tensor,
    seq_lens: Tensor,
    state_slot_of_request: Tensor,
    req_to_token: Tensor,
    state_slots: Tensor,
    block_table: Tensor,
) -> None:
    """Copy state slots and block ids of a decode step from the tables of all requests.

    Args:
        requests: int64 or int32 [B], rows of `state_slot_of_request` and `req_to_token`.
        seq_lens: [B], lengths of the requests.
        state_slot_of_request: int32 [R].
        req_to_token: int32 [R, tokens], pool slots.
        state_slots: int32 [>= B], receives the state slots.
        block_table: int32 [>= B, NB], receives the ids of the blocks below `seq_lens`. Later ids are not written.
    """
    state_slots[: requests.shape[0]] = state_slot_of_request[requests]
    for row, request, length in zip(block_table, requests.tolist(), seq_lens.tolist()):
        slots = req_to_token[request, :length:BLOCK_TOKENS][: row.shape[0]]
        row[: slots.shape[0]] = slots // BLOCK_TOKENS


def swap_blocks(
    pools: Sequence[Tensor], host: Tensor, blocks: Tensor, rows: Tensor, to_host: bool, offsets: Sequence[int]
) -> None:
    """Copy block `blocks[i]` of every pool to or from row `rows[i]` of `host`.

    Args:
        pools: [blocks, ...] each, of any dtype, contiguous except for the first dimension.
        host: uint8 [rows, bytes], pinned or on the device of the pools.
        blocks: int64 [n] on the device of the pools, distinct (not checked).
        rows: int64 [n] on the CPU, distinct.
        to_host: direction of the copy.
        offsets: byte of a host row at which the block of each pool begins. Overlaps are not checked.

    Raises:
        ValueError: `blocks` and `rows`, or `pools` and `offsets`, have different lengths, a row is listed twice, or a
            row or byte range is not in `host`. On a CPU also if a pool does not have a block. Nothing is copied. A GPU
            raises RuntimeError instead. It skips a block that a pool does not have and prints it.
    """
    views = [pool.flatten(1).view(torch.uint8) for pool in pools]
    if len(offsets) != len(views):
        raise ValueError(f"swap_blocks: {len(offsets)} offsets for {len(views)} pools")
    spans = [(offset, offset + view.shape[1]) for offset, view in zip(offsets, views)]
    for begin, end in spans:
        if not 0 <= begin <= end <= host.shape[1]:
            raise ValueError(f"swap_blocks: bytes {begin}..{end} are not within host rows of {host.shape[1]} bytes")
    if rows.shape != blocks.shape:
        raise ValueError(f"swap_blocks: {blocks.numel()} blocks and {rows.numel()} host rows")
    if rows.unique().numel() != rows.numel():
        raise ValueError(f"swap_blocks: a host row is listed twice in {rows.tolist()}")
    for name, ids, size in (("host row", rows, host.shape[0]), *(("block", blocks, view.shape[0]) for view in views)):
        if (bad := ids[(ids < 0) | (ids >= size)]).numel():
            raise ValueError(f"swap_blocks: {name} {int(bad[0])} is not in 0..{size - 1}")
    for view, (begin, end) in zip(views, spans):
        if to_host:
            host[rows, begin:end] = view[blocks]
        else:
            view[blocks] = host[rows, begin:end]


torch.library.impl(f"{NAMESPACE}::copy_state", "CPU", copy_state)
torch.library.impl(f"{NAMESPACE}::gather_tables", "CPU", gather_tables)
torch.library.impl(f"{NAMESPACE}::swap_blocks", "CPU", swap_blocks)
