"""Tests of the name of a model's pages: it changes with everything that changes their bytes, and its length is
bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.storage import key, put

from dsv4_sglang.cache import CacheLayout, v4_specs
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.host_cache.folder import FORMER_WEIGHTS, UNUSED, USED, state_of_name, stored_files
from dsv4_sglang.srt.host_cache.page_names import (
    LABEL_CHARACTERS,
    SAMPLE_STEP,
    WEIGHT_FLAGS,
    digest_of_files,
    page_name,
    weight_facts,
)
from dsv4_sglang.srt.launch.options import model_overrides

# Flags that decide weights or arithmetic, written out: a flag that is left out of `WEIGHT_FLAGS` is seen.
FLAGS = {
    "revision": "b",
    "dtype": "float16",
    "quantization": "fp8",
    "tp_size": 8,
    "weight_version": "2",
    "load_format": "dummy",
    "custom_weight_loader": ["package.module.load"],
    "model_loader_extra_config": '{"enable_multithread_load": true}',
    "speculative_draft_model_path": "org/draft",
    "speculative_draft_model_revision": "b",
    "speculative_draft_load_format": "dummy",
    "speculative_draft_model_quantization": "fp8",
}


def flags_of(model: Path | str, **given: Any) -> SimpleNamespace:
    values = {**dict.fromkeys(WEIGHT_FLAGS), "load_format": "auto", "tp_size": 4, "random_seed": 1}
    return SimpleNamespace(**{**values, "model_path": str(model), "download_dir": None, **given})


def name_of(
    model: Path | str,
    kv_format: str = "fp8",
    key_format: str = "mxfp4",
    overrides: str | None = None,
    model_name: str | None = "m",
    **given: Any,
) -> str:
    config = DSV4Config.flash()
    formats = {"kv_format": kv_format, "key_format": key_format}
    layout = CacheLayout(v4_specs(config, build_schedule(config), **formats), torch.device("cpu"), sm100=False)
    row_bytes = (layout.block_bytes, layout.snapshot_bytes)
    facts = weight_facts(flags_of(model, **given))
    return page_name(model_name, layout, row_bytes, overrides=model_overrides(overrides), **facts)


def model_at(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.manual_seed(0)
    save_file(weights(), folder / "model.safetensors")
    return folder


def weights() -> dict[str, torch.Tensor]:
    """Three tensors. The middle one starts and ends far from the ends of the file."""
    return {name: torch.rand(3 * SAMPLE_STEP // 8) for name in ("a.first", "b.attention", "c.last")}


def test_flags_and_formats_are_in_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    names = [name_of(model, kv_format=row, key_format=key) for row in ("fp8", "bf16") for key in ("mxfp4", "nvfp4")]
    assert names[0] == name_of(model)
    assert set(WEIGHT_FLAGS) == set(FLAGS)
    names += [name_of(model, **{flag: value}) for flag, value in FLAGS.items()]
    names.append(name_of(model, load_format="dummy", random_seed=2))
    names.append(name_of(model, speculative_draft_load_format="dummy", random_seed=2))
    assert name_of(model, random_seed=2) == names[0], "a seed draws no weights that are loaded"
    with monkeypatch.context() as patch:
        patch.setattr("dsv4_sglang.srt.host_cache.page_names.version", lambda package: "0.0.0")
        names.append(name_of(model))
    for same in (None, "{}", '{"dsv4_sglang": {"integrity_check": true}}'):
        assert name_of(model, overrides=same) == names[0], "options that change bytes are in the layout"
    names += [name_of(model, overrides='{"rope_theta": 1}'), name_of(model, model_name="n")]
    # A model that is not a local folder is identified by its name.
    names += [name_of("org/model"), name_of("org/other"), name_of("org/model", revision="b")]
    assert len(set(names)) == len(names)
    assert names[0].startswith("m-dsv4v4-fp8-mxfp4-")


def test_both_formats_of_entries_are_in_the_name(tmp_path: Path) -> None:
    layout = CacheLayout(v41_specs(V41Config.flash()), torch.device("cpu"))
    name = page_name("m" * LABEL_CHARACTERS, layout, (layout.block_bytes, layout.snapshot_bytes))
    assert "-mxfp8-nvfp4-mxfp4-" in name and len(name) <= 99
    updated = f"{name}-{'0' * 16}"
    for of in (name, updated):
        put(tmp_path, f"{key(1)}_{of}.bin", 0)
    assert {found.name: found.state for found in stored_files(tmp_path)} == {name: UNUSED, updated: FORMER_WEIGHTS}
    assert state_of_name(name, used=True) == USED


def no_attention(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "b.attention": torch.zeros_like(tensors["b.attention"])}, model / "model.safetensors")


def swapped(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["a.first"], tensors["b.attention"] = tensors["b.attention"], tensors["a.first"]
    save_file(tensors, model / "model.safetensors")


def new_bytes(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content) and None


CHANGES: dict[str, Callable[[Path], None]] = {
    "attention zeroed": no_attention,
    "two tensors swapped": swapped,
    "another config": new_bytes("config.json", b"{ }"),
    "another file": new_bytes("more.safetensors", b"version https://git-lfs"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_in_the_name(tmp_path: Path, change: str) -> None:
    model = model_at(tmp_path / "model")
    before = name_of(model)
    assert name_of(model) == before
    CHANGES[change](model)
    assert name_of(model) != before


def test_weights_of_torch_are_in_the_name(tmp_path: Path) -> None:
    tensors, digests = weights(), []
    for _ in range(2):
        torch.save(tensors, tmp_path / "model.pt")
        digests.append(digest_of_files(tmp_path))
        tensors["b.attention"][: 1 << 19] += 1
    assert digests[0] != digests[1]


def test_the_same_weights_elsewhere_have_the_same_name(tmp_path: Path) -> None:
    assert name_of(model_at(tmp_path / "a")) == name_of(model_at(tmp_path / "b"))


def test_draft_weights_are_in_the_name(tmp_path: Path) -> None:
    model, draft = model_at(tmp_path / "model"), model_at(tmp_path / "draft")
    names = {name_of(model), name_of(model, speculative_draft_model_path=str(draft))}
    no_attention(draft)
    names.add(name_of(model, speculative_draft_model_path=str(draft)))
    assert len(names) == 3


def test_hub_model_is_named_by_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name contains the revision that the branch pointed to when it was downloaded."""
    model = model_at(tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(model / "config.json"))
    before = name_of("org/model")
    no_attention(model)
    assert name_of("org/model") != before


@pytest.mark.parametrize("called", ["org/model", "/data/" + "snapshots/" * 30 + "f" * 40, "modèle_β", "", None])
def test_names_are_short_and_plain(called: str | None) -> None:
    name = name_of("org/model", model_name=called)
    assert len(name) <= 99 and name.isascii() and "/" not in name and "_" not in name
