"""Blocks and snapshots in host memory, and their way there and back."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.state_cache import StateStorage

STAGED_BLOCKS = 64
"""Blocks that are gathered on the GPU at a time on their way to the host."""


LOADED_TOGETHER = 16 << 20
"""Bytes of layers that come in one launch, 0.3 ms of PCIe 5: between launches the link idles for some microseconds, and
a step waits for all layers of one."""

ALIGNED = 128
"""Bytes: the GPU reads host memory in lines of so many, and asks for two where something begins within one."""


def cpus_in(listed: str) -> set[int]:
    """CPUs of a list as the kernel writes it: "0-3,8" is 0, 1, 2, 3 and 8."""
    cpus: set[int] = set()
    for piece in filter(None, listed.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpus_near(device: torch.device) -> set[int]:
    """CPUs of the NUMA node that the GPU hangs on; empty where the system does not say."""
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return set()
    domain, bus, slot = place
    listed = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/local_cpulist")
    return cpus_in(listed.read_text()) & os.sched_getaffinity(0) if listed.is_file() else set()


@contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """This thread on `cpus`, or where it is if there are none: pages lie near the thread that first touches them."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class HostMemory:
    """Zeroed host memory, `bytes` [nbytes] uint8, whole pages of its own; for a GPU pinned, so that it reads and writes
    the memory itself.

    What is pinned is what was asked for, rounded up to a page: torch's allocator of pinned memory rounds to a power of
    two and keeps what is freed. Unpinned with the object, behind the copies in flight; tensors that still show the
    memory keep it, pageable.

    Raises RuntimeError when the system does not give or pin so much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bytes = _pages(self.nbytes)
        if device.type != "cuda":
            return
        _register(self.bytes, device)
        unpin = weakref.finalize(self, _unregister, self.bytes.data_ptr(), device)
        unpin.atexit = False  # the end of the process unpins, and CUDA may be gone before it


def host_memory(nbytes: int, device: torch.device, cpus: Collection[int] | None = None) -> HostMemory:
    """`HostMemory` on the NUMA node of `cpus`, by default of those near the GPU."""
    if device.type != "cuda":
        return HostMemory(nbytes, device)
    with running_on(cpus_near(device) if cpus is None else cpus):
        return HostMemory(nbytes, device)


def _pages(nbytes: int) -> Tensor:
    """[nbytes] uint8, page aligned and zero; `nbytes` is a multiple of the page size.

    Populated, so that the pages lie near this thread. Shared, because a fork would make private pages copies on write,
    and the GPU and this process could end with different ones.
    """
    available = _available()
    if nbytes > available:
        # Asked for all the same, the kernel would kill a process to make room.
        raise RuntimeError(f"{_size(nbytes)} of host memory asked, {_size(available)} available; use fewer host blocks")
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        pages = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"no {_size(nbytes)} of host memory: {error}; use fewer host blocks") from error
    return torch.frombuffer(pages, dtype=torch.uint8)


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) == 0:
            return
        # The error stands until a launch reports it: let it be this one, which nobody waits for.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "no limit" if limit == resource.RLIM_INFINITY else _size(limit)
    raise RuntimeError(
        f"CUDA cannot pin {_size(memory.nbytes)} of host memory for {device}: {cudart.cudaGetErrorString(status)}; "
        f"{_size(_available())} are available, ulimit -l is {locked}: use fewer host blocks or raise the limit"
    )


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        status = torch.cuda.cudart().cudaHostUnregister(address)
    if int(status) != 0:
        raise RuntimeError(f"CUDA cannot unpin the host memory at {address:#x}: error {int(status)}")


def _available(root: Path = Path("/")) -> int:
    """Bytes of memory that can be had without swapping, in a container no more than it may take; `root` has `proc` and
    `sys`."""
    found = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found = int(value.split()[0]) << 10
    return min([found, *_left_in_cgroups(root)])


CGROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controllers of a line of /proc/self/cgroup, version 2 and 1: where groups are, and what says how much memory a
group may have, has, and would give back first."""


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes that this process's control group, and each above it, may still take. A container may see its own as the
    topmost, under another path."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in CGROUP_FILES:
            continue
        mount, *names = CGROUP_FILES[controllers]
        group = root / mount / path.lstrip("/")
        while group != (root / mount).parent:
            limit, used, stat = (group / name for name in (*names[:2], "memory.stat"))
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit, the topmost group has no files
                fields = dict(field.split() for field in stat.read_text().splitlines())
                yield max(0, int(limit.read_text()) - int(used.read_text()) + int(fields.get(names[2], 0)))
            group = group.parent


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"


