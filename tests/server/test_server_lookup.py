"""`POST /dsv4/lookup` of real servers: what it finds is what the next request hits, on device, host and in files.

Servers: one with an API key, and one with two tokenizer workers. test_server_dp.py looks up on two ranks. Both publish
KV events in Dynamo's format, from which a router predicts the same.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import KVEventBatch
from support.kv_mirror import Mirror
from support.liveness import POLL_SECONDS, STUCK_SECONDS, Progress
from support.server import FP32, Server, empty_device, only, prompt

from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin", "pages")]

BLOCK, CONTEXT, VOCABULARY = 128, 2048, 384
KEY = "of users"
MODEL = {"seed": 0, "ratios": (0, 4), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
FLAGS += ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
FOLDER = tempfile.mkdtemp()


def events(name: str) -> tuple[str, str]:
    """Return the flag with which the server of this name publishes events in its own socket."""
    config = {"publisher": "zmq", "endpoint": f"ipc://{FOLDER}/{name}", "format": "dynamo"}
    return "--kv-events-config", json.dumps(config)


SERVERS = {
    "key": ("--api-key", KEY, *events("key")),
    "workers": ("--tokenizer-worker-num", "2", *events("workers")),
}
OPTIONS = {**FP32, "max_snapshots": 12}
# A connection may reach either worker.
REPEATS = 8


@pytest.fixture(scope="module")
def server(router: Any, server: Server, name: str) -> Server:
    """The server with its key in every request, once all of its workers answer."""
    if name == "key":
        server._headers["Authorization"] = f"Bearer {KEY}"
    progress = Progress(server.process)
    while server.log_text().count("Start multi-tokenizer worker process") < 2 * (name == "workers"):
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    return server


@pytest.fixture(scope="module")
def router(name: str) -> Any:
    """A function that returns True once the events of the server predict a number of cached tokens for a prompt and a
    salt. The subscriber listens before the server starts."""
    socket, mirror, decoder = zmq.Context.instance().socket(zmq.SUB), Mirror(), msgspec.msgpack.Decoder(KVEventBatch)
    socket.linger = socket.rcvhwm = 0
    socket.connect(f"ipc://{FOLDER}/{name}")
    socket.subscribe("")

    def predicts(ids: list[int], salt: str | None, cached: int) -> bool:
        begin = time.monotonic()
        while time.monotonic() - begin < STUCK_SECONDS:
            while socket.poll(20):
                *_, payload = socket.recv_multipart()
                mirror.apply(decoder.decode(payload).events)
            if mirror.found(ids, salt) == cached:
                return True
        return False

    yield predicts
    socket.close()


def look_up(server: Server, ids: list[int] | None = None, **fields: Any) -> dict[str, int]:
    """Return what the server's rank finds. All lookups give the same answer, whichever worker gets them."""
    body = {**({} if ids is None else {"input_ids": ids}), **fields}
    answers = [server.post("/dsv4/lookup", body) for _ in range(REPEATS)]
    assert answers[1:] == answers[:-1]
    (found,) = answers[0]["ranks"]
    assert found["hit_tokens"] == sum(found[f"{place}_tokens"] for place in ("device", "host", "files"))
    return {"prompt": answers[0]["prompt_tokens"], **found}


def test_a_prompt_moves_from_place_to_place(server: Server, name: str, pages: Path) -> None:
    """Device, host, files, nowhere: a request then hits what was found. A lookup itself changes no metric."""
    ids, files = prompt(700), 5
    nothing = {"prompt": 700, "dp_rank": 0, "hit_tokens": 0, "device_tokens": 0, "host_tokens": 0, "files_tokens": 0}
    server.flush()
    server.post("/generate", {"input_ids": prompt(5), "sampling_params": {"max_new_tokens": 1}})
    assert look_up(server, ids, extra_key=name) == nothing
    assert server.generate(ids, 4, extra_key=name).cached == 0
    server.wait_idle()
    before = server.metrics()
    hit = 5 * BLOCK
    assert look_up(server, ids, extra_key=name) == nothing | {"hit_tokens": hit, "device_tokens": hit}
    assert look_up(server, ids[:600], extra_key=name)["hit_tokens"] == 0, "no snapshot at 512 tokens"
    assert look_up(server, ids, extra_key="other") == look_up(server, ids, cache_salt=name) == nothing
    assert server.metrics() == before
    empty_device(server)
    assert look_up(server, ids, extra_key=name) == nothing | {"hit_tokens": hit, "host_tokens": hit}
    assert server.generate(ids, 4, extra_key=name).cached == hit
    server.wait_idle()
    progress = Progress(server.process)
    while len(list(pages.glob("*.bin"))) < files + 1:
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    server.flush()
    assert look_up(server, ids, extra_key=name) == nothing
    stored = nothing | {"hit_tokens": hit, "files_tokens": hit}
    assert look_up(server, ids, extra_key=name, files=True) == stored
    assert server.generate(ids, 4, extra_key=name).cached == hit
    server.wait_idle()


