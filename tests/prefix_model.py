"""A small model of a server over the prefix tree. Its requests compute, take snapshots, finish and retract.

Plain dicts store the contents of blocks and snapshots by the ids that the tree assigns. The model therefore detects a
block or slot that one owner overwrites while another still uses it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from benchmarks.prefix_tree import FreeList, Node, PrefixTree
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.features.integrity import CACHED, FREE, REQUESTS, Pool
from dsv4_sglang.srt.prefix_cache.placement import due_in_prefill, is_kept

Path = tuple[int, ...]

# Factor on the number of steps of the random tests. With 3 they run a million, in minutes (docs/design/integrity.md).
TIMES = int(os.environ.get("DSV4_SGLANG_TEST_TIMES", "1"))


@dataclass(eq=False)
class Request:
    """A request.

    `keys` are the contents of its blocks, prompt first. The first `computed` blocks hold their contents.
    """

    keys: list[int]
    prompt: int
    node: Node
    branch: int
    computed: int
    blocks: np.ndarray
    pending: list[tuple[int, int]] = field(default_factory=list)

    def path(self, length: int) -> Path:
        return tuple(self.keys[:length])

    @property
    def array(self) -> np.ndarray:
        return np.array(self.keys, dtype=np.int64)


class MiniServer:
    """A model server. Lengths count blocks: `chunk` blocks per prefill chunk, a snapshot every `interval` blocks."""

    def __init__(self, blocks: int, snapshots: int, interval: int = 3, chunk: int = 4) -> None:
        self.tree = PrefixTree(FreeList(blocks), FreeList(snapshots))
        self.interval, self.chunk = interval, chunk
        self.running: list[Request] = []
        self.history: list[Path] = []
        self.block_content: dict[int, Path] = {}
        self.state_content: dict[int, Path] = {}

    def admit(self, keys: list[int]) -> Request | None:
        """Admit a prompt, of which at least the last block is computed. Return None if its blocks do not fit."""
        past = np.array(keys[:-1], dtype=np.int64)
        match = self.tree.match(past)
        self.tree.resume(match, past)
        fresh = self.tree.take_blocks(len(keys) - match.resume)
        if fresh is None:
            self.tree.unlock(match.node)
            return None
        if match.node.snapshot:
            assert self.state_content[match.node.snapshot] == tuple(keys[: match.resume]), "resumed from a wrong state"
        held = [node.blocks for node in path(match.node)]
        request = Request(keys, len(keys), match.node, match.cached, match.resume, np.concatenate([*held, fresh]))
        self.running.append(request)
        return request

    def prefill(self, request: Request) -> None:
        """Compute one chunk. Do nothing if the prompt is already computed."""
        begin, end = request.computed, min(request.computed + self.chunk, request.prompt)
        if begin == end:
            return
        due = due_in_prefill(
            begin * BLOCK,
            end * BLOCK,
            prompt=request.prompt * BLOCK + 1,  # tokens after the last block, which are never in the tree
            interval=self.interval * BLOCK,
            branch=request.branch * BLOCK,
        )
        taken = self.tree.take_due(due, self.interval * BLOCK)
        self._compute(request, end)
        self._insert(request, [(length, self._write_state(request, length, slot)) for length, slot in taken])

    def decode(self, request: Request, key: int) -> bool:
        """Generate one block, with a rolling snapshot at its end."""
        if request.computed < request.prompt:
            return False
        block = self.tree.take_blocks(1)
        if block is None:
            return False
        request.keys.append(key)
        request.blocks = np.concatenate([request.blocks, block])
        self._compute(request, len(request.keys))
        slot = self.tree.take_snapshot()
        if slot:
            for length, old in request.pending:
                if not is_kept(length, self.interval):
                    self._free_slots([old])
            request.pending = [(n, s) for n, s in request.pending if is_kept(n, self.interval)]
            request.pending.append((request.computed, self._write_state(request, request.computed, slot)))
        return True

    def finish(self, request: Request) -> None:
        self.prefill_all(request)
        pending, request.pending = request.pending, []
        self._insert(request, pending)
        self._release(request)
        self.history.append(tuple(request.keys))
        del self.history[:-20]

    def prefill_all(self, request: Request) -> None:
        while request.computed < request.prompt:
            self.prefill(request)

    def retract(self, request: Request) -> None:
        """Retract a request. The tree keeps the computed blocks up to its last snapshot."""
        pending, request.pending = request.pending, []
        self._insert(request, pending)
        self._release(request)

    def press(self, blocks: int, snapshots: int) -> None:
        """Allocate memory for another use, then free it."""
        taken = self.tree.take_blocks(blocks)
        if taken is not None:
            self.tree.block_pool.free(taken)
        self._free_slots([slot for slot in [self.tree.take_snapshot() for _ in range(snapshots)] if slot])

    def flush(self) -> None:
        if not self.running:
            self.tree.flush()

    def _compute(self, request: Request, end: int) -> None:
        for i in range(request.computed, end):
            self.block_content[int(request.blocks[i])] = request.path(i + 1)
        request.computed = end

    def _write_state(self, request: Request, length: int, slot: int) -> int:
        self.state_content[slot] = request.path(length)
        return slot

    def _insert(self, request: Request, snapshots: list[tuple[int, int]]) -> None:
        node = self.tree.insert(request.node, request.array, request.blocks, snapshots)
        if node is not request.node:
            self.tree.lock(node)
            self.tree.unlock(request.node)
            request.node = node

    def _release(self, request: Request) -> None:
        self.tree.block_pool.free(request.blocks[request.node.end :])
        self.tree.unlock(request.node)
        self.running.remove(request)

    def _free_slots(self, slots: list[int]) -> None:
        if slots:
            self.tree.snapshot_pool.free(np.array(slots))

    # Invariants

    def check(self) -> None:
        tree, registry = self.tree, self.tree.registry
        blocks = Pool("block", range(1, tree.block_pool.size + 1))
        slots = Pool("snapshot slot", range(1, tree.snapshot_pool.size + 1))
        for pool, free in ((blocks, tree.block_pool), (slots, tree.snapshot_pool)):
            pool.claim(FREE, "the free list", free.free_ids().tolist())
        locks: dict[Node, int] = {}
        slot_locks: dict[int, int] = {}
        for request in self.running:
            for node in path(request.node):
                locks[node] = locks.get(node, 0) + 1
            if request.node.snapshot:
                slot_locks[request.node.snapshot] = slot_locks.get(request.node.snapshot, 0) + 1
            blocks.claim(REQUESTS, "a request", request.blocks[request.node.end :].tolist())
            slots.claim(REQUESTS, "a request", [slot for _, slot in request.pending])
            held = np.concatenate([request.blocks[:0], *[node.blocks for node in path(request.node)]])
            assert (request.blocks[: request.node.end] == held).all(), "a request's table differs from the tree"
            for i in range(request.computed):
                assert self.block_content[int(request.blocks[i])] == request.path(i + 1), "a held block was overwritten"
            for length, slot in request.pending:
                assert self.state_content[slot] == request.path(length), "a held state was overwritten"
        valueless = set()
        at_leaf = set()
        self._check_below(tree.root, (), 0, blocks, slots, locks, valueless, at_leaf, slot_locks)
        assert not [*blocks.findings(), *slots.findings()]
        assert valueless == set(tree._valueless)
        assert at_leaf == set(np.flatnonzero(registry.at_leaf).tolist())
        assert len(registry) == len(tree._holder)

    def _check_below(
        self,
        node: Node,
        above: Path,
        previous: int,
        blocks: Pool,
        slots: Pool,
        locks: dict[Node, int],
        valueless: set[Node],
        at_leaf: set[int],
        slot_locks: dict[int, int],
    ) -> None:
        registry = self.tree.registry
        for key, child in node.children.items():
            assert child.parent is node and child.start == node.end and int(child.keys[0]) == key
            assert child.end - child.start == len(child.keys) == len(child.blocks) > 0
            here = above + tuple(child.keys.tolist())
            for i, block in enumerate(child.blocks.tolist()):
                assert self.block_content[block] == here[: child.start + i + 1], "a cached block was overwritten"
            blocks.claim(CACHED, "a node", child.blocks.tolist())
            assert child.locks == locks.get(child, 0), "locks differ from what runs"
            leaf = not child.children and not child.locks
            slot = child.snapshot
            if slot:
                slots.claim(CACHED, "a node", [slot])
                assert self.tree._holder[slot] is child and registry.held[slot]
                assert self.state_content[slot] == here, "a snapshot holds another state"
                assert registry.length[slot] == child.end * BLOCK and registry.previous[slot] == previous
                assert slot in registry._following[previous]
                assert registry.locks[slot] == slot_locks.get(slot, 0)
                if leaf:
                    at_leaf.add(slot)
            elif leaf:
                valueless.add(child)
            self._check_below(child, here, slot or previous, blocks, slots, locks, valueless, at_leaf, slot_locks)


def path(node: Node) -> list[Node]:
    """Return the nodes from the root's child to `node`."""
    nodes = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        nodes.append(at)
        at = at.parent
    return nodes[::-1]
