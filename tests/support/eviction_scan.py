"""Full scans of the leaves and of the snapshots, with which tests compare the victims that the eviction orders find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots


def priority(slots: SnapshotSlots, leaf: Any) -> tuple[float, float]:
    """Return the priority of a leaf, smallest first: leaves without a snapshot by their last access, then the others by
    reuse interval."""
    number = slots.id_of(leaf)
    return (
        (-float(slots.registry.policy.reuse_interval()[number]), 0.0)
        if number
        else (-float("inf"), leaf.last_access_time)
    )


def check_next_leaf(slots: SnapshotSlots, leaves: Any) -> None:
    """Assert that the next leaf to evict is one with the smallest priority of all."""
    leaf = leaves.first()
    assert (leaf is None) == (not leaves)
    if leaf is not None:
        assert priority(slots, leaf) == pytest.approx(min(priority(slots, other) for other in leaves), rel=1e-14)


def check_next_slot(registry: SnapshotRegistry) -> None:
    """Assert that the next snapshot to evict for its slot is the one that a scan of the columns finds."""
    evictable = (registry.in_registry & (registry.locks == 0))[: registry.capacity + 1]
    score = np.where(evictable, registry.policy.eviction_score()[: len(evictable)], 0.0)
    assert (
        registry.followers.tolist()
        == np.bincount(registry.previous[registry.in_registry], minlength=len(registry.in_registry)).tolist()
    )
    victim = registry.policy.lowest_value(needed=True, saves=0)
    assert bool(victim) == evictable.any()
    assert score[victim] == pytest.approx(score.max(), rel=1e-14)


def check_sizes(registry: SnapshotRegistry) -> None:
    """Assert that the orders keep no more than their snapshots."""
    policy = registry.policy
    for order in (policy.leaves, policy._for_slots, policy.host_rows, policy.host_blocks):
        assert len(order) <= registry.in_registry.sum()
        for ranking in order.rankings():
            assert ranking.entries <= 2 * len(ranking) + 16
        assert sum(len(ranking) for ranking in order.rankings()) == 2 * len(order)
