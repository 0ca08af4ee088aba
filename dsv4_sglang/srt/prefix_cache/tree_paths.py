"""Paths in SGLang's tree, and the snapshots on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.path_hash import path_hashes
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.sglang.tree import path_to_root

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


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


def branch_node(core: Any, req: Req) -> UnifiedTreeNode | None:
    """Return the node at whose end a request leaves the cached path, if that is after the snapshot from which it
    resumes. SGLang's match has split the path there."""
    length, end = req.prefix_len, req.mamba_branching_seqlen or 0
    if end <= length:
        return None
    key = RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt)
    key, _ = key.maybe_to_bigram_view(core.is_eagle)
    node = core.node_by_id(req.last_node)
    while length < end and (node := node.children.get(key.child_key_at(length, BLOCK))) is not None:
        length += len(node.key)
    return node


def ghost_hash(slots: SnapshotSlots, node: UnifiedTreeNode, number: int) -> int:
    """Return the hash of the token path of an evicted snapshot, to detect ghost hits. Return 0 if a later snapshot
    follows it, since the conversation would resume from that one."""
    if slots.registry.following(number):
        return 0
    parts = [np.asarray(part.key.raw_token_ids())[: len(part.key)] for part in path_to_root(node)]
    return int(path_hashes(np.concatenate(parts[::-1]), node.key.extra_key, node.key.cache_salt)[-1])
