"""Storage `shm`: the host rows themselves are the stored pages, in a segment that outlives the server."""

from __future__ import annotations

import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.srt.host_cache import locks
from dsv4_sglang.srt.host_cache.files import opened_folder
from dsv4_sglang.srt.host_cache.folder import FOLDERS, own_folder
from dsv4_sglang.srt.host_cache.kept_rows import KeptRows
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS, HostRows, checksum, verify_checksum
from dsv4_sglang.srt.host_cache.segment import POOLS, RANKS, OpenSegment, OwnSegment, remove_segment, stem_of
from dsv4_sglang.srt.host_cache.segment_index import Header, PoolSize
from dsv4_sglang.srt.host_cache.stored_segments import (
    ATTEMPTS,
    SECONDS_BETWEEN,
    SHM,
    clear_segments,
    own_segment,
    require_memory,
)
from dsv4_sglang.srt.host_cache.used_folder import described
from dsv4_sglang.srt.launch.error import LaunchError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# Pools of a segment by SGLang's names.
_POOLS = dict(zip((PoolName.KV, SNAPSHOTS), POOLS))


class SharedSegment:
    """The segment of the processes that share host rows. Only the first one writes it and reads others.

    Attributes:
        segment: the segment in the first process, None in the others.
        kept: allocators of the rows by pool.
    """

    def __init__(self, sharing: HostSharing, name: str, sizes: dict[str, PoolSize]) -> None:
        """Take over a segment that an earlier server left, or create one. All processes call this.

        Args:
            sharing: the processes.
            name: page name.
            sizes: size of each pool.

        Raises:
            RuntimeError: there is too little memory.
        """
        self.segment: OwnSegment | None = None
        with sharing.agreed():
            if sharing.leads:
                self.segment = _owned(name, sizes)
        own = self.segment
        folder, stem, pages = sharing.gather(own and (own.folder, own.stem, _pages(own)))[0]
        with sharing.agreed():
            if own is None:
                weakref.finalize(self, os.close, _join(folder, stem))
        self.kept = {
            pool: KeptRows(size.rows, pages[pool], None if own is None else own.indices[pool])
            for pool, size in sizes.items()
        }
        if own is not None and own.resumed:
            found = ", ".join(f"{len(pages[pool])} {pool}" for pool in sizes)
            log.info("host cache: resumed the rows of an earlier server, %s: %s", folder / stem, found)

    def file(self, pool: str) -> int | None:
        """Return the descriptor of a pool's rows, None in the processes that do not own the segment."""
        return None if self.segment is None else self.segment.files[pool]

    def remove_unless_resumed(self) -> None:
        """Remove a new segment that did not get its memory."""
        if self.segment is not None and not self.segment.resumed:
            remove_segment(self.segment.folder, self.segment.stem)


def _owned(name: str, sizes: dict[str, PoolSize]) -> OwnSegment:
    """Own a segment in the folder of the storage."""
    variable, default = FOLDERS[SHM]
    try:
        folder = own_folder(os.environ.get(variable), default, variable, by_group=False)
        require_memory(folder, variable)
        return own_segment(folder, Header(name, described(name), sizes))
    except (LaunchError, OSError) as error:
        raise RuntimeError(str(error)) from None


def _pages(segment: OwnSegment) -> dict[str, list[tuple[int, bytes]]]:
    return {pool: index.pages() for pool, index in segment.indices.items()}


def _join(folder: Path, stem: str) -> int:
    """Lock a segment as one of the processes that share its rows. Return the descriptor of the lock."""
    for _ in range(ATTEMPTS):
        with opened_folder(folder) as directory:
            lock = locks.acquire(stem + RANKS, fcntl.LOCK_SH, folder=directory)
        if lock is not None:
            return lock
        time.sleep(SECONDS_BETWEEN)
    raise RuntimeError(f"{folder / stem}: another process holds its lock; expected none but those of this server")


