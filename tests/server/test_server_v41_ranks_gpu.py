"""DeepSeek-V4.1 on two GPUs: heads in halves, and a cache per rank of DP attention.

Short prefill steps are graphs, long ones run eagerly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.oracle_v41 import OracleV41
from support.server import Server, assert_sound, on_rank, only, prompt, running
from support.v41_gpu import NEAR_FP8, assert_lost_windows_are_detected, assert_near, fp8_checkpoint

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu, pytest.mark.usefixtures("plugin")]

# The indexer selects every visible entry.
V41_MODEL = {"index_topk": 2048}
LENGTHS = (1, 2, 3, 127, 128, 129, 300, 700)
GENERATED = 16
LARGEST_GRAPH = 256
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "2048", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-total-tokens", "32768", "--max-running-requests", "32")
FLAGS += ("--chunked-prefill-size", "2048", "--cuda-graph-max-bs-prefill", str(LARGEST_GRAPH), "--tp-size", "2")
FLAGS += ("--decode-log-interval", "1")
HALVES, RANKS = "two GPUs", "two ranks"
SERVERS: dict[str, tuple[str, ...]] = {HALVES: (), RANKS: ("--dp-size", "2", "--enable-dp-attention")}
OPTIONS = {"integrity_check": True, "max_snapshots": 64}


def steps_of(server: Server, kind: str, mark: int) -> list[str]:
    """Return the log lines of the steps after `mark` characters of the log. `kind` is Prefill or Decode."""
    return [line for line in server.log_text()[mark:].splitlines() if f"{kind} batch" in line]


def test_cold_and_after_hits(server: Server, oracle: OracleV41) -> None:
    """With two ranks the second one is idle."""
    server.flush()
    asked = [(ids, server.generate(ids, GENERATED)) for ids in map(prompt, LENGTHS) for _ in range(2)]
    assert [got.cached for _, got in asked] == [n for i in LENGTHS for n in (0, (i - 1) // 128 * 128)]
    assert_near(oracle, asked)
    server.wait_idle()


def test_decode_graphs_of_every_size(server: Server, oracle: OracleV41, name: str) -> None:
    """Up to 16 requests decode as graphs. SGLang pads the rows of two ranks differently for small steps."""
    server.flush()
    mark = len(server.log_text())
    for count in (1, 2, 3, 5, 8, 13, 16):
        prompts = [prompt(20 + 9 * i, seed=count) for i in range(count)]
        ranks = [i % 2 for i in range(count)] if name == RANKS else None
        assert_near(oracle, list(zip(prompts, server.generate_all(prompts, [GENERATED] * count, ranks))))
    steps = steps_of(server, "Decode", mark)
    # A rank does not replay a graph while the other one prefills.
    graphs = [line for line in steps if "cuda graph: True" in line]
    assert graphs and (name == RANKS or graphs == steps), steps


def test_prefill_graphs(server: Server, oracle: OracleV41, name: str) -> None:
    """Short steps are graphs, cold and after hits, alone and several at once. A long prompt is not."""
    server.flush()
    mark, prompts, asked = len(server.log_text()), [prompt(n, seed=n) for n in (40, 200, 250, 90, 129)], []
    for rank in (0, 1) if name == RANKS else (0,):
        for ids, cached in [(ids, 0) for ids in prompts] + [(prompts[2], 128)]:
            asked.append((ids, server.generate(ids, GENERATED, **on_rank(rank))))
            assert asked[-1][1].cached == cached
    if name == HALVES:
        asked += list(zip(prompts, server.generate_all(prompts, GENERATED)))
    steps = steps_of(server, "Prefill", mark)
    assert steps and all("cuda graph: True" in line for line in steps), steps
    mark = len(server.log_text())
    asked.append((prompt(700, seed=5), server.generate(prompt(700, seed=5), GENERATED)))
    assert "cuda graph: False" in steps_of(server, "Prefill", mark)[0]
    assert_near(oracle, asked)


def test_the_next_turn(server: Server, oracle: OracleV41) -> None:
    """The next turn is right after an odd number of decoded tokens, whose snapshot a decode graph has taken."""
    server.flush()
    ids = prompt(250, seed=3)
    following = ids + server.generate(ids, 17).tokens + prompt(60, seed=4)
    warm = server.generate(following, GENERATED)
    assert warm.cached == 256
    assert_near(oracle, [(following, warm)])


@only(RANKS)
def test_both_ranks_at_once(server: Server, oracle: OracleV41) -> None:
    """Answers are right in steps in which both ranks decode, one prefills, or one is idle."""
    lengths = (*LENGTHS, 900, 64, 30, 5, 1, 400, 17)
    prompts = [prompt(length, seed=30 + i) for i, length in enumerate(lengths)]
    counts, ranks = [8 * (1 + i % 4) for i in range(15)], [i % 2 if i < 8 else 1 for i in range(15)]
    assert_near(oracle, list(zip(prompts, server.generate_all(prompts, counts, ranks))))
    server.wait_idle()


@only(RANKS)
def test_hits_are_those_of_a_rank(server: Server, oracle: OracleV41) -> None:
    ids = prompt(700, seed=42)
    server.flush()
    found = [server.generate(ids, GENERATED, **on_rank(rank)) for rank in (0, 1, 0, 1)]
    assert [got.cached for got in found] == [0, 0, 640, 640]
    assert_near(oracle, [(ids, got) for got in found])


def test_the_cache_is_sound(server: Server) -> None:
    assert_sound(server)


@only(HALVES)
def test_injected_fault_is_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    assert_lost_windows_are_detected(server, oracle, plugin, GENERATED)
    server.flush()


@pytest.mark.parametrize("name", [f"FP8 weights, {HALVES}"], indirect=True)
def test_fp8_weights(name: str, tmp_path: Path) -> None:
    """Each GPU has whole blocks of 128 of the FP8 weights."""
    oracle = fp8_checkpoint(tmp_path / "model")
    with running(tmp_path / "model", tmp_path / "log", *FLAGS, **OPTIONS) as server:
        asked = [(ids, server.generate(ids, GENERATED)) for ids in map(prompt, (129, 300, 700)) for _ in range(2)]
    assert [got.cached for _, got in asked] == [0, 128, 0, 256, 0, 640]
    assert_near(oracle, asked, NEAR_FP8)
