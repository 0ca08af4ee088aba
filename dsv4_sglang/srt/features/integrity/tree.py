"""The tree of the prefix cache: its owners of blocks and snapshots, its locks, and what must agree with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from queue import Queue
from typing import Any

import torch

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.features.integrity.owners import CACHED, COPIES, FREE, Finding, PoolOwners, join_names
from dsv4_sglang.srt.sglang.tree import check_tree


class AuditedTree:
    """Contents of SGLang's unified tree with this package's components, on the device and, if used, on the host."""

    def __init__(self, cache: Any) -> None:
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        self.cache, self.root = cache, cache.tree_core.root_node
        self.full, self.mamba = ComponentType.FULL, ComponentType.MAMBA
        self.tiered = cache.cache_controller is not None
        self.slots = cache.req_to_token_pool.mamba_ckpt_pool
        # Parents first.
        self.nodes: list[Any] = []
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            stack.extend(node.children.values())
        self.by_id = {node.id: node for node in (self.root, *self.nodes)}
        # Findings made while collecting the contents.
        self.wrong: list[Finding] = []
        self.pages = self._pages("value")
        # Holders of device locks, by component and node.
        self.locks: dict[tuple[Any, int], list[str]] = defaultdict(list)
        for copy, node_id, params in self._copies():
            self._record_lock(node_id, params, copy)
        for (tenant, name), pin in cache.pins:
            self._record_pin(f"pin {name!r} of tenant {tenant!r}", pin)

    def _pages(self, place: str) -> dict[int, list[int]]:
        """Return the blocks of each node by node id, on the device (`value`) or the host (`host_value`)."""
        pages = {}
        for node in self.nodes:
            if (tokens := getattr(self._data(node)[0], place)) is None:
                continue
            indices = tokens.cpu()
            blocks = indices[::BLOCK] // BLOCK
            if not torch.equal(indices, (blocks[:, None] * BLOCK + torch.arange(BLOCK)).ravel()):
                text = f"its {place} is not a list of whole blocks of {BLOCK} tokens"
                self.wrong.append(Finding(f"node {node.id}", text))
            pages[node.id] = blocks.tolist()
        return pages

    def _data(self, node: Any) -> tuple[Any, Any]:
        return node.component_data[self.full], node.component_data[self.mamba]

    # Holders of nodes

    def record_request(self, req: Any, name: str, table: list[int]) -> None:
        """Record a request's lock on the path to its node, and compare its block table with that path."""
        node_id = None
        if req.lock is not None:
            node_id = req.lock.node
            self._record_lock(node_id, req.lock.receipt, name)
        node, path = self.by_id.get(node_id, self.root), list[int]()
        while node is not self.root:
            path[:0] = self.pages.get(node.id, [])
            node = node.parent
        if path != table:
            text = f"its block table starts with {table}, but its path in the tree has {path}"
            self.wrong.append(Finding(name, text))

    def _record_lock(self, node_id: int, lock: Any, name: str) -> None:
        """Record a lock on the nodes that the tree's own release of the lock would unlock."""
        node = self.by_id.get(node_id)
        if node is None:
            self.wrong.append(Finding(name, f"it holds node {node_id}, which is not in the tree"))
            return
        if node is not self.root and self.mamba not in lock.skipped_lock_components:
            self.locks[self.mamba, node.id].append(name)
        while node is not self.root:
            if self.full not in lock.skipped_lock_components:
                self.locks[self.full, node.id].append(name)
            node = node.parent

    def _record_pin(self, name: str, pin: Any) -> None:
        """Record a pin's lock, and compare what it is charged with the length of its path."""
        self._record_lock(pin.lock.node, pin.lock.receipt, name)
        node, length = self.by_id.get(pin.lock.node, self.root), 0
        while node is not self.root:
            length += len(node.key)
            node = node.parent
        if length != pin.tokens:
            self.wrong.append(Finding(name, f"charged with {pin.tokens} tokens, but its path has {length}"))

    def _copies(self) -> Iterator[tuple[str, int, Any]]:
        """Yield (name, node, device lock) of running copies between device and host."""
        if not self.tiered:
            return
        for saving in self.cache.ongoing_write_through.values():
            if saving.lock_params is not None:
                yield "a copy to the host", saving.node_id, saving.lock_params
        for loading in self.cache.ongoing_load_back.values():
            yield "a load from the host", loading.node_id, loading.lock_params

    def _most_host_locks(self) -> Counter[int]:
        """Return the maximum number of host locks per node. The real number may be lower: a lock of a part without a
        host copy counts nothing."""
        if not self.tiered:
            return Counter()
        cache = self.cache
        locks = [
            *((loading.node_id, loading.host_lock_params) for loading in cache.ongoing_load_back.values()),
            *((prefetch.anchor_node_id, prefetch.anchor_lock_params) for prefetch in cache.ongoing_prefetch.values()),
            *cache.ongoing_backup.values(),
        ]
        return Counter(node for node_id, lock in locks for node in self._locked_on_host(node_id, lock))

    def _locked_on_host(self, node_id: int, lock: Any) -> Iterator[int]:
        """Yield the nodes of a host lock: the node that was locked, and if it was split since, the parts above it."""
        node, first = self.by_id.get(node_id), lock.component_host_lock_uuids.get(self.full)
        while node is not None:
            yield node.id
            if first in (None, self._data(node)[0].metadata.get("host_uuid")):
                return
            node = node.parent

    def findings(self) -> Iterator[Finding]:
        """Yield all inconsistencies. Call it after every holder has been recorded."""
        yield from self.wrong
        yield from self._lock_findings()
        yield from self._registry_findings()
        yield from self._event_findings()
        yield from self._published_findings()
        yield from self._sglang_findings()

    def _lock_findings(self) -> Iterator[Finding]:
        most_on_host = self._most_host_locks()
        for node in self.nodes:
            for kind, data in zip((self.full, self.mamba), self._data(node)):
                what = f"{'blocks' if kind is self.full else 'snapshot'} of node {node.id}"
                holders = self.locks.get((kind, node.id), [])
                if data.lock_ref != len(holders):
                    yield Finding(what, f"locked {data.lock_ref} times, held by {join_names(holders) or 'no owner'}")
                if data.host_lock_ref > most_on_host[node.id]:
                    times = f"locked {data.host_lock_ref} times on the host"
                    yield Finding(what, f"{times}, held by {most_on_host[node.id]} transfers")

    # Owners of blocks and snapshots

    def record_owners(self, blocks: PoolOwners, snapshots: PoolOwners, place: str = "value") -> None:
        """Record the tree as the owner of what its nodes have on the device (`value`) or the host (`host_value`)."""
        for node_id, pages in (self.pages if place == "value" else self._pages(place)).items():
            blocks.record_owner(CACHED, f"node {node_id}", pages)
        for node in self.nodes:
            if (value := getattr(self._data(node)[1], place)) is not None:
                snapshots.record_owner(CACHED, f"node {node.id}", value.tolist())

    def host_pools(self) -> list[PoolOwners]:
        if not self.tiered:
            return []
        of_blocks, of_snapshots = self.cache.full_kv_pool_host, self.cache.mamba_pool_host
        blocks = PoolOwners("host block", range(of_blocks.page_num))
        snapshots = PoolOwners("host snapshot", range(of_snapshots.page_num))
        for pool, rows, indices in zip((blocks, snapshots), (of_blocks, of_snapshots), self._fetched()):
            pool.record_owner(FREE, "the free list", rows.free_rows())
            under_way = [i for part in indices if part is not None for i in rows.rows_of(part).tolist()]
            # A fetch may have freed rows already that it does not need any more.
            pool.record_owner(COPIES, "a transfer from the storage", sorted(set(under_way)))
        self.record_owners(blocks, snapshots, "host_value")
        return [blocks, snapshots]

    def _fetched(self) -> tuple[list[Any], list[Any]]:
        """Return host indices of blocks and of snapshots that a storage fetch uses, or that wait to be freed."""
        from dsv4_sglang.srt.host_cache.transfers import SNAPSHOTS, remaining_blocks

        if not self.cache.enable_storage:
            return [], []
        controller, under_way = self.cache.cache_controller, self.cache.ongoing_prefetch.values()
        blocks = [*(prefetch.host_indices for prefetch in under_way), *_waiting(controller.host_mem_release_queue)]
        snapshots = [
            transfer.host_indices
            for prefetch in under_way
            for transfer in prefetch.comp_xfers.get(self.mamba, ())
            if transfer.name is SNAPSHOTS
        ]
        for operation in controller.cancelled_fetches:
            blocks.append(remaining_blocks(operation))
            if not operation.pool_transfers_done:
                snapshots += [
                    transfer.host_indices for transfer in operation.pool_transfers if transfer.name is SNAPSHOTS
                ]
        if (waiting := controller.extra_host_mem_release_queues.get(SNAPSHOTS)) is not None:
            snapshots += _waiting(waiting)
        return blocks, snapshots

    # Registry and tree

    def _registry_findings(self) -> Iterator[Finding]:
        """Yield the differences between the registry of snapshots and the tree."""
        slots, registry = self.slots, self.slots.registry
        above: dict[int, tuple[int, int]] = {self.root.id: (0, 0)}
        places = {}
        for node in self.nodes:
            previous, length = above[node.parent.id]
            length += len(node.key)
            place = slots.id_of(node)
            above[node.id] = place or previous, length
            if not place:
                continue
            places[place] = node
            mamba = self._data(node)[1]
            on_device = mamba.value is not None
            both = on_device and mamba.host_value is not None
            for name, listed, there in (
                ("its length", registry.length[place], length),
                ("the snapshot before it", registry.previous[place], previous),
                # A request may lock a node without a snapshot, to which the host then fetches one.
                ("its locks", registry.locks[place], mamba.lock_ref if on_device else 0),
                ("its host copy", registry.copies.is_saved(place), both),
            ):
                if listed != there:
                    yield Finding(f"snapshot {place}", f"{name}: the registry has {listed}, the tree {there}")
        for place, node in places.items():
            if slots.nodes.get(place) is not node:
                yield Finding(
                    f"snapshot {place}", f"attached to node {node.id}, but the slots have another node or none"
                )
        for place in sorted({*slots.nodes, *registry.in_registry.nonzero()[0].tolist()} - places.keys()):
            yield Finding(f"snapshot {place}", "in the slots or the registry, but on no node of the tree")
        for place in sorted(place for place in places if not registry.in_registry[place]):
            yield Finding(f"snapshot {place}", f"attached to node {places[place].id}, but missing in the registry")
        for name, listed, held in zip(("device", "host"), registry.tenants.held, registry.count_tenants()):
            if listed != held:
                yield Finding(f"tenants on the {name}", f"counted as {listed}, but they hold {held}")
        for place in registry.policy.misplaced():
            yield Finding(f"snapshot {place}", "its place in an eviction order is not that of its columns")
        for node_id in self.cache.tree_core.evictable_device_leaves.misplaced():
            yield Finding(f"node {node_id}", "the order of leaves and the tree differ")

    def _published_findings(self) -> Iterator[Finding]:
        """Yield the host rows that the storage `shm` has under a key that is not that of their node."""
        if not self.tiered:
            return
        pools = self.cache.full_kv_pool_host, self.cache.mamba_pool_host
        for node in self.nodes:
            keys = node.hash_value or []
            for pool, data, of_rows in zip(pools, self._data(node), (keys, keys[-1:])):
                rows = [] if data.host_value is None else pool.rows_of(data.host_value).tolist()
                for row, key in zip(rows, of_rows):
                    if (found := pool.published(row)) not in ("", key):
                        yield Finding(f"host row {row} of node {node.id}", f"published as {found}, its page is {key}")

    def _event_findings(self) -> Iterator[Finding]:
        """Yield the blocks that KV events have announced and no request would find, and the other way round."""
        if self.cache.events is None:
            return
        from dsv4_sglang.srt.prefix_cache.events import announced_by_rule

        self.cache.events.publish_changes()
        for medium, there in announced_by_rule(self.root, self.cache.events.dynamo).items():
            announced = self.cache.events.announced[medium]
            for block in sorted(announced - there):
                yield Finding(f"block {block} on {medium.value}", "announced by a KV event, and no request finds it")
            for block in sorted(there - announced):
                yield Finding(f"block {block} on {medium.value}", "a request finds it, and no KV event announced it")

    def _sglang_findings(self) -> Iterator[Finding]:
        """Yield what SGLang's own check of the tree reports: structure, leaves, lists, sizes."""
        try:
            check_tree(self.cache)
        except AssertionError as error:
            yield Finding("SGLang's check of the tree", str(error))


def _waiting(queue: Queue[Any]) -> list[Any]:
    """Return the items of a queue that other threads fill."""
    with queue.mutex:
        return list(queue.queue)
