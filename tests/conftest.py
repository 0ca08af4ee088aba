"""Selection, order and distribution of the tests.

Without CUDA, tests that need it are left out, and with CUDA those that serve on a CPU. What takes long comes last, or
first where several processes share the work by files, so that short files fill up the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import isolated
import pytest
import torch
from tiers import FULL

from benchmarks import ports

# CI runs the same examples every time; elsewhere hypothesis explores.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("default")

TESTS = Path(__file__).parent
LATER = ("slow", "sanitize", "server")
GPU_FILES = ("gpu/test_*.py", "server/test_*_gpu.py")
CUDA = torch.cuda.is_available()


def _gpu_files() -> list[Path]:
    return [path for pattern in GPU_FILES for path in TESTS.glob(pattern)]


collect_ignore = [] if CUDA else [str(path) for path in _gpu_files()]


def pytest_report_header() -> str:
    if CUDA:
        return "CUDA: tests of servers on a CPU are left out; tests/server/test_*_gpu.py serve on the GPU"
    return f"no CUDA: {len(_gpu_files())} files and the other tests with the marker gpu are left out"


def _rank(item: pytest.Item) -> int:
    """0 for a plain test, then 1, 2, 3 for those marked slow, sanitize, server."""
    return max((LATER.index(name) + 1 for name in LATER if item.get_closest_marker(name)), default=0)


def _is_left_out(item: pytest.Item) -> bool:
    gpu, server = (item.get_closest_marker(name) is not None for name in ("gpu", "server"))
    return (server and not gpu) if CUDA else gpu


def _is_full(item: pytest.Item) -> bool:
    file = item.path.relative_to(TESTS).as_posix()
    return not FULL.isdisjoint((file, f"{file}::{getattr(item, 'originalname', item.name)}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_full(item):
            item.add_marker("full")
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item)]
    items.sort(key=_rank, reverse="PYTEST_XDIST_WORKER" in os.environ)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return isolated.module(module_path, parent)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not isinstance(item, isolated.IsolatedTest):
        return None
    isolated.run(item)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    isolated.write(report)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute files, and tests that share a process together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return isolated.GROUPS.get(Path(path).name, path)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def only_ports(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of the only ports that this test gives to servers: from below all others'."""
    monkeypatch.setattr(ports, "FIRSTS", range(10000, 12000 - ports.SPAN))
    with ports.reserved() as first:
        monkeypatch.setattr(ports, "FIRSTS", range(first, first + 1))
    return first


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs a test on the CPU, and on the GPU where there is one."""
    return torch.device(request.param)
