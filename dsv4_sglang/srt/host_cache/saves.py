"""Saves to the host: which snapshots are copied, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, ComponentType

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.host_copy import CopyEvent
from dsv4_sglang.srt.prefix_cache.policy import CANDIDATES
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.sglang.host_transfers import note_backup, start_backup
from dsv4_sglang.srt.sglang.tree import path_to_root

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from dsv4_sglang.srt.host_cache.cache import HostPrefixCache

# Byte limit of the saves of one scheduler iteration. It is not a time limit, because all ranks must save the same.
MAX_SAVE_BYTES = 256 << 20

# 1/MARGIN of the device is kept free or evictable without a copy (the host has one already), so that an allocation
# rarely waits for a save. With a larger share the host would hold more duplicates.
MARGIN = 32

# Number of snapshots that are saved together when one must be for its slot. The wait for a copy includes the running
# step, and requests that arrive together need a slot each.
SLOTS_TOGETHER = 8


class SavePlan(NamedTuple):
    """The save of a snapshot and the blocks up to it.

    Earlier snapshots of the path are saved separately.

    Attributes:
        node: node of the snapshot.
        slot: slot of the snapshot on the device.
        path: nodes from this one up to the child of the root.
        parts: nodes of the path of which the host lacks something, the first one after the root first.
        tokens: tokens of the blocks that the host lacks.
    """

    node: UnifiedTreeNode
    slot: int
    path: list[UnifiedTreeNode]
    parts: list[UnifiedTreeNode]
    tokens: int


class SearchKey(NamedTuple):
    """Inputs of a search for the snapshots that the device evicts next. A search with equal inputs is skipped.

    Attributes:
        registry: registry of the snapshots.
        changes: its number of changes.
        free_blocks: free tokens in eighths of the margin.
        free_slots: free snapshot slots in eighths of the margin.
    """

    registry: SnapshotRegistry
    changes: int
    free_blocks: int
    free_slots: int


class HostSaves:
    """Saves of a prefix cache to its host memory.

    Saves are planned by snapshot, not by node: the host gets the snapshots that `HostSnapshotComponent.mark_for_saving`
    marks, most valuable first, each with all blocks up to it. A save has three steps: `plan`, room for what the host
    lacks, and the copy. All saves of a scheduler iteration are one batch of copies.
    """

    _last_search: SearchKey | None

    def __init__(self, cache: HostPrefixCache) -> None:
        self.cache = cache
        self.reset()

    def reset(self) -> None:
        """Forget the last search, after the tree was emptied."""
        self._last_search = None

    # Which snapshots, and when

    def save_due(self) -> int:
        """Save the snapshots that are due at once, and return the number of bytes.

        Without a storage, a snapshot is saved early only if the host has free memory for it. With a storage, which
        stores what the host has, the host evicts entries to make room.
        """
        slots, saved = self.cache.component.slots, 0
        if not (due := slots.registry.policy.to_save()):
            return 0
        with self.cache.cache_controller.batch_backups():
            for slot in due:
                # Evicting on the host to make room may have removed the snapshot.
                if saved < MAX_SAVE_BYTES and self.is_unsaved(slot):
                    node = slots.nodes[slot]
                    if node.write_through_pending_id is not None:  # a copy of its blocks is running
                        continue
                    slots.registry.note_copy(CopyEvent.DEFER, slot)
                    plan = self.plan(node)
                    if self.cache.enable_storage or self.fits(plan):
                        saved += self.execute(plan) or self._count_rejected()
        return saved

    def save_next_evicted(self, left: int) -> None:
        """Save the snapshots that the device evicts next, up to `left` bytes.

        The search for them takes a millisecond of scheduler time. It runs only if snapshots have changed or an eighth
        of the margin has been allocated.
        """
        slots, blocks = self.cache.component.slots, self.cache.token_to_kv_pool_allocator
        margins = blocks.size // MARGIN, slots.num_slots // MARGIN
        free = blocks.available_size(), slots.available_size()
        eighths = (8 * room // max(margin, 8) for room, margin in zip(free, margins))
        search = SearchKey(slots.registry, slots.registry.changes, *eighths)
        if search == self._last_search:
            return
        tokens, rows = (margin - room for room, margin in zip(free, margins))
        leaving = self._search_next_evicted(tokens, rows, CANDIDATES)
        with self.cache.cache_controller.batch_backups():
            for slot in leaving:
                if left > 0 and self.is_unsaved(slot):
                    left -= self._save(slots.nodes[slot]) or 0
        self._last_search = search if left > 0 else None

    def save_evicted(self, tokens: int) -> None:
        """Save the snapshots that an eviction of this many tokens removes. Those of the margin are saved already."""
        if tokens > self.cache.token_to_kv_pool_allocator.size // MARGIN:
            self._save_leaving(tokens, 0, CANDIDATES)

    def save_for_slot(self, node: UnifiedTreeNode) -> None:
        """Save a node's snapshot, whose slot is evicted, and the next ones with it if it is unsaved."""
        if self.is_unsaved(self.cache.component.slots.id_of(node)):
            self._save_leaving(0, SLOTS_TOGETHER, SLOTS_TOGETHER)
        self.save_now(node)

    def save_all(self) -> None:
        """Save all snapshots of the device, as far as the host has room."""
        slots = self.cache.component.slots
        self._save_leaving(self.cache.token_to_kv_pool_allocator.size, slots.num_slots, slots.num_slots)

    def _save_leaving(self, tokens: int, rows: int, most: int) -> None:
        """Save the snapshots that the device evicts next in one batch of copies, and wait for it.

        `save_now` would wait for each, and the host would evict copies of the next ones as duplicates. The most
        valuable come first. So do those above others on a path, whose blocks are not being copied yet then.
        """
        leaving, nodes = self._search_next_evicted(tokens, rows, most), self.cache.component.slots.nodes
        saved = False
        with self.cache.cache_controller.batch_backups():
            for slot in reversed(leaving):
                if self.is_unsaved(slot):
                    if self._save(nodes[slot]) is None:
                        break  # less valuable ones hardly find room; `save_now` asks for each that is evicted
                    saved = True
        if saved:
            self.cache.finish_saves()

    def _search_next_evicted(self, tokens: int, rows: int, most: int) -> list[int]:
        """Search and mark the snapshots that the device evicts next (`EvictionPolicy.next_evicted`). Return those that
        no request and no copy holds."""
        registry = self.cache.component.slots.registry
        leaving = registry.policy.next_evicted(tokens, rows, most)
        registry.policy.mark_next_evicted(leaving)
        return [slot for slot in leaving if not registry.locks[slot]]

    def save_now(self, node: UnifiedTreeNode) -> None:
        """Save a node's snapshot and the blocks up to it, and wait for the copy, before the device may evict the node.

        Does nothing if the snapshot need not be saved or there is no room.
        """
        if not self.is_unsaved(self.cache.component.slots.id_of(node)):
            return
        if node.write_through_pending_id is not None:  # a copy of its blocks is running
            self.cache.finish_saves()
        with self.cache.cache_controller.batch_backups():
            saved = self._save(node)
        if saved is None:
            self._count_rejected()
        else:
            self.cache.finish_saves()

    def is_unsaved(self, number: int) -> bool:
        """Return True if the number is a device slot whose snapshot must be saved before its eviction."""
        registry = self.cache.component.slots.registry
        return 0 < number <= registry.capacity and registry.copies.is_unsaved(number)

    def _count_rejected(self) -> int:
        self.cache.component.metrics.add("host_saves_skipped")
        return 0

    # Steps of a save

    def _save(self, node: UnifiedTreeNode) -> int | None:
        """Plan and execute a save. Return the bytes to copy, 0 if the node's blocks are being copied, or None without
        room."""
        return 0 if node.write_through_pending_id is not None else self.execute(self.plan(node))

    def plan(self, node: UnifiedTreeNode) -> SavePlan:
        """Plan the save of a node's snapshot. Changes nothing."""
        path = list(path_to_root(node))
        lacking = [part for part in path if not part.backuped]
        parts = [part for part in reversed(path) if part is node or not part.backuped]
        return SavePlan(
            node, self.cache.component.slots.id_of(node), path, parts, sum(len(part.key) for part in lacking)
        )

    def fits(self, plan: SavePlan) -> bool:
        """Return True if the host has room for the save without an eviction."""
        cache = self.cache
        return cache.mamba_pool_host.available_size() > 0 and cache.full_kv_pool_host.available_size() >= plan.tokens

    def execute(self, plan: SavePlan) -> int | None:
        """Start the copies of a save. Less valuable entries are evicted to make room.

        Returns:
            Bytes to copy, or None if there is no room.
        """
        if not self._make_room(plan):
            return None
        saved = 0
        for part in plan.parts:
            if (size := self._copy(part, with_snapshot=part is plan.node)) is None:
                self.cache.evictions.dangling.update(dict.fromkeys(plan.path))
                return None
            saved += size
        return saved

    def _make_room(self, plan: SavePlan) -> bool:
        """Evict less valuable entries until the save fits. Return False if that is not possible.

        A superseded snapshot evicts nothing for its blocks: they would duplicate blocks that the device keeps for the
        end of the branch.
        """
        if plan.tokens and self.cache.component.slots.registry.superseded(plan.slot) and not self.fits(plan):
            return False
        evictions = self.cache.evictions
        for kind, count in ((ComponentType.MAMBA, 1), (ComponentType.FULL, plan.tokens)):
            missing = count - evictions.pool(kind).available_size()
            if missing > 0 and evictions.free(missing, kind, below=plan.slot, keep=plan.path) < missing:
                return False
        return True

    def _copy(self, node: UnifiedTreeNode, *, with_snapshot: bool) -> int | None:
        """Start to copy the parts of a node that the host lacks. Return their bytes, or None if there is no room."""
        cache = self.cache
        blocks, transfers = cache.tree_core.build_backup_spec(node.id)
        if not with_snapshot:
            transfers = {}
        only_snapshot = node.backuped
        rows = start_backup(cache, node.id, blocks[:0] if only_snapshot else blocks, transfers)
        if rows is None:
            return None
        if only_snapshot:
            cache.component.commit_hicache_transfer(
                node, CacheTransferPhase.BACKUP_HOST, transfers[ComponentType.MAMBA], cache_actions=[]
            )
        else:
            cache.tree_core.commit_backup(node.id, rows, transfers)
        note_backup(cache, node.id, cache.inc_lock_ref(node.id).to_dec_params())
        snapshots = sum(len(transfer.host_indices) for of_one in transfers.values() for transfer in of_one)
        return len(rows) // BLOCK * cache.full_kv_pool_host.row_bytes + snapshots * cache.mamba_pool_host.row_bytes
