"""Blocks on SGLang's unified radix tree: a component that frees whole blocks and keeps the leaves in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import ComponentType, FullComponent

from dsv4_sglang.srt.prefix_cache.events import note_change
from dsv4_sglang.srt.prefix_cache.leaves import EvictableLeaves

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


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
