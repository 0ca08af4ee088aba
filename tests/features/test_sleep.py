"""Tests of sleep, wake-up and weight updates without a server: which memory is released, restored and invalidated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import io_struct
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, without_a_server
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_sglang.cache import CacheLayout, v4_specs
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.srt.features import sleep
from dsv4_sglang.srt.features.control_requests import FatalError
from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool, StateParams, StateReqToTokenPool

POLICIES = ("write_through", "write_through_selective", "write_back")


def layout_of(rows: str) -> CacheLayout:
    config = DSV4Config.flash()
    schedule = build_schedule(config)[:4]  # A layer of each kind.
    keys = "fp32" if rows == "fp32" else "mxfp4"
    specs = v4_specs(config, schedule, kv_format=rows, key_format=keys, hca_state="online")
    return CacheLayout(specs, torch.device("cpu"))


def memory_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


# Regions of allocations


class Recorder(TorchDispatchMode):
    """Fake of torch_memory_saver that records the memory of every tensor made within a region. Nothing is released on a
    CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: set[int] = set()
        self.keep: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.inside.add(made.untyped_storage().data_ptr())
            self.keep.append(made)  # Keeps the address from being reused by another tensor.
        return made

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        assert tag == GPU_MEMORY_TYPE_KV_CACHE and not enable_cpu_backup
        with self:
            yield


def tensors_of(thing: object) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in an object of this package's or SGLang's pools, at any depth, with its path."""
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("", thing)]
    while stack:
        path, item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield path, item
        elif isinstance(item, dict):
            stack += [(f"{path}[{key}]", value) for key, value in item.items()]
        elif isinstance(item, (list, tuple, set)):
            stack += [(f"{path}[{i}]", value) for i, value in enumerate(item)]
        elif type(item).__module__.startswith(("dsv4_sglang", "sglang")) and hasattr(item, "__dict__"):
            stack += [(f"{path}.{name}", value) for name, value in vars(item).items()]


# Tensors that stay allocated while a server sleeps.
KEPT = {
    ".req_index_to_mamba_index_mapping": "which slot a request has: SGLang's, 4 bytes a request",
    ".mamba_allocator.free_slots": "SGLang's, 8 bytes a slot",
    ".mamba_ckpt_pool._ids": "numbers of snapshots as a step reads them, 8 bytes a snapshot",
    ".mamba_ckpt_pool._host_ids": "host memory",
    ".req_generation": "host memory",
    ".req_index_to_mamba_ping_pong_track_buffer_mapping": "SGLang's, 16 bytes a request",
}


@pytest.mark.parametrize("rows", ["fp8", "fp32"])
def test_all_pools_are_released(monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    """The request pool and the KV pool release all memory but a few bytes per request."""
    recorder, asked = Recorder(), []
    noop = TorchMemorySaverAdapter.create(enable=False)

    def create(enable: bool) -> Any:
        asked.append(enable)
        return recorder if enable else noop

    monkeypatch.setattr(TorchMemorySaverAdapter, "create", staticmethod(create))
    layout = layout_of(rows)
    requests = StateReqToTokenPool(
        size=4,
        mamba_size=4,
        mamba_spec_state_size=4,
        max_context_len=1024,
        device="cpu",
        enable_memory_saver=True,
        cache_params=StateParams.of(layout, staging=2, snapshots=6),
        mamba_layer_ids=list(range(len(layout.schemas))),
        enable_mamba_extra_buffer=False,
    )
    blocks = CompressedKVPool(
        size=8 * BLOCK, page_size=BLOCK, dtype=torch.bfloat16, layout=layout, device="cpu", enable_memory_saver=True
    )
    pool = CacheKVPool(blocks, requests.mamba_pool)
    assert asked and all(asked)
    found = {path: tensor for thing in (requests, pool) for path, tensor in tensors_of(thing) if tensor.nbytes}
    outside = {path: t for path, t in found.items() if t.untyped_storage().data_ptr() not in recorder.inside}
    assert set(outside) <= set(KEPT), set(outside) - set(KEPT)
    given = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found.values()}
    for tensor in outside.values():
        given.pop(tensor.untyped_storage().data_ptr(), None)
    tables = requests.mamba_pool.storage._live_units.nbytes + requests.mamba_pool.storage._snapshot_units.nbytes
    table = requests.mamba_pool.bytes + blocks.bytes
    assert sum(given.values()) == table + requests.req_to_token.nbytes + tables, "not what the start-up table counts"


# Restored memory


@pytest.mark.parametrize("rows", ["fp8", "fp32"])
def test_restored_pools_equal_new_ones(rows: str) -> None:
    """After a reset the memory, index tables included, is at the same addresses and equals that of a new pool."""
    layout = layout_of(rows)
    makers = [partial(PagedKVPool, schema, 4, "cpu") for schema in layout.schemas if schema.entries_per_block]
    makers.append(partial(StateStorage, layout, 5, snapshots=3))
    for make in makers:
        fresh, slept = make(), make()
        addresses = [tensor.data_ptr() for tensor in slept.allocations]
        assert {memory_of(t).data_ptr() for _, t in tensors_of(slept)} == {*addresses}
        for tensor in slept.allocations:
            memory_of(tensor).fill_(0xA5)
        slept.reset()
        assert addresses == [tensor.data_ptr() for tensor in slept.allocations]
        for ours, other in zip(slept.allocations, fresh.allocations, strict=True):
            assert torch.equal(memory_of(ours), memory_of(other))


# The host cache


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(TorchMemorySaverAdapter, "create", staticmethod(lambda enable: recorder))
    return recorder


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> pytest.MonkeyPatch:
    without_a_server(monkeypatch)
    return monkeypatch


def spoil(server: HostCacheServer) -> None:
    """Overwrite device memory, whose contents are undefined after wake-up."""
    for table in server.device.tokens.values():
        table.fill_(-7)
    server.states.states[:] = -7


def test_host_cache_keeps_its_buffers(tree: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Wake-up does not reset the host cache, so the tensors that its copies read on the device must stay allocated."""
    server = HostCacheServer(tree, seed=2)
    pools = server.cache.cache_controller.mem_pool_host
    held = dict(tensors_of(pools))
    assert any("_numbers" in path for path in held)
    lost = [path for path, tensor in held.items() if tensor.untyped_storage().data_ptr() in recorder.inside]
    assert not lost


