"""The oracle of DeepSeek-V4.1 against NVIDIA's nemo-automodel (automodel.py), with and without rounded entries."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41
from reference import oracle_v41
from reference.oracle_v41 import OracleV41
from reference.quantise import KEY_SCALE_MIN, v41_entries, v41_keys, v41_rows

pytestmark = [pytest.mark.full, pytest.mark.slow]

# Error of an fp32 sum of about 256 products, relative to their size.
FP32_SUM = 2.0**-20

PROMPT = torch.randint(3, 384, (200,), generator=torch.Generator().manual_seed(7)).tolist()


def both(automodel: ModuleType, folder: Path, **fields: int) -> tuple[OracleV41, Any]:
    """Return both oracles of a model with the given fields of `TinyV41Spec`."""
    make_tiny_v41(folder, TinyV41Spec(heads=16, **fields))
    return OracleV41(folder), automodel.Automodel(folder)


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Return [tokens, vocab], the distances of log p, for logits in fp32 or fp64."""
    return (a.double().log_softmax(-1) - b.double().log_softmax(-1)).abs()


def test_formulas_equal_but_for_fp32(automodel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounded entries, both differ from the formulas in fp64 by the error of fp32 alone.

    The indexer selects 64 of up to 200 entries, in one layer from 96 candidates. The bound is four times the error of
    our oracle in fp32, on the same tokens.
    """
    ours, theirs = both(automodel, tmp_path, index_topk=64, candidate_blocks=12)
    for name in ("_bf16", "v41_rows", "v41_entries", "v41_keys", "mxfp4"):
        monkeypatch.setattr(oracle_v41, name, lambda x: x)
    single = ours.logits(PROMPT)
    ours.weights = {name: tensor.double() for name, tensor in ours.weights.items()}
    exact = ours.logits(PROMPT)
    bound = 4 * apart(single, exact).max()
    found = theirs.logits(PROMPT, "none")
    assert apart(found, exact).max() <= bound

    gate = "layers.1.attn.compressor.wgate.weight"
    monkeypatch.setitem(ours.weights, gate, ours.weights[gate] * 1.001)
    assert apart(found, ours.logits(PROMPT)).max() > bound, "the bound lets wrong pooling weights pass"


def test_rounded_entries_move_both_alike(
    automodel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounded entries, the mean distance is below that of our oracle to itself with embeddings changed by the
    error of an fp32 sum. Such an error rounds a few values the other way, and each of them changes later ones.

    All entries are selected: one that is rounded the other way may change a selection, which has a larger effect.
    Omitting the roundings to bf16 exceeds the bound.
    """
    ours, theirs = both(automodel, tmp_path)
    rounded = ours.logits(PROMPT)
    embedding = ours.weights["embed.weight"]
    error = FP32_SUM * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(ours.weights, "embed.weight", embedding * (1 + error))
    bound = apart(ours.logits(PROMPT), rounded).mean()
    assert apart(theirs.logits(PROMPT), rounded).mean() <= bound
    assert apart(theirs.logits(PROMPT, "formats"), rounded).mean() > bound


@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 300.0])
def test_formats_are_equal(automodel: ModuleType, scale: float) -> None:
    """Keys are compared where the scale is in the range of the key container."""
    x = (torch.randn(2000, 512, generator=torch.Generator().manual_seed(11)) * scale).bfloat16().float()
    x[0] = 0
    assert torch.equal(v41_rows(x), automodel.quantise(x, format="fp8", block_size=32))
    assert torch.equal(v41_entries(x), automodel.quantise(x, format="nvfp4", block_size=16))
    keys = x[:, :128]
    within = keys.unflatten(-1, (-1, 32)).abs().amax(-1).amin(-1) >= 6 * KEY_SCALE_MIN
    assert torch.equal(v41_keys(keys)[within], automodel.quantise(keys, format="mxfp4", block_size=32)[within])
