"""Prefix trees in this process, full of conversations, to time their evictions: this package's and SGLang's own."""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType, mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration import compat
from dsv4_sglang.srt.integration.prefix_cache_factory import build_prefix_cache
from dsv4_sglang.srt.memory.pools import StateReqToTokenPool
from dsv4_sglang.srt.prefix_cache import component
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

# Tokens of a conversation, and running requests, for each of which SGLang keeps a free page in every decode step.
CONVERSATION, REQUESTS = 8 * BLOCK, 256
TREES = ("ours", "sglang python", "sglang rust")


class Pool(StateReqToTokenPool):
    """The part of the request pool that a tree uses, without state tensors."""

    def __init__(self, snapshots: int) -> None:
        self.device = "cpu"
        self.enable_mamba_extra_buffer = self.enable_mamba_extra_buffer_lazy = False
        self.mamba_allocator = MambaSlotAllocator(1, "cpu")
        self.mamba_ckpt_pool = SnapshotSlots(snapshots, "cpu")


@contextmanager
def without_a_server() -> Iterator[None]:
    """Context manager: replace the server settings that SGLang's component for snapshots reads."""
    settings = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))
    replaced = {
        "get_exec": lambda: settings,
        "mamba_cache_chunk_size": lambda: BLOCK,
        "mamba_checkpoint_grid": lambda page_size: BLOCK,
    }
    alone = SimpleNamespace(attn_tp_rank=0, attn_dp_rank=0)
    with compat.replaced(mamba, **replaced), compat.replaced(component, get_parallel=lambda: alone):
        yield


class FullTree:
    """A tree whose pool is full of `conversations`, each of which is a leaf.

    SGLang's tree has blocks only, and none of the state of a window, so that its evictions do less than on a server.
    """

    def __init__(self, kind: str, conversations: int) -> None:
        tokens = conversations * CONVERSATION + REQUESTS * BLOCK
        self.pool = Pool(conversations + REQUESTS)
        self.allocator = PagedTokenToKVPoolAllocator(tokens, BLOCK, torch.uint8, "cpu", None, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=BLOCK,
            enable_mamba_extra_buffer=True,
        )
        self.ours = kind == "ours"
        if self.ours:
            context = SimpleNamespace(disable_radix_cache=False, enable_hierarchical_cache=False, params=params)
            self.cache = build_prefix_cache(context, 4096)
        else:
            params.tree_components = (ComponentType.FULL,)
            params.tree_core_backend = kind.split()[1]
            self.cache = UnifiedRadixCache(params)
        self.number = itertools.count()
        for _ in range(conversations):
            self.insert()

    def insert(self) -> None:
        """Insert a conversation. It needs free pages, as at the end of a request."""
        number = next(self.number)
        key = RadixKey(array("q", range(number << 20, (number << 20) + CONVERSATION)), None)
        value = self.allocator.alloc(CONVERSATION)
        assert value is not None
        if not self.ours:
            self.cache.insert(InsertParams(key=key, value=value))
            return
        slots = self.pool.mamba_ckpt_pool
        slots.registry.tick()
        self.cache.insert(InsertParams(key=key, value=value, mamba_value=slots.node_value(slots.take())))

    def evictions(self, steps: int) -> dict[str, Any]:
        """Run decode steps that find the pool full. Return the times of those that evict.

        Two of the 256 requests need a page in a mean step. A conversation that ends every fourth step takes the pages.
        """
        times, freed = [], 0
        for _ in range(steps):
            free, start = self.allocator.available_size(), time.perf_counter()
            self.allocator.evict_to_free_tokens(self.cache, REQUESTS * BLOCK)
            seconds = time.perf_counter() - start
            if got := self.allocator.available_size() - free:
                times.append(1e3 * seconds)
                freed += got
            self.insert()
        times.sort()
        return {
            "evictions": len(times),
            "p50_ms": round(statistics.median(times), 4),
            "p95_ms": round(times[int(0.95 * len(times))], 4),
            "max_ms": round(times[-1], 4),
            "us_a_page": round(1e3 * sum(times) / (freed / BLOCK), 3),
            "pages": round(freed / BLOCK / len(times), 1),
        }
