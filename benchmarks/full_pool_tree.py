"""Prefix trees in this process, to time evictions and lookups: this package's and SGLang's own."""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType, mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.memory.pools import StateReqToTokenPool
from dsv4_sglang.srt.plugin.prefix_cache_factory import build_prefix_cache
from dsv4_sglang.srt.prefix_cache import component
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.sglang import tree_core
from dsv4_sglang.srt.sglang.models import replaced

# Tokens of a conversation, and running requests, for each of which SGLang keeps a free page in every decode step.
CONVERSATION, REQUESTS = 8 * BLOCK, 256
# Tokens of a turn of a long conversation: a prompt and an answer, each of which ends with a snapshot.
TURN = 2, 4 * BLOCK


class Pool(StateReqToTokenPool):
    """The part of the request pool that a tree uses, without state tensors."""

    def __init__(self, snapshots: int) -> None:
        self.device = "cpu"
        self.enable_mamba_extra_buffer = self.enable_mamba_extra_buffer_lazy = False
        self.mamba_allocator = MambaSlotAllocator(1, "cpu")
        self.mamba_ckpt_pool = SnapshotSlots(snapshots, "cpu")


@contextmanager
def without_a_server(kind: str) -> Iterator[None]:
    """Context manager: replace the server settings that SGLang's component for snapshots reads and, for our tree, what
    a server's hooks replace. `kind`: one of `full_pool.TREES`."""
    settings = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))
    of_sglang = {
        "get_exec": lambda: settings,
        "mamba_cache_chunk_size": lambda: BLOCK,
        "mamba_checkpoint_grid": lambda page_size: BLOCK,
    }
    alone = SimpleNamespace(attn_tp_rank=0, attn_dp_rank=0)
    with ExitStack() as stack:
        stack.enter_context(replaced(mamba, **of_sglang))
        stack.enter_context(replaced(component, get_parallel=lambda: alone))
        if kind == "ours":
            for function in (tree_core.child_key_at, tree_core.match_at):
                stack.enter_context(patch.object(RadixKey, function.__name__, function))
        yield


class Tree:
    """A tree in a pool of `tokens` tokens. SGLang's has the blocks only and not its windows, so that it does less than
    on a server."""

    def __init__(self, kind: str, tokens: int, snapshots: int) -> None:
        """`kind`: one of `full_pool.TREES`."""
        self.pool = Pool(snapshots)
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

    def put(self, ids: array[int], since: int = 0) -> None:
        """Insert a path into free pages, as at the end of a request. The tree has its first `since` tokens."""
        value = self.allocator.alloc(len(ids) - since)
        assert value is not None, "too few free pages"
        snapshot = None
        if self.ours:
            slots = self.pool.mamba_ckpt_pool
            slots.registry.tick()
            snapshot = slots.node_value(slots.take())
        # The tree keeps its own pages of the beginning.
        value = torch.cat([torch.zeros(since, dtype=value.dtype), value])
        key = RadixKey(ids, None)
        self.cache.insert(InsertParams(key=key, value=value, mamba_value=snapshot, prev_prefix_len=since))


class LongConversation(Tree):
    """A tree with one conversation of `turns` turns, and room for `more` ends of turns."""

    def __init__(self, kind: str, turns: int, more: int) -> None:
        parts, tokens = TURN
        super().__init__(kind, (turns * parts + more) * tokens, turns * parts + more)
        self.ids = array("q", range((turns * parts + more) * tokens))
        self.end = 0
        for _ in range(turns * parts):
            self.extend()

    def extend(self) -> float:
        """Insert the next end of a turn. Return the CPU time in ms."""
        start, self.end = self.end, self.end + TURN[1]
        below = self.cache.tree_core.inserting_below(self.look_up(start)[1]) if self.ours else nullcontext()
        begin = time.thread_time()
        with below:
            self.put(self.ids[: self.end], start)
        return 1e3 * (time.thread_time() - begin)

    def look_up(self, end: int, request: object = None) -> tuple[float, int]:
        """Look up a prompt that goes on after `end` tokens. Return the CPU time in ms, and the node that it finds.
        `request`: the request, if it may have been looked up before."""
        prompt = self.ids[:end] + array("q", range(BLOCK))
        begin = time.thread_time()
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt, None), req=request))
        elapsed = 1e3 * (time.thread_time() - begin)
        assert found.device_prefix_len == end
        return elapsed, found.last_device_node


class FullTree(Tree):
    """A tree in a pool that is full of `conversations`, each of which is one leaf, here with a snapshot."""

    def __init__(self, kind: str, conversations: int) -> None:
        super().__init__(kind, conversations * CONVERSATION + REQUESTS * BLOCK, conversations + REQUESTS)
        self._numbers = itertools.count()
        for _ in range(conversations):
            self.insert()

    def insert(self) -> None:
        """Insert a new conversation."""
        number = next(self._numbers)
        self.put(array("q", range(number << 20, (number << 20) + CONVERSATION)))

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
        return spread(times)


def spread(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    p95 = times[int(0.95 * len(times))]
    return {"p50 ms": round(statistics.median(times), 4), "p95 ms": round(p95, 4), "max ms": round(times[-1], 4)}
