"""Select, order and distribute the tests.

A machine without CUDA deselects the GPU tests. A machine with CUDA deselects the tests that run a server on the CPU.
Slow tests run last. When several processes share the files they run first, and short files fill up the end.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes of SGLang import the modules of other models than DeepSeek-V4 only to register them.
os.environ.setdefault(
    "SGLANG_DISABLED_MODEL_ARCHS",
    ",".join(
        file.stem
        for file in Path(find_spec("sglang").origin).parent.glob("srt/models/*.py")
        if not file.stem.startswith("deepseek_v4")
    ),
)

import hypothesis
import pytest
import torch
from support import isolated

from benchmarks import ports

# CI runs the same examples every time. Elsewhere hypothesis explores new ones.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("default")

TESTS = Path(__file__).parent
LATER = ("slow", "sanitize", "server")
GPU_FILES = ("gpu/test_*.py", "server/test_*_gpu.py")
CUDA = torch.cuda.is_available()


collect_ignore_glob = [] if CUDA else list(GPU_FILES)


def pytest_report_header() -> str:
    if CUDA:
        return "CUDA: tests of servers on a CPU are left out; tests/server/test_*_gpu.py serve on the GPU"
    return f"no CUDA: {', '.join(GPU_FILES)} and the other tests with the marker gpu are left out"


def _rank(item: pytest.Item) -> int:
    """Return 0 for a plain test, and 1, 2 or 3 for a test marked slow, sanitize or server."""
    return max((LATER.index(name) + 1 for name in LATER if item.get_closest_marker(name)), default=0)


def _is_left_out(item: pytest.Item) -> bool:
    gpu, server = (item.get_closest_marker(name) is not None for name in ("gpu", "server"))
    return (server and not gpu) if CUDA else gpu


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item)]
    items.sort(key=_rank, reverse="PYTEST_XDIST_WORKER" in os.environ)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return isolated.module(module_path, parent)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, isolated.IsolatedTest):
        return None
    isolated.run(item, nextitem)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    isolated.write(report)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute by file, and keep tests that share a process together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return isolated.GROUPS.get(Path(path).name, path)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def only_ports(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the first port of a range that only this test uses. The range is below the ports of all other tests."""
    monkeypatch.setattr(ports, "FIRSTS", range(10000, 12000 - ports.SPAN))
    with ports.reserved() as first:
        monkeypatch.setattr(ports, "FIRSTS", range(first, first + 1))
    return first


@pytest.fixture(scope="session")
def automodel() -> ModuleType:
    """Return `reference.automodel`. It is imported when a test needs it, because this takes 5 s."""
    pytest.importorskip("nemo_automodel", reason="tools/setup.sh installs it with the CPU recipe")
    from reference import automodel

    return automodel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run a test on the CPU, and also on the GPU if there is one."""
    return torch.device(request.param)
