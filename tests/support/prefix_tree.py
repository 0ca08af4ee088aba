"""A model server on SGLang's unified tree, allocators and request pool, without a server process.

Plain dicts store the contents of blocks and snapshots by the ids that the tree assigns. The model therefore detects a
block or slot that one owner overwrites while another still uses it.

Requests go through the calls that SGLang's scheduler makes, in the same order. Lengths count tokens here. Prompts have
any length, and the model includes the step that overlap scheduling runs after the end of a generation.
"""

from __future__ import annotations

import os
import random
import sys
import time
from array import array
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType, MambaComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.memory.pools import StateReqToTokenPool
from dsv4_sglang.srt.plugin.prefix_cache_factory import build_prefix_cache
from dsv4_sglang.srt.prefix_cache import component as component_module
from dsv4_sglang.srt.prefix_cache import snapshot_schedule
from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.prefix_cache.hints import hints_of
from dsv4_sglang.srt.prefix_cache.notes import Pending, RequestNote
from dsv4_sglang.srt.prefix_cache.placement import Due
from dsv4_sglang.srt.prefix_cache.resume_points import ResumePoint
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.prefix_cache.tenants import NO_LIMIT
from support.eviction_scan import check_next_leaf, check_next_slot, check_shares, check_sizes
from support.kv_mirror import Mirror

# Factor on the number of steps of the random tests (docs/design/integrity.md).
TIMES = int(os.environ.get("DSV4_SGLANG_TEST_TIMES", "1"))
MAX_LENGTH = 64 * BLOCK
# Longest answer of a request with random hints, whose pin is charged with it.
LONGEST_ANSWER = 4 * BLOCK
# What a lookup returns that its finalizers keep.
FOUND = ("device_prefix_len", "last_device_node", "last_host_node", "best_match_node", "host_hit_length")
FOUND += ("mamba_host_hit_length", "mamba_branching_seqlen", "full_kv_hit_length", "last_visited_node_id")


def without_a_server(monkeypatch: Any) -> None:
    """Replace the server settings that SGLang's component reads."""
    settings = SimpleNamespace(mamba_cache_chunk_size=BLOCK, mamba=SimpleNamespace(mamba_max_states_per_path=-1))
    of_sglang = sys.modules[MambaComponent.__module__]
    monkeypatch.setattr(of_sglang, "get_exec", lambda: settings)
    monkeypatch.setattr(of_sglang, "get_server_args", lambda: settings, raising=False)
    monkeypatch.setattr(of_sglang, "mamba_cache_chunk_size", lambda: BLOCK, raising=False)
    monkeypatch.setattr(of_sglang, "mamba_checkpoint_grid", lambda page_size: BLOCK, raising=False)
    monkeypatch.setattr(component_module, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=0, attn_dp_rank=0))


class Pool(StateReqToTokenPool):
    """The part of the pool that the tree and the scheduler use, without state tensors."""

    def __init__(self, requests: int, snapshots: int) -> None:
        self.req_to_token = torch.zeros(requests + 1, MAX_LENGTH, dtype=torch.int32)
        self.device = "cpu"
        self.enable_mamba_extra_buffer = self.enable_mamba_extra_buffer_lazy = False
        self.mamba_allocator = MambaSlotAllocator(requests, "cpu")
        self.mamba_ckpt_pool = SnapshotSlots(snapshots, "cpu")
        self.free_slots = list(range(1, requests + 1))


