"""Measured times of copies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class CopyTimer:
    """Timer of the device time of `measure` blocks that never waits for the device.

    On CUDA it records an event at both ends of a block. `measure` and `poll` read the pairs that have completed, so the
    list of open pairs stays short even if nothing reads the result. The timer does not work inside CUDA graph capture.
    On CPU operations are synchronous, so the timer reads the clock.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = str(device).startswith("cuda")
        # Callback that receives the seconds of each completed block.
        self.finished: Callable[[float], None] = lambda seconds: None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, *stream: torch.cuda.Stream) -> Iterator[None]:
        """Measure the enclosed block. CUDA events are recorded on `stream`, by default the current stream."""
        if not self._cuda:
            begin = time.perf_counter()
            yield
            self.finished(time.perf_counter() - begin)
            return
        self.poll()
        pair = self._idle.pop() if self._idle else (_event(), _event())
        pair[0].record(*stream)
        yield
        pair[1].record(*stream)
        self._open.append(pair)

    def poll(self) -> None:
        """Read the blocks that have completed."""
        while self._open and self._open[0][1].query():
            pair = self._open.popleft()
            self.finished(pair[0].elapsed_time(pair[1]) / 1e3)
            self._idle.append(pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
