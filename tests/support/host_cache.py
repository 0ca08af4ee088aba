"""The host cache without a server process: SGLang's tree and controller, with our pools, component and copies.

Requests follow the calls of SGLang's scheduler in the order of overlap scheduling: a step is planned and launched
before the result of the previous one is processed. Copies and layers run late and in random order (`streams`). Every
step checks the bytes that it reads. A block holds its tokens, and a snapshot holds the hash of its path.

A step waits for its loads in our own `SnapshotSlots.load_to_active` and `CacheKVPool.wait_for_layer`, as in a real
model. No attention backend runs here; server/test_server_host.py tests that the backend calls `wait_for_layer` for each
layer. SGLang's scheduler does not run here either, so the harness makes its waits: the stream of steps waits for the
scheduler's stream, and after a prefill step the scheduler's stream waits for the stream of steps. SGLang's worker would
need a model, so the harness also does the worker's part with the counter of loads. It keeps the counter
(`register_hicache_layer_transfer_counter`), and before each step it sets the load that the step waits for.
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang.srt.managers.cache_controller as base_controller
import torch
import torch.distributed as dist
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.host_cache import transfers
from dsv4_sglang.srt.host_cache.cache import HostPrefixCache
from dsv4_sglang.srt.host_cache.component import HostSnapshotComponent
from dsv4_sglang.srt.host_cache.page_names import WEIGHT_FLAGS
from dsv4_sglang.srt.host_cache.pools import HostBlocks, HostSnapshots
from dsv4_sglang.srt.host_cache.storage import FileStorage, register_storages
from dsv4_sglang.srt.host_cache.transfers import HostStack, TransferController
from dsv4_sglang.srt.memory.pools import CacheKVPool
from dsv4_sglang.srt.plugin.prefix_cache_factory import build_prefix_cache
from dsv4_sglang.srt.sglang.tree import evict_from_host
from support.fake_streams import Event, Stream, Streams
from support.prefix_tree import BLOCK, LONGEST_ANSWER, BlockOwner, Pool, Request

LAYERS = 4
WITH_BLOCKS = (0, 2, 3)
MOST_RUNNING = 5
# Calls of the controller that begin a copy, and the name of each operation in `HostCacheServer.done`.
COPIES = {"write": "saved", "load": "loaded", "write_storage": "stored", "prefetch": "fetched"}
# The counted operations. A request is admitted, aborted or retracted, or one step is computed for it. The copy of a
# node begins. A snapshot is evicted from the device or from the host. The caches are flushed.
OPERATIONS = (
    *COPIES.values(),
    "admitted",
    "computed",
    "aborted",
    "retracted",
    "left the device",
    "left the host",
    "flushed",
)


class Blocks(KVCache):
    """A pool of [blocks, 128] int64 tokens in each layer that has blocks."""

    def __init__(self, blocks: int) -> None:
        self.size, self.page_size, self.device, self.layer_num = blocks * BLOCK, BLOCK, "cpu", len(WITH_BLOCKS)
        self.compressed_layers = list(WITH_BLOCKS)
        schema = SimpleNamespace(ring_format=KVFormat.FP32, entry_format=KVFormat.FP32, key_format=KeyFormat.FP32)
        self.layout = SimpleNamespace(schemas=[schema] * LAYERS)
        self.tokens = {layer: torch.zeros(blocks + 1, BLOCK, dtype=torch.int64) for layer in WITH_BLOCKS}
        self.pools = [
            SimpleNamespace(device=torch.device("cpu"), block_views=lambda table=table: [table.view(torch.uint8)])
            for table in self.tokens.values()
        ]

    def get_key_buffer(self, *args: Any) -> Any:
        raise NotImplementedError

    get_value_buffer = get_kv_buffer = set_kv_buffer = get_key_buffer


class States:
    """A pool of [layers] int64 per snapshot."""

    def __init__(self, snapshots: int) -> None:
        self.snapshots, self.device = snapshots, torch.device("cpu")
        self.layout = SimpleNamespace(snapshot_bytes=8 * LAYERS)
        self.states = torch.zeros(snapshots + 1, LAYERS, dtype=torch.int64)

    def snapshot_tables(self) -> list[torch.Tensor]:
        return [self.states[1:].view(torch.uint8)]


class Pools(CacheKVPool):
    def __init__(self, blocks: Blocks, states: States) -> None:
        self.full_kv_pool, self.mamba_pool = blocks, SimpleNamespace(storage=states)


def state_of(tokens: Any) -> int:
    return hash(np.asarray(tokens, dtype=np.int64).tobytes()) & 0x7FFFFFFFFFFFFFFF


class ImpatientQueue(Queue[Any]):
    """A queue that waits for at most 0.02 s.

    SGLang's threads check once a second whether to stop, and a flush waits for them.
    """

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block, timeout and min(timeout, 0.02))


def late_copies(monkeypatch: Any, streams: Streams) -> None:
    """Run copies of the host pools when their stream runs."""
    for pool, name in ((p, n) for p in (HostBlocks, HostSnapshots) for n in ("save", "load")):
        original: Callable[..., None] = getattr(pool, name)

        def queued(self: Any, *args: Any, original: Callable[..., None] = original) -> None:
            held = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            streams.queue(lambda: original(self, *held))

        monkeypatch.setattr(pool, name, queued)


def late_storage(monkeypatch: Any, streams: Streams, storage: str) -> None:
    """Make the storage threads pause before and after they look up or move pages."""
    ways: list[tuple[type, str]] = [(FileStorage, "batch_exists_v2"), (FileStorage, "get"), (FileStorage, "set")]
    if storage == "nixl":
        from dsv4_sglang.srt.host_cache.nixl import NixlStorage

        ways = [(NixlStorage, "batch_exists_v2"), (NixlStorage, "_xfer_and_wait")]
    elif storage == "shm":
        from dsv4_sglang.srt.host_cache.shared_memory import SharedMemoryStorage

        ways = [(SharedMemoryStorage, name) for name in ("batch_exists_v2", "_fetch_row", "_publish")]
    for kind, name in ways:
        original: Callable[..., Any] = getattr(kind, name)

        def paused(self: Any, *args: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            streams.pause()
            found = original(self, *args, **named)
            streams.pause()
            return found

        monkeypatch.setattr(kind, name, paused)


class HostCacheServer(BlockOwner):
    def __init__(
        self,
        monkeypatch: Any,
        seed: int,
        *,
        policy: str = "write_through",
        blocks: int = 40,
        snapshots: int = 14,
        host_blocks: int = 120,
        host_snapshots: int = 60,
        storage: str | None = None,
        late_threads: bool = False,
        prefetch_policy: str = "wait_complete",
        chunks: float = 0,
        aborts: float = 0.02,
        flushes: float = 0,
        extra_config: dict[str, Any] | None = None,
        group: Any = None,
    ) -> None:
        """Create the tree, the pools and the controller.

        Args:
            seed: Seed of the requests and, with the rank in `group`, of the order in which streams run.
            storage: `file` for SGLang's file storage; `nixl` for NIXL's, with the folder from its environment variable.
            late_threads: Run the threads that move pages late and in random order, too.
            chunks: Probability that a prefill step is not the last of its prompt.
            aborts: Probability that a request is aborted, either while it waits or after a step.
            flushes: Probability that an iteration begins a flush.
            extra_config: Configuration of the storage.
            group: Gloo group of processes that share the host rows. Each has such a server with equal arguments.
        """
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self.rng = random.Random(seed)
        self.streams = Streams(seed + 1 + 1000 * rank)
        self.streams.use(monkeypatch)
        late_copies(monkeypatch, self.streams)
        monkeypatch.setattr(hybrid_pool_assembler, "_STRATEGIES", [HostStack(None, host_snapshots)])
        if storage is not None:
            register_storages()
            parallel = SimpleNamespace(
                tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, attn_dcp_rank=0, attn_dcp_size=1
            )
            monkeypatch.setattr(base_controller, "get_parallel", lambda: parallel)
            monkeypatch.setattr(base_controller, "is_dp_attention_enabled", lambda: False)
            if late_threads:
                self.streams.use_threads(monkeypatch)
                late_storage(monkeypatch, self.streams, storage)
            else:
                monkeypatch.setattr(base_controller, "Queue", ImpatientQueue)
        self.forward = Stream(self.streams)
        self.device, self.states = Blocks(blocks), States(snapshots)
        self.pool = Pool(MOST_RUNNING + 1, snapshots)
        self.kv_pool = Pools(self.device, self.states)
        self.allocator = PagedTokenToKVPoolAllocator(blocks * BLOCK, BLOCK, torch.uint8, "cpu", self.kv_pool, False)
        args = SimpleNamespace(
            hicache_storage_backend=storage,
            # NIXL's cleaner would remove files on a disk that is 80 % full.
            hicache_storage_backend_extra_config=json.dumps({"l3_cleaner_enabled": False, **(extra_config or {})}),
            hicache_write_policy=policy,
            hicache_storage_prefetch_policy=prefetch_policy,
            hicache_ratio=host_blocks / blocks,
            hicache_size=0,
            hicache_io_backend="kernel",
            extra_metric_labels=None,
            served_model_name="m",
            model_path="nowhere",
            json_model_override_args="{}",
            download_dir=None,
            enable_memory_saver=True,
            node_rank=0,
            # Newer releases read these settings by the mode of the host memory.
            hicache_host_memory_mode="cache",
            file_storage_path=None,
            **{**dict.fromkeys(WEIGHT_FLAGS), "dtype": "float32", "tp_size": 1},
        )
        for module in (unified_radix_cache, hybrid_pool_assembler, transfers):
            for of in ("get_memory", "get_observability", "get_serving"):
                monkeypatch.setattr(module, of, lambda: args, raising=False)
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(forward_stream=self.forward),
            register_hicache_layer_transfer_counter=self._keep_counter,
        )
        context = SimpleNamespace(
            disable_radix_cache=False,
            enable_hierarchical_cache=True,
            params=self._tree_params(),
            # SGLang resolves the default of --hicache-ratio outside of ServerArgs.
            server_args=SimpleNamespace(**{**vars(args), "hicache_ratio": None}),
            tp_worker=worker,
        )
        cache = build_prefix_cache(context, 4 * BLOCK)
        assert isinstance(cache, HostPrefixCache)
        self.cache: HostPrefixCache = cache
        self.component: HostSnapshotComponent = cache.component
        self.controller: TransferController = cache.cache_controller
        self.chunks, self.aborts, self.flushes = chunks, aborts, flushes
        self.running: list[Request] = []
        # Requests that a cache-aware schedule policy looks up while they wait.
        self.queue: list[Request] = []
        # Requests that wait for their fetches, each with its name in the cache.
        self.waiting: list[tuple[Request, Any]] = []
        # The request whose prompt is computed in part.
        self.chunked: Request | None = None
        # If True, no request begins until all requests have ended and the caches are flushed.
        self.draining = False
        # The count of each operation in OPERATIONS.
        self.done: Counter[str] = Counter()
        self.history: list[list[int]] = []
        # Errors: steps that read wrong bytes, and wrong evictions.
        self.wrong: list[str] = []
        self.last: tuple[list[tuple[Request, str]], Event] | None = None
        # If set, requests get random hints.
        self.hint_rng: random.Random | None = None
        self.from_host = self.admitted = 0
        self.copies_fail = False
        self._watch(monkeypatch)

    def _keep_counter(self, counter: Any) -> None:
        self.counter = counter

    def _watch(self, monkeypatch: Any) -> None:
        """Record wrong evictions.

        The device must not lose a snapshot for which the host has room. The host must not evict the only copy of a
        snapshot while it holds copies of snapshots on the device.
        """
        cache, evictions, component = self.cache, self.cache.evictions, self.component
        leaves, gives_up, evict = component._on_device_eviction, evictions.free, evict_from_host
        kept: list[Any] = []

        for name, operation in COPIES.items():
            original: Callable[..., Any] = getattr(TransferController, name)

            def counted(
                *args: Any, operation: str = operation, original: Callable[..., Any] = original, **named: Any
            ) -> Any:
                begun = original(*args, **named)
                self.done[operation] += begun is not None
                return begun

            monkeypatch.setattr(TransferController, name, counted)

        def on_device_eviction(node: Any, slot: int, target: Any) -> None:
            self.done["left the device"] += 1
            registry = component.slots.registry
            if registry.copies.is_unsaved(slot) and not self.copies_fail and cache.saves.fits(cache.saves.plan(node)):
                self.wrong.append(f"snapshot {slot} was lost though the host had room")
            leaves(node, slot, target)

        def giving_up(count: int, kind: Any, *, below: int = 0, keep: Any = ()) -> int:
            kept[:] = keep
            return gives_up(count, kind, below=below, keep=keep)

        def evicted(of: Any, node: Any, components: Any) -> None:
            self.done["left the host"] += 1
            slots = component.slots
            registry, place = slots.registry, slots.id_of(node)
            if evictions.row(node) is not None and not registry.policy.duplicates()[place]:
                copies = (slots.nodes[slot] for slot in np.flatnonzero(registry.policy.duplicates()).tolist())
                if any(evictions.is_end(copy) and evictions.is_evictable(copy) and copy not in kept for copy in copies):
                    self.wrong.append(f"the host gave up snapshot {place} before copies of what the device has")
            evict(of, node, components)

        monkeypatch.setattr(component, "_on_device_eviction", on_device_eviction)
        monkeypatch.setattr(evictions, "free", giving_up)
        monkeypatch.setattr("dsv4_sglang.srt.host_cache.evictions.evict_from_host", evicted)

    # Steps, on the stream of steps

    def launch(self, steps: list[dict[str, Any]], consumer: int) -> Event:
        """Launch `steps` on their stream. `consumer` is the index of the load that they wait for, -1 for none."""
        self.forward.wait_stream(self.streams.current)
        self.counter.set_consumer(consumer)
        done = Event(self.streams)
        with self.streams.on(self.forward):
            for step in steps:
                if step["source"]:
                    self._load_to_active(step)
            for layer in range(LAYERS):
                self.kv_pool.wait_for_layer(layer)
                for step in steps:
                    self.streams.queue(lambda step=step, layer=layer: self._layer(step, layer))
            done.record()
        return done

    def _load_to_active(self, step: dict[str, Any]) -> None:
        """Do the same as SGLang's model runner.

        Live slots have no states here, so the snapshot to be copied is checked.
        """

        def load(snapshots: torch.Tensor, live: torch.Tensor) -> None:
            self.streams.queue(lambda: self._resume(step, int(snapshots[0])))

        live_pool: Any = SimpleNamespace(storage=SimpleNamespace(load=load))
        snapshots, live = torch.tensor([step["source"]]), step["request"].mamba_pool_idx.view(1)
        self.pool.mamba_ckpt_pool.load_to_active(live_pool, snapshots, live)

    def _resume(self, step: dict[str, Any], snapshot: int) -> None:
        if (self.states.states[snapshot] != state_of(step["tokens"][: step["begin"]])).any():
            self.wrong.append(f"request {step['rid']} resumed from another state")

    def _layer(self, step: dict[str, Any], layer: int) -> None:
        begin, end, tokens = step["begin"], step["end"], step["tokens"]
        if layer in WITH_BLOCKS:
            table = self.device.tokens[layer].numpy()
            blocks, old, new = step["blocks"], begin // BLOCK, -(-end // BLOCK)
            if (
                not (table[blocks[:old]] == tokens[: old * BLOCK].reshape(-1, BLOCK)).all()
                or not (table[blocks[old], : begin % BLOCK] == tokens[old * BLOCK : begin]).all()
            ):
                self.wrong.append(f"request {step['rid']} read other blocks in layer {layer}")
            for i in range(old, new):
                first, last = max(begin, i * BLOCK), min(end, (i + 1) * BLOCK)
                table[blocks[i], first - i * BLOCK : last - i * BLOCK] = tokens[first:last]
        for length, slot in step["snapshots"]:
            self.states.states[slot, layer] = state_of(tokens[:length])

    # The scheduler's iteration

    def turns(self, least: int, *operations: str) -> Iterator[int]:
        """Run `least` iterations, and more until each of `operations` was done. Yield the number of each.

        Whether fetches end before their requests time out depends on when the threads of all processes run.
        """
        done, most = self.done, 50 * least
        for turn in range(most):
            if turn >= least and all(done[operation] for operation in operations):
                return
            self.turn()
            assert not self.wrong, (turn, self.wrong)
            done["from storage"] = int(self.component.metrics.total("hit_tokens", "storage"))
            yield turn
        raise AssertionError(f"{operations} after {most} iterations: {done}")

    def turn(self) -> None:
        """Run an iteration with overlap: the next step is launched before the result of the last one is processed."""
        self.streams.run_some(self.rng.randrange(40 if self.cache.enable_storage else 12))
        self.cache.check_hicache_events()
        self._abort_waiting()
        self._drain()
        steps, consumer, kind = self._next_steps()
        self.done["computed"] += len(steps)
        launched = None
        if steps:
            launched = ([(step["request"], kind) for step in steps], self.launch(steps, consumer))
            # The scheduler's stream waits for all of a prefill step. After a decode graph it waits for its tables only.
            if kind != "decode":
                self.streams.current.wait_stream(self.forward)
        if self.last is not None:
            self._process(*self.last)
        self.last = launched

    def _next_steps(self) -> tuple[list[dict[str, Any]], int, str]:
        if self.chunked is not None and (step := self._next_chunk(self.chunked)):
            return [step], -1, self._kind(step)
        if len(self.running) < MOST_RUNNING and not self.draining and self.rng.random() < 0.35:
            request = self._fetched_prompt() if self.cache.enable_storage else self._queued_prompt()
            if request is not None and (step := self._admit(request)):
                return [step], self._consumer, self._kind(step)
        steps = [self._decode(request) for request in list(self.running) if request.decoding]
        return [step for step in steps if step], -1, "decode"

    def _kind(self, step: dict[str, Any]) -> str:
        return "chunk" if step["end"] < step["request"].prompt else "prefill"

    def _fetched_prompt(self) -> Request | None:
        """Start a fetch and return a request whose fetch has ended, as Scheduler._get_new_batch_prefill_raw does."""
        if len(self.waiting) < 4:
            request = self._queued_prompt()
            self.waiting.append((request, self.begin_prefetch(request.origin_input_ids, request.rid)))
        for request, name in self.waiting:
            if self.cache.check_prefetch_progress(name):
                request.storage_hit_length = self.cache.pop_prefetch_loaded_tokens(name)
                self.waiting.remove((request, name))
                return request
        return None

    def _abort_waiting(self) -> None:
        """Abort some waiting requests, and let the fetches of others time out (policy `timeout`)."""
        for request, name in list(self.waiting):
            if self.draining or self.rng.random() < self.aborts:
                self.cache.release_aborted_request(name)
                self.waiting.remove((request, name))
                self.done["aborted"] += 1
            elif self.rng.random() < 0.05 and name in self.cache._storage_prefetch_wait:
                self.cache._storage_prefetch_wait[name].timeout_s = -1

    def _drain(self) -> None:
        """Start draining the requests at random, and flush when they are drained."""
        if self.draining:
            self.draining = not self.flush()
        elif self.flushes and self.rng.random() < self.flushes:
            self.draining = True
            for request in [request for request in self.running if self.rng.random() < 0.5]:
                self._abort(request)

    def _queued_prompt(self) -> Request:
        """Look up all waiting requests, and return one."""
        while len(self.queue) < 3:
            self.queue.append(self._prompt())
        for request in self.queue:
            self._match(request)
        return self.queue.pop(self.rng.randrange(len(self.queue)))

    def _prompt(self) -> Request:
        rng, unique = self.rng, self.admitted + 1
        keys = [rng.randrange(3)]
        while rng.random() < 0.8 and len(keys) < 8:
            keys.append(rng.randrange(2))
        tokens = [key + 1 for key in keys for _ in range(BLOCK)] + [100 + unique] * rng.randrange(1, 100)
        if self.history and rng.random() < 0.7:
            past = rng.choice(self.history)
            cut = len(past) if rng.random() < 0.7 else rng.randrange(1, len(past))
            tokens = past[:cut] + [1000 + unique] * rng.randrange(1, 200)
        return self._request(tokens)

    def _request(self, tokens: list[int], tenant: str | None = None, salt: str | None = None) -> Request:
        self.admitted += 1
        request = Request([], 0, self.admitted)
        request.origin_input_ids, request.prompt, request.decoding = array("q", tokens), len(tokens), False
        request.extra_key, request.cache_salt = tenant, salt
        return request

    def start(self, tokens: list[int], tenant: str | None = None, salt: str | None = None) -> dict[str, Any]:
        """Admit one prompt while no other request runs, compute it, and insert it into the tree."""
        step = self._admit(self._request(tokens, tenant, salt))
        assert step is not None
        self.launch([step], self._consumer).synchronize()
        step["request"].decoding = True
        self._insert(step["request"])
        return step

    def serve(self, tokens: list[int], tenant: str | None = None, salt: str | None = None) -> int:
        """Serve one prompt to its end. Return the number of its cached tokens."""
        step = self.start(tokens, tenant, salt)
        self.finish(step["request"])
        self.settle()
        return step["begin"]

    def arrive(self, tokens: list[int]) -> Request:
        """Look up a request that is aborted before it is admitted."""
        request = self._request(tokens)
        self._look_up(request)
        self._let_go(request)
        return request

    def prefetch(self, tokens: list[int], tenant: str | None = None, salt: str | None = None) -> int:
        """Fetch a prompt until the policy ends the fetch. Return the number of tokens from the storage."""
        request = self.begin_prefetch(tokens, tenant=tenant, salt=salt)
        while not self.cache.check_prefetch_progress(request):
            self.cache.check_hicache_events()
            if not self.streams.run_some(1):
                assert self.controller.prefetch_thread.is_alive(), "SGLang's thread has ended"
                time.sleep(0.001)  # SGLang's thread, or one that it started, is reading
        self.settle()
        return self.cache.pop_prefetch_loaded_tokens(request)

    def begin_prefetch(
        self, tokens: Sequence[int], name: str = "prefetched", tenant: str | None = None, salt: str | None = None
    ) -> Any:
        """Begin a fetch as Scheduler._prefetch_kvcache does. Return the request's name in the cache."""
        cache = self.cache
        key = RadixKey(array("q", tokens), tenant, limit=len(tokens) - 1, cache_salt=salt)
        match = cache.match_prefix(MatchPrefixParams(key=key))
        rest = array("q", tokens[len(self._indices(match)) + match.host_hit_length : -1])
        node = match.last_host_node
        request = CacheRequestHandle(name, 0)
        last = cache.get_last_hash_value(node)
        cache.prefetch_from_storage(request, node, rest, last, extra_key=tenant, cache_salt=salt)
        return request

    def _look_up(self, request: Request) -> None:
        """Match and load as PrefillAdder.add_one_req does. The request then holds the matched prefix."""
        cache = self.cache
        match = self._match(request)
        request.host_hit_length = match.host_hit_length
        request.swa_host_hit_length, request.mamba_host_hit_length = 0, match.mamba_host_hit_length
        lock, locked = cache.inc_lock_ref(request.last_node), request.last_node
        if request.host_hit_length or request.mamba_host_hit_length:
            load = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            loaded, request.last_node = cache.init_load_back(load)
            self.from_host += loaded
            request.prefix_indices = cache.path_device_indices(request.last_node)
        request.cache_protected_len = len(request.prefix_indices)
        self._hold(request)
        cache.dec_lock_ref(locked, lock.to_dec_params())

    def _admit(self, request: Request) -> dict[str, Any] | None:
        """Admit a request as Scheduler.get_new_batch_prefill and PrefillAdder.add_one_req do."""
        cache = self.cache
        if request.prompt > 20 * BLOCK or not self.pool.free_slots:
            return None
        self._look_up(request)
        begin = len(request.prefix_indices)
        if not self._make_room(-(-request.prompt // BLOCK) - begin // BLOCK):
            self._let_go(request)
            return None  # its load may still be running
        self._consumer = cache.ready_to_load_host_cache()
        source = self._take_slots(request)
        if self.hint_rng is not None:
            self.give_hints(request, self.hint_rng)
        end, taken = self._chunk(request, begin)
        self.done["admitted"] += 1
        return self._step(request, begin, end, source, taken)

    def _chunk(self, request: Request, begin: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the end of the next prefill step, whose blocks are now allocated, and the snapshots that it takes."""
        end, whole = request.prompt, (request.prompt - 1 - begin) // BLOCK
        if whole and self.chunks and self.rng.random() < self.chunks:
            end = begin + self.rng.randrange(1, whole + 1) * BLOCK
        self._allocate(request, end)
        request.extend_range = SimpleNamespace(start=begin, end=end, length=end - begin)
        request.computed = end
        self.chunked = request if end < request.prompt else None
        return end, self.component.planner.plan_prefill(request, room=5)

    def _next_chunk(self, request: Request) -> dict[str, Any] | None:
        """Continue a prompt as Scheduler.stash_chunked_request and PrefillAdder.add_chunked_req do.

        A lack of memory aborts the request here.
        """
        self._insert(request)
        begin = len(request.prefix_indices)
        if not self._make_room(-(-request.prompt // BLOCK) - begin // BLOCK):
            self._abort(request)
            return None
        assert begin == request.computed
        end, taken = self._chunk(request, begin)
        return self._step(request, begin, end, 0, taken)

    def _step(
        self, request: Request, begin: int, end: int, source: int, snapshots: list[tuple[int, int]]
    ) -> dict[str, Any]:
        row = self.pool.req_to_token[request.req_pool_idx]
        return {
            "request": request,
            "rid": request.rid,
            "tokens": np.array(request.full_untruncated_fill_ids),
            "blocks": (row[: request.allocated : BLOCK] // BLOCK).numpy(),
            "begin": begin,
            "end": end,
            "source": source,
            "snapshots": snapshots,
        }

    def _decode(self, request: Request) -> dict[str, Any] | None:
        """Decode several tokens at once, at most up to the end of the block, so that many steps end blocks."""
        begin = request.computed
        end = min(begin + self.rng.choice([1, 40, BLOCK]), begin // BLOCK * BLOCK + BLOCK)
        if end > request.allocated and not self._make_room(1):
            if self.rng.random() < 0.5:
                self.retract(request)
            return None
        self._allocate(request, end)
        request.output_ids.extend([200 + at % 7 for at in range(begin, end)])
        request.computed = end
        taken = []
        if end % BLOCK == 0:
            slot = self.component.planner.plan_decode(request, end)
            taken = [(end, slot)] if slot else []
        elif begin % BLOCK == 0:
            self.component.planner.free_replaced(request)
        return self._step(request, begin, end, 0, taken)

    def _process(self, batch: list[tuple[Request, str]], done: Event) -> None:
        done.synchronize()
        for request, kind in batch:
            if request not in self.running:
                continue
            dice = self.rng.random()
            if dice < self.aborts:
                self._abort(request)
            elif kind == "prefill":
                request.decoding = True
                if dice < 0.3:
                    self.finish(request)
                else:
                    self._insert(request)
            elif kind == "decode" and (dice < 0.25 or request.computed >= request.prompt + LONGEST_ANSWER - BLOCK):
                self.finish(request)  # while the next step runs, which includes it

    def finish(self, request: Request) -> None:
        self.history.append(list(request.full_untruncated_fill_ids))
        del self.history[:-6]
        request.over = True
        self._release(request, is_insert=True)

    def _abort(self, request: Request) -> None:
        self.done["aborted"] += 1
        if request is self.chunked:
            self.chunked = None
        self._release(request, is_insert=False)

    def retract(self, request: Request) -> None:
        self.done["retracted"] += 1
        self._release(request, is_insert=True)
        self.cache.retracted(request)

    def flush(self) -> bool:
        """Flush a server without requests and copies. Return False if it has any."""
        cache = self.cache
        under_way = cache.ongoing_write_through, cache.ongoing_load_back, cache.ongoing_prefetch, cache.ongoing_backup
        if self.running or self.waiting or self.last or any(under_way):
            return False
        self.done["flushed"] += 1
        self._empty()
        return True

    def settle(self) -> None:
        """Finish all requests and copies."""
        if self.last is not None:
            self._process(*self.last)
            self.last = None
        for _, name in self.waiting:
            self.cache.release_aborted_request(name)
        self.waiting.clear()
        if self.chunked is not None:
            self._abort(self.chunked)
        for request in list(self.running):
            if not request.decoding:
                request.decoding = True
                self._insert(request)
            self.finish(request)
        for _ in range(100_000):
            self.streams.run_all()
            self.cache.check_hicache_events()
            if not (self.cache.ongoing_write_through or self.cache.ongoing_load_back or self.cache.ongoing_backup):
                return
            if self.cache.ongoing_backup:
                time.sleep(0.001)  # a thread of SGLang writes
        raise AssertionError("copies that never end")

    # Invariants

    def check(self) -> None:
        """Assert that every block, slot and row has one owner, and that the registry agrees with the tree."""
        found = audit(self.cache, self.running)
        assert not found.findings, str(found)
        self.check_events()
        self.check_orders()
        self.check_pins()
        cache = self.cache
        for node in cache.tree_core._collect_all_nodes():
            if (
                cache.evictions.is_end(node)
                and cache.evictions.row(node) is None
                and cache.evictions.is_evictable(node)
            ):
                assert node in cache.evictions.dangling, f"blocks of node {node.id} are on the host behind no snapshot"

    def check_contents(self) -> None:
        """Assert the contents of all cached blocks and snapshots on the device and the host, while nothing runs."""
        host_blocks, host_states = (
            pool.kv_buffer.view(torch.int64) for pool in (self.cache.full_kv_pool_host, self.cache.mamba_pool_host)
        )
        for node in self.cache.tree_core._collect_all_nodes():
            if node is self.cache.tree_core.root_node:
                continue
            path = self.tokens_of(node)
            tokens = torch.tensor(path[len(path) - len(node.key) :]).view(-1, BLOCK)
            full, mamba = (node.component_data[kind] for kind in (ComponentType.FULL, ComponentType.MAMBA))
            for i, layer in enumerate(WITH_BLOCKS):
                if full.value is not None:
                    assert torch.equal(self.device.tokens[layer][full.value[::BLOCK] // BLOCK], tokens)
                if full.host_value is not None:
                    on_host = host_blocks[full.host_value[::BLOCK] // BLOCK]
                    assert torch.equal(on_host[:, i * BLOCK : (i + 1) * BLOCK], tokens)
            if mamba.value is not None:
                assert (self.states.states[int(mamba.value)] == state_of(path)).all()
            if mamba.host_value is not None:
                assert (host_states[int(mamba.host_value), :LAYERS] == state_of(path)).all()
