"""DeepSeek-V4.1 on a GPU: bf16 compute, decode steps in CUDA graphs, eager and recorded prefill steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from reference.oracle_v41 import OracleV41
from safetensors.torch import load_file, save_file
from support.rounds import take_turns
from support.server import Generated, Server, assert_as_cold, distances, prompt, running
from support.server_plugin import broken

from dsv4_sglang.attention.sparse_decode import MIN_TOKENS
from dsv4_sglang.cli.client import Server as Client
from dsv4_sglang.testing import tiny, tiny_config
from dsv4_sglang.testing.quantise import E4M3_MAX, power_of_two_at_least
from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu, pytest.mark.usefixtures("plugin")]

LENGTHS = (1, 2, 3, 127, 128, 129, 300, 700)
GENERATED = 16
RECORDED = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "2048")
RECORDED += ("--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16", "--max-total-tokens", "32768")
RECORDED += ("--chunked-prefill-size", "256", "--decode-log-interval", "1")
# Prefill steps of the module's server run eagerly.
FLAGS = (*RECORDED, "--cuda-graph-backend-prefill", "disabled")
OPTIONS = {"integrity_check": True, "max_snapshots": 64}
# Maximum mean |d log p|, with all entries selected. bf16 compute gives 0.010 to 0.021 on a CPU.
NEAR = 0.03
# The same with FP8 weights. Rounding activations to FP8 moves the oracle by 0.033 on average.
NEAR_FP8 = 0.07
# Widths of the FP8 checkpoint, which fill blocks of 128, and the projections that are FP8 in the release.
FP8_WIDTHS = {"Q_LORA": 256, "O_LORA": 256, "EXPERT_WIDTH": 256}
FP8_PROJECTIONS = tuple(f".{name}.weight" for name in ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3"))


@pytest.fixture(scope="module")
def model(tiny_v41: Callable[..., Path]) -> Path:
    """Model whose indexer selects every visible entry."""
    return tiny_v41(index_topk=2048)


@pytest.fixture(scope="module")
def oracle(model: Path) -> OracleV41:
    return OracleV41(model)


def assert_near(oracle: OracleV41, asked: list[tuple[list[int], Generated]], near: float = NEAR) -> None:
    for ids, got in asked:
        assert len(got.tokens) == GENERATED
        apart = distances(oracle, ids, got)
        assert apart.mean() <= near and apart.max() <= 5 * near, (len(ids), got.cached, apart.tolist())


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
    """Recorded prefill steps, the default: prompts alone, several at once, and after a hit. Then so many requests that
    decode steps read decoded entries (`sparse_decode.MIN_TOKENS`)."""
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
        assert max(map(int, steps)) >= MIN_TOKENS, steps
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
        server.wait_idle()
        reports = Client.at(server.url).integrity()
        assert reports and not any(report["findings"] for report in reports), reports


def test_injected_fault_is_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    """Lost windows move short answers the most, since these attend to few other entries."""
    server.flush()
    prompts = [prompt(130, seed=seed) for seed in (9, 10, 11)]
    with broken(plugin, "snapshots with empty rings"):
        wrong = [[server.generate(ids, count) for count in (1, GENERATED)][1] for ids in prompts]
    assert [got.cached for got in wrong] == [128] * len(prompts)
    assert torch.cat([distances(oracle, ids, got) for ids, got in zip(prompts, wrong)]).mean() > NEAR


def fp8_checkpoint(folder: Path) -> OracleV41:
    """Write a checkpoint whose projections are FP8 in blocks of 128, and return the oracle of the rounded weights."""
    with patch.multiple(tiny, **FP8_WIDTHS), patch.multiple(tiny_config, **FP8_WIDTHS):
        make_tiny_v41(folder, TinyV41Spec(heads=16, hidden=512, index_topk=2048))
    oracle, tensors = OracleV41(folder), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(FP8_PROJECTIONS)]:
        blocks = tensors[name].float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = power_of_two_at_least(blocks.abs().amax((1, 3), keepdim=True) / E4M3_MAX)
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        tensors[name] = codes.flatten(2).flatten(0, 1)
        tensors[name.removesuffix("weight") + "scale"] = scale[:, 0, :, 0].to(torch.float8_e8m0fnu)
        oracle.weights[name] = (codes.float() * scale).flatten(2).flatten(0, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    blocks_of_128 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    fp8 = {"quantization_config": {"activation_scheme": "dynamic", **blocks_of_128}}
    (folder / "config.json").write_text(json.dumps(config | fp8 | {"text_config": config["text_config"] | fp8}))
    return oracle


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
