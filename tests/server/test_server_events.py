"""KV events of a real server: a subscriber's mirror equals the server's tree and predicts the prefix hits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from kv_mirror import Mirror
from liveness import Progress
from server_harness import HOST_CACHE, Server, prompt, running
from sglang.srt.disaggregation.kv_events import KVEventBatch

pytestmark = pytest.mark.server

FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-running-requests", "2", "--max-total-tokens", "2048")
FLAGS += ("--chunked-prefill-size", "256", "--enable-metrics")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "snapshot_interval": 512, "max_snapshots": 6}


class Subscriber:
    """Subscriber with a mirror of the server's blocks. It requests a replay of batches that it missed."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.mirror, self.batches = Mirror(), 0
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        context = zmq.Context.instance()
        self._events, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket, address in ((self._events, endpoint), (self._replay, replay)):
            socket.linger = 0
            socket.connect(address)
        self._events.subscribe("")

    def close(self) -> None:
        self._events.close()
        self._replay.close()

    def receive(self) -> None:
        """Apply all batches that have arrived, in order and exactly once."""
        while self._events.poll(100):
            _, number, payload = self._events.recv_multipart()
            if int.from_bytes(number, "big") > self.batches:
                self._ask_again()
            self._apply(int.from_bytes(number, "big"), payload)

    def _ask_again(self) -> None:
        self._replay.send_multipart([b"", self.batches.to_bytes(8, "big")])
        while True:
            _, number, payload = self._replay.recv_multipart()
            if (at := int.from_bytes(number, "big", signed=True)) < 0:
                return
            self._apply(at, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        if number == self.batches:
            self.batches += 1
            self.mirror.apply(self._decoder.decode(payload).events)


@pytest.fixture(scope="module", params=["device", "host"])
def served(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Subscriber]]:
    """Server with 16 device blocks and 6 snapshots, without and with a host cache of four times that size."""
    folder = tmp_path_factory.mktemp("events")
    endpoints = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    config = json.dumps({"publisher": "zmq", **endpoints})
    flags = (*FLAGS, *(HOST_CACHE if request.param == "host" else ()), "--kv-events-config", config)
    model = tiny(seed=0, ratios=(0, 4, 128), index_topk=1536)
    with running(model, folder / "log", *flags, **OPTIONS, integrity_check=True) as server:
        subscriber = Subscriber(*endpoints.values())
        yield server, subscriber
        subscriber.close()


def settled(server: Server, subscriber: Subscriber) -> Mirror:
    """Return the mirror once it equals the announced blocks of the server's tree.

    The integrity check compares those with `announced_by_rule`.
    """
    server.wait_idle()
    progress = Progress(server.process, server.log)
    while True:
        subscriber.receive()
        (state,) = server.get("/server_info")["internal_states"]
        (report,) = state["dsv4_sglang_integrity"]
        assert not report["findings"], report["findings"]
        if report["announced"] == subscriber.mirror.totals():
            return subscriber.mirror
        progress.check()
        time.sleep(0.05)


def ask(served: tuple[Server, Subscriber], ids: list[int], count: int = 4, **fields: Any) -> tuple[int, int]:
    """Return (cached tokens that the mirror predicts, cached tokens that the server reports) for a prompt."""
    believed = settled(*served).found(ids[:-1])
    return believed, served[0].generate(ids, count, **fields).cached


def test_a_router_believes_what_is_found(served: tuple[Server, Subscriber]) -> None:
    """The prediction equals the hit for new, repeated and continued prompts."""
    first = prompt(700, seed=1)
    assert ask(served, first) == (0, 0)
    assert ask(served, first) == (640, 640)
    server, _ = served
    answer = server.generate(first, 90).tokens
    assert ask(served, [*first, *answer, *prompt(40, seed=2)]) == (768, 768)
    assert settled(*served).blocks["GPU"]


def test_a_branch_is_found_once_its_snapshot_is_there(served: tuple[Server, Subscriber]) -> None:
    """Before a branch has its own snapshot, the prediction is too high by less than the distance to the previous
    one."""
    trunk = prompt(900, seed=3)
    served[0].generate(trunk, 1)
    branch = [*trunk[:300], *prompt(300, seed=4)]
    assert ask(served, branch) == (256, 0)
    other = [*trunk[:300], *prompt(300, seed=5)]
    assert ask(served, other) == (256, 256)


def test_evictions(served: tuple[Server, Subscriber]) -> None:
    """Evicted blocks are withdrawn when ten conversations exceed 16 blocks and 6 snapshots."""
    server, subscriber = served
    removed = subscriber.mirror.removed
    prompts = [prompt(400 + 20 * i, seed=10 + i) for i in range(10)]
    for ids in (*prompts, *prompts[::-1], *prompts[2:5]):
        believed, found = ask(served, ids)
        assert believed == found
    assert settled(server, subscriber).removed > removed, "no block was evicted, so the test checks nothing"
    assert bool(subscriber.mirror.blocks["CPU_PINNED"]) == ("host_tokens" in server.metrics())


def test_tenants_are_not_announced(served: tuple[Server, Subscriber]) -> None:
    ids = prompt(500, seed=40)
    assert ask(served, ids, extra_key="tenant") == (0, 0)
    assert ask(served, ids, extra_key="tenant") == (0, 384), "a tenant finds its own blocks"
    assert ask(served, ids) == (0, 0), "no other tenant finds them"


def test_a_flush(served: tuple[Server, Subscriber]) -> None:
    server, subscriber = served
    server.generate(prompt(300, seed=50), 1)
    assert any(settled(server, subscriber).blocks.values())
    server.flush()
    assert not any(settled(server, subscriber).blocks.values())
    assert subscriber.mirror.cleared
    assert ask(served, prompt(300, seed=50)) == (0, 0)
