"""The library by the names of the design: `dsv4.model.X` is `dsv4_sglang.model.X`, `dsv4.cache.X` is
`dsv4_sglang.standalone.X` (docs/design/standalone.md lists them)."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.layer_schedule import AttentionType, FFNType, LayerSpec, RouterMode, build_schedule
from dsv4_sglang.standalone.allocator import BlockAllocator
from dsv4_sglang.standalone.handle import LayerCacheHandle
from dsv4_sglang.standalone.manager import KVCacheManager
from dsv4_sglang.standalone.paged_cache import PagedKVPool
from dsv4_sglang.standalone.schema import BLOCK_SIZE_ORIGINAL_TOKENS, build_schema, compute_block_budget
from dsv4_sglang.standalone.state_cache import StateCachePool

CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA
FLASH, PRO = DSV4Config.flash(), DSV4Config.pro()
MODELS = pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])


def spec(attn: AttentionType) -> LayerSpec:
    return LayerSpec(layer_idx=5, attn=attn, ffn=FFNType.MOE, router_mode=RouterMode.DENSE)


def manager(config: DSV4Config = FLASH, layers: int = 4, requests: int = 2, blocks: int = 4) -> KVCacheManager:
    return KVCacheManager(
        config,
        build_schedule(config)[:layers],
        max_concurrent_requests=requests,
        num_blocks_per_csa_layer=blocks,
        num_blocks_per_hca_layer=blocks,
        device="cpu",
    )


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "first", "counts"), [(FLASH, SWA, (21, 20, 2)), (PRO, HCA, (30, 31, 0))], ids=["flash", "pro"]
)
def test_schedule(config: DSV4Config, first: AttentionType, counts: tuple[int, ...]) -> None:
    schedule = build_schedule(config)
    assert [layer.layer_idx for layer in schedule] == list(range(config.num_hidden_layers))
    kinds = [layer.attn for layer in schedule]
    assert tuple(kinds.count(kind) for kind in (CSA, HCA, SWA)) == counts
    assert kinds[:4] == [first, first, CSA, HCA]
    assert {layer.ffn for layer in schedule} == {FFNType.MOE}
    routers = [layer.router_mode for layer in schedule]
    assert routers == [RouterMode.HASH] * 3 + [RouterMode.DENSE] * (config.num_hidden_layers - 3)


def test_routers_of_draft_layers_and_of_few_layers() -> None:
    """Layers of a draft model have a router of scores, also where the model has no layers without a hash table."""
    short = dataclasses.replace(FLASH, num_hidden_layers=2, compress_ratios=(0, 4))
    assert [layer.router_mode for layer in build_schedule(short)] == [RouterMode.HASH] * 2
    assert build_schedule(short, draft_layers=1)[2] == LayerSpec(2, SWA, FFNType.MOE, RouterMode.DENSE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        build_schedule(short)[0].attn = CSA


# --- schema -----------------------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize(
    ("attn", "entries", "index_entries", "tail"), [(CSA, 32, 32, 3), (HCA, 1, 0, 127), (SWA, 0, 0, 0)]
)
def test_schema(config: DSV4Config, attn: AttentionType, entries: int, index_entries: int, tail: int) -> None:
    schema = build_schema(config, spec(attn))
    assert (schema.entries_per_block, schema.indexer_entries_per_block) == (entries, index_entries)
    assert (schema.tail_buffer_size, schema.swa_window_size, schema.entry_head_dim) == (tail, 128, 512)
    assert schema.entries_per_block * attn.ratio in (0, BLOCK_SIZE_ORIGINAL_TOKENS)


@MODELS
@pytest.mark.parametrize(("context", "requests", "blocks"), [(1, 1, 1), (128, 3, 3), (129, 3, 6), (131_072, 2, 2048)])
def test_block_budget(config: DSV4Config, context: int, requests: int, blocks: int) -> None:
    budget = compute_block_budget(config, build_schedule(config), context, requests)
    assert (budget["csa"], budget["hca"], budget["blocks"]) == (32 * blocks, blocks, blocks)
    assert budget["csa"] > budget["hca"]
    assert BLOCK_SIZE_ORIGINAL_TOKENS == 128


# --- allocator --------------------------------------------------------------------------------------------------------


def test_allocator(device: torch.device) -> None:
    allocator = BlockAllocator(num_total_blocks=8, device=device)
    assert allocator.num_free == 8
    first, second = allocator.acquire(5), allocator.acquire(3)
    assert (first.shape, first.device.type, allocator.num_free) == ((5,), device.type, 0)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(8))
    with pytest.raises(RuntimeError, match="OOM: 1 blocks requested, 0 free of 8"):
        allocator.acquire(1)
    allocator.release(first)
    assert allocator.num_free == 5
    with pytest.raises(RuntimeError, match="OOM"):
        allocator.acquire(6)
    assert allocator.num_free == 5 and allocator.acquire(0).numel() == 0
    with pytest.raises(ValueError, match="already free"):
        allocator.release(first[:1])
    assert allocator.acquire(1).tolist() == first[-1:].tolist(), "the block that was released last comes first"


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attn", "entries"), [(CSA, 32), (HCA, 1)])
def test_paged_pool(device: torch.device, attn: AttentionType, entries: int) -> None:
    pool = PagedKVPool(build_schema(FLASH, spec(attn)), num_blocks=6, device=device)
    assert pool.entries_fp8.shape == (6, entries, 448)
    assert pool.entries_rope.shape == (6, entries, 64) and pool.entries_rope.dtype is torch.bfloat16
    assert pool.inv_scale.shape == (6, entries)
    keys = pool.indexer_keys_fp4
    assert (keys is None) if attn is HCA else (keys.shape == (6, 32, 64))
    memory = pool.entries.untyped_storage()
    for view in (pool.entries_fp8, pool.entries_rope, pool.inv_scale):
        assert view.untyped_storage().data_ptr() == memory.data_ptr(), "a view of the packed entries"
    index_bytes = 6 * 32 * 72 if attn is CSA else 0
    assert pool.memory_bytes() == memory.nbytes() + index_bytes


@MODELS
@pytest.mark.parametrize(("attn", "open_rows", "overlap_rows"), [(CSA, 4, 8), (HCA, 128, None), (SWA, None, None)])
def test_state_pool(config: DSV4Config, attn: AttentionType, open_rows: int | None, overlap_rows: int | None) -> None:
    """A tail has a row more than tokens can wait in it: the token that completes the window is written too."""
    schema = build_schema(config, spec(attn))
    pool = StateCachePool(schema, max_requests=3, device="cpu")
    assert (pool.swa_fp8.shape, pool.swa_rope.shape) == ((3, 128, 448), (3, 128, 64))
    assert (pool.swa_inv.shape, pool.swa_pos.shape, pool.swa_head.shape) == ((3, 128), (3, 128), (3,))
    for names, rows in ((("tail_ka", "tail_za"), open_rows), (("tail_kb", "tail_zb"), overlap_rows)):
        for name in names:
            tail = getattr(pool, name)
            assert (tail is None) if rows is None else (tail.shape == (3, rows, 512)), name
    assert open_rows is None or open_rows == schema.tail_buffer_size + 1
    assert (pool.tail_len is None) if attn is SWA else (pool.tail_len.tolist() == [0, 0, 0])


# --- manager ----------------------------------------------------------------------------------------------------------


def test_requests_of_a_manager() -> None:
    cache = manager(requests=2)
    first, second = cache.admit_request(), cache.admit_request()
    assert {first, second} == {0, 1}
    with pytest.raises(RuntimeError, match="2 concurrent requests, the maximum, are running"):
        cache.admit_request()
    cache.allocate_block(first)
    with pytest.raises(RuntimeError, match=r"still owns 1 blocks.*concurrent"):
        cache.release_request(first)
    cache.release_blocks(first)
    cache.release_request(first)
    for slot in (first, 7):
        with pytest.raises(ValueError, match=f"state slot {slot} holds none of the concurrent requests"):
            cache.release_request(slot)
    assert cache.admit_request() == first, "the second request keeps its slot"


def test_released_slots_are_reused_first() -> None:
    cache = manager(requests=4)
    for _ in range(3):
        cache.admit_request()
    for slot in (0, 2):
        cache.release_request(slot)
    assert [cache.admit_request() for _ in range(3)] == [2, 0, 3]


def test_out_of_blocks() -> None:
    """A request has blocks for each position of the model, also if the last block is not full."""
    cache = manager(dataclasses.replace(FLASH, max_position_embeddings=300), blocks=4)
    slot = cache.admit_request()
    assert [cache.allocate_block(slot) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="OOM: state slot 0 has 3 blocks, the maximum of a request"):
        cache.allocate_block(slot)
    assert cache.allocate_block() == 3
    with pytest.raises(RuntimeError, match="OOM: 1 blocks requested, 0 free of 4"):
        cache.allocate_block()


@MODELS
def test_handles_of_a_manager(config: DSV4Config) -> None:
    cache = manager(config, layers=config.num_hidden_layers, blocks=1, requests=1)
    slot = cache.admit_request()
    for layer in cache.schedule:
        handle = cache.acquire(
            layer_idx=layer.layer_idx, request_slots=ints(slot), positions=ints(0), request_ids=ints(0)
        )
        assert isinstance(handle, LayerCacheHandle)
        assert handle.state is cache.state_pools[layer.layer_idx]
        assert handle.paged is cache.paged_pools[layer.layer_idx]
        assert (handle.paged is None) == (layer.attn is SWA)
    for layer_idx in (-1, config.num_hidden_layers):
        with pytest.raises(IndexError, match=f"layer {layer_idx} is not in 0.."):
            cache.acquire(layer_idx, ints(slot), ints(0), ints(0))


@MODELS
def test_memory(config: DSV4Config) -> None:
    cache = manager(config, layers=5, requests=3, blocks=2)
    assert len(cache.paged_pools) == len(cache.state_pools) == 5
    paged = sum(pool.memory_bytes() for pool in cache.paged_pools if pool is not None)
    assert cache.memory_bytes() == paged + sum(pool.memory_bytes() for pool in cache.state_pools)
    budget = compute_block_budget(config, cache.schedule, max_context_len=200, max_requests=1)
    assert budget["blocks"] == 2
    # HCA blocks of a layer are padded together.
    assert 0 <= paged - 2 * budget["block_bytes"] < 16 * 5
    assert sum(pool.memory_bytes() for pool in cache.state_pools) == 3 * budget["state_bytes"]


def test_write_swa(device: torch.device) -> None:
    """A window layer needs no block: its entries are in the ring of the request's slot alone."""
    cache = KVCacheManager(FLASH, [build_schedule(FLASH)[0]], 2, 1, 1, device=device)
    cache.admit_request()
    slot = cache.admit_request()
    entries = torch.randn(1, 512, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    handle = cache.acquire(0, *(ints(x).to(device) for x in (slot, 130, 0)))
    handle.write_swa(entries)
    state = cache.state_pools[0]
    assert torch.equal(state.swa_rope[slot, 2], entries[0, 448:])
    assert state.swa_pos[slot].tolist() == [-1, -1, 130] + [-1] * 125 and int(state.swa_head[slot]) == 3
    read = state.swa_fp8[slot, 2].view(torch.float8_e4m3fn).float() * state.swa_inv[slot, 2].float()
    assert (read - entries[0, :448].float()).norm() < 0.036 * entries[0, :448].float().norm()
    assert bool((state.swa_pos[0] == -1).all()) and not state.swa_fp8[0].any()
    cache.release_request(slot)
    assert cache.admit_request() == slot and bool((state.swa_pos[slot] == -1).all()), "a new request is empty"
