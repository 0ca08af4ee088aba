"""EAGLE with the checkpoint's own NextN layer, through HTTP, in fp32; the tests of `test_speculation.py` go further."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_harness import (
    DRAFTS,
    HOST_TIER,
    Server,
    assert_oracle_chooses,
    live,
    needs_host_tier,
    prompt,
    running,
    with_integrity_check,
)

from dsv4_sglang.srt import compat
from dsv4_sglang.srt.decisions import GREEDY_ON_CPU
from dsv4_sglang.testing.oracle import Oracle

pytestmark = pytest.mark.server

MODEL = {"ratios": (0, 4, 128), "index_topk": 64, "nextn": True}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "2048", "--max-running-requests", "4")
FLAGS += (*DRAFTS, "--chunked-prefill-size", "128", "--enable-metrics", *HOST_TIER)
LENGTHS, GENERATED = (1, 127, 300), 40
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle(tiny: Callable[..., Path]) -> Oracle:
    return Oracle(tiny(**MODEL))


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("speculation") / "log"
    options = {"entry_format": "fp32", "indexer_format": "fp32", "integrity_check": compat.SERVES_INTEGRITY_CHECK}
    with running(tiny(**MODEL), log, *FLAGS, **options) as server:
        yield server


def test_oracle(server: Server, oracle: Oracle) -> None:
    """A batch of prompts of several lengths: tokens, and their log p."""
    prompts = [prompt(length) for length in LENGTHS]
    for ids, got in zip(prompts, server.generate_all(prompts, GENERATED)):
        assert len(got.tokens) == GENERATED and got.cached == 0
        assert_oracle_chooses(oracle, ids, got, TOLERANCE)


def test_drafts_are_accepted(server: Server) -> None:
    meta = ask(server, prompt(200))["meta_info"]
    assert meta["completion_tokens"] == GENERATED
    assert 1.5 < meta["spec_accept_length"] <= 4


def test_the_next_turn(server: Server, oracle: Oracle) -> None:
    """It resumes from a checkpoint that a verify step wrote."""
    ids = prompt(230, seed=3)
    turn = server.generate(ids, GENERATED)
    following = ids + turn.tokens + prompt(20, seed=4)
    got = server.generate(following, 8)
    assert got.cached == 256
    assert_oracle_chooses(oracle, following, got, TOLERANCE)


def ask(server: Server, ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": GENERATED, "temperature": 0, "ignore_eos": True}
    return server.post("/generate", {"input_ids": ids, "sampling_params": sampling})


@needs_host_tier
def test_drafts_behind_a_load_from_the_host(server: Server) -> None:
    """Eight conversations of three blocks in a device of sixteen: the second visit has the answers of the first, in as
    many turns, since a checkpoint has the draft model's window, too."""
    prompts = [prompt(390, seed=20 + i) for i in range(8)]
    server.flush()
    before = server.metrics()["host_hit_tokens_host"]
    cold, warm = ([ask(server, ids) for ids in prompts] for _ in range(2))
    assert [got["meta_info"]["cached_tokens"] for got in (*cold, *warm)] == [0] * 8 + [384] * 8
    assert server.metrics()["host_hit_tokens_host"] - before >= 3 * 384, "little came from the host"
    assert [got["output_ids"] for got in warm] == [got["output_ids"] for got in cold]
    turns, cold_turns = ([got["meta_info"]["spec_verify_ct"] for got in visit] for visit in (warm, cold))
    assert turns == cold_turns
    server.wait_idle()


def test_abort(server: Server, oracle: Oracle) -> None:
    with ThreadPoolExecutor(1) as other:
        aborted = other.submit(server.generate, prompt(128, seed=5), 800, rid="to-abort")
        while not aborted.done() and not server.busy():
            time.sleep(0.05)
        server.post("/abort_request", {"rid": "to-abort"})
        assert len(aborted.result().tokens) < 800
    server.wait_idle()
    ids = prompt(128, seed=5)
    got = server.generate(ids, 8)
    assert_oracle_chooses(oracle, ids, got, TOLERANCE)


@with_integrity_check
def test_lifecycles(server: Server) -> None:
    """Of EAGLE with a host tier."""
    live(server)


def test_the_server_says_that_a_cpu_answers_greedily(server: Server) -> None:
    assert server.log_text().count(GREEDY_ON_CPU % "EAGLE") == 1
