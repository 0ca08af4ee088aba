"""Prefix trees in this process, full of conversations, to time their evictions: this package's and SGLang's own."""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType, mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.memory.pools import StateReqToTokenPool
from dsv4_sglang.srt.plugin.prefix_cache_factory import build_prefix_cache
from dsv4_sglang.srt.prefix_cache import component
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.sglang.models import replaced

# Tokens of a conversation, and running requests, for each of which SGLang keeps a free page in every decode step.
CONVERSATION, REQUESTS = 8 * BLOCK, 256


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
    of_sglang = {
        "get_exec": lambda: settings,
        "mamba_cache_chunk_size": lambda: BLOCK,
        "mamba_checkpoint_grid": lambda page_size: BLOCK,
    }
    alone = SimpleNamespace(attn_tp_rank=0, attn_dp_rank=0)
    with replaced(mamba, **of_sglang), replaced(component, get_parallel=lambda: alone):
        yield


class FullTree:
    """A tree in a pool that is full of `conversations`, each of which is one leaf.

    Here every conversation has a snapshot. SGLang's tree has the blocks only and not its windows, so that it does less
    for an eviction than on a server.
    """

    def __init__(self, kind: str, conversations: int) -> None:
        """`kind`: one of `full_pool.TREES`."""
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
            self.cache = build_prefix_cache(context, 32 * BLOCK)
        else:
            params.tree_components = (ComponentType.FULL,)
            params.tree_core_backend = kind.removeprefix("sglang-")
            self.cache = UnifiedRadixCache(params)
        self._numbers = itertools.count()
        for _ in range(conversations):
            self.insert()

    def insert(self) -> None:
        """Insert a new conversation into free pages, as at the end of a request."""
        number = next(self._numbers)
        key = RadixKey(array("q", range(number << 20, (number << 20) + CONVERSATION)), None)
        value = self.allocator.alloc(CONVERSATION)
        assert value is not None, "the step before has evicted for 256 pages"
        snapshot = None
        if self.ours:
            slots = self.pool.mamba_ckpt_pool
            slots.registry.tick()
            snapshot = slots.node_value(slots.take())
        self.cache.insert(InsertParams(key=key, value=value, mamba_value=snapshot))

    def evictions(self, count: int) -> dict[str, float]:
        """Evict `count` times as before a decode step of 256 requests, each time after a new conversation. Return CPU
        times."""
        times = []
        for _ in range(count):
            self.insert()
            start = time.thread_time()
            self.allocator.evict_to_free_tokens(self.cache, REQUESTS * BLOCK)
            times.append(1e3 * (time.thread_time() - start))
            assert self.allocator.available_size() >= REQUESTS * BLOCK
        times.sort()
        p95 = times[int(0.95 * len(times))]
        return {"p50 ms": round(statistics.median(times), 4), "p95 ms": round(p95, 4), "max ms": round(times[-1], 4)}
