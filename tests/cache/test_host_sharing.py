"""Host memory that several processes share: one copy, agreed errors, nothing left behind."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.memory_maps import shared_mappings
from support.ranks import run_ranks, values

from dsv4_sglang.cache import HostBlockPool, PagedKVPool, build_schema, host_memory
from dsv4_sglang.cache.host_memory import SHARED_NAME, HostMemory, cpus_in
from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.model import DSV4Config, build_schedule

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
SHARED_MEMORY = Path("/dev/shm")


def one_copy(rank: int, pages: int) -> list[dict[str, int]]:
    host_memory.STRIPE = PAGE
    sharing = HostSharing(dist.group.WORLD)
    memory = HostMemory(pages * PAGE - 100, CPU, sharing=sharing)
    assert (sharing.rank, sharing.size, memory.nbytes) == (rank, 3, pages * PAGE)
    assert memory.bytes.data_ptr() % PAGE == 0 and not memory.bytes.any()
    sharing.wait()
    memory.bytes[rank::3] = rank + 1
    sharing.wait()
    assert torch.equal(memory.bytes, torch.arange(memory.nbytes).remainder(3).add(1).to(torch.uint8))
    found = shared_mappings()
    sharing.wait()
    return found


def test_processes_share_one_copy() -> None:
    """Each process has all pages without touching them, and together they take the memory once."""
    (first,), *others = values(run_ranks(3, one_copy, 301))
    assert first["Rss"] == 301 * PAGE >> 10
    assert abs(sum(found["Pss"] for found in (first, *(other for (other,) in others))) - first["Rss"]) <= 3
    assert all(other["inode"] == first["inode"] for (other,) in others)


def numa_nodes() -> list[set[int]]:
    """Return the CPUs of each NUMA node that this process may use."""
    own = os.sched_getaffinity(0)
    listed = [
        cpus_in(path.read_text()) & own for path in sorted(Path("/sys/devices/system/node").glob("node*/cpulist"))
    ]
    return [cpus for cpus in listed if cpus]


def cpu_of(rank: int) -> set[int]:
    """Return a CPU for a rank. The nodes take turns."""
    nodes = numa_nodes()
    cpus = sorted(nodes[rank % len(nodes)])
    return {cpus[rank % len(cpus)]}


def stripes(rank: int, pages: int) -> tuple[list[tuple[int, int, set[int]]], dict[int, int]]:
    """Return what this process allocates, (offset, bytes, CPUs), and the pages of the whole memory by NUMA node."""
    host_memory.STRIPE, allocate, done = 4 * PAGE, os.posix_fallocate, []

    def recorded(file: int, at: int, nbytes: int) -> None:
        done.append((at, nbytes, os.sched_getaffinity(0)))
        allocate(file, at, nbytes)

    os.posix_fallocate = recorded
    sharing, before = HostSharing(dist.group.WORLD), os.sched_getaffinity(0)
    memory = HostMemory(pages * PAGE, CPU, cpu_of(rank), sharing)
    assert os.sched_getaffinity(0) == before
    line = next(line for line in Path("/proc/self/numa_maps").read_text().splitlines() if SHARED_NAME in line)
    sharing.wait()
    assert memory.nbytes
    return done, {int(node): int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)}


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the system does not report NUMA nodes")
def test_pages_are_divided_among_numa_nodes() -> None:
    """Each process allocates every third stripe, on the CPUs that it was given. The kernel counts the pages by node."""
    found, nodes = values(run_ranks(3, stripes, 30)), numa_nodes()
    expected: Counter[int] = Counter()
    for rank, (done, _) in enumerate(found):
        sizes = [(at, min(4, 30 - at)) for at in range(4 * rank, 30, 12)]
        assert done == [(at * PAGE, size * PAGE, cpu_of(rank)) for at, size in sizes]
        expected[rank % len(nodes)] += sum(size for _, size in sizes)
    assert [sorted(pages.values()) for _, pages in found] == [sorted(expected.values())] * 3


def two_machines(rank: int) -> tuple[int, int, bool, list[int], int]:
    """Four processes on machines of two."""
    sharing = HostSharing(dist.group.WORLD, machine=rank // 2)
    memory = HostMemory(PAGE, CPU, sharing=sharing)
    memory.bytes[sharing.rank] = 1 + rank
    sharing.wait()
    seen = int(memory.bytes.sum())
    sharing.wait()
    return sharing.rank, sharing.size, sharing.leads, sharing.gather(rank), seen


def test_machines_have_a_copy_each() -> None:
    found = values(run_ranks(4, two_machines))
    assert found == [
        (0, 2, True, [0, 1], 3),
        (1, 2, False, [0, 1], 3),
        (0, 2, True, [2, 3], 7),
        (1, 2, False, [2, 3], 7),
    ]


def parts(rank: int) -> list[list[int]]:
    sharing = HostSharing(dist.group.WORLD)
    return [list(sharing.part(count, first)) for count in range(9) for first in range(4)]


def test_parts_divide_a_save() -> None:
    """The parts of three processes are all rows, once. Of lists with one row, each process copies some."""
    counts = [count for count in range(9) for _ in range(4)]
    found = list(zip(counts, *values(run_ranks(3, parts))))
    for count, *each in found:
        assert sorted(row for part in each for row in part) == list(range(count))
        assert max(map(len, each)) <= -(-count // 3)
    assert {each.index([0]) for count, *each in found if count == 1} == {0, 1, 2}
    assert list(HostSharing().part(5, 3)) == list(range(5))


def little_memory(rank: int) -> None:
    if rank == 0:
        host_memory.available_bytes = lambda: PAGE


def small_files(rank: int) -> None:
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))


def full_system(rank: int) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        os.posix_fallocate = full


def no_descriptor(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def other_size(rank: int) -> None:
    create = os.memfd_create

    def short(*arguments: Any) -> int:
        file = create(*arguments)
        original = os.ftruncate
        os.ftruncate = lambda number, size: original(number, size - PAGE)
        return file

    os.memfd_create = short


def fails(rank: int, fault: Callable[[int], None]) -> str:
    host_memory.STRIPE = PAGE
    fault(rank)
    with pytest.raises(RuntimeError) as raised:
        HostMemory(4 * PAGE, CPU, sharing=HostSharing(dist.group.WORLD))
    return str(raised.value)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (little_memory, "16384 bytes (0.00 GiB) of host memory requested, 4096 bytes (0.00 GiB) available; use fewer"),
        (small_files, "cannot allocate 16384 bytes (0.00 GiB) of host memory: [Errno 27] File too large; use fewer"),
        (full_system, "cannot allocate 16384 bytes (0.00 GiB) of host memory: [Errno 28] No space left on device; use"),
        (
            no_descriptor,
            ": [Errno 24] Too many open files: '/proc/",
        ),
        (other_size, "shares 12288 bytes (0.00 GiB) of host memory; expected 16384 bytes"),
    ],
)
def test_lack_of_memory_is_an_error_in_all(fault: Callable[[int], None], line: str) -> None:
    """The process that lacks something and those that do not raise the same error, so that none waits for another."""
    first, second = values(run_ranks(2, fails, fault))
    assert line in first and first == second


def killed(rank: int, victim: int, stage: str) -> None:
    """Create shared memory in a process that is killed at `stage`, and another that outlives it."""

    host_memory.STRIPE = PAGE

    def kill(*_: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        if stage == "created":
            HostSharing.gather = kill
        elif stage == "half allocated":
            os.posix_fallocate = kill
        elif stage == "allocated":
            mmap.mmap = kill
    sharing = HostSharing(dist.group.WORLD)
    memory = HostMemory(4 * PAGE, CPU, sharing=sharing)
    if rank == victim:
        kill()
    sharing.wait()
    assert memory.nbytes


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", ["created", "half allocated", "allocated", "mapped"])
def test_killed_process_leaves_nothing(victim: int, stage: str) -> None:
    """The other process gets an error instead of waiting, and no file and no mapping is left."""
    before = set(SHARED_MEMORY.iterdir())
    outcomes = run_ranks(2, killed, victim, stage)
    assert outcomes[victim].code == -signal.SIGKILL
    assert outcomes[1 - victim].code == 1 and "RuntimeError" in outcomes[1 - victim].error
    assert not [name for name in set(SHARED_MEMORY.iterdir()) - before if SHARED_NAME in name.name]
    assert not shared_mappings()
    assert not [child for child in psutil.Process().children(recursive=True) if shared_mappings(child.pid)]


def shrunk(rank: int) -> None:
    create, kept = os.memfd_create, []

    def created(*arguments: Any) -> int:
        kept.append(file := create(*arguments))
        return os.dup(file)

    os.memfd_create = created
    sharing = HostSharing(dist.group.WORLD)
    memory = HostMemory(4 * PAGE, CPU, sharing=sharing)
    for file in kept:
        with pytest.raises(PermissionError):
            os.ftruncate(file, PAGE)
    sharing.wait()
    memory.bytes[-1] = 1


def test_shared_memory_cannot_shrink() -> None:
    """An access to a page that is gone would end the process."""
    values(run_ranks(2, shrunk))


# Tests on two GPUs, one a process.


def copies_of_gpus(rank: int, rounds: int) -> float:
    """Each process saves a part of the blocks, and each loads all. Return the seconds to create 1 GiB."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    sharing = HostSharing(dist.group.WORLD)
    begin = time.monotonic()
    memory = HostMemory(1 << 30, device, sharing=sharing)  # pinned as long as this object lives
    seconds = time.monotonic() - begin
    assert memory.bytes.is_pinned()
    specs = build_schedule(DSV4Config.flash())
    pools = [PagedKVPool(build_schema(DSV4Config.flash(), specs[i]), 9, device) for i in (2, 3)]
    host = HostBlockPool(pools, 9, sharing=sharing)
    views = [view.view(torch.uint8) for pool in pools for view in pool.block_views()]
    for turn in range(1, 1 + rounds):
        for view in views:
            view.fill_(turn % 256)
        part = list(sharing.part(9, turn))
        host.save(torch.tensor(part, device=device), torch.tensor(part))
        torch.cuda.synchronize()
        sharing.wait()
        for view in views:
            view.zero_()
        for layer in range(len(pools)):
            host.load(torch.arange(9, device=device), torch.arange(9), layer)
        assert all((view == turn % 256).all() for view in views), turn
        sharing.wait()
    return seconds


