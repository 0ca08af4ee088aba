"""Host memory that a GPU accesses directly: pinned, and on the NUMA node of the GPU."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dsv4_sglang.cache.host_sharing import HostSharing

# Bytes of shared memory that a process allocates at once. The processes take turns, so that the pages are divided among
# the NUMA nodes of their GPUs.
STRIPE = 64 << 20
# Name of shared memory in /proc/PID/maps.
SHARED_NAME = "dsv4_sglang-host-cache"


def cpus_in(listed: str) -> set[int]:
    """Parse a CPU list as Linux writes it: "0-3,8" is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for piece in filter(None, listed.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpus_near(device: torch.device) -> set[int]:
    """Return the CPUs of the GPU's NUMA node, an empty set for a CPU or if the system does not report them."""
    if device.type != "cuda":
        return set()
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return set()
    domain, bus, slot = place
    listed = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/local_cpulist")
    return cpus_in(listed.read_text()) & os.sched_getaffinity(0) if listed.is_file() else set()


@contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """Run this thread on `cpus` if there are any. Linux allocates a page on the node of the thread that first touches
    it.
    """
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class HostMemory:
    """Zeroed, page-aligned host memory, `bytes` [nbytes] uint8. For a GPU it is pinned, so the GPU accesses it
    directly.

    The pinned size is the requested size, rounded up to a page. (The pinned allocator of torch rounds up to a power of
    two and keeps freed memory.) The memory is unpinned when the object is freed, after all copies in flight. Tensors
    that still refer to it keep it as pageable memory.

    Shared memory has no name in a file system: the system frees it when the last process has ended, in whatever way.
    With `file` it is the memory of that file, and outlives the processes.

    Args:
        nbytes: size in bytes, rounded up to whole pages.
        device: device that accesses the memory.
        cpus: CPUs on whose NUMA node the memory is allocated, by default those of the GPU's node. Each process
            allocates its part of shared memory.
        sharing: processes that create the memory together and share it. None: only this one.
        file: in the first of these processes, the descriptor of a file in memory. It gets this size, and keeps its
            contents. The caller closes it. None: new memory.

    Raises:
        RuntimeError: the system does not provide or pin this much memory. With `sharing`, in all processes.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        cpus: Collection[int] | None = None,
        sharing: HostSharing | None = None,
        file: int | None = None,
    ) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        sharing = sharing or HostSharing()
        with running_on(cpus_near(device) if cpus is None else cpus):
            if sharing.size == 1 and file is None:
                with sharing.agreed():
                    self.bytes = _pages(self.nbytes)
            else:
                self.bytes = _shared_pages(self.nbytes, sharing, file)
            if device.type != "cuda":
                return
            with sharing.agreed():
                _register(self.bytes, device)
        unpin = weakref.finalize(self, _unregister, self.bytes.data_ptr(), device)
        unpin.atexit = False  # process exit unpins, and CUDA may already be shut down


def _pages(nbytes: int) -> Tensor:
    """Return [nbytes] uint8, page-aligned and zero; `nbytes` is a multiple of the page size.

    The pages are populated at once, so that they are allocated on this thread's NUMA node. They are shared, because a
    fork would turn private pages into copy-on-write, after which the GPU and this process could use different pages.
    """
    _require_available(nbytes)
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    with _naming(nbytes):
        return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def _shared_pages(nbytes: int, sharing: HostSharing, named: int | None) -> Tensor:
    """Return memory as `_pages` does, the same in all processes of `sharing`.

    The first process creates a file without a name, unless it has the file `named`. The others open it through its
    descriptor. Each allocates its stripes: unlike a first access, this reports a lack of memory instead of ending the
    process.
    """
    with contextlib.ExitStack() as files:

        def keep(file: int) -> int:
            files.callback(os.close, file)
            return file

        file = -1
        with sharing.agreed():
            if named is not None:
                _require_available(nbytes - min(nbytes, allocated_bytes(named)))
                with _naming(nbytes):
                    os.ftruncate(file := named, nbytes)
            elif sharing.leads:
                _require_available(nbytes)
                with _naming(nbytes):
                    file = keep(os.memfd_create(SHARED_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                    os.ftruncate(file, nbytes)
                    # An access beyond the end of a file that was shortened would end the process.
                    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        process, number = sharing.gather((os.getpid(), file))[0]
        with sharing.agreed(), _naming(nbytes):
            if not sharing.leads:
                file = keep(_open_shared(process, number, nbytes))
            for at in range(sharing.rank * STRIPE, nbytes, sharing.size * STRIPE):
                os.posix_fallocate(file, at, min(STRIPE, nbytes - at))
        with sharing.agreed(), _naming(nbytes):
            pages = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def allocated_bytes(file: int) -> int:
    """Return the bytes of memory or disk that a file has."""
    return os.fstat(file).st_blocks * 512


def _open_shared(process: int, number: int, nbytes: int) -> int:
    """Return a descriptor of another process's shared memory, which that process has opened as `number`."""
    try:
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"cannot share the host memory of process {process}: {error}; the processes of a server need the same user "
            "and the same /proc"
        ) from error
    if (size := os.fstat(file).st_size) != nbytes:
        os.close(file)
        raise RuntimeError(f"process {process} shares {_size(size)} of host memory; expected {_size(nbytes)}")
    return file


def _require_available(nbytes: int) -> None:
    """Raise RuntimeError if less memory is available. Without this check the kernel would kill a process."""
    if nbytes > (available := available_bytes()):
        raise RuntimeError(
            f"{_size(nbytes)} of host memory requested, {_size(available)} available; use fewer host blocks"
        )


@contextmanager
def _naming(nbytes: int) -> Iterator[None]:
    """Context manager: raise an error of the system as a RuntimeError that has the requested size."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"cannot allocate {_size(nbytes)} of host memory: {error}; use fewer host blocks") from error


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) == 0:
            return
        # CUDA reports the error again at the next launch. This launch consumes it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "no limit" if limit == resource.RLIM_INFINITY else _size(limit)
    raise RuntimeError(
        f"CUDA cannot pin {_size(memory.nbytes)} of host memory for {device}: {cudart.cudaGetErrorString(status)}; "
        f"{_size(available_bytes())} are available, ulimit -l is {locked}: use fewer host blocks or raise the limit"
    )


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        status = torch.cuda.cudart().cudaHostUnregister(address)
    if int(status) != 0:
        raise RuntimeError(f"CUDA cannot unpin the host memory at {address:#x}: error {int(status)}")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory available without swapping, within the limits of the control groups.

    `root` is the directory of `proc` and `sys`.
    """
    found = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found = int(value.split()[0]) << 10
    return min([found, *_left_in_cgroups(root)])


# By controllers in a line of /proc/self/cgroup ("": version 2): mount point, files with the limit and the usage of a
# group, and the field of memory.stat with reclaimable memory.
CGROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes that this process's control group and each of its parents may still allocate.

    A container may see its own group as the root, under a different path.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in CGROUP_FILES:
            continue
        mount, *names = CGROUP_FILES[controllers]
        group = root / mount / path.lstrip("/")
        while group != (root / mount).parent:
            limit, used, stat = (group / name for name in (*names[:2], "memory.stat"))
            with contextlib.suppress(OSError, ValueError):  # "max": no limit; the root group has no files
                fields = dict(field.split() for field in stat.read_text().splitlines())
                yield max(0, int(limit.read_text()) - int(used.read_text()) + int(fields.get(names[2], 0)))
            group = group.parent


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"
