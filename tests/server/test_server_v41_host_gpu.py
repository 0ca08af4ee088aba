"""Host cache of DeepSeek-V4.1 on a GPU: pinned memory, loads layer by layer, steps in CUDA graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.oracle_v41 import OracleV41
from support.restarts import restarted
from support.server import Generated, Server, assert_one_copy, distances, only, prompt
from support.server_plugin import broken
from support.v41_gpu import NEAR, assert_near

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu, pytest.mark.usefixtures("plugin")]

# The indexer selects every visible entry.
V41_MODEL = {"index_topk": 2048}
# 32 blocks on the device.
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "2048", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--max-total-tokens", "4096")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "8", "--schedule-conservativeness", "0.3")
EAGER = ("--disable-cuda-graph", "--disable-overlap-schedule", "--chunked-prefill-size", "256")
SERVERS: dict[str, tuple[str, ...]] = {
    "write_through": (),
    "write_back, no graphs, no overlap": ("--hicache-write-policy", "write_back", *EAGER),
    "write_through, two GPUs": ("--tp-size", "2"),
}
WAITING = ("--hicache-storage-prefetch-policy", "wait_complete")
OPTIONS = {"max_snapshots": 64}
GENERATED = 16
# Prompts of three blocks, of which two are found again: three times the blocks of the device.
CONVERSATIONS, CACHED = 48, 256


def visit(server: Server) -> list[tuple[list[int], Generated]]:
    """Return the prompts of all conversations, and their answers one after the other."""
    prompts = [prompt(300, seed=i) for i in range(CONVERSATIONS)]
    return [(ids, server.generate(ids, GENERATED)) for ids in prompts]


def cached_tokens(asked: list[tuple[list[int], Generated]]) -> set[int]:
    return {got.cached for _, got in asked}


def test_conversations_beyond_the_device(server: Server, oracle: OracleV41) -> None:
    """The second and third visits hit the maximum, most of it on the host, and are right."""
    server.flush()
    before = server.published()
    visits = [visit(server) for _ in range(3)]
    assert [cached_tokens(asked) for asked in visits] == [{0}, {CACHED}, {CACHED}]
    after = server.published()
    change = {name: after[name] - before[name] for name in after}
    tiers = [change[f"hit_tokens_{tier}"] for tier in ("device", "host", "storage")]
    assert sum(tiers) == change["hit_tokens"] and tiers[1] > CONVERSATIONS * CACHED and tiers[2] == 0, tiers
    assert change["host_saves_skipped"] == change["host_loads_failed"] == 0
    assert_near(oracle, visits[1][::6] + visits[2][::4])
    server.wait_idle()


def test_next_turns_while_another_decodes(server: Server, oracle: OracleV41) -> None:
    """Next turns, four at a time, are loaded from the last snapshot while another request decodes."""
    first = [prompt(200 + 9 * i, seed=60) for i in range(8)]
    server.flush()
    turns = server.generate_all(first, 60)
    visit(server)
    following = [[*ids, *got.tokens, *prompt(60, seed=61)] for ids, got in zip(first, turns)]
    ids = prompt(100, seed=62)
    other = server.begin(ids, 300, 10)
    found = [got for at in (0, 4) for got in server.generate_all(following[at : at + 4], GENERATED)]
    whole = other()
    assert [got.cached for got in found] == [(len(ids) + 59) // 128 * 128 for ids in first]
    assert_near(oracle, list(zip(following, found)))
    assert distances(oracle, ids, whole).mean() <= NEAR
    server.wait_idle()


def test_broken_loads_are_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    server.flush()
    visit(server)
    with broken(plugin, "the row behind each"):
        wrong = visit(server)
    assert cached_tokens(wrong) == {CACHED}
    assert torch.cat([distances(oracle, *answer) for answer in wrong]).mean() > NEAR
    server.flush()


@only("write_through, two GPUs")
def test_processes_hold_one_copy(server: Server) -> None:
    assert_one_copy(server)


@pytest.mark.parametrize(
    ("storage", "gpus"),
    [("file", 1), ("shm", 1), ("file", 2), ("shm", 2)],
    ids=["file", "shm", "file, two GPUs", "shm, two GPUs"],
)
def test_a_server_that_starts_again_finds_its_files(
    tiny_v41: Callable[..., Path], tmp_path: Path, storage: str, gpus: int
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs 2 GPUs")
    model, flags = tiny_v41(**V41_MODEL), (*FLAGS, *WAITING, "--tp-size", str(gpus))
    prompts = [prompt(700, seed=70 + i) for i in range(4)]
    with restarted(model, tmp_path, storage, flags, prompts, pages=4 * 6, **OPTIONS) as (server, again):
        assert [got.cached for got in again] == [640] * 4
        assert server.published()["hit_tokens_storage"] == 4 * 640
    assert_near(OracleV41(model), list(zip(prompts, again)))
