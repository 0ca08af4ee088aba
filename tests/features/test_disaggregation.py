"""The data that a prefill server transfers to a decode server, and that a retraction saves, compared byte by byte.

No server runs. A transfer copies the buffers that the pools declare, as SGLang's Mooncake backend does.
"""

from __future__ import annotations

import ctypes
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Event, Semaphore, Thread, active_count
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    build_transfer_entry_pairs,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.common import kv_to_page_indices
from torch import Tensor

from dsv4_sglang.cache import CacheLayout
from dsv4_sglang.formats import kv_entries
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt.features import disaggregation
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool, StateParams, StateSlotPool
from dsv4_sglang.srt.memory.served_layout import served_layout

BLOCK = 128
FP8 = torch.float8_e4m3fn
# dtype of --kv-cache-dtype, options, draft tokens.
FORMATS: dict[str, tuple[torch.dtype, Options, int]] = {
    "fp8": (FP8, Options(), 0),
    "bf16": (torch.bfloat16, Options(indexer_format="nvfp4"), 0),
    "fp32": (torch.bfloat16, Options(entry_format="fp32", indexer_format="fp32"), 0),
    "drafts": (FP8, Options(), 4),
}


def make_layout(name: str) -> CacheLayout:
    """Return a layout of two SWA layers, two CSA layers and one HCA layer.

    With drafts it includes the draft model's layer.
    """
    dtype, options, drafts = FORMATS[name]
    layers = 1 if drafts else 0
    whole = served_layout(DSV4Config.flash(), dtype, options, "cpu", draft_tokens=drafts, draft_layers=layers)
    schemas = whole.schemas[:5] + (whole.schemas[-1:] if drafts else ())
    return CacheLayout(schemas, whole.device, draft_layers=layers)


def make_pool(layout: CacheLayout, blocks: int, slots: int, snapshots: int = 2) -> CacheKVPool:
    params = StateParams.of(layout, staging=1, snapshots=snapshots)
    layers = list(range(len(layout.schemas)))
    state = StateSlotPool(size=slots, cache_params=params, mamba_layer_ids=layers, device="cpu")
    tokens = (blocks - 1) * BLOCK
    dtype = torch.bfloat16 if layout.ring_format is not kv_entries.KVFormat.FP8 else FP8
    compressed = CompressedKVPool(size=tokens, page_size=BLOCK, dtype=dtype, layout=layout, device="cpu")
    return CacheKVPool(compressed, state)


def memory(pool: CacheKVPool) -> list[Tensor]:
    """Return all allocations as bytes, including padding and snapshots."""
    tables = [table for paged in pool.full_kv_pool.pools if paged for table in (paged.entries, paged.index_keys)]
    owners = [*(table for table in tables if table is not None), *pool.mamba_pool.storage.tensors]
    return [torch.empty(0, dtype=torch.uint8).set_(owner.untyped_storage()) for owner in owners]


def scribble(pool: CacheKVPool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for data in memory(pool):
        data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))


def blocks_of(pool: CacheKVPool, blocks: Sequence[int]) -> list[Tensor]:
    return [
        view[list(blocks)].clone().view(torch.uint8)
        for paged in pool.full_kv_pool.pools
        if paged is not None
        for view in paged.block_views()
    ]


def slot_of(pool: CacheKVPool, slot: int) -> list[Tensor]:
    return [table[slot].view(torch.uint8).clone() for tensor in pool.mamba_pool.storage.tensors for table in tensor]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


def described(pool: CacheKVPool) -> KVArgs:
    """Return the buffers of a pool as SGLang's queues declare them."""
    args = KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
    args.kv_layer_ids = pool.get_kv_layer_ids()
    setup_state_kv_args(args, pool)
    return args


def transfer(source: KVArgs, target: KVArgs, blocks: Sequence[int], to: Sequence[int], slot: int, to_slot: int) -> None:
    """Copy blocks and a slot."""
    assert source.state_types == target.state_types == [StateType.MAMBA]
    pointers = (source.kv_data_ptrs, target.kv_data_ptrs), (source.state_data_ptrs[0], target.state_data_ptrs[0])
    layers = (source.kv_layer_ids, target.kv_layer_ids), (source.state_layer_ids[0], target.state_layer_ids[0])
    sizes, moved = (source.kv_item_lens, source.state_item_lens[0]), (list(zip(blocks, to)), [(slot, to_slot)])
    for (ours, theirs), of_layers, size, pairs in zip(pointers, layers, sizes, moved):
        for i, j in build_transfer_entry_pairs(*of_layers, len(ours), len(theirs)):
            for here, there in pairs:
                ctypes.memmove(theirs[j] + there * size[i], ours[i] + here * size[i], size[i])


