"""`HostBlockPool`: blocks of paged pools in host memory, and their way there and back."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.paged_cache import PagedKVPool

_ALIGNMENT = 16
"""Bytes of the widest access of `swap_blocks`: every view of a pool's memory starts at a multiple."""


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


class PinnedMemory:
    """Zeroed host memory that the GPU reads and writes itself: `bytes` [nbytes] uint8, whole pages of its own.

    What is pinned is what was asked for, rounded up to a page: torch's allocator of pinned memory rounds to a power of
    two and keeps what is freed. Unpinned with the object, behind the copies in flight; tensors that still show the
    memory keep it, pageable.

    Raises RuntimeError when the system does not give or pin so much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bytes = _pages(self.nbytes)
        _register(self.bytes, device)
        unpin = weakref.finalize(self, _unregister, self.bytes.data_ptr(), device)
        unpin.atexit = False  # the end of the process unpins, and CUDA may be gone before it


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


def _available() -> int:
    """Bytes of memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"


class HostBlockPool:
    """`num_blocks` host blocks for the paged pools of some layers (one of several, or all of a model).

    Args:
        pools: the layers' pools, all on one device; with a GPU the host memory is pinned.
        num_blocks: blocks of 128 tokens, the same number for every layer.
        cpus: the host memory lies on the NUMA node of these CPUs; by default of those near the GPU.

    Raises RuntimeError when the system does not give or pin so much memory; it says how much was asked for.
    """

    def __init__(self, pools: Sequence[PagedKVPool], num_blocks: int, cpus: Collection[int] | None = None) -> None:
        devices = {pool.device for pool in pools}
        if len(devices) != 1:
            raise ValueError(f"the pools lie on {sorted(map(str, devices))}; expected one device")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; expected at least 1")
        self.num_blocks = num_blocks
        self.device = devices.pop()
        self._on_device: list[list[Tensor]] = [pool.block_views() for pool in pools]
        # One piece of memory for all views, because pinning rounds each piece up to pages.
        self._memory: PinnedMemory | None = None
        size = sum(self._aligned_bytes(view) for views in self._on_device for view in views)
        if self.device.type == "cuda":
            with running_on(cpus_near(self.device) if cpus is None else cpus):
                self._memory = PinnedMemory(size, self.device)
            memory = self._memory.bytes
        else:
            memory = torch.zeros(size, dtype=torch.uint8)
        self._on_host: list[list[Tensor]] = []
        begin = 0
        for views in self._on_device:
            self._on_host.append([])
            for view in views:
                end = begin + self.num_blocks * view.shape[1] * view.itemsize
                self._on_host[-1].append(memory[begin:end].view(view.dtype).view(self.num_blocks, view.shape[1]))
                begin += self._aligned_bytes(view)

    def _aligned_bytes(self, view: Tensor) -> int:
        """Bytes of `num_blocks` blocks like those of `view`, up to where the next view starts."""
        nbytes = self.num_blocks * view.shape[1] * view.itemsize
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def swap(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        to_host: bool,
        layer: int | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Copy blocks one to one, of the pool `layer` of those given at the start or of all of them.

        Without a `stream` the copies are done on return; with one they are ordered on it. Raises ValueError (CPU) or
        RuntimeError (CUDA) for a block out of range or named twice, and then nothing has moved.
        """
        if len(device_blocks) != len(host_blocks):
            raise ValueError(f"{len(device_blocks)} device blocks and {len(host_blocks)} host blocks; expected as many")
        ids = torch.tensor([list(device_blocks), list(host_blocks)], dtype=torch.int64)
        layers = range(len(self._on_device)) if layer is None else [layer]
        device_views = [view for i in layers for view in self._on_device[i]]
        host_views = [view for i in layers for view in self._on_host[i]]
        if self.device.type != "cuda":
            torch.ops.dsv4_sglang.swap_blocks(device_views, host_views, ids, to_host)
            return
        with torch.cuda.stream(stream):
            torch.ops.dsv4_sglang.swap_blocks(device_views, host_views, ids, to_host)
        if stream is None:
            torch.cuda.current_stream(self.device).synchronize()

    def memory_bytes(self) -> int:
        """Bytes of host memory that are pinned; without a GPU those of the blocks."""
        if self._memory is not None:
            return self._memory.nbytes
        return sum(view.nbytes for views in self._on_host for view in views)
