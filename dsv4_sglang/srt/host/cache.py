"""The prefix cache of a server with a host tier."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, ComponentType

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt import compat
from dsv4_sglang.srt.host.component import SELECTIVE, WRITE_BACK, TieredComponent
from dsv4_sglang.srt.prefix.cache import PrefixCache
from dsv4_sglang.srt.prefix.component import BlockComponent, component_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

SAVED_AT_ONCE = 256 << 20
"""Bytes after which a pass of the scheduler saves no more. Not seconds: all processes of a group must save the same."""


class TieredCache(PrefixCache):
    """SGLang's tree over device and host. What it saves, and in which order, follows from checkpoints, not from nodes:
    blocks are saved up to a checkpoint, and checkpoints as `TieredComponent.want` says, those worth most first, all of
    a pass in one copy.
    """

    _stays = False
    """What the host has survives a flush."""

    def __init__(self, params: Any, forward_stream: Any) -> None:
        """`forward_stream`: on which steps run."""
        self.forward_stream = forward_stream
        super().__init__(params)

    @property
    def component(self) -> TieredComponent:
        component = component_of(self)
        assert isinstance(component, TieredComponent)
        return component

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        self.component.policy = server_args.hicache_write_policy
        self.component.host_counters.attach(self.full_kv_pool_host, self.mamba_pool_host)

    # Requests

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int, **arguments: Any) -> None:
        before = req.last_node
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle, **arguments)
        if is_insert:
            self._finished(req, before)

    def checkpoint(self, req: Req, *, up_to: int, **arguments: Any) -> None:
        """`cache_finished_req` of newer releases, and that of requests that go on."""
        before = req.last_node
        super().checkpoint(req, up_to=up_to, **arguments)
        if req.finished():
            self._finished(req, before)

    def _finished(self, req: Req, before: int) -> None:
        if req.last_node == self.root_node.id:  # nothing was inserted
            req.last_node = before
        if self.component.policy == SELECTIVE:
            self.component.want(self.tree_core.node_by_id(req.last_node))

    def retracted(self, req: Req) -> None:
        """What the request leaves is saved before it can be evicted: nothing is worth less to the device. One that
        wants log p of its tokens is matched only as far as these begin, and resumes from the checkpoint before."""
        node, slots = self.tree_core.node_by_id(req.last_node), self.component.slots
        if self.component.policy == WRITE_BACK or node is self.root_node:
            return
        if req.return_logprob and req.logprob_start_len >= 0:
            before = slots.id_of(node)
            while before and slots.registry.length[before] > req.logprob_start_len:
                before = int(slots.registry.previous[before])
            if before:
                self.save_now(slots.nodes[before])
        self.save_now(node)

    def forget_stored(self, name: str) -> None:
        """What the storage holds is of the old weights."""
        if self.enable_storage:
            self.clear_storage_backend()
            self.cache_controller.storage_backend.use_name(name)

    def settle(self, waiting: Iterable[Req]) -> None:
        for req in waiting:
            self.release_aborted_request(compat.name_of(req))
        while self.ongoing_write_through or self.ongoing_load_back or self.ongoing_backup:
            self.check_hicache_events()
            time.sleep(0.001)  # a thread of SGLang writes to the storage

    @contextmanager
    def leaving_device(self) -> Iterator[None]:
        """All that the device has and the host has room for is saved first, and the host keeps what it has: a flush
        within does nothing."""
        while self.component.slots.registry.to_copy():
            self._save_wanted()
            self.settle(())
        blocks = self.token_to_kv_pool_allocator
        self.evict(EvictParams(num_tokens=blocks.size))
        self.settle(())
        if blocks.available_size() < blocks.size:
            raise RuntimeError(f"{blocks.size - blocks.available_size()} tokens of the device are held by requests")
        self._stays = True
        try:
            yield
        finally:
            self._stays = False

    def reset(self) -> None:
        if not self._stays:
            super().reset()

    # To the host

    def check_hicache_events(self) -> None:
        with self._looking_again():
            super().check_hicache_events()
        self.cache_controller.load_what_is_left()
        self._save_wanted()

    def save_now(self, node: UnifiedTreeNode) -> None:
        """Save a node's checkpoint and the blocks up to it, if there is room, and wait for it."""
        self.component.want(node)
        slot = self.component.slots.id_of(node)
        if not self._is_to_save(slot):
            return
        with self.cache_controller.one_launch():
            self._save(node)
        self.finish_saves()

    def finish_saves(self) -> bool:
        """Wait for saves under way; whether there were any, whose blocks can be given up now."""
        if not self.ongoing_write_through:
            return False
        with self._looking_again():
            self.writing_check(write_back=True)
        return True

    @contextmanager
    def _looking_again(self) -> Iterator[None]:
        """Saves that are over within have left room: the scheduler is to look whether it is enough for a request."""
        saving = len(self.ongoing_write_through)
        yield
        if len(self.ongoing_write_through) < saving and self.running_batch is not None:
            self.running_batch.batch_is_full = False

    def _is_to_save(self, slot: int) -> bool:
        registry = self.component.slots.registry
        return 0 < slot <= registry.capacity and bool(registry.wanted[slot]) and not registry.copied[slot]

    def _save_wanted(self) -> None:
        slots = self.component.slots
        wanted = slots.registry.to_copy()
        if not wanted:
            return
        left = SAVED_AT_ONCE
        with self.cache_controller.one_launch():
            for slot in wanted:
                # Making room on the host may have changed what is held.
                if left > 0 and self._is_to_save(slot):
                    left -= self._save(slots.nodes[slot])

    def _save(self, node: UnifiedTreeNode) -> int:
        """Begin to save a checkpoint and the blocks up to it; the bytes of it. Checkpoints before it are saved by
        themselves. What cannot be saved is not wanted any more, until somebody uses it again."""
        if node.write_through_pending_id is not None:  # its blocks are on their way
            return 0
        path = [node]
        while (above := path[-1].parent) is not self.root_node and not above.backuped:
            path.append(above)
        # Locked, so that the room for one part is not that of another.
        lock = self.inc_lock_ref(node.id).to_dec_params()
        try:
            saved = 0
            for part in reversed(path):
                size = self._copy(part, with_checkpoint=part is node) if self._has_room_for_checkpoint(node) else None
                if size is None:
                    slots = self.component.slots
                    slots.registry.wanted[slots.id_of(node)] = False
                    self.component.host_counters.saves_refused += 1
                    break
                saved += size
            return saved
        finally:
            self.dec_lock_ref(node.id, lock)

    def _has_room_for_checkpoint(self, node: UnifiedTreeNode) -> bool:
        """Whether a row is free for the node's checkpoint, or holds one that is worth less."""
        if self.mamba_pool_host.available_size():
            return True
        slots = self.component.slots
        price = slots.registry.price()
        return price[slots.id_of(node)] < price[slots.registry.on_host()[0]]

    def _copy(self, node: UnifiedTreeNode, *, with_checkpoint: bool) -> int | None:
        """Begin to copy what the host has not of a node: its bytes, or None without room."""
        blocks, transfers = self.tree_core.build_backup_spec(node.id)
        if not with_checkpoint:
            transfers = {}
        only_checkpoint = node.backuped
        rows = compat.start_backup(self, node.id, blocks[:0] if only_checkpoint else blocks, transfers)
        if rows is None:
            return None
        if only_checkpoint:
            self.component.commit_hicache_transfer(
                node, CacheTransferPhase.BACKUP_HOST, transfers[ComponentType.MAMBA], cache_actions=[]
            )
        else:
            self.tree_core.commit_backup(node.id, rows, transfers)
        compat.note_backup(self, node.id, self.inc_lock_ref(node.id).to_dec_params())
        checkpoints = sum(len(transfer.host_indices) for of_one in transfers.values() for transfer in of_one)
        return len(rows) // BLOCK * self.full_kv_pool_host.row_bytes + checkpoints * self.mamba_pool_host.row_bytes

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        """SGLang asks for a copy of nodes that were inserted: they are saved with their checkpoints."""
        return super()._execute_and_commit_kv_backup(action, write_back) if write_back else 0

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        """Blocks behind the last checkpoint of a path are worth nothing, and not saved with write_back either."""
        node = self.tree_core.node_by_id(node_id)
        worthless = not node.children and not self.component.slots.id_of(node)
        core = self.tree_core
        saves, core.is_write_back = core.is_write_back, core.is_write_back and not worthless
        try:
            return super()._evict_device_leaf(node_id, tracker)
        finally:
            core.is_write_back = saves

    # Room on the device

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict_saved(super().evict, params)

    def evict_for_alloc(self, params: EvictParams, **arguments: Any) -> EvictResult:
        """`evict` of newer releases, for those who need the room."""
        return self._evict_saved(partial(super().evict_for_alloc, **arguments), params)

    def _evict_saved(self, evict: Callable[[EvictParams], EvictResult], params: EvictParams) -> EvictResult:
        """What is being saved is locked, and given up as soon as it is saved: the wait is a step and a copy at most,
        where SGLang would retract a request, which costs a prefill step at least."""
        blocks = self.token_to_kv_pool_allocator
        wanted = blocks.available_size() + params.num_tokens
        result = evict(params)
        if (missing := wanted - blocks.available_size()) > 0 and self.finish_saves():
            result.num_tokens_evicted += evict(EvictParams(num_tokens=missing)).num_tokens_evicted
        return result

    # Room on the host

    def evict_host(self, num_tokens: int, component_type: ComponentType = ComponentType.FULL) -> int:
        """What only the host has goes first, as SGLang does it; then copies of what the device has."""
        freed = super().evict_host(num_tokens, component_type)
        if component_type is ComponentType.FULL and freed < num_tokens:
            freed += self._evict_copies(num_tokens - freed)
        return freed

    def _evict_copies(self, num_tokens: int) -> int:
        """Free blocks of the host that the device has, too, and nobody holds: from the ends of paths up, and what the
        device will keep for longest first, since that of the others will soon be the only copy."""
        slots = self.component.slots
        patience = slots.registry.patience()

        def entry(node: UnifiedTreeNode) -> tuple[float, int, UnifiedTreeNode]:
            saved = node.component_data[ComponentType.MAMBA].host_value is not None
            return patience[slots.id_of(node)] if saved else 0.0, node.id, node

        queue = [entry(node) for node in self._nodes() if self._is_last_copy(node)]
        heapq.heapify(queue)
        freed = 0
        while queue and freed < num_tokens:
            _, _, node = heapq.heappop(queue)
            freed += compat.evict_from_host(self, node)
            if node.parent is not self.root_node and self._is_last_copy(node.parent):
                heapq.heappush(queue, entry(node.parent))
        return freed

    def _nodes(self) -> Iterator[UnifiedTreeNode]:
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _is_last_copy(self, node: UnifiedTreeNode) -> bool:
        """Whether the host's copy of a node that the device has is the last of its path, and free to go."""
        return (
            node.backuped
            and not node.evicted
            and node.write_through_pending_id is None
            and not any(data.lock_ref or data.host_lock_ref for data in node.component_data)
            and not any(child.backuped for child in node.children.values())
        )


def build_tiered_cache(ctx: Any, interval: int) -> TieredCache:
    """The cache of a launch with --enable-hierarchical-cache."""
    ctx.params.component_registry_override = {
        ComponentType.FULL: BlockComponent,
        ComponentType.MAMBA: partial(TieredComponent, interval=interval),
    }
    cache = TieredCache(ctx.params, ctx.tp_worker.model_runner.forward_stream)
    cache.init_hicache(ctx.server_args, ctx.params)
    ctx.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    return cache
