"""KV events (`--kv-events-config`): report to a router which blocks are cached. docs/guides/kv_events.md.

SGLang's tree reports each block that it stores or evicts. This package announces a block only while a request can
resume at its end or later: a snapshot on the device or on the host must exist at the block's end or further down the
path. Blocks without such a snapshot are in memory, but no request can resume from them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import (
    compute_node_event_hash_values,
    compute_node_hash_values,
    hash_str_to_int64,
)

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

MEDIA = (StorageMedium.GPU, StorageMedium.CPU)


class PrefixEvents:
    """KV event recorder of one tree, which replaces SGLang's recorder.

    Changes are noted when they happen. `take` compares the announced blocks with the changed nodes and their ancestors,
    and returns the difference as events. Blocks are identified by their hashes, so a node may be split at any time.
    Blocks of requests with an `extra_key` or a `cache_salt` are not announced, because other requests cannot hit them.
    In Dynamo's format an event has a `cache_salt`, so blocks of requests with a salt and no `extra_key` are announced.
    """

    def __init__(self, dynamo: bool = False) -> None:
        """`dynamo`: announce in Dynamo's format."""
        self.dynamo = dynamo
        self.announced: dict[StorageMedium, set[int]] = {medium: set() for medium in MEDIA}
        # It joins the events of consecutive blocks.
        self._queue = KVCacheEventRecorder(enabled=True, page_size=BLOCK)
        # Changed nodes and their hashes at the time of the change: a node may be split or removed before `take`.
        self._changed: dict[Any, list[int]] = {}

    # Interface that SGLang's tree calls

    def record_store(self, node: Any, medium: Any = None, **others: Any) -> None:
        self.changed(node)

    def record_remove(self, node: Any, medium: Any = None) -> None:
        self.changed(node)

    def record_all_cleared(self) -> None:
        self._changed.clear()
        for announced in self.announced.values():
            announced.clear()
        self._queue.enqueue(AllBlocksCleared())

    def take(self) -> list[Any]:
        """Return the events since the previous call."""
        self.publish_changes()
        return self._queue.take()

    # Changes

    def changed(self, node: Any) -> None:
        """Note that blocks or the snapshot of `node` are added or removed. The node must still be in the tree."""
        if node.parent is None or not is_for_routers(node.key, self.dynamo):
            return
        if node.hash_value is None:
            node.hash_value = compute_node_hash_values(node, BLOCK)
        self._changed.setdefault(node, []).extend(_hashes(node))

    def publish_changes(self) -> None:
        """Queue the events of all changes so far."""
        if not self._changed:
            return
        nodes, resumable = self._affected(), dict[Any, bool]()
        for node in reversed(nodes):
            resumable[node] = self._is_resumable(node, resumable)
        for medium in MEDIA:
            self._publish_changes_on(
                medium, nodes, {node for node in nodes if resumable[node] and on_medium(node, medium)}
            )
        self._changed.clear()

    def _publish_changes_on(self, medium: StorageMedium, nodes: list[Any], present: set[Any]) -> None:
        """Queue the events of one medium.

        Either all blocks of an unchanged node are announced, or none. If a node was split after it changed, the hashes
        of both parts are among the changed ones.

        Args:
            medium: Device or host.
            nodes: Changed nodes and their ancestors.
            present: Nodes whose blocks must be announced on the medium.
        """
        announced, wanted = self.announced[medium], dict[int, tuple[Any, list[int], int]]()
        changed = {name for hashes in self._changed.values() for name in hashes}
        touched = set(changed)
        for node in nodes:
            last = _last_hash(node)
            if last in changed or (last in announced) != (node in present):
                hashes = _hashes(node)
                touched.update(hashes)
                if node in present:
                    wanted.update({name: (node, hashes, i) for i, name in enumerate(hashes)})
        stored, removed = difference(announced, wanted, touched)
        if removed:
            self._queue.enqueue(BlockRemoved(block_hashes=removed, medium=medium))
        for name in stored:
            self._queue.enqueue(_stored(*wanted[name], medium))
        announced.difference_update(removed)
        announced.update(stored)

    def _affected(self) -> list[Any]:
        """Return the nodes in the tree that changed or have a changed descendant, parents first."""
        depths: dict[Any, int] = {}
        for node in self._changed:
            path: list[Any] = []
            while node.parent is not None and node not in depths:
                path.append(node)
                if node.parent.children.get(node.key.child_key(BLOCK)) is not node:  # removed, with its whole subtree
                    path.clear()
                node = node.parent
            for below in reversed(path):
                depths[below] = depths.get(below.parent, 0) + 1
        return sorted(depths, key=lambda node: depths[node])

    def _is_resumable(self, node: Any, known: dict[Any, bool]) -> bool:
        """Return True if a snapshot exists at the node's end or below it.

        `known` holds the result for children among the affected nodes. A child that is not among them is resumable if
        it is announced.
        """
        if has_snapshot(node):
            return True
        return any(known[child] if child in known else self._is_announced(child) for child in node.children.values())

    def _is_announced(self, node: Any) -> bool:
        last = _last_hash(node)
        return any(last in announced for announced in self.announced.values())


