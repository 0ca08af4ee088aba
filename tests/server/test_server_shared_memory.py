"""Servers with the storage `shm`: the next start, and other servers of the machine, find the rows of a host cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.server import BROKEN_OFF, assert_same, empty_device, ends, on_rank, prompt, schedulers
from support.server_plugin import broken
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
    wait_until_unused,
)

from dsv4_sglang.srt.host_cache.folder import USED
from dsv4_sglang.srt.host_cache.stored_segments import stored_segments

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

__all__ = ["FLAGS", "OPTIONS"]  # for fixtures
CUDA_LAYERS = True


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
