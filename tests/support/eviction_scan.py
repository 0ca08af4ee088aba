"""Full scans of the leaves and of the snapshots, with which tests compare the victims that the eviction orders find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsv4_sglang.srt.prefix_cache.policy import EVERY
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.prefix_cache.tenants import DEVICE, HOST, PLACES, TenantShares


def priority(slots: SnapshotSlots, leaf: Any) -> tuple[float, float]:
    """Return the priority of a leaf, smallest first: leaves without a snapshot by their last access, then the others by
    reuse interval."""
    number, registry = slots.id_of(leaf), slots.registry
    scores = registry.policy.reuse_interval() * registry.tenants.factor(DEVICE, EVERY)
    return (-float(scores[number]), 0.0) if number else (-float("inf"), leaf.last_access_time)


def check_next_leaf(slots: SnapshotSlots, leaves: Any) -> None:
    """Assert that the next leaf to evict is one with the smallest priority of all."""
    leaf = leaves.first()
    assert (leaf is None) == (not leaves)
    if leaf is not None:
        assert priority(slots, leaf) == pytest.approx(min(priority(slots, other) for other in leaves), rel=1e-14)


def check_next_slot(registry: SnapshotRegistry) -> None:
    """Assert that the next snapshot to evict for its slot is the one that a scan of the columns finds."""
    evictable = (registry.in_registry & (registry.locks == 0))[: registry.capacity + 1]
    scores = registry.policy.eviction_score() * registry.tenants.factor(DEVICE, EVERY)
    score = np.where(evictable, scores[: len(evictable)], 0.0)
    assert (
        registry.followers.tolist()
        == np.bincount(registry.previous[registry.in_registry], minlength=len(registry.in_registry)).tolist()
    )
    answers = registry.previous[registry.in_registry & registry.in_answer]
    assert registry.answers.tolist() == np.bincount(answers, minlength=len(registry.in_registry)).tolist()
    victim = registry.policy.lowest_value(needed=True, saves=0)
    assert bool(victim) == evictable.any()
    assert score[victim] == pytest.approx(score.max(), rel=1e-14)
    # Of equal ones, the smallest number.
    policy, mean = registry.policy, registry.reuse.mean_interval
    ranked = [
        (-policy.entry(n, for_rows=True).score(registry.now, mean) * registry.tenants.factor(DEVICE, n), n)
        for n in np.flatnonzero(evictable).tolist()
    ]
    assert victim == min(ranked, default=(0.0, 0))[1]


def check_sizes(registry: SnapshotRegistry) -> None:
    """Assert that the orders keep no more than their snapshots."""
    policy = registry.policy
    for order in (policy.leaves, policy._for_slots, policy.host_rows, policy.host_blocks):
        assert len(order) <= registry.in_registry.sum()
        for ranking in order.rankings():
            assert ranking.entries <= 2 * len(ranking) + 16
        assert sum(len(ranking) for ranking in order.rankings()) == 2 * len(order)


def check_shares(registry: SnapshotRegistry) -> None:
    """Assert that the counts of tenants, and those above their share, are those of a full scan."""
    shares = registry.tenants
    if not isinstance(shares, TenantShares):
        return
    for place in PLACES:
        held: dict[int, tuple[int, int]] = {}
        for number in np.flatnonzero(registry.in_registry).tolist():
            if (number > registry.capacity) == (place == HOST):
                tokens, snapshots = held.get(int(shares.of[number]), (0, 0))
                tokens += int(registry.length[number] - registry.length[registry.previous[number]])
                held[int(shares.of[number])] = tokens, snapshots + 1
        assert held == shares.held[place]
        room = shares._rooms[place]
        above = {of for of, now in held.items() if any(100 * n > shares.percent * m for n, m in zip(now, room))}
        assert above == shares.above[place]
        assert set(np.flatnonzero(shares._factors[place] != 1.0).tolist()) == above
    assert shares.names.keys() == shares.held[DEVICE].keys() | shares.held[HOST].keys()
