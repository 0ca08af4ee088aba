"""Servers whose memory becomes scarce while they run: a full file system, a control group, limits of a process.

Nobody finds a wrong row, no request hangs, and other servers continue.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from support import server as server_module
from support.liveness import Process, wait
from support.memory_limits import ControlGroup, control_group, file_system, resized
from support.segments import VARIABLE
from support.server import BROKEN_OFF, assert_same, ends, launched, prompt, schedulers
from support.shm_servers import (
    FLAGS,
    FOUND,
    MODEL,
    OPTIONS,
    PAGES,
    PROMPT,
    TOLERANCE,
    Start,
    kill,
    tool,
    wait_for_pages,
)

pytestmark = [pytest.mark.server, pytest.mark.full]

__all__ = ["FLAGS", "MODEL", "OPTIONS"]  # for fixtures
OTHER = prompt(400, seed=1)


def rejected(model: Path, log: Path, *flags: str) -> str:
    """Return the line with which this package rejects a start."""
    with launched(model, log, ["--port", "1", *FLAGS, *flags], OPTIONS) as process:
        assert wait(process, log) != 0
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("dsv4_sglang: ")]
    return line


def test_file_system_becomes_full(start: Start, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not take the memory of rows away. A server with full memory goes on, and so does the next one."""
    folder = tmp_path / "memory"
    with file_system(folder, 1 << 28):
        monkeypatch.setenv(VARIABLE, str(folder))
        with start() as server:
            first = server.generate(PROMPT)
            wait_for_pages(server, folder, PAGES)
            used = sum(path.stat().st_blocks for path in folder.iterdir()) * 512
            assert not resized(folder, f"size={used - 4096}")
            assert resized(folder, f"size={used}") and not os.statvfs(folder).f_bfree
            second = server.generate(OTHER)
            assert second.cached == 0
            wait_for_pages(server, folder, 2 * PAGES)
            server.flush()
            got = server.generate(PROMPT)
            assert got.cached == FOUND
            assert_same(got, first, TOLERANCE)
            before = sorted(folder.iterdir())
            assert " bytes requested in " in rejected(model, tmp_path / "log")
            assert resized(folder, f"size={1 << 28},nr_inodes={len(before) + 1}")
            assert "No space left on device" in rejected(model, tmp_path / "log")
            assert resized(folder, f"size={used},nr_inodes=0")
            assert sorted(folder.iterdir()) == before
            kill(server)
        assert " bytes requested in " in rejected(model, tmp_path / "log", "--hicache-ratio", "4")
        with start() as server:
            for ids, reference in ((PROMPT, first), (OTHER, second)):
                got = server.generate(ids)
                assert got.cached == FOUND
                assert_same(got, reference, TOLERANCE)
            server.wait_idle()
        assert f"{2 * PAGES} pages are sound, 0 are damaged" in tool("verify", folder)


@contextmanager
def launched_in(group: ControlGroup, *arguments: Any) -> Iterator[Process]:
    """Context manager with a server's process in a control group. It has no children yet."""
    with launched(*arguments) as process:
        group.add(process.pid)
        yield process


def test_system_ends_a_process_for_lack_of_memory(start: Start, segments: Path) -> None:
    """The system ends one of two processes, and the server ends. Another server finds its rows, as the next one does.

    No request waits, and the row that was written then is not found.
    """
    start = partial(start, "--tp-size", "2")
    with (
        control_group(f"dsv4_sglang-test-{os.getpid()}") as group,
        start() as other,
    ):
        with patch.object(server_module, "launched", partial(launched_in, group)), start() as server:
            first = server.generate(PROMPT)
            wait_for_pages(server, segments, PAGES)
            answer = server.begin(OTHER, 500, 2)
            group.lower(1 << 20)
            with ends(server) as processes:
                assert {process.pid for process in processes} <= group.processes()
                group.exhaust(64 << 20)
                with pytest.raises(BROKEN_OFF):
                    answer()
            # The launcher sees the end of the process, or the other one tells it first that its peer is gone.
            assert re.search(
                r"Subprocess \w+ \(pid=\d+\) crashed with exit code -9\.|one child failed", server.log_text()
            )
        group.lift()
        second = other.cold(OTHER)
        with start() as server:
            for found in (other, server):
                got = found.generate(PROMPT)
                assert got.cached == FOUND
                assert_same(got, first, TOLERANCE)
                assert_same(found.generate(OTHER), second, TOLERANCE)
                found.wait_idle()
        assert " 0 are damaged" in tool("verify", segments)


def test_files_cannot_be_opened(start: Start, segments: Path) -> None:
    """A process that reaches its limit of open files finds its own rows, and those of others when it can open files."""
    with start() as other, start() as server:
        for _ in range(2):  # SGLang opens files when it first needs them
            server.generate(OTHER)
            server.flush()
        references = other.generate(PROMPT), other.cold(OTHER)
        wait_for_pages(other, segments, 3 * PAGES)
        own = psutil.Process(server.process.pid)
        (scheduler,) = schedulers(own.children(recursive=True))
        before = scheduler.rlimit(psutil.RLIMIT_NOFILE)
        scheduler.rlimit(psutil.RLIMIT_NOFILE, (scheduler.num_fds(), before[1]))
        for ids, found in ((PROMPT, 0), (OTHER, FOUND), (PROMPT, FOUND)):
            got = server.generate(ids)
            assert got.cached == found
            assert_same(got, references[ids is OTHER], TOLERANCE)
            server.wait_idle()
            server.flush()
        scheduler.rlimit(psutil.RLIMIT_NOFILE, before)
        third = other.generate(prompt(400, seed=2))
        wait_for_pages(other, segments, 5 * PAGES)
        got = server.generate(prompt(400, seed=2))
        assert got.cached == FOUND
        assert_same(got, third, TOLERANCE)
