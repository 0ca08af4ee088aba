"""Time device work: medians of CUDA graph replays between events; and measure the ceilings of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

# A sample lasts about this long, so that the resolution of the events does not matter.
SAMPLE_US = 2000.0


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, and 10th and 90th percentile of `samples` samples."""

    us: float
    low: float
    high: float
    samples: int


def summarise(samples: Sequence[float]) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


def weighted(timings: Sequence[Timing], weights: Sequence[float]) -> float:
    """Return the weighted mean of the medians in microseconds."""
    if len(timings) != len(weights) or not weights:
        raise ValueError(f"{len(timings)} timings and {len(weights)} weights; expected equal numbers, at least one")
    return sum(t.us * w for t, w in zip(timings, weights)) / sum(weights)


class Recorded:
    """A function of device work, recorded once into a CUDA graph. On the CPU it is called directly."""

    def __init__(self, function: Callable[[], object], device: torch.device, warmup: int = 2) -> None:
        self.device, self.function = device, function
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            function()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            function()
        torch.cuda.synchronize()

    def replay(self) -> None:
        if self.graph is None:
            self.function()
        else:
            self.graph.replay()

    def time(self, samples: int = 30, divide: int = 1) -> Timing:
        """Time replays back to back. `divide` is the number of calls in one recording."""
        if self.graph is None:
            return self._on_cpu(divide)
        once = self._between_events(1)
        replays = max(1, min(200, round(SAMPLE_US / max(once, 1.0))))
        return summarise([self._between_events(replays) / replays / divide for _ in range(samples)])

    def _between_events(self, replays: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            self.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _on_cpu(self, divide: int) -> Timing:
        start = time.perf_counter()
        self.function()
        return summarise([(time.perf_counter() - start) * 1e6 / divide])


def host_time(function: Callable[[], object], samples: int = 50, inner: int = 10) -> Timing:
    """Return the host time of a call in us.

    A sample starts with an empty device queue and does not wait for the device.

    Args:
        function: the call.
        samples: number of samples.
        inner: calls per sample.
    """
    cuda = torch.cuda.is_available()
    times = []
    for _ in range(samples):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            function()
        times.append((time.perf_counter() - start) * 1e6 / inner)
    return summarise(times)


def copy_rate(device: torch.device, megabytes: int = 2048) -> float:
    """Return the GB/s of a copy kernel, bytes read plus written. (A copy node of a CUDA graph is a third slower.)"""
    size = (megabytes << 20) if device.type == "cuda" else (1 << 20)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    timing = Recorded(lambda: torch.add(source, 1.0, out=target), device).time(10)
    return 2 * size / timing.us / 1e3


def empty_launch(device: torch.device, launches: int = 200) -> float:
    """Return the microseconds of an empty kernel, one of many in a CUDA graph."""
    if device.type != "cuda":
        return 0.0

    def step() -> None:
        for _ in range(launches):
            torch.cuda._sleep(0)

    return Recorded(step, device).time(20, divide=launches).us


def floor_us(bytes_moved: float, launches: float, copy_gbs: float, launch_us: float) -> float:
    """Return a lower bound of the time in us: the larger of the bytes at the copy rate and the empty launches.

    Args:
        bytes_moved: bytes read plus written.
        launches: number of kernels.
        copy_gbs: copy rate in GB/s.
        launch_us: time of an empty kernel in us.
    """
    return max(bytes_moved / copy_gbs / 1e3, launches * launch_us)


def bf16_rate(device: torch.device, size: int = 8192) -> float:
    """Return the TFLOP/s of a square bf16 matrix product of random numbers."""
    n = size if device.type == "cuda" else 128
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    timing = Recorded(lambda: torch.mm(a, b, out=out), device).time(10)
    return 2 * n**3 / timing.us / 1e6


def ceilings(device: torch.device, keep: Callable[[str, float], None]) -> Iterator[dict[str, object]]:
    """Measure the device's ceilings and pass each to `keep`. Yields no rows."""
    keep("copy_gbs", copy_rate(device))
    keep("empty_launch_us", empty_launch(device))
    keep("bf16_tflops", bf16_rate(device))
    return iter(())
