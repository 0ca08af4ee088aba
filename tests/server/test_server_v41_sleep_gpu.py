"""Sleep and wake-up of DeepSeek-V4.1 on a GPU, as in test_server_sleep_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.oracle_v41 import OracleV41
from support.memory_saver import release, resume, table_bytes
from support.server import Server, distances, prompt
from support.v41_gpu import NEAR, assert_near

pytest.importorskip("torch_memory_saver")
pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu]

# The indexer selects every visible entry.
V41_MODEL = {"index_topk": 2048}
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "2048", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--max-total-tokens", "1048576")
FLAGS += ("--enable-memory-saver",)
SERVERS: dict[str, tuple[str, ...]] = {
    "one GPU": (),
    "host cache": ("--enable-hierarchical-cache", "--hicache-ratio", "2"),
    "two GPUs": ("--tp-size", "2"),
}
ENVIRONMENT = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# CUDA graphs of several GPUs cannot be released.
ENVIRONMENTS = {"two GPUs": {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}}
OPTIONS = {"max_snapshots": 128}
MIB = 1 << 20
# Tolerance for physical memory, as in test_server_sleep_gpu.py.
PAGES = 128 * MIB
LENGTHS = (130, 300, 700, 1500)
GENERATED = 40


def test_released_bytes_equal_the_table(server: Server) -> None:
    """A release frees the table's bytes; the first one also frees memory cached by torch and of prefill steps."""
    table = table_bytes(server)
    server.generate(prompt(1900), 20)
    server.wait_idle()
    first = release(server, "kv_cache")
    assert first >= table - MIB
    resume(server, "kv_cache")
    freed = release(server, "kv_cache")
    print(f"table {table / MIB:.0f} MiB, freed {first / MIB:.0f} and {freed / MIB:.0f} MiB")
    taken = resume(server, "kv_cache")
    assert -MIB <= freed - table <= PAGES
    assert abs(taken - freed) <= MIB


def test_answers_behind_it(server: Server, oracle: OracleV41, name: str) -> None:
    """After three cycles of sleep and wake-up, only the host cache is hit, and batched answers are right."""
    prompts = [prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
    for ids in prompts:
        server.generate(ids, GENERATED)
    for _ in range(3):
        server.wait_idle()
        release(server, "kv_cache")
        resume(server, "kv_cache")
        again = server.generate_all(prompts, GENERATED)
        expected = [(len(ids) - 1) // 128 * 128 if name == "host cache" else 0 for ids in prompts]
        assert [got.cached for got in again] == expected
        assert_near(oracle, list(zip(prompts, again)))
    assert "cuda graph: True" in server.log_text()
    server.wait_idle()


def test_a_request_that_runs_goes_on(server: Server, oracle: OracleV41) -> None:
    ids = prompt(500, seed=30)
    answer = server.begin(ids, 300, 20)
    release(server, "kv_cache")
    resume(server, "kv_cache")
    got = answer()
    assert len(got.tokens) == 300 and distances(oracle, ids, got).mean() <= NEAR
    server.wait_idle()


def test_all_memory_and_new_weights(
    server: Server, oracle: OracleV41, name: str, model: Path, tiny_v41: Callable[..., Path]
) -> None:
    """All memory is released at once, and weights are loaded again, then others, whose answers are those of their own
    oracle."""
    ids = prompt(700, seed=40)
    server.wait_idle()
    graphs = () if name in ENVIRONMENTS else ("cuda_graph",)
    assert release(server, "kv_cache", "weights", *graphs) >= table_bytes(server)
    resume(server, *graphs, "weights")
    assert server.post("/update_weights_from_disk", {"model_path": str(model)})["success"]
    resume(server, "kv_cache")
    other = tiny_v41(**V41_MODEL, seed=9)
    for weights, expected in ((model, oracle), (other, OracleV41(other)), (model, oracle)):
        body = {"model_path": str(weights), "flush_cache": False}
        assert server.post("/update_weights_from_disk", body)["success"]
        got = server.generate(ids, GENERATED)
        assert got.cached == 0
        assert_near(expected, [(ids, got)])
    server.wait_idle()