def test_a_router_predicts_what_a_lookup_finds(server: Server, router: Any) -> None:
    """Equal prompts of three name spaces. Blocks with an `extra_key` are not announced, but a lookup finds them."""
    ids = prompt(500, seed=1)
    server.flush()
    spaces: tuple[dict[str, str], ...] = ({"cache_salt": "a"}, {}, {"cache_salt": "b"}, {"extra_key": "c"})
    for i, space in enumerate(spaces):
        server.generate(ids, 2, **space)
        server.wait_idle()
        for j, other in enumerate(spaces):
            found = look_up(server, ids, **other)["hit_tokens"]
            assert found == (3 * BLOCK if j <= i else 0)
            if "extra_key" not in other:
                assert router(ids[:-1], other.get("cache_salt"), found), (i, j)


def test_text_is_tokenized_as_in_a_request(server: Server) -> None:
    text = "The cache of a server. " * 40
    request = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    asked = server.post("/generate", request)["meta_info"]
    found = look_up(server, text=text)
    assert found["prompt"] == asked["prompt_tokens"] > 2 * BLOCK
    assert found["hit_tokens"] == (asked["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert server.post("/generate", request)["meta_info"]["cached_tokens"] == found["hit_tokens"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "expected either text or input_ids"),
        ({"text": "a", "input_ids": [5]}, "expected either text or input_ids"),
        ({"input_ids": []}, f"the prompt has 0 tokens; expected 1 to {CONTEXT}"),
        ({"input_ids": [5] * (CONTEXT + 1)}, f"the prompt has {CONTEXT + 1} tokens; expected 1 to {CONTEXT}"),
        ({"input_ids": [5, VOCABULARY]}, f"expected 0 to {VOCABULARY - 1}"),
        ({"input_ids": [5, -1]}, f"expected 0 to {VOCABULARY - 1}"),
        ({"input_ids": [1 << 80]}, f"expected 0 to {VOCABULARY - 1}"),
        ({"input_ids": [True]}, "$.input_ids"),
        ({"input_ids": "5"}, "$.input_ids"),
        ({"input_ids": [5], "extra_key": ["a"]}, "$.extra_key"),
        ({"input_ids": [5], "file": True}, "unknown field `file`"),
        ([5], "Expected `object`"),
    ],
)
def test_a_wrong_body_gets_one_line(server: Server, body: Any, message: str) -> None:
    for _ in range(REPEATS):
        with pytest.raises(RequestError) as error:
            server.post("/dsv4/lookup", body)
        said = json.loads(error.value.text)["message"]
        assert error.value.code == 400 and message in said and said.startswith("/dsv4/lookup: ") and "\n" not in said


def test_text_that_is_no_text(server: Server) -> None:
    for body in (b"", b"{", b'{"text": "\\ud800"}', b'{"text": "\xff"}'):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=STUCK_SECONDS)
        connection.request("POST", "/dsv4/lookup", body, server._headers)
        response = connection.getresponse()
        assert response.status == 400, (body, response.read())
        connection.close()


@only("key")
def test_without_the_key(server: Server) -> None:
    """The endpoint has the access rules of `/generate`."""
    for path in ("/dsv4/lookup", "/generate"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=STUCK_SECONDS)
        connection.request("POST", path, json.dumps({"input_ids": [5]}), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 401
        connection.close()


def test_nothing_is_left(server: Server) -> None:
    server.wait_idle()
    server.flush()
    server.wait_idle()
