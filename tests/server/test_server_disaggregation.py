"""Prefill and decode server with Mooncake over TCP, compared with transformers in fp32.

Mooncake is no dependency. Tests are skipped if its wheel or the libraries that it links are missing.
test_server_disaggregation_gpu.py uses NIXL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from reference.oracle import Oracle
from support.disaggregation import Disaggregated, a_pair, by, long_timeouts, needs
from support.faulty_cache import HOLDING
from support.liveness import Progress
from support.server import (
    DRAFTS,
    FP32,
    Server,
    assert_oracle_chooses,
    distances,
    greedy,
    prompt,
    running,
)
from support.server_plugin import broken

from benchmarks import ports
from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.full]

MODEL = {"ratios": (0, 4, 128), "index_topk": 64}
OPTIONS = FP32
FLAGS = ("--dtype", "float32", "--context-length", "768", "--max-running-requests", "4")
FLAGS += ("--chunked-prefill-size", "256", *by("mooncake_tcp"))
# Decode server: nine blocks, one of which is reserved for tokens that a request still generates.
FULL = ("--max-total-tokens", "1152", "--num-reserved-decode-tokens", "128")
HOST = ("--max-total-tokens", "1536", "--enable-hierarchical-cache", "--hicache-ratio", "4", "--enable-metrics")
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 500)
GENERATED = 12
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def waiting(plugin: Path) -> Iterator[None]:
    needs("mooncake_tcp")
    with long_timeouts():
        yield


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disaggregated]:
    folder = tmp_path_factory.mktemp("apart")
    with a_pair(model, folder, FLAGS, ("--max-total-tokens", "4096"), FULL, **OPTIONS) as servers:
        yield servers


def assert_right(servers: Disaggregated, oracle: Oracle, ids: list[int]) -> None:
    assert distances(oracle, ids, servers.generate(ids, GENERATED)).max() <= TOLERANCE


def test_a_batch(servers: Disaggregated, oracle: Oracle) -> None:
    """A batch that exceeds the decode server is right, for lengths on and off multiples of 4 and 128."""
    prompts = [prompt(length) for length in LENGTHS]
    for ids, got in zip(prompts, servers.generate_all(prompts, GENERATED)):
        assert len(got.tokens) == GENERATED
        assert_oracle_chooses(oracle, ids, got, TOLERANCE)
    servers.wait_idle()


def test_a_prefix_hit(servers: Disaggregated, oracle: Oracle) -> None:
    """On a prefix hit the prefill server resumes from a snapshot and also transfers the cached part."""
    ids = prompt(450, seed=3)
    servers.generate(ids, 1)
    got = servers.generate(ids, GENERATED)
    assert len(got.tokens) == GENERATED and got.cached == 384
    assert_oracle_chooses(oracle, ids, got, TOLERANCE)


@pytest.mark.parametrize("kind", ["the last block stays behind", "the slot stays behind"])
def test_missing_transfers_are_detected(servers: Disaggregated, oracle: Oracle, plugin: Path, kind: str) -> None:
    ids = prompt(330, seed=4)
    with broken(plugin, kind):
        wrong = servers.generate(ids, GENERATED)
    assert distances(oracle, ids, wrong).max() > 100 * TOLERANCE
    assert_right(servers, oracle, ids)


def assert_right_though_full(servers: Disaggregated, oracle: Oracle) -> None:
    """Assert that answers are right although the decode server retracts a request.

    Two requests need twelve blocks of nine. The second is retracted; its state waits on the host until the first has
    ended. The pair is repeated if the second request came too late to be retracted.
    """
    before, attempts, number = servers.retractions(), count(10, 2), 600
    while servers.retractions() == before:
        seed = next(attempts)
        assert seed < 20, "no request was retracted, so the test checks nothing"
        prompts = [prompt(100, seed=seed + i) for i in range(2)]
        answers = [servers.begin(ids, number, 1) for ids in prompts]
        for ids, answer in zip(prompts, answers):
            got = answer()
            assert len(got.tokens) == number
            assert distances(oracle, ids, got).max() <= TOLERANCE
    servers.wait_idle()


def test_a_decode_server_that_is_full(servers: Disaggregated, oracle: Oracle) -> None:
    assert_right_though_full(servers, oracle)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_before_the_other_side_comes(servers: Disaggregated, oracle: Oracle, side: str) -> None:
    """A request that only one of the servers receives leaves nothing behind when it is aborted."""
    server: Server = getattr(servers, side)
    body = {"input_ids": prompt(300, seed=7), "rid": side, "sampling_params": {"max_new_tokens": 8}, **servers.room()}
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[Any] = pool.submit(server.post, "/generate", body)
        progress = Progress(server.process)
        while not waiting.done():  # no response tells when the request has arrived
            server.post("/abort_request", {"rid": side})
            progress.check()
            time.sleep(0.1)
        with pytest.raises(RequestError) as rejected:
            waiting.result()
    assert rejected.value.code == 500
    servers.wait_idle()
    assert_right(servers, oracle, prompt(130, seed=8))


def test_the_prefill_server_is_killed(
    servers: Disaggregated, oracle: Oracle, model: Path, plugin: Path, tmp_path: Path
) -> None:
    """If the prefill server is killed before it has sent the last chunk, the decode server frees the request and works
    with the next one."""
    ids = prompt(500, seed=41)
    with ports.reserved() as bootstrap:
        flags = (*FLAGS, "--max-total-tokens", "4096", "--disaggregation-mode", "prefill")
        flags += ("--disaggregation-bootstrap-port", str(bootstrap))
        with running(model, tmp_path / "killed", *flags, **OPTIONS) as prefill, ThreadPoolExecutor(1) as pool:
            pair = Disaggregated(prefill, servers.decode, bootstrap)
            pair.rooms = servers.rooms
            with broken(plugin, "the end of a prompt is held"):
                answer = pool.submit(pair.generate, ids, 8)
                progress = Progress(prefill.process)
                while (plugin / "fault").read_text() != HOLDING:
                    progress.check()
                    time.sleep(0.05)
                prefill.kill()
            with pytest.raises(RequestError) as rejected:
                answer.result()
            assert rejected.value.code == 500 and "Lost connection with prefill" in rejected.value.text
            servers.decode.wait_idle()
        with running(model, tmp_path / "next", *flags, **OPTIONS) as prefill:
            pair = Disaggregated(prefill, servers.decode, bootstrap)
            pair.rooms = servers.rooms
            assert_right(pair, oracle, ids)
            pair.wait_idle()
    assert_right(servers, oracle, ids)


def assert_cold_and_hits(pair: Disaggregated, oracle: Oracle, seed: int) -> None:
    """Assert that three prompts get the oracle's answers, at once and then after prefix hits."""
    prompts = [prompt(length, seed=seed) for length in (5, 128, 450)]
    for found in (pair.generate_all(prompts, GENERATED), [pair.generate(ids, GENERATED) for ids in prompts]):
        for ids, got in zip(prompts, found):
            assert len(got.tokens) == GENERATED
            assert_oracle_chooses(oracle, ids, got, TOLERANCE)
    assert found[-1].cached == 384


