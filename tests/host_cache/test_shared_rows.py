"""Two processes with one copy of the host rows, whose copies run late and in different orders.

Both serve the same requests and make the same decisions, as ranks of tensor parallelism. Each has its own device.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, TIMES, without_a_server
from support.ranks import run_ranks, values

from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.srt.host_cache.pools import HostBlocks
from dsv4_sglang.srt.host_cache.storage import FileStorage

POLICIES = ("write_through", "write_through_selective", "write_back")
RANKS = 2
Fault = Callable[[pytest.MonkeyPatch, int], None]


def late_reads(patch: pytest.MonkeyPatch, done: Counter[str], rng: random.Random) -> None:
    """Count the pages that this process reads from the storage. Reads take a random time, and one of eight fails."""
    get = FileStorage.get

    def late(*arguments: Any) -> Any:
        done["pages read"] += 1
        time.sleep(rng.random() * 0.002)
        return None if rng.random() < 1 / 8 else get(*arguments)

    patch.setattr(FileStorage, "get", late)


def slow_save(*arguments: Any, seconds: float = 0.005, save: Callable[..., None] = HostBlocks.save) -> None:
    time.sleep(seconds)
    save(*arguments)


def serve(
    rank: int,
    turns: int,
    seed: int,
    options: dict[str, Any],
    *,
    operations: Sequence[str] = (),
    slow: bool = False,
    fault: Fault | None = None,
) -> Counter[str]:
    """Run scheduler iterations in one of the processes. Return the counts of its operations.

    Args:
        rank: number of the process.
        turns: least number of iterations.
        seed: seed of the requests and of the order of copies.
        options: arguments of `HostCacheServer`.
        operations: are all done before the iterations end.
        slow: each copy to the host takes 5 ms in the second process.
        fault: called before the server is created.
    """
    done: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        late_reads(patch, done, random.Random(seed + rank))
        if slow and rank == 1:
            patch.setattr(HostBlocks, "save", slow_save)
        if fault is not None:
            fault(patch, rank)
        server = HostCacheServer(patch, seed, group=dist.group.WORLD, chunks=0.2, **options)
        for turn in server.turns(turns, *operations):
            if turn % 20 == 0:
                server.check()
        server.settle()
        server.check()
        server.check_contents()
        done += server.done
        done["from host"] = server.from_host
    return done


@pytest.mark.parametrize(("policy", "slow"), [*((policy, False) for policy in POLICIES), ("write_back", True)])
def test_steps_read_the_right_bytes(policy: str, slow: bool) -> None:
    options = {"policy": policy, "flushes": 0.01, "host_blocks": 60}
    first, second = values(run_ranks(RANKS, partial(serve, slow=slow), 400, 1, options))
    assert first == second, "the processes have decided differently"
    assert first["from host"] > 0 and first["left the host"] > 0 and first["flushed"] > 0


@pytest.mark.parametrize("policy", ["timeout", "wait_complete"])
def test_one_process_reads_stored_pages(tmp_path: Path, policy: str) -> None:
    """The other one uses what the first has read, also if pages are missing, requests aborted and caches flushed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
        options = {"storage": "file", "prefetch_policy": policy, "flushes": 0.03, "aborts": 0.05, "host_blocks": 60}
        operations = ("from storage", "flushed", "stored")
        first, second = values(run_ranks(RANKS, partial(serve, operations=operations), 400, 2, options))
    assert first.pop("pages read") > 0 == second.pop("pages read", 0)
    assert first == second, "the processes have decided differently"


def serve_many(policy: str, seed: int, **more: Any) -> None:
    """Compare two processes in many operations with late copies, on small and large hosts."""
    sizes = {"host_blocks": 20 + 15 * (seed % 8), "host_snapshots": 4 + 7 * (seed % 8)}
    options = {**sizes, "policy": policy, "flushes": 0.02, "aborts": 0.04, **more}
    first, second = values(run_ranks(RANKS, serve, 350, seed, options))
    first.pop("pages read", 0), second.pop("pages read", 0)
    assert first == second, seed


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_operations_with_late_copies(policy: str) -> None:
    for seed in range(8, 8 + 4 * TIMES):
        serve_many(policy, seed)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_operations_with_a_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str) -> None:
    for seed in (8, 12):
        monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / str(seed)))
        serve_many(policy, seed, storage="file")


