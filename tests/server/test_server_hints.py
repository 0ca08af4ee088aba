"""`kv_hints`, `POST /dsv4/prefetch` and `/flush_cache` of a real server with a host cache and a folder of files.

Pins may hold half of a device of 32 blocks. The server has one process, and most tests run again on two, which must
pin, evict and forget the same, behind two tokenizer workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.liveness import POLL_SECONDS, Progress
from support.server import FP32, Server, empty_device, greedy, kv_hints, only, prompt
from support.server_plugin import broken

from dsv4_sglang.cli.client import Server as Client
from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.full]

BLOCK = 128
MODEL = {"seed": 0, "ratios": (0, 4), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
FLAGS += ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
WORKERS = 2
SERVERS = {"one": (), "tp2": ("--tp-size", "2", "--tokenizer-worker-num", str(WORKERS))}
OPTIONS = {**FP32, "max_snapshots": 24, "pin_percent": 50, "integrity_check": True}
MOST_PINNED = 2048
PROMPT, HIT = 600, 4 * BLOCK


@pytest.fixture(scope="module")
def server(pages: Path, plugin: Path, server: Server, name: str) -> Server:
    """The server, which starts after its folder and its plugin are there, once all of its workers answer."""
    progress = Progress(server.process)
    while name != "one" and server.log_text().count("Start multi-tokenizer worker process") < WORKERS:
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    return server


@pytest.fixture(autouse=True)
def _sound(server: Server) -> Any:
    """After each test the cache is sound, with its pins, and without them after a flush."""
    server.flush()
    yield
    server.wait_idle()
    for _ in range(2):
        assert not [report["findings"] for report in Client.at(server.url).integrity() if report["wrong"]]
        server.flush()
    assert server.published()["pinned_tokens"] == 0


def pin(name: str = "agent", seconds: int = 600) -> dict[str, Any]:
    return kv_hints(pin={"name": name, "seconds": seconds})


def on_device(server: Server, ids: list[int]) -> int:
    (rank,) = server.post("/dsv4/lookup", {"input_ids": ids})["ranks"]
    return int(rank["device_tokens"])


def flood(server: Server, count: int = 10, seed: int = 100) -> None:
    """Serve more than the device holds."""
    for i in range(count):
        server.generate(prompt(PROMPT, seed=seed + i), 1)


def rejected(server: Server, ids: list[int], count: int = 1, **fields: Any) -> str:
    with pytest.raises(RequestError) as error:
        server.generate(ids, count, **fields)
    text = error.value.text
    assert error.value.code == 400 and "\\n" not in text
    return text


def test_a_pin_survives_a_flood(server: Server) -> None:
    """Before any conversation returns, the newest ones are evicted first: without the pin both of these would be."""
    flood(server, 5)
    pinned, other = prompt(PROMPT, seed=1), prompt(PROMPT, seed=2)
    server.generate(pinned, 1, kv_hints=pin())
    server.generate(other, 1)
    flood(server, seed=200)
    assert (on_device(server, pinned), on_device(server, other)) == (HIT, 0)
    metrics = server.published()
    assert (metrics["pinned_tokens"], metrics["pin_capacity_tokens"]) == (HIT, MOST_PINNED)
    server.generate(prompt(5), 1, kv_hints=pin(seconds=0))  # any request can release a pin
    assert server.published()["pinned_tokens"] == 0
    server.generate_all([prompt(1000, seed=300 + i) for i in range(4)], 1)  # they need the whole device
    assert on_device(server, pinned) == 0


def test_a_pin_above_the_limit_is_an_error(server: Server) -> None:
    for i in range(3):
        server.generate(prompt(PROMPT, seed=i), 1, kv_hints=pin(str(i)))
    ids = prompt(PROMPT, seed=7)
    said = rejected(server, ids, kv_hints=pin("more"))
    assert "'more' asks for 640 tokens" in said and "may hold 2048 tokens" in said and "1536 are used" in said
    assert server.published()["pinned_tokens"] == 3 * HIT
    assert on_device(server, ids) == 0, "nothing of it was computed"
    # The longest answer counts. A pin of the same name is replaced, and another tenant has the same limit.
    assert "asks for 896 tokens" in rejected(server, prompt(500), 300, kv_hints=pin("more"))
    assert rejected(server, ids, kv_hints=pin("0"), cache_salt="tenant")
    server.generate(ids, 1, kv_hints=pin("0"))
    metrics = server.published()
    assert metrics["pinned_tokens"] == 3 * HIT and metrics["hints_pin"] >= 4


@only("one")
def test_a_stream_is_rejected_too(server: Server) -> None:
    body = {**greedy(prompt(900), 100), "kv_hints": pin(), "stream": True}
    for name in "ab":
        server.generate(prompt(900, seed=5), 1, kv_hints=pin(name))
    with server.send("/generate", body) as response:
        text = response.read().decode()
    assert "kv_hints: the pin 'agent' asks for" in text


@only("one")
def test_a_request_of_the_context_length_beside_pins(start: Callable[..., AbstractContextManager[Server]]) -> None:
    """SGLang admits a request only if the pool has room for two blocks more than it needs."""
    with start("--max-total-tokens", str(1024 + 6 * BLOCK), pin_percent=90) as server:
        assert rejected(server, prompt(5 * BLOCK - 1), kv_hints=pin())
        server.generate(prompt(4 * BLOCK - 1), 1, kv_hints=pin())
        assert len(server.generate(prompt(1000, seed=1), 20).tokens) == 20


@only("one")
def test_a_running_request_reserves_its_pin(server: Server) -> None:
    """The limit counts what a running request may still pin, and an abort gives that back."""
    rids = ("to-abort", "to-abort-as-well")
    rests = [server.begin(prompt(200 + i), 800, 2, kv_hints=pin(rid), rid=rid) for i, rid in enumerate(rids)]
    said = rejected(server, prompt(200, seed=3), kv_hints=pin("c"))
    assert "2048 are used" in said
    for rid in rids:
        server.post("/abort_request", {"rid": rid})
    assert all(len(rest().tokens) < 800 for rest in rests)
    server.wait_idle()
    assert server.published()["pinned_tokens"] == 0, "an aborted request pins nothing"
    server.generate(prompt(200, seed=3), 1, kv_hints=pin("c"))
    assert server.published()["pinned_tokens"] == BLOCK


def test_a_pin_ends_with_its_time(server: Server) -> None:
    server.generate(prompt(PROMPT), 1, kv_hints=pin(seconds=1))
    progress = Progress(server.process)
    while server.published()["pinned_tokens"]:
        progress.check()
        time.sleep(POLL_SECONDS / 10)


def test_sleep_and_new_weights_drop_pins(server: Server, model: Path) -> None:
    ids = prompt(PROMPT)
    server.generate(ids, 1, kv_hints=pin())
    empty_device(server)
    assert server.published()["pinned_tokens"] == 0
    server.generate(ids, 1, kv_hints=pin())
    assert server.published()["pinned_tokens"] == HIT
    server.post("/update_weights_from_disk", {"model_path": str(model)})
    assert server.published()["pinned_tokens"] == 0 and on_device(server, ids) == 0


def test_openai_routes_carry_hints_in_custom_params(server: Server) -> None:
    body = {"model": "m", "prompt": prompt(PROMPT), "max_tokens": 1, "custom_params": {"kv_hints": pin()}}
    server.post("/v1/completions", body)
    assert server.published()["pinned_tokens"] == HIT
    body["custom_params"] = {"kv_hints": kv_hints(pin={"name": "agent"})}
    with pytest.raises(RequestError) as error:
        server.post("/v1/completions", body)
    assert error.value.code == 400 and "missing required field `seconds`" in error.value.text


def test_hints_must_prove_themselves(server: Server) -> None:
    """Retained conversations that return are trusted after some time, and those of another tenant are not."""
    ids, before = prompt(200), server.published()
    for _ in range(20):
        server.generate(ids, 1, kv_hints=kv_hints(retain={"seconds": 60}), cache_salt="returns")
        ids = [*ids, *prompt(5, seed=len(ids))]
    server.generate(ids, 1, kv_hints=kv_hints(retain={"seconds": 60}), cache_salt="other")
    after = server.published()
    effects = {name: after[f"hints_{name}"] - before[f"hints_{name}"] for name in ("retain", "untrusted")}
    assert effects == {"retain": 4, "untrusted": 17}


@only("one")
@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        ({"actions": []}, "Malformed kv_hints envelope"),
        (kv_hints(retain={"seconds": "x"}), "Expected `int`, got `str`"),
        (kv_hints(pin={"name": "a", "seconds": 5, "more": 1}), "unknown field `more`"),
        (kv_hints(retain={"seconds": 5}, demote={}), "expected one pin, and one of retain and demote"),
    ],
)
def test_wrong_hints_are_rejected(server: Server, envelope: dict[str, Any], message: str) -> None:
    assert message in json.loads(rejected(server, prompt(5), kv_hints=envelope))["error"]["message"]


def test_several_answers_share_their_hints(server: Server) -> None:
    body = greedy(prompt(PROMPT), 140, kv_hints=pin())
    body["sampling_params"]["n"] = 2
    assert len(server.post("/generate", body)) == 2
    assert server.published()["pinned_tokens"] == 5 * BLOCK, "the end of the last answer"


# Prefetch


def prefetch(server: Server, ids: list[int], **fields: Any) -> dict[str, int]:
    answer: dict[str, int] = server.post("/dsv4/prefetch", {"input_ids": ids, **fields})
    return answer


def test_a_prefetch_loads_from_the_host_and_from_files(server: Server, pages: Path) -> None:
    ids, before = prompt(PROMPT, seed=400), set(pages.glob("*.bin"))
    nothing = {"prompt_tokens": PROMPT, "dp_rank": 0, "device_tokens": 0, "loaded_tokens": 0}
    assert prefetch(server, ids) == nothing
    server.generate(ids, 1)
    here = nothing | {"device_tokens": HIT}
    assert prefetch(server, ids) == here
    progress = Progress(server.process)
    while len(set(pages.glob("*.bin")) - before) < HIT // BLOCK + 1:
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    for empty in (empty_device, Server.flush):
        empty(server)
        assert on_device(server, ids) == 0
        assert prefetch(server, ids, cache_salt="tenant") == nothing
        assert prefetch(server, ids, routed_dp_rank=0) == here | {"loaded_tokens": HIT}
        assert on_device(server, ids) == HIT
        assert server.generate(ids, 1).cached == HIT
        server.wait_idle()


def test_a_prefetch_spares_pins(server: Server) -> None:
    pinned = [prompt(PROMPT, seed=i) for i in range(3)]
    others = [prompt(PROMPT, seed=10 + i) for i in range(6)]
    for ids in others:
        server.generate(ids, 1)
    for i, ids in enumerate(pinned):
        server.generate(ids, 1, kv_hints=pin(str(i)))
    for ids in others:
        assert prefetch(server, ids)["device_tokens"] == HIT
    assert [on_device(server, ids) for ids in pinned] == [HIT] * 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "expected either text or input_ids"),
        ({"input_ids": []}, "the prompt has 0 tokens"),
        ({"input_ids": [5], "routed_dp_rank": 1}, "routed_dp_rank is 1; expected one of 0"),
        ({"input_ids": [5], "files": True}, "unknown field `files`"),
    ],
)
def test_a_wrong_prefetch_gets_one_line(server: Server, body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        server.post("/dsv4/prefetch", body)
    said = json.loads(error.value.text)["message"]
    assert error.value.code == 400 and message in said and said.startswith("/dsv4/prefetch: ") and "\n" not in said


# Flush


def flush(server: Server) -> int:
    """Return the HTTP status of one flush."""
    try:
        server.post("/flush_cache")
    except RequestError as error:
        return error.code
    return 200


def test_a_flush_waits_for_stored_pages(server: Server, plugin: Path) -> None:
    """The client of the last answer sees an idle server, whose storage still writes."""
    ids = prompt(PROMPT, seed=500)
    with broken(plugin, "a storage writes slowly"):
        server.generate(ids, 1)
        assert flush(server) == 200
    assert on_device(server, ids) == 0
    assert prefetch(server, ids)["loaded_tokens"] == HIT, "the pages were written"


def test_a_flush_is_rejected_while_requests_run(server: Server) -> None:
    server.generate(ids := prompt(PROMPT, seed=501), 1)
    rest = server.begin(prompt(20), 200, 2)
    assert flush(server) == 400 and on_device(server, ids) == HIT
    assert len(rest().tokens) == 200
    assert flush(server) == 200 and on_device(server, ids) == 0


def test_a_flush_of_paused_requests(server: Server, plugin: Path) -> None:
    """Requests that were retracted hold nothing, and their prefixes are being stored."""
    with broken(plugin, "a storage writes slowly"):
        rest = server.begin(prompt(PROMPT, seed=502), 100, 20)
        server.post("/pause_generation", {"mode": "retract"})
        try:
            assert flush(server) == 200
        finally:
            server.post("/continue_generation", {})
    assert len(rest().tokens) == 100


@only("one")
def test_a_storage_that_hangs_does_not_stop_the_server(server: Server, plugin: Path) -> None:
    with broken(plugin, "a storage hangs"):
        server.generate(prompt(PROMPT, seed=503), 1)
        assert flush(server) == 400
        server.generate(prompt(20), 2)
    assert flush(server) == 200
