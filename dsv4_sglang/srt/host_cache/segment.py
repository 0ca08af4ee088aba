"""Segments: host rows in shared memory that outlive their server and that other servers read.

A segment has the rows of one host cache. It is a set of files in a folder of a memory file system:

- `<stem>.blocks` and `<stem>.snapshots`: the rows,
- `<stem>.index`: which page is in which row,
- `<stem>.lock`, `<stem>.ranks.lock`: locks of the owner and of the processes that share its rows. The system releases
  them when the processes end, in whatever way. A segment without an owner is taken over by the next server.

Only the owner writes. Others read without a lock: they copy a row and compare the checksum, which includes the page's
name. A row that changes meanwhile, or that a killed owner left unfinished, is a miss.

This module does not import SGLang: `dsv4-sglang storage` reads segments without a server.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from dsv4_sglang.srt.host_cache import locks
from dsv4_sglang.srt.host_cache.files import open_file, opened_folder
from dsv4_sglang.srt.host_cache.folder import CHECKSUM_BYTES, page_checksum
from dsv4_sglang.srt.host_cache.segment_index import (
    HEADER_BYTES,
    KEY_BYTES,
    RECORD,
    SEGMENT_VERSION,
    Header,
    RowIndex,
    find,
)

BLOCKS, SNAPSHOTS = "blocks", "snapshots"
POOLS = (BLOCKS, SNAPSHOTS)
INDEX, RANKS = ".index", ".ranks"
_FILE = re.compile(r"(?P<stem>segment-[0-9a-f]{32})(\.index|\.blocks|\.snapshots)")


class OpenSegment:
    """A segment of which another process may be the owner, open for reading."""

    def __init__(self, header: Header, index: int, rows: dict[str, int]) -> None:
        """`index`, `rows`: descriptors of the index and of the pools' rows."""
        self.header, self._index, self._rows = header, index, rows
        self._offsets = {pool: header.offset(pool) for pool in header.pools}

    def has(self, pool: str, key: bytes) -> bool:
        return self._find(pool, key) is not None

    def read(self, pool: str, key: bytes, into: memoryview) -> bool:
        """Copy the row of a page. The caller compares the checksum: the row may change meanwhile.

        Returns:
            False if there is none.
        """
        row, size = self._find(pool, key), len(into)
        return row is not None and os.preadv(self._rows[pool], [into], row * size) == size

    def _find(self, pool: str, key: bytes) -> int | None:
        at = self._offsets[pool]
        return find(lambda count, offset: os.pread(self._index, count, at + offset), self.header.pools[pool], key)

    def records(self, pool: str) -> np.ndarray:
        """Return the records of a pool [rows]."""
        size = self.header.pools[pool]
        content = os.pread(self._index, size.records_bytes, self._offsets[pool])
        return np.frombuffer(content, RECORD, len(content) // RECORD.itemsize)

    def is_intact(self, pool: str, row: int) -> bool:
        """Return True if the row of a page has the page's checksum, or has lost the page."""
        size, key = self.header.pools[pool].row_bytes, self._key(pool, row)
        content = os.pread(self._rows[pool], size, row * size)
        page, found = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        return found == page_checksum(stem_of(pool, key.hex(), self.header.name), page) or key != self._key(pool, row)

    def _key(self, pool: str, row: int) -> bytes:
        """Return the key of the page of a row."""
        return os.pread(self._index, KEY_BYTES, self._offsets[pool] + row * RECORD.itemsize)


def stem_of(pool: str, key: str, name: str) -> str:
    """Return the name of a page, with the name of its model. `key`: SGLang's key of the page."""
    return f"{key}_{name}" if pool == BLOCKS else f"{key}.{pool}_{name}"


@contextmanager
def opened_segment(folder: int, stem: str) -> Iterator[OpenSegment | None]:
    """Context manager with a segment in the folder with the descriptor `folder`.

    Yields:
        None if the segment is missing, not complete, or of another version.
    """
    with ExitStack() as files:

        def opened(suffix: str) -> int:
            file = open_file(stem + suffix, folder=folder)
            files.callback(os.close, file)
            return file

        segment = None
        with suppress(OSError):
            index = opened(INDEX)
            header = Header.decode(os.pread(index, HEADER_BYTES, 0))
            if header is not None and header.version == SEGMENT_VERSION:
                segment = OpenSegment(header, index, {pool: opened(f".{pool}") for pool in header.pools})
        yield segment


def stems_in(folder: int) -> list[str]:
    """Return the stems of the segments in the folder with the descriptor `folder`."""
    return sorted({found["stem"] for name in os.listdir(folder) if (found := _FILE.fullmatch(name))})


class OwnSegment:
    """The segment of this process, or of the first of the processes that share its rows.

    Attributes:
        indices: index of the rows by pool.
        files: descriptors of the rows by pool.
        resumed: True if an earlier server has left the segment.
        release: releases the lock. So does the end of the process.
    """

    def __init__(self, folder: Path, stem: str, lock: int, header: Header) -> None:
        """Own a segment whose lock this process holds with the descriptor `lock`, which this object closes.

        Raises:
            OSError: there is too little memory for the index.
        """
        self.folder, self.stem, self.header = folder, stem, header
        with opened_folder(folder) as directory:
            create = partial(open_file, flags=os.O_RDWR | os.O_CREAT, folder=directory)
            index = create(stem + INDEX)
            self.files = {pool: create(f"{stem}.{pool}") for pool in header.pools}
        for file in (index, *self.files.values()):
            weakref.finalize(self, os.close, file)
        former = Header.decode(os.pread(index, HEADER_BYTES, 0))
        if former is not None and os.fstat(index).st_size != former.index_bytes:
            former = None  # another program has changed it
        self.resumed = former is not None
        before: dict[str, np.ndarray] = {}
        if former is None or former.pools != header.pools:
            before = {} if former is None else self._records(index, former)
            os.pwrite(index, bytes(HEADER_BYTES), 0)  # not complete until the end
            os.ftruncate(index, 0)
            os.ftruncate(index, header.index_bytes)
            os.posix_fallocate(index, 0, header.index_bytes)
        self._memory = memoryview(mmap.mmap(index, header.index_bytes))
        self.indices = {
            pool: RowIndex(self._memory[(at := header.offset(pool)) : at + size.index_bytes], size)
            for pool, size in header.pools.items()
        }
        for pool, records in before.items():
            self.indices[pool].restore(records)
        self._memory[:HEADER_BYTES] = header.encode()
        self.release = weakref.finalize(self, os.close, lock)

    @staticmethod
    def _records(index: int, former: Header) -> dict[str, np.ndarray]:
        return {pool: OpenSegment(former, index, {}).records(pool) for pool in former.pools}

    def use_name(self, name: str, weights: str) -> None:
        """Forget all pages, and use another page name from now on."""
        self._memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
        for pool, size in self.header.pools.items():
            self.indices[pool].clear(np.arange(size.rows))
        self.header = Header(name, weights, self.header.pools)
        self._memory[:HEADER_BYTES] = self.header.encode()

    @contextmanager
    def others(self) -> Iterator[list[OpenSegment]]:
        """Context manager with the other segments of the folder that have pages of the same name."""
        found = []
        with ExitStack() as opened:
            with suppress(OSError):  # the folder is missing
                folder = opened.enter_context(opened_folder(self.folder))
                for stem in stems_in(folder):
                    if stem != self.stem:
                        found.append(opened.enter_context(opened_segment(folder, stem)))
            yield [segment for segment in found if segment is not None and segment.header.name == self.header.name]


def remove_segment(folder: Path, stem: str) -> None:
    """Remove the files of a segment whose lock this process holds."""
    with opened_folder(folder) as directory:
        for suffix in (INDEX, *(f".{pool}" for pool in POOLS), RANKS + locks.SUFFIX):
            with suppress(FileNotFoundError):
                os.unlink(stem + suffix, dir_fd=directory)
    locks.remove(folder, stem)
