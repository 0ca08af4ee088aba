"""What a server does with requests that make no sense, and when one of its processes ends."""

from __future__ import annotations

import http.client
import json
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from progress import wait
from server_harness import Server, prompt, running

pytestmark = pytest.mark.server

CONTEXT, VOCABULARY = 1024, 384
FLAGS = ("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "max_checkpoints": 12}


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its last test ends it."""
    log, started = tmp_path_factory.mktemp("faults") / "log", None
    try:
        with running(tiny(seed=0, ratios=(0, 4, 128), index_topk=1536), log, *FLAGS, **OPTIONS) as started:
            yield started
    except AssertionError:
        if started is None or started.process.poll() is None:
            raise


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "temperature": 0}, **fields}


def sampled(**parameters: Any) -> dict[str, Any]:
    return body(sampling_params={"max_new_tokens": 2, "temperature": 0, **parameters})


NONSENSE: dict[str, Any] = {
    "no tokens": body(input_ids=[]),
    "no prompt": {"sampling_params": {}},
    "a list in a list": body(input_ids=[[[1]]]),
    "ids that are fractions": body(input_ids=[1.5]),
    "ids that are text": body(input_ids=["a"]),
    "an id of 70 bits": body(input_ids=[1 << 70]),
    "as long as the context": body(input_ids=[5] * CONTEXT),
    "a million tokens": body(input_ids=[5] * 1_000_000),
    "a negative temperature": sampled(temperature=-1),
    "a temperature in words": sampled(temperature="hot"),
    "a share above one": sampled(top_p=2),
    "a number below its least": sampled(top_k=-5),
    "less than no tokens": sampled(max_new_tokens=-1),
    "tokens in words": sampled(max_new_tokens="ten"),
    "more at least than at most": sampled(min_new_tokens=9),
    "a parameter that is not there": sampled(no_such_thing=1),
    "a grammar that is none": sampled(regex="("),
    "two grammars": sampled(regex="a", json_schema="{}"),
    "a place behind the prompt": body(return_logprob=True, logprob_start_len=999),
    "parameters in words": body(sampling_params="x"),
    "an image": body(image_data=1),
    "a body that is a list": [1, 2],
    "a body that is text": "x",
}
"""Requests that are refused."""
ODD: dict[str, Any] = {
    "many new tokens": sampled(max_new_tokens=1 << 40, stop_token_ids=list(range(VOCABULARY))),
    "no new tokens": sampled(max_new_tokens=0),
    "stop tokens that are not there": sampled(stop_token_ids=[-1, 1 << 40]),
    "a bias of a token that is not there": sampled(logit_bias={"999999": 1.0}),
    "more likeliest tokens than there are": body(return_logprob=True, top_logprobs_num=100_000),
    "log p of a token that is not there": body(return_logprob=True, token_ids_logprob=[1 << 20]),
    "a name space that is a number": body(extra_key=5),
    "a session that is not there": body(session_params={"id": "nowhere"}),
    "a rank that is not there": body(routed_dp_rank=7),
    "a field that is not there": body(no_such_thing=1),
}
"""Requests that are refused or answered, as SGLang pleases."""
UNKNOWN_TOKENS = (-1, -VOCABULARY, VOCABULARY, 1 << 20, (1 << 63) - 1)


def status_of(server: Server, asked: Any) -> tuple[int, str]:
    try:
        return 200, json.dumps(server.post("/generate", asked))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def assert_well(server: Server) -> None:
    """It answers the next request, and holds nothing of others."""
    assert len(server.generate(prompt(140), 2).tokens) == 2


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_refused(server: Server, what: str) -> None:
    status, text = status_of(server, NONSENSE[what])
    assert 400 <= status < 500 and len(text) > 10, (status, text[:500])
    assert_well(server)


@pytest.mark.parametrize("what", ODD)
def test_odd_requests_harm_nobody(server: Server, what: str) -> None:
    status, text = status_of(server, ODD[what])
    assert status == 200 or 400 <= status < 500, (status, text[:500])
    assert_well(server)


@pytest.mark.parametrize("token", UNKNOWN_TOKENS)
@pytest.mark.parametrize("before", [0, 300])
def test_tokens_that_the_model_has_not(server: Server, token: int, before: int) -> None:
    """SGLang would look them up in the embedding, and end."""
    status, text = status_of(server, body(input_ids=[*prompt(before), token, 5]))
    assert status == 400
    assert f"input_ids has {token}; expected token ids of the model, 0 to {VOCABULARY - 1}" in text
    assert_well(server)


def test_bytes_that_are_no_json(server: Server) -> None:
    for data in (b"", b"{", b"\xff" * 100, b"[" * 100_000):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/generate", data, {"Content-Type": "application/json"})
        assert 400 <= connection.getresponse().status < 500
        connection.close()
    assert_well(server)


def test_nothing_is_left_of_them(server: Server) -> None:
    """SGLang checks its pools for leaks when it turns idle, and dies of one."""
    server.wait_idle()
    server.flush()
    server.wait_idle()


def test_a_process_that_ends_takes_the_server_along(server: Server) -> None:
    """A request that runs ends with an error, and so does the server, for whoever starts it again."""
    answer = server.begin(prompt(30), 900, 2)
    schedulers = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if any("scheduler" in word for word in child.cmdline())
    ]
    assert len(schedulers) == 1
    schedulers[0].kill()
    with pytest.raises((http.client.HTTPException, OSError, KeyError, IndexError)):
        answer()
    assert wait(server.process, server.log) != 0
    with pytest.raises(OSError):
        server.get("/server_info")
