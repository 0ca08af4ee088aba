"""DP attention with two ranks of one process each.

Every rank has its own requests, blocks, state slots and prefix tree. Experts are shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from reference.oracle import Oracle
from support.server import (
    FP32,
    Server,
    assert_a_rank_joins,
    assert_burst,
    assert_oracle_chooses,
    assert_right_though_retracted,
    assert_same,
    distances,
    live,
    on_rank,
    prompt,
)
from typer.testing import CliRunner

from benchmarks.servers import max_total_tokens
from dsv4_sglang.cli import app
from dsv4_sglang.cli.server import RequestError
from dsv4_sglang.cli.top import scaled

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

TOLERANCE = 1e-4
RANKS = (0, 1)
MODEL = {"seed": 0, "ratios": (0, 4, 128)}
# Eight blocks per rank, few of them reserved for tokens that running requests still generate. Six requests and chunks
# of 256 tokens per rank.
FLAGS = ("--dtype", "float32", "--context-length", "768", "--max-total-tokens", "1024", "--enable-metrics")
FLAGS += ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--max-running-requests", "12")
FLAGS += ("--chunked-prefill-size", "512", "--schedule-conservativeness", "0.1")
CUDA_LAYERS = True
GRAPH_TOKENS = 256
OPTIONS = {**FP32, "max_snapshots": 12, "integrity_check": True}


def test_requests_beside_an_idle_rank(server: Server, oracle: Oracle) -> None:
    for rank in RANKS:
        ids = prompt(300, seed=rank)
        assert_oracle_chooses(oracle, ids, server.generate(ids, 12, **on_rank(rank)), TOLERANCE)


@pytest.mark.parametrize(
    "asked",
    [
        [(700, 4, 0), (5, 20, 1), (130, 12, 1), (2, 3, 1)],
        [(20 + 13 * i, 3 + i % 3, 1) for i in range(9)] + [(30, 8, 0)],
    ],
    ids=["one rank prefills in chunks", "a burst larger than a rank"],
)
def test_bursts(server: Server, oracle: Oracle, asked: list[tuple[int, int, int]]) -> None:
    assert_burst(server, oracle, asked, seed=10, tolerance=TOLERANCE)
    server.wait_idle()


def test_hits_are_those_of_a_rank(server: Server) -> None:
    """A conversation that moves to the other rank misses there, and each rank counts its own hits."""
    ids = prompt(200, seed=3)
    server.flush()
    hits = [server.metrics(rank=rank)["hit_tokens"] for rank in RANKS]
    first = server.generate(ids, 80, **on_rank(0))
    assert first.cached == 0
    turn = [*ids, *first.tokens, *prompt(20, seed=4)]
    moved = server.generate(turn, 8, **on_rank(1))
    assert moved.cached == 0
    stayed = server.generate(turn, 8, **on_rank(0))
    assert stayed.cached == 256
    assert_same(stayed, moved, TOLERANCE)
    assert server.generate(turn, 1, **on_rank(1)).cached == 256
    assert [server.metrics(rank=rank)["hit_tokens"] - hits[rank] for rank in RANKS] == [256, 256]


def test_a_decoding_rank_joins_the_prefill_steps_of_the_other(server: Server, oracle: Oracle, plugin: Path) -> None:
    assert_a_rank_joins(server, oracle, plugin / "steps", TOLERANCE)


def test_a_rank_joins_beside_idle_ranks(
    start: Callable[..., AbstractContextManager[Server]], oracle: Oracle, plugin: Path
) -> None:
    """SGLang leaves the batch as it is then, and gives the model a prefill step."""
    with start("--tp-size", "4", "--dp-size", "4", "--chunked-prefill-size", "1024") as server:
        assert_a_rank_joins(server, oracle, plugin / "steps", TOLERANCE)


def test_benchmarks_count_the_tokens_of_both_ranks(server: Server) -> None:
    assert max_total_tokens(server.url) == 2 * 1024


def test_a_lookup_asks_both_ranks(server: Server) -> None:
    ids = prompt(300, seed=7)
    server.flush()
    for rank in (1, 0):
        server.generate(ids, 1, **on_rank(rank))
        answer = server.post("/dsv4/lookup", {"input_ids": ids})
        found = [(at["dp_rank"], at["hit_tokens"], at["device_tokens"]) for at in answer["ranks"]]
        assert found == [(at, *(2 * [256 if at >= rank else 0])) for at in RANKS]


def test_a_flush_needs_all_ranks(server: Server) -> None:
    """A flush is an error while one of the ranks has a request, also if the others are flushed."""
    ids = prompt(300, seed=11)
    server.flush()
    server.generate(ids, 1, **on_rank(1))
    rest = server.begin(prompt(20), 100, 2, **on_rank(1))
    with pytest.raises(RequestError) as error:
        server.post("/flush_cache")
    assert error.value.code == 400 and len(rest().tokens) == 100
    assert server.generate(ids, 1, **on_rank(1)).cached == 256
    server.post("/flush_cache")
    assert server.generate(ids, 1, **on_rank(1)).cached == 0


def test_top_shows_each_rank_and_the_sum(server: Server) -> None:
    for rank in RANKS:
        server.generate(prompt(20, seed=8), 1, **on_rank(rank))
    shown = CliRunner().invoke(app, ["top", server.url, "--once"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    found = [server.metrics(rank=rank) for rank in RANKS]
    shares = [f"{100 * of['hit_tokens'] / of['prompt_tokens']:.1f} %" for of in found]
    assert re.findall(r"rank \d  \S+  ([\d.]+ %), ", shown.output) == shares
    assert f"{scaled(sum(of['hit_tokens_device'] for of in found))} device," in shown.output


def test_retraction_on_one_rank(server: Server, oracle: Oracle) -> None:
    ids = prompt(60, seed=6)
    other = server.begin(ids, 100, 1, **on_rank(0))
    assert_right_though_retracted(server, oracle, TOLERANCE, **on_rank(1))
    assert distances(oracle, ids, other()).max() <= TOLERANCE
    retracted = [line for line in server.log_text().splitlines() if "Retract requests" in line]
    assert retracted and all("DP1 TP1" in line for line in retracted)


def test_lifecycles(server: Server) -> None:
    live(server, ranks=2)


def test_a_rank_has_its_share_of_slots(server: Server) -> None:
    lines = [line for line in server.log_text().splitlines() if "dsv4_sglang cache: " in line]
    assert sorted(line.split("] ")[0].split(" ", 2)[2] for line in lines) == ["DP0 TP0", "DP1 TP1"]
    assert all("1024 tokens in 8 blocks" in line and "(6 requests, 2 for the snapshots" in line for line in lines)
