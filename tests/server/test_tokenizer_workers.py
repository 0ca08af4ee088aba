"""`--tokenizer-worker-num`: every tokenizer worker validates requests, and all exit with the scheduler.

The server has no prefix cache, and its model has as many heads as the released one. Other servers use 8.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from reference.oracle import Oracle
from support.liveness import Progress
from support.server import FP32, Server, assert_oracle_chooses, ends, prompt, schedulers
from support.server_forkserver import NEW_WORKERS

from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.full]

VOCABULARY, WORKERS = 384, 2
MODEL = {"seed": 0, "ratios": (0, 4), "heads": 64}
FLAGS = ("--dtype", "float32", "--context-length", "512", "--max-running-requests", "4", "--max-total-tokens", "2048")
FLAGS += ("--chunked-prefill-size", "256", "--tokenizer-worker-num", str(WORKERS), "--disable-radix-cache")
OPTIONS = {**FP32, "integrity_check": True}
# Disable SGLang's 5 s pause for diagnostics before exit. The workers load the plugin by themselves.
ENVIRONMENT = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", NEW_WORKERS: "1"}
# Requests of each kind. A connection may reach either worker.
REQUESTS = 16
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "a token of no vocabulary": ({"input_ids": [VOCABULARY]}, f"input_ids is {VOCABULARY}; expected "),
    "a list for a name space": ({"input_ids": [5], "extra_key": ["a"]}, "extra_key"),
    "more answers than memory": ({"input_ids": [5], "sampling_params": {"n": 1 << 40}}, "n is 1099511627776; expected"),
}


@pytest.fixture(scope="module")
def server(server: Server) -> Server:
    """Server whose workers have all started; the first one answers earlier."""
    progress = Progress(server.process)
    while server.log_text().count("Start multi-tokenizer worker process") < WORKERS:
        progress.check()
        time.sleep(0.1)
    return server


def test_each_worker_validates(server: Server) -> None:
    for body, message in INVALID.values():
        for _ in range(REQUESTS):
            with pytest.raises(RequestError) as error:
                server.post("/generate", body)
            assert error.value.code == 400
            assert message in json.loads(error.value.text)["error"]["message"]


def test_a_lookup_needs_a_prefix_cache(server: Server) -> None:
    for _ in range(REQUESTS):
        with pytest.raises(RequestError) as error:
            server.post("/dsv4/lookup", {"input_ids": [5]})
        assert error.value.code == 400 and "--disable-radix-cache" in json.loads(error.value.text)["message"]


def test_without_a_prefix_cache(server: Server, oracle: Oracle) -> None:
    """The same prompt gives bitwise equal answers."""
    ids = prompt(300)
    got = server.generate(ids, 8)
    assert_oracle_chooses(oracle, ids, got, 1e-4)
    assert got.cached == 0 and server.generate(ids, 8) == got
    server.wait_idle()


def test_ended_scheduler_ends_all_workers(server: Server) -> None:
    """If the scheduler is killed, all workers exit; SGLang's supervisor of the workers would ignore the signal."""
    with ends(server) as processes:
        (scheduler,) = schedulers(processes)
        scheduler.kill()
