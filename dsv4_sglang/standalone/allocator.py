"""`BlockAllocator`: free list and reference counts of the blocks of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device


class BlockAllocator:
    """Allocator of block ids 0 .. num_total_blocks - 1 with reference counts.

    `acquire` allocates blocks with one owner, `share` adds an owner, `release` removes one. A block without owners is
    free.

    The free list is a stack of int32 ids on the device. Its top pointer is on the host (pinned if there is a GPU), so
    `num_free` and `acquire` never wait for the device. The host also keeps a copy of the stack and the number of owners
    of each block, to check a release before it changes anything. This costs 8 B of host memory per block, and each
    `release` takes a few passes over the ids on the host and one synchronisation, to copy the ids to the other side.

    Not for use inside a CUDA graph, because every replay would return the ids of the capture: acquire and release
    between captures and replays. Both raise RuntimeError while the current stream is captured.
    """

    def __init__(self, num_total_blocks: int, device: torch.device | str | None = None) -> None:
        if num_total_blocks < 0:
            raise ValueError(f"num_total_blocks is {num_total_blocks}; expected 0 or more")
        self.num_total_blocks = num_total_blocks
        self.device = resolve_device(device)
        # The top of the stack is its end, so block 0 is allocated first.
        self._host_stack = torch.arange(num_total_blocks - 1, -1, -1, dtype=torch.int32)
        self._owners = torch.zeros(num_total_blocks, dtype=torch.int32)
        self._stack = self._host_stack.to(self.device, copy=True)
        self._top = torch.tensor([num_total_blocks], dtype=torch.int64, pin_memory=self.device.type == "cuda")

    @property
    def num_free(self) -> int:
        return int(self._top[0])

    def acquire(self, n: int) -> Tensor:
        """Allocate `n` blocks, the most recently released first. Return their ids, [n] int32 on the device.

        Raises:
            ValueError: `n` is negative.
            RuntimeError: fewer are free ("OOM", with the requested, free and total number). Nothing is allocated.
        """
        return self.acquire_with_host_ids(n)[0]

    def acquire_with_host_ids(self, n: int) -> tuple[Tensor, list[int]]:
        """Allocate blocks as `acquire` does. Return their ids on the device and on the host, without waiting for the
        device."""
        self._reject_in_capture("acquire")
        if n < 0:
            raise ValueError(f"acquire: {n} blocks requested; expected 0 or more")
        top = self.num_free
        if n > top:
            raise RuntimeError(f"OOM: {n} blocks requested, {top} free of {self.num_total_blocks}")
        taken = self._host_stack[top - n : top].flip(0)
        self._owners[taken.long()] = 1
        self._top[0] = top - n
        # A copy, because the next release overwrites the stack.
        return self._stack[top - n : top].flip(0), taken.tolist()

    def owners(self, block: int) -> int:
        """Return the number of owners of a block, 0 if it is free."""
        return int(self._owners[block])

    def share(self, ids: Tensor | Sequence[int]) -> None:
        """Add one owner to each block. `ids` and errors as in `release`."""
        blocks = self._check("share", ids)
        self._owners[blocks] += 1

    def release(self, ids: Tensor | Sequence[int]) -> None:
        """Remove one owner from each block. Blocks without owners become free.

        `ids` is an int tensor [n] on any device, or a sequence of ints.

        Raises:
            ValueError: an id is not a block of this allocator, is listed twice or is already free, or there are more
                ids than allocated blocks. Nothing changes.
        """
        self._reject_in_capture("release")
        blocks = self._check("release", ids)
        self._owners[blocks] -= 1
        free = blocks[self._owners[blocks] == 0].int()
        n, top = len(free), self.num_free
        self._host_stack[top : top + n] = free
        self._stack[top : top + n] = free.to(self.device)
        self._top[0] = top + n

    def _reject_in_capture(self, what: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what}: the current stream is captured into a CUDA graph, and its replays would reuse the block ids "
                f"of the capture; call {what} outside the graph and copy the ids into a tensor that the graph reads"
            )

    def _check(self, what: str, ids: Tensor | Sequence[int]) -> Tensor:
        """Return the ids [n] int64 on the host. Raise ValueError unless all of them are blocks with owners."""
        given = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=torch.int32)
        if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(f"{what}: ids are {given.dtype} of shape {tuple(given.shape)}; expected ints of shape [n]")
        blocks = given.to("cpu", torch.int64)
        out = self.num_total_blocks - self.num_free
        if len(blocks) > out:
            raise ValueError(f"{what}: {len(blocks)} blocks given, only {out} of {self.num_total_blocks} are allocated")
        foreign = blocks[(blocks < 0) | (blocks >= self.num_total_blocks)]
        if len(foreign):
            raise ValueError(f"{what}: block {int(foreign[0])} is not in 0..{self.num_total_blocks - 1}")
        free = blocks[self._owners[blocks] == 0]
        if len(free):
            raise ValueError(f"{what}: block {int(free[0])} is already free (released twice?)")
        unique, count = blocks.unique(return_counts=True)
        if len(unique) < len(blocks):
            raise ValueError(f"{what}: block {int(unique[count > 1][0])} is listed twice")
        return blocks