def note_change(cache: Any, node: Any) -> None:
    """Record for --kv-events-config that blocks or the snapshot of a node are added or removed."""
    if cache.events is not None:
        cache.events.changed(node)


def is_for_routers(key: Any, dynamo: bool) -> bool:
    """Return True if events of the format tell which requests find the blocks of this key of the tree."""
    return key.extra_key is None and (dynamo or key.cache_salt is None)


def has_snapshot(node: Any) -> bool:
    """Return True if the device or the host has a snapshot of the state at the node's end."""
    data = node.component_data[ComponentType.MAMBA]
    return data.value is not None or data.host_value is not None


def difference(announced: set[int], wanted: Collection[int], touched: Collection[int]) -> tuple[list[int], list[int]]:
    """Compare the announced blocks with those that must be announced.

    Args:
        announced: hashes that are announced.
        wanted: hashes among `touched` that must be announced, parents first.
        touched: hashes that may have changed. All others stay as they are.

    Returns:
        Hashes to announce, in the order of `wanted`, and hashes to withdraw, in ascending order.
    """
    stored = [name for name in wanted if name not in announced]
    removed = sorted(announced.intersection(touched).difference(wanted))
    return stored, removed


def on_medium(node: Any, medium: StorageMedium) -> bool:
    """Return True if the node's blocks are on `medium` and no copy to it is in flight."""
    data = node.component_data[ComponentType.FULL]
    if medium is StorageMedium.GPU:
        return data.value is not None
    return data.host_value is not None and node.write_through_pending_id is None


def announced_by_rule(root: Any, dynamo: bool) -> dict[StorageMedium, set[int]]:
    """Return the hashes that must be announced in a format, computed by a walk over the whole tree.

    This is the reference for `PrefixEvents.announced`.
    """
    order, stack = [], list(root.children.values())
    while stack:
        order.append(node := stack.pop())
        stack.extend(node.children.values())
    resumable: set[Any] = set()
    found: dict[StorageMedium, set[int]] = {medium: set() for medium in MEDIA}
    for node in reversed(order):
        if has_snapshot(node) or any(child in resumable for child in node.children.values()):
            resumable.add(node)
            for medium in MEDIA:
                if is_for_routers(node.key, dynamo) and on_medium(node, medium):
                    found[medium].update(_hashes(node))
    return found


def _hashes(node: Any, first: int = 0) -> list[int]:
    """Return the hash of each block of a node from the block `first`, as SGLang's recorder computes it for Dynamo's
    format. Blocks without a salt have the same hashes in both formats."""
    salt = node.key.cache_salt
    names = node.hash_value if salt is None else compute_node_event_hash_values(node, BLOCK)
    seed = kv_event_namespace_seed(extra_key=None, cache_salt=salt)
    return [namespaced_block_hash(hash_str_to_int64(name), namespace_seed=seed) for name in names[first:]]


def _last_hash(node: Any) -> int | None:
    """Return the hash of the last block of a node; None for the root."""
    return _hashes(node, -1)[0] if node.hash_value else None


def _stored(node: Any, hashes: list[int], block: int, medium: StorageMedium) -> BlockStored:
    """Return the event for one block of a node. `block` is its index in the node."""
    return BlockStored(
        block_hashes=[hashes[block]],
        parent_block_hash=hashes[block - 1] if block else _last_hash(node.parent),
        token_ids=list(node.key.token_ids[block * BLOCK : (block + 1) * BLOCK]),
        block_size=BLOCK,
        lora_id=None,
        medium=medium,
        cache_salt=node.key.cache_salt,
    )
