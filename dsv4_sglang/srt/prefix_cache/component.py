"""Snapshots on SGLang's unified radix tree: a Mamba component that takes several snapshots per step, in slots of their
own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, FullComponent, MambaComponent
from sglang.srt.runtime_context import get_parallel

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache import metrics
from dsv4_sglang.srt.prefix_cache.leaves import EvictableLeaves
from dsv4_sglang.srt.prefix_cache.metrics import CacheMetrics
from dsv4_sglang.srt.prefix_cache.path_hash import path_hashes
from dsv4_sglang.srt.prefix_cache.placement import Due, due_in_prefill, is_kept
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.sglang.scheduler import seconds_since_created
from dsv4_sglang.srt.sglang.tree import evict_from_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

# Attribute of a request: its snapshots that are not attached to the tree yet, as a list of `Pending`, ascending by
# length. Absent or None before the first step of the request.
PENDING = "dsv4_snapshots"
# Attribute of a request without output tokens: whether it began with a hit, a value of the label `cache`.
WAITING = "dsv4_waiting"
# Attribute of a request: upper bound of its length after its last planned step, prefill or verify.
REACHED = "dsv4_reached"


class Pending(NamedTuple):
    """A snapshot whose blocks are not inserted into the tree yet.

    `rolling`: a decode step takes it, and the next rolling snapshot replaces it.
    """

    length: int
    slot: int
    rolling: bool


def note_change(cache: Any, node: UnifiedTreeNode) -> None:
    """Record for --kv-events-config that blocks or the snapshot of a node are added or removed."""
    if cache.events is not None:
        cache.events.changed(node)


class BlockComponent(FullComponent):
    """The blocks of the tree.

    SGLang frees evicted tokens as token slots in any order and has to look up their blocks, which synchronises with the
    device once per node. Here a node consists of whole blocks, so they are freed without a lookup.

    SGLang sorts all leaves for each eviction. Here `EvictableLeaves` keeps them in order.
    """

    # Leaves that the running eviction has returned, and the tokens that it must free.
    _returned: dict[int, UnifiedTreeNode]
    _wanted = 0

    def apply_component_action(self, action: Any) -> None:
        if not isinstance(action, FreeComponentDeviceSlot):
            super().apply_component_action(action)
            return
        for indices in action.indices:
            self.cache.token_to_kv_pool_allocator.free_segment(indices, start_pos=0)

    def evict_component(self, node: UnifiedTreeNode, *arguments: Any, **named: Any) -> tuple[int, int]:
        note_change(self.cache, node)
        return super().evict_component(node, *arguments, **named)

    @property
    def leaves(self) -> EvictableLeaves:
        leaves = self.tree_core.evictable_device_leaves
        assert isinstance(leaves, EvictableLeaves)
        return leaves

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted, self._returned = request_cnt, {}

    def _evict_device_next_node(self, tracker: dict[ComponentType, int], *freed: Any, **named: Any) -> int | None:
        """Return the next leaf to evict. A leaf that could not be evicted, because the host has no room for what must
        be saved first, is not returned twice."""
        while tracker[self.component_type] < self._wanted and (leaf := self.leaves.take_first()) is not None:
            if leaf.id not in self._returned:
                self._returned[leaf.id] = leaf
                return int(leaf.id)
        return None

    def _evict_device_end(self) -> None:
        for leaf in self._returned.values():
            self.leaves.refresh(leaf)
        self._returned = {}


class SnapshotComponent(MambaComponent):
    """Component that attaches slots of the snapshot pool to tree nodes. Live state slots never enter the tree.

    The snapshots of a request are pending until their blocks are inserted into the tree: at the end of each prefill
    chunk and at the end of the request. See docs/design/prefix_policy.md.
    """

    on_host = False
    """There is a host cache."""

    def __init__(self, cache: Any, params: Any, interval: int) -> None:
        """`interval`: snapshots at multiples of this many tokens are kept while the request continues."""
        super().__init__(cache, params)
        self.interval = interval
        self.slots: SnapshotSlots = params.req_to_token_pool.mamba_ckpt_pool
        # TP ranks do the same work, so only the first one reports. DP-attention ranks differ, so each reports.
        parallel = get_parallel()
        self.rank, self.silent = parallel.attn_dp_rank, parallel.attn_tp_rank > 0
        self.metrics = CacheMetrics(
            self.slots, enabled=params.enable_metrics, rank=self.rank, silent=self.silent, host=self.on_host
        )
        self._evicting = metrics.BLOCKS

    # Requests

    def begin(self, req: Req) -> None:
        """Start a request, or restart it after a retraction. It resumes from the tree node that it holds."""
        setattr(req, PENDING, [])
        registry, resumed = self.slots.registry, req.prefix_len
        registry.tick()
        if (slot := self._slot(self.tree_core.node_by_id(req.last_node))) is not None:
            self.metrics.observe("reuse_interval_requests", registry.use(slot), metrics.HIT)
        behind = path_hashes(req.full_untruncated_fill_ids, req.extra_key)[resumed // BLOCK :]
        if since := registry.ghost_hit(behind[::-1].tolist()):
            self.metrics.observe("reuse_interval_requests", since, metrics.EVICTED)
        if not len(req.output_ids):
            setattr(req, WAITING, metrics.HIT if resumed else metrics.MISS)
        self.metrics.add("prompt_tokens", len(req.full_untruncated_fill_ids))
        self.metrics.add("lost_tokens", max(0, (req.mamba_branching_seqlen or 0) - resumed))
        if resumed:
            self.metrics.add("snapshots_resumed")
            self.metrics.copied_snapshots(1, timed=True)
        for source, tokens in self.hits(req, resumed).items():
            self.metrics.add("hit_tokens", tokens, source)
        self.metrics.publish()

    def hits(self, req: Req, resumed: int) -> dict[str, int]:
        """Return the `resumed` tokens of a request by the place that had them (`metrics.SOURCES`)."""
        return {metrics.DEVICE: resumed}

    def plan_prefill(self, req: Req, room: int) -> list[tuple[int, int]]:
        """Plan the snapshots of the next prefill step of a request, and allocate their slots.

        Args:
            req: request of SGLang.
            room: maximum number of snapshots, as the staging buffer allows.

        Returns:
            (length, slot) of each snapshot, ascending.
        """
        if getattr(req, PENDING, None) is None:
            self.begin(req)
        begin, end = req.prefix_len, req.extend_end
        setattr(req, REACHED, end)
        due = due_in_prefill(
            begin,
            end,
            prompt=len(req.full_untruncated_fill_ids),
            interval=self.interval,
            branch=req.mamba_branching_seqlen or 0,
        )
        # If not all fit, those with a known use come first, and the deepest of them, which saves most.
        due.sort(key=lambda d: (not d.needed, -d.length))
        taken = [(d.length, slot) for d in due[:room] if (slot := self._take(d))]
        self.metrics.add("snapshots_skipped", len(due) - len(taken))
        self.metrics.copied_snapshots(len(taken), timed=True)
        taken.sort()
        getattr(req, PENDING).extend(Pending(length, slot, rolling=False) for length, slot in taken)
        return taken

    def plan_decode(self, req: Req, length: int) -> int:
        """Allocate a slot for the rolling snapshot at `length`. Return 0 if none is free."""
        pending = getattr(req, PENDING, None)
        if pending is None:
            return 0
        slot = self._take(Due(length, True))
        if slot:
            self.metrics.copied_snapshots(1, timed=False)
            pending.append(Pending(length, slot, rolling=True))
        return slot

    def settle(self, req: Req) -> None:
        """Free the rolling snapshots that the last one, now written, replaces.

        Snapshots of the prefill may be pending too and stay: with overlap scheduling the first decode step is prepared
        before the result of the prefill is processed, which inserts them.
        """
        pending = getattr(req, PENDING, None)
        if not pending:
            return
        old = [p for p in pending[:-1] if p.rolling and not is_kept(p.length, self.interval)]
        setattr(req, PENDING, [p for p in pending if p not in old])
        self.slots.give_back(p.slot for p in old)

    def plan_verify(self, req: Req, draft_tokens: int) -> int:
        """Return the slot for the rolling snapshot that the next verify step may take, or 0.

        The snapshot is due at the next multiple of 128 if the step may pass it. The device takes it when the step
        passes that length. Until the host knows the outcome, the snapshot is pending.

        The previous step may still run. The next one therefore begins at an unknown length: at most `draft_tokens`
        above the known length, and at most at the bound of the previous step. A slot is allocated only while no step
        can have passed the length already, since the device would never write such a snapshot.

        Args:
            req: request of SGLang.
            draft_tokens: tokens of a verify step.
        """
        pending = getattr(req, PENDING, None)
        if pending is None:
            return 0
        known = req.kv.kv_committed_len
        begin = min(getattr(req, REACHED), known + draft_tokens)
        setattr(req, REACHED, begin + draft_tokens)
        if len(pending) > 1 and pending[-1].length <= known:
            self.settle(req)
        length = (known // BLOCK + 1) * BLOCK
        if pending and pending[-1].rolling and pending[-1].length == length:
            return pending[-1].slot
        return self.plan_decode(req, length) if begin < length <= begin + draft_tokens else 0

    # Slots

    def _slot(self, node: UnifiedTreeNode) -> int | None:
        value = node.component_data[self.component_type].value
        return None if value is None else int(value)

    def _take(self, due: Due) -> int:
        slot = self.allocate_slot(needed=due.needed)
        self.metrics.add("snapshots_taken", slot > 0)
        return slot

    def allocate_slot(self, *, needed: bool) -> int:
        """Allocate a slot, evicting a less valuable snapshot if no slot is free. Return 0 if there is none."""
        if slot := self.slots.take():
            return slot
        victim = self.slots.registry.lowest_value(needed=needed, saves=self.interval)
        if not victim:
            return 0
        with self.evicting(metrics.SLOTS):
            self._evict_snapshot(self.slots.nodes[victim])
        return self.slots.take()

    @contextmanager
    def evicting(self, reason: str) -> Iterator[None]:
        """Context manager: count snapshots that are evicted inside under `reason`, one of `metrics.REASONS`."""
        before, self._evicting = self._evicting, reason
        try:
            yield
        finally:
            self._evicting = before

    def _evict_snapshot(self, node: UnifiedTreeNode) -> None:
        """Evict a snapshot. The blocks of the node stay until their memory is needed."""
        evict_from_device(self, node)

    # Interface of SGLang's tree components

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Record the snapshot to resume from. The request gets its live slot at admission, like any other request, so
        that queued requests hold no slot."""
        if params.cow_mamba and params.req is not None:
            slot = self._slot(self.tree_core.node_by_id(result.last_device_node))
            held = params.req.kv
            held.mamba_cow_src_index = None if slot is None else self.slots.device_index(slot)
            held.mamba_needs_clear = False
        return result

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Return the length to insert: that of the last pending snapshot, which the insertion attaches."""
        pending = getattr(req, PENDING, None) or []
        reached = [p for p in pending if req.kv.cache_protected_len < p.length <= token_ids_len]
        if not reached:
            return 0
        insert_params.mamba_value = self.slots.node_value(reached[-1].slot)
        return reached[-1].length

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: InsertParams, result: InsertResult, cache_actions: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if result.mamba_exist:
            return
        slot = self._slot(node)
        assert slot is not None and params.key is not None
        self._note(node, slot, len(params.key))
        self._lock_as_node(node, slot)

    def _note(self, node: UnifiedTreeNode, slot: int, length: int) -> None:
        """Register the snapshot of a path of `length` tokens that is now attached to the node."""
        note_change(self.cache, node)
        self.slots.nodes[slot] = node
        self.slots.registry.add(slot, length, self._above(node), self._below(node))
        self._refresh_leaf(node)

    def _refresh_leaf(self, node: UnifiedTreeNode) -> None:
        """Update the place of a node among the leaves, after it got or lost its snapshot."""
        self.tree_core.evictable_device_leaves.refresh(node)

    def _lock_as_node(self, node: UnifiedTreeNode, slot: int) -> None:
        """Copy the locks of a node to its new snapshot. SGLang may lock a node before it has a snapshot, and
        `release_component_lock` then releases these locks."""
        for _ in range(node.component_data[self.component_type].lock_ref):
            self.slots.registry.lock(slot)

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """Attach the earlier snapshots to the inserted path, and free those that could not be attached."""
        pending = getattr(req, PENDING, None) or []
        left = pending
        if insert_result is not None and insert_params is not None and insert_params.mamba_value is not None:
            last, used = len(insert_params.key), int(insert_params.mamba_value)
            for length, slot, _ in [p for p in pending if p.length <= last]:
                if slot == used:
                    attached = not insert_result.mamba_exist
                else:
                    attached = length > insert_params.prev_prefix_len and self._attach(insert_params, length, slot)
                if not attached:
                    self.slots.give_back([slot])
            left = [p for p in pending if p.length > last]
        if is_finished:
            self.slots.give_back(p.slot for p in left)
            setattr(req, PENDING, None)
            self.cache.req_to_token_pool.free_mamba_cache(req)
        else:
            setattr(req, PENDING, left)
        req.kv.mamba_last_track_seqlen = None
        if len(req.output_ids) and (cache := getattr(req, WAITING, None)):
            setattr(req, WAITING, None)
            self.metrics.observe("first_token_seconds", seconds_since_created(req), cache)
        self.metrics.publish()

    def _attach(self, inserted: InsertParams, length: int, slot: int) -> bool:
        """Attach a snapshot to a path that was just inserted. Return False if the node has one already."""
        assert inserted.key is not None and inserted.value is not None
        result = self.cache.insert(
            InsertParams(
                key=inserted.key[:length],
                value=inserted.value[:length],
                mamba_value=self.slots.node_value(slot),
                # The path is in the tree already, so none of its blocks is a duplicate to free.
                prev_prefix_len=length,
                inserted_len=length,
            )
        )
        return not result.mamba_exist

    def path(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        """Yield the nodes from this one up to the child of the root."""
        while node is not self.tree_core.root_node:
            yield node
            node = node.parent

    def _above(self, node: UnifiedTreeNode) -> int:
        """Return the registry number of the next snapshot above the node, or 0."""
        return next((found for at in self.path(node.parent) if (found := self.slots.id_of(at))), 0)

    def _below(self, node: UnifiedTreeNode) -> list[int]:
        """Return the registry numbers of the first snapshot on each path below the node."""
        found, stack = [], list(node.children.values())
        while stack:
            at = stack.pop()
            if there := self.slots.id_of(at):
                found.append(there)
            else:
                stack.extend(at.children.values())
        return found

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        note_change(self.cache, node)
        slot = self._slot(node)
        if EvictLayer.DEVICE in target and slot is not None:
            self._on_device_eviction(node, slot, target)
            self.metrics.add("snapshots_evicted", value=self._evicting)
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        self._refresh_leaf(node)
        return freed

    def _on_device_eviction(self, node: UnifiedTreeNode, slot: int, target: EvictLayer) -> None:
        self.slots.registry.remove(slot, self._path_hash(node, slot))
        del self.slots.nodes[slot]

    def _path_hash(self, node: UnifiedTreeNode, place: int) -> int:
        """Return the hash of the token path of an evicted snapshot, to detect ghost hits. Return 0 if a later snapshot
        follows it, since the conversation would resume from that one."""
        if self.slots.registry.following(place):
            return 0
        parts = [at.key.raw_token_ids()[: len(at.key)] for at in self.path(node)]
        return int(path_hashes(np.concatenate(parts[::-1]), node.key.extra_key)[-1])

    def _evict_device_next_node(self, *arguments: Any, **named: Any) -> None:
        """Do nothing. SGLang calls this if fewer than three live slots per new request are free, but evicting a
        snapshot frees no live slot. Snapshots are evicted only for new snapshots (`_take`)."""

    def acquire_component_lock(self, node: UnifiedTreeNode, result: Any, lock_host: bool = False) -> Any:
        slot = self._slot(node) if node is not self.tree_core.root_node else None
        if slot is not None and not lock_host:
            self.slots.registry.lock(slot)
        return super().acquire_component_lock(node, result, lock_host)

    def release_component_lock(self, node: UnifiedTreeNode, params: Any, lock_host: bool = False) -> None:
        data = node.component_data[self.component_type]
        before = data.lock_ref
        super().release_component_lock(node, params, lock_host)
        if data.lock_ref < before and (slot := self._slot(node)) is not None:
            self.slots.registry.unlock(slot)


def component_of(tree_cache: Any) -> SnapshotComponent:
    """Return the snapshot component of a running server's tree."""
    component = tree_cache.components[ComponentType.MAMBA]
    assert isinstance(component, SnapshotComponent)
    return component