@pytest.fixture(params=[16, 576], ids=["", "SM100's padding"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_entries, "_BLOCK_ALIGNMENT", request.param)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_and_slot_are_transferred(name: str) -> None:
    """The target pools have other sizes, and all other blocks and slots keep their bytes."""
    layout = make_layout(name)
    prefill, decode = make_pool(layout, 9, 3), make_pool(layout, 6, 7, snapshots=0)
    scribble(prefill, 1)
    scribble(decode, 2)
    untouched = blocks_of(decode, [0, 1, 3, 5]), [slot_of(decode, slot) for slot in (0, 1, 2, 3, 4, 5, 7)]
    transfer(described(prefill), described(decode), [7, 3], [2, 4], 2, 6)
    assert same(blocks_of(decode, [2, 4]), blocks_of(prefill, [7, 3]))
    assert same(slot_of(decode, 6), slot_of(prefill, 2))
    now = blocks_of(decode, [0, 1, 3, 5]), [slot_of(decode, slot) for slot in (0, 1, 2, 3, 4, 5, 7)]
    assert same(now[0], untouched[0]) and all(same(a, b) for a, b in zip(now[1], untouched[1]))


@pytest.mark.parametrize("name", FORMATS)
def test_buffers_equal_the_layout(name: str) -> None:
    """The bytes of a block and of a slot equal the layout's. Each buffer is in one allocation, and no two overlap."""
    layout = make_layout(name)
    pool = make_pool(layout, 5, 3)
    args = described(pool)
    assert sum(args.kv_item_lens) == layout.block_bytes
    assert sum(args.state_item_lens[0]) == layout.slot_bytes
    assert len(args.kv_layer_ids) == len(args.kv_data_ptrs) == len(args.kv_item_lens)
    assert len(args.state_layer_ids[0]) == len(args.state_data_ptrs[0])
    assert [size * 5 for size in args.kv_item_lens] == args.kv_data_lens
    # Slots of requests, the dummy slot, and one staging slot.
    assert [size * 5 for size in args.state_item_lens[0]] == args.state_data_lens[0]
    ranges = sorted(
        (at, at + size)
        for ats, sizes in (
            (args.kv_data_ptrs, args.kv_data_lens),
            (args.state_data_ptrs[0], args.state_data_lens[0]),
        )
        for at, size in zip(ats, sizes)
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    allocations = [(data.data_ptr(), data.data_ptr() + data.numel()) for data in memory(pool)]
    assert all(any(first <= begin and end <= last for first, last in allocations) for begin, end in ranges)


def test_no_buffer_is_transferred_twice() -> None:
    """SGLang adds the buffers of the draft model's pool, which is the pool of the model here."""
    args = described(pool := make_pool(make_layout("drafts"), 3, 2))
    disaggregation.require_distinct_buffers(args)
    args.kv_data_ptrs += pool.get_contiguous_buf_infos()[0]
    with pytest.raises(RuntimeError, match=f"only .* of {len(args.kv_data_ptrs) + len(args.state_data_ptrs[0])} buff"):
        disaggregation.require_distinct_buffers(args)


def test_sglang_takes_a_layers_buffers_one_by_one() -> None:
    """The buffers are not pairs of keys and values, and each process has whole buffers."""
    args = described(pool := make_pool(make_layout("fp8"), 3, 2))
    for ours in (pool, pool.full_kv_pool):
        assert disaggregation.is_mla(lambda _: False, ours)
    assert not disaggregation.is_mla(lambda _: False, object()) and disaggregation.is_mla(lambda _: True, object())
    assert args.state_dim_per_tensor == [[]], "SGLang would cut slots for other numbers of processes"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_retracted_request_is_restored(name: str, tokens: int) -> None:
    """A request is restored to other blocks and another slot after its own were overwritten, with the same bytes."""
    pool = make_pool(make_layout(name), 9, 3)
    scribble(pool, 1)
    count = -(-tokens // BLOCK)
    own, later = [5, 2, 7][:count], [3, 8, 1][:count]
    was = blocks_of(pool, own), slot_of(pool, 2)
    indices, others = (
        (torch.tensor(ids)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:tokens].int() for ids in (own, later)
    )
    assert kv_to_page_indices(indices, BLOCK).tolist() == own
    copy = pool.get_cpu_copy(indices, mamba_indices=torch.tensor(2))
    scribble(pool, 2)
    rest = [block for block in range(9) if block not in later]
    untouched = blocks_of(pool, rest), slot_of(pool, 1), slot_of(pool, 2)
    pool.load_cpu_copy(copy, others, mamba_indices=torch.tensor(3))
    assert same(blocks_of(pool, later), was[0])
    assert same(slot_of(pool, 3), was[1])
    assert all(same(a, b) for a, b in zip((blocks_of(pool, rest), slot_of(pool, 1), slot_of(pool, 2)), untouched))


class Manager(SimpleNamespace):
    """The part of SGLang's manager on a decode server that the hook reads."""

    def __init__(self, address: str) -> None:
        self.failures: dict[int, str] = {}
        self.status: dict[int, Any] = {}
        self.addr_to_rooms_tracker = {address: {4, 5}, "b:2": {6}}
        self.local_ip, self.rank_port = "127.0.0.1", 9

    def record_failure(self, room: int, reason: str) -> None:
        self.failures[room] = reason

    def update_status(self, room: int, status: Any) -> None:
        self.status[room] = status


@pytest.fixture
def prefill_server() -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """Yield the bootstrap address of a prefill server, and the socket that receives messages to its processes."""
    with zmq.Context() as context, context.socket(zmq.PULL) as heard:
        heard.setsockopt(zmq.RCVTIMEO, 60_000)
        port = heard.bind_to_random_port("tcp://127.0.0.1")

        class Route(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"rank_ip": "127.0.0.1", "rank_port": port}).encode())

        with ThreadingHTTPServer(("127.0.0.1", 0), Route) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            yield f"127.0.0.1:{server.server_port}", heard
            server.shutdown()
            thread.join()


def test_prefill_abort_is_sent_until_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may arrive at the prefill server after its end here, and that server may be unreachable for a while."""
    now = 1000.0
    monkeypatch.setattr(disaggregation, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "90")
    notice, told = disaggregation._Notice.of(Manager("a:1"), {7}), []
    while notice.rooms:
        now = notice.due
        told.append(now - 1000)
        notice.wait_again()
    assert told[:4] == [0, 0.5, 2.5, 10.5]
    assert 90 <= told[-1] <= 90 + 30 and max(b - a for a, b in pairwise(told)) <= 30


def test_addresses_of_requests_bound_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client names many prefill servers, none of which answers, and many requests of one of them."""
    begun, go_on = Semaphore(0), Event()

    def notify(manager: Any, bootstrap_addr: str, rooms: set[int]) -> None:
        begun.release()
        go_on.wait()
        raise requests.ConnectionError

    def mismatch(manager: Any, bootstrap_addr: str) -> bool:
        raise RuntimeError("KV cache dtype mismatch")

    monkeypatch.setattr(disaggregation, "_notify_prefill_server", notify)
    monkeypatch.setattr(disaggregation, "_rejected", {})
    monkeypatch.setattr(disaggregation, "_notifier", notifier := disaggregation.FailureNotifier())
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "-30")  # no repetition
    threads = active_count()
    for address in [f"{i}:1" for i in range(300)]:
        disaggregation.reject_other_caches(mismatch, Manager(address), address)
    for _ in range(disaggregation.MAX_THREADS):
        assert begun.acquire(timeout=60)
    assert active_count() - threads == disaggregation.MAX_THREADS
    assert len(notifier._notices) == len(disaggregation._rejected) == disaggregation.MAX_ADDRESSES
    assert "299:1" in notifier._notices and "299:1" in disaggregation._rejected, "the newest ones are kept"
    for first in range(0, 3 * disaggregation.MAX_ROOMS, 1000):
        notifier.add(Manager("299:1"), "299:1", range(first, first + 1000))
    assert len(notifier._notices["299:1"].rooms) == disaggregation.MAX_ROOMS
    go_on.set()
    for _ in range(disaggregation.MAX_ADDRESSES):
        assert begun.acquire(timeout=60)
    for thread in enumerate_threads():
        if getattr(thread, "_target", None) == notifier._run:
            thread.join(60)
    assert active_count() == threads and not notifier._notices, "threads end when there is nothing to do"


