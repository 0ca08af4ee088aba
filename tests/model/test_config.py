"""Config and layer schedule against SPEC 1.1 to 1.3."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config as HFConfig

from dsv4_sglang import planner
from dsv4_sglang.model import AttentionType, DSV4Config, build_schedule
from dsv4_sglang.model.rope import rope_frequencies

CONFIGS = Path(planner.__file__).parent / "configs"
FIELDS = [field.name for field in dataclasses.fields(DSV4Config) if field.name != "yarn"]
CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA


def published(model: str) -> dict[str, Any]:
    """Return the config.json of a released model."""
    return json.loads((CONFIGS / f"DeepSeek-V4-{model}.json").read_text())


def flash_json() -> dict[str, Any]:
    return published("Flash")


@pytest.mark.parametrize(
    ("model", "config", "first", "counts"),
    [
        ("Flash", DSV4Config.flash(), SWA, {CSA: 21, HCA: 20, SWA: 2}),
        ("Pro", DSV4Config.pro(), HCA, {CSA: 30, HCA: 31}),
    ],
    ids=["flash", "pro"],
)
def test_released_models(
    model: str, config: DSV4Config, first: AttentionType, counts: dict[AttentionType, int]
) -> None:
    assert DSV4Config.from_hf(published(model)) == config
    schedule = build_schedule(config)
    assert collections.Counter(spec.attn for spec in schedule) == counts
    assert [spec.layer_idx for spec in schedule] == list(range(config.num_hidden_layers))
    kinds = [first, first, *((CSA, HCA)[i % 2] for i in range(config.num_hidden_layers - 2))]
    assert [spec.attn for spec in schedule] == kinds


def test_ratio_by_layer_id_whatever_the_list_length() -> None:
    base = flash_json()
    for extra in ([], [0], [0, 0, 0]):
        config = DSV4Config.from_hf({**base, "compress_ratios": base["compress_ratios"][:43] + extra})
        assert len(build_schedule(config)) == 43
        assert config.ratio(43) == 0
        with pytest.raises(IndexError, match=r"layer 44 .*0\.\.43"):
            config.ratio(44)
        with pytest.raises(IndexError, match="layer -1"):
            config.ratio(-1)


def test_fields_as_transformers_names_them() -> None:
    fields = {k: v for k, v in flash_json().items() if k != "model_type"}
    config = DSV4Config.from_hf(HFConfig(**fields).to_dict())
    assert build_schedule(config) == build_schedule(DSV4Config.flash())
    for name in (*FIELDS, "yarn"):
        if name != "compress_ratios":  # transformers drops the entry of the MTP block
            assert getattr(config, name) == getattr(DSV4Config.flash(), name), name


@pytest.mark.parametrize("name", [*FIELDS, "rope_scaling", "rope_scaling.factor"])
def test_missing_field_is_named(name: str) -> None:
    config = flash_json()
    *outer, last = name.split(".")
    fields = config[outer[0]] if outer else config
    del fields[last]
    with pytest.raises(KeyError, match=f"'{name}' is missing"):
        DSV4Config.from_hf(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("head_dim", 256, "'head_dim' is 256.*512"),
        ("index_topk", 0, "'index_topk' is 0"),
        ("num_hidden_layers", "43", "'num_hidden_layers' is '43'.*integer"),
        ("num_hidden_layers", True, "'num_hidden_layers' is True.*integer"),
        ("num_hidden_layers", -1, "'num_hidden_layers' is -1"),
        ("num_hidden_layers", 60, "'compress_ratios' has 44 entries.*60"),
        ("rms_norm_eps", 0.0, "'rms_norm_eps' is 0.0.*positive"),
        ("rope_theta", "big", "'rope_theta' is 'big'.*number"),
        ("rope_scaling", "yarn", "'rope_scaling' is 'yarn'.*mapping"),
        ("rope_scaling", {"type": "linear", "factor": 2}, r"'rope_scaling.rope_type' is 'linear'.*'yarn'"),
        ("compress_ratios", 4, "'compress_ratios' is 4.*list"),
        ("compress_ratios", [0] * 42 + [2], r"'compress_ratios\[42\]' is 2"),
        ("compress_ratios", [0] * 42 + [4.0], r"'compress_ratios\[42\]' is 4.0.*integer"),
        ("compress_ratios", [0] * 43 + [4], r"'compress_ratios\[43\]' is 4.*MTP"),
        ("model_type", "deepseek_v3", "'model_type' is 'deepseek_v3'"),
    ],
)
def test_wrong_field_is_named(name: str, value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        DSV4Config.from_hf({**flash_json(), name: value})


def test_wrong_layer_type_is_named() -> None:
    fields = flash_json()
    del fields["compress_ratios"]
    fields["layer_types"] = ["sliding_attention"] * 42 + ["full_attention"]
    with pytest.raises(ValueError, match=r"'layer_types\[42\]' is 'full_attention'"):
        DSV4Config.from_hf(fields)
    fields["layer_types"][42] = "compressed_sparse_attention"
    assert DSV4Config.from_hf(fields).ratio(42) == 4
    fields["compress_rates"] = {"compressed_sparse_attention": 8}
    with pytest.raises(ValueError, match=r"'compress_rates.compressed_sparse_attention' is 8"):
        DSV4Config.from_hf(fields)


def test_rope_frequencies() -> None:
    """The values of SPEC 1.3 differ from those of a wrong base, factor or ramp."""
    config = DSV4Config.flash()
    plain = rope_frequencies(config, 0)
    assert torch.allclose(plain.double(), 10000.0 ** (-torch.arange(32).double() / 32), rtol=1e-6, atol=0)
    for ratio in (4, 128):
        f = rope_frequencies(config, ratio)
        assert f.dtype == torch.float32
        expected = {0: 1.0, 15: 3.635539e-3, 20: 2.969778e-4, 25: 5.372312e-6, 31: 5.680529e-7}
        for i, value in expected.items():
            assert float(f[i]) == pytest.approx(value, rel=3e-7), i