def test_two_processes_each(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """With TP 2, process i of one server sends to process i of the other."""
    flags = (*FLAGS, "--tp-size", "2", "--max-total-tokens", "4096")
    with a_pair(model, tmp_path, flags, **OPTIONS) as pair:
        assert_cold_and_hits(pair, oracle, seed=43)
        pair.wait_idle()


@pytest.mark.parametrize("sizes", [("2", "1"), ("1", "2")], ids=["two to one", "one to two"])
def test_other_numbers_of_processes(
    model: Path, oracle: Oracle, plugin: Path, tmp_path: Path, sizes: tuple[str, str]
) -> None:
    """The TP sizes of the servers may differ. One process of the prefill server sends to each process of the decode
    server. A slot that stays behind shows, so the state is transferred too."""
    prefill, decode = (("--tp-size", size) for size in sizes)
    with a_pair(model, tmp_path, (*FLAGS, "--max-total-tokens", "4096"), prefill, decode, **OPTIONS) as pair:
        assert_cold_and_hits(pair, oracle, seed=44)
        with broken(plugin, "the slot stays behind"):
            wrong = pair.generate(prompt(330, seed=45), GENERATED)
        assert distances(oracle, prompt(330, seed=45), wrong).max() > 100 * TOLERANCE
        pair.wait_idle()


@pytest.fixture(scope="module")
def speculating(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disaggregated]:
    model, flags = tiny(**MODEL, nextn=True), (*FLAGS, *DRAFTS)
    with a_pair(model, tmp_path_factory.mktemp("speculating"), flags, HOST, FULL, **OPTIONS) as servers:
        yield servers


def test_drafts_and_the_host_cache(speculating: Disaggregated, tiny: Callable[..., Path]) -> None:
    """The draft model's window ring is transferred, and the prefill server also sends prompts loaded from its host
    cache."""
    oracle = Oracle(tiny(**MODEL, nextn=True))
    prompts = [prompt(450, seed=20 + i) for i in range(5)]
    for visit in range(2):
        for ids in prompts:
            got = speculating.generate(ids, GENERATED)
            assert len(got.tokens) == GENERATED and got.cached == (384 if visit else 0), visit
            assert_oracle_chooses(oracle, ids, got, TOLERANCE)
    assert speculating.prefill.metrics()["hit_tokens_host"] > 0, "no tokens came from the host"


def test_drafts_on_a_full_decode_server(speculating: Disaggregated, tiny: Callable[..., Path]) -> None:
    """Drafts are accepted after a transferred prompt, also on a decode server that retracts requests."""
    meta = speculating.post("/generate", greedy(prompt(200, seed=30), 40))["meta_info"]
    assert meta["spec_accept_length"] > 1.5
    assert_right_though_full(speculating, Oracle(tiny(**MODEL, nextn=True)))
