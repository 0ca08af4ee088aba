"""Sleep and wake-up on a GPU: the released bytes equal the start-up table, and answers are right afterwards.

The tests need `pip install torch_memory_saver`, which SGLang requires and the CPU installation omits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.memory_saver import release, resume, table_bytes
from support.server import DRAFTS, Server, assert_as_cold, prompt

pytest.importorskip("torch_memory_saver")
pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu]

FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "8192", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--enable-memory-saver")
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--max-total-tokens", "262144")
SERVERS: dict[str, tuple[str, ...]] = {
    "fp8, host cache": HOST,
    "fp8, 3 drafts": (*DRAFTS, "--enable-weights-cpu-backup"),
    "fp8, two GPUs": ("--tp-size", "2"),
    "bf16, no graphs, no overlap": (
        *("--kv-cache-dtype", "bfloat16"),
        *("--disable-cuda-graph", "--disable-overlap-schedule"),
    ),
}
MODEL = {"seed": 1}
ENVIRONMENT = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# CUDA graphs of several GPUs cannot be released.
ENVIRONMENTS = {"fp8, two GPUs": {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}}
OPTIONS = {"snapshot_interval": 512, "max_snapshots": 128}
MIB = 1 << 20
# Tolerance for physical memory, which is mapped in pages of 2 MiB: up to 2 MiB more per tensor, and up to 20 MiB more
# for the tensors below 10 MiB.
PAGES = 128 * MIB
LENGTHS = (300, 700, 1500, 3000)


@pytest.fixture
def table(server: Server) -> int:
    return table_bytes(server)


def test_released_bytes_equal_the_table(server: Server, name: str, table: int) -> None:
    """A release frees the table's bytes; the first one also frees memory cached by torch and of prefill steps."""
    server.generate(prompt(4000), 20)
    server.wait_idle()
    first = release(server, "kv_cache")
    assert first >= table - MIB
    resume(server, "kv_cache")
    freed = release(server, "kv_cache")
    print(f"{name}: table {table / MIB:.0f} MiB, freed {first / MIB:.0f} and {freed / MIB:.0f} MiB")
    taken = resume(server, "kv_cache")
    assert -MIB <= freed - table <= PAGES
    assert abs(taken - freed) <= MIB


def test_answers_behind_it(server: Server, name: str) -> None:
    """After three cycles of sleep and wake-up, only the host cache is hit, and batched answers are right."""
    prompts = [prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
    for ids in prompts:
        server.generate(ids, 40)
    for _ in range(3):
        server.wait_idle()
        release(server, "kv_cache")
        resume(server, "kv_cache")
        again = server.generate_all(prompts, 40)
        expected = [(len(ids) - 1) // 128 * 128 if "host" in name else 0 for ids in prompts]
        assert [got.cached for got in again] == expected
        assert_as_cold(server, {f"prompt {i}": (ids, got) for i, (ids, got) in enumerate(zip(prompts, again))})
    if "no graphs" not in name:
        assert "cuda graph: True" in server.log_text()
    server.wait_idle()


def test_a_request_that_runs_goes_on(server: Server) -> None:
    ids = prompt(900, seed=30)
    answer = server.begin(ids, 300, 20)
    release(server, "kv_cache")
    resume(server, "kv_cache")
    got = answer()
    assert len(got.tokens) == 300
    assert_as_cold(server, {"the paused request": (ids, got)})
    server.wait_idle()


def test_all_memory_and_new_weights(
    server: Server, name: str, table: int, model: Path, tiny: Callable[..., Path]
) -> None:
    """All memory is released at once, and weights are restored from the host backup or loaded again."""
    ids = prompt(700, seed=40)
    reference = server.generate(ids, 40)
    server.wait_idle()
    graphs = () if name in ENVIRONMENTS else ("cuda_graph",)
    freed = release(server, "kv_cache", "weights", *graphs)
    print(f"{name}: all memory, {freed / MIB:.0f} MiB")
    assert freed >= table
    resume(server, *graphs, "weights")
    if "--enable-weights-cpu-backup" not in SERVERS[name]:
        assert server.post("/update_weights_from_disk", {"model_path": str(model)})["success"]
    resume(server, "kv_cache")
    got = server.generate(ids, 40)
    assert got.tokens == reference.tokens
    server.wait_idle()
    for weights in (tiny(seed=9, nextn="drafts" in name), model):
        body = {"model_path": str(weights), "flush_cache": False}
        assert server.post("/update_weights_from_disk", body)["success"]
        got = server.generate(ids, 40)
        assert got.cached == 0
        assert (got.tokens == reference.tokens) == (weights == model)
    server.wait_idle()
