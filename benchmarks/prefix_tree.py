"""Radix tree of blocks with snapshots for simulations: the rules that the served tree applies on SGLang's tree.

A block is an integer id from the block pool. Its content is an integer key: equal keys at the same position of equal
prefixes stand for equal tokens. Lengths in this module count blocks; the registry counts tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4_sglang.cache.free_list import FreeList
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.placement import Due
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry


class Node:
    """Blocks `start`..`end` of a path. `snapshot` is the slot of the state at `end`, or 0."""

    __slots__ = ("blocks", "children", "end", "keys", "locks", "parent", "snapshot", "start")

    def __init__(self, parent: Node | None, start: int, keys: np.ndarray, blocks: np.ndarray) -> None:
        self.parent = parent
        self.start, self.end = start, start + len(keys)
        self.keys, self.blocks = keys, blocks
        self.children: dict[int, Node] = {}
        self.snapshot = 0
        self.locks = 0


@dataclass(frozen=True)
class Match:
    """Result of a lookup.

    Attributes:
        node: Deepest node on the path with a snapshot to resume from; the root if there is none.
        resume: Number of blocks up to the end of `node`.
        cached: Number of blocks on the path that are in the tree.
    """

    node: Node
    resume: int
    cached: int


class PrefixTree:
    """Radix tree that allocates blocks and snapshots itself and evicts when memory runs out."""

    def __init__(self, blocks: FreeList, snapshots: FreeList) -> None:
        self.block_pool, self.snapshot_pool = blocks, snapshots
        self.registry = SnapshotRegistry(snapshots.available)
        empty = np.empty(0, dtype=np.int64)
        self.root = Node(None, 0, empty, empty)
        self._valueless: dict[Node, None] = {}
        self._holder: dict[int, Node] = {}

    # Requests

    def match(self, keys: np.ndarray) -> Match:
        """Find the deepest snapshot on the path of `keys` and the length of the cached path. Does not change the
        tree."""
        node, best, depth = self.root, self.root, 0
        while depth < len(keys) and (child := node.children.get(int(keys[depth]))) is not None:
            common = common_blocks(child.keys, keys[depth:])
            depth += common
            if common < len(child.keys):
                break
            node = child
            if node.snapshot:
                best = node
        return Match(best, best.end, depth)

    def resume(self, match: Match, keys: np.ndarray) -> None:
        """Lock the matched path and its snapshot for a request with these keys, and update the reuse statistics."""
        self.registry.tick()
        self.lock(match.node)
        if match.node.snapshot:
            self.registry.use(match.node.snapshot)
        recomputes = self.registry.ghost_hit(keys[match.resume :][::-1].tolist()) > 0
        self.registry.resumed(match.node.snapshot, self._snapshots_left(match, keys), recomputes=recomputes)

    def _snapshots_left(self, match: Match, keys: np.ndarray) -> list[int] | None:
        """Return the next snapshots after the place where a request leaves the cached path, or None if it resumes
        there."""
        if match.cached == match.resume:
            return None
        node = match.node
        while node.end < match.cached:
            node = node.children[int(keys[node.end])]
        return [node.snapshot] if node.end > match.cached and node.snapshot else self._snapshots_below(node)

    def lock(self, node: Node) -> None:
        if node.snapshot:
            self.registry.lock(node.snapshot)
        self._add_locks(node, 1)

    def unlock(self, node: Node) -> None:
        if node.snapshot:
            self.registry.unlock(node.snapshot)
        self._add_locks(node, -1)

    def _add_locks(self, node: Node | None, count: int) -> None:
        while node is not None and node is not self.root:
            node.locks += count
            assert node.locks >= 0, f"blocks {node.start}..{node.end} unlocked once too often"
            self._refresh(node)
            node = node.parent

    def insert(self, node: Node, keys: np.ndarray, blocks: np.ndarray, snapshots: list[tuple[int, int]]) -> Node:
        """Insert the blocks of a request below the locked `node`, up to its last snapshot.

        The tree takes ownership of the blocks after `node` up to the last snapshot, and of the slots. It frees
        duplicate blocks and slots, and replaces the duplicates in `blocks` by the tree's blocks.

        Args:
            node: Node from which the request resumed.
            keys: Keys from the start of the path.
            blocks: Block ids from the start of the path; updated in place.
            snapshots: (length, slot) in ascending order, with lengths beyond `node.end`.

        Returns:
            The node of the last snapshot.
        """
        for length, slot in snapshots:
            node = self._extend(node, keys[:length], blocks)
            if node.snapshot:
                self.snapshot_pool.give_back([slot])
            else:
                node.snapshot = slot
                self._holder[slot] = node
                self.registry.add(slot, length * BLOCK, self._snapshot_above(node), self._snapshots_below(node))
                self._refresh(node)
        return node

    def _extend(self, node: Node, keys: np.ndarray, blocks: np.ndarray) -> Node:
        """Return the node that ends with `keys`. Parts that the tree does not have are created from `blocks`."""
        while node.end < len(keys):
            depth = node.end
            child = node.children.get(int(keys[depth]))
            if child is None:
                child = Node(node, depth, keys[depth:].copy(), blocks[depth : len(keys)].copy())
                node.children[int(keys[depth])] = child
                self._refresh(node)
                self._refresh(child)
                return child
            common = common_blocks(child.keys, keys[depth:])
            if common < len(child.keys):
                child = self._split(child, common)
            mine = blocks[depth : child.end]
            self.block_pool.give_back(mine[mine != child.blocks].tolist())
            blocks[depth : child.end] = child.blocks
            node = child
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Split `node` after `at` blocks and return the new parent. The snapshot stays with the lower node."""
        assert node.parent is not None
        above = Node(node.parent, node.start, node.keys[:at], node.blocks[:at])
        above.locks = node.locks
        node.parent.children[int(above.keys[0])] = above
        node.keys, node.blocks, node.start, node.parent = node.keys[at:], node.blocks[at:], above.end, above
        above.children[int(node.keys[0])] = node
        return above

    def _snapshot_above(self, node: Node) -> int:
        above = node.parent
        while above is not None and not above.snapshot:
            above = above.parent
        return above.snapshot if above is not None else 0

    def _snapshots_below(self, node: Node) -> list[int]:
        found, stack = [], list(node.children.values())
        while stack:
            below = stack.pop()
            if below.snapshot:
                found.append(below.snapshot)
            else:
                stack.extend(below.children.values())
        return found

    # Memory

    def take_due(self, due: list[Due], interval: int) -> list[tuple[int, int]]:
        """Take slots for due snapshots. Needed ones are served first.

        Args:
            due: Due snapshots, with lengths in tokens.
            interval: Tokens of recomputation that an optional snapshot saves.

        Returns:
            (length in blocks, slot) of those that got a slot, in ascending order.
        """
        taken = []
        for length, needed, point in sorted(due, key=lambda d: not d.needed):
            if slot := self.take_snapshot(needed=needed, saves=interval):
                self.registry.set_point(slot, point)
                taken.append((length // BLOCK, slot))
        return sorted(taken)

    def take_blocks(self, count: int) -> np.ndarray | None:
        """Allocate blocks for a request and evict those with the lowest value. Return None if too many blocks are
        locked."""
        while self.block_pool.available < count and self._evict_leaf():
            pass
        taken = self.block_pool.take(count)
        return None if taken is None else np.array(taken, dtype=np.int64)

    def take_snapshot(self, *, needed: bool = True, saves: int = 0) -> int:
        """Allocate a snapshot slot. Evict the snapshot with the lowest value if no slot is free.

        Return 0 if no snapshot may be evicted (see `EvictionPolicy.lowest_value`).
        """
        if not self.snapshot_pool.available:
            slot = self.registry.policy.lowest_value(needed=needed, saves=saves)
            if not slot:
                return 0
            self._drop(self._holder[slot])
        taken = self.snapshot_pool.take(1)
        assert taken is not None
        return taken[0]

    def _drop(self, node: Node) -> None:
        """Free a node's snapshot. Its blocks stay until they are evicted."""
        slot, node.snapshot = node.snapshot, 0
        del self._holder[slot]
        self.registry.remove(slot, int(node.keys[-1]))
        self.snapshot_pool.give_back([slot])
        self._refresh(node)

    def _evict_leaf(self) -> bool:
        node = next(iter(self._valueless), None)
        if node is None:
            slot = self.registry.policy.next_leaf()
            if not slot:
                return False
            node = self._holder[slot]
            self._drop(node)
        self._valueless.pop(node, None)
        self.block_pool.give_back(node.blocks.tolist())
        assert node.parent is not None and not node.children
        del node.parent.children[int(node.keys[0])]
        self._refresh(node.parent)
        return True

    def _refresh(self, node: Node) -> None:
        """Update the node's entries in the eviction order: is it an evictable leaf, and does it have a snapshot?"""
        leaf = node is not self.root and not node.children and not node.locks
        if node.snapshot:
            self.registry.policy.at_leaf(node.snapshot, leaf)
        if leaf and not node.snapshot:
            self._valueless[node] = None
        else:
            self._valueless.pop(node, None)


def common_blocks(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two key arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
