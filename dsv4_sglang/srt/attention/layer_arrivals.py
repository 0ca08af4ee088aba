"""Waits of a step for the layers of a load from the host cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CacheKVPool


class LayerArrivals:
    """Lets each layer of a step wait for its own part of a load, so that the load overlaps with the layers before.

    SGLang's events of a load change from load to load, but a CUDA graph waits for the events that it was recorded with.
    Recorded steps therefore wait for events of this class, which `expect` records after those of the load. A wait in a
    graph is for the last record before the launch of the graph, so the next load can begin while the graph runs.

    Args:
        pool: pool that is loaded.
        layers: number of layers.
        device: device of the pool.
        has_host_cache: recorded steps may wait for loads.
    """

    def __init__(self, pool: CacheKVPool, layers: int, device: torch.device, *, has_host_cache: bool) -> None:
        self._pool, self._on_gpu = pool, device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        if self._on_gpu and has_host_cache:
            self._stream = torch.cuda.Stream(device)
            self._events = [torch.cuda.Event(external=True) for _ in range(layers)]
            for event in self._events:
                event.record(self._stream)  # creates it

    def wait(self, layer: int, *, recorded: bool) -> None:
        """Let the current stream wait until a layer is loaded. `recorded`: a CUDA graph is recorded."""
        if not recorded or not self._on_gpu:
            self._pool.wait_for_layer(layer)
        elif self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])

    def expect(self) -> None:
        """Let the next replay wait for the load of its batch, if there is one. Call this before the replay."""
        if not self._events or not self._pool.is_loading:
            return
        with torch.cuda.stream(self._stream):
            for layer, event in enumerate(self._events):
                self._pool.wait_for_layer(layer)
                event.record(self._stream)
