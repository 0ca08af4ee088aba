"""Tests of `KVCacheManager` and its handles: ownership of slots and blocks, and isolation between concurrent
requests."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from standalone_harness import (
    CONFIG,
    EPS,
    EXACT,
    LONGEST,
    Layer,
    Request,
    all_bytes,
    alone,
    block_views,
    check,
    make_manager,
    run_step,
)
from torch import Tensor

from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.ops.rope import rms_norm, rotate

FP32 = functools.partial(KVBuffer, format=KVFormat.FP32)


# --- reads of a request -----------------------------------------------------------------------------------------------


def test_one_chunk_against_definitions(device: torch.device) -> None:
    """Window rows are the last 128 normalised and rotated rows, and HCA entry 0 pools tokens 0..127 (SPEC 2.1, 3.3)."""
    manager = make_manager(device, **EXACT)
    request = Request.admit(manager, 0)
    for _ in range(3):
        manager.allocate_block(request.slot)
    n = 300
    at = torch.arange(n, device=device)
    step = manager.begin_step(torch.full_like(at, request.slot), at, torch.zeros_like(at))
    layer = request.layers[2]
    handle = manager.layer(2, step)
    handle.append(layer.inputs["kv"][:n], layer.weights, layer.inputs["kv_score"][:n])
    final = rotate(rms_norm(layer.inputs["kv"][:n], layer.weights.kv_norm, EPS), at, layer.weights.rope)
    view = handle.read_swa_view()
    for t in (0, 1, 126, 127, 128, 299):
        seen = FP32(view.window).read(view.window_indices[t, : int(view.window_lens[t])])
        torch.testing.assert_close(seen, final[max(0, t - 127) : t + 1], atol=1e-6, rtol=1e-6)
    assert view.swa_pos[request.slot].sort().values.tolist() == list(range(172, 300))
    assert int(view.swa_head[request.slot]) == 300 % 128
    assert int(manager.state_pools[2].tail_len[request.slot]) == 300 % 128
    torch.testing.assert_close(FP32(manager.state_pools[2].ring).read(at[172:] % 128), final[172:], atol=1e-6, rtol=0)

    k, z = layer.inputs["kv_score"][:128].split(512, -1)
    pooled = ((z + layer.weights.ape).softmax(0) * k).sum(0, keepdim=True)
    entry = rotate(rms_norm(pooled, layer.weights.entry_norm, EPS), at[:1], layer.weights.rope)
    classical = handle.read_classical_view()
    assert classical.n_visible[[0, 126, 127, 254, 255, 299]].tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(
        FP32(classical.entries).read(classical.entry_indices[127, :1]), entry, atol=1e-5, rtol=1e-5
    )


def test_more_tokens_than_a_cache_for_drafts_takes_are_a_chunk() -> None:
    """Requests with different numbers of tokens are a chunk too. Neither kind of chunk can be rolled back."""
    manager = make_manager(draft_tokens=3, hca_state="online", **EXACT)
    slots = torch.tensor([manager.admit_request(), manager.admit_request()])
    for slot in slots.tolist():
        manager.allocate_block(slot)
    for counts, is_decode in (([1, 1], True), ([3, 3], True), ([4, 4], False), ([2, 3], False), ([3, 1], False)):
        positions = torch.cat([torch.arange(n) for n in counts])
        owner = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        assert manager.begin_step(slots[owner], positions, owner).is_decode == is_decode, counts


@pytest.mark.parametrize("hca_state", ["raw", "online"])
@pytest.mark.parametrize("first", [1, 130])
def test_a_reused_slot_shows_nothing_of_its_last_owner(device: torch.device, first: int, hca_state: str) -> None:
    """A reused slot exposes no data of its previous owner (SPEC 3.8). The slot is filled with NaN in between, so the
    test does not rely on clearing."""
    manager = make_manager(device, slots=1, blocks=3, hca_state=hca_state, **EXACT)
    old = Request.admit(manager, 1)
    run_step(manager, [(old, 200)])
    old.finish(manager)
    new = Request.admit(manager, 0)
    assert new.slot == old.slot
    assert bool((manager.state.swa_pos[:, new.slot] == -1).all())
    for tensor in (manager.state.rings, *manager.state.compressor_states.values()):
        tensor[:, new.slot] = float("nan")
    for pool in manager.paged_pools:
        for table in (pool.entries, pool.index_keys) if pool is not None else ():
            if table is not None:
                table.fill_(float("nan"))
    run_step(manager, [(new, first)])
    run_step(manager, [(new, 1)])
    run_step(manager, [(new, 5)])
    check(new, **EXACT)


@pytest.mark.parametrize("options", [{}, {"kv_format": "bf16"}, {"key_format": "nvfp4", "hca_state": "online"}])
def test_quantised_formats_stay_near(device: torch.device, options: dict[str, str]) -> None:
    """The handles pass each format to the ops: the error stays at the level of SPEC 7.1, far below that of a wrong
    row."""
    manager = make_manager(device, **options)
    request = Request.admit(manager, 0)
    for n in (100, 1, 1, 60):
        run_step(manager, [(request, n)])
    for i, expected in enumerate(alone(((0, 0),), 162, **EXACT)):
        got = torch.cat(request.outputs[i]).cpu()
        # The first 32 tokens see at most 8 entries. All of them are selected, so the key format has no effect.
        tokens = slice(0, 32) if CONFIG.ratio(i) == 4 else slice(None)
        error = (got[tokens] - expected[tokens]).norm() / expected[tokens].norm()
        assert 1e-5 < error < 0.04, (i, float(error))


def test_write_swa(device: torch.device) -> None:
    """Rows are written to the ring of their request in one layer, and the split views return them."""
    manager = make_manager(device)
    a, b = manager.admit_request(), manager.admit_request()
    for slot in (a, b):
        manager.allocate_block(slot)
    raw = torch.randn(7, 512, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    slots = torch.tensor([a] * 5 + [b] * 2, dtype=torch.int32, device=device)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1], dtype=torch.int32, device=device)
    handle = manager.acquire(1, slots, positions, slots)
    handle.write_swa(raw)
    view = handle.read_swa_view()
    at = (slots.long(), positions.long())
    assert torch.equal(view.swa_rope[at], raw[:, 448:])
    read = view.swa_fp8[at].view(torch.float8_e4m3fn).float() * view.swa_inv.float()[at][:, None]
    assert ((read - raw[:, :448].float()).norm(dim=-1) / raw[:, :448].float().norm(dim=-1)).max() < 0.036
    assert view.swa_pos[a, :6].tolist() == [0, 1, 2, 3, 4, -1]
    assert view.swa_pos[b, :3].tolist() == [0, 1, -1]
    assert view.swa_head[[a, b]].tolist() == [5, 2]
    # Tokens of a chunk read a workspace, which only append() fills.
    assert [view.window, view.window_indices, view.window_lens] == [None] * 3
    assert bool((manager.state_pools[0].swa_pos == -1).all())
    with pytest.raises(ValueError, match="supports FP8 entries only, the KV format is bf16"):
        make_manager(device, kv_format="bf16").acquire(0, slots, positions, slots).write_swa(raw)


# --- rejected arguments -----------------------------------------------------------------------------------------------


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("slots", "positions", "ids", "message"),
    [
        ([0, 1, 0], [0, 0, 1], [0, 1, 0], "not next to each other"),
        ([0, 0], [0, 2], [0, 0], "not consecutive"),
        ([0], [-1], [0], "negative"),
        ([0, 1], [0, 1], [0, 0], "several slots"),
        ([0, 1, 0], [0, 0, 1], [7, 8, 9], "two requests are in state slot 0"),
        ([3], [0], [0], r"not in -1\.\.2"),
        ([0], [128], [0], r"position 128 of state slot 0, .* has no block: allocate_block\(0\)"),
        ([0], [10**6], [0], "position 1000000 of state slot 0, .* has no block"),
    ],
)
def test_a_step_that_must_not_be_written(slots: list, positions: list, ids: list, message: str) -> None:
    manager = make_manager()
    slot = manager.admit_request()
    manager.allocate_block(slot)
    handle = manager.acquire(0, ints(*slots), ints(*positions), ints(*ids))
    before = manager.state.rings.clone()
    with pytest.raises(ValueError, match=message):
        handle.append(torch.zeros(len(slots), 512), Layer.make(0, 0).weights)
    assert torch.equal(manager.state.rings, before)


def test_a_step_of_wrong_tensors() -> None:
    manager = make_manager()
    with pytest.raises(ValueError, match=r"positions has shape \(2,\).*\[1\]"):
        manager.begin_step(ints(0), ints(0, 1), ints(0))
    with pytest.raises(ValueError, match=r"request_ids is torch.float32"):
        manager.begin_step(ints(0), ints(0), torch.zeros(1))
    with pytest.raises(ValueError, match="positions is on meta; the cache is on cpu"):
        manager.begin_step(ints(0), ints(0).to("meta"), ints(0))
    with pytest.raises(IndexError, match=r"layer 4 is not in 0\.\.3"):
        manager.acquire(4, ints(0), ints(0), ints(0))


def test_append_with_wrong_inputs() -> None:
    manager = make_manager()
    slot = manager.admit_request()
    manager.allocate_block(slot)
    csa = Layer.make(4, 0)
    handle = manager.acquire(1, ints(slot), ints(0), ints(0))
    kv, score = torch.zeros(1, 512), torch.zeros(1, 2048)
    with pytest.raises(ValueError, match=r"layer 1 \(CSA\): kv has shape \(2, 512\); expected \(1, 512\)"):
        handle.append(torch.zeros(2, 512), csa.weights)
    with pytest.raises(ValueError, match=r"kv_score has shape None; expected \(1, 2048\)"):
        handle.append(kv, csa.weights)
    with pytest.raises(ValueError, match=r"index_kv_score has shape \(1, 256\); expected \(1, 512\)"):
        handle.append(kv, csa.weights, score, torch.zeros(1, 256))
    with pytest.raises(ValueError, match=r"weights.index_ape is None"):
        handle.append(kv, dataclasses.replace(csa.weights, index_ape=None), score, torch.zeros(1, 512))
    short = dataclasses.replace(csa.weights, rope=csa.weights.rope[: LONGEST - 1])
    with pytest.raises(ValueError, match=r"weights.rope has 511 positions; expected at least 512"):
        handle.append(kv, short, score, torch.zeros(1, 512))
    with pytest.raises(ValueError, match=r"layer 0 \(SWA\): kv_score has shape \(1, 2048\); expected None"):
        manager.acquire(0, ints(slot), ints(0), ints(0)).append(kv, csa.weights, score)


def test_views_of_a_layer_kind() -> None:
    manager = make_manager()
    slot = manager.admit_request()
    manager.allocate_block(slot)
    handles = [manager.acquire(i, ints(slot), ints(0), ints(0)) for i in range(3)]
    assert [h.read_classical_view() is None for h in handles] == [True, False, False]
    assert [h.read_indexer_view() is None for h in handles] == [True, False, True]
    csa, hca = handles[1].read_classical_view(), handles[2].read_classical_view()
    assert hca.entry_indices.tolist() == [[0] + [-1] * (manager.block_tables.shape[1] - 1)]
    assert (csa.entry_indices, csa.entries_fp8.shape, hca.entries_fp8.shape) == (None, (12, 32, 448), (12, 1, 448))
    assert handles[1].read_indexer_view().indexer_keys_fp4.shape == (12, 32, 64)


# --- slots and blocks -------------------------------------------------------------------------------------------------


def test_slots_and_blocks_that_cannot_be() -> None:
    """A slot goes to the next request when it is released. A block that no request owns counts, and only its own
    release frees it."""
    manager = make_manager(slots=2, blocks=5)
    assert [manager.admit_request() for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="2 requests, the maximum, are running"):
        manager.admit_request()
    manager.release_request(0)
    for call in (manager.release_request, manager.release_blocks, manager.allocate_block, manager.blocks_of):
        for slot in (0, 7):
            with pytest.raises(ValueError, match=f"state slot {slot} holds no request"):
                call(slot)
    assert (manager.admit_request(), manager.allocate_block()) == (0, 0)
    assert [manager.allocate_block(0) for _ in range(LONGEST // 128)] == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="has 4 blocks, the maximum of a request"):
        manager.allocate_block(0)
    for asked in (1, None):
        with pytest.raises(RuntimeError, match="OOM: 1 blocks requested, 0 free of 5"):
            manager.allocate_block(asked)
    manager.release_block(0)
    for block in (0, 1, 99):
        with pytest.raises(ValueError, match=f"block {block} was not allocated without a request"):
            manager.release_block(block)
    assert manager.allocate_block(1) == 0


def test_released_blocks_leave_the_table() -> None:
    """Another request may own them, so a step of the slot is rejected until it has new blocks."""
    manager = make_manager(slots=1)
    slot = manager.admit_request()
    for _ in range(2):
        manager.allocate_block(slot)
    manager.release_blocks(slot)
    assert manager.block_tables.eq(-1).all()
    before = manager.state.rings.clone()
    with pytest.raises(ValueError, match=r"position 0 of state slot 0, .* has no block: allocate_block\(0\)"):
        manager.acquire(0, ints(slot), ints(0), ints(0)).append(torch.zeros(1, 512), Layer.make(0, 0).weights)
    manager.allocate_block(slot)
    manager.release_blocks(slot)
    manager.release_request(slot)
    with pytest.raises(ValueError, match="has no block"):
        manager.acquire(0, ints(slot), ints(0), ints(0)).append(torch.zeros(1, 512), Layer.make(0, 0).weights)
    assert torch.equal(manager.state.rings, before)


def test_sizes() -> None:
    """The smaller pool sets the number of blocks, because a block id is valid in all layers."""
    manager = make_manager(num_blocks_per_csa_layer=64, num_blocks_per_hca_layer=2)
    assert [p.num_blocks if p else None for p in manager.paged_pools] == [None, 64, 2, 64]
    assert (manager.num_blocks, manager.num_free_blocks) == (2, 2)
    with pytest.raises(ValueError, match="max_concurrent_requests is 0; expected at least 1"):
        make_manager(slots=0)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        make_manager(blocks=0)
    with pytest.raises(ValueError, match="max_snapshots is -1; expected at least 0"):
        make_manager(max_snapshots=-1)
    with pytest.raises(ValueError, match="host_blocks is 5 and host_requests is 0; give host_requests too"):
        make_manager(host_blocks=5)


# --- host memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_format", "key_format", "options"),
    [
        ("fp8", "nvfp4", {"hca_state": "online", "draft_tokens": 4}),
        ("bf16", "mxfp4", {}),
    ],
)
def test_a_request_waits_on_the_host(
    device: torch.device, kv_format: str, key_format: str, options: dict[str, Any]
) -> None:
    """Every byte is restored, into a different slot and different blocks, in any format and at any length."""
    options = {"kv_format": kv_format, "key_format": key_format, **options}
    manager = make_manager(device, slots=2, blocks=6, host_requests=2, host_blocks=5, **options)
    waiting, other = Request.admit(manager, 0), Request.admit(manager, 1)
    run_step(manager, [(waiting, 131), (other, 60)])
    run_step(manager, [(waiting, 1), (other, 1)])
    before = all_bytes(manager, waiting.slot)
    offloaded = manager.offload(waiting.slot)
    assert offloaded.blocks == 2
    assert bool((manager.block_tables[waiting.slot] == -1).all())
    other.finish(manager)
    for tensor in (*block_views(manager), *manager.state.slot_tables()):
        tensor.fill_(77)
    taken = manager.admit_request(), manager.allocate_block()
    waiting.slot = manager.restore(offloaded)
    assert (manager.num_free_slots, manager.num_free_blocks) == (0, 3)
    assert manager.block_tables[waiting.slot, :2].tolist() == manager.blocks_of(waiting.slot)
    assert waiting.slot != taken[0] and taken[1] not in manager.blocks_of(waiting.slot)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(manager, waiting.slot), before, strict=True))
    manager._host.settle(lambda: False)
    assert (manager._host.free_slots.available, manager._host.free_blocks.available) == (2, 5)
    with pytest.raises(ValueError, match="no longer on the host"):
        manager.restore(offloaded)


def test_no_room_on_either_side() -> None:
    """An offload or restore without space raises an error and changes nothing."""
    with pytest.raises(RuntimeError, match="construct it with host_requests and host_blocks"):
        (manager := make_manager()).offload(manager.admit_request())
    manager = make_manager(slots=1, blocks=3, host_requests=1, host_blocks=2)
    slot = manager.admit_request()
    blocks = [manager.allocate_block(slot) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"OOM: a request with 3 blocks .* 1 requests and 2 blocks"):
        manager.offload(slot)
    assert manager.blocks_of(slot) == blocks
    manager.release_blocks(slot)
    for _ in range(2):
        manager.allocate_block(slot)
    offloaded = manager.offload(slot)
    with pytest.raises(ValueError, match="holds no request"):
        manager.offload(slot)
    manager.admit_request()
    with pytest.raises(RuntimeError, match=r"OOM: a request with 0 blocks .* 0 requests and 0 blocks"):
        manager.offload(slot)
    with pytest.raises(RuntimeError, match="no free state slot"):
        manager.restore(offloaded)
    manager.release_request(slot)
    for _ in range(2):
        manager.allocate_block()
    with pytest.raises(RuntimeError, match="OOM: 2 blocks requested to restore a request, 1 free of 3"):
        manager.restore(offloaded)
    assert manager.num_free_slots == 1
    manager.discard(offloaded)
    with pytest.raises(ValueError, match="no longer on the host"):
        manager.discard(offloaded)


# --- two caches -------------------------------------------------------------------------------------------------------


def test_a_request_on_the_host_belongs_to_its_cache() -> None:
    """The other cache has a request in the same host rows, and keeps it."""
    own, other = (make_manager(slots=1, blocks=3, host_requests=1, host_blocks=2, **EXACT) for _ in range(2))
    requests = [Request.admit(manager, seed) for seed, manager in enumerate((own, other))]
    for manager, request in zip((own, other), requests):
        run_step(manager, [(request, 140)])
    before = all_bytes(other, requests[1].slot)
    offloaded, others = own.offload(requests[0].slot), other.offload(requests[1].slot)
    for call in (other.restore, other.discard):
        with pytest.raises(
            ValueError, match="in the host memory of another cache: pass it to the cache that offloaded"
        ):
            call(offloaded)
    assert (other.num_free_slots, other.num_free_blocks) == (1, 3)
    requests[1].slot = other.restore(others)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(other, requests[1].slot), before, strict=True))
    own.discard(offloaded)


def test_a_step_and_a_snapshot_belong_to_their_cache() -> None:
    own, other = (make_manager(max_snapshots=1, **EXACT) for _ in range(2))
    request = Request.admit(own, 0)
    run_step(own, [(request, 128)])
    step, snapshot = own.begin_step(ints(request.slot), ints(128), ints(0)), own.take_snapshot(request.slot)
    with pytest.raises(ValueError, match="the step belongs to another cache: begin it with begin_step of this one"):
        other.layer(0, step)
    for call in (other.admit_request, other.release_snapshot):
        with pytest.raises(
            ValueError, match="the snapshot of 128 tokens has been released, or is one of another cache"
        ):
            call(snapshot)
    assert other.num_free_slots == 3


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_acquire_allocates_nothing_on_the_gpu() -> None:
    manager = make_manager("cuda")
    slot = manager.admit_request()
    manager.allocate_block(slot)
    tensors = [torch.tensor([value], dtype=torch.int32, device="cuda") for value in (slot, 0, 0)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, requests = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [manager.acquire(i, *tensors) for i in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(handles) == 4
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == before
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests


@pytest.mark.gpu
def test_memory_bytes_is_what_cuda_allocated() -> None:
    def requested() -> int:
        # `memory_allocated` counts the whole of a cached block that is slightly larger than requested.
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    before = requested()
    manager = make_manager("cuda", slots=8, blocks=64)
    used = requested() - before
    state = manager.state
    tables = (manager.block_tables, manager._lengths.table, state.swa_pos, state.swa_head, state.tail_len)
    assert manager.memory_bytes() <= used <= manager.memory_bytes() + sum(table.nbytes for table in tables) + 1024


@pytest.mark.gpu
def test_offload_beside_the_steps() -> None:
    """Offload runs on its own stream. A new owner of the slot and blocks writes only after the copy has finished, and a
    host row is not overwritten while it is read."""
    manager = make_manager("cuda", slots=2, blocks=4, host_requests=1, host_blocks=2)
    beside = torch.cuda.Stream()
    views = block_views(manager)
    for value in range(1, 30):
        slot = manager.admit_request()
        blocks = [manager.allocate_block(slot) for _ in range(2)]
        for table in manager.state.slot_tables():
            table[slot].fill_(value)
        for view in views:
            view[blocks] = value
        with torch.cuda.stream(beside):
            torch.cuda._sleep(2_000_000)
        offloaded = manager.offload(slot, beside)
        assert offloaded.event is not None
        for _ in range(2):  # Use all slots and blocks, including those of the request.
            new = manager.admit_request()
            taken = [manager.allocate_block(new) for _ in range(2)]
            for table in manager.state.slot_tables():
                table[new].fill_(255)
            for view in views:
                view[taken] = 255
        assert offloaded.event.query(), "its slot was reused before it was copied"
        for new in (0, 1):
            manager.release_blocks(new)
            manager.release_request(new)
        slot = manager.restore(offloaded, beside)
        torch.cuda.current_stream().wait_event(offloaded.event)
        assert all(bool((part == value).all()) for part in all_bytes(manager, slot))
        manager.release_blocks(slot)
        manager.release_request(slot)
