"""Two processes with one copy of the host cache: memory, agreement, and killed processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from support.liveness import POLL_SECONDS, Progress
from support.memory_maps import shared_mappings
from support.server import (
    BROKEN_OFF,
    DRAFTS,
    FP32,
    HOST_CACHE,
    Server,
    assert_one_copy,
    assert_same,
    empty_device,
    ends,
    mappings_of,
    only,
    prompt,
    running,
)
from support.server_plugin import broken

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

TOLERANCE = 1e-4
MODEL = {"seed": 0, "ratios": (0, 4, 128)}
# 16 device blocks and a host cache of four times that size. The device saves what it evicts.
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "2048", "--tp-size", "2")
FLAGS += ("--max-running-requests", "6", "--enable-metrics", *HOST_CACHE, "--hicache-write-policy", "write_back")
SERVERS = {"no drafts": (), "3 drafts": DRAFTS}
OPTIONS = {**FP32, "max_snapshots": 12, "integrity_check": True}
CUDA_LAYERS = True
# Disable SGLang's 5 s pause for diagnostics before exit.
ENVIRONMENT = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
PAGES = 3  # of a prompt of 300 tokens: two blocks and a snapshot


def test_processes_hold_one_copy(server: Server) -> None:
    assert_one_copy(server)


def test_rows_are_loaded_when_all_have_saved_them(server: Server, plugin: Path) -> None:
    """A load makes room by an eviction, and the next request of the batch loads what was evicted.

    The second process saves slowly: without an agreement the first one would load rows that are not written. Which
    prompt is evicted is up to the policy.
    """
    loaded, evicted = prompt(900, seed=1), [prompt(300, seed=2 + i) for i in range(6)]
    expected = server.cold(loaded)
    for other in reversed(evicted):
        reference = server.cold(other)
        server.flush()
        server.generate(loaded)
        empty_device(server)
        for ids in evicted:
            server.generate(ids)
        before = server.metrics()
        with broken(plugin, "a process saves slowly"):
            first, second = server.generate_batch([loaded, other])
        after = server.metrics()
        assert (first.cached, second.cached) == (896, 256)
        assert_same(first, expected, TOLERANCE)
        assert_same(second, reference, TOLERANCE)
        server.wait_idle()
        if after["hit_tokens_host"] - before["hit_tokens_host"] == 896 + 256:
            return
    pytest.fail("no load evicted what the next request needs, so the test checks nothing")


def segments(server: Server) -> set[int]:
    return {found["inode"] for process in mappings_of(server) for found in process}


def wait_for_pages(server: Server, folder: Path, count: int) -> None:
    progress = Progress(server.process)
    while len(list(folder.glob("*.bin"))) < count:
        progress.check()
        time.sleep(POLL_SECONDS / 10)


def mapped(process: int) -> list[dict[str, int]]:
    """Return the shared mappings of a process, none if it has ended."""
    try:
        return shared_mappings(process)
    except OSError:
        return []


@only("no drafts")
def test_killed_processes_leave_nothing(model: Path, plugin: Path, tmp_path: Path) -> None:
    """A process is killed in a save, in a load, and all at once. Memory is free then, and stored pages are right.

    The storage has the pages of `kept`, and none of a prompt whose save was interrupted.
    """
    kept, interrupted = prompt(300, seed=50), prompt(300, seed=51)
    folder, used = tmp_path / "pages", set()
    environment = {
        **ENVIRONMENT,
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder),
    }
    flags = (*FLAGS, "--hicache-storage-backend", "file", "--hicache-write-policy", "write_through")
    with patch.dict(os.environ, environment):
        with running(model, tmp_path / "first", *flags, **OPTIONS) as server:
            used |= segments(server)
            reference = server.generate(kept)
            wait_for_pages(server, folder, PAGES)
            with ends(server), broken(plugin, "a process is killed in a save"), pytest.raises(BROKEN_OFF):
                server.generate(interrupted)
                server.generate(prompt(5))
                server.generate(prompt(6))
        with running(model, tmp_path / "second", *flags, **OPTIONS) as server:
            used |= segments(server)
            assert server.generate(interrupted).cached == 0
            found = [server.generate(kept)]
            empty_device(server)
            with ends(server), broken(plugin, "a process is killed in a load"), pytest.raises(BROKEN_OFF):
                server.generate(kept)
        with running(model, tmp_path / "third", *flags, **OPTIONS) as server:
            used |= segments(server)
            found.append(server.generate(kept))
            answer = server.begin(kept, 600, 2)
            with ends(server) as processes:
                for process in processes:
                    process.kill()
                with pytest.raises(BROKEN_OFF):
                    answer()
    for got in found:
        assert got.cached == 256
        assert_same(got, reference, TOLERANCE)
    assert len(used) == 2 * 3
    assert not used & {found["inode"] for process in psutil.pids() for found in mapped(process)}
