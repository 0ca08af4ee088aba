"""The host cache with the storage `shm`: its rows are found by the next server and by others, and by nobody else.

Servers run in processes of their own. Every step checks the bytes that it reads.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, TIMES, without_a_server
from support.ranks import run_ranks, values
from support.segments import VARIABLE, end, new_folder

from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.host_cache.segment import BLOCKS
from dsv4_sglang.srt.host_cache.stored_segments import stored_segments

PROMPT = [1 + at // BLOCK for at in range(5 * BLOCK + 60)]
Start = Callable[..., AbstractContextManager[HostCacheServer]]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    without_a_server(monkeypatch)
    with new_folder() as folder:
        monkeypatch.setenv(VARIABLE, str(folder))
        yield folder


@contextmanager
def serving(**options: Any) -> Iterator[HostCacheServer]:
    """Context manager with a server, which is checked and leaves its segment at the end."""
    with pytest.MonkeyPatch.context() as patch:
        server = HostCacheServer(patch, seed=0, storage="shm", **options)
        yield server
        server.settle()
        server.check()
        server.check_contents()
        end(server)


def served(prompt: list[int], pipe: Any) -> None:
    """Serve a prompt in a process of its own, and stay until a message comes."""
    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        with serving() as server:
            pipe.send(server.serve(prompt))
            pipe.recv()


@contextmanager
def another_server(prompt: list[int]) -> Iterator[int]:
    """Context manager with another server that has served a prompt. Yield its process id."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=served, args=(prompt, there), daemon=True)
    process.start()
    there.close()
    assert here.recv() == 0
    assert process.pid is not None
    yield process.pid
    with suppress(OSError):  # it was killed
        here.send("end")
    process.join()


def test_next_server_resumes(folder: Path) -> None:
    """A flush of the tree keeps the pages. New weights forget them."""
    with serving() as server:
        assert server.serve(PROMPT) == 0
    for _ in range(2):
        with serving() as server:
            assert server.prefetch(PROMPT) == 5 * BLOCK
            assert server.serve(PROMPT) == 5 * BLOCK
            assert server.flush() and server.cache.full_kv_pool_host.used_rows == 0
            assert server.prefetch(PROMPT) == server.serve(PROMPT) == 5 * BLOCK
    assert [segment.pages for segment in stored_segments(folder)] == [5 + 2]
    with serving() as server:
        server.cache.invalidate_storage("0123456789abcdef")
        assert server.prefetch(PROMPT) == server.serve(PROMPT) == 0
    with serving() as server:
        assert server.prefetch(PROMPT) == 0


def test_oldest_conversation_returns_to_a_full_host(folder: Path) -> None:
    """Its rows are the next that would be used for others, and all rows of the host have pages."""
    lines = [[100 * line + token for token in PROMPT] for line in range(4)]
    with serving(host_blocks=20, host_snapshots=8) as server:
        for line in lines:
            assert server.serve(line) == 0
    with serving(host_blocks=20, host_snapshots=8) as server:
        assert server.cache.full_kv_pool_host.used_rows == 0
        for line in lines:
            assert server.prefetch(line) == server.serve(line) == 5 * BLOCK
        assert server.serve([9000 + token for token in PROMPT]) == 0


def test_tenants_share_nothing(folder: Path) -> None:
    tenants = [None, "a", "b"]
    with serving() as server:
        for tenant in tenants:
            assert server.prefetch(PROMPT, tenant) == server.serve(PROMPT, tenant) == 0
    with serving() as server:
        for tenant in tenants:
            assert server.prefetch(PROMPT, tenant) == server.serve(PROMPT, tenant) == 5 * BLOCK
        assert server.prefetch(PROMPT, "c") == server.serve(PROMPT, "c") == 0
        assert server.prefetch(PROMPT, salt="a") == server.serve(PROMPT, salt="a") == 0


