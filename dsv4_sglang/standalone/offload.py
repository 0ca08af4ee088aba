"""Requests of a `KVCacheManager` that wait in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4_sglang.cache.host_pool import FreeRows, HostBlockPool, HostStates
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.state_cache import StateStorage


@dataclass(eq=False)
class Offloaded:
    """A request in host memory, from `KVCacheManager.offload` until `restore` or `discard`.

    Attributes:
        blocks: how many blocks it had.
        event: of the last copy, there or back; None on a CPU, where copies are over on return.
    """

    blocks: int
    event: torch.cuda.Event | None
    _rows: tuple[int, np.ndarray] | None
    """The row of its slot and those of its blocks; None when it is not here any more."""
    _lengths: Tensor
    """What `RequestLengths.save` gave for its slot."""


class HostSide:
    """Host memory for the slots and blocks of requests, which rows of it are free, and what waits for copies."""

    def __init__(self, state: StateStorage, pools: Sequence[PagedKVPool], requests: int, blocks: int) -> None:
        self.slots = HostStates("host_requests", state.slot_tables(), 0, requests, None)
        self.blocks = HostBlockPool(pools, blocks) if pools and blocks else None
        self.free_slots, self.free_blocks = FreeRows(requests), FreeRows(blocks)
        self._layers, self._device = len(pools), state.device
        self._saved: torch.cuda.Event | None = None
        """Of the last way here."""
        self._leaving: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def save(self, slot: int, blocks: Sequence[int], lengths: Tensor, stream: torch.cuda.Stream | None) -> Offloaded:
        """Begin to copy a request. Raises RuntimeError, and nothing is taken, without enough rows."""
        self.settle(lambda: self.free_slots.available > 0 and self.free_blocks.available >= len(blocks))
        if not self.free_slots.available or self.free_blocks.available < len(blocks):
            raise RuntimeError(
                f"OOM: a request with {len(blocks)} blocks is to go to the host, where {self.free_slots.available} "
                f"requests and {self.free_blocks.available} blocks are free; restore or discard one, or make the cache "
                "with more host_requests and host_blocks"
            )
        rows, slot_rows = self.free_blocks.take(len(blocks)), self.free_slots.take(1)
        assert rows is not None and slot_rows is not None
        there, before = int(slot_rows[0]), self._saved

        def copy() -> None:
            self._wait(before)  # both go through the blocks' buffer on the GPU
            self.slots.save(slot, there)
            if self.blocks is not None:
                self.blocks.save(self._ids(blocks), torch.from_numpy(rows))

        self._saved = self._on(stream, copy)
        return Offloaded(len(blocks), self._saved, (there, rows), lengths)

    def load(self, offloaded: Offloaded, slot: int, blocks: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        """Begin to copy a request back; its rows are free when that is over."""
        there, rows = self.rows_of(offloaded)
        before = offloaded.event

        def copy() -> None:
            self._wait(before)
            self.slots.load(slot, there)
            if self.blocks is not None:
                ids, host_rows = self._ids(blocks), torch.from_numpy(rows)
                for layer in range(self._layers):
                    self.blocks.load(ids, host_rows, layer)

        offloaded.event = self._on(stream, copy)
        self.give_back(offloaded)

    def rows_of(self, offloaded: Offloaded) -> tuple[int, np.ndarray]:
        """Raises ValueError for a request that is not here any more."""
        if offloaded._rows is None:
            raise ValueError("the request is not on the host any more: it was restored or discarded")
        return offloaded._rows

    def give_back(self, offloaded: Offloaded) -> None:
        """Free its rows, when the last copy of them is over."""
        there, rows = self.rows_of(offloaded)
        offloaded._rows = None

        def free() -> None:
            self.free_slots.give_back(np.array([there]))
            self.free_blocks.give_back(rows)

        self.after(offloaded.event, free)

    def after(self, event: torch.cuda.Event | None, give_back: Callable[[], None]) -> None:
        """Call `give_back` when the copies before `event` are over: at once on a CPU, else in `settle`."""
        if event is None:
            give_back()
        else:
            self._leaving.append((event, give_back))

    def settle(self, enough: Callable[[], bool]) -> None:
        """Give back what copies that are over have left, and wait for others until there is `enough`."""
        while self._leaving and (self._leaving[0][0].query() or not enough()):
            event, give_back = self._leaving.popleft()
            event.synchronize()
            give_back()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64).to(self._device)

    def _on(self, stream: torch.cuda.Stream | None, copy: Callable[[], None]) -> torch.cuda.Event | None:
        """Run `copy` on a stream, the current one by default, behind the work of the current one."""
        if self._device.type != "cuda":
            copy()
            return None
        current = torch.cuda.current_stream(self._device)
        stream = current if stream is None else stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copy()
            return stream.record_event()
