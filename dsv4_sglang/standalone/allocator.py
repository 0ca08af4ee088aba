"""`BlockAllocator`: which blocks of a pool are free, and how many owners the others have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device


class BlockAllocator:
    """Hands out block ids 0 .. num_total_blocks - 1 and counts their owners.

    `acquire` gives a block its first owner, `share` one more, `release` takes one away. A block without owners is free.

    The free list is a stack of int32 ids on the device. Its top pointer is on the host (pinned where there is a GPU),
    so `num_free` and the decision whether `acquire` fits never wait for the device. The host also keeps a copy of the
    stack and the number of owners of each block; with them a release is checked before anything moves. What that
    costs: 8 B of host memory a block, and at `release` a few passes over the ids on the host and one wait for the
    device, for the copy of the ids to the other side. `acquire` never waits.

    Not for use inside a CUDA graph: acquire and release between captures and replays. While the current stream is
    captured both raise RuntimeError, since every replay would hand out the ids of the capture again.
    """

    def __init__(self, num_total_blocks: int, device: torch.device | str | None = None) -> None:
        if num_total_blocks < 0:
            raise ValueError(f"num_total_blocks is {num_total_blocks}; expected 0 or more")
        self.num_total_blocks = num_total_blocks
        self.device = resolve_device(device)
        # The top of the stack is its end: block 0 goes first.
        self._host_stack = torch.arange(num_total_blocks - 1, -1, -1, dtype=torch.int32)
        self._owners = torch.zeros(num_total_blocks, dtype=torch.int32)
        self._stack = self._host_stack.to(self.device, copy=True)
        self._top = torch.tensor([num_total_blocks], dtype=torch.int64, pin_memory=self.device.type == "cuda")

    @property
    def num_free(self) -> int:
        return int(self._top[0])

    def acquire(self, n: int) -> Tensor:
        """Take `n` blocks: their ids, [n] int32 on the device, last released first.

        Raises RuntimeError ("OOM", what was asked, what is free, the total) and takes nothing if fewer are free.
        """
        return self.acquire_with_host_ids(n)[0]

    def acquire_with_host_ids(self, n: int) -> tuple[Tensor, list[int]]:
        """`acquire`, and the same ids on the host; no wait for the device."""
        self._reject_in_capture("acquire")
        if n < 0:
            raise ValueError(f"acquire: {n} blocks asked; expected 0 or more")
        top = self.num_free
        if n > top:
            raise RuntimeError(f"OOM: {n} blocks asked, {top} free of {self.num_total_blocks}")
        taken = self._host_stack[top - n : top].flip(0)
        self._owners[taken.long()] = 1
        self._top[0] = top - n
        # A copy: the stack's memory is written again by the next release.
        return self._stack[top - n : top].flip(0), taken.tolist()

    def owners(self, block: int) -> int:
        """The number of owners of a block; 0: it is free."""
        return int(self._owners[block])

    def share(self, ids: Tensor | Sequence[int]) -> None:
        """Give blocks one more owner each. `ids` and errors as in `release`."""
        blocks = self._check("share", ids)
        self._owners[blocks] += 1

    def release(self, ids: Tensor | Sequence[int]) -> None:
        """Take one owner from each block; those without owners are free. `ids`: an int tensor [n] on any device, or a
        sequence of ints.

        Raises ValueError and changes nothing when an id is not a block of this allocator, is given twice or is free
        already, or when more ids come back than are out.
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
                f"{what}: the current stream is captured into a CUDA graph, whose replays would use the block ids of "
                f"the capture again; call {what} outside the graph and copy the ids into a tensor that the graph reads"
            )

    def _check(self, what: str, ids: Tensor | Sequence[int]) -> Tensor:
        """The ids [n] int64 on the host, if all of them are blocks with owners."""
        given = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=torch.int32)
        if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(f"{what}: ids are {given.dtype} of shape {tuple(given.shape)}; expected ints of shape [n]")
        blocks = given.to("cpu", torch.int64)
        out = self.num_total_blocks - self.num_free
        if len(blocks) > out:
            raise ValueError(f"{what}: {len(blocks)} blocks given, only {out} of {self.num_total_blocks} are out")
        foreign = blocks[(blocks < 0) | (blocks >= self.num_total_blocks)]
        if len(foreign):
            raise ValueError(f"{what}: block {int(foreign[0])} is not in 0..{self.num_total_blocks - 1}")
        free = blocks[self._owners[blocks] == 0]
        if len(free):
            raise ValueError(f"{what}: block {int(free[0])} is free already (released twice?)")
        unique, count = blocks.unique(return_counts=True)
        if len(unique) < len(blocks):
            raise ValueError(f"{what}: block {int(unique[count > 1][0])} is given twice")
        return blocks
