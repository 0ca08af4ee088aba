"""The host cache on SGLang's tree and controller, with streams that run late and in random order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import EvictLayer
from support.fake_streams import Stream
from support.host_cache import OPERATIONS, WITH_BLOCKS, HostCacheServer
from support.prefix_tree import BLOCK, TIMES, without_a_server

from dsv4_sglang.cache.free_list import FreeRows
from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.host_cache import saves as host_saves
from dsv4_sglang.srt.host_cache.evictions import HostEvictionOrder
from dsv4_sglang.srt.host_cache.pools import HostBlocks, HostRows, HostSnapshots
from dsv4_sglang.srt.host_cache.saves import SavePlan
from dsv4_sglang.srt.host_cache.sizing import host_demand
from dsv4_sglang.srt.host_cache.storage import FileStorage
from dsv4_sglang.srt.host_cache.transfers import TransferController
from dsv4_sglang.srt.memory.pools import CacheKVPool
from dsv4_sglang.srt.prefix_cache import copy_timer, snapshot_schedule
from dsv4_sglang.srt.prefix_cache.host_copy import CopyEvent
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.sglang.tree import evict_from_device, evict_from_host

POLICIES = ("write_through", "write_through_selective", "write_back")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one thread: copies are small, and synchronization of threads would take most of the time."""
    without_a_server(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_sglangs_order(monkeypatch: pytest.MonkeyPatch, server: HostCacheServer, method: str) -> None:
    """Remove the wait for the steps from the copies to the host ("start_writing") or from it ("start_loading")."""
    original, nothing = getattr(TransferController, method), Stream(server.streams)

    def without_the_wait(self: TransferController) -> object:
        self.forward_stream = nothing
        try:
            return original(self)
        finally:
            self.forward_stream = server.forward

    monkeypatch.setattr(TransferController, method, without_the_wait)


def with_bad_transfers(monkeypatch: pytest.MonkeyPatch, server: HostCacheServer) -> Callable[[], None]:
    """Make one of six copies fail to begin, in both directions, and let streams stall.

    The stalled stream is one of copies or the thread that reads from a storage. Call the returned function before each
    iteration.
    """
    rng, server.copies_fail = random.Random(0), True
    for method in ("write", "load"):
        original = getattr(TransferController, method)

        def sometimes(self: TransferController, *args: Any, original: Any = original, **named: Any) -> Any:
            return None if rng.random() < 1 / 6 else original(self, *args, **named)

        monkeypatch.setattr(TransferController, method, sometimes)

    def stall() -> None:
        if rng.random() < 1 / 20:
            engine = server.controller.l2_transfer_engine
            late = [engine.device_to_host_stream, engine.host_to_device_stream]
            late += [server.controller.prefetch_io_aux_thread] if server.cache.enable_storage else []
            server.streams.stalled = rng.choice(late)

    return stall


def with_storage(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> dict[str, Any]:
    """Return the options of a server with a new storage. With every other seed one of eight pages cannot be read."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
    rng, get = random.Random(seed), FileStorage.get

    def sometimes(*args: Any, **named: Any) -> Any:
        return None if rng.random() < 1 / 8 else get(*args, **named)

    if seed % 2:
        monkeypatch.setattr(FileStorage, "get", sometimes)
    policies = ("best_effort", "timeout", "wait_complete")
    policy = policies[seed // 5 % 3]
    return {"storage": "file", "late_threads": True, "prefetch_policy": policy, "flushes": 0.03}


def run_turns(server: HostCacheServer, turns: int, before: Callable[[], None] = lambda: None) -> None:
    """Run scheduler iterations and call `before` before each. Steps read the right bytes, and no memory stays held."""
    for turn in range(turns):
        before()
        server.turn()
        assert not server.wrong, (turn, server.wrong)
        if turn % 10 == 0:
            server.check()
    server.settle()
    server.check()
    server.check_contents()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad_transfers", [False, pytest.param(True, marks=pytest.mark.full)])
def test_steps_read_the_right_bytes(monkeypatch: pytest.MonkeyPatch, policy: str, bad_transfers: bool) -> None:
    """Also when transfers fail or stall. A request whose load fails computes its prompt or waits."""
    server = HostCacheServer(monkeypatch, seed=1, policy=policy)
    run_turns(server, 600, *([with_bad_transfers(monkeypatch, server)] if bad_transfers else []))
    assert server.from_host > 0, "no tokens came from the host"
    assert server.component.metrics.total("host_loads_failed") > 0 or not bad_transfers
    assert server.flush(), "something is locked or on its way"
    server.check()


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_hints_disturb_no_step(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Pins, retained and demoted conversations beside copies that run late."""
    server = HostCacheServer(monkeypatch, seed=1, policy=policy)
    server.limit_pins()
    server.hint_rng = random.Random(7)
    run_turns(server, 600)
    metrics = server.component.metrics
    assert min(metrics.total("hints", effect) for effect in ("pin", "untrusted")) > 5 and server.from_host > 0
    server.cache.at_time(server.cache.now + 30)
    assert not list(server.cache.pins)
    assert server.flush(), "something is locked or on its way"
    server.check()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_operations_with_late_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str) -> None:
    """50,000 random operations of OPERATIONS in 21,000 scheduler iterations, a third of them with each policy. All
    numbers are multiplied by TIMES.

    The hosts are small and large. In a third of the seeds transfers fail and stall, and a fifth have a storage.
    """
    done: Counter[str] = Counter()
    from_storage = 0
    for seed in range(20 * TIMES):
        with monkeypatch.context() as patch:
            sizes = {"host_blocks": 20 + 15 * (seed % 8), "host_snapshots": 4 + 7 * (seed % 8)}
            more: dict[str, Any] = {"flushes": 0.01}
            if seed % 5 == 0:
                more = with_storage(patch, tmp_path / str(seed), seed)
            server = HostCacheServer(patch, seed, policy=policy, chunks=0.3, aborts=0.04, **sizes, **more)
            if seed % 4 == 3:
                server.limit_pins()
                server.hint_rng = random.Random(seed)
            run_turns(server, 350, *([with_bad_transfers(patch, server)] if seed % 3 == 0 else []))
            if seed % 2:
                assert server.flush()
                server.check()
            done += server.done
            from_storage += server.component.metrics.total("hit_tokens", "storage")
    assert from_storage > 0 and set(done) == set(OPERATIONS)
    assert done.total() >= 16_667 * TIMES, done


@pytest.mark.full
@pytest.mark.parametrize("wait", ["start_writing", "start_loading", "the snapshot", "a layer"])
def test_missing_waits_are_detected(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    """Without one of the waits a step reads wrong bytes within a few seeds.

    Copies wait for steps and steps for copies (see `TransferController`). A step waits for its snapshot, and each of
    its layers for its blocks. The layer is one that is loaded neither with the snapshot nor with the previous layer.
    """
    waits = CacheKVPool.wait_for_layer

    def waits_for_others(pool: CacheKVPool, layer: int) -> None:
        if layer != WITH_BLOCKS[1]:
            waits(pool, layer)

    for seed in range(20):
        with monkeypatch.context() as patch:
            server = HostCacheServer(patch, seed)
            if wait == "a layer":
                patch.setattr(CacheKVPool, "wait_for_layer", waits_for_others)
            elif wait == "the snapshot":
                server.component.slots.layer_transfer_counter = None
            else:
                in_sglangs_order(patch, server, wait)
            for _ in range(400):
                server.turn()
                if server.wrong:
                    return
    pytest.fail("the wait makes no difference here: the test does not test")


def test_a_load_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch sees a load from when it begins on its stream until it ends, and reports its requests."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    watch, sent = server.controller.watch, []
    scheduler: Any = SimpleNamespace(
        ipc_channels=SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=lambda answer, req: sent.append((answer, req)))
        )
    )
    server.serve(prompt(0))
    server._make_room(20)
    request = server._request(prompt(0))
    request.http_worker_ipc = "worker 1"
    assert server._admit(request) is not None
    from_host = server.controller.l2_transfer_engine.host_to_device_stream
    while not from_host.ready():
        assert watch.oldest() is None, "the load waits for the steps before it"
        server.streams.run_some(1)
    while watch.oldest() is None:
        from_host.step()
    message = watch.fail(scheduler, 60)
    while from_host.ready():
        from_host.step()
    assert watch.oldest() is None and watch.fail(scheduler, 60) == ""
    assert message.startswith("a load from host memory has not ended in 60 s: 6 blocks and 1 snapshots for the request")
    assert f"for the requests {request.rid}. " in message
    ((answer, of),) = sent
    assert of is request and (answer.rid, answer.http_worker_ipc) == (request.rid, "worker 1")
    assert answer.finished_reason["status_code"] == 500 and answer.finished_reason["message"] == message


