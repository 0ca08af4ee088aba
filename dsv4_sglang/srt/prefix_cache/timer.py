"""Device time of copies, without ever waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyTimer:
    """Sums the time between the two ends of `measure` blocks, as the device sees it.

    On CUDA an event is recorded at each end, on the current stream. `measure` and `seconds` read those pairs that are
    over, so that only what the device has before it is held, whether anybody asks or not. Not for what a CUDA graph
    records. On a CPU operations are over when they return, and the clock is read.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        if not self._cuda:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        self._read_finished()
        pair = self._idle.pop() if self._idle else (_event(), _event())
        pair[0].record()
        yield
        pair[1].record()
        self._open.append(pair)

    def seconds(self) -> float:
        """Of all blocks that are over by now."""
        self._read_finished()
        return self._seconds

    def _read_finished(self) -> None:
        while self._open and self._open[0][1].query():
            pair = self._open.popleft()
            self._seconds += pair[0].elapsed_time(pair[1]) / 1e3
            self._idle.append(pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
