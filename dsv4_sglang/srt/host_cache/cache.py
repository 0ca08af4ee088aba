"""Prefix cache of a server with a host cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from dsv4_sglang.cache.contracts import HostCacheContract
from dsv4_sglang.srt.host_cache.component import SELECTIVE, WRITE_BACK, HostSnapshotComponent
from dsv4_sglang.srt.host_cache.evictions import HostEvictions
from dsv4_sglang.srt.host_cache.saves import MAX_SAVE_BYTES, HostSaves
from dsv4_sglang.srt.prefix_cache import metrics
from dsv4_sglang.srt.prefix_cache.block_component import BlockComponent
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.sglang.tree import saving_on_eviction

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class HostPrefixCache(PrefixCache, HostCacheContract):
    """SGLang's tree over device and host memory. `HostSaves` decides what is saved, `HostEvictions` what the host
    evicts."""

    # True while the host cache must survive a flush.
    _keep_host = False

    def __init__(self, params: Any, forward_stream: Any) -> None:
        """`forward_stream`: the CUDA stream of the steps."""
        self.forward_stream = forward_stream
        self.saves, self.evictions = HostSaves(self), HostEvictions(self)
        super().__init__(params)

    @property
    def component(self) -> HostSnapshotComponent:
        component = component_of(self)
        assert isinstance(component, HostSnapshotComponent)
        return component

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        self.component.slots.host_tokens = self.full_kv_pool_host.size
        self.component.slots.forget()
        self.component.policy = server_args.hicache_write_policy
        # With this flag SGLang does not expect a host copy of every node. This class decides what is saved and when,
        # for every write policy.
        self.is_write_back = True
        controller = self.cache_controller
        self.component.metrics.attach(self.full_kv_pool_host, self.mamba_pool_host, controller.saves, controller.loads)

    # Requests

    def finished(self, req: Req, node: UnifiedTreeNode) -> None:
        super().finished(req, node)
        if self.component.policy == SELECTIVE:
            self.component.mark_for_saving(node)

    def retracted(self, req: Req) -> None:
        """Save the prefix of a retracted request before it can be evicted.

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
                self.saves.save_now(slots.nodes[before])
        self.component.mark_for_saving(node)
        self.saves.save_now(node)

    def invalidate_storage(self, name: str) -> None:
        if self.enable_storage:
            self.cache_controller.storage_backend.use_name(name)

    def wait_for_copies(self, waiting: Iterable[Req], most_checks: int | None = None) -> None:
        for req in waiting:
            self.release_aborted_request(req.cache_request_handle)
        checks = itertools.count() if most_checks is None else range(most_checks)
        for _ in checks:
            if not (self.ongoing_write_through or self.ongoing_load_back or self.ongoing_backup):
                break
            self.check_hicache_events()
            time.sleep(0.001)  # SGLang writes to the storage in a thread

    @contextmanager
    def keep_host_cache(self) -> Iterator[None]:
        blocks = self.token_to_kv_pool_allocator
        self.wait_for_copies(())
        self.pins.release_all()
        self.saves.save_all()
        with self.component.metrics.evicting(metrics.SLEEP):
            self.evict(EvictParams(num_tokens=blocks.size))
        self.wait_for_copies(())
        if blocks.available_size() < blocks.size:
            raise RuntimeError(f"{blocks.size - blocks.available_size()} tokens of the device are held by requests")
        self._keep_host = True
        try:
            yield
        finally:
            self._keep_host = False

    def reset(self) -> None:
        if self._keep_host:
            return
        # SGLang's flush waits for copies, but not for threads that still read pages of cancelled requests. It stops
        # these threads. With shared rows, each of them ends with a collective operation of all processes. If one
        # process stopped its thread before that operation, the threads of the others would wait for it forever.
        controller = self.cache_controller
        while controller is not None and controller.sharing.size > 1 and controller.cancelled_fetches:
            super().check_hicache_events()
            time.sleep(0.001)
        super().reset()
        self.saves.reset()
        self.evictions.reset()

    # Saves to the host

    def check_hicache_events(self) -> None:
        with self._recheck_queue_after_saves():
            super().check_hicache_events()
        self.cache_controller.start_unclaimed_loads()
        self.saves.save_next_evicted(MAX_SAVE_BYTES - self.saves.save_due())

    def finish_saves(self) -> bool:
        if not self.ongoing_write_through:
            return False
        with self._recheck_queue_after_saves():
            self.writing_check(write_back=True)
        return True

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """Finish the saves that have ended, or, with `write_back`, all: SGLang evicts a node when it was saved.

        SGLang waits for the copies of this process. A row of shared memory has parts that other processes copy.
        """
        if write_back and self.ongoing_write_through:
            self.cache_controller.finish_saves()
        super().writing_check(write_back, finish_count)

    @contextmanager
    def _recheck_queue_after_saves(self) -> Iterator[None]:
        """Context manager: if saves finish inside, let the scheduler check its queue again, since they free memory."""
        saving = len(self.ongoing_write_through)
        yield
        if len(self.ongoing_write_through) < saving:
            self.component.metrics.publish()
            if self.running_batch is not None:
                self.running_batch.batch_is_full = False

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        """Skip the copies that SGLang requests for inserted nodes. Nodes are saved together with their snapshots.

        What the device evicts is saved without a snapshot, for the nodes below it. The host may evict these to make
        room for it, or their fetch brings nothing: then the path ends at the saved node.
        """
        if not write_back:
            return 0
        written = super()._execute_and_commit_kv_backup(action, write_back)
        if written:
            self.evictions.dangling.update(dict.fromkeys(map(self.tree_core.node_by_id, action.node_ids)))
        return written

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        """Evict a leaf of the device.

        Blocks after the last snapshot of a path have no value and are not saved. The exception is a node that others
        depend on: the host may have loaded the end of a path from a storage without the nodes above it, or is loading
        it.
        """
        core = self.tree_core
        node = core.node_by_id(node_id)
        self.saves.save_now(node)
        fetching = any(data.host_lock_ref for data in node.component_data)
        with saving_on_eviction(core, fetching or bool(node.children)):
            return super()._evict_device_leaf(node_id, tracker)

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
        self.saves.save_evicted(params.num_tokens)
        result = evict(params)
        if (missing := wanted - blocks.available_size()) > 0 and self.finish_saves():
            result.num_tokens_evicted += evict(EvictParams(num_tokens=missing)).num_tokens_evicted
        return result

    # Evictions from the host

    def evict_host(self, num_tokens: int, component_type: ComponentType = ComponentType.FULL) -> int:
        return self.evictions.free(num_tokens, component_type)


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
