"""Leaves of SGLang's tree in the order in which they are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dsv4_sglang.srt.prefix_cache.eviction_order import Ranking

if TYPE_CHECKING:
    from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots


class EvictableLeaves(set[Any]):
    """Replacement of the set in which SGLang's tree lists the leaves that it may evict from the device.

    Leaves without a snapshot are evicted first, the one that was accessed least recently before the others. The next is
    the leaf whose snapshot has the longest `reuse_interval`.
    """

    def __init__(self, slots: SnapshotSlots) -> None:
        super().__init__()
        self.slots = slots
        # Leaves without a snapshot: their ids by time of the last access, and the nodes by id.
        self._plain, self._plain_nodes = Ranking(), dict[int, Any]()

    def add(self, node: Any) -> None:
        super().add(node)
        self.refresh(node)

    def discard(self, node: Any) -> None:
        if node in self:
            super().discard(node)
            self._drop(node)

    def refresh(self, node: Any) -> None:
        """Update the place of a leaf in the order, after it got or lost its snapshot. Other nodes have no place."""
        if node not in self:
            return
        if number := self.slots.id_of(node):
            self._drop_plain(node)
            self.slots.registry.policy.at_leaf(number, True)
        else:
            self._plain.put(node.id, node.last_access_time)
            self._plain_nodes[node.id] = node

    def _drop(self, node: Any) -> None:
        self._drop_plain(node)
        if number := self.slots.id_of(node):
            self.slots.registry.policy.at_leaf(number, False)

    def _drop_plain(self, node: Any) -> None:
        self._plain.drop(node.id)
        self._plain_nodes.pop(node.id, None)

    def first(self) -> Any:
        """Return the next leaf to evict, or None without leaves."""
        while (first := self._plain.first()) is not None:
            node = self._plain_nodes[first[1]]
            if node.last_access_time == first[0]:
                return node
            self._plain.put(node.id, node.last_access_time)  # it was accessed since it became a leaf
        number = self.slots.registry.policy.next_leaf()
        return self.slots.nodes[number] if number else None

    def take_first(self) -> Any:
        """Return the next leaf to evict and remove it from the order, or None without leaves. It stays in the set, and
        `refresh` gives it a place again."""
        if (leaf := self.first()) is not None:
            self._drop(leaf)
        return leaf

    def misplaced(self) -> Iterator[int]:
        """Yield the ids of leaves that are not in the order, and of nodes in the order that are not leaves, for the
        integrity audit."""
        with_snapshot = {number: node.id for node in self if (number := self.slots.id_of(node))}
        yield from {node.id for node in self} - set(with_snapshot.values()) ^ self._plain_nodes.keys()
        for number in with_snapshot.keys() ^ self.slots.registry.policy.leaves.entries.keys():
            yield with_snapshot.get(number, getattr(self.slots.nodes.get(number), "id", 0))
