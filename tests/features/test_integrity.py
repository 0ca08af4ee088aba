"""Tests of the integrity check: each test breaks one thing that the check covers and expects an error that names it.
Intact caches are covered by test_prefix_sglang.py and test_host_cache.py, which run the check after their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_parallel
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, without_a_server

from dsv4_sglang.srt.features.integrity import report as reports
from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.features.integrity.owners import PoolOwners
from dsv4_sglang.srt.prefix_cache.eviction_order import Entry
from dsv4_sglang.srt.prefix_cache.host_copy import CopyEvent
from dsv4_sglang.srt.prefix_cache.notes import Pending, RequestNote


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCacheServer]:
    """Server with a six-block path and a branch of it on device and host, and a running request that resumed from
    them."""
    without_a_server(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    server = HostCacheServer(monkeypatch, seed=0)
    line = [at // BLOCK for at in range(6 * BLOCK)]
    server.serve([*line, 1])
    server.serve([*line[: 4 * BLOCK], *[99] * (2 * BLOCK), 1])
    server.start([*line, *[7] * 200])
    for _ in range(2):  # The first pass saves, the second acknowledges the saves.
        server.streams.run_all()
        server.cache.check_hicache_events()
    server.check()
    yield server
    torch.set_num_threads(threads)


def cached(server: HostCacheServer) -> Any:
    """Return an unlocked leaf node with a snapshot on device and host."""
    nodes = server.component.slots.nodes.values()
    return next(node for node in nodes if not node.children and not node.component_data[ComponentType.FULL].lock_ref)


def full(server: HostCacheServer) -> Any:
    return cached(server).component_data[ComponentType.FULL]


def mamba(server: HostCacheServer) -> Any:
    return cached(server).component_data[ComponentType.MAMBA]


def running(server: HostCacheServer) -> Any:
    return server.running[0]


def row(server: HostCacheServer) -> torch.Tensor:
    return server.pool.req_to_token[running(server).req_pool_idx]


def free_too(server: HostCacheServer) -> None:
    page = full(server).value[:1] // BLOCK
    server.allocator.free_pages = torch.cat([server.allocator.free_pages, page])


def pending_twice(server: HostCacheServer) -> None:
    RequestNote.of(running(server)).pending = [Pending(BLOCK, int(mamba(server).value), rolling=False)]


def two_nodes_one_row(server: HostCacheServer) -> None:
    other = next(n for n in server.component.slots.nodes.values() if n is not cached(server))
    mamba(server).host_value = other.component_data[ComponentType.MAMBA].host_value


def forgotten_node(server: HostCacheServer) -> None:
    del server.component.slots.nodes[int(mamba(server).value)]


def shifted_blocks(server: HostCacheServer) -> None:
    full(server).value = full(server).value + 1


def let_go_too_early(server: HostCacheServer) -> None:
    server.cache.unlock(running(server).lock)


def held_by_nobody(server: HostCacheServer) -> None:
    running(server).lock.node = 10**6
    running(server).last_node = 10**6


def pin(server: HostCacheServer) -> Any:
    """Pin the unlocked leaf, and return the pin."""
    server.limit_pins()
    assert server.cache.pins.pin(("tenant", "name"), cached(server), until=9)
    return dict(server.cache.pins)["tenant", "name"]


def charged_with_less(server: HostCacheServer) -> None:
    server.cache.pins._pins["tenant", "name"] = pin(server)._replace(tokens=BLOCK)


def other_table(server: HostCacheServer) -> None:
    row(server)[:BLOCK], row(server)[BLOCK : 2 * BLOCK] = (
        row(server)[BLOCK : 2 * BLOCK].clone(),
        row(server)[:BLOCK].clone(),
    )


FAULTS: dict[str, tuple[Callable[[HostCacheServer], Any], str]] = {
    "a leaked block": (lambda s: s.allocator.alloc(BLOCK), r"block \d+: no owner"),
    "a cached block that is free, too": (free_too, r"block \d+: 2 owners: the free list, node \d+"),
    "a request with a block of the tree": (
        lambda s: row(s)[7 * BLOCK : 8 * BLOCK].copy_(full(s).value[:BLOCK]),
        r"block \d+: 2 owners: request \d+, node \d+",
    ),
    "a node whose indices are no blocks": (shifted_blocks, "is not a list of whole blocks of 128 tokens"),
    "a table that is not the path": (other_table, r"request \d+: its block table starts with .* has \["),
    "a leaked snapshot slot": (lambda s: s.component.slots.take(), r"snapshot slot \d+: no owner"),
    "a request with a snapshot of the tree": (pending_twice, r"snapshot slot \d+: 2 owners: request \d+, node"),
    "a leaked state slot": (lambda s: s.pool.mamba_allocator.alloc(1), r"state slot \d+: no owner"),
    "a leaked request row": (lambda s: s.pool.free_slots.pop(), r"request row \d+: no owner"),
    "a row that is not there": (lambda s: s.pool.free_slots.append(99), r"request row 99: owned by .*, outside 1\.\.6"),
    "a leaked host block": (lambda s: s.cache.full_kv_pool_host.alloc(BLOCK), r"host block \d+: no owner"),
    "a host row owned twice": (two_nodes_one_row, r"host snapshot \d+: 2 owners: node \d+, node \d+"),
    "a lock left": (
        lambda s: s.cache.inc_lock_ref(cached(s).id),
        r"snapshot of node \d+: locked 1 times, held by no owner",
    ),
    "a lock let go too early": (
        let_go_too_early,
        r"blocks of node \d+: locked 0 times, held by request \d+",
    ),
    "a lock left on the host": (
        lambda s: s.cache.inc_host_lock_ref(cached(s).id),
        r"blocks of node \d+: locked 1 times on the host, held by 0 transfers",
    ),
    "a pin that was let go": (
        lambda s: s.cache.unlock(pin(s).lock),
        r"snapshot of node \d+: locked 0 times, held by pin 'name' of tenant 'tenant'",
    ),
    "a pin that was forgotten": (
        lambda s: (pin(s), s.cache.pins.forget()),
        r"snapshot of node \d+: locked 1 times, held by no owner",
    ),
    "a pin that is charged with less": (
        charged_with_less,
        r"pin 'name' of tenant 'tenant': charged with 128 tokens, but its path has 768",
    ),
    "a request that holds a node that is gone": (
        held_by_nobody,
        r"request \d+: it holds node 1000000, which is not in the tree",
    ),
    "a snapshot of another length": (
        lambda s: s.component.slots.registry.length.__setitem__(int(mamba(s).value), 5),
        r"snapshot \d+: its length: the registry has 5, the tree 768",
    ),
    "another snapshot before it": (
        lambda s: s.component.slots.registry.previous.__setitem__(int(mamba(s).value), 0),
        r"snapshot \d+: the snapshot before it: the registry has 0, the tree \d",
    ),
    "a snapshot that is locked in the registry only": (
        lambda s: s.component.slots.registry.lock(int(mamba(s).value)),
        r"snapshot \d+: its locks: the registry has 1, the tree 0",
    ),
    "a copy that the registry does not know": (
        lambda s: s.component.slots.registry.copies.apply(CopyEvent.LOSE, int(mamba(s).value)),
        r"its host copy: the registry has False, the tree True",
    ),
    "a snapshot that the slots have forgotten": (forgotten_node, r"attached to node \d+, but the slots have another"),
    "a snapshot that the registry has forgotten": (
        lambda s: s.component.slots.registry.in_registry.__setitem__(int(mamba(s).value), False),
        r"attached to node \d+, but missing in the registry",
    ),
    "a snapshot without a node": (
        lambda s: s.component.slots.registry.in_registry.__setitem__(14, True),
        "snapshot 14: in the slots or the registry, but on no node of the tree",
    ),
    "a snapshot that the order of slots has lost": (
        lambda s: s.component.slots.registry.policy._for_slots.drop(int(mamba(s).value)),
        r"snapshot \d+: its place in an eviction order",
    ),
    "a snapshot in the order of slots that is none": (
        lambda s: s.component.slots.registry.policy._for_slots.put(14, Entry(1, 0.0, 1.0)),
        r"snapshot 14: its place in an eviction order",
    ),
    "a leaf that the order has lost": (
        lambda s: s.cache.tree_core.evictable_device_leaves.take_first(),
        r"node \d+: the order of leaves and the tree differ",
    ),
    "a snapshot in the order of leaves that is at no leaf": (
        lambda s: s.component.slots.registry.policy.at_leaf(14, True),
        r"node \d+: the order of leaves and the tree differ",
    ),
    "a size that is not the tree's": (
        lambda s: s.cache.tree_core.component_evictable_size_.__setitem__(ComponentType.FULL, 7),
        r"SGLang's check of the tree: .*\n.*evictable=7",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_audit_reports_injected_faults(server: HostCacheServer, name: str) -> None:
    fault, words = FAULTS[name]
    fault(server)
    found = audit(server.cache, server.running)
    assert found.findings
    with pytest.raises(AssertionError, match=words):
        server.check()


def test_blocks_of_unknown_requests_are_leaks(server: HostCacheServer) -> None:
    found = [f"{what}: {wrong}" for what, wrong in audit(server.cache, []).findings]
    for thing in ("block", "request row", "state slot"):
        assert any(text.startswith(thing) and text.endswith("no owner: leaked") for text in found), thing
    assert any("held by no owner" in text for text in found)


def test_a_report_does_not_grow_with_a_leak(server: HostCacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = SimpleNamespace(_check_all_pools=lambda stats: (True, ["the sums"]))
    scheduler = SimpleNamespace(
        tree_cache=server.cache,
        running_batch=SimpleNamespace(reqs=server.running),
        last_batch=None,
        enable_overlap=False,
        chunked_req=None,
        waiting_queue=[],
        disaggregation_mode=SimpleNamespace(value="null"),
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        _pending_chunked_abort_req=running(server),
        is_fully_idle=lambda: True,
        invariant_checker=idle,
        pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: None),
    )
    monkeypatch.setattr(reports, "MAX_FINDINGS", 3)
    server.allocator.free_pages = server.allocator.free_pages[:2]
    with get_parallel().override(attn_dp_rank=0, tp_rank=0):
        report = reports.report(scheduler)
    assert report["wrong"] == 29 and len(report["findings"]) == 3 and report["requests"] == 1
    pools = {pool.pop("of"): pool for pool in report["pools"]}
    assert pools["state slot"] == {"size": 6, "free": 5, "cached": 0, "requests": 1, "copies": 0}
    assert pools["host block"]["cached"] == 9


def test_audits_take_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks all the time gets the last report with its age until the next audit is due."""
    now, audits = 100.0, 0

    def audit_of_two_seconds(scheduler: Any) -> dict[str, Any]:
        nonlocal now, audits
        now, audits = now + 2, audits + 1
        return {"seconds": 2, "audit": audits}

    monkeypatch.setattr(reports, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(reports, "report", audit_of_two_seconds)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    scheduler = SimpleNamespace(attn_tp_cpu_group=None)
    seen = []
    for _ in range(10):
        output = reports.add_reports(lambda *_: SimpleNamespace(internal_state={}), scheduler, None)
        (report,) = output.internal_state[reports.KEY]
        seen.append((report["audit"], report["age_seconds"]))
        now += 6
    torch.distributed.destroy_process_group()
    assert seen == [(1, 2), (1, 8), (1, 14), (2, 2), (2, 8), (2, 14), (3, 2), (3, 8), (3, 14), (4, 2)]


def test_many_owners_are_counted() -> None:
    pool = PoolOwners("block", range(1, 3))
    for i in range(9):
        pool.record_owner("requests", f"request {i}", [2])
    assert [tuple(finding) for finding in pool.findings()] == [
        ("block 1", "no owner: leaked"),
        ("block 2", "9 owners: " + ", ".join(f"request {i}" for i in range(6)) + " and 3 more"),
    ]
