"""Host memory in the form that SGLang's hierarchical cache expects: pools that allocate rows and copy them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.base import HostKVCache, synchronized
from torch import Tensor

from dsv4_sglang.cache.free_list import FreeRows
from dsv4_sglang.cache.host_rows import HostBlockPool, HostSnapshotPool
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.host_cache.folder import CHECKSUM_BYTES, page_checksum
from dsv4_sglang.srt.host_cache.kept_rows import KeptRows
from dsv4_sglang.srt.host_cache.segment import BLOCKS
from dsv4_sglang.srt.host_cache.segment import SNAPSHOTS as SNAPSHOT_ROWS

if TYPE_CHECKING:
    from dsv4_sglang.srt.host_cache.shared_memory import SharedSegment

# SGLang's name for the pool of snapshots. Every rank would write a pool named MAMBA to a storage, under its own name.
SNAPSHOTS = PoolName.DEEPSEEK_V4_C4_STATE


def checksum(page: Tensor, name: str) -> None:
    """Write a checksum of the content and the name of a page to the last bytes of the page.

    Args:
        page: [n] uint8.
        name: key of the page in the storage.
    """
    page[-CHECKSUM_BYTES:] = _checksum(page, name)


def verify_checksum(page: Tensor, name: str) -> bool:
    """Return True if the checksum in a page matches its content and this name."""
    return torch.equal(page[-CHECKSUM_BYTES:], _checksum(page, name))


def _checksum(page: Tensor, name: str) -> Tensor:
    digest = page_checksum(name, page[:-CHECKSUM_BYTES].contiguous().numpy().data)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


class StoredRows(HostKVCache):
    """Host rows as pages of a storage. A row holds one page of `page_size` indices of the tree (int64, on the CPU).

    Attributes:
        kv_buffer: [rows, row_bytes] uint8. The last bytes of a row hold its checksum.
        row_bytes: bytes of a row.
    """

    kv_buffer: Any
    row_bytes: int

    def rows_of(self, indices: Tensor) -> Tensor:
        """Return the rows of whole pages of indices, [n] int64."""
        return indices[:: self.page_size] // self.page_size

    def checksum(self, indices: Tensor, names: Sequence[str]) -> None:
        """Write a checksum to the spare bytes at the end of each row of these indices. `names`: keys of the pages in
        the storage."""
        for row, name in zip(self.rows_of(indices).tolist(), names):
            checksum(self.kv_buffer[row], name)

    def verify_checksum(self, indices: Tensor, names: Sequence[str]) -> list[bool]:
        """Return, for each row of these indices, True if its checksum matches its content and name."""
        return [verify_checksum(self.kv_buffer[row], name) for row, name in zip(self.rows_of(indices).tolist(), names)]

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Return the address and the size in bytes of each row of these indices."""
        rows = self.rows_of(indices).tolist()
        return [self.kv_buffer[row].data_ptr() for row in rows], [self.row_bytes] * len(rows)

    def get_hybrid_pool_buffer(self) -> list[Tensor]:
        return [self.kv_buffer]

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return self.row_bytes % page_size_bytes == 0 == self.kv_buffer.data_ptr() % page_size_bytes

    def get_data_page(self, index: Any, flat: bool = True) -> Tensor:
        return self.kv_buffer[int(index) // self.page_size]

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros(self.row_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        self.kv_buffer[int(index) // self.page_size].copy_(data_page)


class HostRows(StoredRows):
    """Pool of host rows. A row holds one page of `page_size` indices of the tree (int64, on the CPU).

    Processes that share the memory allocate the same rows. Each copies a part of the rows of a save, and all rows of a
    load. A save has ended when it has ended in all processes: the minimum over the processes of the finished copies,
    which SGLang computes once a scheduler iteration.

    SGLang's base class assumes a whole number of bytes per token for sizing and allocation, which this cache lacks.

    Args:
        pool: the memory of the rows.
        page_size: indices per row.
        shared: segment that has the rows, with the storage `shm`.
        name: name of the pool in the segment.
    """

    def __init__(
        self, pool: HostBlockPool | HostSnapshotPool, page_size: int, shared: SharedSegment | None, name: str
    ) -> None:
        self.pool: Any = pool
        self.shared = shared
        self._kept = None if shared is None else shared.kept[name]
        self.kv_buffer: Any = (rows := pool.rows)
        self.page_size, self.page_num = page_size, rows.shape[0]
        self.size = self.page_num * page_size
        self.row_bytes = rows.shape[1]
        self.size_per_token = self.row_bytes / page_size
        self.dtype, self.device, self.layout = torch.uint8, "cpu", "page_first"
        self.pin_memory = rows.is_pinned()
        self.start_layer = self.end_layer = 0
        self.allocator = self.fd = None
        # In SGLang this flag means that a backup takes host indices on the CPU.
        self.can_use_write_back_jit = True
        self.lock = threading.RLock()
        # Rows that all processes of the memory have saved, and that this one has loaded.
        self.saved_rows = self.loaded_rows = 0
        self.clear()

    def get_size_per_token(self) -> float:
        return self.size_per_token

    get_ksize_per_token = get_size_per_token

    def init_kv_buffer(self) -> Tensor:
        return self.kv_buffer

    def destroy(self) -> None:
        """Drop the reference to the memory. It is unpinned when its last owner drops it."""
        self.kv_buffer = self.pool = None

    @property
    def used_rows(self) -> int:
        """Number of rows in use."""
        return self.page_num - self._rows.available

    @synchronized
    def free_rows(self) -> list[int]:
        """Return the numbers of the free rows, ascending."""
        return self._rows.free().tolist()

    # Indices

    @synchronized
    def clear(self) -> None:
        self._rows: FreeRows | KeptRows = FreeRows(self.page_num) if self._kept is None else self._kept
        if self._kept is not None:
            self._kept.free_all()

    @synchronized
    def available_size(self) -> int:
        return self._rows.available * self.page_size

    @synchronized
    def alloc(self, need_size: int) -> Tensor | None:
        assert need_size % self.page_size == 0, f"{need_size} indices; expected whole pages of {self.page_size}"
        return self._indices(self._rows.take(need_size // self.page_size))

    @synchronized
    def alloc_for(self, keys: Sequence[str]) -> Tensor | None:
        """Allocate rows for pages that are fetched from a storage: if possible, rows that have them. See `alloc`."""
        if self._kept is None:
            return self._indices(self._rows.take(len(keys)))
        return self._indices(self._kept.take_for([bytes.fromhex(key) for key in keys]))

    @synchronized
    def name(self, indices: Tensor, keys: Sequence[str]) -> None:
        """Note the pages in rows that are given to a storage."""
        if self._kept is not None:
            self._kept.name(self.rows_of(indices).tolist(), [bytes.fromhex(key) for key in keys])

    def published(self, row: int) -> str:
        """Return the key under which other servers find a row, "" if they do not."""
        index = None if self._kept is None else self._kept.index
        key = b"" if index is None else index.key(row)
        return key.hex() if any(key) else ""

    def _indices(self, rows: np.ndarray | None) -> Tensor | None:
        if rows is None:
            return None
        return torch.from_numpy((rows[:, None] * self.page_size + np.arange(self.page_size)).ravel())

    @synchronized
    def free(self, indices: Tensor) -> int:
        self._rows.give_back(self.rows_of(indices).numpy())
        return len(indices)

    # Copies

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        if host_indices.numel() == 0:
            return
        rows = self.rows_of(host_indices)
        part = self.pool.sharing.part(len(rows), int(rows[0]))
        if len(part):
            indices = device_indices[part.start * self.page_size : part.stop * self.page_size]
            self.save(indices, rows[part.start : part.stop])
        self.saved_rows += len(rows)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        count = len(host_indices) // self.page_size
        if count == 0 or not self.begins(layer_id, count):
            return
        self.load(device_indices, self.rows_of(host_indices), layer_id)
        self.loaded_rows += (layer_id == 0) * count

    @abstractmethod
    def begins(self, layer: int, count: int) -> bool:
        """Return True if a load of `count` rows launches a copy for this layer (0-based in the pool). False if an
        earlier layer's copy includes it."""

    @abstractmethod
    def save(self, device_indices: Tensor, rows: Tensor) -> None:
        """Copy device entries at `device_indices` to `rows`, on the current stream."""

    @abstractmethod
    def load(self, device_indices: Tensor, rows: Tensor, layer: int) -> None:
        """Copy rows back to the device: the layers that are copied together with `layer`."""


class HostBlocks(HostRows):
    """Pool of blocks of 128 tokens. A row holds all layers of a block. Tree indices are token slots, as on the
    device."""

    def __init__(self, pool: HostBlockPool, shared: SharedSegment | None = None) -> None:
        super().__init__(pool, BLOCK, shared, BLOCKS)
        # Device indices and blocks of the current load, whose layers are requested one after another.
        self._loading: tuple[Tensor, Tensor] | None = None

    def save(self, device_indices: Tensor, rows: Tensor) -> None:
        self.pool.save(device_indices[::BLOCK] // BLOCK, rows)

    def begins(self, layer: int, count: int) -> bool:
        return bool(self.pool.layers_with(layer, count))

    def load(self, device_indices: Tensor, rows: Tensor, layer: int) -> None:
        if self._loading is None or self._loading[0] is not device_indices:
            self._loading = device_indices, device_indices[::BLOCK] // BLOCK
        self.pool.load(self._loading[1], rows, layer)


class HostSnapshots(HostRows):
    """Pool of snapshots. A snapshot has one index and one row, which is copied as a whole with layer 0."""

    def __init__(self, pool: HostSnapshotPool, shared: SharedSegment | None = None) -> None:
        super().__init__(pool, 1, shared, SNAPSHOT_ROWS)

    def save(self, device_indices: Tensor, rows: Tensor) -> None:
        for slot, row in zip(device_indices.tolist(), rows.tolist()):
            self.pool.save(slot, row)

    def begins(self, layer: int, count: int) -> bool:
        return layer == 0

    def load(self, device_indices: Tensor, rows: Tensor, layer: int) -> None:
        for slot, row in zip(device_indices.tolist(), rows.tolist()):
            self.pool.load(slot, row)
