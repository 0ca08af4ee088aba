"""Snapshots in two places: in slots of the device, in rows of host memory, or in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentHostSlot
from sglang.srt.mem_cache.unified_cache.components import (
    CacheTransferPhase,
    EvictLayer,
    PrepareLoadBackResult,
)
from torch import Tensor

from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS
from dsv4_sglang.srt.prefix_cache import metrics
from dsv4_sglang.srt.prefix_cache.component import SnapshotComponent
from dsv4_sglang.srt.prefix_cache.events import note_change
from dsv4_sglang.srt.prefix_cache.host_copy import CopyEvent
from dsv4_sglang.srt.prefix_cache.tree_paths import ghost_hash
from dsv4_sglang.srt.sglang.tree import length_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

WRITE_THROUGH, SELECTIVE, WRITE_BACK = "write_through", "write_through_selective", "write_back"


@dataclass(frozen=True)
class Loading(PrepareLoadBackResult):
    """A load of the snapshot of `node` that was requested."""

    node: int = -1


class HostSnapshotComponent(SnapshotComponent):
    """Component that attaches snapshots in device slots (`value`) and host rows (`host_value`) to tree nodes.

    The registry keeps one history of both copies. A snapshot is loaded into a slot of the snapshot pool, and a request
    resumes from it as from one that was taken on the device.
    """

    # --hicache-write-policy
    policy = WRITE_THROUGH

    on_host = True

    # Choice of the snapshots that the host gets

    def begin(self, req: Req) -> None:
        super().begin(req)
        self.mark_for_saving(self.tree_core.node_by_id(req.last_node))

    def hits(self, req: Req, resumed: int) -> dict[str, int]:
        from_host = min(req.host_hit_length, resumed)
        from_storage = min(from_host, req.storage_hit_length)
        return {
            metrics.DEVICE: resumed - from_host,
            metrics.HOST: from_host - from_storage,
            metrics.STORAGE: from_storage,
        }

    def mark_for_saving(self, node: UnifiedTreeNode) -> None:
        """Mark the node's snapshot to be copied to the host. With write_back that happens when the device evicts it."""
        if node is not self.tree_core.root_node and (slot := self._slot(node)) is not None:
            event = CopyEvent.DEFER if self.policy == WRITE_BACK else CopyEvent.NEED
            self.slots.registry.note_copy(event, slot)

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if self.policy != SELECTIVE:
            self.mark_for_saving(node)

    # Places of snapshots

    def _note(self, node: UnifiedTreeNode, slot: int, length: int) -> None:
        """Register a new snapshot, or one that the host has and a request recomputed."""
        row = node.component_data[self.component_type].host_value
        if row is None:
            super()._note(node, slot, length)
        else:
            self._moved(node, self.slots.registry.host_id(int(row)), slot)

    def _moved(self, node: UnifiedTreeNode, place: int, to: int) -> None:
        """Renumber a snapshot on the host when its device copy is created or evicted."""
        note_change(self.cache, node)
        nodes = self.slots.nodes
        self.slots.registry.move(place, to)
        del nodes[place]
        nodes[to] = node

    def _on_device_eviction(self, node: UnifiedTreeNode, slot: int, target: EvictLayer) -> None:
        row = node.component_data[self.component_type].host_value
        if row is None or EvictLayer.HOST in target:
            super()._on_device_eviction(node, slot, target)
        else:
            self._moved(node, slot, self.slots.registry.host_id(int(row)))

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        registry, slot = self.slots.registry, self._slot(node)
        row = node.component_data[self.component_type].host_value
        if EvictLayer.HOST in target and row is not None:
            if slot is None:
                self.metrics.add("host_snapshots_evicted", value=self.metrics.eviction_reason)
                place = self.slots.id_of(node)
                registry.remove(place, ghost_hash(self.slots, node, place))
                del self.slots.nodes[place]
            else:
                registry.note_copy(CopyEvent.LOSE, slot)
        return super().evict_component(node, device_frees, host_frees, cache_actions, target)

    def _evict_snapshot(self, node: UnifiedTreeNode) -> None:
        self.cache.saves.save_for_slot(node)
        super()._evict_snapshot(node)

    # Copies

    def slots_for_load(self, count: int) -> Tensor | None:
        """Allocate `count` slots of the snapshot pool for a load. Return them [count] int64, or None without room."""
        slots = [slot for _ in range(count) if (slot := self.allocate_slot(needed=True))]
        if len(slots) == count:
            return torch.tensor(slots, dtype=torch.int64)
        self.slots.give_back(slots)
        return None

    def alloc_prefetch_staging(self, num_tokens: int) -> Tensor | None:
        pool, keys = self.cache.mamba_pool_host, [self.cache.cache_controller.fetched_key]
        row: Tensor | None = pool.alloc_for(keys)
        if row is None:
            self.cache.evict_host(num_tokens, self.component_type)
            row = pool.alloc_for(keys)
        return row

    def prepare_load_back(self, node_id: int, *, req: Req | None = None) -> PrepareLoadBackResult:
        return Loading(node=node_id)

    def finalize_load_back(self, req: Req | None, prep: PrepareLoadBackResult, success: bool) -> None:
        """Let the request resume from the loaded snapshot, or, if the load failed, from the deepest one on the
        device."""
        if req is None or not isinstance(prep, Loading):
            return
        if not success:
            req.host_hit_length = 0
            self.metrics.add("host_loads_failed")
            return
        slot = self._slot(self.tree_core.node_by_id(prep.node))
        assert slot is not None, "a load ends at a snapshot"
        req.kv.mamba_cow_src_index = self.slots.device_index(slot)
        self.cache.cache_controller.watch.expect(req)

    def build_hicache_transfers(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, **arguments: Any
    ) -> list[PoolTransfer] | None:
        data = node.component_data[self.component_type]
        if phase == CacheTransferPhase.BACKUP_HOST:
            slot = self._slot(node)
            if slot is None or data.host_value is not None:
                return None
            unsaved = self.slots.registry.copies.is_unsaved(slot)
            return [PoolTransfer(name=SNAPSHOTS, device_indices=data.value)] if unsaved else None
        if phase == CacheTransferPhase.LOAD_BACK:
            if data.value is not None or data.host_value is None:
                return None
            return [PoolTransfer(name=SNAPSHOTS, host_indices=data.host_value, nodes_to_load=[node.id])]
        transfers = super().build_hicache_transfers(node, phase, **arguments)
        for transfer in transfers or ():
            transfer.name = SNAPSHOTS
        return transfers

    def commit_hicache_transfer(
        self,
        node: UnifiedTreeNode,
        phase: CacheTransferPhase,
        transfers: Any = (),
        *,
        insert_result: Any = None,
        pool_storage_result: Any = None,
        **arguments: Any,
    ) -> None:
        if phase == CacheTransferPhase.LOAD_BACK:
            if transfers:
                self._loaded(node, int(transfers[0].device_indices))
            return
        target = node
        if phase == CacheTransferPhase.PREFETCH:
            if pool_storage_result is not None:
                hits = pool_storage_result.extra_pool_hit_pages
                hits[PoolName.MAMBA] = hits.get(SNAPSHOTS, 0)
            found = None if insert_result is None else insert_result.inserted_host_node
            target = node if found is None else self.tree_core.node_by_id(found)
        had = target.component_data[self.component_type].host_value
        super().commit_hicache_transfer(
            node,
            phase,
            transfers,
            insert_result=insert_result,
            pool_storage_result=pool_storage_result,
            **arguments,
        )
        row = target.component_data[self.component_type].host_value
        if had is None and row is not None:
            self._arrived(target, int(row))

    def _loaded(self, node: UnifiedTreeNode, slot: int) -> None:
        row = node.component_data[self.component_type].host_value
        assert row is not None, "a load comes from a row"
        self.tree_core.set_component_device_value(node.id, self.component_type, self.slots.node_value(slot))
        self._moved(node, self.slots.registry.host_id(int(row)), slot)
        self._lock_as_node(node, slot)

    def _arrived(self, node: UnifiedTreeNode, row: int) -> None:
        """Register a snapshot that was copied to the host or fetched from a storage."""
        note_change(self.cache, node)
        registry, slot = self.slots.registry, self._slot(node)
        if slot is not None:
            registry.note_copy(CopyEvent.SAVE, slot)
            return
        self._add_to_registry(node, registry.host_id(row), length_of(node))

    def free_host_values(self, host_values: list[Tensor]) -> None:
        for rows in host_values:
            self.cache.mamba_pool_host.free(rows)

    def apply_component_action(self, action: Any) -> None:
        if not isinstance(action, FreeComponentHostSlot):
            super().apply_component_action(action)
            return
        for indices in action.host_indices:
            if indices is not None and indices.numel():
                unused = PoolTransfer(name=SNAPSHOTS, host_indices=indices)
                self.cache.cache_controller.append_host_mem_release(extra_pools=[unused])
