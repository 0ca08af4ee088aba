"""Snapshots on SGLang's unified radix tree: its Mamba component, with several snapshots a step in slots of their
own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, FullComponent, MambaComponent
from sglang.srt.runtime_context import get_parallel

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration import compat
from dsv4_sglang.srt.prefix_cache.counters import PrefixCounters
from dsv4_sglang.srt.prefix_cache.path_hash import path_hashes
from dsv4_sglang.srt.prefix_cache.placement import Due, due_in_prefill, is_kept
from dsv4_sglang.srt.prefix_cache.policy import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

PENDING = "dsv4_snapshots"
"""Attribute of a request: its snapshots that are not on the tree, as `Pending`, ascending. Absent or None: the
request has not begun."""
REACHED = "dsv4_reached"
"""Attribute of a request: the most tokens that it can have behind its last planned step, prefill or verify."""


class Pending(NamedTuple):
    """A snapshot that waits for its blocks to be inserted. `rolling`: decode took it; the next one replaces it."""

    length: int
    slot: int
    rolling: bool


class BlockComponent(FullComponent):
    """The blocks of the tree. SGLang frees what it evicts as token slots of any order, whose blocks it looks for, and
    waits for the device, once a node; a node has whole blocks."""

    def apply_component_action(self, action: Any) -> None:
        if not isinstance(action, FreeComponentDeviceSlot):
            super().apply_component_action(action)
            return
        for indices in action.indices:
            self.cache.token_to_kv_pool_allocator.free_segment(indices, start_pos=0)


class SnapshotComponent(MambaComponent):
    """What hangs on a node is a slot of the snapshot pool; live slots never get into the tree.

    A request's snapshots wait in its list until their blocks are inserted: at the end of a prefill chunk and at the
    end of the request. See docs/design/prefix_policy.md.
    """

    def __init__(self, cache: Any, params: Any, interval: int) -> None:
        """`interval`: snapshots at multiples of so many tokens stay."""
        super().__init__(cache, params)
        self.interval = interval
        self.slots: SnapshotSlots = params.req_to_token_pool.mamba_ckpt_pool
        # The processes of tensor parallelism do the same, and the first one tells; those of DP attention do not.
        parallel = get_parallel()
        self.rank, self.silent = parallel.attn_dp_rank, parallel.attn_tp_rank > 0
        self.counters = PrefixCounters(self.slots, params.enable_metrics, rank=self.rank, silent=self.silent)

    # Requests

    def begin(self, req: Req) -> None:
        """The first step of a request (again after a retraction): it resumes from the node it holds."""
        setattr(req, PENDING, [])
        self.slots.registry.tick()
        node = self.tree_core.node_by_id(req.last_node)
        if (slot := self._slot(node)) is not None:
            self.slots.registry.use(slot)
        behind = path_hashes(req.full_untruncated_fill_ids, req.extra_key)[compat.prefix_len(req) // BLOCK :]
        self.slots.registry.ghost_hit(behind[::-1].tolist())
        self.counters.resumed(compat.prefix_len(req), req.mamba_branching_seqlen or 0)

    def plan_prefill(self, req: Req, room: int) -> list[tuple[int, int]]:
        """(length, slot) of the snapshots that the next prefill step of the request takes, at most `room` of them."""
        if getattr(req, PENDING, None) is None:
            self.begin(req)
        begin, end = compat.prefix_len(req), compat.extend_end(req)
        setattr(req, REACHED, end)
        due = due_in_prefill(
            begin,
            end,
            prompt=len(req.full_untruncated_fill_ids),
            interval=self.interval,
            branch=req.mamba_branching_seqlen or 0,
        )
        # The end is worth most: needed ones first, the deepest first.
        due.sort(key=lambda d: (not d.needed, -d.length))
        taken = [(d.length, slot) for d in due[:room] if (slot := self._take(d))]
        self.counters.rejected += len(due) - len(taken)
        self.counters.timed_copies += len(taken)
        taken.sort()
        getattr(req, PENDING).extend(Pending(length, slot, rolling=False) for length, slot in taken)
        return taken

    def plan_decode(self, req: Req, length: int) -> int:
        """The slot for the rolling snapshot at `length`, 0 if there is none."""
        pending = getattr(req, PENDING, None)
        if pending is None:
            return 0
        slot = self._take(Due(length, True))
        if slot:
            pending.append(Pending(length, slot, rolling=True))
        return slot

    def settle(self, req: Req) -> None:
        """The last snapshot of a decoding request is written: rolling ones before it that are not to stay go.

        Those of the prefill may still be here, and stay: with overlap scheduling the first decode step is prepared
        before the prefill's result is processed, which inserts them.
        """
        pending = getattr(req, PENDING, None)
        if not pending:
            return
        old = [p for p in pending[:-1] if p.rolling and not is_kept(p.length, self.interval)]
        setattr(req, PENDING, [p for p in pending if p not in old])
        self.slots.give_back(p.slot for p in old)

    def plan_verify(self, req: Req, draft_tokens: int) -> int:
        """The slot for the rolling snapshot at the next multiple of 128 if a verify step of `draft_tokens` tokens may
        pass it, else 0. The device takes it when it passes; until that is known it waits in the list.

        The turn before may still run, so the step begins with up to `draft_tokens` more tokens than are known, and with
        no more than that turn can have reached. A slot is taken only while that length cannot have been passed: a
        snapshot that the device did not know of would never be written.
        """
        pending = getattr(req, PENDING, None)
        if pending is None:
            return 0
        known = compat.committed_len(req)
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
        slot = self.free_slot(needed=due.needed)
        self.counters.taken += slot > 0
        return slot

    def free_slot(self, *, needed: bool) -> int:
        """A slot, if need be that of a snapshot that is worth less; 0 if there is none."""
        if slot := self.slots.take():
            return slot
        victim = self.slots.registry.lowest_value(needed=needed, saves=self.interval)
        if not victim:
            return 0
        self._give_up(self.slots.nodes[victim])
        return self.slots.take()

    def _give_up(self, node: UnifiedTreeNode) -> None:
        """Evict a snapshot; the node's blocks stay until blocks are needed."""
        compat.evict_from_device(self, node)

    # What SGLang's tree asks of a component

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Note the snapshot to resume from. The request gets its live slot at admission, like any other, so that
        requests that wait hold nothing."""
        if params.cow_mamba and params.req is not None:
            slot = self._slot(self.tree_core.node_by_id(result.last_device_node))
            held = compat.held(params.req)
            held.mamba_cow_src_index = None if slot is None else self.slots.device_index(slot)
            held.mamba_needs_clear = False
        return result

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Blocks are inserted up to the request's last snapshot, which the insertion attaches."""
        pending = getattr(req, PENDING, None) or []
        reached = [p for p in pending if compat.held(req).cache_protected_len < p.length <= token_ids_len]
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
        """A snapshot of a path of `length` tokens hangs on the node."""
        self.slots.nodes[slot] = node
        self.slots.registry.add(slot, length, self._above(node), self._below(node))

    def _lock_as_node(self, node: UnifiedTreeNode, slot: int) -> None:
        """SGLang may count locks on a node before there is a snapshot on it: `release_component_lock` sees them."""
        for _ in range(node.component_data[self.component_type].lock_ref):
            self.slots.registry.lock(slot)

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """Attach the snapshots before the last to the path that was inserted; give back what did not get there."""
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
        compat.held(req).mamba_last_track_seqlen = None
        self.counters.publish()

    def _attach(self, inserted: InsertParams, length: int, slot: int) -> bool:
        """Hang a snapshot on the path that an insertion has just made."""
        assert inserted.key is not None and inserted.value is not None
        result = self.cache.insert(
            InsertParams(
                key=inserted.key[:length],
                value=inserted.value[:length],
                mamba_value=self.slots.node_value(slot),
                # The path is the tree's already: none of the blocks is a duplicate to be freed.
                prev_prefix_len=length,
                **compat.inserted_before(length),
            )
        )
        return not result.mamba_exist

    def _above(self, node: UnifiedTreeNode) -> int:
        """The snapshot before the node's, by its number in the registry; 0 if there is none."""
        at = node.parent
        while at is not None and at is not self.tree_core.root_node:
            if found := self.slots.id_of(at):
                return found
            at = at.parent
        return 0

    def _below(self, node: UnifiedTreeNode) -> list[int]:
        """The first snapshots behind the node."""
        found, stack = [], list(node.children.values())
        while stack:
            at = stack.pop()
            if there := self.slots.id_of(at):
                found.append(there)
            else:
                stack.extend(at.children.values())
        return found

    def evict_component(
        self, node: UnifiedTreeNode, device_frees: Any, host_frees: Any, *arguments: Any, **named: Any
    ) -> tuple[int, int]:
        target, slot = compat.evicted_layers(*arguments, **named), self._slot(node)
        if EvictLayer.DEVICE in target and slot is not None:
            self._leaves_device(node, slot, target)
            self.counters.evicted += 1
        return super().evict_component(node, device_frees, host_frees, *arguments, **named)

    def _leaves_device(self, node: UnifiedTreeNode, slot: int, target: EvictLayer) -> None:
        self.slots.registry.remove(slot, self._mark(node, slot))
        del self.slots.nodes[slot]

    def _mark(self, node: UnifiedTreeNode, place: int) -> int:
        """Of the path to a snapshot that is given up, 0 where a later one is on its line."""
        if self.slots.registry.following(place):
            return 0
        parts, at = [], node
        while at is not self.tree_core.root_node:
            parts.append(at.key.raw_token_ids()[: len(at.key)])
            at = at.parent
        return int(path_hashes(np.concatenate(parts[::-1]), node.key.extra_key)[-1])

    def _evict_device_next_node(self, *arguments: Any, **named: Any) -> None:
        """Nothing: SGLang calls this when it has fewer than three free live slots a new request, and no snapshot
        would give it one. Snapshots make room for snapshots only (`_take`)."""

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


class LeafOrder(EvictionStrategy):
    """Which leaf of the tree gives its blocks first: the smallest. Leaves without a snapshot are worth nothing."""

    def __init__(self, slots: SnapshotSlots) -> None:
        self.slots = slots
        self._read: tuple[SnapshotRegistry, int] | None = None
        """The registry and its count of changes that `_reuse_interval` is of: a flush begins a new registry at 0."""
        self._reuse_interval: list[float] = []

    def get_priority(self, node: Any) -> tuple[float, float]:
        snapshot = self.slots.id_of(node)
        if not snapshot:
            return (-float("inf"), node.last_access_time)
        registry = self.slots.registry
        if self._read != (registry, registry.changes):
            self._read, self._reuse_interval = (registry, registry.changes), registry.reuse_interval().tolist()
        return (-self._reuse_interval[snapshot], 0.0)


def component_of(tree_cache: Any) -> SnapshotComponent:
    """The component of a running server's tree."""
    component = tree_cache.components[ComponentType.MAMBA]
    assert isinstance(component, SnapshotComponent)
    return component
