"""DeepSeek-V4.1 on a GPU: bf16 compute, decode steps in CUDA graphs, eager and recorded prefill steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.oracle_v41 import OracleV41
from support.rounds import take_turns
from support.server import RETRACTABLE, Server, assert_as_cold, assert_sound, distances, prompt, running
from support.v41_gpu import NEAR, NEAR_FP8, assert_lost_windows_are_detected, assert_near, fp8_checkpoint

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu, pytest.mark.usefixtures("plugin")]

# The indexer selects every visible entry.
V41_MODEL = {"index_topk": 2048}
LENGTHS = (1, 2, 3, 127, 128, 129, 300, 700)
GENERATED = 16
RECORDED = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "2048")
RECORDED += ("--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16", "--max-total-tokens", "32768")
RECORDED += ("--chunked-prefill-size", "256", "--decode-log-interval", "1")
# Prefill steps of the module's server run eagerly.
FLAGS = (*RECORDED, "--cuda-graph-backend-prefill", "disabled")
OPTIONS = {"integrity_check": True, "max_snapshots": 64}


def test_cold_and_after_hits(server: Server, oracle: OracleV41) -> None:
    server.flush()
    asked = [(ids, server.generate(ids, GENERATED)) for ids in map(prompt, LENGTHS) for _ in range(2)]
    assert [got.cached for _, got in asked] == [n for i in LENGTHS for n in (0, (i - 1) // 128 * 128)]
    assert_near(oracle, asked)


def test_decode_graphs_of_every_size(server: Server, oracle: OracleV41) -> None:
    """Batches of 1 to 16 requests decode as graphs, also where they are padded to the next size."""
    server.flush()
    for count in (1, 2, 3, 5, 8, 13, 16):
        prompts, mark = [prompt(20 + 9 * i, seed=count) for i in range(count)], len(server.log_text())
        assert_near(oracle, list(zip(prompts, server.generate_all(prompts, GENERATED))))
        steps = [line for line in server.log_text()[mark:].splitlines() if "Decode batch" in line]
        assert steps and all("cuda graph: True" in line for line in steps), steps


def test_prefill_graphs_and_many_requests(model: Path, oracle: OracleV41, tmp_path: Path) -> None:
    """Recorded prefill steps, the default: prompts alone, several at once, and after a hit. Then decode steps of
    many requests."""
    flags = ["48" if flag == "16" else flag for flag in RECORDED]
    with running(model, tmp_path / "log", *flags, **OPTIONS | {"max_snapshots": 128}) as server:
        mark, prompts = len(server.log_text()), [prompt(n, seed=n) for n in (40, 200, 250, 90, 129)]
        asked = [(ids, server.generate(ids, GENERATED)) for ids in (*prompts, prompts[2])]
        asked += list(zip(prompts, server.generate_all(prompts, GENERATED)))
        steps = [line for line in server.log_text()[mark:].splitlines() if "Prefill batch" in line]
        assert steps and all("cuda graph: True" in line for line in steps), steps
        assert asked[5][1].cached == 128
        mark, prompts = len(server.log_text()), [prompt(20 + i, seed=i) for i in range(44)]
        asked += list(zip(prompts, server.generate_all(prompts, GENERATED)))
        steps = re.findall(r"Decode batch.*#running-req: (\d+).*cuda graph: True", server.log_text()[mark:])
        assert max(map(int, steps)) >= 32, steps
    assert_near(oracle, asked)


def test_the_next_turn(server: Server, oracle: OracleV41) -> None:
    """The next turn is right after an odd number of decoded tokens, whose snapshot a decode graph has taken."""
    server.flush()
    ids = prompt(250, seed=3)
    turn = server.generate(ids, 17)
    following = ids + turn.tokens + prompt(60, seed=4)
    warm = server.generate(following, GENERATED)
    assert warm.cached == 256
    assert_near(oracle, [(following, warm)])


def test_more_requests_than_fit(model: Path, oracle: OracleV41, tmp_path: Path) -> None:
    """With 24 requests that grow to 400 tokens in a pool of 4,096, some are retracted, and all answers are right."""
    flags = ("--max-total-tokens", "4096", "--max-running-requests", "24", "--schedule-conservativeness", "0.3")
    prompts = [prompt(100 + 2 * i, seed=7) for i in range(24)]
    with running(model, tmp_path / "log", *FLAGS, *flags, **OPTIONS) as server:
        answers = server.generate_all(prompts, sampling_params=RETRACTABLE)
        assert server.retractions(), "no request was retracted, so the test checks nothing"
        assert_sound(server)
    for ids, got in zip(prompts[::3], answers[::3]):
        assert distances(oracle, ids, got).mean() <= NEAR


def test_a_thousand_conversations_in_turn(model: Path, tmp_path: Path) -> None:
    """1,000 conversations of 5,000 tokens hit at least 99 % of an unbounded cache's tokens, and the next answers of 32
    are as near to cold ones as these are to each other.

    Of 5,015 tokens that an unbounded cache would find, 4,992 are whole blocks. SGLang keeps the windows of 256 prefixes
    at 64 running requests.
    """
    flags = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "8192")
    flags += ("--max-running-requests", "64", "--cuda-graph-bs-decode", "1", "16", "--max-total-tokens", "6553600")
    with running(model, tmp_path / "log", *flags, integrity_check=True, max_snapshots=2400) as server:
        figures, following = take_turns(server, conversations=1000, tokens=5000, concurrency=16, compared=32)
        print(figures)
        assert figures["turns"] == 1000 and figures["hit_of_ideal"] >= 0.99
        asked = {str(i): (ids, server.generate(ids, GENERATED)) for i, ids in enumerate(following)}
        assert all(got.cached == 5120 for _, got in asked.values())
        assert_as_cold(server, asked)
        assert_sound(server)


def test_injected_fault_is_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    assert_lost_windows_are_detected(server, oracle, plugin, GENERATED)


def test_fp8_weights(tmp_path: Path) -> None:
    """Answers are right with FP8 weights, cold and after hits. Doubled weights of a layer's experts are detected."""
    oracle = fp8_checkpoint(tmp_path / "model")
    with running(tmp_path / "model", tmp_path / "log", *FLAGS, **OPTIONS) as server:
        asked = [(ids, server.generate(ids, GENERATED)) for ids in map(prompt, (129, 300, 700)) for _ in range(2)]
    assert [got.cached for _, got in asked] == [0, 128, 0, 256, 0, 640]
    assert_near(oracle, asked, NEAR_FP8)
    doubled = OracleV41(tmp_path / "model")  # `oracle` keeps its scores
    doubled.weights = {
        name: 2 * weight if re.fullmatch(r"layers\.4\.ffn\..*w2\.weight", name) else weight
        for name, weight in oracle.weights.items()
    }
    assert distances(doubled, *asked[-1]).mean() > NEAR_FP8


def test_selection_moves_less_than_all_entries(
    server: Server, oracle: OracleV41, tiny_v41: Callable[..., Path]
) -> None:
    """The oracle of a model with the same weights that selects 64 entries is further away than rounding."""
    selecting = OracleV41(tiny_v41(index_topk=64))
    ids = prompt(700)
    got = server.generate(ids, GENERATED)
    assert distances(selecting, ids, got).mean() > NEAR
    assert torch.isfinite(torch.tensor(got.logprobs)).all()
