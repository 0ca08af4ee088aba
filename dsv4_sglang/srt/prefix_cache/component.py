"""Snapshots on SGLang's unified radix tree: a Mamba component that takes several snapshots per step, in slots of their
own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, MambaComponent
from sglang.srt.runtime_context import get_parallel

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache import metrics
from dsv4_sglang.srt.prefix_cache.events import note_change
from dsv4_sglang.srt.prefix_cache.metrics import CacheMetrics
from dsv4_sglang.srt.prefix_cache.notes import Pending, RequestNote
from dsv4_sglang.srt.prefix_cache.path_hash import path_hashes
from dsv4_sglang.srt.prefix_cache.request_snapshots import SnapshotPlanner
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.prefix_cache.tenants import NO_LIMIT
from dsv4_sglang.srt.prefix_cache.tree_paths import branch_node, ghost_hash, snapshot_above, snapshots_below
from dsv4_sglang.srt.sglang.tree import evict_from_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class SnapshotComponent(MambaComponent):
    """Component that attaches slots of the snapshot pool to tree nodes. Live state slots never enter the tree.

    The snapshots of a request are pending until their blocks are inserted into the tree: at the end of each prefill
    chunk and at the end of the request. See docs/design/prefix_policy.md.
    """

    # There is a host cache.
    on_host = False

    def __init__(self, cache: Any, params: Any, interval: int) -> None:
        """`interval`: snapshots at multiples of this many tokens are kept while the request continues."""
        super().__init__(cache, params)
        self.planner = SnapshotPlanner(self, interval)
        self.slots: SnapshotSlots = params.req_to_token_pool.mamba_ckpt_pool
        # TP ranks do the same work, so only the first one reports. DP-attention ranks differ, so each reports.
        parallel = get_parallel()
        self.rank, self.silent = parallel.attn_dp_rank, parallel.attn_tp_rank > 0
        self.metrics = CacheMetrics(
            self.slots,
            enabled=params.enable_metrics,
            rank=self.rank,
            silent=self.silent,
            host=self.on_host,
            tenants=self.slots.tenant_percent < NO_LIMIT,
        )

    # Requests

    def begin(self, req: Req) -> None:
        """Start a request, or restart it after a retraction. It resumes from the tree node that it holds."""
        registry, resumed = self.slots.registry, req.prefix_len
        registry.tick()
        slot = self._slot(self.tree_core.node_by_id(req.last_node))
        since_use = None if slot is None else registry.use(slot)
        recomputed = path_hashes(req.full_untruncated_fill_ids, req.extra_key, req.cache_salt)[resumed // BLOCK :]
        since_eviction = registry.ghost_hit(recomputed[::-1].tolist())
        if not len(req.output_ids):  # it was not retracted
            left = branch_node(self.tree_core, req)
            below = None if left is None else snapshots_below(self.slots, left)
            registry.resumed(slot or 0, below, recomputes=since_eviction > 0)
        self.metrics.admitted(req, resumed, self.hits(req, resumed), since_use, since_eviction)

    def hits(self, req: Req, resumed: int) -> dict[str, int]:
        """Return the `resumed` tokens of a request by the place that had them (`metrics.SOURCES`)."""
        return {metrics.DEVICE: resumed}

    # Slots

    def _slot(self, node: UnifiedTreeNode) -> int | None:
        value = node.component_data[self.component_type].value
        return None if value is None else int(value)

    def allocate_slot(self, *, needed: bool) -> int:
        """Allocate a slot, evicting a less valuable snapshot if no slot is free. Return 0 if there is none."""
        if slot := self.slots.take():
            return slot
        victim = self.slots.registry.policy.lowest_value(needed=needed, saves=self.planner.interval)
        if not victim:
            return 0
        with self.metrics.evicting(metrics.SLOTS):
            self._evict_snapshot(self.slots.nodes[victim])
        return self.slots.take()

    def _evict_snapshot(self, node: UnifiedTreeNode) -> None:
        """Evict a snapshot. The blocks of the node stay until their memory is needed."""
        evict_from_device(self, node)

    # Interface of SGLang's tree components

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Record the snapshot to resume from. The request gets its live slot at admission, like any other request, so
        that queued requests hold no slot."""
        if params.cow_mamba and params.req is not None:
            slot = self._slot(self.tree_core.node_by_id(result.last_device_node))
            kv_record = params.req.kv
            kv_record.mamba_cow_src_index = None if slot is None else self.slots.device_index(slot)
            kv_record.mamba_needs_clear = False
        return result

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Return the length to insert: that of the last pending snapshot, which the insertion attaches."""
        pending = RequestNote.of(req).pending or []
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
        self._add_to_registry(node, slot, length)

    def _add_to_registry(self, node: UnifiedTreeNode, number: int, length: int) -> None:
        self.slots.nodes[number] = node
        above, below = snapshot_above(self.slots, node), snapshots_below(self.slots, node)
        self.slots.registry.add(number, length, above, below, tenant=node.key.cache_salt or "")
        self.tree_core.evictable_device_leaves.refresh(node)

    def _lock_as_node(self, node: UnifiedTreeNode, slot: int) -> None:
        """Copy the locks of a node to its new snapshot. SGLang may lock a node before it has a snapshot, and
        `release_component_lock` then releases these locks."""
        for _ in range(node.component_data[self.component_type].lock_ref):
            self.slots.registry.lock(slot)

    # The tokens of a request, when its blocks are inserted into the tree. Snapshots (S) are pending, in this order:
    #
    #     0             prev_prefix_len               last               end
    #     |---------S---------|-------S--------S--------S-------S---------|
    #     | blocks of the     | blocks that the         | blocks of the   |
    #     | tree already      | insertion adds          | request         |
    #     |                   |                         |                 |
    #     | slots are freed   | attached, unless the    | stay pending; freed with the
    #     |                   | node has a snapshot     | last token of the request
    #
    # `last` is the last pending snapshot within the tokens to insert: without a snapshot no request resumes at a block,
    # so later blocks are not inserted (`prepare_for_caching_req`). The insertion attaches that snapshot itself.

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """Attach the earlier snapshots to the inserted path, and free those that could not be attached."""
        note = RequestNote.of(req)
        pending = note.pending or []
        if insert_result is not None and insert_params is not None and insert_params.mamba_value is not None:
            pending = self._attach_inserted(pending, insert_params, insert_result)
        if is_finished:
            self.slots.give_back(p.slot for p in pending)
            note.pending = None
            self.cache.req_to_token_pool.free_mamba_cache(req)
        else:
            note.pending = pending
        req.kv.mamba_last_track_seqlen = None
        self.metrics.first_token(req)
        self.metrics.publish()

    def _attach_inserted(self, pending: list[Pending], inserted: InsertParams, result: InsertResult) -> list[Pending]:
        """Attach the pending snapshots of an inserted path, or free their slots. Return those beyond the path."""
        assert inserted.key is not None and inserted.mamba_value is not None
        last, attached_by_tree = len(inserted.key), int(inserted.mamba_value)
        for length, slot, _ in [p for p in pending if p.length <= last]:
            if slot == attached_by_tree:
                attached = not result.mamba_exist
            else:
                attached = length > inserted.prev_prefix_len and self._attach(inserted, length, slot)
            if not attached:
                self.slots.give_back([slot])
        return [p for p in pending if p.length > last]

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
            self.metrics.add("snapshots_evicted", value=self.metrics.eviction_reason)
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        self.tree_core.evictable_device_leaves.refresh(node)
        return freed

    def _on_device_eviction(self, node: UnifiedTreeNode, slot: int, target: EvictLayer) -> None:
        self.slots.registry.remove(slot, ghost_hash(self.slots, node, slot))
        del self.slots.nodes[slot]

    def _evict_device_next_node(self, *arguments: Any, **named: Any) -> None:
        """Do nothing. SGLang calls this if fewer than three live slots per new request are free, but evicting a
        snapshot frees no live slot. Snapshots are evicted only for new snapshots (`allocate_slot`)."""

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
