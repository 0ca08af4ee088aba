"""`HostBlockPool`: blocks of paged pools in host memory, and their way there and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.paged_cache import PagedKVPool


def cpus_near(device: torch.device) -> set[int]:
    """CPUs of the NUMA node that the GPU hangs on; empty where the system does not say."""
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return set()
    domain, bus, slot = place
    listed = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/local_cpulist")
    if not listed.is_file():
        return set()
    cpus: set[int] = set()
    for piece in filter(None, listed.read_text().strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus & os.sched_getaffinity(0)


@contextmanager
def _running_near(device: torch.device) -> Iterator[None]:
    """This thread on the CPUs near the GPU: pinned pages are placed where the thread that pins them runs."""
    near = cpus_near(device)
    before = os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class HostBlockPool:
    """`num_blocks` host blocks for the paged pools of some layers (one of several, or all of a model).

    Args:
        pools: the layers' pools, all on one device; with a GPU the host memory is pinned and near it.
        num_blocks: blocks of 128 tokens, the same number for every layer.
    """

    def __init__(self, pools: Sequence[PagedKVPool], num_blocks: int) -> None:
        devices = {pool.device for pool in pools}
        if len(devices) != 1:
            raise ValueError(f"the pools lie on {sorted(map(str, devices))}; expected one device")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; expected at least 1")
        self.num_blocks = num_blocks
        self.device = devices.pop()
        self._on_device: list[list[Tensor]] = [pool.block_views() for pool in pools]
        self._on_host = self._allocate()

    def _allocate(self) -> list[list[Tensor]]:
        if self.device.type != "cuda":
            return [[v.new_zeros((self.num_blocks, v.shape[1])) for v in views] for views in self._on_device]
        with _running_near(self.device):
            return [
                [torch.zeros(self.num_blocks, v.shape[1], dtype=v.dtype, pin_memory=True) for v in views]
                for views in self._on_device
            ]

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
        return sum(view.nbytes for views in self._on_host for view in views)
