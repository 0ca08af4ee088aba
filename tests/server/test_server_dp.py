"""DP attention with two ranks of one process each.

Every rank has its own requests, blocks, state slots and prefix tree. Experts are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from server_harness import (
    Server,
    assert_burst,
    assert_oracle_chooses,
    assert_right_though_retracted,
    assert_same,
    distances,
    live,
    make_way,
    on_rank,
    one_core_each,
    prompt,
    running,
)
from typer.testing import CliRunner

from benchmarks import ports
from benchmarks.reference.oracle import Oracle
from dsv4_sglang.cli import app

pytestmark = pytest.mark.server

TOLERANCE = 1e-4
RANKS = (0, 1)
# Eight blocks per rank, few of them reserved for tokens that running requests still generate. Six requests and chunks
# of 256 tokens per rank.
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "1024", "--enable-metrics")
FLAGS += ("--dp-size", "2", "--enable-dp-attention", "--max-running-requests", "12", "--chunked-prefill-size", "512")
FLAGS += ("--schedule-conservativeness", "0.1")
OPTIONS = {
    "entry_format": "fp32",
    "indexer_format": "fp32",
    "max_snapshots": 12,
    "integrity_check": True,
}


@pytest.fixture(scope="module")
def oracle(tiny: Callable[..., Path]) -> Oracle:
    return Oracle(tiny(seed=0, ratios=(0, 4, 128)))


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with one process per rank."""
    log = tmp_path_factory.mktemp("dp") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", one_core_each(2))
        with running(tiny(seed=0, ratios=(0, 4, 128)), log, *FLAGS, "--tp-size", "2", **OPTIONS) as server:
            yield make_way(server)


@pytest.mark.parametrize("rank", RANKS)
def test_the_other_rank_is_idle(server: Server, oracle: Oracle, rank: int) -> None:
    for length in (1, 300):
        ids = prompt(length, seed=rank)
        assert_oracle_chooses(oracle, ids, server.generate(ids, 12, **on_rank(rank)), TOLERANCE)


def test_mixed_lengths(server: Server, oracle: Oracle) -> None:
    """Answers are right while one rank prefills in chunks and the other decodes or idles."""
    assert_burst(server, oracle, [(700, 4, 0), (5, 20, 1), (130, 12, 1), (2, 3, 1)], seed=10, tolerance=TOLERANCE)


def test_a_burst_larger_than_a_rank(server: Server, oracle: Oracle) -> None:
    assert_burst(
        server, oracle, [(20 + 13 * i, 3 + i % 3, 1) for i in range(9)] + [(30, 8, 0)], seed=30, tolerance=TOLERANCE
    )
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


def test_top_has_a_column_for_each_rank(server: Server) -> None:
    shown = CliRunner().invoke(app, ["top", server.url, "--once"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    columns = {line[:24].strip(): line[24:].split() for line in shown.output.splitlines()}
    assert "rank 0" in shown.output and "rank 1" in shown.output
    hits = [f"{server.metrics(rank=rank)['hit_tokens_device']:,.0f}" for rank in RANKS]
    assert columns["tokens hit, device"] == hits


def test_requests_go_round(server: Server) -> None:
    """SGLang's default scheduling sends every second request to the same rank."""
    ids = prompt(150, seed=5)
    assert [server.generate(ids, 1).cached for _ in range(4)] == [0, 0, 128, 128]


def test_retraction_on_one_rank(server: Server, oracle: Oracle) -> None:
    ids = prompt(60, seed=6)
    other = server.begin(ids, 100, 1, **on_rank(0))
    assert_right_though_retracted(server, oracle, TOLERANCE, **on_rank(1))
    assert distances(oracle, ids, other()).max() <= TOLERANCE
    retracted = [line for line in server.log_text().splitlines() if "Retract requests" in line]
    assert retracted and all("DP1 TP1" in line for line in retracted)


def test_abort_on_one_rank(server: Server, oracle: Oracle) -> None:
    ids = prompt(100, seed=7)
    aborted = server.begin(prompt(100, seed=8), 900, 3, **on_rank(0), rid="to-abort")
    other = server.begin(ids, 30, 3, **on_rank(1))
    server.post("/abort_request", {"rid": "to-abort"})
    assert len(aborted().tokens) < 900
    assert distances(oracle, ids, other()).max() <= TOLERANCE
    server.wait_idle()
    assert_oracle_chooses(oracle, ids, server.generate(ids, 8, **on_rank(0)), TOLERANCE)


def test_lifecycles(server: Server) -> None:
    live(server, ranks=2)


def test_it_listens_where_nobody_else_may(server: Server) -> None:
    """Within its port range the server listens only on known ports: its own, torch's and those that SGLang derives."""
    own = psutil.Process(server.process.pid)
    heard = {
        connection.laddr.port - server.port
        for process in (own, *own.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    within = {offset for offset in heard if 0 <= offset < ports.SPAN}
    assert {0, 1} < within <= set(ports.USED)


def test_a_rank_has_its_share_of_slots(server: Server) -> None:
    lines = [line for line in server.log_text().splitlines() if "dsv4_sglang cache: " in line]
    assert sorted(line.split("] ")[0].split(" ", 2)[2] for line in lines) == ["DP0 TP0", "DP1 TP1"]
    assert all("1024 tokens in 8 blocks" in line and "(6 requests, 2 for the snapshots" in line for line in lines)
