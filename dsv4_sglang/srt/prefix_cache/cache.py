"""The prefix cache of a server: SGLang's unified tree with our component and our order of leaves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import default_radix_cache_factory
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from dsv4_sglang.srt.prefix_cache.component import BlockComponent, LeafOrder, SnapshotComponent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

CHECK_PAUSE = 100
"""Times that a check of the tree took, before the next one."""


class PrefixCache(UnifiedRadixCache):
    """SGLang's tree, which checks itself less often.

    The scheduler asks for a check in every round in which it has nothing to do. A check visits all nodes, 20 ms for 800
    of them, and a request that comes meanwhile waits for it in each process of tensor parallelism. Here checks take one
    part in CHECK_PAUSE of an idle server's time.
    """

    running_batch: Any = None
    """The scheduler's, which is marked as full (`batch_is_full`) while there is no room for another request."""
    _next_check = 0.0

    def sanity_check(self) -> None:
        begin = time.monotonic()
        if begin < self._next_check:
            return
        super().sanity_check()
        end = time.monotonic()
        self._next_check = end + CHECK_PAUSE * (end - begin)

    def retracted(self, req: Req) -> None:
        """The request was retracted for want of memory, and what it had is in the tree."""

    def reset(self) -> None:
        super().reset()
        self.req_to_token_pool.mamba_ckpt_pool.forget()

    def settle(self, waiting: Iterable[Req]) -> None:
        """Wait for copies under way, and give up those that requests of the queue wait for."""

    def leaving_device(self) -> AbstractContextManager[None]:
        """Within, the memory of the device is given back: SGLang flushes the cache."""
        return nullcontext()

    def forget_stored(self, name: str) -> None:
        """The model has new weights, and the tree is empty. `name`: of these weights in a storage, the same in all
        processes; a server that is started later must not find what they have computed."""


def build_prefix_cache(ctx: Any, interval: int) -> Any:
    """Factory for `register_radix_cache_backend`; `interval` is the option `snapshot_interval`."""
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    ctx.params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
    slots = ctx.params.req_to_token_pool.mamba_ckpt_pool
    if ctx.enable_hierarchical_cache:
        from dsv4_sglang.srt.host_cache.cache import build_host_prefix_cache

        cache: PrefixCache = build_host_prefix_cache(ctx, interval)
    else:
        ctx.params.component_registry_override = {
            ComponentType.FULL: BlockComponent,
            ComponentType.MAMBA: partial(SnapshotComponent, interval=interval),
        }
        cache = PrefixCache(ctx.params)
    cache.tree_core.eviction_strategy = LeafOrder(slots)
    return cache