class Request:
    """The fields of SGLang's `Req` and of its record `kv` that the prefix cache reads and writes."""

    session_id = cache_salt = kv_rotation_base = lock = finished_reason = None
    kv_hints: KvHintsEnvelope | None = None
    cache_inserted_len = storage_hit_length = 0
    mamba_prev_track_seqlen = None
    # If True, the request has generated all its tokens.
    over = False

    def __init__(self, keys: list[int], tail: int, unique: int) -> None:
        # The contents of the blocks. The tokens of block i are 128 times keys[i] + 1, so equal keys mean equal blocks.
        self.keys = keys
        self.origin_input_ids = array("q", [k + 1 for k in keys for _ in range(BLOCK)] + [100 + unique] * tail)
        self.output_ids = array("q")
        self.time_stats = SimpleNamespace(created_time=0.0, scheduler_recv_time=time.perf_counter())
        self.extra_key, self.priority, self.rid, self.session = None, 0, str(unique), None
        self.return_logprob, self.logprob_start_len = False, -1
        self.req_pool_idx: int = 0
        self.cache_protected_len = 0
        self.prefix_indices = torch.empty(0, dtype=torch.int64)
        self.last_node: Any = None
        self.mamba_pool_idx: Any = None
        self.mamba_ping_pong_track_buffer = self.mamba_next_track_idx = self.mamba_last_track_seqlen = None
        self.mamba_branching_seqlen: int | None = None
        self.mamba_cow_src_index: Any = None
        self.mamba_needs_clear = False
        self.extend_range = SimpleNamespace(start=0, end=0, length=0)
        self.allocated = 0
        self.computed = 0
        self.prompt = len(self.origin_input_ids)

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def kv(self) -> Request:
        return self

    @property
    def kv_allocated_len(self) -> int:
        return self.allocated

    @property
    def prefix_len(self) -> int:
        return len(self.prefix_indices)

    @property
    def extend_end(self) -> int:
        return self.extend_range.end

    @property
    def holds_mamba(self) -> bool:
        return self.mamba_pool_idx is not None

    def finished(self) -> bool:
        return self.over

    def get_evicted_seqlen(self, component: ComponentType) -> int:
        return 0

    def swa_dead_lo(self, page_size: int) -> int:
        return 0

    def get_fill_ids(self) -> array[int]:
        return self.full_untruncated_fill_ids[: self.extend_range.end]

    @property
    def pending(self) -> list[Pending]:
        return RequestNote.of(self).pending or []


def hints(**actions: dict[str, Any]) -> KvHintsEnvelope:
    """Return an envelope with the actions of these types and payloads."""
    listed = [
        KvHintAction(action_id=kind, action_type=kind, action_version="1", payload=payload)
        for kind, payload in actions.items()
    ]
    return KvHintsEnvelope(protocol_version="1", message_id="m", actions=listed)


