"""DeepSeek-V4.1 with SGLang's CUDA layer classes on CPU servers of two processes.

These classes sum the parts of attention and experts themselves, and keep V4.1's residual streams between layers. Short
prefill steps run like GPU graphs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.oracle_v41 import OracleV41
from support.server import HOST_CACHE, Server, assert_a_rank_joins, assert_burst, distances, on_rank, only, prompt
from support.server_plugin import broken

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

# Largest |d log p|, with all entries selected (test_server_v41.py).
TOLERANCE = 0.02
# The indexer selects every visible entry.
V41_MODEL = {"index_topk": 1024}
CUDA_LAYERS = True
GRAPH_TOKENS = 256
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "2048", "--tp-size", "2", *HOST_CACHE)
FLAGS += ("--max-running-requests", "12", "--chunked-prefill-size", "512")
HALVES, RANKS = "heads in halves", "a cache per rank"
SERVERS: dict[str, tuple[str, ...]] = {HALVES: (), RANKS: ("--dp-size", "2", "--enable-dp-attention")}
OPTIONS = {"integrity_check": True, "max_snapshots": 24}
# (tokens, tokens to generate, rank)
ASKED = [(131, 6, 0), (5, 10, 1), (3, 4, 1), (300, 8, 0)]


def test_cold_and_after_hits(server: Server, oracle: OracleV41, name: str) -> None:
    """Each rank answers right while the other one is idle."""
    server.flush()
    for rank in (0, 1) if name == RANKS else (0,):
        ids = prompt(300, seed=rank)
        for cached in (0, 256):
            got = server.generate(ids, 8, **on_rank(rank))
            assert got.cached == cached
            assert distances(oracle, ids, got).max() <= TOLERANCE


def test_bursts(server: Server, oracle: OracleV41, name: str) -> None:
    asked = [(tokens, count, rank if name == RANKS else 0) for tokens, count, rank in ASKED]
    assert_burst(server, oracle, asked, seed=50, tolerance=TOLERANCE)
    server.wait_idle()


@only(RANKS)
def test_a_decoding_rank_joins(server: Server, oracle: OracleV41, plugin: Path) -> None:
    assert_a_rank_joins(server, oracle, plugin / "steps", TOLERANCE)


@only(RANKS)
def test_broken_rank_is_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    with broken(plugin, "experts see tokens of one rank"), pytest.raises(AssertionError):
        assert_burst(server, oracle, ASKED, seed=60, tolerance=TOLERANCE)
    server.flush()
