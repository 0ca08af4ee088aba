"""A CUDA graph waits for each layer of a load on its own, and for the load of its batch only."""

from __future__ import annotations

import time

import pytest
import torch
from sglang.srt.managers.cache_controller import LayerDoneCounter
from support.backend import make_runner

from dsv4_sglang.srt.attention.layer_arrivals import LayerArrivals

pytestmark = pytest.mark.gpu
LAYERS = 4
# Much longer than a launch, in clock cycles of the GPU.
DELAY = 200_000_000


class Graph:
    """A graph that copies a table of each layer to pinned host memory, after the layer has arrived."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.pool = make_runner(4, heads=1, device="cuda").token_to_kv_pool
        self.counter = self.pool.layer_transfer_counter = LayerDoneCounter(LAYERS)
        self.arrivals = LayerArrivals(self.pool, LAYERS, self.device, has_host_cache=True)
        self.tables = torch.zeros(LAYERS, 1 << 20, dtype=torch.int32, device=self.device)
        self.seen = torch.zeros(LAYERS, dtype=torch.int32).pin_memory()
        self.loads, self.steps = torch.cuda.Stream(), torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.steps):
            for layer in range(LAYERS):
                self.arrivals.wait(layer, recorded=True)
                self.seen[layer].copy_(self.tables[layer, -1], non_blocking=True)

    def load(self, value: int, late_layer: int | None = None) -> int:
        """Start a load of `value` into all layers. Return its number. `late_layer` and those after it come late."""
        load = self.counter.update_producer()
        self.loads.wait_stream(self.steps)
        with torch.cuda.stream(self.loads):
            for layer in range(LAYERS):
                if layer == late_layer:
                    torch.cuda._sleep(DELAY)
                self.tables[layer].fill_(value)
                self.counter.events[load].complete(layer)
        return load

    def replay(self, load: int) -> None:
        """Replay the graph for a batch that waits for a load, -1 for none."""
        self.counter.set_consumer(load)
        with torch.cuda.stream(self.steps):
            self.arrivals.expect()
            self.graph.replay()

    def until(self, layer: int, value: int) -> None:
        """Wait until the graph has copied `value` from a layer."""
        begin = time.monotonic()
        while int(self.seen[layer]) != value:
            assert time.monotonic() - begin < 60, f"layer {layer} was not copied: {self.seen.tolist()}"


def test_each_layer_is_waited_for() -> None:
    graph = Graph()
    for turn in range(1, 7):
        graph.replay(graph.load(turn, late_layer=turn % LAYERS))
        torch.cuda.synchronize()
        assert graph.seen.tolist() == [turn] * LAYERS
        graph.replay(-1)
        torch.cuda.synchronize()


def test_layers_do_not_wait_for_later_ones() -> None:
    graph = Graph()
    load = graph.load(7, late_layer=2)
    graph.replay(load)
    graph.until(1, 7)
    assert not graph.counter.events[load].finish_event.query() and graph.seen.tolist() == [7, 7, 0, 0]
    torch.cuda.synchronize()
    assert graph.seen.tolist() == [7] * LAYERS


def test_running_graph_does_not_wait_for_the_next_load() -> None:
    """The load of the next step and its events may be enqueued while a graph runs. A load that began after the graph
    waits for its end, so a graph that waited for the next load would never end."""
    graph = Graph()
    first = graph.load(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(graph.steps):
        torch.cuda._sleep(DELAY)
    graph.replay(first)
    ended = torch.cuda.Event()
    ended.record(graph.steps)
    # Events of the next replay, which complete long after the first one.
    late = torch.cuda.Stream()
    with torch.cuda.stream(late):
        torch.cuda._sleep(10 * DELAY)
        for event in graph.arrivals._events:
            event.record(late)
    ended.synchronize()
    assert graph.seen.tolist() == [1] * LAYERS and not late.query(), "the graph waited for a later record"
    torch.cuda.synchronize()