@pytest.mark.parametrize("killed", [False, True])
def test_other_server_is_read(folder: Path, killed: bool) -> None:
    """Fetched pages are published here, too."""
    with another_server(PROMPT) as process, serving() as server:
        if killed:
            os.kill(process, signal.SIGKILL)
        assert server.prefetch(PROMPT) == server.serve(PROMPT) == 5 * BLOCK
        assert server.flush()
        assert server.prefetch(PROMPT) == 5 * BLOCK
        assert [segment.pages for segment in stored_segments(folder)].count(5 + 1) == 1


def test_audit_finds_a_row_with_another_key(folder: Path) -> None:
    with serving() as server:
        server.serve(PROMPT)
        index = server.cache.full_kv_pool_host.shared.segment.indices[BLOCKS]
        key = index.key(0)
        index.set(0, bytes(range(32)))
        (finding,) = audit(server.cache, ()).findings
        assert "host row 0" in finding.what and "published as 000102" in finding.wrong
        index.set(0, key)


def serve_turns(rank: int, turns: int, seed: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        server = HostCacheServer(
            patch,
            seed,
            group=dist.group.WORLD,
            storage="shm",
            host_blocks=60,
            host_snapshots=24,
            flushes=0.03,
            aborts=0.05,
            chunks=0.2,
            prefetch_policy="timeout",
            # SGLang's default of 1 s ends prefetches on a busy machine.
            extra_config={"prefetch_timeout_base": 60},
        )
        for _ in server.turns(turns, "from storage", "flushed"):
            pass
        server.settle()
        server.check()
        server.check_contents()
        end(server)
    return server.done


@pytest.mark.full
@pytest.mark.slow
def test_processes_of_a_segment_agree(folder: Path) -> None:
    """Two processes share rows that an earlier pair has left, fetch and flush, and choose the same rows."""
    for seed in range(2 * TIMES):
        first, second = values(run_ranks(2, serve_turns, 200, seed))
        assert first == second, "the processes have decided differently"


def serve_until_killed(seed: int, pipe: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        rng = random.Random(seed)
        blocks, snapshots = rng.choice([(60, 24), (30, 12), (90, 40)])
        server = HostCacheServer(
            patch, seed, storage="shm", host_blocks=blocks, host_snapshots=snapshots, flushes=0.02, chunks=0.2
        )
        turn = 0
        while True:
            server.turn()
            turn += 1
            if turn % 10 == 0:
                server.check()
                found = int(server.component.metrics.total("hit_tokens", "storage"))
                pipe.send((sum(server.done.values()), found, server.wrong))


def run_and_kill(operations: int, seed: int) -> Counter[str]:
    """Run two servers until they have made this many operations, in at least five starts. Kill one of them again and
    again."""
    context, rng, total = multiprocessing.get_context("fork"), random.Random(seed), Counter[str]()
    servers: dict[int, Any] = {}
    while total["operations"] < operations or total["starts"] < 5:
        for who in range(2):
            if who not in servers:
                here, there = context.Pipe(duplex=False)
                total["starts"] += 1
                process = context.Process(target=serve_until_killed, args=(seed + total["starts"], there), daemon=True)
                process.start()
                there.close()
                servers[who] = process, here
        victim, limit = rng.randrange(2), rng.randrange(1, 30)
        process, pipe = servers.pop(victim)
        last = 0, 0, []
        for _ in range(limit):
            last = pipe.recv()
            assert not last[2], last[2]
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        total.update({"operations": last[0], "from storage": last[1]})
    for process, _ in servers.values():
        process.kill()
        process.join()
    return total


@pytest.mark.slow
def test_killed_servers_leave_right_pages(folder: Path) -> None:
    """Two servers find pages of each other and of those before them. Sizes change at each start."""
    total = run_and_kill(2000 * TIMES, 1)
    assert total["from storage"] > 0, total
    segments = list(stored_segments(folder))
    assert sum(segment.pages for segment in segments) > 0
    assert not [page for segment in segments for page in segment.damaged()]
    print(dict(total))