def test_a_rejected_address_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(disaggregation, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(disaggregation, "_rejected", {})
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "90")
    disaggregation._remember("a:1", "another cache")
    manager = Manager("a:1")
    for room, clock.now in ((1, 1120.0), (2, 1121.0), (3, 1000.0)):
        disaggregation.record_failure_reason(lambda *_: None, object(), manager, "a:1", room)
    assert list(manager.failures) == [1]


def test_requests_of_another_cache_fail(
    prefill_server: tuple[str, zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fails on both servers. The decode server notifies the prefill server more than once."""
    monkeypatch.setattr(disaggregation, "FIRST_NOTIFICATIONS", (0, 0.01))
    monkeypatch.setattr(disaggregation, "_rejected", {})
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "0")

    def mismatch(manager: Any, bootstrap_addr: str) -> bool:
        raise RuntimeError("KV cache dtype mismatch: prefill server has kv_cache_dtype=x (fp8 rows)")

    address, heard = prefill_server
    manager = Manager(address)
    assert disaggregation.reject_other_caches(lambda *_: True, manager, address) and not manager.failures
    assert not disaggregation.reject_other_caches(mismatch, manager, address)
    assert manager.status == {4: KVPoll.Failed, 5: KVPoll.Failed}
    assert all(f"{address} has another cache" in text and "(fp8 rows)" in text for text in manager.failures.values())
    assert manager.addr_to_rooms_tracker == {"b:2": {6}}
    waiting, begun = Manager(address), lambda *_: None
    disaggregation.record_failure_reason(begun, object(), waiting, address, 7)
    disaggregation.record_failure_reason(begun, object(), waiting, "another:1", 8)
    assert list(waiting.failures) == [7] and "has another cache" in waiting.failures[7] and not waiting.status
    assert disaggregation.reject_other_caches(lambda *_: True, manager, address)
    disaggregation.record_failure_reason(begun, object(), waiting, address, 9)
    assert 9 not in waiting.failures, "a prefill server that came in its place"
    told = [heard.recv_multipart() for _ in range(4)]
    assert sorted(told) == 2 * [[b"ABORT", b"4", b"127.0.0.1", b"9"]] + 2 * [[b"ABORT", b"5", b"127.0.0.1", b"9"]]


def test_caches_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    flash, pro = DSV4Config.flash(), DSV4Config.pro()

    def name(dtype: torch.dtype = FP8, model: DSV4Config = flash, drafts: int = 0, **options: Any) -> str:
        sm100 = options.pop("sm100", False)
        layers = 1 if drafts else 0
        layout = served_layout(model, dtype, Options(**options), "cpu", sm100, draft_tokens=drafts, draft_layers=layers)
        return disaggregation.cache_name(layout, model)

    others = [name(torch.bfloat16), name(model=pro), name(drafts=4), name(sm100=True)]
    others += [name(indexer_format="nvfp4")]
    # A model with the same bytes per block and slot, and other contents.
    others.append(name(model=replace(flash, rope_theta=2 * flash.rope_theta)))
    # Options that may differ between the servers.
    assert name(snapshot_interval=128, max_snapshots=9) == name()
    monkeypatch.setattr(disaggregation, "__version__", "9.9")
    others.append(name())
    monkeypatch.undo()
    assert len({name(), *others}) == 1 + len(others)
    assert "fp8 entries, mxfp4 keys, 0 draft tokens, model and bytes " in name()


@pytest.mark.parametrize(
    ("mode", "overlap", "fits", "settled"),
    [
        (DisaggregationMode.DECODE, True, False, True),
        (DisaggregationMode.DECODE, True, True, False),
        (DisaggregationMode.NULL, True, False, False),
    ],
)
def test_retraction_waits_for_the_running_step(
    mode: DisaggregationMode, overlap: bool, fits: bool, settled: bool
) -> None:
    done: list[tuple[str, Any]] = []
    running = [SimpleNamespace(finished=lambda: False), SimpleNamespace(finished=lambda: True)]
    batch = SimpleNamespace(reqs=running, check_decode_mem=lambda selected: fits or selected != [0])
    last, queue = object(), deque([("batch", "result")])
    scheduler = SimpleNamespace(
        disaggregation_mode=mode,
        enable_overlap=overlap,
        last_batch=last,
        result_queue=queue,
        process_batch_result=lambda batch, result: done.append(("result", result)),
    )

    disaggregation.finish_step_before_retraction(lambda _, batch: done.append(("update", batch)), scheduler, batch)
    assert done == [*([("result", "result")] if settled else []), ("update", batch)]
    assert scheduler.last_batch is (None if settled else last) and len(queue) == (0 if settled else 1)
