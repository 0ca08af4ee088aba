"""Integrity check: every slot and block of the pools has exactly one owner, and tree, registry and locks agree.

`audit` does the check. Tests call it on pools and trees without a server. With the option `integrity_check` a
scheduler adds its result to /server_info (`add_reports`, a hook of the table in `hooks`). See docs/design/integrity.md.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, NamedTuple

import torch

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.sglang.scheduler import disaggregated_requests, idle_differences
from dsv4_sglang.srt.sglang.tree import check_tree

# Key of the reports in the internal state of a DP-attention rank, as GET /server_info returns it.
KEY = "dsv4_sglang_integrity"
# A process waits this many times the duration of an audit before the next one, so audits take a tenth of its time.
REST = 9
# Attribute of a scheduler: its last report, and when that audit ended.
LAST_REPORT = "dsv4_last_report"
# Limit of the findings in a report, so that a growing leak does not make the answer grow.
MAX_FINDINGS = 200
# Kinds of owners: the free list, the tree, requests, and running copies between host and storage.
FREE, CACHED, REQUESTS, COPIES = OWNERS = ("free", "cached", "requests", "copies")


class Finding(NamedTuple):
    """An inconsistency. `what`: the object, such as "block 17". `wrong`: the description."""

    what: str
    wrong: str


class Pool:
    """Owners of the `ids` of a pool. `thing` is what an id denotes, such as "block". Each id must have one owner."""

    def __init__(self, thing: str, ids: range) -> None:
        self.thing, self.ids = thing, ids
        # Number of owned ids by kind of owner.
        self.counts = Counter(dict.fromkeys(OWNERS, 0))
        self._claims: list[tuple[str, Sequence[int]]] = []

    def claim(self, kind: str, owner: str, ids: Sequence[int]) -> None:
        """Register an owner of ids.

        Args:
            kind: one of OWNERS.
            owner: description for findings, such as "request 3".
            ids: the ids that it owns.
        """
        if len(ids):
            self.counts[kind] += len(ids)
            self._claims.append((owner, ids))

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each id without an owner, with several owners, or outside the pool."""
        owners: dict[int, list[str]] = defaultdict(list)
        for owner, ids in self._claims:
            for i in ids:
                owners[i].append(owner)
        for i in self.ids:
            if not owners.get(i):
                yield Finding(f"{self.thing} {i}", "no owner: leaked")
        for i, names in sorted(owners.items()):
            if i not in self.ids:
                where = f"outside {self.ids.start}..{self.ids.stop - 1}"
                yield Finding(f"{self.thing} {i}", f"owned by {_listed(names)}, {where}")
            elif len(names) > 1:
                yield Finding(f"{self.thing} {i}", f"{len(names)} owners: {_listed(names)}")


@dataclass
class AuditResult:
    """Result of the check: the pools with their owners, and the inconsistencies."""

    pools: list[Pool]
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(f"{what}: {wrong}" for what, wrong in self.findings) or "sound"