class HostBlockPool:
    """`num_blocks` host blocks for the paged pools of some layers (one of several, or all of a model).

    `rows` [num_blocks, block_bytes] uint8: a row is a block of all layers (`PagedKVPool.block_views`), the same on
    every kind of GPU, whole lines of 128 bytes; the parts that are none, of HCA layers, lie at its end. The way to the
    host is a gather on the GPU and a copy of each run of rows that follow each other, so that SMs are busy for a moment
    only; the way back is a launch for the first layer, so that a step can begin when it is there, and launches of some
    layers each for the others.

    Args:
        pools: the layers' pools, all on one device; with a GPU the host memory is pinned.
        num_blocks: blocks of 128 tokens, the same number for every layer.
        cpus: the host memory lies on the NUMA node of these CPUs; by default of those near the GPU.
        spare: bytes at the end of each row for somebody else; rows are whole pages of memory then.

    Raises RuntimeError when the system does not give or pin so much memory; it says how much was asked for.
    """

    def __init__(
        self, pools: Sequence[PagedKVPool], num_blocks: int, cpus: Collection[int] | None = None, spare: int = 0
    ) -> None:
        devices = {pool.device for pool in pools}
        if len(devices) != 1:
            raise ValueError(f"the pools lie on {sorted(map(str, devices))}; expected one device")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; expected at least 1")
        self.num_blocks = num_blocks
        self.device = devices.pop()
        self._views = [pool.block_views() for pool in pools]
        self._offsets, end = _row_of_a_block(self._views)
        self.block_bytes = host_row_bytes(end, spare)
        self._memory = host_memory(num_blocks * self.block_bytes, self.device, cpus)
        self.rows = self._memory.bytes[: num_blocks * self.block_bytes].view(num_blocks, self.block_bytes)
        self._staging: Tensor | None = None
        if self.device.type == "cuda":
            shape = min(STAGED_BLOCKS, num_blocks), self.block_bytes
            self._staging = torch.empty(shape, dtype=torch.uint8, device=self.device)

    def save(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy `blocks` [n] int64 (device) of all layers to `rows` [n] int64 (CPU), ordered on the current stream.

        One stream at a time: they share a buffer on the GPU. Ids as `swap_blocks` wants them.
        """
        if self._staging is None:
            self._swap(range(len(self._views)), self.rows, blocks, rows, to_host=True)
            return
        for begin in range(0, len(rows), len(self._staging)):
            part = rows[begin : begin + len(self._staging)]
            here, there = blocks[begin : begin + len(part)], torch.arange(len(part))
            self._swap(range(len(self._views)), self._staging, here, there, to_host=True)
            for first, last in runs(part):
                row = int(part[first])
                to = self.rows[row : row + last - first]
                to.copy_(self._staging[first:last], non_blocking=True)

    def layers_with(self, layer: int, blocks: int) -> int:
        """How many layers come in the launch of `layer`, in a load of so many blocks; 0 if it comes with one before.
        The first comes alone."""
        together = max(1, LOADED_TOGETHER * len(self._views) // max(1, blocks * self.block_bytes))
        if layer == 0:
            return 1
        return 0 if (layer - 1) % together else min(together, len(self._views) - layer)

    def load(self, blocks: Tensor, rows: Tensor, layer: int) -> None:
        """Copy `rows` [n] int64 (CPU) to `blocks` [n] int64 (device), ordered on the current stream: the pool `layer`
        of those given at the start, and those that come with it (`layers_with`). For all layers in their order."""
        if count := self.layers_with(layer, len(rows)):
            self._swap(range(layer, layer + count), self.rows, blocks, rows, to_host=False)

    def _swap(self, layers: range, host: Tensor, blocks: Tensor, rows: Tensor, *, to_host: bool) -> None:
        views = [view for layer in layers for view in self._views[layer]]
        offsets = [offset for layer in layers for offset in self._offsets[layer]]
        torch.ops.dsv4_sglang.swap_blocks(views, host, blocks, rows, to_host, offsets)

    def swap(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        to_host: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Copy blocks of all layers one to one, to the host or back.

        Without a `stream` the copies are done on return; with one they are ordered on it. Raises ValueError for a block
        out of range or named twice, and then nothing has moved.
        """
        if len(device_blocks) != len(host_blocks):
            raise ValueError(f"{len(device_blocks)} device blocks and {len(host_blocks)} host blocks; expected as many")
        blocks, rows = (torch.tensor(list(ids), dtype=torch.int64) for ids in (device_blocks, host_blocks))
        _check_ids("device", blocks, min(view.shape[0] for views in self._views for view in views))
        _check_ids("host", rows, self.num_blocks)
        with torch.cuda.stream(stream):
            blocks = blocks.to(self.device)
            if to_host:
                self.save(blocks, rows)
            else:
                for layer in range(len(self._views)):
                    self.load(blocks, rows, layer)
        if stream is None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def memory_bytes(self) -> int:
        """Bytes of host memory, whole pages."""
        return self._memory.nbytes


def host_row_bytes(nbytes: int, spare: int) -> int:
    """Of a row that holds so much: whole lines, with `spare` bytes at the end whole pages."""
    unit = mmap.PAGESIZE if spare else ALIGNED
    return -(-(nbytes + spare) // unit) * unit


def host_block_bytes(pools: Sequence[PagedKVPool], spare: int = 0) -> int:
    """Bytes of host memory that a block of all `pools` takes."""
    return host_row_bytes(_row_of_a_block([pool.block_views() for pool in pools])[1], spare)


def _row_of_a_block(views: Sequence[Sequence[Tensor]]) -> tuple[list[list[int]], int]:
    """Where the block of each view of each layer lies in a row, and where the last ends: whole lines come first, so
    that all of them lie on lines."""
    sizes = [[view.shape[1] * view.itemsize for view in of_layer] for of_layer in views]
    offsets, end = [[0] * len(of_layer) for of_layer in sizes], 0
    every = [(layer, i) for layer, of_layer in enumerate(sizes) for i in range(len(of_layer))]
    for layer, i in sorted(every, key=lambda at: -math.gcd(sizes[at[0]][at[1]], ALIGNED)):
        offsets[layer][i], end = end, end + sizes[layer][i]
    return offsets, end


class FreeRows:
    """Which of `size` rows are free. They are handed out in ascending order, next to those handed out before, so that
    what is saved together can be copied together."""

    def __init__(self, size: int) -> None:
        self._free = np.ones(size, dtype=bool)
        self.available, self._next = size, 0

    def take(self, count: int) -> np.ndarray | None:
        """`count` rows, None if there are fewer."""
        if count > self.available:
            return None
        rows = self._next + np.flatnonzero(self._free[self._next : self._next + 2 * count])[:count]
        if len(rows) < count:
            every = np.flatnonzero(self._free)
            rows = np.roll(every, -int(np.searchsorted(every, self._next)))[:count]
        self._free[rows] = False
        self.available -= count
        self._next = int(rows[-1]) + 1 if count else self._next
        return rows

    def free(self) -> np.ndarray:
        """[n] int64, ascending."""
        return np.flatnonzero(self._free)

    def give_back(self, rows: np.ndarray) -> None:
        """Raises ValueError for a row that is not out."""
        if self._free[rows].any() or len(np.unique(rows)) != len(rows):
            raise ValueError(f"host rows {rows.tolist()} are given back, and not all of them are out")
        self._free[rows] = True
        self.available += len(rows)


class HostStates:
    """`rows` [n, bytes] uint8: host copies of something of a `StateStorage`, a row each. `tables` [ids, n] uint8, each
    with a part of it; the parts lie one after another in a row. `first` is the number of what is in their row 0."""

    def __init__(
        self, name: str, tables: list[Tensor], first: int, rows: int, cpus: Collection[int] | None, spare: int = 0
    ) -> None:
        if rows < 1:
            raise ValueError(f"{name} is {rows}; expected at least 1")
        self._tables, self._first = tables, first
        sizes = [table.shape[1] for table in tables]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._row_bytes = host_row_bytes(sum(sizes), spare)
        device = tables[0].device
        self._numbers = torch.arange(len(tables[0]), device=device)
        """On the device already when a copy is asked for."""
        self._memory = host_memory(rows * self._row_bytes, device, cpus)
        self.rows = self._memory.bytes[: rows * self._row_bytes].view(rows, self._row_bytes)
        self._staging: Tensor | None = None
        if device.type == "cuda":
            self._staging = torch.empty((1, self._row_bytes), dtype=torch.uint8, device=device)

    def save(self, number: int, row: int) -> None:
        """Copy what has this number to a row (from 0 on), ordered on the current stream. One stream at a time: they
        share a buffer on the GPU."""
        if self._staging is None:
            self._swap(self.rows, number, row, to_host=True)
            return
        self._swap(self._staging, number, 0, to_host=True)
        self.rows[row].copy_(self._staging[0], non_blocking=True)

    def load(self, number: int, row: int) -> None:
        """Copy a row back to what has this number, ordered on the current stream."""
        self._swap(self.rows, number, row, to_host=False)

    def _swap(self, host: Tensor, number: int, row: int, *, to_host: bool) -> None:
        here = number - self._first
        if not 0 <= here < len(self._tables[0]):
            raise IndexError(f"{number} is not in {self._first}..{self._first + len(self._tables[0]) - 1}")
        index, there = self._numbers[here : here + 1], torch.tensor([row])
        torch.ops.dsv4_sglang.swap_blocks(self._tables, host, index, there, to_host, self._offsets)

    def memory_bytes(self) -> int:
        """Bytes of host memory, whole pages."""
        return self._memory.nbytes


class HostSnapshotPool(HostStates):
    """`num_snapshots` host copies of snapshots, which count from 1: `rows` [num_snapshots, snapshot_bytes]
    uint8, the rings of all layers and then their CSA compressor states (`StateStorage.snapshot_tables`), whole lines of
    128 bytes. `spare`: as of `HostBlockPool`.

    Raises RuntimeError when the system does not give or pin so much memory; it says how much was asked for.
    """

    def __init__(
        self, storage: StateStorage, num_snapshots: int, cpus: Collection[int] | None = None, spare: int = 0
    ) -> None:
        super().__init__("num_snapshots", storage.snapshot_tables(), 1, num_snapshots, cpus, spare)
        self.num_snapshots, self.snapshot_bytes = num_snapshots, self._row_bytes


def runs(rows: Tensor) -> list[tuple[int, int]]:
    """[begin, end) of the stretches of `rows` [n] whose numbers follow each other."""
    cuts = (torch.nonzero(rows.diff() != 1).flatten() + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(rows)])) if len(rows) else []


def _check_ids(side: str, ids: Tensor, size: int) -> None:
    if (bad := ids[(ids < 0) | (ids >= size)]).numel():
        raise ValueError(f"{side} block {int(bad[0])} is not in 0..{size - 1}")
    if ids.unique().numel() != ids.numel():
        raise ValueError(f"a {side} block is named twice in {ids.tolist()}")