def overlapping_parts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The second process saves what the first one saves."""
    part = HostSharing.part

    def first(sharing: HostSharing, count: int, first_row: int) -> range:
        found, sharing.rank = sharing.rank, 0
        rows = part(sharing, count, first_row)
        sharing.rank = found
        return rows

    patch.setattr(HostSharing, "part", first)


def test_unsaved_parts_are_detected() -> None:
    """If nobody saves the second part, rows have wrong contents."""
    outcomes = run_ranks(RANKS, partial(serve, fault=overlapping_parts), 100, 1, {"host_blocks": 60})
    assert all("AssertionError" in outcome.error for outcome in outcomes), outcomes


def own_saves(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Planted fault: a process waits only until its own part of a save has ended."""
    patch.setattr(HostSharing, "wait", lambda sharing: None)


def load_just_saved(rank: int, fault: Fault | None, for_a_fetch: bool) -> list[str]:
    """Evict a prompt, which saves it, and load it in the same scheduler iteration. The second process saves slowly.

    `for_a_fetch`: SGLang saves the nodes when it evicts them, because a fetch continues their path. Return the errors
    of the steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        if rank == 1:
            patch.setattr(HostBlocks, "save", partialmethod(slow_save, seconds=0.5))
        if fault is not None:
            fault(patch, rank)
        server = HostCacheServer(patch, 0, group=dist.group.WORLD, policy="write_back")
        tokens = list(range(1, 6 * BLOCK))
        assert server.serve(tokens) == 0
        cache = server.cache
        if for_a_fetch:
            patch.setattr(cache.saves, "save_now", lambda node: None)
            end = next(node for node in cache.tree_core._collect_all_nodes() if node.key and not node.children)
            lock = cache.inc_host_lock_ref(end.id).to_dec_params()
        server._make_room(server.device.size // BLOCK)
        if for_a_fetch:
            cache.dec_host_lock_ref(end.id, lock)
        assert server.start(tokens)["begin"] == server.from_host == 5 * BLOCK
        return server.wrong


@pytest.mark.parametrize("for_a_fetch", [False, True])
def test_finished_saves_are_finished_everywhere(for_a_fetch: bool) -> None:
    """A save has ended when all processes have copied their parts. With the planted fault, a process loads rows that
    the other process has not written yet."""
    assert values(run_ranks(RANKS, load_just_saved, None, for_a_fetch)) == [[], []]
    first, _ = values(run_ranks(RANKS, load_just_saved, own_saves, for_a_fetch))
    assert first and "from another state" in first[0]


def flush_while_reading(rank: int) -> tuple[float, float]:
    """Flush while pages of an aborted request are read. Return the times of the end of the flush and of the reads."""
    get, begun, ends = FileStorage.get, threading.Event(), [0.0]

    def slow(*arguments: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        found = get(*arguments)
        ends.append(time.monotonic())
        return found

    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        server = HostCacheServer(patch, 0, group=dist.group.WORLD, storage="file")
        cache, tokens = server.cache, list(range(1, 5 * BLOCK))
        server.serve(tokens)
        assert server.flush()
        patch.setattr(FileStorage, "get", slow)
        request = server.begin_prefetch(tokens)
        operation = cache.ongoing_prefetch[request].operation
        while operation.host_indices is None:
            cache.check_hicache_events()
        if rank == 0:
            begun.wait()
        dist.barrier()
        cache.release_aborted_request(request)
        assert server.flush()
        flushed = time.monotonic()
        server.check()
        assert server.serve(tokens) == 0
    return flushed, ends[-1]


def test_flush_waits_for_cancelled_fetches(tmp_path: Path) -> None:
    """No page is read into a row after the flush has freed it in any process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
        (first, read), (second, nothing) = values(run_ranks(RANKS, flush_while_reading))
    assert 0 == nothing < read <= min(first, second)
