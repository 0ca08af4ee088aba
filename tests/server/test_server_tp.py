"""Two processes that share the heads and the experts; each holds the whole cache, since KV has one head, and both must
take the same decisions about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_harness import (
    Server,
    assert_oracle_chooses,
    assert_right_though_retracted,
    assert_same,
    one_core_each,
    prompt,
    running,
)

from dsv4_sglang.testing.oracle import Oracle

pytestmark = pytest.mark.server

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle(tiny: Callable[..., Path]) -> Oracle:
    return Oracle(tiny(seed=0, ratios=(0, 4, 128)))


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Eight blocks, and little of them kept free for what running requests may still generate."""
    flags = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "1024", "--tp-size", "2")
    flags += ("--max-running-requests", "6", "--schedule-conservativeness", "0.1", "--enable-metrics")
    options = {"entry_format": "fp32", "indexer_format": "fp32", "max_checkpoints": 12}
    log = tmp_path_factory.mktemp("tp") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", one_core_each(2))
        with running(tiny(seed=0, ratios=(0, 4, 128)), log, *flags, **options) as server:
            yield server


@pytest.mark.parametrize("length", [1, 700])
def test_oracle(server: Server, oracle: Oracle, length: int) -> None:
    ids = prompt(length)
    got = server.generate(ids, 20)
    assert_oracle_chooses(oracle, ids, got, TOLERANCE)


def test_warm_is_cold(server: Server) -> None:
    """The same prompt again, its next turn from a checkpoint of decode, and a branch in the middle of a block."""
    ids = prompt(250, seed=1)
    first = server.cold(ids, 20)
    turn = [*ids, *first.tokens, *prompt(30, seed=2)]
    branch = [*ids[:200], *prompt(50, seed=3)]
    branched = server.cold(branch)
    expected = [(ids, 128, first), (turn, 256, server.cold(turn)), (branch, 128, branched)]
    server.flush()
    server.generate(ids, 20)
    for warm, cached, reference in expected:
        got = server.generate(warm)
        assert got.cached == cached
        assert_same(got, reference, TOLERANCE)


def test_more_than_fits(server: Server, oracle: Oracle) -> None:
    """Over what earlier requests left; no process leaks a block or a slot."""
    evicted = server.metrics()["prefix_checkpoints_evicted"]
    assert_right_though_retracted(server, oracle, TOLERANCE)
    assert server.metrics()["prefix_checkpoints_evicted"] > evicted


def test_the_first_process_counts(server: Server) -> None:
    ids = prompt(200, seed=5)
    server.flush()
    server.generate(ids, 1)
    before = server.metrics()["prefix_hit_tokens"]
    server.generate(ids, 1)
    assert server.metrics()["prefix_hit_tokens"] - before == 128
    assert "TP1] prefix cache" not in server.log_text()
