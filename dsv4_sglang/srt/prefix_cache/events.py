"""KV events (`--kv-events-config`): which blocks a router may count on. docs/guides/kv_events.md.

SGLang's tree reports each block that it stores or evicts. Here a block is announced while a request that continues its
path would find it: while a snapshot lies at its end or behind it on the same path, on the device or on the host. Blocks
that no snapshot follows are in memory, but no request resumes from them.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import compute_node_hash_values, hash_str_to_int64

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration import compat

MEDIA = (StorageMedium.GPU, StorageMedium.CPU)


class PrefixEvents:
    """The events of one tree, in the place of SGLang's recorder.

    Changes are noted when they happen. `take` compares what is announced with the nodes that changed and with their
    ancestors, and returns the difference. Blocks are known by their hashes, so a node may be split at any time.
    Requests with an `extra_key` or a `cache_salt` have blocks that no other request finds: they are not announced.
    """

    def __init__(self) -> None:
        self.announced: dict[StorageMedium, set[int]] = {medium: set() for medium in MEDIA}
        self._queue = compat.event_queue(BLOCK)
        self._changed: dict[Any, list[int]] = {}
        """Nodes that changed, each with its hashes at that time: it may be split or removed before `take`."""

    # What SGLang's tree calls

    def record_store(self, node: Any, medium: Any = None, **others: Any) -> None:
        self.changed(node)

    def record_remove(self, node: Any, medium: Any = None) -> None:
        self.changed(node)

    def record_all_cleared(self) -> None:
        self._changed.clear()
        for announced in self.announced.values():
            announced.clear()
        self._queue.add(AllBlocksCleared())

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        self.settle()
        return self._queue.take()

    # Changes

    def changed(self, node: Any) -> None:
        """Note that blocks or the snapshot of a node come or go; the node is still in the tree."""
        if node.parent is None or not compat.is_public(node.key):
            return
        if node.hash_value is None:
            node.hash_value = compute_node_hash_values(node, BLOCK)
        self._changed.setdefault(node, []).extend(_hashes(node))

    def settle(self) -> None:
        """Queue the events of all changes up to now."""
        if not self._changed:
            return
        nodes, resumable = self._affected(), dict[Any, bool]()
        for node in reversed(nodes):
            resumable[node] = self._is_resumable(node, resumable)
        for medium in MEDIA:
            self._settle(medium, nodes, {node for node in nodes if resumable[node] and on_medium(node, medium)})
        self._changed.clear()

    def _settle(self, medium: StorageMedium, nodes: list[Any], present: set[Any]) -> None:
        """Queue the events of one medium.

        All blocks of a node that did not change are announced, or none. A part of a node that was split after it
        changed has its hashes among those that changed.
        """
        announced, wanted = self.announced[medium], dict[int, tuple[Any, int]]()
        changed = {name for hashes in self._changed.values() for name in hashes}
        touched = set(changed)
        for node in nodes:
            last = _last_hash(node)
            if last in changed or (last in announced) != (node in present):
                hashes = _hashes(node)
                touched.update(hashes)
                if node in present:
                    wanted.update({name: (node, i) for i, name in enumerate(hashes)})
        if gone := sorted(name for name in touched if name in announced and name not in wanted):
            self._queue.add(BlockRemoved(block_hashes=gone, medium=medium))
        for name, (node, i) in wanted.items():
            if name not in announced:
                self._queue.add(_stored(node, i, medium))
        announced.difference_update(gone)
        announced.update(wanted)

    def _affected(self) -> list[Any]:
        """The nodes of the tree that changed or have a descendant that did, parents first."""
        depths: dict[Any, int] = {}
        for node in self._changed:
            path: list[Any] = []
            while node.parent is not None and node not in depths:
                path.append(node)
                if node.parent.children.get(node.key.child_key(BLOCK)) is not node:  # removed, with all below it
                    path.clear()
                node = node.parent
            for below in reversed(path):
                depths[below] = depths.get(below.parent, 0) + 1
        return sorted(depths, key=lambda node: depths[node])

    def _is_resumable(self, node: Any, known: dict[Any, bool]) -> bool:
        """Return True if a snapshot is at the node's end or behind it. `known`: of the children that changed; the
        others are announced if they are."""
        if has_snapshot(node):
            return True
        return any(known[child] if child in known else self._is_announced(child) for child in node.children.values())

    def _is_announced(self, node: Any) -> bool:
        last = _last_hash(node)
        return any(last in announced for announced in self.announced.values())


def has_snapshot(node: Any) -> bool:
    """Return True if the device or the host has a snapshot of the state at the node's end."""
    data = node.component_data[ComponentType.MAMBA]
    return data.value is not None or data.host_value is not None


def on_medium(node: Any, medium: StorageMedium) -> bool:
    """Return True if the node's blocks are there, and no copy to it is under way."""
    data = node.component_data[ComponentType.FULL]
    if medium is StorageMedium.GPU:
        return data.value is not None
    return data.host_value is not None and node.write_through_pending_id is None


def announced_by_rule(root: Any) -> dict[StorageMedium, set[int]]:
    """What is to be announced of a tree, found by walking all of it: what `PrefixEvents.announced` must equal."""
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
                if compat.is_public(node.key) and on_medium(node, medium):
                    found[medium].update(_hashes(node))
    return found


def _hashes(node: Any) -> list[int]:
    """The hash of each block of a node."""
    return [hash_str_to_int64(name) for name in node.hash_value]


def _last_hash(node: Any) -> int | None:
    """The hash of the last block of a node; None for the root."""
    return hash_str_to_int64(node.hash_value[-1]) if node.hash_value else None


def _stored(node: Any, block: int, medium: StorageMedium) -> BlockStored:
    """The event of one block of a node, by its place in the node."""
    before = hash_str_to_int64(node.hash_value[block - 1]) if block else _last_hash(node.parent)
    return BlockStored(
        block_hashes=[hash_str_to_int64(node.hash_value[block])],
        parent_block_hash=before,
        token_ids=list(node.key.token_ids[block * BLOCK : (block + 1) * BLOCK]),
        block_size=BLOCK,
        lora_id=None,
        medium=medium,
    )
