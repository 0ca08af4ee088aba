"""Paths in SGLang's tree, and the snapshots on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dsv4_sglang.srt.prefix_cache.path_hash import path_hashes
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


def path_to_root(node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
    """Yield the nodes from this one up to the child of the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def snapshot_above(slots: SnapshotSlots, node: UnifiedTreeNode) -> int:
    """Return the registry number of the next snapshot above the node, or 0."""
    return next((number for above in path_to_root(node.parent) if (number := slots.id_of(above))), 0)


def snapshots_below(slots: SnapshotSlots, node: UnifiedTreeNode) -> list[int]:
    """Return the registry numbers of the first snapshot on each path below the node."""
    numbers, stack = [], list(node.children.values())
    while stack:
        below = stack.pop()
        if number := slots.id_of(below):
            numbers.append(number)
        else:
            stack.extend(below.children.values())
    return numbers


def ghost_hash(slots: SnapshotSlots, node: UnifiedTreeNode, number: int) -> int:
    """Return the hash of the token path of an evicted snapshot, to detect ghost hits. Return 0 if a later snapshot
    follows it, since the conversation would resume from that one."""
    if slots.registry.following(number):
        return 0
    parts = [np.asarray(part.key.raw_token_ids())[: len(part.key)] for part in path_to_root(node)]
    return int(path_hashes(np.concatenate(parts[::-1]), node.key.extra_key, node.key.cache_salt)[-1])
