"""Fixtures for server tests: tiny models, plugins of servers, and the server and the oracle of a module."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reference.oracle import Oracle
from reference.oracle_v41 import OracleV41
from support.segments import VARIABLE, new_folder
from support.server import CPU, Server, on_rank, running
from support.server_plugin import plugged

from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec
from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a factory of checkpoint folders with the given fields of `TinySpec`. Equal fields share a folder.

    Without a GPU the default is 8 attention heads, one per output group. The cache does not depend on the number of
    heads, and attention of 64 heads takes most of the time of a server and of the oracle.
    """
    made: dict[Any, Path] = {}
    heads = 8 if CPU else 64

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
        return make_tiny_v41(tmp_path_factory.mktemp("tiny_v41"), TinyV41Spec(**{"heads": 8, **fields}))

    return make


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Storage folder of all servers that the module starts."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def plugin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the plugin in all servers that the module starts (server_plugin.py).

    RECORDS of the module names the folders for what the plugin records. Prefill steps of up to GRAPH_TOKENS tokens run
    like GPU graphs. CUDA_LAYERS selects SGLang's CUDA layer classes.
    """
    folder = tmp_path_factory.mktemp("plugin")
    for name in getattr(request.module, "RECORDS", ()):
        (folder / name).mkdir()
    if getattr(request.module, "CUDA_LAYERS", False):
        (folder / "cuda_layers").touch()
    graph_tokens = getattr(request.module, "GRAPH_TOKENS", 0)
    if graph_tokens:
        (folder / "sizes").write_text(json.dumps([4, 16, 40, graph_tokens]))
    with plugged(folder):
        yield folder
        assert not graph_tokens or (folder / "steps").exists(), "no prefill step ran like a graph"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a module with SERVERS on every one of them, unless it names its servers (`only`)."""
    named = any(mark.args[0] == "name" for mark in metafunc.definition.iter_markers("parametrize"))
    if hasattr(metafunc.module, "SERVERS") and "name" in metafunc.fixturenames and not named:
        metafunc.parametrize("name", list(metafunc.module.SERVERS), indirect=True, scope="module")


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    """Name of the server among SERVERS of the module. Empty if the module has one server."""
    name = getattr(request, "param", "")
    needed = 4 if "four" in name else 2 if "two" in name else 1
    if 1 < needed > torch.cuda.device_count():
        pytest.skip(f"needs {needed} GPUs")
    return name


@pytest.fixture(scope="module")
def flags(request: pytest.FixtureRequest, name: str) -> tuple[str, ...]:
    """FLAGS of the module and the server's flags in SERVERS."""
    return (*request.module.FLAGS, *getattr(request.module, "SERVERS", {}).get(name, ()))


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, flags: tuple[str, ...], tiny: Callable[..., Path], tiny_v41: Callable[..., Path]
) -> Path:
    """Checkpoint folder with the fields MODEL of the module, and with the draft model that the server needs. A module
    with V41_MODEL has a V4.1 checkpoint with these fields."""
    if hasattr(request.module, "V41_MODEL"):
        return tiny_v41(**request.module.V41_MODEL)
    fields = {"nextn": "EAGLE" in flags, "dspark": 5 if "DSPARK" in flags else None}
    return tiny(**{**fields, **request.module.MODEL})


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, model: Path) -> Oracle | OracleV41:
    if hasattr(request.module, "V41_MODEL"):
        return OracleV41(model)
    return Oracle(model, device="cpu" if CPU else "cuda")


@pytest.fixture
def segments() -> Iterator[Path]:
    """Folder of all segments that servers of the test create with the storage `shm`."""
    # Disable SGLang's 5 s pause for diagnostics before exit.
    with (
        new_folder() as folder,
        patch.dict(os.environ, {VARIABLE: str(folder), "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}),
    ):
        yield folder


@pytest.fixture
def start(
    request: pytest.FixtureRequest, segments: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Server]]:
    """Return a function that starts a server with FLAGS and OPTIONS of the module, on the folder `segments`."""

    def started(*flags: str, model: Path = model, **options: Any) -> AbstractContextManager[Server]:
        log = tmp_path_factory.mktemp("server") / "log"
        return running(model, log, *request.module.FLAGS, *flags, **{**request.module.OPTIONS, **options})

    return started


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    name: str,
    flags: tuple[str, ...],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Server with the flags, and with OPTIONS, ENVIRONMENT and ENVIRONMENTS (by the server's name) of the module.

    A module whose server needs the plugin names the fixture in `usefixtures`. Servers of several names start one after
    the other; `-k` selects some, for parallel runs on several GPUs.
    """
    own = getattr(request.module, "ENVIRONMENTS", {}).get(name, {})
    environment = {**getattr(request.module, "ENVIRONMENT", {}), **own}
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        patch.dict(os.environ, environment),
        running(model, log, *flags, **getattr(request.module, "OPTIONS", {})) as server,
    ):
        # Prefix hits depend on the rank. Tests that assume a single cache leave the others idle.
        server.fields = on_rank(0) if "--dp-size" in flags else {}
        yield server
