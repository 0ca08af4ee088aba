"""TP 2: two processes split the heads and the experts.

KV has one head, so each process holds the whole cache, and both must make the same decisions about it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reference.oracle import Oracle
from support.faulty_cache import LAUNCH_ERROR
from support.lifecycle import Driver, Shape, Wrong
from support.server import (
    BROKEN_OFF,
    FP32,
    HOST_CACHE,
    Server,
    assert_oracle_chooses,
    assert_right_though_retracted,
    assert_same,
    ends,
    prompt,
)
from support.server_plugin import broken
from typer.testing import CliRunner, Result

from dsv4_sglang.cli import app

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("plugin")]

TOLERANCE = 1e-4
MODEL = {"seed": 0, "ratios": (0, 4, 128)}
# Eight device blocks and a host cache of four times that size. Little space is reserved for tokens that running
# requests still generate.
FLAGS = ("--dtype", "float32", "--context-length", "768", "--max-total-tokens", "1024", "--tp-size", "2")
FLAGS += ("--max-running-requests", "6", "--schedule-conservativeness", "0.1", "--enable-metrics", *HOST_CACHE)
OPTIONS = {**FP32, "max_snapshots": 12, "integrity_check": True}
RECORDS = ("loads",)
CUDA_LAYERS = True
# Disable SGLang's 5 s pause for diagnostics before exit.
ENVIRONMENT = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}


@pytest.mark.parametrize("length", [1, 700])
def test_oracle(server: Server, oracle: Oracle, length: int) -> None:
    ids = prompt(length)
    got = server.generate(ids, 20)
    assert_oracle_chooses(oracle, ids, got, TOLERANCE)


def test_warm_is_cold(server: Server) -> None:
    """A repeated prompt, the next turn after a snapshot of decode, and a branch inside a block equal cold answers."""
    ids = prompt(250, seed=1)
    first = server.cold(ids, 20)
    turn = [*ids, *first.tokens, *prompt(30, seed=2)]
    branch = [*ids[:200], *prompt(50, seed=3)]
    branched = server.cold(branch)
    expected = [(ids, 128, first), (turn, 256, server.cold(turn)), (branch, 128, branched)]
    server.flush()
    server.generate(ids, 20)
    for warm, cached, reference in expected:
        (rank,) = server.post("/dsv4/lookup", {"input_ids": warm})["ranks"]
        assert rank["hit_tokens"] == cached
        got = server.generate(warm)
        assert got.cached == cached
        assert_same(got, reference, TOLERANCE)


@pytest.mark.full
def test_more_than_fits(server: Server, oracle: Oracle) -> None:
    """Answers are right with evictions and retractions, and no process leaks a block or a slot."""
    evicted = server.metrics()["snapshots_evicted"]
    assert_right_though_retracted(server, oracle, TOLERANCE)
    assert server.metrics()["snapshots_evicted"] > evicted


def test_both_processes_load_the_same(server: Server, plugin: Path) -> None:
    """Both processes load the same host rows to the same device blocks, and only the first one counts.

    Four conversations of more than two blocks take turns on a device of eight blocks, alone and then in pairs.
    """
    prompts = [prompt(300, seed=30 + i) for i in range(4)]
    references = [server.cold(ids) for ids in prompts]
    server.flush()
    for ids in prompts:
        assert server.generate(ids).cached == 0
    before = server.metrics()
    found = [server.generate(ids) for ids in prompts]
    found += [got for at in (0, 2) for got in server.generate_all(prompts[at : at + 2])]
    for got, reference in zip(found, references * 2):
        assert got.cached == 256
        assert_same(got, reference, TOLERANCE)
    server.wait_idle()
    after = server.published()
    assert after["hit_tokens"] - before["hit_tokens"] == 8 * 256
    assert after["hit_tokens_host"] - before["hit_tokens_host"] >= 3 * 256, "too few tokens came from the host"
    first, second = (file.read_text() for file in sorted((plugin / "loads").iterdir()))
    assert first == second and first.count("snapshot") >= 3
    assert not any(f"TP1] {of}" in server.log_text() for of in ("prefix cache", "host cache"))


def check(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", server.url, *arguments])


@pytest.mark.full
def test_the_command_checks_all_processes(server: Server) -> None:
    """`check` covers all processes, while a request runs and with warm answers on an idle server."""
    rest = server.begin(prompt(300, seed=50), 400, 2, rid="to-abort")
    server.post("/pause_generation", {"mode": "in_place"})
    busy = check(server)
    server.post("/continue_generation", {})
    assert busy.exit_code == 0, busy.output
    server.post("/abort_request", {"rid": "to-abort"})
    assert len(rest().tokens) < 400
    server.wait_idle()
    warm = check(server, "--prompts", "2")
    assert warm.exit_code == 0, warm.output
    assert "the cache is sound, and 2 warm answers match cold answers" in warm.output
    assert "prompt 2: 256 of 300 tokens cached" in warm.output
    for rank in ("DP0 TP0", "DP0 TP1"):
        assert re.search(rf"{rank}: (idle|no requests, finishing earlier work), 0 wrong", warm.output)
        assert f"{rank}: busy with 1 requests, 0 wrong" in busy.output


@pytest.mark.full
def test_the_command_names_what_is_wrong(server: Server, plugin: Path) -> None:
    """`check` reports a fault that SGLang's own check misses, for both processes."""
    ids = prompt(300, seed=51)
    server.generate(ids)
    with broken(plugin, "a snapshot stays locked"):
        server.generate(ids)
    server.wait_idle()
    found = check(server)
    assert found.exit_code == 1
    for rank in ("TP0", "TP1"):
        assert re.search(rank + r"  snapshot \d+: its locks: the registry has \d, the tree 0", found.output)
    with pytest.raises(Wrong, match="its locks: the registry has"):
        Driver(server.url, seed=0, shape=Shape()).check()
    server.flush()
    assert check(server).exit_code == 0


@pytest.mark.full
def test_failing_kernel_ends_both_processes(server: Server, plugin: Path) -> None:
    """A failing kernel in one process ends both immediately, without SGLang's wait of a minute for a GPU core dump."""
    running_one = server.begin(prompt(30), 700, 2)
    with ends(server), broken(plugin, "a kernel fails"), pytest.raises(BROKEN_OFF):
        running_one()
    lines = server.log_text().splitlines()
    assert lines.count(f"RuntimeError: {LAUNCH_ERROR}") == 1
    assert not any("for CUDA coredumps" in line for line in lines)
