"""Host memory as SGLang's hierarchical cache sees it: pools that hand out rows, and copy them."""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.base import HostKVCache, synchronized
from torch import Tensor

from dsv4_sglang.cache.host_pool import FreeRows, HostBlockPool, HostSnapshotPool
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.timer import CopyTimer

SNAPSHOTS = PoolName.DEEPSEEK_V4_C4_STATE
"""The pool's name. One called MAMBA would be written to a storage by every process, each under a name of its own."""
CHECKSUM_BYTES = 16


def checksum(page: Tensor, name: str) -> None:
    """Write the checksum of a page [n] uint8 and of what a storage calls it to its last bytes."""
    page[-CHECKSUM_BYTES:] = _checksum(page, name)


def verify_checksum(page: Tensor, name: str) -> bool:
    """Whether a page is as it was checksummed, and the one of that name."""
    return torch.equal(page[-CHECKSUM_BYTES:], _checksum(page, name))


def _checksum(page: Tensor, name: str) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(page[:-CHECKSUM_BYTES].contiguous().numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


class HostRows(HostKVCache):
    """`rows` [n, bytes] uint8, a row a page of `page_size` of the tree's indices (int64, on the CPU).

    SGLang's base class sizes and allocates pools by a whole number of bytes a token, which this cache has not.
    """

    def __init__(self, rows: Tensor, page_size: int, device: torch.device) -> None:
        self.kv_buffer: Any = rows
        self.page_size, self.page_num = page_size, rows.shape[0]
        self.size = self.page_num * page_size
        self.row_bytes = rows.shape[1]
        self.size_per_token = self.row_bytes / page_size
        self.dtype, self.device, self.layout = torch.uint8, "cpu", "page_first"
        self.pin_memory = rows.is_pinned()
        self.start_layer = self.end_layer = 0
        self.allocator = self.fd = None
        # What SGLang calls so is that a backup takes host indices on the CPU.
        self.can_use_write_back_jit = True
        self.lock = threading.RLock()
        self.saving, self.loading = CopyTimer(device), CopyTimer(device)
        self.saved_rows = self.loaded_rows = 0
        self.clear()

    def get_size_per_token(self) -> float:
        return self.size_per_token

    get_ksize_per_token = get_size_per_token

    def init_kv_buffer(self) -> Tensor:
        return self.kv_buffer

    def destroy(self) -> None:
        """Let go of the memory, which is unpinned with its last owner."""
        self.kv_buffer = None

    @property
    def held(self) -> int:
        """Rows in use."""
        return self.page_num - self._rows.available

    @synchronized
    def free_rows(self) -> list[int]:
        """The rows that `alloc` would give."""
        return self._rows.free().tolist()

    # Indices

    @synchronized
    def clear(self) -> None:
        self._rows = FreeRows(self.page_num)

    @synchronized
    def available_size(self) -> int:
        return self._rows.available * self.page_size

    @synchronized
    def alloc(self, need_size: int) -> Tensor | None:
        assert need_size % self.page_size == 0, f"{need_size} indices; expected whole pages of {self.page_size}"
        rows = self._rows.take(need_size // self.page_size)
        if rows is None:
            return None
        return torch.from_numpy((rows[:, None] * self.page_size + np.arange(self.page_size)).ravel())

    @synchronized
    def free(self, indices: Tensor) -> int:
        self._rows.give_back(self.rows_of(indices).numpy())
        return len(indices)

    def rows_of(self, indices: Tensor) -> Tensor:
        """[n] int64, the rows of whole pages of indices."""
        return indices[:: self.page_size] // self.page_size

    # A row as a page of a storage behind the host

    def checksum(self, indices: Tensor, names: Sequence[str]) -> None:
        """Write the checksum of each row of these indices to its end, where the row has bytes to spare. `names`: what
        the storage calls them as pages."""
        for row, name in zip(self.rows_of(indices).tolist(), names):
            checksum(self.kv_buffer[row], name)

    def verify_checksum(self, indices: Tensor, names: Sequence[str]) -> list[bool]:
        """Whether each row of these indices is as it was checksummed, and the page of its name."""
        return [verify_checksum(self.kv_buffer[row], name) for row, name in zip(self.rows_of(indices).tolist(), names)]

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Address and bytes of each row of these indices."""
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

    # Copies

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        if host_indices.numel() == 0:
            return
        with self.saving.measure():
            self.save(device_indices, self.rows_of(host_indices))
        self.saved_rows += len(host_indices) // self.page_size

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
        with self.loading.measure():
            self.load(device_indices, self.rows_of(host_indices), layer_id)
        self.loaded_rows += (layer_id == 0) * count

    @abstractmethod
    def begins(self, layer: int, count: int) -> bool:
        """Whether something is to be launched for a layer of the pool, from 0 on, in a load of `count` rows; else it
        came with one before."""

    @abstractmethod
    def save(self, device_indices: Tensor, rows: Tensor) -> None:
        """Copy what the tree has at `device_indices` to `rows`, ordered on the current stream."""

    @abstractmethod
    def load(self, device_indices: Tensor, rows: Tensor, layer: int) -> None:
        """The way back, of the layers that come with `layer`."""


class HostBlocks(HostRows):
    """Blocks of 128 tokens, all layers in a row; the tree's indices are a slot a token, as on the device."""

    def __init__(self, pool: HostBlockPool) -> None:
        super().__init__(pool.rows, BLOCK, pool.device)
        self._pool: HostBlockPool | None = pool
        self._loading: tuple[Tensor, Tensor] | None = None
        """Device indices and blocks of the load whose layers are asked for one after another."""

    def destroy(self) -> None:
        super().destroy()
        self._pool = self._loading = None

    def save(self, device_indices: Tensor, rows: Tensor) -> None:
        assert self._pool is not None, "the pool is destroyed"
        self._pool.save(device_indices[::BLOCK] // BLOCK, rows)

    def begins(self, layer: int, count: int) -> bool:
        assert self._pool is not None, "the pool is destroyed"
        return self._pool.layers_with(layer, count) > 0

    def load(self, device_indices: Tensor, rows: Tensor, layer: int) -> None:
        assert self._pool is not None, "the pool is destroyed"
        if self._loading is None or self._loading[0] is not device_indices:
            self._loading = device_indices, device_indices[::BLOCK] // BLOCK
        self._pool.load(self._loading[1], rows, layer)


class HostSnapshots(HostRows):
    """Snapshots, a row and an index each; they have one layer, which is all of them."""

    def __init__(self, pool: HostSnapshotPool, device: torch.device) -> None:
        super().__init__(pool.rows, 1, device)
        self._pool: HostSnapshotPool | None = pool

    def destroy(self) -> None:
        super().destroy()
        self._pool = None

    def save(self, device_indices: Tensor, rows: Tensor) -> None:
        assert self._pool is not None, "the pool is destroyed"
        for slot, row in zip(device_indices.tolist(), rows.tolist()):
            self._pool.save(slot, row)

    def begins(self, layer: int, count: int) -> bool:
        return layer == 0

    def load(self, device_indices: Tensor, rows: Tensor, layer: int) -> None:
        assert self._pool is not None, "the pool is destroyed"
        for slot, row in zip(device_indices.tolist(), rows.tolist()):
            self._pool.load(slot, row)