class SharedMemoryStorage(HiCacheStorage):
    """Storage whose pages are the host rows of this server and of the others of this machine.

    To store a page is to publish its row. To fetch one from a free row of this server takes a comparison of its
    checksum, and from another server also a copy. Nothing waits for another server.
    """

    registered_pools: dict[PoolName, HostRows]

    def __init__(self, storage_config: Any, mem_pool_host: HostRows) -> None:
        assert mem_pool_host.shared is not None, "the rows of this storage are in a segment"
        self._segment = mem_pool_host.shared.segment
        self._kept = mem_pool_host.shared.kept
        self._first_name: str = storage_config.model_name
        self.name = self._first_name

    def available(self) -> bool:
        return True

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Look up the leading pages of a prompt, and the snapshots at their ends.

        A process that does not own the segment finds all: SGLang uses what all processes have found.
        """
        ends = list(range(1, len(keys) + 1))
        if self._segment is not None:
            with self._others() as others:
                found = [self._has(PoolName.KV, key, others) for key in keys]
                ends = ends[: found.index(False) if False in found else None]
                blocks = len(ends)
                ends = [end for end in ends if self._has(SNAPSHOTS, keys[end - 1], others)]
        else:
            blocks = len(keys)
        last = max(ends, default=0)
        return PoolTransferResult(last, {PoolName.KV: blocks, SNAPSHOTS: last}, ends)

    def exists(self, key: str) -> bool:
        with self._others() as others:
            return self._segment is None or self._has(PoolName.KV, key, others)

    def read_blocks(self, operation: Any, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None) -> int:
        """Fetch pages of blocks. Return the number of leading pages that were found. SGLang's `page_get_func`."""
        found = self._fetch(PoolName.KV, keys, host_indices)
        return found.index(False) if False in found else len(found)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {of.name: self._fetch(of.name, of.keys or [], of.host_indices) for of in transfers}

    def publish_blocks(self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None) -> bool:
        """Store pages of blocks. SGLang's `page_set_func`."""
        return all(self._publish(PoolName.KV, keys, host_indices))

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {of.name: self._publish(of.name, of.keys or [], of.host_indices) for of in transfers}

    def _publish(self, name: PoolName, keys: Sequence[str], indices: Tensor) -> list[bool]:
        pool, rows = _POOLS[name], self.registered_pools[name]
        for key, row in zip(keys, rows.rows_of(indices).tolist()):
            if not self._kept[pool].has(row, bytes.fromhex(key)):
                checksum(rows.kv_buffer[row], stem_of(pool, key, self.name))
                self._index(pool).set(row, bytes.fromhex(key))
        return [True] * len(keys)

    def _fetch(self, name: PoolName, keys: Sequence[str], indices: Tensor) -> list[bool]:
        rows = self.registered_pools[name]
        with self._others() as others:
            return [
                self._fetch_row(_POOLS[name], key, row, rows.kv_buffer, others)
                for key, row in zip(keys, rows.rows_of(indices).tolist())
            ]

    def _fetch_row(self, pool: str, key: str, row: int, rows: Any, others: Sequence[OpenSegment]) -> bool:
        """Fetch a page into a row that this process holds, unless the row has it already."""
        kept, digest, stem = self._kept[pool], bytes.fromhex(key), stem_of(pool, key, self.name)
        if kept.has(row, digest):
            if verify_checksum(rows[row], stem):
                return True
            log.warning("host cache: row %d of %s is damaged and is not used", row, pool)
            self._index(pool).clear(row)
        sources: list[Callable[[], bool]] = []
        if (own := kept.row_with(digest)) is not None:
            sources.append(lambda: bool(rows[row].copy_(rows[own]).numel()))
        page = rows[row].numpy().data
        sources += [lambda other=other: other.read(pool, digest, page) for other in others]  # type: ignore[misc]
        if not any(copy() and verify_checksum(rows[row], stem) for copy in sources):
            return False
        self._index(pool).set(row, digest)
        return True

    def _has(self, name: PoolName, key: str, others: Sequence[OpenSegment]) -> bool:
        pool, digest = _POOLS[name], bytes.fromhex(key)
        return self._kept[pool].row_with(digest) is not None or any(other.has(pool, digest) for other in others)

    def _index(self, pool: str) -> Any:
        return self._kept[pool].index

    @contextmanager
    def _others(self) -> Iterator[Sequence[OpenSegment]]:
        if self._segment is None:
            yield ()
            return
        with self._segment.others() as others:
            yield others

    def use_name(self, name: str) -> None:
        """Forget all pages of this server, and use another page name from now on, after a weight update."""
        self.name = f"{self._first_name}-{name}"
        if self._segment is not None:
            self._segment.use_name(self.name, described(self.name))
        for kept in self._kept.values():
            kept.forget_all()

    def clear(self) -> bool:
        """Remove the pages of this model, but for those of other running servers."""
        if self._segment is not None:
            self._segment.use_name(self.name, described(self.name))
            with suppress(OSError):  # the folder is missing
                clear_segments(self._segment.folder, [self.name])
        for kept in self._kept.values():
            kept.forget_all()
        return True

    def get(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError("pages are read into host rows")

    def set(self, *arguments: Any, **named: Any) -> bool:
        raise NotImplementedError("pages are host rows")

    batch_get = get
    batch_set = set