class BlockOwner:
    """Allocates blocks for requests as SGLang's scheduler does."""

    cache: Any
    allocator: PagedTokenToKVPoolAllocator
    pool: Pool
    running: list[Request]
    # KV events are in Dynamo's format.
    dynamo = False
    # Gloo group of the processes of tensor parallelism.
    group: Any = None

    def _tree_params(self) -> CacheInitParams:
        self.mirror = Mirror()
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            tp_cache_group=self.group,
            page_size=BLOCK,
            enable_mamba_extra_buffer=True,
            enable_kv_cache_events=True,
            dynamo_kv_event_format=self.dynamo,
        )

    def check_events(self) -> None:
        """Assert that the KV events add up to the state that the cache reports.

        The integrity check has compared that state with the tree.
        """
        self.mirror.apply(self.cache.take_events())
        announced = {medium.value: blocks for medium, blocks in self.cache.events.announced.items()}
        assert self.mirror.blocks == announced

    def check_orders(self) -> None:
        """Assert that the next victims are those of a full scan. The integrity check has compared the members."""
        slots = self.pool.mamba_ckpt_pool
        check_next_leaf(slots, self.cache.tree_core.evictable_device_leaves)
        check_next_slot(slots.registry)
        check_sizes(slots.registry)
        check_shares(slots.registry)

    def limit_pins(self) -> None:
        """Let pins hold a quarter of the device."""
        self.cache.pins.most_tokens = self.allocator.size // 4
        self.cache.pins.most_pins = self.pool.mamba_ckpt_pool.num_slots // 4

    def give_hints(self, request: Request, rng: random.Random) -> None:
        """Give a request random hints, and let the time pass. A pin that does not fit is left out."""
        self.cache.at_time(self.cache.now + rng.choice((0, 0, 1, 5)))
        actions: dict[str, dict[str, Any]] = {}
        if rng.random() < 0.5:
            kind = rng.choice(("retain", "demote"))
            actions[kind] = {"seconds": rng.randint(1, 9), "weight": rng.choice((2, 8))} if kind == "retain" else {}
        if rng.random() < 0.5:
            pin = {"name": rng.choice("abc"), "seconds": rng.randint(0, 20)}
            earlier = [
                ((other.cache_salt or "", of.name), MAX_LENGTH)
                for other in self.running
                if (of := hints_of(other.kv_hints).pin)
            ]
            key = request.cache_salt or "", str(pin["name"])
            with suppress(ValueError):
                self.cache.pins.check(key, request.prompt + LONGEST_ANSWER, earlier)
                actions["pin"] = pin
        request.kv_hints = hints(**actions)

    def check_pins(self) -> None:
        """Assert that pins are within their limits. The integrity check has compared their locks."""
        pins = dict(self.cache.pins)
        assert self.cache.pins.tokens <= self.cache.pins.most_tokens and len(pins) <= self.cache.pins.most_pins

    def _make_room(self, blocks: int) -> bool:
        missing = blocks * BLOCK - self.allocator.available_size()
        if missing > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=missing))
        return self.allocator.available_size() >= blocks * BLOCK

    def _allocate(self, request: Request, length: int) -> None:
        count = -(-length // BLOCK) * BLOCK - request.allocated
        if count > 0:
            fresh, at = self.allocator.alloc(count), request.allocated
            assert fresh is not None
            self.pool.req_to_token[request.req_pool_idx, at : at + count] = fresh.int()
            request.allocated = at + count

    def _take_slots(self, request: Request) -> int:
        """Give a request its row and its live slot. Return the snapshot that it resumes from, 0 for none."""
        begin = len(request.prefix_indices)
        request.req_pool_idx = self.pool.free_slots.pop()
        request.mamba_pool_idx = self.pool.mamba_allocator.alloc(1)[0]
        self.pool.req_to_token[request.req_pool_idx, :begin] = request.prefix_indices.int()
        request.allocated = request.computed = begin
        source = 0 if request.mamba_cow_src_index is None else int(request.mamba_cow_src_index)
        request.mamba_cow_src_index = None
        assert bool(begin) == bool(source), "a prefix without a state, or a state without a prefix"
        self.running.append(request)
        return source

    def _empty(self) -> None:
        """Flush as Scheduler.flush_cache does."""
        self.cache.reset()
        self.pool.mamba_ckpt_pool.clear()
        self.pool.mamba_allocator.clear()
        self.allocator.clear()

    def tokens_of(self, node: Any) -> list[int]:
        """Return the tokens of the path that ends at a node."""
        parts: list[list[int]] = []
        while node.parent is not None:
            parts.append(list(node.key.token_ids)[: len(node.key)])
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    # SGLang's calls

    def _match(self, request: Request) -> Any:
        """Match a prompt with the tree and store the result in the request."""
        key = RadixKey(
            request.origin_input_ids, request.extra_key, limit=request.prompt - 1, cache_salt=request.cache_salt
        )
        params = MatchPrefixParams(key=key, cow_mamba=True, req=request)
        match = self.cache.match_prefix(params)
        self._check_match(params, match)
        request.last_node, request.mamba_branching_seqlen = match.last_device_node, match.mamba_branching_seqlen
        request.prefix_indices = self._indices(match)
        return match

    def _check_match(self, params: MatchPrefixParams, match: Any) -> None:
        """Assert that SGLang's walk from the root finds the same. The nodes are split already."""
        core, key = self.cache.tree_core, params.key.page_aligned(BLOCK)
        if len(key):
            expected = UnifiedTreeCore._match_prefix_helper(core, key, params)
            assert [getattr(match, name) for name in FOUND] == [getattr(expected, name) for name in FOUND]

    def _indices(self, match: Any) -> torch.Tensor:
        return self.cache.path_device_indices(match.last_device_node)

    def _hold(self, request: Request) -> None:
        request.lock = self.cache.lock(request.last_node)

    def _let_go(self, request: Request) -> None:
        self.cache.unlock(request.lock)
        request.lock = None

    def _insert(self, request: Request) -> None:
        """Insert the tokens that the last prefill step of a running request has computed."""
        self.cache.checkpoint(request, up_to=request.extend_end)
        row = self.pool.req_to_token[request.req_pool_idx]
        request.prefix_indices = row[: request.extend_end].long()

    def _release(self, request: Request, is_insert: bool) -> None:
        """Release a request as mem_cache.common.release_kv_cache does.

        With `is_insert`, an unfinished request is released as snapshot_schedule.keep_on_retraction does.
        """
        self.running.remove(request)
        if is_insert:
            self.cache.checkpoint(request, up_to=request.computed)
        self.cache.free_kv_row(request.kv, [(request.cache_protected_len, request.computed)])
        self._let_go(request)
        self.cache.on_release(request, checkpointed=is_insert and request.over)
        # The allocated blocks after the computed ones.
        row, begin = self.pool.req_to_token[request.req_pool_idx], -(-request.computed // BLOCK) * BLOCK
        if begin < request.allocated:
            self.allocator.free_segment(row[begin : request.allocated].long(), start_pos=begin)
        self.pool.free_slots.append(request.req_pool_idx)


class TreeServer(BlockOwner):
    """A model server with `blocks` pages of 128 tokens. `interval` and `chunk` count blocks."""

    def __init__(
        self,
        blocks: int,
        snapshots: int,
        interval: int = 3,
        chunk: int = 4,
        requests: int = 8,
        tenant_percent: int = NO_LIMIT,
    ) -> None:
        self.pool = Pool(requests, snapshots)
        self.allocator = PagedTokenToKVPoolAllocator(blocks * BLOCK, BLOCK, torch.uint8, "cpu", None, False)
        context = SimpleNamespace(
            disable_radix_cache=False, enable_hierarchical_cache=False, params=self._tree_params()
        )
        self.cache = build_prefix_cache(context, interval * BLOCK, tenant_percent)
        self.component = component_of(self.cache)
        self.chunk = chunk * BLOCK
        self.running: list[Request] = []
        self.history: list[tuple[int, ...]] = []
        self.block_content: dict[int, tuple[int, ...]] = {}
        self.state_content: dict[int, tuple[int, ...]] = {}
        self.blocks, self.snapshots = blocks, snapshots
        # Snapshot slots that are withheld from all requests.
        self.kept_back: list[int] = []
        self._unique = 0

    # Admission, as in Scheduler.get_new_batch_prefill and alloc_for_extend

    def queue(self, keys: list[int], tail: int = 1, salt: str | None = None) -> Request:
        """Return a request that waits."""
        self._unique += 1
        request = Request(list(keys), tail, self._unique)
        request.cache_salt = salt
        return request

    def admit(self, keys: list[int], tail: int = 1, salt: str | None = None) -> Request | None:
        return self.admit_queued(self.queue(keys, tail, salt))

    def admit_queued(self, request: Request) -> Request | None:
        if not self.pool.free_slots or request.prompt + 2 * BLOCK > MAX_LENGTH:
            return None
        self._match(request)
        request.cache_protected_len = len(request.prefix_indices)
        self._hold(request)
        if not self._make_room(-(-(request.prompt - len(request.prefix_indices)) // BLOCK)):
            self._let_go(request)
            return None
        if slot := self._take_slots(request):
            assert self.state_content[slot] == self.path(request, request.computed), "resumed from a wrong state"
        # Admission has ensured that all blocks of the prompt are free.
        self._allocate(request, request.prompt)
        return request

    def path(self, request: Request, length: int) -> tuple[int, ...]:
        return tuple(request.full_untruncated_fill_ids[: length // BLOCK * BLOCK : BLOCK])

    # Steps

    def prefill(self, request: Request) -> None:
        if request.computed < request.prompt:
            self.launch_prefill(request)
            self.process_prefill(request)

    def launch_prefill(self, request: Request) -> None:
        begin, end = len(request.prefix_indices), min(len(request.prefix_indices) + self.chunk, request.prompt)
        request.extend_range = SimpleNamespace(start=begin, end=end, length=end - begin)
        taken = self.component.planner.plan_prefill(request, room=5)
        self._compute(request, end)
        for length, slot in taken:
            self.state_content[slot] = self.path(request, length)

    def process_prefill(self, request: Request) -> None:
        """Process a prefill step. With overlap scheduling the first decode step is planned before this call."""
        self._insert(request)

    def plan_decode(self, request: Request, length: int) -> None:
        """Make SGLang's calls before the decode step that extends a request to `length` tokens."""
        lengths = torch.tensor([length])
        batch = SimpleNamespace(tree_cache=self.cache, seq_lens_cpu=lengths, reqs=[request], device="cpu")
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        snapshot_schedule.plan_decode(batch)
        if slot := int(batch.mamba_track_indices[0]):
            self.state_content[slot] = self.path(request, length)

    def prefill_all(self, request: Request) -> None:
        while request.computed < request.prompt:
            self.prefill(request)

    def decode(self, request: Request, key: int) -> bool:
        """Generate tokens up to a few after the next multiple of 128."""
        if request.computed < request.prompt:
            return False
        end = request.computed // BLOCK * BLOCK + BLOCK
        stop = end + 3
        if stop + BLOCK > MAX_LENGTH or not self._make_room(-(-stop // BLOCK) - request.allocated // BLOCK):
            return False
        if stop > request.allocated:
            self._allocate(request, stop)
        while len(request.full_untruncated_fill_ids) < stop:
            request.output_ids.append(key + 1)
        for length in range(end, stop + 1):
            self._compute(request, length)
            self.plan_decode(request, length)
        return True

    def _compute(self, request: Request, end: int) -> None:
        row = self.pool.req_to_token[request.req_pool_idx]
        for block in range(request.computed // BLOCK, end // BLOCK):
            self.block_content[int(row[block * BLOCK]) // BLOCK] = self.path(request, (block + 1) * BLOCK)
        request.computed = end

    def finish(self, request: Request) -> None:
        self.prefill_all(request)
        request.over = True
        self._release(request, is_insert=True)
        tokens = request.full_untruncated_fill_ids
        self.history.append(tuple(t - 1 for t in tokens[: len(tokens) // BLOCK * BLOCK : BLOCK] if t < 100))
        del self.history[:-20]

    def retract(self, request: Request) -> None:
        """Retract a request for lack of memory, as snapshot_schedule.keep_on_retraction does."""
        self._release(request, is_insert=True)

    def press(self, blocks: int, snapshots: int) -> None:
        self._make_room(min(blocks, self.blocks))
        due = Due(BLOCK, True, ResumePoint.PROMPT)
        taken = [slot for slot in [self.component.planner._take(due) for _ in range(snapshots)] if slot]
        self.component.slots.give_back(taken)

    def keep_back(self) -> None:
        """Withhold all free snapshots until `let_go`."""
        while slot := self.component.slots.take():
            self.kept_back.append(slot)

    def let_go(self) -> None:
        self.component.slots.give_back(self.kept_back)
        self.kept_back = []

    def flush(self) -> None:
        if not self.running:
            self._empty()

    # Invariants

    def check(self) -> None:
        """Run the integrity check, and assert the contents of blocks and snapshots."""
        core = self.cache.tree_core
        kept_back = SimpleNamespace(rid="kept back", req_pool_idx=None, mamba_pool_idx=None)
        kept_back.kv = kept_back
        RequestNote.of(kept_back).pending = [Pending(0, slot, rolling=False) for slot in self.kept_back]
        found = audit(self.cache, [*self.running, kept_back])
        assert not found.findings, str(found)
        self.check_events()
        self.check_orders()
        self.check_pins()
        for node in core._collect_all_nodes():
            if node is core.root_node:
                continue
            here = tuple(self.tokens_of(node)[::BLOCK])
            pages = node.component_data[ComponentType.FULL].value[::BLOCK] // BLOCK
            for i, page in enumerate(reversed(pages.tolist())):
                assert self.block_content[page] == here[: len(here) - i], "a cached block was overwritten"
            slot = self.component._slot(node)
            assert slot is None or self.state_content[slot] == here, "a snapshot holds another state"
        for request in self.running:
            row = self.pool.req_to_token[request.req_pool_idx]
            for length, slot, _ in request.pending:
                if length <= request.computed:  # a verify step may not reach it
                    assert self.state_content[slot] == self.path(request, length), "a held state was overwritten"
            for end in range(BLOCK, request.computed // BLOCK * BLOCK + 1, BLOCK):
                page = int(row[end - BLOCK]) // BLOCK
                assert self.block_content[page] == self.path(request, end), "a held block was overwritten"
        # SGLang asserts this equation when it is idle.
        cached = self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        assert cached == len(self.component.slots.nodes)
