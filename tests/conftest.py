"""Order and selection of the tests: GPU tests are skipped without CUDA, what takes long comes last.

Unless several processes share the work by files (make test): then it comes first, and short files fill up the end.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from benchmarks import ports

# CI runs the same examples every time; elsewhere hypothesis explores.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("default")

LATER = ("slow", "sanitize", "server")


def _rank(item: pytest.Item) -> int:
    """0 for a plain test, then 1, 2, 3 for those marked slow, sanitize, server."""
    return max((LATER.index(name) + 1 for name in LATER if item.get_closest_marker(name)), default=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank, reverse="PYTEST_XDIST_WORKER" in os.environ)
    if torch.cuda.is_available():
        skip = pytest.mark.skip(reason="serves on a CPU; test_server_gpu.py serves on the GPU")
        for item in items:
            if item.get_closest_marker("server") and not item.get_closest_marker("gpu"):
                item.add_marker(skip)
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


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
