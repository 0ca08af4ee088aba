"""Prefix cache of a server with a host cache."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, ComponentType

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.host_cache.component import SELECTIVE, WRITE_BACK, HostSnapshotComponent
from dsv4_sglang.srt.prefix_cache import metrics
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.component import BlockComponent, component_of
from dsv4_sglang.srt.prefix_cache.policy import MARGIN
from dsv4_sglang.srt.sglang.host_transfers import note_backup, start_backup
from dsv4_sglang.srt.sglang.tree import evict_from_host

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

# Byte limit of the saves of one scheduler iteration. It is not a time limit, because all ranks must save the same.
MAX_SAVE_BYTES = 256 << 20


class HostPrefixCache(PrefixCache):
    """SGLang's tree over device and host memory.

    Saves are planned by snapshot, not by node: the host gets the snapshots that
    `HostSnapshotComponent.mark_for_saving` marks, most valuable first, each with all blocks up to it. All saves of a
    scheduler iteration are one batch of copies.
    """

    # True while the host cache must survive a flush.
    _keep_host = False
    # Free memory and registry state at the last search for snapshots that the device evicts next.
    _last_search: tuple[Any, ...] | None
    # Nodes at which a path on the host may end without a snapshot, because a copy blocked their eviction.
    _dangling: dict[UnifiedTreeNode, None]

    def __init__(self, params: Any, forward_stream: Any) -> None:
        """`forward_stream`: the CUDA stream of the steps."""
        self.forward_stream = forward_stream
        super().__init__(params)

    @property
    def component(self) -> HostSnapshotComponent:
        component = component_of(self)
        assert isinstance(component, HostSnapshotComponent)
        return component

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        self.component.policy = server_args.hicache_write_policy
        # With this flag SGLang does not expect a host copy of every node. This class decides what is saved and when,
        # for every write policy.
        self.is_write_back = True
        controller = self.cache_controller
        self.component.metrics.attach(self.full_kv_pool_host, self.mamba_pool_host, controller.saves, controller.loads)

    # Requests

    def checkpoint(self, req: Req, *, up_to: int, **arguments: Any) -> None:
        before = req.last_node
        super().checkpoint(req, up_to=up_to, **arguments)
        if req.finished():
            self._finished(req, before)

    def _finished(self, req: Req, before: int) -> None:
        if req.last_node == self.root_node.id:  # nothing was inserted
            req.last_node = before
        if self.component.policy == SELECTIVE:
            self.component.mark_for_saving(self.tree_core.node_by_id(req.last_node))

    def retracted(self, req: Req) -> None:
        """Save the prefix of a retracted request before it can be evicted, since it is the first eviction candidate.

        A request that returns log-probabilities of its prompt is matched only up to the token at which they begin. It
        resumes from the last snapshot before that token, which is saved too.
        """
        node, slots = self.tree_core.node_by_id(req.last_node), self.component.slots
        if self.component.policy == WRITE_BACK or node is self.root_node:
            return
        if req.return_logprob and req.logprob_start_len >= 0:
            before = slots.id_of(node)
            while before and slots.registry.length[before] > req.logprob_start_len:
                before = int(slots.registry.previous[before])
            if before:
                self.component.mark_for_saving(slots.nodes[before])
                self.save_now(slots.nodes[before])
        self.component.mark_for_saving(node)
        self.save_now(node)

    def invalidate_storage(self, name: str) -> None:
        """Use a new name for later pages in the storage. Pages of the old weights stay as long as other servers use
        them."""
        if self.enable_storage:
            self.cache_controller.storage_backend.use_name(name)

    def settle(self, waiting: Iterable[Req]) -> None:
        for req in waiting:
            self.release_aborted_request(req.cache_request_handle)
        while self.ongoing_write_through or self.ongoing_load_back or self.ongoing_backup:
            self.check_hicache_events()
            time.sleep(0.001)  # SGLang writes to the storage in a thread

    @contextmanager
    def keep_host_cache(self) -> Iterator[None]:
        """Context manager around the release of device memory. First save the snapshots and blocks of the device, as
        far as the host has room. Inside, a flush does not empty the host cache.

        Raises:
            RuntimeError: requests hold tokens of the device.
        """
        blocks, slots = self.token_to_kv_pool_allocator, self.component.slots
        self.settle(())
        everything = slots.registry.note_eviction_candidates(blocks.size, slots.num_slots, slots.num_slots)
        for slot in reversed(everything):
            if slot in slots.nodes:
                self.save_now(slots.nodes[slot])
        with self.component.evicting(metrics.SLEEP):
            self.evict(EvictParams(num_tokens=blocks.size))
        self.settle(())
        if blocks.available_size() < blocks.size:
            raise RuntimeError(f"{blocks.size - blocks.available_size()} tokens of the device are held by requests")
        self._keep_host = True
        try:
            yield
        finally:
            self._keep_host = False

    def reset(self) -> None:
        if not self._keep_host:
            super().reset()
            self._last_search, self._dangling = None, {}

    # Saves to the host

    def check_hicache_events(self) -> None:
        with self._recheck_queue_after_saves():
            super().check_hicache_events()
        self.cache_controller.start_unclaimed_loads()
        self._save_eviction_candidates(MAX_SAVE_BYTES - self._save_new_snapshots())

    def _save_new_snapshots(self) -> int:
        """Save new snapshots at once, and return the number of bytes.

        Without a storage, a snapshot is saved early only if the host has free memory for it. With a storage, which
        stores what the host has, the host evicts entries to make room.
        """
        slots, saved = self.component.slots, 0
        if not (new := slots.registry.to_copy()):
            return 0
        with self.cache_controller.batch_backups():
            for slot in new:
                # Evicting on the host to make room may have removed the snapshot.
                if saved < MAX_SAVE_BYTES and self._is_to_save(slot):
                    node = slots.nodes[slot]
                    if node.write_through_pending_id is not None:  # a copy of its blocks is running
                        continue
                    slots.registry.attempted[slot] = True
                    if self.enable_storage or self._has_room(node):
                        saved += self._save(node) or self._count_rejected_save()
        return saved

    def _save_eviction_candidates(self, left: int) -> None:
        """Save the snapshots that the device evicts next, up to `left` bytes.

        The search for them takes a millisecond of scheduler time. It runs only if snapshots have changed or an eighth
        of the margin has been allocated.
        """
        slots, blocks = self.component.slots, self.token_to_kv_pool_allocator
        registry, margins = slots.registry, (blocks.size // MARGIN, slots.num_slots // MARGIN)
        free = blocks.available_size(), slots.available_size()
        searched = registry, registry.changes, *(8 * room // max(margin, 8) for room, margin in zip(free, margins))
        if searched == self._last_search:
            return
        tokens, rows = (margin - room for room, margin in zip(free, margins))
        leaving = registry.note_eviction_candidates(tokens, rows)
        with self.cache_controller.batch_backups():
            for slot in leaving:
                if left > 0 and self._is_to_save(slot):
                    left -= self._save(slots.nodes[slot]) or 0
        self._last_search = searched if left > 0 else None

    def save_now(self, node: UnifiedTreeNode) -> None:
        """Save a node's snapshot and the blocks up to it, and wait for the copy, before the device may evict the node.

        Does nothing if the snapshot need not be saved or there is no room.
        """
        if not self._is_to_save(self.component.slots.id_of(node)):
            return
        if node.write_through_pending_id is not None:  # a copy of its blocks is running
            self.finish_saves()
        with self.cache_controller.batch_backups():
            saved = self._save(node)
        if saved is None:
            self._count_rejected_save()
        else:
            self.finish_saves()

    def _count_rejected_save(self) -> int:
        self.component.metrics.add("host_saves_skipped")
        return 0

    def finish_saves(self) -> bool:
        """Wait for running saves. Return True if there were any, so that their blocks can be evicted now."""
        if not self.ongoing_write_through:
            return False
        with self._recheck_queue_after_saves():
            self.writing_check(write_back=True)
        return True

    @contextmanager
    def _recheck_queue_after_saves(self) -> Iterator[None]:
        """Context manager: if saves finish inside, let the scheduler check its queue again, since they free memory."""
        saving = len(self.ongoing_write_through)
        yield
        if len(self.ongoing_write_through) < saving:
            self.component.metrics.publish()
            if self.running_batch is not None:
                self.running_batch.batch_is_full = False

    def _is_to_save(self, slot: int) -> bool:
        registry = self.component.slots.registry
        return 0 < slot <= registry.capacity and bool(registry.pending_write[slot]) and not registry.copied[slot]

    def _save(self, node: UnifiedTreeNode) -> int | None:
        """Start to save a snapshot and the blocks up to it. Less valuable entries are evicted to make room.

        Earlier snapshots of the path are saved separately. A superseded snapshot evicts nothing for its blocks: they
        would duplicate blocks that the device keeps for the end of the branch.

        Returns:
            Bytes to copy, or None if there is no room.
        """
        if node.write_through_pending_id is not None:  # a copy of its blocks is running
            return 0
        slots, path = self.component.slots, list(self.component.path(node))
        slot, tokens = slots.id_of(node), self._tokens_to_save(path)
        if tokens and slots.registry.superseded(slot) and not self._has_room(node):
            return None
        for kind, count in ((ComponentType.MAMBA, 1), (ComponentType.FULL, tokens)):
            missing = count - self._pool(kind).available_size()
            if missing > 0 and self.evict_host(missing, kind, slot, path) < missing:
                return None
        saved = 0
        for part in [part for part in reversed(path) if part is node or not part.backuped]:
            if (size := self._copy(part, with_snapshot=part is node)) is None:
                self._dangling.update(dict.fromkeys(path))
                return None
            saved += size
        return saved

    def _copy(self, node: UnifiedTreeNode, *, with_snapshot: bool) -> int | None:
        """Start to copy the parts of a node that the host lacks. Return their bytes, or None if there is no room."""
        blocks, transfers = self.tree_core.build_backup_spec(node.id)
        if not with_snapshot:
            transfers = {}
        only_snapshot = node.backuped
        rows = start_backup(self, node.id, blocks[:0] if only_snapshot else blocks, transfers)
        if rows is None:
            return None
        if only_snapshot:
            self.component.commit_hicache_transfer(
                node, CacheTransferPhase.BACKUP_HOST, transfers[ComponentType.MAMBA], cache_actions=[]
            )
        else:
            self.tree_core.commit_backup(node.id, rows, transfers)
        note_backup(self, node.id, self.inc_lock_ref(node.id).to_dec_params())
        snapshots = sum(len(transfer.host_indices) for of_one in transfers.values() for transfer in of_one)
        return len(rows) // BLOCK * self.full_kv_pool_host.row_bytes + snapshots * self.mamba_pool_host.row_bytes

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        """Skip the copies that SGLang requests for inserted nodes. Nodes are saved together with their snapshots."""
        return super()._execute_and_commit_kv_backup(action, write_back) if write_back else 0

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        """Evict a leaf of the device.

        Blocks after the last snapshot of a path have no value and are not saved. The exception is a node that others
        depend on: the host may have loaded the end of a path from a storage without the nodes above it.
        """
        core = self.tree_core
        node = core.node_by_id(node_id)
        self.save_now(node)
        core.is_write_back = bool(node.children) or any(data.host_lock_ref for data in node.component_data)
        try:
            return super()._evict_device_leaf(node_id, tracker)
        finally:
            core.is_write_back = True

    # Evictions from the device

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict_saved(super().evict, params)

    def evict_for_alloc(self, params: EvictParams, **arguments: Any) -> EvictResult:
        return self._evict_saved(partial(super().evict_for_alloc, **arguments), params)

    def _evict_saved(self, evict: Callable[[EvictParams], EvictResult], params: EvictParams) -> EvictResult:
        """Evict, and if that is not enough, wait for running saves and evict the nodes that they lock.

        The wait takes one step and one copy at most. Without it SGLang would retract a request, which costs at least a
        prefill step.
        """
        blocks = self.token_to_kv_pool_allocator
        wanted = blocks.available_size() + params.num_tokens
        result = evict(params)
        if (missing := wanted - blocks.available_size()) > 0 and self.finish_saves():
            result.num_tokens_evicted += evict(EvictParams(num_tokens=missing)).num_tokens_evicted
        return result

    # Evictions from the host

    def _pool(self, kind: ComponentType) -> Any:
        return self.mamba_pool_host if kind is ComponentType.MAMBA else self.full_kv_pool_host

    def _has_room(self, node: UnifiedTreeNode) -> bool:
        """Return True if a snapshot and the blocks up to it fit without an eviction."""
        tokens = self._tokens_to_save(self.component.path(node))
        return self.mamba_pool_host.available_size() > 0 and self.full_kv_pool_host.available_size() >= tokens

    def _tokens_to_save(self, path: Iterable[UnifiedTreeNode]) -> int:
        return sum(len(part.key) for part in path if not part.backuped)

    def evict_host(
        self,
        num_tokens: int,
        component_type: ComponentType = ComponentType.FULL,
        slot: int = 0,
        path: Sequence[UnifiedTreeNode] = (),
    ) -> int:
        """Free host memory in the order of `SnapshotRegistry.on_host`.

        SGLang calls this for pages that it fetches from a storage. Blocks are freed from the ends of paths upwards.
        When the snapshot at the end of a path is evicted, the blocks that only it used are freed too. Nodes with a
        running copy are skipped. The evictions are counted by the kind of memory that is needed.

        Args:
            num_tokens: tokens of blocks, or rows of snapshots, to free.
            component_type: FULL frees blocks, MAMBA frees rows of snapshots.
            slot: if not 0, evict only snapshots of less value than this one.
            path: nodes that must not be evicted.

        Returns:
            Tokens or rows that were freed.
        """
        for_snapshots = component_type is ComponentType.MAMBA
        pool, slots, registry = self._pool(component_type), self.component.slots, self.component.slots.registry
        before = pool.available_size()
        score = registry.eviction_score() if for_snapshots else registry.reuse_interval()
        value = registry.host_value(score)
        enough = 1 / score[slot] if slot else float("inf")
        # (value, snapshot): the snapshots on the host, and the new ends of paths.
        places = registry.on_host(value, enough)
        order = list(zip(value[places].tolist(), places))
        with self.component.evicting(metrics.SLOTS if for_snapshots else metrics.BLOCKS):
            for node in list(self._dangling):
                del self._dangling[node]
                self._free_dangling_blocks(node, path)
            while order and pool.available_size() - before < num_tokens:
                _, place = heapq.heappop(order)
                node = slots.nodes.get(place)
                if node is None or self._row(node) is None or node in path or not self._is_evictable(node):
                    continue
                if self._is_end(node):
                    above = node.parent
                    evict_from_host(self, node, self.components.values())
                    end = self._free_dangling_blocks(above, path)
                    if end is not None and value[place := slots.id_of(end)] < enough:
                        heapq.heappush(order, (float(value[place]), place))
                elif for_snapshots:
                    evict_from_host(self, node, [self.component])
        return int(pool.available_size() - before)

    def _free_dangling_blocks(self, node: UnifiedTreeNode, path: Sequence[UnifiedTreeNode]) -> UnifiedTreeNode | None:
        """Free the blocks after the last snapshot of a path on the host, from this node upwards. Return the node of
        that snapshot if it is now the end of the path."""
        while self._is_end(node):
            if self._row(node) is not None:
                return node
            if node in path or not self._is_evictable(node):
                self._dangling[node] = None
                return None
            above = node.parent
            evict_from_host(self, node, self.components.values())
            node = above
        return None

    def _row(self, node: UnifiedTreeNode) -> Any:
        return node.component_data[ComponentType.MAMBA].host_value

    def _is_end(self, node: UnifiedTreeNode) -> bool:
        """Return True if no child of the node is on the host, so that a path on the host ends here."""
        if node is self.root_node or not node.backuped:
            return False
        return not any(child.backuped for child in node.children.values())

    def _is_evictable(self, node: UnifiedTreeNode) -> bool:
        """Return True if no copy to or from the host uses the node."""
        return node.write_through_pending_id is None and not any(data.host_lock_ref for data in node.component_data)


def build_host_prefix_cache(ctx: Any, interval: int) -> HostPrefixCache:
    """Build the prefix cache of a server with --enable-hierarchical-cache.

    `interval`: the option `snapshot_interval`, in tokens.
    """
    ctx.params.component_registry_override = {
        ComponentType.FULL: BlockComponent,
        ComponentType.MAMBA: partial(HostSnapshotComponent, interval=interval),
    }
    cache = HostPrefixCache(ctx.params, ctx.tp_worker.model_runner.forward_stream)
    cache.init_hicache(ctx.server_args, ctx.params)
    ctx.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    return cache
