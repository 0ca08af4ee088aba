"""Tests of `KVCacheManager` and its handles: ownership of slots and blocks, and isolation between concurrent
requests."""

import dataclasses
import functools

import pytest
import torch
from support.standalone import (
    CONFIG,
    EPS,
    EXACT,
    LONGEST,
    Layer,
    Request,
    all_bytes,
    alone,
    check,
    make_manager,
    run_step,
)
from torch import Tensor

from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.model import build_schedule
from dsv4_sglang.ops.rope import rms_norm, rotate
from dsv4_sglang.standalone import KVCacheManager

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


def test_one_token_each_is_a_decode_step() -> None:
    manager = make_manager(**EXACT)
    slots = ints(manager.admit_request(), manager.admit_request())
    for counts, is_decode in (([1, 1], True), ([2, 2], False), ([2, 1], False), ([1, 3], False)):
        positions = torch.cat([torch.arange(n) for n in counts])
        owner = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        assert manager.begin_step(slots[owner], positions, owner).is_decode == is_decode, counts


@pytest.mark.parametrize("hca_state", ["raw", "online"])
@pytest.mark.parametrize("first", [1, 130])
def test_reused_slot_hides_its_last_owner(device: torch.device, first: int, hca_state: str) -> None:
    """A reused slot exposes no data of its previous owner (SPEC 3.8). The slot is filled with NaN in between, so the
    test does not rely on clearing."""
    manager = make_manager(device, slots=1, blocks=3, hca_state=hca_state, **EXACT)
    old = Request.admit(manager, 1)
    run_step(manager, [(old, 200)])
    old.finish(manager)
    new = Request.admit(manager, 0)
    assert new.slot == old.slot
    for state in manager.state_pools:
        assert bool((state.swa_pos[new.slot] == -1).all())
        state.ring[new.slot] = float("nan")
        if state.compressor_state is not None:
            state.compressor_state[new.slot] = float("nan")
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
    for i, expected in enumerate(alone(0, 162, **EXACT)):
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
        ([0], [128], [0], r"position 128 of state slot 0 has no block: allocate_block\(0\)"),
        ([0], [10**6], [0], "position 1000000 of state slot 0 has no block"),
    ],
)
def test_a_step_that_must_not_be_written(slots: list, positions: list, ids: list, message: str) -> None:
    manager = make_manager()
    slot = manager.admit_request()
    manager.allocate_block(slot)
    handle = manager.acquire(0, ints(*slots), ints(*positions), ints(*ids))
    before = all_bytes(manager)
    with pytest.raises(ValueError, match=message):
        handle.append(torch.zeros(len(slots), 512), Layer.make(0, 0).weights)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(manager), before, strict=True))


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
    with pytest.raises(RuntimeError, match="2 concurrent requests, the maximum, are running"):
        manager.admit_request()
    manager.release_request(0)
    for call in (manager.release_request, manager.release_blocks, manager.allocate_block, manager.blocks_of):
        for slot in (0, 7):
            with pytest.raises(ValueError, match=f"state slot {slot} holds none of the concurrent requests"):
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
    before = all_bytes(manager)
    with pytest.raises(ValueError, match=r"position 0 of state slot 0 has no block: allocate_block\(0\)"):
        manager.acquire(0, ints(slot), ints(0), ints(0)).append(torch.zeros(1, 512), Layer.make(0, 0).weights)
    manager.allocate_block(slot)
    manager.release_blocks(slot)
    manager.release_request(slot)
    with pytest.raises(ValueError, match="state slot 0 holds no request"):
        manager.acquire(0, ints(slot), ints(0), ints(0)).append(torch.zeros(1, 512), Layer.make(0, 0).weights)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(manager), before, strict=True))


def test_sizes() -> None:
    """The smaller pool sets the number of blocks, because a block id is valid in all layers."""
    manager = make_manager(num_blocks_per_csa_layer=64, num_blocks_per_hca_layer=2)
    assert [p.num_blocks if p else None for p in manager.paged_pools] == [None, 64, 2, 64]
    assert (manager.num_blocks, manager.num_free_blocks) == (2, 2)
    windows = KVCacheManager(CONFIG, build_schedule(CONFIG)[:1], 1, 3, 2, device="cpu")
    assert windows.num_free_blocks == 3, "blocks hold nothing where no layer has entries"
    with pytest.raises(ValueError, match="max_concurrent_requests is 0; expected at least 1"):
        make_manager(slots=0)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        make_manager(blocks=0)
    with pytest.raises(ValueError, match="no layers"):
        KVCacheManager(CONFIG, [], 1, 1, 1, device="cpu")


# --- two caches -------------------------------------------------------------------------------------------------------


def test_a_step_belongs_to_its_cache() -> None:
    """The other cache has a request in the same slot."""
    own, other = (make_manager(**EXACT) for _ in range(2))
    requests = [Request.admit(manager, seed) for seed, manager in enumerate((own, other))]
    for manager in (own, other):
        manager.allocate_block(0)
    step, before = own.begin_step(ints(0), ints(0), ints(0)), all_bytes(other)
    with pytest.raises(ValueError, match="the step belongs to another cache: begin it with begin_step of this one"):
        layer = requests[0].layers[0]
        other.layer(0, step).append(layer.inputs["kv"][:1], layer.weights)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(other), before, strict=True))


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
    positions = (t.nbytes for s in manager.state_pools for t in (s.swa_pos, s.swa_head, s.tail_len) if t is not None)
    others = manager.block_tables.nbytes + sum(positions)
    # The lengths of the requests and the indices of compressor states take less than 4096 B.
    assert manager.memory_bytes() <= used <= manager.memory_bytes() + others + 4096
