"""Fixtures for server tests: tiny models, plugins of servers, and the server and the oracle of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from faulty_cache import FAULT_FILE, plugged
from recorded_drafts import DRAFTS
from recorded_prefills import SIZES, STEPS
from server_harness import Server, make_way, one_core_each, running

from benchmarks.reference.oracle import Oracle
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
    with plugged(folder, "faulty_cache", **{FAULT_FILE: str(folder / "fault")}):
        yield folder / "fault"


@pytest.fixture(scope="module")
def recorded_steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run prefill steps of up to RECORDED_TOKENS tokens like GPU graphs in the module's servers (recorded_prefills.py).

    Returns the file that records the steps.
    """
    folder = tmp_path_factory.mktemp("recorded_prefills")
    sizes = ",".join(str(size) for size in (4, 16, 40, request.module.RECORDED_TOKENS))
    with plugged(folder, "recorded_prefills", **{STEPS: str(folder / "steps"), SIZES: sizes}):
        yield folder / "steps"
        assert (folder / "steps").exists(), "no step was recorded"


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the drafts of the module's servers (recorded_drafts.py)."""
    folder = tmp_path_factory.mktemp("drafts")
    with plugged(tmp_path_factory.mktemp("recorder"), "recorded_drafts", **{DRAFTS: str(folder)}):
        yield folder


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    """Checkpoint folder with the fields MODEL of the module."""
    return tiny(**request.module.MODEL)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with FLAGS, OPTIONS and ENVIRONMENT of the module.

    A module whose server needs a plugin names its fixture in `usefixtures`.
    """
    flags, environment = request.module.FLAGS, dict(getattr(request.module, "ENVIRONMENT", {}))
    if "--tp-size" in flags:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = one_core_each(int(flags[flags.index("--tp-size") + 1]))
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        patch.dict(os.environ, environment),
        running(model, log, *flags, **getattr(request.module, "OPTIONS", {})) as server,
    ):
        yield make_way(server)
