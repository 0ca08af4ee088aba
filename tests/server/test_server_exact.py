"""Server with fp32 entries, fp32 keys, an indexer that omits entries, chunks of 128 and a host cache.

The pool is so small that requests are retracted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.oracle import Oracle
from support.server import (
    FP32,
    HOST_CACHE,
    Server,
    assert_oracle_chooses,
    assert_replays_are_equal,
    assert_right_around_one_block,
    assert_right_beside_cancels,
    assert_right_though_retracted,
    distances,
    prompt,
)
from support.server_plugin import broken

from dsv4_sglang.cli import client

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("plugin")]

MODEL = {"seed": 0, "index_topk": 64}
# Little space is reserved for tokens that running requests still generate, so some requests are retracted.
FLAGS = ("--dtype", "float32", "--context-length", "768", "--max-total-tokens", "1024", "--enable-metrics")
FLAGS += ("--max-running-requests", "8", "--chunked-prefill-size", "128", "--disable-overlap-schedule")
FLAGS += ("--schedule-conservativeness", "0.1", *HOST_CACHE)
OPTIONS = {**FP32, "integrity_check": True}
LENGTHS, MORE_LENGTHS = (1, 4, 128, 129, 700), (3, 5, 127, 300)
GENERATED = 40
TOLERANCE = 1e-4


@pytest.mark.parametrize("length", [*LENGTHS, *(pytest.param(n, marks=pytest.mark.full) for n in MORE_LENGTHS)])
def test_oracle(server: Server, oracle: Oracle, length: int) -> None:
    ids = prompt(length)
    got = server.generate(ids, GENERATED)
    assert len(got.tokens) == GENERATED
    assert_oracle_chooses(oracle, ids, got, TOLERANCE)


@pytest.mark.parametrize(("length", "seed"), [(641, 8), (700, 13)])
def test_the_smallest_pool_serves_the_context_length(server: Server, oracle: Oracle, length: int, seed: int) -> None:
    """SGLang takes two tokens of the context. The prompt of 641 tokens begins a block. Neither is near a tie of the
    indexer, which a processor's rounding would decide."""
    ids, count = prompt(length, seed=seed), 766 - length
    got = server.generate(ids, count)
    assert len(got.tokens) == count
    assert oracle.selection_gap([*ids, *got.tokens]).min() > 5e-5
    assert_oracle_chooses(oracle, ids, got, TOLERANCE)


def test_a_batch(server: Server, oracle: Oracle) -> None:
    prompts = [prompt(length, seed=1) for length in (5, 127, 129, 300)]
    for ids, got in zip(prompts, server.generate_all(prompts, GENERATED)):
        assert_oracle_chooses(oracle, ids, got, TOLERANCE)


def test_branches_in_chunks_of_128(server: Server, oracle: Oracle) -> None:
    """Branches just before and after a block boundary are right on both requests."""
    trunk = prompt(600, seed=2)
    for at in (383, 385):
        ids = trunk[:at] + prompt(30, seed=at)
        server.flush()
        server.generate(trunk, 1)
        for cached in (0, 384):
            got = server.generate(ids, 6)
            assert got.cached == cached
            assert distances(oracle, ids, got).max() <= TOLERANCE


@pytest.mark.full
def test_prefixes_around_one_block_at_once(server: Server, oracle: Oracle) -> None:
    assert_right_around_one_block(server, oracle, TOLERANCE)


@pytest.mark.full
def test_retries_of_cancelled_requests(server: Server, oracle: Oracle) -> None:
    assert_right_beside_cancels(server, oracle, TOLERANCE)


@pytest.mark.full
def test_replay_of_opaque_ids(server: Server, oracle: Oracle) -> None:
    assert_replays_are_equal(server, oracle, TOLERANCE)


def test_missing_indexer_state_is_detected(server: Server, oracle: Oracle, plugin: Path) -> None:
    """Without the indexer's compressor state, key L / 4 is wrong and the indexer selects a different entry."""
    ids = prompt(450, seed=3)
    server.flush()
    with broken(plugin, "indexer compressor state dropped"):
        server.generate(ids, 1)
        wrong = server.generate(ids, 12)
    assert wrong.cached == 384
    assert distances(oracle, ids, wrong).max() > 100 * TOLERANCE
    server.flush()
    server.generate(ids, 1)
    whole = server.generate(ids, 12)
    assert whole.cached == 384
    assert distances(oracle, ids, whole).max() <= TOLERANCE


@pytest.mark.full
def test_more_requests_than_fit(server: Server, oracle: Oracle) -> None:
    server.flush()
    assert_right_though_retracted(server, oracle, TOLERANCE)
    ids = prompt(300)
    server.generate(ids, 1)
    got = server.generate(ids, 8)
    assert got.cached == 256
    assert distances(oracle, ids, got).max() <= TOLERANCE


def test_hits_from_the_host(server: Server, oracle: Oracle) -> None:
    """Four conversations of three blocks on a device of eight blocks are right after loads from the host."""
    prompts = [prompt(400, seed=30 + i) for i in range(4)]
    server.flush()
    for ids in prompts:
        assert server.generate(ids, 1).cached == 0
    before = server.metrics()["hit_tokens_host"]
    for ids in prompts:
        got = server.generate(ids, 8)
        assert got.cached == 384
        assert distances(oracle, ids, got).max() <= TOLERANCE
    assert server.published()["hit_tokens_host"] - before >= 2 * 384, "too few tokens came from the host"


def test_the_cache_is_intact(server: Server) -> None:
    """The integrity check finds nothing after all tests above."""
    server.wait_idle()
    reports = client.Server.at(server.url).integrity()
    assert len(reports) == 1 and not reports[0]["findings"], reports