def serve_only(server: HostCacheServer, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Serve a request to its end with copies to the host queued or in flight. Checking for events lets them
    continue."""
    server.finish(server.start(tokens)["request"])
    look = server.cache.check_hicache_events
    monkeypatch.setattr(server.cache, "check_hicache_events", lambda: (server.streams.run_all(), look()))


@pytest.mark.parametrize("policy", POLICIES)
def test_released_states_are_saved_to_the_host(tree: pytest.MonkeyPatch, policy: str) -> None:
    """Unsaved states are saved before memory is released, and requests resume from the host after wake-up."""
    server = HostCacheServer(tree, seed=3, policy=policy, blocks=30, host_blocks=200)
    prompts = [[line * 50 + at // BLOCK for at in range(5 * BLOCK + 40)] for line in range(1, 5)]
    for ids in prompts:
        server.serve(ids)
        server.serve(ids)
    for turn in range(2):
        if turn:
            # SELECTIVE saves the ends of conversation branches.
            prompts.append([900 + at // BLOCK for at in range(5 * BLOCK + 40)])
            serve_only(server, tree, prompts[-1])
        with server.cache.keep_host_cache():
            assert server.flush()
        server.check()
        assert server.allocator.available_size() == server.device.size
        assert server.component.slots.available_size() == server.component.slots.num_slots
        spoil(server)
        before = server.from_host
        for ids in prompts:
            assert server.serve(ids) == 5 * BLOCK
        assert server.from_host - before == len(prompts) * 5 * BLOCK
        assert not server.wrong
        server.check()
        server.check_contents()
    assert server.flush()
    server.check()
    spoil(server)
    assert [server.serve(ids) for ids in prompts] == [0] * len(prompts), "a flush did not empty the host cache"


def test_small_host_keeps_the_most_valuable_snapshots(tree: pytest.MonkeyPatch) -> None:
    """The host keeps the two conversations that were reused, which it had copied before the device releases its memory.
    Nothing is copied that a later copy would evict."""
    server = HostCacheServer(tree, seed=4, blocks=40, host_blocks=12, host_snapshots=3)
    prompts = [[line * 50 + at // BLOCK for at in range(5 * BLOCK + 40)] for line in range(1, 7)]
    for ids in [*prompts, prompts[1], prompts[4], prompts[1], prompts[4]]:
        server.serve(ids)
    before = server.cache.full_kv_pool_host.saved_rows
    with server.cache.keep_host_cache():
        assert server.flush()
    assert server.cache.full_kv_pool_host.saved_rows - before <= 12
    spoil(server)
    server.check()
    assert server.allocator.available_size() == server.device.size
    assert [server.serve(prompts[line]) for line in (1, 4, 0)] == [5 * BLOCK, 5 * BLOCK, 0]
    assert not server.wrong


def test_random_turns_with_sleep(tree: pytest.MonkeyPatch) -> None:
    server = HostCacheServer(tree, seed=5)
    for i in range(200):
        server.turn()
        assert not server.wrong
        if i % 40 == 39:
            server.settle()
            with server.cache.keep_host_cache():
                assert server.flush()
            spoil(server)
            server.check()
    server.settle()
    server.check()
    server.check_contents()


# New weights


class Scheduler:
    """Fake scheduler with the attributes that the hooks of `sleep` use. `released` and `flushed` count calls."""

    disaggregation_mode = DisaggregationMode.NULL
    _engine_paused = False

    def __init__(self, server: HostCacheServer) -> None:
        self.server, self.tree_cache = server, server.cache
        self.waiting_queue: list[Any] = [
            SimpleNamespace(rid="waits", cache_request_handle=CacheRequestHandle("waits", 0))
        ]
        self.grammar_manager = SimpleNamespace(grammar_queue=["compiles"])
        self.flushed = self.retracted = 0
        runner = SimpleNamespace(attn_backend=SimpleNamespace(free_scratch=lambda: None))
        self.weight_updater = SimpleNamespace(
            scheduler=self,
            offload_tags=set(),
            flush_cache=self.flush,
            tp_cpu_group=None,
            draft_worker=None,
            memory_saver_adapter=SimpleNamespace(enabled=True),
            tp_worker=SimpleNamespace(model_runner=runner),
        )

    def flush(self, empty_cache: bool) -> bool:
        assert not self.waiting_queue and not self.grammar_manager.grammar_queue, "a flush while requests wait"
        self.flushed += 1
        return self.server.flush()

    def is_fully_idle(self) -> bool:
        assert not self.waiting_queue and not self.grammar_manager.grammar_queue
        return self.disaggregation_mode is DisaggregationMode.NULL

    def pause_generation(self, recv_req: Any) -> None:
        assert recv_req.mode == "retract"
        self._engine_paused, self.retracted = True, self.retracted + 1


REQUESTS = (
    io_struct.UpdateWeightFromDiskReqInput(model_path="x"),
    io_struct.UpdateWeightsFromDistributedReqInput(names=[], dtypes=[], shapes=[]),
    io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[]),
    io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={}),
)
PROMPT = [1 + at // BLOCK for at in range(5 * BLOCK + 60)]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("flush_cache", "end"), [(False, "success"), (True, "an error")])
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_weight_update_invalidates_the_cache(
    tree: pytest.MonkeyPatch, tmp_path: Path, group: None, request_: Any, flush_cache: bool, end: str
) -> None:
    """A weight update invalidates device, host and storage for every kind of update, flush flag and outcome. A server
    that restarts with the old weights does not find pages of the new ones."""
    tree.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    server = HostCacheServer(tree, seed=6, storage="file")
    scheduler = Scheduler(server)
    server.serve(PROMPT)
    assert server.serve(PROMPT) == 5 * BLOCK and list(tmp_path.glob("*.bin"))

    serve_only(server, tree, [77] * 300)
    server.cache.check_hicache_events()
    assert server.cache.ongoing_write_through

    def original(updater: Any, recv_req: Any) -> Any:
        assert not recv_req.flush_cache and not server.cache.ongoing_backup
        if end == "an error":
            raise ValueError("weights of another shape")
        return "done"

    asked = type(request_)(**{f: getattr(request_, f) for f in request_.__struct_fields__})
    asked.flush_cache = flush_cache
    if end == "an error":
        with pytest.raises(ValueError, match="weights of another shape"):
            sleep.update_weights(original, scheduler.weight_updater, asked)
    else:
        assert sleep.update_weights(original, scheduler.weight_updater, asked) == "done"
    assert scheduler.flushed == 1 and not scheduler._engine_paused
    assert [req.rid for req in scheduler.waiting_queue] == ["waits"], "requests that wait are kept"
    assert scheduler.grammar_manager.grammar_queue == ["compiles"]
    spoil(server)
    assert not list(tmp_path.glob("*.bin"))
    assert server.prefetch(PROMPT) == 0
    assert server.serve(PROMPT) == 0
    server.check()
    assert list(tmp_path.glob("*.bin")), "pages of the new weights are stored"
    restarted = HostCacheServer(tree, seed=7, storage="file")
    assert restarted.prefetch(PROMPT) == 0 and restarted.serve(PROMPT) == 0
    # The server that stored the pages finds them until weights change again.
    assert server.flush() and server.prefetch(PROMPT) == 5 * BLOCK
    server.cache.invalidate_storage("others")
    assert len(list(tmp_path.glob("*.bin"))) == 7, "those of the server that was started again stay"


def test_update_of_released_weights_is_rejected(tree: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(HostCacheServer(tree, seed=6))
    scheduler.weight_updater.offload_tags.add("weights")
    for request in REQUESTS:
        answer = sleep.update_weights(print, scheduler.weight_updater, request)
        assert type(answer).__name__ == type(request).__name__.replace("Input", "Output")
        assert not answer.success and "/resume_memory_occupation with the tag weights first" in answer.message


def test_update_with_unretractable_requests_is_rejected(tree: pytest.MonkeyPatch) -> None:
    """On a decode server the cache of the old weights could not be flushed after the update."""
    scheduler = Scheduler(HostCacheServer(tree, seed=6))
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    for request in REQUESTS:
        with pytest.raises(ValueError, match="while requests run on a server with --disaggregation-mode decode"):
            sleep.update_weights(print, scheduler.weight_updater, request)
    assert not scheduler.flushed and [req.rid for req in scheduler.waiting_queue] == ["waits"]


def test_a_cache_that_cannot_be_flushed_is_fatal(tree: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(HostCacheServer(tree, seed=6))
    scheduler.weight_updater.flush_cache = lambda empty_cache: False
    with pytest.raises(FatalError):
        sleep.update_weights(lambda updater, request: None, scheduler.weight_updater, REQUESTS[0])


# Scheduling while memory is released


def test_nothing_is_paused_without_a_memory_saver(tree: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(HostCacheServer(tree, seed=8))
    scheduler.weight_updater.memory_saver_adapter.enabled = False
    with pytest.raises(ValueError, match="started without --enable-memory-saver"):
        sleep.release_memory(print, scheduler.weight_updater, io_struct.ReleaseMemoryOccupationReqInput())
    assert not scheduler._engine_paused and not scheduler.retracted


@pytest.mark.parametrize("paused", [False, True])
def test_failed_release_pauses_nothing(tree: pytest.MonkeyPatch, paused: bool) -> None:
    def fail(updater: Any, recv_req: Any) -> None:
        raise RuntimeError("not idle")

    scheduler = Scheduler(HostCacheServer(tree, seed=8))
    scheduler._engine_paused = paused
    with pytest.raises(RuntimeError, match="not idle"):
        sleep.release_memory(fail, scheduler.weight_updater, io_struct.ReleaseMemoryOccupationReqInput())
    assert scheduler._engine_paused == paused


@pytest.mark.parametrize("paused", [False, True])
def test_earlier_pause_outlasts_sleep(tree: pytest.MonkeyPatch, paused: bool) -> None:
    """The scheduler is paused while memory is released, and then returns to its previous state."""
    scheduler = Scheduler(HostCacheServer(tree, seed=8))
    updater, done = scheduler.weight_updater, list[str]()
    pool = SimpleNamespace(reset=lambda: done.append("reset"))
    runner = updater.tp_worker.model_runner
    runner.req_to_token_pool = SimpleNamespace(req_to_token=torch.ones(2, 2), mamba_pool=pool)
    runner.token_to_kv_pool = SimpleNamespace(full_kv_pool=pool)
    scheduler._engine_paused = paused
    release, resume = io_struct.ReleaseMemoryOccupationReqInput(), io_struct.ResumeMemoryOccupationReqInput()
    sleep.release_memory(lambda _, request: updater.offload_tags.update(request.tags), updater, release)
    assert scheduler._engine_paused and scheduler.retracted == 1
    sleep.resume_memory(lambda _, request: updater.offload_tags.difference_update(request.tags), updater, resume)
    assert scheduler._engine_paused == paused and done == ["reset", "reset"]
    assert not runner.req_to_token_pool.req_to_token.any()
