"""Radix tree over device and host for simulations: the policy of `dsv4_sglang/srt/host_cache`, without copies."""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.prefix_tree import FreeList, Node, PrefixTree, TreeRegistry, common_blocks
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.policy import MARGIN

NOTHING = np.empty(0, dtype=np.int64)


class TieredTree(PrefixTree):
    """Prefix tree with a host cache.

    The blocks of a node are on the device (`Node.blocks`), on the host (`on_host`), or on both. Its snapshot is in a
    device slot or on the host only; the registry then has a host id for it. The blocks of a path that the host holds
    always begin at the root.
    """

    def __init__(self, blocks: FreeList, snapshots: FreeList, host_blocks: FreeList, rows: FreeList) -> None:
        super().__init__(blocks, snapshots)
        self.host_blocks, self.rows = host_blocks, rows
        self.registry = TreeRegistry(snapshots.size, rows.size)
        # Host blocks by node.
        self.on_host: dict[Node, np.ndarray] = {}
        # Host row of the snapshot by node.
        self.row: dict[Node, int] = {}
        # Path that is being loaded. The host must not evict it meanwhile.
        self._loading: set[Node] = set()
        # Blocks copied to the host, and how many of them an allocation had to wait for.
        self.saved_blocks = self.waited_blocks = 0

    # Device and host

    def on_device(self, node: Node) -> bool:
        return len(node.blocks) > 0

    def slot(self, node: Node) -> int:
        """Return the device slot of the node's snapshot; 0 if the device has none."""
        return node.snapshot if node.snapshot <= self.registry.capacity else 0

    def _move(self, node: Node, to: int) -> None:
        """Change the place of a snapshot that the host holds: to a device slot, or to a host id after its device copy
        was freed."""
        registry, there = self.registry, node.snapshot
        registry.move(there, to)
        del self._holder[there]
        node.snapshot, self._holder[to] = to, node
        if to <= registry.capacity:
            registry.copied[to] = registry.pending_write[to] = registry.attempted[to] = True

    def _is_leaf(self, node: Node) -> bool:
        return self.on_device(node) and not any(self.on_device(child) for child in node.children.values())

    def _split(self, node: Node, at: int) -> Node:
        above = super()._split(node, at)
        if (there := self.on_host.get(node)) is not None:
            self.on_host[above], self.on_host[node] = there[:at], there[at:]
        return above

    # Requests

    def insert(self, node: Node, keys: np.ndarray, blocks: np.ndarray, snapshots: list[tuple[int, int]]) -> Node:
        for length, slot in snapshots:
            node = self._extend(node, keys[:length], blocks)
            if self.slot(node):
                self.snapshot_pool.free(np.array([slot]))
            elif node.snapshot:  # a request has recomputed a state that only the host held
                self._move(node, slot)
            else:
                node.snapshot = slot
                self._holder[slot] = node
                self.registry.add(slot, length * BLOCK, self._snapshot_above(node), self._snapshots_below(node))
                self.registry.pending_write[slot] = True
            self._refresh(node)
        return node

    def _extend(self, node: Node, keys: np.ndarray, blocks: np.ndarray) -> Node:
        """Extend the path as the base class does, but use the request's blocks for nodes that are only on the host."""
        at = node
        while at.end < len(keys) and (child := at.children.get(int(keys[at.end]))) is not None:
            common = common_blocks(child.keys, keys[at.end :])
            if common < len(child.keys):
                child = self._split(child, common)
            if not self.on_device(child):
                child.blocks = blocks[child.start : child.end].copy()
                self._refresh(at)
                self._refresh(child)
            at = child
        return super()._extend(node, keys, blocks)

    def missing(self, node: Node) -> int:
        """Return the number of blocks on the path to `node` that are not on the device."""
        return sum(len(at.keys) for at in self._path(node) if not self.on_device(at))

    def load(self, node: Node) -> bool:
        """Load a path and its snapshot to the device. Return False if there is no space, for example because running
        requests hold it."""
        self._add_locks(node, 1)
        self._loading = set(self._path(node))
        try:
            path = [at for at in self._path(node) if not self.on_device(at)]
            fresh = self.take_blocks(self.missing(node))
            if fresh is None:
                return False
            if not self.slot(node):
                slot = self.take_snapshot()
                if not slot:
                    self.block_pool.free(fresh)
                    return False
                self._move(node, slot)
            for at in path:
                at.blocks, fresh = fresh[: len(at.keys)], fresh[len(at.keys) :]
            return True
        finally:
            self._add_locks(node, -1)
            self._loading = set()

    def _path(self, node: Node) -> list[Node]:
        """Return the path to `node`, beginning with the root's child."""
        path = []
        at: Node | None = node
        while at is not None and at is not self.root:
            path.append(at)
            at = at.parent
        return path[::-1]

    # Device memory

    def _drop(self, node: Node) -> None:
        """Free the device slot of the node's snapshot, if it has one."""
        slot = self.slot(node)
        if not slot:
            return
        self._save_waiting(node)
        if self.registry.copied[slot]:
            self._move(node, self.registry.host_id(self.row[node] - 1))
            self.snapshot_pool.free(np.array([slot]))
            self._refresh(node)
        else:
            super()._drop(node)

    def _forget_blocks(self, node: Node) -> None:
        node.blocks = NOTHING
        if node.snapshot:
            self.registry.at_leaf[node.snapshot] = False
        if node not in self.on_host:
            super()._forget_blocks(node)

    # Saves

    def save_ahead(self) -> None:
        """Save the snapshots that one scheduler pass saves: new ones while the host has space, and the next eviction
        candidates of the device."""
        registry = self.registry
        for slot in registry.to_copy():
            registry.attempted[slot] = True
            if self._has_room(node := self._holder[slot]):
                self._save(node)
        blocks, slots = (pool.size // MARGIN - pool.available_size() for pool in (self.block_pool, self.snapshot_pool))
        for slot in registry.note_eviction_candidates(blocks * BLOCK, slots):
            if registry.held[slot]:
                self._save(self._holder[slot])

    def _save_waiting(self, node: Node) -> None:
        before = self.saved_blocks
        self._save(node)
        self.waited_blocks += self.saved_blocks - before

    def _to_save(self, node: Node) -> int:
        return sum(len(at.keys) for at in self._path(node) if at not in self.on_host)

    def _has_room(self, node: Node) -> bool:
        return self.rows.available_size() > 0 and self._to_save(node) <= self.host_blocks.available_size()

    def _save(self, node: Node) -> None:
        """Copy a snapshot and the blocks on its path to the host if entries with lower value can be evicted for them.

        A superseded snapshot evicts no blocks, because its blocks would be copies of blocks that stay on the device.
        """
        registry, slot, path = self.registry, self.slot(node), self._path(node)
        if not registry.pending_write[slot] or registry.copied[slot]:
            return
        if registry.superseded(slot) and self._to_save(node) and not self._has_room(node):
            return
        hold = self._loading.union(path)
        if not self._make_room(self.rows, 1, slot, hold):
            return
        if not self._make_room(self.host_blocks, self._to_save(node), slot, hold):
            return
        for at in path:
            if at not in self.on_host:
                taken = self.host_blocks.alloc(len(at.keys))
                assert taken is not None
                self.on_host[at] = taken
                self.saved_blocks += len(taken)
        row = self.rows.alloc(1)
        assert row is not None
        self.row[node] = int(row[0])
        registry.copied[slot] = True

    # Host memory

    def _make_room(self, pool: FreeList, count: int, slot: int, hold: set[Node]) -> bool:
        """Evict host entries with a lower value than the snapshot in `slot` until `pool` has `count` free ids.

        Args:
            pool: Rows or blocks of the host.
            count: Number of ids needed.
            slot: Device slot of the snapshot to save.
            hold: Nodes that must not be evicted: the path to save and the path being loaded.

        Returns:
            True if the ids are available.
        """
        if pool.available_size() >= count:
            return True
        registry = self.registry
        score = registry.eviction_score() if pool is self.rows else registry.reuse_interval()
        value, enough = registry.host_value(score), 1 / score[slot]
        order = [(value[place], place) for place in registry.on_host(value, enough)]
        again: list[tuple[float, int]] = []
        at = 0
        while pool.available_size() < count:
            if again and (at == len(order) or again[0] < order[at]):
                _, place = heapq.heappop(again)
            elif at < len(order):
                _, place = order[at]
                at += 1
            else:
                return False
            node = self._holder.get(place)
            if node is None or node not in self.row or node in hold:
                continue
            last = not any(child in self.on_host for child in node.children.values())
            if not last and pool is self.host_blocks:
                continue
            self._give_up_row(node)
            above = self._evict_blocks(node, hold) if last else None
            if above is not None and value[above.snapshot] < enough:
                heapq.heappush(again, (value[above.snapshot], above.snapshot))
        return True

    def _give_up_row(self, node: Node) -> None:
        self.rows.free(np.array([self.row.pop(node)]))
        place = node.snapshot
        if self.slot(node):
            self.registry.copied[place] = False
        else:
            node.snapshot = 0
            del self._holder[place]
            self.registry.remove(place, int(node.keys[-1]))
            self._refresh(node)

    def _evict_blocks(self, node: Node, hold: set[Node]) -> Node | None:
        """Free the host blocks of a node and of its ancestors up to the next one with a snapshot or a different child.

        Returns:
            The last node on the path that remains, if it has a snapshot on the host, else None.
        """
        at: Node | None = node
        while at is not None and at is not self.root and at not in hold:
            if at in self.row or any(child in self.on_host for child in at.children.values()):
                return at if at in self.row else None
            self.host_blocks.free(self.on_host.pop(at))
            above = at.parent
            if not self.on_device(at):
                super()._forget_blocks(at)
                assert above is not None
                self._refresh(above)
            at = above
        return None
