"""Tests of the options in the JSON of the opt-in flag and of the memory sizing, without SGLang."""

from __future__ import annotations

import json
import os

import pytest
import torch

from dsv4_sglang.cache import CacheLayout
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options, from_override_args
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.memory.sizing import (
    GIB,
    StateDemand,
    demand_of,
    memory_after_slots,
    require_context,
    table,
    tokens_of_pool,
)
from dsv4_sglang.srt.plugin import activate
from dsv4_sglang.testing.tiny_config import TinySpec, config_json


def parse(**options: object) -> Options | None:
    return from_override_args(json.dumps({"dsv4_sglang": options}))


def test_opting_in() -> None:
    assert from_override_args(None) is None
    assert from_override_args("{}") is None
    assert from_override_args('{"hidden_size": 128}') is None
    assert parse() == Options()
    assert parse(indexer_format="nvfp4", snapshot_interval=128, max_snapshots=64) == Options(
        indexer_format="nvfp4", snapshot_interval=128, max_snapshots=64
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"indexer": "mxfp4"}, ['"indexer"', "indexer_format", "snapshot_interval"]),
        ({"hca_state": "raw"}, ['"hca_state"', "valid options"]),
        ({"indexer_format": "fp8"}, ["indexer_format", '"fp8"', '"mxfp4"', '"nvfp4"']),
        ({"indexer_formt": 1}, ['"indexer_formt"; did you mean indexer_format?']),
        ({"snapshot_interval": "256"}, ["snapshot_interval", '"256"', "whole number"]),
        ({"snapshot_interval": 200}, ["snapshot_interval", "200", "multiple of 128"]),
        ({"integrity_check": 1}, ["integrity_check", "1", "true | false"]),
        ({"host_load_timeout_seconds": 0}, ["host_load_timeout_seconds is 0", "expected 1 or more"]),
    ],
)
def test_bad_options_are_named(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("key", ["dsv4_sgalng", "DSV4-SGLANG", "dsv4", "sglang"])
def test_a_misspelt_key_is_rejected(key: str) -> None:
    for text in (json.dumps({key: {}}), json.dumps({"dsv4_sglang": {}, key: {}})):
        with pytest.raises(LaunchError) as error:
            from_override_args(text)
        assert str(error.value).startswith(f'"{key}" in --json-model-override-args ')
        assert str(error.value).endswith('did you mean "dsv4_sglang"?')


def test_an_option_outside_the_braces_is_rejected() -> None:
    with pytest.raises(LaunchError, match=r'^"max_snapshots" in .* inside .*\{"dsv4_sglang": \{"max_snapshots": '):
        from_override_args('{"max_snapshots": 8}')


def test_keys_of_models_are_not_taken_for_ours() -> None:
    keys = {
        **config_json(TinySpec(dspark=5)),
        "has_dsv41_vision": 1,
        "langs": 1,
        "rope_scaling": 1,
    }
    assert from_override_args(json.dumps(keys)) is None


@pytest.fixture(scope="module")
def flash() -> CacheLayout:
    return served_layout(DSV4Config.flash(), torch.float8_e4m3fn, Options(), "cpu")


def test_state_demand(flash: CacheLayout) -> None:
    assert demand_of(flash, 84, running=4, step_tokens=512, max_snapshots=100) == StateDemand(4, 4, 100)
    assert demand_of(flash, 84, running=4, step_tokens=100).slots == 5
    shares = demand_of(flash, 84, running=256, step_tokens=8192)
    assert shares == StateDemand(256, 64, 7 * GIB // flash.snapshot_bytes)
    assert demand_of(flash, 1, running=256, step_tokens=8192).snapshots == 512, "two a running request"
    with pytest.raises(ValueError, match=r"max_snapshots is 7; 4 running requests.* at least 8"):
        demand_of(flash, 84, running=4, step_tokens=512, max_snapshots=7)


def test_state_slots_come_first(flash: CacheLayout) -> None:
    demand = StateDemand(256, 64, 1000)
    taken = 321 * flash.slot_bytes + 1000 * flash.snapshot_bytes
    assert memory_after_slots(flash, demand, 80) == 80 - taken / GIB
    with pytest.raises(ValueError, match=r"320 slots of 4\.63 MB and 1000 snapshots .* of 4\.00 GiB.*--max-running"):
        memory_after_slots(flash, demand, 4)


def test_a_pool_too_small_says_what_fits(flash: CacheLayout) -> None:
    require_context(flash, 4352, 4096, "it gives")
    with pytest.raises(ValueError, match=r"the 0\.00 GiB that weights and state slots leave hold 0 tokens"):
        tokens_of_pool(flash, 1000, 128)
    with pytest.raises(ValueError, match=r"it gives 4352 tokens.*--context-length 4097 needs 4480.*What fits: .* 4096"):
        require_context(flash, 4352, 4097, "it gives")


def test_table_adds_up(flash: CacheLayout) -> None:
    lines = table(flash, 1 << 20, StateDemand(256, 64, 1000)).splitlines()
    total = float(lines[0].rsplit("; ", 1)[1].split()[0])
    assert sum(float(line.split()[-2]) for line in lines[1:]) == pytest.approx(total, abs=0.01)
    assert "draft" not in lines[0]
    drafting = served_layout(DSV4Config.flash(), torch.float8_e4m3fn, Options(), "cpu", draft_tokens=4, draft_layers=1)
    first = table(drafting, 1 << 20, StateDemand(256, 64, 1000)).splitlines()[0]
    assert "1048576 tokens in 8192 blocks" in first
    assert "320 state slots of 6586752 bytes (256 requests" in first and "1000 snapshots of 3821952 bytes" in first
    assert "room for 4 draft tokens each; rings of 43 layers and 1 of the draft model)" in first


@pytest.mark.parametrize("hidden, setting", [(256, "0"), (1024, "0"), (2048, None), (4096, None), (7168, None)])
def test_fused_hyper_connections_need_wide_states(monkeypatch: pytest.MonkeyPatch, hidden: int, setting: str | None):
    """V4-Flash has 4,096 channels, V4-Pro 7,168. SGLang's kernel gives wrong results for a tiny model."""
    for name in ("SGLANG_OPT_FUSE_MHC_POST_PRE", "SGLANG_OPT_FP8_WO_A_GEMM", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    activate._set_environment({"hidden_size": hidden, "quantization_config": {}})
    assert os.environ.get("SGLANG_OPT_FUSE_MHC_POST_PRE") == setting
