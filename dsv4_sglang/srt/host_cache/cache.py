"""The prefix cache of a server with a host cache."""

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
from dsv4_sglang.srt.integration import compat
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.component import BlockComponent, component_of
from dsv4_sglang.srt.prefix_cache.policy import MARGIN

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

SAVED_AT_ONCE = 256 << 20
"""Bytes after which a pass of the scheduler saves no more. Not seconds: all processes of a group must save the same."""


class HostPrefixCache(PrefixCache):
    """SGLang's tree over device and host. What it saves, and in which order, follows from snapshots, not from nodes:
    blocks are saved up to a snapshot, and snapshots as `HostSnapshotComponent.want` says, those worth most first, all
    of a pass in one copy.
    """

    _stays = False
    """What the host has survives a flush."""
    _looked_at: tuple[Any, ...] | None
    """What the device had when it was last looked at what leaves it next."""
    _dangling: dict[UnifiedTreeNode, None]
    """Where a path on the host may end behind no snapshot, since a copy was under way when it should have gone."""

    def __init__(self, params: Any, forward_stream: Any) -> None:
        """`forward_stream`: on which steps run."""
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
        # To SGLang: the host need not have what the device has. What is saved when is said here, with every policy.
        self.is_write_back = True
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
        wants log p of its tokens is matched only as far as these begin, and resumes from the snapshot before."""
        node, slots = self.tree_core.node_by_id(req.last_node), self.component.slots
        if self.component.policy == WRITE_BACK or node is self.root_node:
            return
        if req.return_logprob and req.logprob_start_len >= 0:
            before = slots.id_of(node)
            while before and slots.registry.length[before] > req.logprob_start_len:
                before = int(slots.registry.previous[before])
            if before:
                self.component.want(slots.nodes[before])
                self.save_now(slots.nodes[before])
        self.component.want(node)
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
        blocks, slots = self.token_to_kv_pool_allocator, self.component.slots
        self.settle(())
        for slot in reversed(slots.registry.note_eviction_candidates(blocks.size, slots.num_slots)):
            if slot in slots.nodes:
                self.save_now(slots.nodes[slot])
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
            self._looked_at, self._dangling = None, {}

    # To the host

    def check_hicache_events(self) -> None:
        self.cache_controller.free_given_up()
        with self._looking_again():
            super().check_hicache_events()
        self.cache_controller.load_what_is_left()
        self._save_leaving(SAVED_AT_ONCE - self._save_new())

    def _save_new(self) -> int:
        """What is new is saved at once where the host has room, and for a storage, which gets what the host gets, also
        where room must be made; the bytes of it."""
        slots, saved = self.component.slots, 0
        if not (new := slots.registry.to_copy()):
            return 0
        with self.cache_controller.one_launch():
            for slot in new:
                # Making room on the host may have changed what is held.
                if saved < SAVED_AT_ONCE and self._is_to_save(slot):
                    node = slots.nodes[slot]
                    if node.write_through_pending_id is not None:  # its blocks are on their way
                        continue
                    slots.registry.attempted[slot] = True
                    if self.enable_storage or self._has_room(node):
                        saved += self._save(node) or self._rejected()
        return saved

    def _save_leaving(self, left: int) -> None:
        """What the device gives up next is saved ahead, up to `left` bytes. That is looked for when snapshots have
        changed, or an eighth of the margin has been taken: it takes the scheduler a millisecond."""
        slots, blocks = self.component.slots, self.token_to_kv_pool_allocator
        registry, margins = slots.registry, (blocks.size // MARGIN, slots.num_slots // MARGIN)
        free = blocks.available_size(), slots.available_size()
        looked_at = registry, registry.changes, *(8 * room // max(margin, 8) for room, margin in zip(free, margins))
        if looked_at == self._looked_at:
            return
        tokens, rows = (margin - room for room, margin in zip(free, margins))
        leaving = registry.note_eviction_candidates(tokens, rows)
        with self.cache_controller.one_launch():
            for slot in leaving:
                if left > 0 and self._is_to_save(slot):
                    left -= self._save(slots.nodes[slot]) or 0
        self._looked_at = looked_at if left > 0 else None

    def save_now(self, node: UnifiedTreeNode) -> None:
        """Before the device gives up a node, or may: save its snapshot and the blocks up to it, if it is to be saved
        and there is room, and wait for it."""
        if not self._is_to_save(self.component.slots.id_of(node)):
            return
        if node.write_through_pending_id is not None:  # its blocks are on their way
            self.finish_saves()
        with self.cache_controller.one_launch():
            saved = self._save(node)
        if saved is None:
            self._rejected()
        else:
            self.finish_saves()

    def _rejected(self) -> int:
        self.component.host_counters.saves_rejected += 1
        return 0

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
        return 0 < slot <= registry.capacity and bool(registry.pending_write[slot]) and not registry.copied[slot]

    def _save(self, node: UnifiedTreeNode) -> int | None:
        """Begin to save a snapshot and the blocks up to it, where what is worth less makes room: the bytes of it, or
        None without room. Snapshots before it are saved by themselves.

        One that is superseded makes no room for blocks: they would be copies of what the device has, and keeps for the
        end of the line."""
        if node.write_through_pending_id is not None:  # its blocks are on their way
            return 0
        slots, path = self.component.slots, list(self._path(node))
        slot, tokens = slots.id_of(node), self._tokens_to_save(path)
        if tokens and slots.registry.superseded(slot) and not self._has_room(node):
            return None
        for kind, count in ((ComponentType.MAMBA, 1), (ComponentType.FULL, tokens)):
            if not self._make_room(kind, count, slot, path):
                return None
        saved = 0
        for part in [part for part in reversed(path) if part is node or not part.backuped]:
            if (size := self._copy(part, with_snapshot=part is node)) is None:
                self._dangling.update(dict.fromkeys(path))
                return None
            saved += size
        return saved

    def _path(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        """From the node up to the root's child."""
        while node is not self.root_node:
            yield node
            node = node.parent

    def _copy(self, node: UnifiedTreeNode, *, with_snapshot: bool) -> int | None:
        """Begin to copy what the host has not of a node: its bytes, or None without room."""
        blocks, transfers = self.tree_core.build_backup_spec(node.id)
        if not with_snapshot:
            transfers = {}
        only_snapshot = node.backuped
        rows = compat.start_backup(self, node.id, blocks[:0] if only_snapshot else blocks, transfers)
        if rows is None:
            return None
        if only_snapshot:
            self.component.commit_hicache_transfer(
                node, CacheTransferPhase.BACKUP_HOST, transfers[ComponentType.MAMBA], cache_actions=[]
            )
        else:
            self.tree_core.commit_backup(node.id, rows, transfers)
        compat.note_backup(self, node.id, self.inc_lock_ref(node.id).to_dec_params())
        snapshots = sum(len(transfer.host_indices) for of_one in transfers.values() for transfer in of_one)
        return len(rows) // BLOCK * self.full_kv_pool_host.row_bytes + snapshots * self.mamba_pool_host.row_bytes

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        """SGLang asks for a copy of nodes that were inserted: they are saved with their snapshots."""
        return super()._execute_and_commit_kv_backup(action, write_back) if write_back else 0

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        """Blocks behind the last snapshot of a path are worth nothing, and not saved, but for what hangs on them: the
        host may have got a path's end from a storage, and nothing before it."""
        core = self.tree_core
        node = core.node_by_id(node_id)
        self.save_now(node)
        core.is_write_back = bool(node.children) or any(data.host_lock_ref for data in node.component_data)
        try:
            return super()._evict_device_leaf(node_id, tracker)
        finally:
            core.is_write_back = True

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
        """SGLang wants room for what comes from a storage."""
        return self._give_up_on_host(component_type, num_tokens)

    def _pool(self, kind: ComponentType) -> Any:
        return self.mamba_pool_host if kind is ComponentType.MAMBA else self.full_kv_pool_host

    def _has_room(self, node: UnifiedTreeNode) -> bool:
        """Whether a snapshot and the blocks up to it fit without giving up anything."""
        tokens = self._tokens_to_save(self._path(node))
        return self.mamba_pool_host.available_size() > 0 and self.full_kv_pool_host.available_size() >= tokens

    def _tokens_to_save(self, path: Iterable[UnifiedTreeNode]) -> int:
        return sum(len(part.key) for part in path if not part.backuped)

    def _make_room(self, kind: ComponentType, count: int, slot: int, path: Sequence[UnifiedTreeNode]) -> bool:
        """Room for so many rows, or tokens of blocks, of the snapshot in `slot` and the path up to it."""
        missing = count - self._pool(kind).available_size()
        return missing <= 0 or self._give_up_on_host(kind, missing, slot, path) >= missing

    def _give_up_on_host(
        self, kind: ComponentType, count: int, slot: int = 0, path: Sequence[UnifiedTreeNode] = ()
    ) -> int:
        """Free so many rows of snapshots, or tokens of blocks, in the order of `SnapshotRegistry.on_host`, and with
        a `slot` nothing that is worth more than the snapshot there, nor of its `path`; how many are free now.

        Blocks go from the ends of paths up, and with the snapshot at the end of a path the blocks that are worth
        nothing then. Nothing goes that is copied or read.
        """
        pool, slots = self._pool(kind), self.component.slots
        registry, before = slots.registry, pool.available_size()
        for node in list(self._dangling):
            del self._dangling[node]
            self._clear(node, path)
        score = registry.eviction_score() if kind is ComponentType.MAMBA else registry.reuse_interval()
        value = registry.host_value(score)
        enough = 1 / score[slot] if slot else float("inf")
        order = iter(registry.on_host(value, enough))
        place = next(order, 0)
        ends: list[tuple[float, int]] = []  # of paths whose end has gone
        while pool.available_size() - before < count and (place or ends):
            if ends and (not place or ends[0][0] <= value[place]):
                _, first = heapq.heappop(ends)
            else:
                first, place = place, next(order, 0)
            node = slots.nodes.get(first)
            if node is None or self._row(node) is None or node in path or not self._may_go(node):
                continue
            if self._is_end(node):
                above = node.parent
                compat.evict_from_host(self, node, self.components.values())
                end = self._clear(above, path)
                if end is not None and value[place_of_end := slots.id_of(end)] < enough:
                    heapq.heappush(ends, (float(value[place_of_end]), place_of_end))
            elif kind is ComponentType.MAMBA:
                compat.evict_from_host(self, node, [self.component])
        return int(pool.available_size() - before)

    def _clear(self, node: UnifiedTreeNode, path: Sequence[UnifiedTreeNode]) -> UnifiedTreeNode | None:
        """Free what the host has up to this node behind the last snapshot that it has; the node of that, if it is the
        end now."""
        while self._is_end(node):
            if self._row(node) is not None:
                return node
            if node in path or not self._may_go(node):
                self._dangling[node] = None
                return None
            above = node.parent
            compat.evict_from_host(self, node, self.components.values())
            node = above
        return None

    def _row(self, node: UnifiedTreeNode) -> Any:
        return node.component_data[ComponentType.MAMBA].host_value

    def _is_end(self, node: UnifiedTreeNode) -> bool:
        """Of what the host has of a path."""
        if node is self.root_node or not node.backuped:
            return False
        return not any(child.backuped for child in node.children.values())

    def _may_go(self, node: UnifiedTreeNode) -> bool:
        """Nothing of it is copied to the host or read there."""
        return node.write_through_pending_id is None and not any(data.host_lock_ref for data in node.component_data)


def build_host_prefix_cache(ctx: Any, interval: int) -> HostPrefixCache:
    """The cache of a launch with --enable-hierarchical-cache."""
    ctx.params.component_registry_override = {
        ComponentType.FULL: BlockComponent,
        ComponentType.MAMBA: partial(HostSnapshotComponent, interval=interval),
    }
    cache = HostPrefixCache(ctx.params, ctx.tp_worker.model_runner.forward_stream)
    cache.init_hicache(ctx.server_args, ctx.params)
    ctx.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    return cache
