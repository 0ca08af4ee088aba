"""`BlockAllocator`: allocator of the blocks of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.free_list import FreeList


def ids_on(device: torch.device, ids: Sequence[int]) -> Tensor:
    """Return ids as int32 [n] on a device, without waiting for it."""
    return torch.tensor(ids, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class BlockAllocator:
    """Allocator of block ids 0 .. num_total_blocks - 1.

    The free list is on the host, so `num_free` and `acquire` never wait for the device. `release` waits for it only to
    read ids that are given on it.

    Not for use inside a CUDA graph, because every replay would return the ids of the capture: acquire and release
    between captures and replays. Both raise RuntimeError while the current stream is captured.
    """

    def __init__(self, num_total_blocks: int, device: torch.device | str | None = None) -> None:
        if num_total_blocks < 0:
            raise ValueError(f"num_total_blocks is {num_total_blocks}; expected 0 or more")
        self.num_total_blocks = num_total_blocks
        self.device = resolve_device(device)
        self._free = FreeList(num_total_blocks)

    @property
    def num_free(self) -> int:
        return self._free.available

    def acquire(self, n: int) -> Tensor:
        """Allocate `n` blocks, the most recently released first. Return their ids, [n] int32 on the device.

        Raises:
            ValueError: `n` is negative.
            RuntimeError: fewer are free ("OOM", with the requested, free and total number). Nothing is allocated.
        """
        return ids_on(self.device, self.acquire_ids(n))

    def acquire_ids(self, n: int) -> list[int]:
        """Allocate blocks as `acquire` does. Return their ids on the host."""
        self._reject_in_capture("acquire")
        if n < 0:
            raise ValueError(f"acquire: {n} blocks requested; expected 0 or more")
        if (taken := self._free.take(n)) is None:
            raise RuntimeError(f"OOM: {n} blocks requested, {self.num_free} free of {self.num_total_blocks}")
        return taken

    def release(self, ids: Tensor | Sequence[int]) -> None:
        """Free blocks. `ids` is an int tensor [n] on any device, or a sequence of ints.

        Raises:
            ValueError: an id is not a block of this allocator, is listed twice or is already free. Nothing changes.
        """
        self._reject_in_capture("release")
        blocks = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        self._check(ids, blocks)
        self._free.give_back(blocks)

    def _reject_in_capture(self, what: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what}: the current stream is captured into a CUDA graph, and its replays would reuse the block ids "
                f"of the capture; call {what} outside the graph and copy the ids into a tensor that the graph reads"
            )

    def _check(self, ids: Tensor | Sequence[int], blocks: Sequence[int]) -> None:
        """Raise ValueError unless all of `blocks`, the given `ids` on the host, are allocated and distinct."""
        if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
            raise ValueError(f"release: ids are {ids}; expected ints of shape [n]")
        seen: set[int] = set()
        for block in blocks:
            if not 0 <= block < self.num_total_blocks:
                raise ValueError(f"release: block {block} is not in 0..{self.num_total_blocks - 1}")
            if self._free.is_free(block):
                raise ValueError(f"release: block {block} is already free (released twice?)")
            if block in seen:
                raise ValueError(f"release: block {block} is listed twice")
            seen.add(block)
