"""Tests of the eviction orders: victims are those of a full scan, and what is kept for them does not grow."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from support.eviction_scan import check_next_slot, check_shares, check_sizes, priority
from support.prefix_tree import BLOCK, TIMES, TreeServer, without_a_server

from dsv4_sglang.srt.host_cache import evictions
from dsv4_sglang.srt.host_cache.evictions import HostEvictionOrder
from dsv4_sglang.srt.prefix_cache import cache as cache_module
from dsv4_sglang.srt.prefix_cache.eviction_order import Ranking
from dsv4_sglang.srt.prefix_cache.hint_weights import DEMOTED, Hint
from dsv4_sglang.srt.prefix_cache.host_copy import CopyEvent
from dsv4_sglang.srt.prefix_cache.policy import EVERY
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.prefix_cache.tenants import DEVICE as DEVICE_PLACE
from dsv4_sglang.srt.prefix_cache.tenants import HOST, NO_LIMIT, Room, TenantShares, tenants_of

CAPACITY, ROWS = 24, 8
DEVICE = range(1, CAPACITY + 1)


class RandomRegistry:
    """A registry under random changes, as a tree makes them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # With an odd seed, tenants have shares.
        rooms = Room(200 * BLOCK, CAPACITY), Room(60 * BLOCK, ROWS)
        tenants = tenants_of(20 if seed % 2 else NO_LIMIT, rooms, CAPACITY + ROWS + 1)
        self.registry = SnapshotRegistry(CAPACITY, ROWS, tenants=tenants)
        # All hints are trusted, so that each has an effect.
        self.registry.hints.trust.trusts = lambda hint: True  # type: ignore[method-assign]
        self.seconds = 0
        # Snapshots whose numbers changed since this set was cleared.
        self.renumbered: set[int] = set()

    def one(self, where: Callable[[int], bool], among: range = range(1, CAPACITY + ROWS + 1)) -> int:
        found = [number for number in among if where(number)]
        return self.rng.choice(found) if found else 0

    def change(self) -> str:
        """Make one change, and return its name."""
        kinds = ("add", "add", "use", "lock", "unlock", "remove", "move", "leaf", "tick", "ghost_hit", "hint", "time")
        kind = self.rng.choice(kinds)
        registry, rng = self.registry, self.rng
        held = self.one(lambda n: bool(registry.in_registry[n]))
        idle = self.one(lambda n: bool(registry.in_registry[n]) and not registry.locks[n])
        free = self.one(lambda n: not registry.in_registry[n])
        if kind == "add" and free:
            previous = held if rng.random() < 0.6 else 0
            below = registry.following(previous) if previous and rng.random() < 0.5 else set()
            above = int(registry.length[previous])
            room = min((int(registry.length[n]) for n in below), default=above + 40 * BLOCK) - above
            if room > BLOCK:
                tenants, tenant = registry.tenants, rng.choice("abcdef")
                if isinstance(tenants, TenantShares) and previous:
                    tenant = tenants.names[int(tenants.of[previous])]
                registry.add(free, above + rng.randrange(1, room // BLOCK) * BLOCK, previous, below, tenant=tenant)
        elif kind == "use" and held:
            registry.use(held)
        elif kind == "lock" and held:
            registry.lock(held)
        elif kind == "unlock" and (locked := self.one(lambda n: registry.locks[n] > 0)):
            registry.unlock(locked)
        elif kind == "remove" and idle:
            registry.remove(idle, path_hash=rng.randrange(1, 5))
            self.renumbered.add(idle)
        elif kind == "move" and idle and free:
            registry.move(idle, free)
            self.renumbered.add(idle)
        elif kind == "leaf" and held:
            registry.policy.at_leaf(held, rng.random() < 0.7)
        elif kind == "tick":
            registry.tick()
        elif kind == "ghost_hit":
            registry.ghost_hit([rng.randrange(1, 5)])
        elif kind == "hint" and held:
            hint = Hint(rng.choice((DEMOTED, 2.0, 16.0)), "", rng.choice((0.0, 3.0, 40.0)))
            registry.hint(held, hint, rng.choice((None, self.seconds + 9)))
        elif kind == "time":
            self.seconds += 1
            registry.end_hints(self.seconds)
        return kind


def next_evicted(registry: SnapshotRegistry, marked: list[int], tokens: int, slots: int) -> list[int]:
    """Return what `EvictionPolicy.next_evicted` returns, by sorting everything. `marked`: the last result."""
    here = [n for n in range(1, CAPACITY + 1) if registry.in_registry[n]]
    free = [n for n in here if not registry.locks[n] or (n in marked and registry.copies.is_saved(n))]
    factor = registry.tenants.factor(DEVICE_PLACE, EVERY)
    score, interval = registry.policy.eviction_score() * factor, registry.policy.reuse_interval() * factor
    going: dict[int, None] = {}
    for number in sorted(here, key=lambda n: -score[n]) if slots > 0 else ():
        going[number] = None
        slots -= number in free
        if slots == 0:
            break
    children = {n: [m for m in here if registry.previous[m] == n] for n in here}
    ends = [(-interval[n], n) for n in here if not children[n]]
    heapq.heapify(ends)
    while ends and tokens > 0:
        number = heapq.heappop(ends)[1]
        going[number] = None
        if number in free:
            above = int(registry.previous[number])
            tokens -= int(registry.length[number] - registry.length[above])
            if above in children:
                children[above].remove(number)
                if not children[above]:
                    heapq.heappush(ends, (-interval[above], above))
    return list(going)


@pytest.mark.parametrize("seed", range(8))
def test_orders_equal_full_scans_after_changes(seed: int) -> None:
    of = RandomRegistry(seed)
    registry = of.registry
    seen, marked = set(), list[int]()
    for _ in range(600 * TIMES):
        seen.add(of.change())
        check_next_slot(registry)
        check_sizes(registry)
        check_shares(registry)
        assert not list(registry.policy.misplaced())
        leaves = list(registry.policy.leaves.entries)
        interval = registry.policy.reuse_interval() * registry.tenants.factor(DEVICE_PLACE, EVERY)
        longest = max((float(interval[n]) for n in leaves), default=0.0)
        victim = registry.policy.next_leaf()
        assert float(interval[victim]) == pytest.approx(longest, rel=1e-14) if leaves else victim == 0
        if of.rng.random() < 0.1:
            tokens, slots = of.rng.randrange(0, 60 * BLOCK), of.rng.randrange(0, 12)
            marked = [n for n in marked if n not in of.renumbered]
            expected = next_evicted(registry, marked, tokens, slots)
            assert registry.policy.next_evicted(tokens, slots) == expected
            registry.policy.mark_next_evicted(marked := expected)
            of.renumbered.clear()
            for number in expected:
                if of.rng.random() < 0.5 and not registry.copies.is_saved(number):
                    registry.note_copy(CopyEvent.SAVE, number)
    assert len(seen) == 11


def host_values(registry: SnapshotRegistry, for_rows: bool) -> np.ndarray:
    """Return the value of the host copy of each snapshot. Duplicates of what the device keeps have negative ones."""
    scores = registry.policy.eviction_score() if for_rows else registry.policy.reuse_interval()
    value = 1 / (scores * registry.tenants.factor(HOST, EVERY))
    return np.where(registry.policy.duplicates(), -value, value)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("for_rows", [False, True])
def test_host_order_equals_a_full_sort(monkeypatch: pytest.MonkeyPatch, for_rows: bool, seed: int) -> None:
    """The order is sorted in parts, and ends of paths are inserted meanwhile."""
    monkeypatch.setattr(evictions, "READ_AT_FIRST", 2)
    of, longest = RandomRegistry(seed), 0
    registry, rng = of.registry, of.rng
    for _ in range(60 * TIMES):
        for _ in range(5):
            of.change()
        registry.policy.mark_next_evicted(leaving := registry.policy.next_evicted(0, rng.randrange(4)))
        # The copy of a snapshot that leaves next is no duplicate, from the moment when it is made.
        for number in {*leaving, of.one(lambda n: bool(registry.in_registry[n]), DEVICE)} - {0}:
            if not registry.copies.is_saved(number):
                registry.note_copy(CopyEvent.SAVE, number)
        copied = registry.copies.saved() | (np.arange(registry.size) > CAPACITY)
        on_host = np.flatnonzero(registry.in_registry & copied).tolist()
        values, below = host_values(registry, for_rows), rng.choice([0, *on_host])
        bound = abs(values[below]) if below else float("inf")
        heap = [(values[n], n) for n in on_host if values[n] < bound]
        longest = max(longest, len(heap))
        heapq.heapify(heap)
        order = HostEvictionOrder(registry.policy, for_rows=for_rows, below=below)
        for number in order:
            assert number == heapq.heappop(heap)[1]
            if rng.random() < 0.3:
                order.insert(end := rng.choice(on_host))
                if values[end] < bound:
                    heapq.heappush(heap, (values[end], end))
        assert not heap
    assert longest > 10, "the order was never sorted in parts"


def test_optional_snapshots_evict_only_less_valuable_ones() -> None:
    registry = SnapshotRegistry(4)
    registry.add(1, 8 * BLOCK, 0)
    registry.add(2, 16 * BLOCK, 1)
    registry.tick()
    registry.use(2)
    registry.reuse.mean_interval = 100.0
    assert registry.policy.lowest_value(needed=True, saves=BLOCK) == 1, "the superseded one"
    # The new one saves as many tokens x reuses as the superseded one, or one block more.
    assert registry.policy.lowest_value(needed=False, saves=8 * BLOCK) == 0
    assert registry.policy.lowest_value(needed=False, saves=9 * BLOCK) == 1


def test_candidates_are_limited() -> None:
    registry = SnapshotRegistry(40)
    for slot in range(1, 41):
        registry.add(slot, slot % 5 * BLOCK + BLOCK, 0)
        registry.tick()
    policy = registry.policy
    everything = policy.next_evicted(10**9, 0, most=40)
    assert len(everything) == 40
    assert policy.next_evicted(10**9, 0, most=7) == everything[:7]
    by_slot = policy.next_evicted(0, 40, most=40)
    assert policy.next_evicted(0, 40, most=7) == by_slot[:7]


def test_a_ranking_does_not_grow_with_its_changes() -> None:
    ranking, rng = Ranking(), random.Random(0)
    keys: dict[int, float] = {}
    for turn in range(5000):
        item = rng.randrange(20)
        if rng.random() < 0.6:
            keys[item] = rng.randrange(50)
            ranking.put(item, keys[item])
        else:
            keys.pop(item, None)
            ranking.drop(item)
        assert ranking.entries <= 2 * len(ranking) + 16
        assert ranking.first() == min(((key, item) for item, key in keys.items()), default=None), turn
    for item in list(keys):
        ranking.drop(item)
    assert ranking.first() is None and not len(ranking) and not ranking.entries


# On SGLang's tree


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TreeServer:
    """A server with branched conversations of several turns, some of which came back, and leaves without a snapshot."""
    without_a_server(monkeypatch)
    return grown(TreeServer(blocks=400, snapshots=90, interval=3, chunk=6), random.Random(3))


def grown(server: TreeServer, rng: random.Random, requests: int = 120) -> TreeServer:
    for _ in range(requests):
        base = list(rng.choice(server.history)) if server.history and rng.random() < 0.7 else []
        request = server.admit([*base[: rng.randint(0, 12)], *(rng.randrange(9) for _ in range(rng.randint(1, 6)))])
        assert request is not None
        server.finish(request)
        if rng.random() < 0.1:
            server.press(0, 1)
    return server


def test_every_victim_is_that_of_a_full_scan(server: TreeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    core, slots = server.cache.tree_core, server.component.slots
    kinds, evict = set(), core.evict_device_leaf

    def compared(node_id: int, *arguments: object) -> object:
        got = priority(slots, core.node_by_id(node_id))
        assert got == pytest.approx(min(priority(slots, leaf) for leaf in core.evictable_device_leaves), rel=1e-14)
        kinds.add(got[0] == -float("inf"))
        return evict(node_id, *arguments)

    monkeypatch.setattr(core, "evict_device_leaf", compared)
    rng = random.Random(5)
    while core.evictable_device_leaves:
        server.component.slots.registry.tick()
        server.cache.evict(EvictParams(num_tokens=BLOCK * rng.randint(1, 9)))
        server.check()
    assert kinds == {False, True}
    assert (
        not server.component.slots.registry.in_registry.any()
        and server.allocator.available_size() == server.blocks * BLOCK
    )


def test_an_eviction_does_not_visit_all_leaves(server: TreeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = server.cache.tree_core.evictable_device_leaves
    read, id_of = [], SnapshotSlots.id_of
    monkeypatch.setattr(SnapshotSlots, "id_of", lambda slots, node: read.append(node) or id_of(slots, node))
    server.cache.evict(EvictParams(num_tokens=1))
    assert 0 < len(read) < 12 < len(leaves)


def test_spared_leaf_keeps_its_place(server: TreeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang declines a leaf if the host lacks room for what must be saved. The next ones are evicted, each once, and
    only leaves that this lays bare may come before it then."""
    core, asked, trackers = server.cache.tree_core, [], []
    leaves, evict = core.evictable_device_leaves, server.cache._evict_device_leaf

    def declining(node_id: int, tracker: object) -> object:
        asked.append(node_id)
        trackers.append(tracker)
        node = core.node_by_id(node_id)
        server.cache.dec_lock_ref(node_id, server.cache.inc_lock_ref(node_id).to_dec_params())  # as for a save
        return None if len(asked) == 1 else evict(node.id, tracker)

    monkeypatch.setattr(server.cache, "_evict_device_leaf", declining)
    first, before = leaves.first(), list(leaves)
    server.cache.evict(EvictParams(num_tokens=20 * BLOCK))
    assert len(asked) == len(set(asked)) > 2 and asked[0] == first.id
    while leaves.first() not in before:
        evict(leaves.first().id, trackers[0])
    assert leaves.first() is first
    server.check()


def test_a_large_tree_is_not_checked(server: TreeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    node = next(iter(server.component.slots.nodes.values()))
    parent, node.parent = node.parent, None
    nodes = len(server.cache.tree_core._collect_all_nodes())
    monkeypatch.setattr(cache_module, "CHECKED_NODES", nodes - 1)
    server.cache.sanity_check()
    monkeypatch.setattr(cache_module, "CHECKED_NODES", nodes)
    with pytest.raises(AssertionError):
        server.cache.sanity_check()
    node.parent = parent
