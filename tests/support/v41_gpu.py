"""DeepSeek-V4.1 on a GPU: bounds of its distance from the oracle, and a checkpoint with FP8 weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from reference.oracle_v41 import OracleV41
from safetensors.torch import load_file, save_file

from dsv4_sglang.testing import tiny, tiny_config
from dsv4_sglang.testing.quantise import E4M3_MAX, power_of_two_at_least
from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41
from support.server import Generated, Server, distances, prompt
from support.server_plugin import broken

# Maximum mean |d log p| of bf16 compute, with all entries selected: 0.010 to 0.021 on a CPU.
NEAR = 0.03
# The same with FP8 weights. Rounding activations to FP8 moves the oracle by 0.033 on average.
NEAR_FP8 = 0.07
# Widths that fill blocks of 128, also in halves, and the projections that are FP8 in the release.
FP8_WIDTHS = {"Q_LORA": 256, "O_LORA": 256, "EXPERT_WIDTH": 256}
FP8_PROJECTIONS = tuple(f".{name}.weight" for name in ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3"))


def assert_near(oracle: OracleV41, asked: Iterable[tuple[Sequence[int], Generated]], near: float = NEAR) -> None:
    """Assert that the mean |d log p| of each answer is at most `near`, and that of each token five times as much."""
    for ids, got in asked:
        apart = distances(oracle, ids, got)
        assert apart.mean() <= near and apart.max() <= 5 * near, (len(ids), got.cached, apart.tolist())


def assert_lost_windows_are_detected(server: Server, oracle: OracleV41, plugin: Path, count: int) -> None:
    """Assert that answers of `count` tokens after hits without their windows are far from the oracle.

    Lost windows move short answers the most, since these attend to few other entries.
    """
    server.flush()
    prompts = [prompt(130, seed=seed) for seed in (9, 10, 11)]
    with broken(plugin, "snapshots with empty rings"):
        wrong = [[server.generate(ids, tokens) for tokens in (1, count)][1] for ids in prompts]
    assert [got.cached for got in wrong] == [128] * len(prompts)
    apart = torch.cat([distances(oracle, ids, got) for ids, got in zip(prompts, wrong)])
    assert apart.mean() > NEAR, apart.tolist()


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
