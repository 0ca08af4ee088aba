"""Copies of blocks to the host and back: every byte of a block is copied, and no other byte changes."""

import gc
import mmap
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dsv4_sglang.cache import (
    CacheLayout,
    HostBlockPool,
    HostSnapshotPool,
    PagedKVPool,
    StateStorage,
    build_schema,
    host_rows,
    v4_specs,
)
from dsv4_sglang.cache.host_memory import HostMemory, _pages, _register, available_bytes, cpus_in, running_on
from dsv4_sglang.cache.host_rows import _row_layout, host_block_bytes, runs
from dsv4_sglang.model import DSV4Config, build_schedule

BLOCKS = 9


def swap(
    host: HostBlockPool, blocks: list[int], rows: list[int], to_host: bool, stream: torch.cuda.Stream | None = None
) -> None:
    """Copy blocks of all layers one to one. Without a stream the copies are complete on return."""
    there, here = torch.tensor(blocks), torch.tensor(rows)
    with torch.cuda.stream(stream):
        there = there.to(host.device)
        if to_host:
            host.save(there, here)
        else:
            for layer in range(len(host._views)):
                host.load(there, here, layer)
    if stream is None and host.device.type == "cuda":
        torch.cuda.current_stream(host.device).synchronize()


def all_bytes(pools: list[PagedKVPool]) -> list[torch.Tensor]:
    """Copy all bytes of the blocks of every layer."""
    return [view.view(torch.uint8).clone() for pool in pools for view in pool.block_views()]


def make_pools(device: torch.device, **options: str) -> list[PagedKVPool]:
    """Return pools of a CSA and an HCA layer with random contents."""
    specs = build_schedule(DSV4Config.flash())
    pools = [PagedKVPool(build_schema(DSV4Config.flash(), specs[i], **options), BLOCKS, device) for i in (2, 3)]
    for pool in pools:
        for view in pool.block_views():
            view.copy_(torch.randint(1, 100, view.shape))
    return pools


@pytest.mark.parametrize("options", [{}, {"kv_format": "bf16", "key_format": "fp32"}], ids=["fp8", "bf16"])
def test_round_trip(device: torch.device, options: dict[str, str]) -> None:
    """The blocks are copied in several parts on a GPU, and a row holds one block of all layers."""
    pools = make_pools(device, **options)
    host = HostBlockPool(pools, BLOCKS)
    if host._staging is not None:
        host._staging = host._staging[:4].clone()
    before = all_bytes(pools)
    there, here = [7, 2, 3, 4, 0, 1, 8, 5, 6], [0, 4, 3, 1, 8, 7, 6, 5, 2]
    swap(host, there, here, to_host=True)
    size = sum(view.shape[1] for view in before)
    if not options:
        assert torch.equal(host.rows[here, :size], torch.cat(before, 1)[there].cpu())
        assert host.block_bytes == 169 * 128, "32 * (584 + 72) + 584 bytes in whole lines"
        assert host.memory_bytes() == 48 * mmap.PAGESIZE, "nine rows in whole pages"
    for pool in pools:
        pool.reset()
    swap(host, there, here, to_host=False)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(pools), before))


def test_one_layer_is_restored_alone(device: torch.device) -> None:
    pools = make_pools(device)
    host = HostBlockPool(pools, 2)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    before = all_bytes(pools)
    swap(host, [1], [1], to_host=True, stream=stream)
    with torch.cuda.stream(stream):
        host.load(torch.tensor([6], device=device), torch.tensor([1]), layer=0)
    if stream is not None:
        stream.synchronize()
    assert host.rows[1].any() and not host.rows[0].any()
    for view in before[:2]:
        view[6] = view[1]
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(pools), before))


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize(
    ("blocks", "rows", "message"),
    [
        ([0, BLOCKS], [0, 1], f"item {BLOCKS} on the device is not in 0..{BLOCKS - 1}"),
        ([0, -1], [0, 1], f"item -1 on the device is not in 0..{BLOCKS - 1}"),
        ([4, 4], [0, 1], "an item on the device is listed twice in"),
        ([0, 1], [0, BLOCKS], f"host row {BLOCKS} is not in 0..{BLOCKS - 1}"),
        ([0, 1], [0, -1], f"host row -1 is not in 0..{BLOCKS - 1}"),
        ([0, 1], [0], "2 blocks and 1 host rows"),
    ],
)
def test_missing_blocks_are_not_copied(to_host: bool, blocks: list[int], rows: list[int], message: str) -> None:
    pools = make_pools(torch.device("cpu"))
    host = HostBlockPool(pools, BLOCKS)
    before, at_host = all_bytes(pools), host.rows.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        swap(host, blocks, rows, to_host)
    assert torch.equal(host.rows, at_host) and all(torch.equal(a, b) for a, b in zip(all_bytes(pools), before))


