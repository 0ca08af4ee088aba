"""A long start says what it does. Scripts with a compiler's name stand for compilers."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dsv4_sglang.srt.plugin import start_progress
from dsv4_sglang.srt.plugin.start_progress import compiling, logged, note_graph


@pytest.fixture
def compilers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two files of FlashInfer, of which one runs a second compiler, a file of an unknown library, another program."""
    script = "#!/bin/sh\n[ $# -gt 2 ] && {folder}/ptxas -arch sm_90a & echo started; read line\n"
    for name in ("nvcc", "ptxas", "another"):
        (tmp_path / name).write_text(script.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    commands = [
        ("nvcc", "-c", "/site/flashinfer/data/csrc/a.cu", "-O3"),
        ("nvcc", "-c", "/site/flashinfer/data/csrc/b.cu"),
        ("ptxas", "/tmp/unknown.ptx"),
        ("another", "/site/flashinfer/c.cu"),
    ]
    processes = [
        subprocess.Popen([tmp_path / name, *rest], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, *rest in commands
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
    yield processes
    for process in processes:
        process.communicate("end\n" * 2)


def test_files_are_counted_by_library(compilers: list[subprocess.Popen[str]]) -> None:
    assert compiling(psutil.Process(os.getpid())) == Counter({"FlashInfer": 2, "other kernels": 1})


def test_a_start_says_what_it_compiles_and_records(
    compilers: list[subprocess.Popen[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # a scheduler's parent is the server
    said = threading.Event()

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    handler, runner = Said(), SimpleNamespace(capture_num_tokens=[64, 256, 1024])

    def record(_runner: Any, size: int) -> int:
        with logged(interval=0.01):
            said.wait()
        return size

    start_progress.log.addHandler(handler)
    with caplog.at_level(logging.INFO, start_progress.__name__):
        assert note_graph(record, runner, 256) == 256
    start_progress.log.removeHandler(handler)
    assert caplog.messages[0] == (
        "dsv4_sglang start, 0 s: recording prefill graph 2 of 3 (256 tokens), "
        "compiling kernels of FlashInfer (2), other kernels (1)"
    )


def test_decode_graphs_are_counted_too() -> None:
    runner = SimpleNamespace(capture_num_tokens=None, capture_bs=[1, 2, 4])
    described = note_graph(lambda _runner, size: start_progress.describe(Counter()), runner, 4)
    assert described == "recording decode graph 1 of 3 (4 requests)"
    assert start_progress.describe(Counter()) == ""


def test_other_waits_print_no_progress() -> None:
    assert start_progress.describe(Counter()) == ""
