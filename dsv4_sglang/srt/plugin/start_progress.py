"""Log lines of a long start: which kernels are being compiled, and how far the recording of CUDA graphs is.

A first start on a machine compiles for minutes, mostly in one process while the others wait in silence
(docs/guides/first_start.md).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 20.0
COMPILERS = ("nvcc", "ptxas")
# Part of a compiler's command line -> library whose kernel it compiles. The first match counts.
LIBRARIES = {
    "flashinfer": "FlashInfer",
    "deep_gemm": "DeepGEMM",
    "dsv4_sglang": "dsv4_sglang",
    "sgl_kernel": "SGLang",
    "triton": "Triton",
    "tilelang": "TileLang",
}
# The graph that this process records. The thread that logs reads it.
_recording = ""


def note_graph(original: Callable[..., Any], runner: Any, size: int, *arguments: Any, **named: Any) -> Any:
    """AROUND `capture_one_shape` of SGLang's runners: note which graph is being recorded. The largest comes first."""
    global _recording
    # Only the runner of prefill steps has sizes in tokens.
    tokens = getattr(runner, "capture_num_tokens", None)
    sizes = sorted(tokens or runner.capture_bs, reverse=True)
    kind, unit = ("prefill", "tokens") if tokens else ("decode", "requests")
    _recording = f"{kind} graph {sizes.index(size) + 1} of {len(sizes)} ({size} {unit})"
    try:
        return original(runner, size, *arguments, **named)
    finally:
        _recording = ""


def compiling(server: psutil.Process) -> Counter[str]:
    """Return the number of files that processes of a server compile, by library."""
    found: Counter[str] = Counter()
    for process in server.children(recursive=True):
        # A process may end at any time.
        with suppress(psutil.Error):
            parent = process.parent()
            if process.name() in COMPILERS and (parent is None or parent.name() not in COMPILERS):
                command = " ".join(process.cmdline())
                found[next((name for part, name in LIBRARIES.items() if part in command), "other kernels")] += 1
    return found


def describe(files: Counter[str]) -> str:
    """Return what a start does now, or an empty string if it neither compiles nor records."""
    what = [f"recording {_recording}"] if _recording else []
    if files:
        what.append("compiling kernels of " + ", ".join(f"{name} ({count})" for name, count in sorted(files.items())))
    return ", ".join(what)


@contextmanager
def logged(interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Context manager: log every `interval` seconds what the start does."""
    server, begin, ended = psutil.Process(os.getppid()), time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(interval):
            if what := describe(compiling(server)):
                log.info("dsv4_sglang start, %d s: %s", time.monotonic() - begin, what)

    thread = threading.Thread(target=report, name="dsv4_sglang start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
