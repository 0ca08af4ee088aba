"""fp32 rows and keys, a selection that leaves entries out, chunks of 128, a pool so small that requests retract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from server_harness import Server, distances, prompt, running

from dsv4_sglang.testing.oracle import Oracle

pytestmark = pytest.mark.server

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700)
GENERATED = 40


TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle(tiny: Callable[..., Path]) -> Oracle:
    return Oracle(tiny(seed=0, index_topk=64))


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("exact") / "log"
    flags = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "1024")
    flags += ("--max-running-requests", "8", "--chunked-prefill-size", "128", "--disable-overlap-schedule")
    model = tiny(seed=0, index_topk=64)
    with running(model, log, *flags, entry_format="fp32", indexer_format="fp32") as server:
        yield server


@pytest.mark.parametrize("length", LENGTHS)
def test_oracle(server: Server, oracle: Oracle, length: int) -> None:
    ids = prompt(length)
    got = server.generate(ids, GENERATED)
    assert len(got.tokens) == GENERATED
    score = oracle.score(ids, got.tokens)
    assert (torch.tensor(got.logprobs) - score.logprobs).abs().max() <= TOLERANCE
    assert score.margin.max() <= TOLERANCE, "not the oracle's likeliest token"


def test_more_requests_than_fit(server: Server, oracle: Oracle) -> None:
    """Five requests of two or three blocks in a pool of eight: some are retracted, all finish, all are right."""
    prompts = [prompt(150 + 12 * i, seed=7) for i in range(5)]
    for ids, got in zip(prompts, server.generate_all(prompts, 70)):
        assert distances(oracle, ids, got).max() <= TOLERANCE
    assert "retract" in server.log_text().lower(), "nothing was retracted: the test does not test"
    server.wait_idle()


def test_warm_after_retraction(server: Server, oracle: Oracle) -> None:
    ids = prompt(700)
    server.generate(ids, 1)
    got = server.generate(ids, 8)
    assert got.cached >= 512
    assert distances(oracle, ids, got).max() <= TOLERANCE
