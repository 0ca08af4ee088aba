"""Requests of a `KVCacheManager` in host memory."""

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
from dsv4_sglang.standalone.allocator import ids_on


@dataclass(eq=False)
class Offloaded:
    """A request in host memory, from `KVCacheManager.offload` until `restore` or `discard`.

    Attributes:
        blocks: number of its blocks.
        event: end of the last copy in either direction; None on a CPU, where copies are synchronous.
    """

    blocks: int
    event: torch.cuda.Event | None
    # Host memory that holds it.
    _host: HostSide
    # Host rows of its slot and of its blocks; None after `restore` or `discard`.
    _rows: tuple[int, np.ndarray] | None
    # Result of `RequestLengths.save` for its slot.
    _lengths: Tensor


class HostSide:
    """Host memory for slots and blocks of requests, with its free rows and pending copies."""

    def __init__(self, state: StateStorage, pools: Sequence[PagedKVPool], requests: int, blocks: int) -> None:
        self.slots = HostStates("host_requests", state.slot_tables(), 0, requests, None)
        self.blocks = HostBlockPool(pools, blocks) if pools and blocks else None
        self.free_slots, self.free_blocks = FreeRows(requests), FreeRows(blocks)
        self._layers, self._device = len(pools), state.device
        # End of the last copy to the host.
        self._saved: torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def save(self, slot: int, blocks: Sequence[int], lengths: Tensor, stream: torch.cuda.Stream | None) -> Offloaded:
        """Start to copy a request to the host.

        Args:
            slot: its state slot.
            blocks: its block ids.
            lengths: from `RequestLengths.save`.
            stream: stream of the copy, None for the current one.

        Raises:
            RuntimeError: not enough free rows. Nothing is allocated.
        """
        self.settle(lambda: self.free_slots.available > 0 and self.free_blocks.available >= len(blocks))
        if not self.free_slots.available or self.free_blocks.available < len(blocks):
            raise RuntimeError(
                f"OOM: a request with {len(blocks)} blocks does not fit in host memory, which has space for "
                f"{self.free_slots.available} requests and {self.free_blocks.available} blocks; restore or discard a "
                "request, or construct the cache with more host_requests and host_blocks"
            )
        rows, slot_rows = self.free_blocks.take(len(blocks)), self.free_slots.take(1)
        assert rows is not None and slot_rows is not None
        there, before = int(slot_rows[0]), self._saved

        def copy() -> None:
            self._wait(before)  # both use the staging buffer on the GPU
            self.slots.save(slot, there)
            if self.blocks is not None:
                self.blocks.save(ids_on(self._device, blocks).long(), torch.from_numpy(rows))

        self._saved = self._on(stream, copy)
        return Offloaded(len(blocks), self._saved, self, (there, rows), lengths)

    def load(self, offloaded: Offloaded, slot: int, blocks: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        """Start to copy a request back. Its rows become free when the copy is complete.

        Args:
            offloaded: the request.
            slot: its new state slot.
            blocks: its new block ids.
            stream: stream of the copy, None for the current one.
        """
        there, rows = self.rows_of(offloaded)
        before = offloaded.event

        def copy() -> None:
            self._wait(before)
            self.slots.load(slot, there)
            if self.blocks is not None:
                ids, host_rows = ids_on(self._device, blocks).long(), torch.from_numpy(rows)
                for layer in range(self._layers):
                    self.blocks.load(ids, host_rows, layer)

        offloaded.event = self._on(stream, copy)
        self.give_back(offloaded)

    def rows_of(self, offloaded: Offloaded) -> tuple[int, np.ndarray]:
        """Return the rows of a request. Raise ValueError if another cache offloaded it, or if it has been restored or
        discarded."""
        if offloaded._host is not self:
            raise ValueError(
                "the request is in the host memory of another cache: pass it to the cache that offloaded it"
            )
        if offloaded._rows is None:
            raise ValueError("the request is no longer on the host: it was restored or discarded")
        return offloaded._rows

    def give_back(self, offloaded: Offloaded) -> None:
        """Free the rows of a request when the last copy of them is complete."""
        there, rows = self.rows_of(offloaded)
        offloaded._rows = None

        def free() -> None:
            self.free_slots.give_back(np.array([there]))
            self.free_blocks.give_back(rows)

        self.after(offloaded.event, free)

    def after(self, event: torch.cuda.Event | None, free: Callable[[], None]) -> None:
        """Call `free` when the copies before `event` are complete: immediately on a CPU, otherwise in `settle`."""
        if event is None:
            free()
        else:
            self._pending.append((event, free))

    def settle(self, enough: Callable[[], bool]) -> None:
        """Free what completed copies have released. Wait for further copies until `enough` returns True."""
        while self._pending and (self._pending[0][0].query() or not enough()):
            event, free = self._pending.popleft()
            event.synchronize()
            free()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _on(self, stream: torch.cuda.Stream | None, copy: Callable[[], None]) -> torch.cuda.Event | None:
        """Run `copy` on `stream`, by default the current stream, after the work of the current stream."""
        if self._device.type != "cuda":
            copy()
            return None
        current = torch.cuda.current_stream(self._device)
        stream = current if stream is None else stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copy()
            return stream.record_event()
