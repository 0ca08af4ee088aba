"""Fixtures for server tests: tiny models, fault injection and recorded prefill graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_cache import FAULT_FILE, entry_point
from recorded_prefills import SIZES, STEPS

from dsv4_sglang.testing.tiny import TinySpec, make_tiny
from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a factory of checkpoint folders with the given fields of `TinySpec`. Equal fields share a folder.

    Without a GPU the default is 16 attention heads. The cache does not depend on the number of heads, and 64 heads make
    attention of server and oracle three times as slow.
    """
    made: dict[Any, Path] = {}
    heads = 64 if torch.cuda.is_available() else 16

    def make(**fields: Any) -> Path:
        fields = {"heads": heads, **fields}
        key = tuple(sorted(fields.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny")
            make_tiny(made[key], TinySpec(**fields))
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_v41(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a factory of new checkpoint folders with the given fields of `TinyV41Spec`."""

    def make(**fields: Any) -> Path:
        return make_tiny_v41(tmp_path_factory.mktemp("tiny_v41"), TinyV41Spec(heads=16, **fields))

    return make


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """File whose content selects the fault in all servers that the module starts (faulty_cache.py)."""
    folder = tmp_path_factory.mktemp("fault")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*entry_point(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setenv(FAULT_FILE, str(folder / "fault"))
        yield folder / "fault"


@pytest.fixture(scope="module")
def recorded_steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run prefill steps of up to RECORDED_TOKENS tokens like GPU graphs in the module's servers (recorded_prefills.py).

    Returns the file that records the steps.
    """
    folder = tmp_path_factory.mktemp("recorded_prefills")
    with pytest.MonkeyPatch.context() as patch:
        plugin = entry_point(folder, "recorded_prefills")
        patch.setenv("PYTHONPATH", os.pathsep.join([*plugin, os.environ.get("PYTHONPATH", "")]))
        patch.setenv(STEPS, str(folder / "steps"))
        patch.setenv(SIZES, ",".join(str(size) for size in (4, 16, 40, request.module.RECORDED_TOKENS)))
        yield folder / "steps"
        assert (folder / "steps").exists(), "no step was recorded"