def killed_with_gpu(rank: int, victim: int) -> None:
    """Create pinned memory in a process that is killed while it copies, and another that outlives it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    sharing = HostSharing(dist.group.WORLD)
    memory = HostMemory(1 << 30, device, sharing=sharing)
    source = torch.ones(memory.nbytes, dtype=torch.uint8, device=device)
    if rank == victim:
        memory.bytes.copy_(source, non_blocking=True)
        os.kill(os.getpid(), signal.SIGKILL)
    sharing.wait()


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


@pytest.mark.gpu
def test_memory_of_a_file_is_pinned() -> None:
    """A GPU copies to and from the memory of a file. The next process finds what was copied."""
    device, nbytes = torch.device("cuda"), 1 << 26
    file = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR)
    try:
        for turn in (1, 2):
            memory = HostMemory(nbytes, device, file=file)
            assert memory.bytes.is_pinned() and (memory.bytes == turn - 1).all()
            memory.bytes.copy_(torch.full([nbytes], turn, dtype=torch.uint8, device=device), non_blocking=True)
            torch.cuda.synchronize()
            assert (memory.bytes.to(device, non_blocking=True) == turn).all()
            del memory
    finally:
        os.close(file)


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_loads_what_another_has_saved() -> None:
    """Rows that are written again and again are loaded with their last contents."""
    print("seconds for 1 GiB in each process:", values(run_ranks(2, copies_of_gpus, 300, method="spawn")))


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_with_gpu_leaves_nothing(victim: int) -> None:
    """The memory is free, and others can pin memory, after a process was killed in a copy."""
    outcomes = run_ranks(2, killed_with_gpu, victim, method="spawn")
    assert outcomes[victim].code == -signal.SIGKILL
    assert outcomes[1 - victim].code == 1 and "RuntimeError" in outcomes[1 - victim].error
    assert not [child for child in psutil.Process().children(recursive=True) if shared_mappings(child.pid)]
    values(run_ranks(2, copies_of_gpus, 2, method="spawn"))