@pytest.mark.parametrize("number", [-1, 0, 5])
def test_missing_snapshots_are_not_copied(number: int) -> None:
    """Four snapshots are numbered from 1. -1 would be one of them, counted from the end."""
    config = DSV4Config.flash()
    layout = CacheLayout(v4_specs(config, build_schedule(config)[:2]), torch.device("cpu"))
    host = HostSnapshotPool(StateStorage(layout, num_slots=3, snapshots=4), 2)
    for copy in (host.save, host.load):
        with pytest.raises(IndexError, match=rf"^{number} is not in 1\.\.4$"):
            copy(number, 0)


def test_row_parts_are_contiguous_and_aligned() -> None:
    """For Flash with all layers, the parts are contiguous, and CSA's parts are aligned to 128 bytes."""
    config = DSV4Config.flash()
    schemas = [build_schema(config, spec) for spec in build_schedule(config)]
    pools = [PagedKVPool(schema, 1, torch.device("cpu")) for schema in schemas if schema.entries_per_block]
    views = [pool.block_views() for pool in pools]
    offsets, row_end = _row_layout(views)
    spans = sorted((at, at + view.shape[1]) for o, v in zip(offsets, views) for at, view in zip(o, v))
    assert spans[0][0] == 0 and all(end == begin for (_, end), (begin, _) in pairwise(spans))
    assert row_end == spans[-1][1] == 452_512
    assert host_block_bytes(pools) == 452_608 and host_block_bytes(pools, spare=16) == 111 * 4096
    csa = [at for o, pool in zip(offsets, pools) for at in o if pool.index_keys is not None]
    assert len(csa) == 42 and all(at % 128 == 0 for at in csa)


@pytest.mark.parametrize("blocks", [1, 8, 300])
def test_each_layer_is_loaded_once(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """The first layer is loaded alone. After it, each launch has enough layers for its minimum number of bytes."""
    host = HostBlockPool(make_pools(torch.device("cpu")) * 6, 1)
    monkeypatch.setattr(host_rows, "LOADED_TOGETHER", 3 * host.block_bytes)
    launches = [host.layers_with(layer, blocks) for layer in range(12)]
    each = {1: 11, 8: 4, 300: 1}[blocks]
    assert launches[0] == 1 and launches[1::each] == [each] * (11 // each) + [11 % each] * (11 % each > 0)
    assert sum(launches) == 12 and all(sum(launches[: i + 1]) > i for i in range(12))


@pytest.mark.parametrize("kv_format", ["fp8", "fp32"])
def test_snapshots_round_trip(device: torch.device, kv_format: str) -> None:
    """Every byte of a snapshot is copied via other rows, and no other snapshot changes."""
    config = DSV4Config.flash()
    layout = CacheLayout(v4_specs(config, build_schedule(config)[:5], kv_format=kv_format), device)
    storage = StateStorage(layout, num_slots=3, snapshots=4)
    tables = storage.snapshot_tables()
    for table in tables:
        table.random_(0, 256)
    before = [table.clone() for table in tables]
    host = HostSnapshotPool(storage, 5)
    assert host.snapshot_bytes == layout.snapshot_bytes
    host.save(2, 4)
    host.save(4, 1)
    for table in tables:
        table[2 - 1].zero_()
    host.load(2, 1)
    host.load(4, 4)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for here, there in ((1, 1), (2, 4), (3, 3), (4, 2)):
        assert all(
            torch.equal(a, b) for a, b in [(new[here - 1], old[there - 1]) for new, old in zip(tables, before)]
        ), here
    assert not host.rows[[0, 2, 3]].any()


def test_runs_of_rows() -> None:
    assert runs(torch.tensor([3, 4, 5, 9, 8, 7, 0, 1])) == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 8)]
    assert runs(torch.tensor([7])) == [(0, 1)]
    assert runs(torch.tensor([], dtype=torch.int64)) == []


