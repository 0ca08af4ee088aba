"""Prefix cache of a server: SGLang's unified tree with less frequent checks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from dsv4_sglang.cache.contracts import PrefixCacheContract
from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.prefix_cache.events import PrefixEvents
from dsv4_sglang.srt.prefix_cache.hints import apply_hints
from dsv4_sglang.srt.prefix_cache.leaves import EvictableLeaves
from dsv4_sglang.srt.prefix_cache.notes import RequestNote
from dsv4_sglang.srt.prefix_cache.pins import Pins
from dsv4_sglang.srt.sglang.tree import nodes_of
from dsv4_sglang.srt.sglang.tree_core import NAME

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

# Minimum pause between two checks of the tree, as a multiple of the duration of the last check.
CHECK_PAUSE = 100

# Most nodes of a tree that is checked. A check takes 10 us a node, so at most 20 ms.
CHECKED_NODES = 2048


class PrefixCache(UnifiedRadixCache, PrefixCacheContract):
    """SGLang's tree with bounded and less frequent consistency checks.

    The scheduler runs a check in every idle iteration. A check visits all nodes, and a request that arrives meanwhile
    waits for it on every TP rank. Here checks take 1/CHECK_PAUSE of an idle server's time, and a tree of more than
    CHECKED_NODES nodes is not checked. The integrity audit checks trees of any size.
    """

    # The scheduler's running batch. It is marked as full (`batch_is_full`) while there is no room for another request.
    running_batch: Any = None
    _next_check = 0.0
    # Time in seconds, the same in all processes of a rank (`at_time`).
    now = 0.0
    # With --kv-events-config, in the process that publishes them.
    events: PrefixEvents | None = None

    def __init__(self, params: Any) -> None:
        self.pins = Pins(self)
        params.tree_core_backend = NAME
        super().__init__(params)
        component_of(self).metrics.pins = self.pins

    def at_time(self, now: float) -> None:
        """End the pins and hints whose time is over.

        Args:
            now: time in seconds. It comes from a message to all processes of a rank, because a clock of each would let
                them evict different entries.
        """
        self.now = max(self.now, now)
        self.pins.expire(self.now)
        component_of(self).slots.registry.end_hints(self.now)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Look up a prompt. A request that waits is looked up several times, and each lookup begins where the last one
        ended."""
        if params.req is None:
            return super().match_prefix(params)
        note = RequestNote.of(params.req)
        with self.tree_core.matching_from(note.matched):
            result = super().match_prefix(params)
        note.matched = result.last_visited_node_id
        return result

    def checkpoint(self, req: Req, *, up_to: int, **arguments: Any) -> None:
        before = req.last_node
        with self.tree_core.inserting_below(before):
            super().checkpoint(req, up_to=up_to, **arguments)
        if req.finished():
            if req.last_node == self.root_node.id:  # nothing was inserted
                req.last_node = before
            self.finished(req, self.tree_core.node_by_id(req.last_node))

    def finished(self, req: Req, node: UnifiedTreeNode) -> None:
        """Apply the hints of a finished request. `node`: the node of its last snapshot, or the root."""
        apply_hints(self, req, node)

    def sanity_check(self) -> None:
        begin = time.monotonic()
        if begin < self._next_check or nodes_of(self.tree_core) > CHECKED_NODES:
            return
        super().sanity_check()
        end = time.monotonic()
        self._next_check = end + CHECK_PAUSE * (end - begin)

    def retracted(self, req: Req) -> None:
        """Do nothing: without a host cache, the prefix stays until its eviction."""

    def reset(self) -> None:
        super().reset()
        self.pins.forget()
        slots = self.req_to_token_pool.mamba_ckpt_pool
        slots.forget()
        self.tree_core.evictable_device_leaves = EvictableLeaves(slots)

    def wait_for_copies(self, waiting: Iterable[Req], most_checks: int | None = None) -> None:
        """Do nothing: there are no copies."""

    def keep_host_cache(self) -> AbstractContextManager[None]:
        return nullcontext()

    def invalidate_storage(self, name: str) -> None:
        """Do nothing: there is no storage."""