def test_load_is_watched_before_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the launch is the copy."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    watch, launch, seen = server.controller.watch, HostBlocks.load, []

    def look(self: HostBlocks, *arguments: Any) -> None:
        seen.append(watch.oldest())
        launch(self, *arguments)

    monkeypatch.setattr(HostBlocks, "load", look)
    for _ in range(2):
        server.serve(prompt(0))
        server._make_room(20)
    assert len(seen) == 2 and None not in seen, "two launches of one load"
    assert watch.oldest() is None


def test_watch_forgets_ended_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    watch = server.controller.watch
    for _ in range(3):
        server.serve(prompt(0))
        server._make_room(20)
    server.serve(prompt(0))
    assert watch._count >= 3, "no loads"
    assert [len(load.requests) for load in watch._loads] == [1], "the last load, and its own request"
    assert not watch._requests


def test_failed_load_frees_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    slots = server.component.slots
    free = slots.available_size()
    assert server.component.slots_for_load(slots.num_slots + 1) is None
    assert slots.available_size() == free
    server.check()


def prompt(line: int, blocks: int = 6) -> list[int]:
    """Return the tokens of conversation `line`: its blocks and a few tokens after them."""
    return [100 * line + at // BLOCK + 1 for at in range(blocks * BLOCK + 20)]


@pytest.mark.parametrize("policy", POLICIES)
def test_evicted_conversations_resume_from_host(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Ten conversations of six blocks are served on a device of 20 blocks. Every later visit finds all six blocks."""
    server = HostCacheServer(monkeypatch, seed=0, policy=policy, blocks=20)
    for visit in range(3):
        for line in range(10):
            assert server.serve(prompt(line)) == (6 * BLOCK if visit else 0), (visit, line)
            server.check()
    server.check_contents()
    assert not server.wrong
    assert server.component.metrics.total("host_saves_skipped") == 0


def test_all_snapshots_of_a_prompt_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots attached after the insertion are saved, too: a branch resumes from the host in the middle."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    server.serve(prompt(0, blocks=10))  # the interval is four blocks
    server._make_room(20)
    assert server.serve(prompt(0, blocks=10)[: 8 * BLOCK] + [7] * 200) == 8 * BLOCK
    assert server.from_host > 0 and not server.wrong


def test_last_row_keeps_the_latest_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has room for one of three snapshots. It keeps the one that the next conversation turn resumes from."""
    server, tokens = HostCacheServer(monkeypatch, seed=0, blocks=20, host_snapshots=1), prompt(0, blocks=10)
    server.serve(tokens)
    server._make_room(20)
    assert server.serve(tokens) == 10 * BLOCK
    server.check()
    assert server.component.metrics.total("host_saves_skipped") == 2
    assert not server.wrong


@pytest.mark.parametrize("policy", POLICIES)
def test_small_host_keeps_evicted_conversations(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """The host is full of copies of the first conversations when the device evicts the later ones.

    Of nine conversations the device holds six, and the host holds two others.
    """
    server = HostCacheServer(monkeypatch, seed=0, policy=policy, blocks=40, host_blocks=14, host_snapshots=5)
    for line in range(9):
        assert server.serve(prompt(line)) == 0
        server.check()
    server.check_contents()
    held = places(server)
    assert len(held["device"]) == 6 and len(held["host"] - held["device"]) == 2, held
    assert sum(server.serve(prompt(line)) > 0 for line in held["device"] | held["host"]) == 8
    assert not server.wrong


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_candidates_are_saved_early(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """No allocation waits for a copy if a quarter of the device is kept free or evictable without a copy.

    This holds although the host is full of copies of blocks that the device keeps. No node is copied twice because its
    first copy was evicted for another.
    """
    monkeypatch.setattr(host_saves, "MARGIN", 4)
    server = HostCacheServer(monkeypatch, seed=0, policy=policy, blocks=40, host_blocks=24, host_snapshots=9)
    saves, saves_now = server.cache.saves.execute, server.cache.saves.save_now
    saved: Counter[int] = Counter()
    waited: list[Any] = []

    def save(plan: SavePlan) -> int | None:
        saved[plan.node.id] += (size := saves(plan)) is not None
        return size

    def save_now(node: Any) -> None:
        before = saved.copy()
        saves_now(node)
        waited.extend(saved - before)

    monkeypatch.setattr(server.cache.saves, "execute", save)
    monkeypatch.setattr(server.cache.saves, "save_now", save_now)
    for line in range(14):
        assert server.serve(prompt(line)) == 0
        for _ in range(3):
            server.component.slots.registry.tick()
            server.cache.check_hicache_events()
            server.settle()
        server.check()
    assert not waited
    assert max(saved.values()) == 1 or policy == "write_through", saved
    assert max(saved.values()) <= 2, "saved more than when new and before its eviction"
    held = places(server)
    assert len(held["device"] | held["host"]) >= 9, held
    assert not server.wrong
    server.check_contents()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The count of waits for saves. No snapshot is saved before it must be."""
    monkeypatch.setattr(host_saves, "MAX_SAVE_BYTES", 0)
    monkeypatch.setattr(host_saves.HostSaves, "save_next_evicted", lambda *_: None)
    count, finish = Counter[str](), TransferController.finish_saves

    def counted(controller: TransferController) -> None:
        count["waits"] += 1
        finish(controller)

    monkeypatch.setattr(TransferController, "finish_saves", counted)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_eviction_waits_once(monkeypatch: pytest.MonkeyPatch, waits: Counter[str], policy: str) -> None:
    server = HostCacheServer(monkeypatch, seed=0, policy=policy, blocks=40)
    for line in range(6):
        server.serve(prompt(line))
    assert places(server) == {"device": set(range(6)), "host": set()}
    server._make_room(40)
    assert places(server) == {"device": set(), "host": set(range(6))}
    assert waits["waits"] == 1
    server.check()
    server.check_contents()


@pytest.mark.parametrize("policy", POLICIES)
def test_evictions_of_slots_wait_once(monkeypatch: pytest.MonkeyPatch, waits: Counter[str], policy: str) -> None:
    """Snapshots of eight conversations leave their slots. Their blocks stay on the device."""
    server = HostCacheServer(monkeypatch, seed=0, policy=policy, blocks=60, snapshots=8)
    for line in range(8):
        server.serve(prompt(line, blocks=3))
    assert places(server) == {"device": set(range(8)), "host": set()}
    slots = server.component.slots_for_load(8)
    assert slots is not None and places(server) == {"device": set(), "host": set(range(8))}
    assert waits["waits"] == 1
    server.component.slots.give_back(slots.tolist())
    server.check()
    server.check_contents()


def test_a_full_host_is_asked_once_for_the_next_slots(monkeypatch: pytest.MonkeyPatch, waits: Counter[str]) -> None:
    """The host is full of conversations of at least the same value. Once it has no room for one, no more are tried."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=60, snapshots=8, host_snapshots=6)
    for line in range(14):
        server.serve(prompt(line, blocks=3))
        if line == 5:
            server._make_room(60)
    assert places(server) == {"device": set(range(6, 14)), "host": set(range(6))}
    execute = server.cache.saves.execute

    def counted(plan: SavePlan) -> int | None:
        waits["asked"] += 1
        return execute(plan)

    monkeypatch.setattr(server.cache.saves, "execute", counted)
    waits.clear()
    slots = server.component.slots_for_load(1)
    assert slots is not None and waits == {"asked": 2}, "once for the next ones, and once for the evicted one"
    server.component.slots.give_back(slots.tolist())
    server.check()


def test_superseded_snapshots_evict_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A superseded snapshot evicts no blocks of others from a full host.

    Once the end of its conversation is on the host, it needs only a row.

    """
    server = HostCacheServer(monkeypatch, seed=0, blocks=20, host_blocks=12)
    for line in range(4):
        server.serve(prompt(line))
    assert server.cache.full_kv_pool_host.available_size() == 0
    server.serve(prompt(9, blocks=10))  # the interval is four blocks
    slots = server.component.slots
    of_line = {len(path): s for s, node in slots.nodes.items() if (path := server.tokens_of(node))[0] == 901}
    in_middle, end = of_line[4 * BLOCK], of_line[10 * BLOCK]
    slots.registry.tick()
    for slot in (in_middle, end):
        slots.registry.use(slot)  # more likely to be reused than the others
    server.cache.saves.save_now(slots.nodes[in_middle])
    assert not slots.registry.copies.is_saved(in_middle)
    for slot in (end, in_middle):
        server.cache.saves.save_now(slots.nodes[slot])
        assert slots.registry.copies.is_saved(slot)
    server.check()
    server.check_contents()


def test_evicted_inner_snapshot_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next conversation takes the rows that save the least computation. Their blocks stay on the host."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20, host_snapshots=3)
    for line, blocks in ((0, 10), (1, 6)):
        server.serve(prompt(line, blocks))
        server._make_room(20)
        server.check()
    assert server.cache.full_kv_pool_host.used_rows == 16 and server.cache.mamba_pool_host.used_rows == 3
    assert [server.serve(prompt(0, 10)), server.serve(prompt(1))] == [10 * BLOCK, 6 * BLOCK]
    assert not server.wrong


def test_a_path_is_evicted_from_its_end_upwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns have ends at 3 and 7 blocks of equal value. Once the later one is evicted, the other is the end."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    for blocks in (3, 7):
        server.serve(prompt(0, blocks))
    server._make_room(20)
    assert server.cache.evict_host(7 * BLOCK) == 7 * BLOCK
    assert server.cache.full_kv_pool_host.used_rows == server.cache.mamba_pool_host.used_rows == 0
    server.check()


def test_unread_blocks_without_snapshot_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    cache = server.cache
    server.serve(prompt(0, blocks=3))
    server.serve(prompt(0, blocks=2)[: 2 * BLOCK] + prompt(7, blocks=1))  # a branch after two blocks
    server._make_room(20)
    (parted,) = cache.root_node.children.values()
    assert len(parted.children) == 2
    evict_from_host(cache, parted, [server.component])
    server.check()
    lock = cache.inc_host_lock_ref(parted.id).to_dec_params()
    assert cache.evict_host(20 * BLOCK) == 2 * BLOCK and cache.full_kv_pool_host.used_rows == 2
    cache.dec_host_lock_ref(parted.id, lock)
    assert cache.evict_host(1) == 2 * BLOCK and cache.full_kv_pool_host.used_rows == 0
    server.check()


def test_blocks_saved_for_an_evicted_end_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device evicts blocks without a snapshot that the end of a conversation on the host needs. To make room for
    them, the host evicts this end."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20, host_blocks=6)
    cache, component = server.cache, server.component
    for blocks in (2, 4):
        server.serve(prompt(0, blocks))
    server._make_room(20)
    (trunk,) = cache.root_node.children.values()
    assert server.serve(prompt(0, blocks=2)) == 2 * BLOCK
    evict_from_host(cache, trunk, cache.components.values())
    evict_from_device(component, trunk)
    server.serve(prompt(1, blocks=4))
    (other,) = (node for node in cache.root_node.children.values() if node is not trunk)
    lock = cache.inc_host_lock_ref(other.id).to_dec_params()
    assert cache.full_kv_pool_host.used_rows == 6
    server._make_room(20)
    cache.dec_host_lock_ref(other.id, lock)
    server.check()
    assert trunk.backuped and not trunk.children
    assert cache.evict_host(1) == 2 * BLOCK and not trunk.backuped
    server.check()


def places(server: HostCacheServer) -> dict[str, set[int]]:
    """Return the conversations of `prompt` whose ends are on the device and on the host."""
    held: dict[str, set[int]] = {"device": set(), "host": set()}
    for place, node in server.component.slots.nodes.items():
        registry = server.component.slots.registry
        if not registry.following(place):
            line = server.tokens_of(node)[0] // 100
            held["device" if place <= registry.capacity else "host"].add(line)
            if registry.copies.is_saved(place):
                held["host"].add(line)
    return held


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retracted_request_with_log_probabilities(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """SGLang matches the request only up to the end of its prompt, whose snapshot may not be marked for saving yet."""
    server = HostCacheServer(monkeypatch, seed=0, policy=policy)
    request = server.start(prompt(0, blocks=7))["request"]
    while request.computed <= 9 * BLOCK:
        step = server._decode(request)
        assert step is not None
        server.launch([step], -1).synchronize()
    request.return_logprob, request.logprob_start_len = True, request.prompt - 1
    tokens = list(request.full_untruncated_fill_ids)
    server.retract(request)
    server.check()
    assert server.cache.full_kv_pool_host.used_rows == (0 if policy == "write_back" else 9), "it is saved at once"
    server._make_room(40)
    assert server.serve(tokens[: request.prompt]) == 7 * BLOCK
    server._make_room(40)
    assert server.serve(tokens) == 9 * BLOCK
    assert not server.wrong
    server.check_contents()


@pytest.mark.parametrize("full", ["blocks", "slots"])
@pytest.mark.parametrize("room, kept", [(20, 0), (12, 8)])
def test_prompt_is_recomputed_if_load_fails(monkeypatch: pytest.MonkeyPatch, full: str, room: int, kept: int) -> None:
    """The request resumes from the longest prefix on the device, or from none. Snapshots are at 4, 8 and 10 blocks."""
    server, tokens = HostCacheServer(monkeypatch, seed=0, blocks=20), prompt(0, blocks=10)
    server.serve(tokens)
    server._make_room(room)
    with monkeypatch.context() as patch:
        if full == "blocks":
            patch.setattr(server.allocator, "alloc", lambda count: None)
        else:
            patch.setattr(server.component, "allocate_slot", lambda needed: 0)
        request = server.arrive(tokens)
    assert request.host_hit_length == 0 and len(request.prefix_indices) == kept * BLOCK
    if kept:
        slot = server.component.slots.id_of(server.cache.tree_core.node_by_id(request.last_node))
        assert int(request.mamba_cow_src_index) == slot <= 14
    else:
        assert request.mamba_cow_src_index is None
    assert server.component.metrics.total("host_loads_failed") == 1
    server.check()
    assert server.serve(tokens) == 10 * BLOCK
    assert not server.wrong


def being_saved(monkeypatch: pytest.MonkeyPatch) -> HostCacheServer:
    """Return a server with a device of 20 blocks, 16 of which are being saved."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    server.finish(server.start(prompt(0, blocks=16))["request"])
    server.cache.check_hicache_events()
    assert server.cache.ongoing_write_through
    assert server.cache.full_evictable_size() == 0
    return server


def test_eviction_waits_for_running_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation waits for pending writes. Without the wait SGLang would retract a request."""
    server = being_saved(monkeypatch)
    assert server._make_room(10)
    server.check()
    server.settle()
    assert server.serve(prompt(0, blocks=16)) == 16 * BLOCK and not server.wrong
    server.check_contents()


@pytest.mark.parametrize("waited_for", [False, True])
def test_ended_save_reconsiders_waiting_requests(monkeypatch: pytest.MonkeyPatch, waited_for: bool) -> None:
    """SGLang rejects a request while saves lock the blocks that it needs, and marks the batch as full."""
    server, batch = being_saved(monkeypatch), SimpleNamespace(batch_is_full=True)
    scheduler = SimpleNamespace(tree_cache=server.cache, chunked_req=None)
    assert snapshot_schedule.note_running_batch(lambda scheduler, batch: batch, scheduler, batch) is batch
    server.cache.check_hicache_events()
    assert batch.batch_is_full
    if waited_for:
        server.cache.finish_saves()
    else:
        server.streams.run_all()
        server.cache.check_hicache_events()
    assert not batch.batch_is_full
    server.check()


@pytest.mark.parametrize("pool", [HostBlocks, HostSnapshots])
def test_failed_copy_launch_is_an_error(monkeypatch: pytest.MonkeyPatch, pool: type[HostRows]) -> None:
    """It ends the scheduler, as a step does that cannot be launched. It is not taken for a copy that was made."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    server.serve(prompt(0))
    server._make_room(20)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pool, "load", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        server.start(prompt(0))
    monkeypatch.setattr(pool, "save", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        server.serve(prompt(1))


def test_fully_evicted_snapshot_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device and the host evict it at once. One that leaves the device alone is on the host."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=40)
    component, slots = server.component, server.component.slots
    for line, target in ((0, EvictLayer.DEVICE), (1, EvictLayer.ALL), (2, EvictLayer.HOST)):
        server.serve(prompt(line, blocks=3))
        (slot,) = (place for place, node in slots.nodes.items() if server.tokens_of(node)[0] == 100 * line + 1)
        node = slots.nodes[slot]
        assert slots.registry.copies.is_saved(slot) and slots.registry.in_registry[slot]
        component.evict_component(node, defaultdict(list), defaultdict(list), [], target=target)
        places = [place for place, of in slots.nodes.items() if of is node]
        assert [place > slots.registry.capacity for place in places] == {1: [True], 3: [], 2: [False]}[target]
        assert all(slots.registry.in_registry[place] for place in places) and slots.registry.in_registry.sum() == len(
            slots.nodes
        )
        assert target is not EvictLayer.HOST or not slots.registry.copies.is_saved(slot), "it would be saved again"


def test_a_save_evicts_nothing_of_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is full with the first part of a conversation, whose end needs more blocks than are free."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=40, host_blocks=8)
    cache, slots = server.cache, server.component.slots
    server.serve(prompt(0, blocks=6))
    server.serve(prompt(0, blocks=10))
    held = cache.full_kv_pool_host.used_rows, cache.mamba_pool_host.used_rows
    assert held == (8, 3), "the snapshots at 4, 6 and 8 blocks"
    (end,) = (node for node in slots.nodes.values() if len(server.tokens_of(node)) == 10 * BLOCK)
    slots.registry.use(slots.id_of(end))
    cache.saves.save_now(end)
    server.settle()
    assert (cache.full_kv_pool_host.used_rows, cache.mamba_pool_host.used_rows) == held
    assert not slots.registry.copies.is_saved(slots.id_of(end))
    server.check()
    server.check_contents()
    server._make_room(40)
    assert server.serve(prompt(0, blocks=6)) == 6 * BLOCK and not server.wrong


def test_metrics_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte, token and eviction counts once. On a CPU a copy takes one reading of this clock."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20, host_blocks=12, host_snapshots=4)
    clock = iter(range(1_000_000))
    monkeypatch.setattr(copy_timer, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    metrics, cache = server.component.metrics, server.cache
    rows = cache.full_kv_pool_host.row_bytes, cache.mamba_pool_host.row_bytes
    server.serve(prompt(0, blocks=3))
    saved = 3 * rows[0] + rows[1]
    assert metrics.total("host_saved_bytes") == saved and metrics.total("host_save_seconds") == 1
    assert metrics.total("host_saved_bytes") == saved, "it is asked for again"
    assert metrics.states()["host_tokens"] == 3 * BLOCK and metrics.states()["host_snapshots"] == 1
    assert metrics.states()["host_capacity_tokens"] == 12 * BLOCK and metrics.states()["host_snapshot_capacity"] == 4
    server._make_room(20)
    assert server.serve(prompt(0, blocks=3)) == 3 * BLOCK
    assert metrics.total("host_loaded_bytes") == saved and metrics.total("host_load_seconds") == 1
    assert metrics.total("hit_tokens", "host") == 3 * BLOCK and metrics.total("hit_tokens", "device") == 0
    assert server.serve(prompt(0, blocks=3)) == 3 * BLOCK
    assert metrics.total("hit_tokens", "host") == metrics.total("hit_tokens", "device") == 3 * BLOCK
    assert metrics.total("host_saved_bytes") == saved, "nothing was saved again"
    server._make_room(20)
    assert cache.evict_host(BLOCK) == 3 * BLOCK
    assert metrics.total("host_snapshots_evicted", "blocks") == 1 == metrics.total("host_snapshots_evicted")
    assert metrics.states()["host_tokens"] == 0 == metrics.states()["host_snapshots"]
    assert metrics.total("host_saves_skipped") == 0 == metrics.total("host_loads_failed")


def test_load_of_a_rejected_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load completes, and the next request can read it."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    server.serve(prompt(0))
    server._make_room(20)
    server.arrive(prompt(0))  # aborted before it is admitted
    assert server.controller.load_queue
    server.cache.check_hicache_events()
    assert not server.controller.load_queue
    assert server.serve(prompt(0)) == 6 * BLOCK
    assert not server.wrong
    server.check_contents()
    assert server.flush()


def test_loaded_snapshot_of_used_node_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer releases of SGLang count the users of a node also while it has no snapshot on the device."""
    server = HostCacheServer(monkeypatch, seed=0, blocks=20)
    component, registry = server.component, server.component.slots.registry
    server.serve(prompt(0))
    (parted,) = server.cache.root_node.children.values()
    (node,) = parted.children.values()
    component.slots.give_back([component.allocate_slot(needed=True) for _ in range(server.states.snapshots)])
    server.settle()
    assert component._slot(node) is None and component.slots.id_of(node) > 0
    lock = server.cache.inc_lock_ref(node.id)
    # The audit finds no holder of these locks, but registry and tree agree.
    found = audit(server.cache, server.running).findings
    assert found and not any("its locks" in wrong for _, wrong in found)
    server.arrive(prompt(0))
    server.settle()
    slot, data = component._slot(node), node.component_data[component.component_type]
    assert slot is not None and registry.locks[slot] == data.lock_ref
    server.cache.dec_lock_ref(node.id, lock.to_dec_params())
    assert registry.locks[slot] == data.lock_ref == 0
    server.check()
    assert server.flush()


def test_free_rows_are_taken_in_order() -> None:
    rows = FreeRows(10)
    assert rows.take(3).tolist() == [0, 1, 2] and rows.take(4).tolist() == [3, 4, 5, 6]
    rows.give_back(np.array([1, 2]))
    assert rows.take(4).tolist() == [7, 8, 9, 1], "not in the order in which they were freed"
    assert rows.take(2) is None and rows.available == 1
    assert rows.take(1).tolist() == [2] and rows.take(0).tolist() == []
    rows.give_back(np.array([4]))
    for wrong in ([4], [5, 5]):
        with pytest.raises(ValueError, match="not all of them are allocated"):
            rows.give_back(np.array(wrong))


def test_sizes() -> None:
    device = {"device_blocks": 100, "device_snapshots": 10, "block_bytes": 400_000, "snapshot_bytes": 4_000_000}
    device |= {"max_snapshots": 10, "host_snapshots": None}
    assert host_demand(**device, ratio=2.5, size_gb=0) == (220, 28)
    assert host_demand(**device | {"host_snapshots": 25}, ratio=2.5, size_gb=0) == (250, 25)
    assert host_demand(**device, ratio=2.0, size_gb=1) == (1060, 144)
    assert host_demand(**device | {"host_snapshots": 50}, ratio=2.0, size_gb=1) == (2000, 50)
    # Without `max_snapshots` the device's number counts running requests only. Snapshots then take about a ninth of the
    # bytes of the blocks.
    assert host_demand(**device | {"max_snapshots": None}, ratio=2.5, size_gb=0) == (450, 5)
    with pytest.raises(ValueError, match=r"0 blocks and 0 snapshots \(--hicache-ratio 0.001"):
        host_demand(**device, ratio=0.001, size_gb=0)


def test_a_snapshot_keeps_its_history_when_it_moves() -> None:
    """A path of three snapshots has a branch. The middle snapshot moves to the host and then to another slot."""
    registry = SnapshotRegistry(4, host_rows=3)
    registry.add(1, 100, 0)
    registry.add(2, 300, 1)
    registry.add(3, 600, 2)
    for _ in range(5):
        registry.tick()
    registry.use(2)
    row = registry.host_id(1)

    def history(number: int) -> tuple[float, ...]:
        cost = registry.policy.recompute_cost()[number]
        return registry.length[number], cost, registry.last[number], registry.interval[number]

    before = history(2)
    for place, to in ((2, row), (row, 4)):
        registry.move(place, to)
        assert (
            registry.length[to],
            registry.policy.recompute_cost()[to],
            registry.last[to],
            registry.interval[to],
        ) == before
        assert registry.previous[to] == 1 and registry.previous[3] == to
        assert registry.in_registry[to] and not registry.in_registry[place]
        assert registry.copies.is_saved(to) == (to <= registry.capacity), "the host keeps the copy of a loaded snapshot"
    registry.remove(4)
    assert registry.previous[3] == 1 and registry.in_registry.sum() == 2
    with pytest.raises(ValueError, match="cannot move"):
        registry.move(1, 3)


def search(registry: SnapshotRegistry, tokens: int, slots: int) -> list[int]:
    """Return the snapshots that the device evicts next, and mark them."""
    leaving = registry.policy.next_evicted(tokens, slots)
    registry.policy.mark_next_evicted(leaving)
    return leaving


def registry_of(lengths: dict[int, int]) -> SnapshotRegistry:
    """Return a registry with one snapshot per conversation, one request apart, all marked as pending writes."""
    registry = SnapshotRegistry(8, host_rows=8)
    for slot, length in lengths.items():
        registry.tick()
        registry.add(slot, length, 0)
        registry.note_copy(CopyEvent.NEED, slot)
    registry.tick()
    return registry


def test_duplicates_of_the_device_are_evicted_first() -> None:
    """The host first evicts copies of snapshots that the device keeps, those kept longest first.

    Next are the snapshots that only the host has or that the device evicts next, lowest value first. Per row, a long
    prefix has a higher value than a short one.
    """
    registry = registry_of({1: 4000, 2: 2000, 3: 1000, 4: 500, 5: 3000, 6: 1500})
    assert registry.policy.to_save() == [1, 5, 2, 6, 3, 4], "not in the order of their eviction value"
    row = registry.host_id
    for at, slot in enumerate((5, 6)):
        registry.move(slot, row(at))
    for slot in (1, 2, 3, 4):
        registry.note_copy(CopyEvent.SAVE, slot)
    policy = registry.policy
    assert policy.to_save() == []
    assert search(registry, 0, 2) == [4, 3] and policy.lowest_value(needed=True, saves=0) == 4
    assert list(HostEvictionOrder(policy, for_rows=True, below=0)) == [1, 2, 4, 3, row(1), row(0)]
    assert list(HostEvictionOrder(policy, for_rows=True, below=3)) == [1, 2, 4], "only what is worth less"
    # To free blocks only the likelihood of reuse counts, so the first ones stay.
    assert list(HostEvictionOrder(policy, for_rows=False, below=0)) == [1, 2, row(1), row(0), 4, 3]


def test_order_of_eviction_candidates() -> None:
    """The next evictions are the ends of paths in the order of their leaves, then the snapshots before them.

    Locked snapshots are among them, but free nothing.
    """
    registry = registry_of({1: 1000, 2: 1000, 3: 1000})
    registry.add(4, 1500, 3)
    for _ in range(3):
        registry.tick()
    registry.use(4)  # reused after three requests; the others have waited longer
    assert search(registry, 0, 0) == []
    for tokens, leaving in ((1, [1]), (1001, [1, 2]), (2001, [1, 2, 4]), (2501, [1, 2, 4, 3]), (10**9, [1, 2, 4, 3])):
        assert search(registry, tokens, 0) == leaving
    assert search(registry, 0, 1) == [3]
    registry.lock(1)
    assert search(registry, 1, 0) == [1, 2]
    for slot in (2, 3, 4):
        registry.note_copy(CopyEvent.SAVE, slot)
    # The copy of the next one is no duplicate. The device keeps 4 longest.
    assert list(HostEvictionOrder(registry.policy, for_rows=False, below=0)) == [4, 3, 2]
    registry.lock(2)  # locked by its copy
    assert search(registry, 1, 0) == [1, 2], "it frees its blocks when the copy ends"
    registry.policy.mark_next_evicted([])
    assert search(registry, 1, 0) == [1, 2, 4], "it is locked by a request"
    registry.note_copy(CopyEvent.SAVE, 1)
    # A copy is no duplicate while a request holds the snapshot.
    assert list(HostEvictionOrder(registry.policy, for_rows=False, below=0)) == [3, 1, 2, 4]