def test_cpu_lists_of_the_kernel() -> None:
    assert cpus_in("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpus_in("\n") == set()


def test_thread_is_moved_back_to_its_cpus() -> None:
    before = os.sched_getaffinity(0)
    with running_on({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with running_on(()):
        assert os.sched_getaffinity(0) == before


def test_pages_are_zeroed_and_shared_with_forks() -> None:
    """The memory is a shared mapping, so a fork does not separate the GPU's pages from this process's pages."""
    pages = _pages(2 * mmap.PAGESIZE)
    assert pages.data_ptr() % mmap.PAGESIZE == 0 and pages.nbytes == 2 * mmap.PAGESIZE and not pages.any()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(at, 16) for at in line.split()[0].split("-"))
        if begin <= pages.data_ptr() < end:
            assert line.split()[1] == "rw-s"
            break
    else:
        pytest.fail("the pages are not mapped")


def test_excessive_size_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"1125899906842624 bytes \(1048576.00 GiB\) of host memory .* fewer host blocks"
    ):
        _pages(1 << 50)


GIB = 1 << 30


def system(root: Path, cgroup: str, groups: dict[str, tuple[str, int, int]]) -> Path:
    """Create the system files of a machine with 100 GiB of memory and a process in `cgroup`.

    `groups` maps the folder of a group to its limit, its use, and its evictable file pages in bytes.
    """
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, (limit, used, inactive) in groups.items():
        place = root / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        v1 = folder.startswith("memory")
        limits = (
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if v1 else ("max", "current", "inactive_file")
        )
        (place / f"memory.{limits[0]}").write_text(f"{limit}\n")
        (place / f"memory.{limits[1]}").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\n{limits[2]} {inactive}\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "left"),
    [
        ("0::/\n", {}, 100 * GIB),
        ("0::/\n", {"": (str(8 * GIB), 5 * GIB, GIB)}, 4 * GIB),
        ("0::/a/b\n", {"a": (str(8 * GIB), 5 * GIB, 0), "a/b": ("max", GIB, 0)}, 3 * GIB),
        ("0::/elsewhere\n", {"": (str(GIB), 2 * GIB, 0)}, 0),
        ("4:memory:/x\n0::/\n", {"memory/x": (str(6 * GIB), 2 * GIB, GIB)}, 5 * GIB),
    ],
)
def test_memory_of_a_container(tmp_path: Path, cgroup: str, groups: dict[str, tuple[str, int, int]], left: int) -> None:
    assert available_bytes(system(tmp_path, cgroup, groups)) == left


@pytest.mark.gpu
def test_memory_is_unpinned_after_its_copies() -> None:
    pools = make_pools(torch.device("cuda", 0))
    host = HostBlockPool(pools, BLOCKS)
    view = host.rows
    torch.cuda.synchronize()
    swap(host, list(range(BLOCKS)), list(range(BLOCKS)), to_host=True, stream=torch.cuda.Stream())
    assert view.is_pinned()
    del host
    gc.collect()
    assert not view.is_pinned()
    expected = torch.cat(all_bytes(pools), 1).cpu()
    assert torch.equal(view[:, : expected.shape[1]], expected)


@pytest.mark.gpu
def test_failed_pinning_reports_the_size() -> None:
    """Pinning memory twice raises an error with the size. The next launch does not report this error again."""
    device = torch.device("cuda", 0)
    memory = HostMemory(5000, device)
    assert memory.nbytes == 2 * mmap.PAGESIZE and memory.bytes.is_pinned()
    with pytest.raises(RuntimeError, match=rf"cannot pin {memory.nbytes} bytes .* for cuda:0: .*ulimit -l"):
        _register(memory.bytes, device)
    assert torch.ones(3, device=device).sum().item() == 3
