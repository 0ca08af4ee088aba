"""DeepSeek-V4.1 on a GPU: bf16 compute, decode steps in CUDA graphs, eager prefill steps.

Servers reject GPUs with this model until these tests have passed (flag_validation.py). The plugin lifts that rejection
alone (server_plugin.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.oracle_v41 import OracleV41
from support.server import Generated, Server, assert_as_cold, distances, prompt, running
from support.server_plugin import broken

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu, pytest.mark.usefixtures("plugin")]

UNTESTED_DEVICE = True
LENGTHS = (1, 2, 3, 127, 128, 129, 300, 700)
GENERATED = 16
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "2048")
FLAGS += ("--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16", "--max-total-tokens", "32768")
FLAGS += ("--chunked-prefill-size", "256", "--decode-log-interval", "1")
OPTIONS = {"integrity_check": True, "max_snapshots": 64}
# Maximum mean |d log p|, with all entries selected. bf16 compute gives 0.010 to 0.021 on a CPU.
NEAR = 0.03


@pytest.fixture(scope="module")
def model(tiny_v41: Callable[..., Path]) -> Path:
    """Model whose indexer selects every visible entry."""
    return tiny_v41(index_topk=2048)


@pytest.fixture(scope="module")
def oracle(model: Path) -> OracleV41:
    return OracleV41(model)


def assert_near(oracle: OracleV41, asked: list[tuple[list[int], Generated]]) -> None:
    for ids, got in asked:
        assert len(got.tokens) == GENERATED
        apart = distances(oracle, ids, got)
        assert apart.mean() <= NEAR and apart.max() <= 5 * NEAR, (len(ids), got.cached, apart.tolist())


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


def test_the_next_turn(server: Server, oracle: OracleV41) -> None:
    """The next turn is right after an odd number of decoded tokens, whose snapshot a decode graph has taken."""
    server.flush()
    ids = prompt(250, seed=3)
    turn = server.generate(ids, 17)
    following = ids + turn.tokens + prompt(60, seed=4)
    warm = server.generate(following, GENERATED)
    assert warm.cached == 256
    assert_near(oracle, [(following, warm)])


def test_injected_fault_is_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    """Lost windows move short answers the most, since these attend to few other entries."""
    server.flush()
    prompts = [prompt(130, seed=seed) for seed in (9, 10, 11)]
    with broken(plugin, "snapshots with empty rings"):
        wrong = [[server.generate(ids, count) for count in (1, GENERATED)][1] for ids in prompts]
    assert [got.cached for got in wrong] == [128] * len(prompts)
    assert torch.cat([distances(oracle, ids, got) for ids, got in zip(prompts, wrong)]).mean() > NEAR


def with_fp8_weights(folder: Path) -> Path:
    """Give a checkpoint the widths and the quantisation of FP8 weights in blocks of 128. Its weights no longer fit."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {"hidden_size": 1024, "q_lora_rank": 512, "o_lora_rank": 512, "o_groups": 8}
    config["text_config"] |= {"num_attention_heads": 64, "moe_intermediate_size": 512, "n_routed_experts": 16}
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    config["quantization_config"] = config["text_config"]["quantization_config"] = {
        "activation_scheme": "dynamic",
        **blocks,
    }
    file.write_text(json.dumps(config))
    return folder


def test_fp8_weights(tiny_v41: Callable[..., Path], tmp_path: Path) -> None:
    """With FP8 weights, which are random and have no oracle, answers after hits are as near to cold ones as those are
    to each other."""
    with running(with_fp8_weights(tiny_v41()), tmp_path / "log", *FLAGS, "--load-format", "dummy", **OPTIONS) as server:
        asked = {}
        for length in (129, 300, 700):
            ids = prompt(length, seed=60)
            turn = ids + server.generate(ids, GENERATED).tokens + prompt(50, seed=61)
            for name, tokens in (("again", ids), ("next turn", turn)):
                asked[f"{name}, {length}"] = tokens, server.generate(tokens, GENERATED)
        assert all(got.cached for _, got in asked.values())
        assert_as_cold(server, asked)


def test_selection_moves_less_than_all_entries(
    server: Server, oracle: OracleV41, tiny_v41: Callable[..., Path]
) -> None:
    """The oracle of a model with the same weights that selects 64 entries is further away than rounding."""
    selecting = OracleV41(tiny_v41(index_topk=64))
    ids = prompt(700)
    got = server.generate(ids, GENERATED)
    assert distances(selecting, ids, got).mean() > NEAR
    assert torch.isfinite(torch.tensor(got.logprobs)).all()