def audit(cache: Any, requests: Iterable[Any]) -> AuditResult:
    """Check the pools of a scheduler's tree cache, between two iterations of the scheduler.

    Reads tables and indices from the device and waits for it.

    Args:
        cache: tree cache of the scheduler.
        requests: all requests that may hold memory: running, in a step, between chunks, or waiting.
    """
    from dsv4_sglang.srt.prefix_cache.component import PENDING

    held_by, tables, allocator = list(requests), cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    tree = _Tree(cache) if hasattr(cache, "tree_core") else None  # none with --disable-radix-cache
    blocks = Pool("block", range(1, allocator.size // BLOCK + 1))
    rows = Pool("request row", range(1, tables.req_to_token.shape[0]))
    live = Pool("state slot", range(1, tables.mamba_allocator.size + 1))
    found = AuditResult([blocks, rows, live])

    blocks.claim(FREE, "the free list", allocator.get_all_free_pages().tolist())
    rows.claim(FREE, "the free list", tables.free_slots)
    live.claim(FREE, "the free list", tables.mamba_allocator.free_slots.tolist())
    slots = getattr(tables, "mamba_ckpt_pool", None)
    snapshots = Pool("snapshot slot", range(1, (slots.num_slots if slots else 0) + 1))
    if slots is not None:
        snapshots.claim(FREE, "the free list", slots.free_slots())
        found.pools.append(snapshots)

    for req in held_by:
        name, held = f"request {req.rid}", req.kv
        snapshots.claim(REQUESTS, name, [pending.slot for pending in getattr(req, PENDING, None) or ()])
        if held.mamba_pool_idx is not None:
            live.claim(REQUESTS, name, [int(held.mamba_pool_idx)])
        if held.req_pool_idx is None:
            continue
        rows.claim(REQUESTS, name, [int(held.req_pool_idx)])
        table = (tables.req_to_token[held.req_pool_idx, : req.kv.kv_allocated_len : BLOCK] // BLOCK).tolist()
        inserted = 0 if tree is None else held.cache_protected_len // BLOCK
        blocks.claim(REQUESTS, name, table[inserted:])
        if tree is not None:
            tree.hold(req, name, table[:inserted])

    if tree is not None:
        tree.claim(blocks, snapshots)
        found.pools += tree.host_pools()
    found.findings += [finding for pool in found.pools for finding in pool.findings()]
    if tree is not None:
        found.findings += tree.findings()
    return found


class _Tree:
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
            self._lock(node_id, params, copy)

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

    def hold(self, req: Any, name: str, table: list[int]) -> None:
        """Register a request's lock on the path to its node, and compare its block table with that path."""
        node_id = None
        if req.lock is not None:
            node_id = req.lock.node
            self._lock(node_id, req.lock.receipt, name)
        node, path = self.by_id.get(node_id, self.root), list[int]()
        while node is not self.root:
            path[:0] = self.pages.get(node.id, [])
            node = node.parent
        if path != table:
            text = f"its block table starts with {table}, but its path in the tree has {path}"
            self.wrong.append(Finding(name, text))

    def _lock(self, node_id: int, lock: Any, name: str) -> None:
        """Register a lock on the nodes that the tree's own release of the lock would unlock."""
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
        held = [
            *((loading.node_id, loading.host_lock_params) for loading in cache.ongoing_load_back.values()),
            *((prefetch.anchor_node_id, prefetch.anchor_lock_params) for prefetch in cache.ongoing_prefetch.values()),
            *cache.ongoing_backup.values(),
        ]
        return Counter(node for node_id, lock in held for node in self._locked_on_host(node_id, lock))

    def _locked_on_host(self, node_id: int, lock: Any) -> Iterator[int]:
        """Yield the nodes of a host lock: the node that was locked, and if it was split since, the parts above it."""
        node, first = self.by_id.get(node_id), lock.component_host_lock_uuids.get(self.full)
        while node is not None:
            yield node.id
            if first in (None, self._data(node)[0].metadata.get("host_uuid")):
                return
            node = node.parent

    def findings(self) -> Iterator[Finding]:
        """Yield all inconsistencies. Call it after every holder has been registered."""
        yield from self.wrong
        yield from self._lock_findings()
        yield from self._registry_findings()
        yield from self._event_findings()
        yield from self._own_findings()

    def _lock_findings(self) -> Iterator[Finding]:
        most_on_host = self._most_host_locks()
        for node in self.nodes:
            for kind, data in zip((self.full, self.mamba), self._data(node)):
                what = f"{'blocks' if kind is self.full else 'snapshot'} of node {node.id}"
                holders = self.locks.get((kind, node.id), [])
                if data.lock_ref != len(holders):
                    yield Finding(what, f"locked {data.lock_ref} times, held by {_listed(holders) or 'no owner'}")
                if data.host_lock_ref > most_on_host[node.id]:
                    times = f"locked {data.host_lock_ref} times on the host"
                    yield Finding(what, f"{times}, held by {most_on_host[node.id]} transfers")

    # Owners of blocks and snapshots

    def claim(self, blocks: Pool, snapshots: Pool, place: str = "value") -> None:
        """Register the tree as the owner of what its nodes have on the device (`value`) or the host (`host_value`)."""
        for node_id, pages in (self.pages if place == "value" else self._pages(place)).items():
            blocks.claim(CACHED, f"node {node_id}", pages)
        for node in self.nodes:
            if (value := getattr(self._data(node)[1], place)) is not None:
                snapshots.claim(CACHED, f"node {node.id}", value.tolist())

    def host_pools(self) -> list[Pool]:
        if not self.tiered:
            return []
        of_blocks, of_snapshots = self.cache.full_kv_pool_host, self.cache.mamba_pool_host
        blocks = Pool("host block", range(of_blocks.page_num))
        snapshots = Pool("host snapshot", range(of_snapshots.page_num))
        for pool, rows, indices in zip((blocks, snapshots), (of_blocks, of_snapshots), self._fetched()):
            pool.claim(FREE, "the free list", rows.free_rows())
            under_way = [i for part in indices if part is not None for i in rows.rows_of(part).tolist()]
            # A fetch may have freed rows already that it does not need any more.
            pool.claim(COPIES, "a transfer from the storage", sorted(set(under_way)))
        self.claim(blocks, snapshots, "host_value")
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
            both = mamba.value is not None and mamba.host_value is not None
            for name, listed, there in (
                ("its length", registry.length[place], length),
                ("the snapshot before it", registry.previous[place], previous),
                ("its locks", registry.locks[place], mamba.lock_ref),
                ("its host copy", bool(registry.copied[place]), both),
            ):
                if listed != there:
                    yield Finding(f"snapshot {place}", f"{name}: the registry has {listed}, the tree {there}")
        for place, node in places.items():
            if slots.nodes.get(place) is not node:
                yield Finding(
                    f"snapshot {place}", f"attached to node {node.id}, but the slots have another node or none"
                )
        for place in sorted({*slots.nodes, *registry.held.nonzero()[0].tolist()} - places.keys()):
            yield Finding(f"snapshot {place}", "in the slots or the registry, but on no node of the tree")
        for place in sorted(place for place in places if not registry.held[place]):
            yield Finding(f"snapshot {place}", f"attached to node {places[place].id}, but missing in the registry")
        for place in registry.misplaced():
            yield Finding(f"snapshot {place}", "its place in an eviction order is not that of its columns")
        for node_id in self.cache.tree_core.evictable_device_leaves.misplaced():
            yield Finding(f"node {node_id}", "the order of leaves and the tree differ")

    def _event_findings(self) -> Iterator[Finding]:
        """Yield the blocks that KV events have announced and no request would find, and the other way round."""
        if self.cache.events is None:
            return
        from dsv4_sglang.srt.prefix_cache.events import announced_by_rule

        self.cache.events.settle()
        for medium, there in announced_by_rule(self.root, self.cache.events.dynamo).items():
            announced = self.cache.events.announced[medium]
            for block in sorted(announced - there):
                yield Finding(f"block {block} on {medium.value}", "announced by a KV event, and no request finds it")
            for block in sorted(there - announced):
                yield Finding(f"block {block} on {medium.value}", "a request finds it, and no KV event announced it")

    def _own_findings(self) -> Iterator[Finding]:
        """Yield what SGLang's own check of the tree reports: structure, leaves, lists, sizes."""
        try:
            check_tree(self.cache)
        except AssertionError as error:
            yield Finding("SGLang's check of the tree", str(error))


def _waiting(queue: Queue[Any]) -> list[Any]:
    """Return the items of a queue that other threads fill."""
    with queue.mutex:
        return list(queue.queue)


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# In a scheduler


def add_reports(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND `Scheduler.get_internal_state`: add the reports of all ranks of an attention group to its answer.

    Every process runs this call, and the first of each DP-attention rank answers. Any client may send the request at
    any rate, so a process repeats its last report, with its age, until it has worked REST times as long as the audit
    took.
    """
    output = original(scheduler, recv_req)
    group, own = scheduler.attn_tp_cpu_group, _recent_report(scheduler)
    reports: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(reports, own, group=group)
    output.internal_state[KEY] = reports
    return output


def _recent_report(scheduler: Any) -> dict[str, Any]:
    """Return a new report, or the last one if it is too early for an audit. `age_seconds`: the time since the audit
    began."""
    last, ended = vars(scheduler).get(LAST_REPORT, (None, 0.0))
    if last is None or time.perf_counter() - ended >= REST * last["seconds"]:
        last = report(scheduler)
        ended = time.perf_counter()
        setattr(scheduler, LAST_REPORT, (last, ended))
    return {**last, "age_seconds": time.perf_counter() - ended + last["seconds"]}


def report(scheduler: Any) -> dict[str, Any]:
    """Return the result of the check of a scheduler's cache as a JSON object. If the scheduler is idle, it includes the
    result of SGLang's own checks of an idle server."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    begin = time.perf_counter()
    current_platform.synchronize()  # several streams write the tables of requests
    requests = requests_of(scheduler)
    found = audit(scheduler.tree_cache, requests)
    findings, idle = found.findings, scheduler.is_fully_idle()
    if idle:
        findings += [Finding("SGLang's check of an idle server", text) for text in idle_differences(scheduler)]
    return {
        "dp_rank": get_parallel().attn_dp_rank,
        "tp_rank": get_parallel().tp_rank,
        "idle": idle,
        "requests": sum(req.kv.req_pool_idx is not None for req in requests),
        "announced": _announced(scheduler.tree_cache),
        "pools": [{"of": pool.thing, "size": len(pool.ids), **pool.counts} for pool in found.pools],
        "wrong": len(findings),
        "findings": [{"what": what, "wrong": wrong} for what, wrong in findings[:MAX_FINDINGS]],
        "seconds": time.perf_counter() - begin,
    }


def _announced(cache: Any) -> dict[str, dict[str, int]]:
    """Return, by medium, the number of blocks that KV events have announced and the sum of their hashes."""
    events = getattr(cache, "events", None)
    media = {} if events is None else events.announced
    return {medium.value: {"blocks": len(blocks), "sum": sum(blocks)} for medium, blocks in media.items()}


def requests_of(scheduler: Any) -> list[Any]:
    """Return all requests of a scheduler: in batches, between chunks, in queues and between two servers."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    if scheduler.enable_overlap:
        batches += [batch for batch, _ in scheduler.result_queue]
    known = [req for batch in batches if batch is not None for req in batch.reqs]
    known += [req for req in (scheduler.chunked_req, *scheduler.waiting_queue) if req is not None]
    known += disaggregated_requests(scheduler)
    return list({id(req): req for req in known}.values())
