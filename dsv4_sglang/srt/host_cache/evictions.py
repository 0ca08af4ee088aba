"""Evictions from the host: which memory is freed first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from dsv4_sglang.srt.prefix_cache import metrics
from dsv4_sglang.srt.prefix_cache.tenants import HOST
from dsv4_sglang.srt.sglang.tree import evict_from_host

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from dsv4_sglang.srt.host_cache.cache import HostPrefixCache
    from dsv4_sglang.srt.prefix_cache.eviction_order import EvictionOrder
    from dsv4_sglang.srt.prefix_cache.policy import EvictionPolicy


# Snapshots that the order sorts or reads at first. Each further step takes eight times as many.
READ_AT_FIRST = 64


class HostEvictionOrder:
    """The snapshots with a copy on the host, in the order in which the host evicts them.

    While the device keeps a snapshot, its host copy is a duplicate. Duplicates are evicted first, those of snapshots
    that the device will keep longest before the others. Other copies have the value of the snapshot itself, and so do
    copies of those that the device evicts next: the lowest value is evicted first.

    The order is that of the start. Nodes that become the end of a path meanwhile are inserted with `insert`, since an
    eviction frees the blocks of ends only.
    """

    def __init__(self, policy: EvictionPolicy, *, for_rows: bool, below: int) -> None:
        """Create the order.

        Args:
            policy: policy of the registry.
            for_rows: rows of snapshots are needed, so values are those of `eviction_score`. If False, blocks are, and
                values are those of `reuse_interval`.
            below: number of a snapshot. If not 0, only snapshots of less value are in the order.
        """
        self._policy, self._for_rows = policy, for_rows
        self._duplicates = policy.duplicates()
        ids = np.flatnonzero(self._duplicates)
        scores = policy.eviction_score(ids) if for_rows else policy.reuse_interval(ids)
        self._first = _ascending(-1 / (scores * policy.registry.tenants.factor(HOST, ids)), ids)
        self._now, self._mean_interval = policy.registry.now, policy.registry.reuse.mean_interval
        self._below = 1 / self._score(below) if below else float("inf")
        self._inserted: list[tuple[float, int]] = []

    def _score(self, number: int) -> float:
        entry = self._policy.entry(number, for_rows=self._for_rows)
        factor = float(self._policy.registry.tenants.factor(HOST, number))
        return entry.score(self._now, self._mean_interval) * factor

    def _value(self, number: int) -> float:
        """Return the value of a host copy, smallest first. Duplicates have negative values."""
        value = 1 / self._score(number)
        return -value if self._duplicates[number] else value

    def insert(self, number: int) -> None:
        if (value := self._value(number)) < self._below:
            heapq.heappush(self._inserted, (value, number))

    def __iter__(self) -> Iterator[int]:
        for value, number in self._sorted():
            while self._inserted and self._inserted[0] < (value, number):
                yield heapq.heappop(self._inserted)[1]
            yield number
        while self._inserted:
            yield heapq.heappop(self._inserted)[1]

    def _sorted(self) -> Iterator[tuple[float, int]]:
        """Yield values and snapshots, smallest first."""
        yield from self._first
        order = self._policy.host_rows if self._for_rows else self._policy.host_blocks
        seen, count = set[int](), READ_AT_FIRST
        # The order is read in parts, because evictions change it.
        while part := [entry for entry in self._read(order, count) if entry[1] not in seen]:
            for value, number in part:
                if value >= self._below:
                    return
                seen.add(number)
                yield value, number
            count *= 8

    def _read(self, order: EvictionOrder, count: int) -> list[tuple[float, int]]:
        entries = islice(order.descending(self._now, self._mean_interval), count)
        return [(1 / score, number) for score, number in entries]


def _ascending(values: np.ndarray, ids: np.ndarray) -> Iterator[tuple[float, int]]:
    """Yield values and their ids (ascending), smallest value first. Only as much is sorted as is asked for."""
    count = READ_AT_FIRST
    while len(ids):
        first = np.ones(len(ids), bool) if len(ids) <= count else values <= np.partition(values, count)[count]
        order = np.argsort(values[first], kind="stable")
        yield from zip(values[first][order].tolist(), ids[first][order].tolist())
        values, ids, count = values[~first], ids[~first], 8 * count


class HostEvictions:
    """Evictions from the host memory of a prefix cache.

    Blocks are freed from the ends of paths upwards. When the snapshot at the end of a path is evicted, the blocks that
    only it used are freed too.
    """

    # Nodes at which a path on the host may end without a snapshot, because a copy blocked their eviction.
    dangling: dict[UnifiedTreeNode, None]

    def __init__(self, cache: HostPrefixCache) -> None:
        self.cache = cache
        self.reset()

    def reset(self) -> None:
        """Forget all nodes, after the tree was emptied."""
        self.dangling = {}

    def pool(self, kind: ComponentType) -> Any:
        return self.cache.mamba_pool_host if kind is ComponentType.MAMBA else self.cache.full_kv_pool_host

    def free(self, count: int, kind: ComponentType, *, below: int = 0, keep: Sequence[UnifiedTreeNode] = ()) -> int:
        """Free host memory in the order of `HostEvictionOrder`. Nodes with a running copy are skipped.

        Args:
            count: tokens of blocks, or rows of snapshots, to free.
            kind: FULL frees blocks, MAMBA frees rows of snapshots. The evictions are counted by it.
            below: if not 0, evict only snapshots of less value than this one.
            keep: nodes that must not be evicted.

        Returns:
            Tokens or rows that were freed.
        """
        for_rows = kind is ComponentType.MAMBA
        pool, component, slots = self.pool(kind), self.cache.component, self.cache.component.slots
        before = pool.available_size()
        order = HostEvictionOrder(slots.registry.policy, for_rows=for_rows, below=below)
        with component.metrics.evicting(metrics.SLOTS if for_rows else metrics.BLOCKS):
            for node in list(self.dangling):
                del self.dangling[node]
                self._free_dangling_blocks(node, keep)
            for number in order:
                if pool.available_size() - before >= count:
                    break
                node = slots.nodes.get(number)
                if node is None or self.row(node) is None or node in keep or not self.is_evictable(node):
                    continue
                if self.is_end(node):
                    above = node.parent
                    evict_from_host(self.cache, node, self.cache.components.values())
                    if (end := self._free_dangling_blocks(above, keep)) is not None:
                        order.insert(slots.id_of(end))
                elif for_rows:
                    evict_from_host(self.cache, node, [component])
        return int(pool.available_size() - before)

    def _free_dangling_blocks(self, node: UnifiedTreeNode, keep: Sequence[UnifiedTreeNode]) -> UnifiedTreeNode | None:
        """Free the blocks after the last snapshot of a path on the host, from this node upwards. Return the node of
        that snapshot if it is now the end of the path."""
        while self.is_end(node):
            if self.row(node) is not None:
                return node
            if node in keep or not self.is_evictable(node):
                self.dangling[node] = None
                return None
            above = node.parent
            evict_from_host(self.cache, node, self.cache.components.values())
            node = above
        return None

    def row(self, node: UnifiedTreeNode) -> Any:
        """Return the host row of the node's snapshot, [1] int64, or None."""
        return node.component_data[ComponentType.MAMBA].host_value

    def is_end(self, node: UnifiedTreeNode) -> bool:
        """Return True if no child of the node is on the host, so that a path on the host ends here."""
        if node is self.cache.root_node or not node.backuped:
            return False
        return not any(child.backuped for child in node.children.values())

    def is_evictable(self, node: UnifiedTreeNode) -> bool:
        """Return True if no copy to or from the host uses the node."""
        return node.write_through_pending_id is None and not any(data.host_lock_ref for data in node.component_data)
