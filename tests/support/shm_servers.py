"""Servers with the storage `shm`: their flags, and what they store. Fixtures: `segments` and `start` of
tests/server/conftest.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache.folder import USED
from dsv4_sglang.srt.host_cache.stored_segments import stored_segments
from support.liveness import POLL_SECONDS, STUCK_SECONDS, Progress
from support.server import FP32, Server, ends, prompt

MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "2560", "--chunked-prefill-size", "256", "--enable-cache-report", "--random-seed", "1")
FLAGS += ("--enable-hierarchical-cache", "--hicache-storage-backend", "shm")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
OPTIONS = {**FP32, "max_snapshots": 12, "integrity_check": True}
TOLERANCE = 2e-3
PROMPT = prompt(400)
FOUND = 3 * 128
# Blocks of the prompt and one snapshot.
PAGES = 3 + 1

Start = Callable[..., AbstractContextManager[Server]]


def pages_of(folder: Path) -> list[int]:
    return [segment.pages for segment in stored_segments(folder)]


def wait_for_pages(server: Server, folder: Path, count: int) -> None:
    """Wait until the servers have published `count` pages."""
    progress = Progress(server.process)
    while sum(pages_of(folder)) < count:
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    assert sum(pages_of(folder)) == count


def wait_until_unused(folder: Path) -> None:
    """Wait until the servers have released their segments. The threads of a process may end a moment after it."""
    since = time.monotonic()
    while any(segment.state == USED for segment in stored_segments(folder)):
        assert time.monotonic() - since < STUCK_SECONDS
        time.sleep(0.05)


def tool(command: str, folder: Path, *options: str) -> str:
    """Return the output of `dsv4-sglang storage`."""
    ran = CliRunner().invoke(app, ["storage", command, str(folder), *options])
    assert ran.exit_code == 0, ran.output
    return ran.output


def kill(server: Server) -> None:
    """Kill all processes of a server at once."""
    with ends(server) as processes:
        for process in processes:
            process.kill()
