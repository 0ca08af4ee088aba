"""Blocks to the host and back: every byte of a block moves, no other byte does."""

import pytest
import torch

from dsv4_sglang.cache import HostBlockPool, PagedKVPool, build_schema
from dsv4_sglang.cache.host_pool import cpus_near
from dsv4_sglang.model import DSV4Config, build_schedule

BLOCKS = 9


def storages(pool: PagedKVPool) -> list[torch.Tensor]:
    """The allocations of a pool as flat tensors."""
    tables = [pool.entries] + ([pool.index_keys] if pool.index_keys is not None else [])
    return [torch.tensor([], dtype=t.dtype, device=t.device).set_(t.untyped_storage()) for t in tables]


def all_bytes(pool: PagedKVPool) -> list[torch.Tensor]:
    return [storage.clone() for storage in storages(pool)]


def make_pools(device: torch.device, **options: str) -> list[PagedKVPool]:
    """A CSA and an HCA layer full of random numbers."""
    specs = build_schedule(DSV4Config.flash())
    pools = [PagedKVPool(build_schema(DSV4Config.flash(), specs[i], **options), BLOCKS, device) for i in (2, 3)]
    for pool in pools:
        for storage in storages(pool):
            storage.copy_(torch.randint(1, 100, storage.shape).to(storage.dtype))
    return pools


@pytest.mark.parametrize("options", [{}, {"row_format": "bf16", "key_format": "fp32"}], ids=["fp8", "bf16"])
def test_round_trip(device: torch.device, options: dict[str, str]) -> None:
    pools = make_pools(device, **options)
    host = HostBlockPool(pools, BLOCKS)
    before = [all_bytes(pool) for pool in pools]
    there, here = [7, 2, 3, 4, 0, 1, 8, 5, 6], [0, 4, 3, 1, 8, 7, 6, 5, 2]
    host.swap(there, here, to_host=True)
    for pool in pools:
        for storage in storages(pool):
            storage.zero_()
    host.swap(there, here, to_host=False)
    padding = 8  # of HCA's flat block, to a multiple of 16 B
    for pool, old in zip(pools, before):
        for new, expected in zip(all_bytes(pool), old):
            used = len(new) - padding if pool.entries.dtype == torch.uint8 and pool is pools[1] else len(new)
            assert torch.equal(new[:used], expected[:used])


def test_one_layer_and_a_stream(device: torch.device) -> None:
    pools = make_pools(device)
    host = HostBlockPool(pools, 2)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    csa, hca = (all_bytes(pool) for pool in pools)
    host.swap([1], [0], to_host=True, layer=0, stream=stream)
    host.swap([6], [0], to_host=False, layer=0, stream=stream)
    if stream is not None:
        stream.synchronize()
    assert all(torch.equal(view[6], view[1]) for view in pools[0].block_views())
    assert not all(torch.equal(a, b) for a, b in zip(all_bytes(pools[0]), csa))
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(pools[1]), hca))


def test_bad_ids_move_nothing(device: torch.device) -> None:
    pools = make_pools(device)
    host = HostBlockPool(pools, 2)
    before = [all_bytes(pool) for pool in pools]
    for device_blocks, host_blocks in (([0, 9], [0, 1]), ([0, 1], [0, 2]), ([3, 3], [0, 1]), ([1], [0, 1])):
        with pytest.raises((ValueError, RuntimeError)):
            host.swap(device_blocks, host_blocks, to_host=False)
    assert all(torch.equal(a, b) for pool, old in zip(pools, before) for a, b in zip(all_bytes(pool), old))


@pytest.mark.gpu
def test_pinned_and_counted() -> None:
    pools = make_pools(torch.device("cuda", 0))
    host = HostBlockPool(pools, 3)
    assert all(view.is_pinned() for views in host._on_host for view in views)
    assert host.memory_bytes() == 3 * (32 * (584 + 72) + 584)
    print("CPUs near the GPU:", sorted(cpus_near(torch.device("cuda", 0))))
