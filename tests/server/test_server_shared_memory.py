"""Servers with the storage `shm`: the next start, and other servers of the machine, find the rows of a host cache."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from support.liveness import POLL_SECONDS, STUCK_SECONDS, Progress
from support.segments import VARIABLE, new_folder
from support.server import (
    BROKEN_OFF,
    FP32,
    Server,
    assert_same,
    empty_device,
    ends,
    on_rank,
    one_core_each,
    prompt,
    running,
    schedulers,
)
from support.server_plugin import broken
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache.folder import USED
from dsv4_sglang.srt.host_cache.stored_segments import stored_segments

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "2560", "--chunked-prefill-size", "256", "--enable-cache-report", "--random-seed", "1")
FLAGS += ("--enable-hierarchical-cache", "--hicache-storage-backend", "shm")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
OPTIONS = {**FP32, "max_snapshots": 12, "integrity_check": True}
TOLERANCE = 2e-3
CUDA_LAYERS = True
PROMPT = prompt(400)
FOUND = 3 * 128
# Blocks of the prompt and one snapshot.
PAGES = 3 + 1

Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def segments() -> Iterator[Path]:
    """Folder of all segments that servers of the test create."""
    with (
        new_folder() as folder,
        patch.dict(os.environ, {VARIABLE: str(folder), "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}),
    ):
        yield folder


@pytest.fixture
def start(segments: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that starts a server."""

    def started(*flags: str, model: Path = model, **options: Any) -> AbstractContextManager[Server]:
        log = tmp_path_factory.mktemp("server") / "log"
        return running(model, log, *FLAGS, *flags, **{**OPTIONS, **options})

    return started


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


def test_next_start_finds_the_rows(start: Start, segments: Path, tiny: Callable[..., Path]) -> None:
    """A server is killed. The next one finds the rows of each tenant; one with other weights or formats does not."""
    with start() as server:
        first = server.generate(PROMPT)
        assert server.generate(PROMPT, extra_key="x").cached == 0
        wait_for_pages(server, segments, 2 * PAGES)
        kill(server)
    (left,) = stored_segments(segments)
    assert left.pages == 2 * PAGES
    with start(model=tiny(**{**MODEL, "seed": 9})) as server:
        assert server.generate(PROMPT).cached == 0
        wait_for_pages(server, segments, 3 * PAGES)
    with start(indexer_format="mxfp4") as server:
        assert server.generate(PROMPT).cached == 0
        wait_for_pages(server, segments, 4 * PAGES)
    with start() as server:
        for fields in ({}, {"extra_key": "x"}):
            got = server.generate(PROMPT, **fields)
            assert got.cached == FOUND
            assert_same(got, first, TOLERANCE)
        assert server.generate(PROMPT, extra_key="y").cached == 0
        assert server.published()["hit_tokens_storage"] == 2 * FOUND
        wait_for_pages(server, segments, 5 * PAGES)
        server.wait_idle()
        assert left.path in [segment.path for segment in stored_segments(segments) if segment.state == USED]
        name = server.get("/server_info")["model_path"]
        listed = tool("ls", segments).splitlines()
        assert any(re.search(rf"{name} +│ used +│ +{3 * PAGES} ", line) for line in listed), listed
        assert tool("verify", segments) == f"{5 * PAGES} pages are sound, 0 are damaged, 0 files were not checked\n"
        assert "removed 1 files" in (cleared := tool("clear", segments, "--yes")) and "kept, in use: 1" in cleared
        assert server.generate(PROMPT, extra_key="x").cached == FOUND
    wait_until_unused(segments)
    assert "removed 1 files" in tool("clear", segments, "--yes")
    assert not list(segments.iterdir())


def test_servers_find_rows_of_each_other(start: Start, segments: Path) -> None:
    """Two servers of one machine: each finds what the other has served, also when that one was killed in a save."""
    other = prompt(400, seed=1)
    with start() as one, start() as two:
        first = one.generate(PROMPT)
        wait_for_pages(one, segments, PAGES)
        got = two.generate(PROMPT)
        assert got.cached == FOUND
        assert_same(got, first, TOLERANCE)
        second = two.generate(other)
        assert second.cached == 0
        wait_for_pages(two, segments, 3 * PAGES)
        got = one.generate(other)
        assert got.cached == FOUND
        assert_same(got, second, TOLERANCE)
        assert one.published()["hit_tokens_storage"] == two.published()["hit_tokens_storage"] == FOUND
        kill(two)
        assert one.generate(PROMPT + prompt(10, seed=7)).cached == FOUND
        one.wait_idle()
    assert len(list(stored_segments(segments))) == 2


def test_killed_processes_of_a_group(start: Start, segments: Path, plugin: Path) -> None:
    """One of two processes with the same rows is killed in a save, in a load, and while it owns the segment.

    A prompt whose save was interrupted is not found.
    """
    kept, interrupted = prompt(400, seed=50), prompt(400, seed=51)
    flags, found = ("--tp-size", "2"), []
    with patch.dict(os.environ, {"SGLANG_CPU_OMP_THREADS_BIND": one_core_each(2)}):
        with start(*flags) as server:
            reference = server.generate(kept)
            wait_for_pages(server, segments, PAGES)
            with ends(server), broken(plugin, "a process is killed in a save"), pytest.raises(BROKEN_OFF):
                server.generate(interrupted)
                server.generate(prompt(5))
                server.generate(prompt(6))
        with start(*flags) as server:
            assert server.generate(interrupted).cached == 0
            found.append(server.generate(kept))
            empty_device(server)
            with ends(server), broken(plugin, "a process is killed in a load"), pytest.raises(BROKEN_OFF):
                server.generate(kept)
        with start(*flags) as server:
            found.append(server.generate(kept))
            answer = server.begin(kept, 500, 2)
            with ends(server) as processes:
                owner, other = schedulers(processes)
                assert opened(owner, segments) > opened(other, segments)
                owner.kill()
                with pytest.raises(BROKEN_OFF):
                    answer()
        with start(*flags) as server:
            found.append(server.generate(kept))
            server.wait_idle()
    for got in found:
        assert got.cached == FOUND
        assert_same(got, reference, TOLERANCE)
    assert len(list(stored_segments(segments))) == 1, "each server has taken over the rows of the one before"


def opened(process: psutil.Process, folder: Path) -> int:
    """Return the number of files of a folder that a process has open."""
    return sum(file.path.startswith(str(folder)) for file in process.open_files())


def test_ranks_find_rows_of_each_other(start: Start, segments: Path) -> None:
    """Each rank of DP attention has a segment, finds the conversations of the other, and its own after a restart."""
    other = prompt(400, seed=1)
    flags = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    with patch.dict(os.environ, {"SGLANG_CPU_OMP_THREADS_BIND": one_core_each(2)}):
        with start(*flags) as server:
            first = server.generate(PROMPT, **on_rank(0))
            wait_for_pages(server, segments, PAGES)
            got = server.generate(PROMPT, **on_rank(1))
            assert got.cached == FOUND
            assert_same(got, first, TOLERANCE)
            assert server.generate(other, **on_rank(1)).cached == 0
            wait_for_pages(server, segments, 3 * PAGES)
            kill(server)
        with start(*flags) as server:
            for rank in (0, 1):
                for ids in (PROMPT, other):
                    assert server.generate(ids, **on_rank(rank)).cached == FOUND
            server.wait_idle()
    assert len(list(stored_segments(segments))) == 2
