"""Short prefill steps on a CPU server, executed like graphs (recorded_prefills.py), compared with the oracle in
fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faulty_cache import HOST_FAULTS, LATE, LATE_FAULTS, broken
from recorded_prefills import FAULTS
from server_harness import (
    ATTEMPTS,
    HOST_CACHE,
    Server,
    assert_oracle_chooses,
    assert_right_though_retracted,
    assert_same,
    distances,
    prompt,
)

from benchmarks.reference.oracle import Oracle

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("fault", "recorded_steps")]

TOLERANCE = 1e-4
RECORDED_TOKENS = 256
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "1024", "--enable-metrics")
FLAGS += ("--max-running-requests", "8", "--chunked-prefill-size", "256", "--schedule-conservativeness", "0.1")
FLAGS += HOST_CACHE
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32"}


def sizes(steps: Path) -> list[tuple[int, int, int]]:
    """Return (size, tokens, requests) of all steps so far."""
    return [tuple(map(int, line.split())) for line in steps.read_text().splitlines()]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 127, 128, 129, 200, 256])
def test_new_tokens_behind_a_hit(server: Server, oracle: Oracle, recorded_steps: Path, new: int) -> None:
    ids = prompt(300, seed=1)
    server.generate(ids, 1)
    longer = ids[:256] + prompt(new, seed=2)
    got = server.generate(longer, 12)
    assert got.cached == 256
    size, tokens, requests = sizes(recorded_steps)[-1]
    assert tokens == new and requests == 1 and size >= new
    assert_oracle_chooses(oracle, longer, got, TOLERANCE)
    again = server.generate(longer, 12)
    assert again.cached == (len(longer) - 1) // 128 * 128, "a snapshot inside the step"
    assert_same(again, got, TOLERANCE)


def test_hits_and_misses_in_a_batch(server: Server, oracle: Oracle, recorded_steps: Path) -> None:
    """Answers are right in a batch of hits and misses, with short last chunks and eager steps."""
    trunk = prompt(520, seed=3)
    asked = [trunk[:at] + prompt(n, seed=at) for at, n in ((130, 3), (256, 20), (384, 1))] + [prompt(40), prompt(7)]
    for _ in range(ATTEMPTS):
        server.flush()
        server.generate(trunk, 1)
        before = len(sizes(recorded_steps))
        for ids, got in zip(asked, server.generate_all(asked, 8)):
            assert_oracle_chooses(oracle, ids, got, TOLERANCE)
        if any(requests > 1 for *_, requests in sizes(recorded_steps)[before:]):
            return
    pytest.fail("no step had several requests: the test does not test")


def test_more_requests_than_fit(server: Server, oracle: Oracle) -> None:
    """A retracted request resumes with a short prefill step and is right."""
    server.flush()
    assert_right_though_retracted(server, oracle, TOLERANCE)


def test_log_probabilities_of_the_prompt(server: Server, oracle: Oracle) -> None:
    ids = prompt(150, seed=5)
    got = server.score(ids[:90], ids[90:])
    assert (torch.tensor(got.logprobs) - oracle.score(ids[:90], ids[90:], chunk=128).logprobs).abs().max() <= TOLERANCE


def test_hits_from_the_host(server: Server, oracle: Oracle, fault: Path) -> None:
    """A graph step waits for all layers of a load; faults that skip the wait or load wrong entries change the
    answer."""
    prompts = [prompt(400, seed=20 + i) for i in range(5)]  # the device holds 1,024 tokens
    for kind in (LATE, LATE_FAULTS[1], HOST_FAULTS[1]):
        server.flush()
        for ids in prompts:
            server.generate(ids, 1)
        before = server.metrics()["hit_tokens_host"]
        with broken(fault, kind):
            found = [(ids, server.generate(ids, 4)) for ids in prompts]
        assert all(got.cached == 384 for _, got in found)
        assert server.metrics()["hit_tokens_host"] > before
        worst = max(distances(oracle, ids, got).max() for ids, got in found)
        assert worst <= TOLERANCE if kind == LATE else worst > 100 * TOLERANCE, kind


@pytest.mark.parametrize("kind", FAULTS)
def test_a_broken_step_shows(server: Server, oracle: Oracle, fault: Path, kind: str) -> None:
    server.flush()
    ids = prompt(300, seed=12)
    server.generate(ids, 1)
    longer = ids + prompt(20, seed=13)
    with broken(fault, kind):
        got = server.generate(longer, 12)
    assert distances(oracle, longer, got).max() > 100 * TOLERANCE
    server.flush()
    assert distances(oracle, longer, server.generate(longer, 12)).max() <= TOLERANCE
