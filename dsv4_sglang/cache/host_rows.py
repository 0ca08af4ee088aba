"""Host copies of blocks and snapshots in rows of host memory, and the transfers between host and GPU."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.host_memory import HostMemory
from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.state_cache import StateStorage

# Number of blocks that are gathered on the GPU at once before they are copied to the host.
STAGED_BLOCKS = 64

# Bytes of layers that one launch loads, 0.3 ms on PCIe 5. Larger: the link idles for a few microseconds between
# launches. Smaller: a step waits for all layers of a launch.
LOADED_TOGETHER = 16 << 20

# Alignment in bytes. The GPU reads host memory in lines of this size, and a misaligned read takes two lines.
ALIGNED = 128


class HostRowBuffer:
    """Host memory `rows` [count, row_bytes] uint8. A row holds one item: row i of all `views`, each at its offset.

    With a GPU, saves pass through a staging buffer on it.

    Args:
        name: name of `count` in error messages.
        count: number of rows.
        views: by layer, tensors with an item in every row, [items, n] without gaps in a row, all on one device.
        offsets: by layer, the offset of each view in a host row.
        row_bytes: bytes of a row.
        cpus: as in `HostBlockPool`.
        sharing: as in `HostBlockPool`.
        staged: rows of the staging buffer.
        file: as in `HostMemory`.

    Raises:
        ValueError: `count` is below 1.
        RuntimeError: as in `HostMemory`.
    """

    def __init__(
        self,
        name: str,
        count: int,
        views: Sequence[Sequence[Tensor]],
        offsets: Sequence[Sequence[int]],
        row_bytes: int,
        cpus: Collection[int] | None,
        sharing: HostSharing | None,
        staged: int,
        file: int | None,
    ) -> None:
        if count < 1:
            raise ValueError(f"{name} is {count}; expected at least 1")
        self._views, self._offsets = views, offsets
        self.device = views[0][0].device
        self.sharing = sharing or HostSharing()
        self._memory = HostMemory(count * row_bytes, self.device, cpus, self.sharing, file)
        self.rows = self._memory.bytes[: count * row_bytes].view(count, row_bytes)
        self._staging: Tensor | None = None
        if self.device.type == "cuda":
            self._staging = torch.empty((min(staged, count), row_bytes), dtype=torch.uint8, device=self.device)

    def memory_bytes(self) -> int:
        """Return the bytes of host memory, in whole pages."""
        return self._memory.nbytes

    def _save(self, items: Tensor, rows: Tensor) -> None:
        """Copy items of all layers to the host, ordered on the current stream.

        Args:
            items: int64 [n] on the device, rows of the views.
            rows: int64 [n] on the CPU, rows of the host memory.
        """
        self._check(items)
        layers = range(len(self._views))
        if self._staging is None:
            self._swap(layers, self.rows, items, rows, to_host=True)
            return
        for begin in range(0, len(rows), len(self._staging)):
            part = rows[begin : begin + len(self._staging)]
            here, there = items[begin : begin + len(part)], torch.arange(len(part))
            self._swap(layers, self._staging, here, there, to_host=True)
            for first, last in runs(part):
                row = int(part[first])
                to = self.rows[row : row + last - first]
                to.copy_(self._staging[first:last], non_blocking=True)

    def _check(self, items: Tensor) -> None:
        """Raise ValueError if an item is not in the views or is listed twice. Nothing has been copied.

        On a GPU this would wait for the device. There an assertion on the device ends the process if an item is not in
        the views: the copy would leave its host row, which the caller takes for saved, as it was.
        """
        size = min(view.shape[0] for of_layer in self._views for view in of_layer)
        inside = (items >= 0) & (items < size)
        if items.device.type != "cpu":
            torch._assert_async(inside.all(), f"host pool: an item is not in 0..{size - 1}")
            return
        if not inside.all():
            raise ValueError(f"item {int(items[~inside][0])} on the device is not in 0..{size - 1}")
        if items.unique().numel() != items.numel():
            raise ValueError(f"an item on the device is listed twice in {items.tolist()}")

    def _swap(self, layers: range, host: Tensor, items: Tensor, rows: Tensor, *, to_host: bool) -> None:
        views = [view for layer in layers for view in self._views[layer]]
        offsets = [offset for layer in layers for offset in self._offsets[layer]]
        torch.ops.dsv4_sglang.swap_blocks(views, host, items, rows, to_host, offsets)


class HostBlockPool(HostRowBuffer):
    """`num_blocks` host blocks for the paged pools of one or several layers.

    `rows` [num_blocks, block_bytes] uint8 has one row per block, with the data of all layers
    (`PagedKVPool.block_views`). Its layout is the same on every kind of GPU. A row is a multiple of 128 bytes; the
    parts of HCA layers, whose sizes are no multiples, are at its end. Saving gathers blocks on the GPU and then copies
    each run of consecutive rows, so SMs are busy only briefly. Loading takes one launch for the first layer, so that a
    step can start early, and launches of several layers for the others.

    Args:
        pools: the layers' pools, all on one device. With a GPU the host memory is pinned.
        num_blocks: number of blocks of 128 tokens, the same for every layer.
        cpus: CPUs on whose NUMA node the memory is allocated, by default those of the GPU's node.
        spare: bytes at the end of each row for other users. Rows are then whole pages.
        sharing: processes that create the pool together. They share its memory and agree on what is in which row.
        file: as in `HostMemory`. The rows keep its contents.

    Raises:
        ValueError: `num_blocks` is below 1.
        RuntimeError: the system does not provide or pin this much memory. The message has the requested size.
    """

    def __init__(
        self,
        pools: Sequence[PagedKVPool],
        num_blocks: int,
        cpus: Collection[int] | None = None,
        spare: int = 0,
        sharing: HostSharing | None = None,
        file: int | None = None,
    ) -> None:
        views = [pool.block_views() for pool in pools]
        offsets, end = _row_layout(views)
        self.num_blocks, self.block_bytes = num_blocks, host_row_bytes(end, spare)
        super().__init__("num_blocks", num_blocks, views, offsets, self.block_bytes, cpus, sharing, STAGED_BLOCKS, file)

    def save(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy blocks of all layers to the host, ordered on the current stream.

        Use one stream at a time: all calls share a staging buffer on the GPU.

        Args:
            blocks: int64 [n] on the device, block ids as `swap_blocks` takes them.
            rows: int64 [n] on the CPU, rows of the host pool.

        Raises:
            ValueError: a block is not in the pools or is listed twice, or a row is not in the host pool. Nothing has
                been copied. A GPU instead ends the process for a block that is not in the pools.
        """
        self._save(blocks, rows)

    def layers_with(self, layer: int, blocks: int) -> int:
        """Return the number of layers that the launch for `layer` loads, 0 if an earlier launch has already loaded it.

        The first layer is loaded alone. `blocks` is the number of blocks in the load.
        """
        together = max(1, LOADED_TOGETHER * len(self._views) // max(1, blocks * self.block_bytes))
        if layer == 0:
            return 1
        return 0 if (layer - 1) % together else min(together, len(self._views) - layer)

    def load(self, blocks: Tensor, rows: Tensor, layer: int) -> None:
        """Copy the data of one layer back to the GPU, with the layers of the same launch, ordered on the current
        stream.

        Call this for all layers in ascending order.

        Args:
            blocks: int64 [n] on the device, block ids.
            rows: int64 [n] on the CPU, rows of the host pool.
            layer: index of a pool among those given to the constructor.

        Raises:
            ValueError: as in `save`. `blocks` is checked with the first layer.
        """
        if layer == 0:
            self._check(blocks)
        if count := self.layers_with(layer, len(rows)):
            self._swap(range(layer, layer + count), self.rows, blocks, rows, to_host=False)


def host_row_bytes(nbytes: int, spare: int) -> int:
    """Return the bytes of a row of `nbytes` data bytes: a multiple of 128, with `spare` bytes at the end a multiple of
    a page.
    """
    unit = mmap.PAGESIZE if spare else ALIGNED
    return -(-(nbytes + spare) // unit) * unit


def host_block_bytes(pools: Sequence[PagedKVPool], spare: int = 0) -> int:
    """Return the bytes of host memory per block of all `pools`."""
    return host_row_bytes(_row_layout([pool.block_views() for pool in pools])[1], spare)


def _row_layout(views: Sequence[Sequence[Tensor]]) -> tuple[list[list[int]], int]:
    """Return the offset of each view of each layer in a row, and the end of the last one.

    Parts whose sizes are multiples of 128 bytes come first, so that all of them are aligned.
    """
    sizes = [[view.shape[1] * view.itemsize for view in of_layer] for of_layer in views]
    offsets, end = [[0] * len(of_layer) for of_layer in sizes], 0
    every = [(layer, i) for layer, of_layer in enumerate(sizes) for i in range(len(of_layer))]
    for layer, i in sorted(every, key=lambda at: -math.gcd(sizes[at[0]][at[1]], ALIGNED)):
        offsets[layer][i], end = end, end + sizes[layer][i]
    return offsets, end


class HostSnapshotPool(HostRowBuffer):
    """`num_snapshots` host copies of snapshots, which are numbered from 1.

    A row of `rows` [num_snapshots, snapshot_bytes] uint8 holds the rings of all layers, then their CSA compressor
    states (`StateStorage.snapshot_tables`). It is a multiple of 128 bytes. `spare`, `sharing`, `file`: as in
    `HostBlockPool`.

    Raises:
        ValueError: `num_snapshots` is below 1.
        RuntimeError: the system does not provide or pin this much memory. The message has the requested size.
    """

    def __init__(
        self,
        storage: StateStorage,
        num_snapshots: int,
        cpus: Collection[int] | None = None,
        spare: int = 0,
        sharing: HostSharing | None = None,
        file: int | None = None,
    ) -> None:
        tables = storage.snapshot_tables()
        *offsets, end = itertools.accumulate((table.shape[1] for table in tables), initial=0)
        size = host_row_bytes(end, spare)
        super().__init__("num_snapshots", num_snapshots, [tables], [offsets], size, cpus, sharing, 1, file)
        self.num_snapshots, self.snapshot_bytes = self.rows.shape
        # Precomputed on the device, so that a copy needs no transfer of its index.
        self._numbers = torch.arange(len(tables[0]), device=self.device)

    def save(self, snapshot: int, row: int) -> None:
        """Copy a snapshot to a host row, ordered on the current stream.

        Use one stream at a time: all calls share a staging buffer on the GPU.

        Raises:
            IndexError: there is no such snapshot.
        """
        self._save(self._index(snapshot), torch.tensor([row]))

    def load(self, snapshot: int, row: int) -> None:
        """Copy a host row back to a snapshot, ordered on the current stream. Raise IndexError as `save` does."""
        self._swap(range(1), self.rows, self._index(snapshot), torch.tensor([row]), to_host=False)

    def _index(self, snapshot: int) -> Tensor:
        """Return the row of a snapshot in the tables, [1] int64 on the device."""
        if not 1 <= snapshot <= len(self._numbers):
            raise IndexError(f"{snapshot} is not in 1..{len(self._numbers)}")
        return self._numbers[snapshot - 1 : snapshot]


def runs(rows: Tensor) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of `rows` [n] that contain consecutive numbers."""
    cuts = (torch.nonzero(rows.diff() != 1).flatten() + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(rows)])) if len(rows) else []
