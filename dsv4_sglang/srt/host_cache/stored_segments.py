"""Segments in a folder: which there are, which one a server takes over, and which are removed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv4_sglang.cache.host_memory import available_bytes
from dsv4_sglang.srt.host_cache import locks
from dsv4_sglang.srt.host_cache.files import opened_file, opened_folder, status_of
from dsv4_sglang.srt.host_cache.folder import (
    FORMER_FORMAT,
    ORPHANS,
    TEMPORARY,
    USED,
    Cleaning,
    StoredFile,
    state_of_name,
    unused_since,
)
from dsv4_sglang.srt.host_cache.segment import (
    INDEX,
    POOLS,
    RANKS,
    OpenSegment,
    OwnSegment,
    opened_segment,
    remove_segment,
    stems_in,
)
from dsv4_sglang.srt.host_cache.segment_index import Header
from dsv4_sglang.srt.launch.error import LaunchError

log = logging.getLogger(__name__)

# Value of --hicache-storage-backend.
SHM = "shm"
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# Attempts to get the lock of a segment at start, SECONDS_BETWEEN apart. `dsv4-sglang storage` holds it for a moment.
ATTEMPTS, SECONDS_BETWEEN = 20, 0.01


def require_memory(folder: Path, variable: str) -> None:
    """Raise LaunchError unless a folder is in a memory file system. `variable` names the folder."""
    found, device = "unknown", folder.stat().st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            found = fields[fields.index("-") + 1]
    if found not in MEMORY_FILE_SYSTEMS:
        raise LaunchError(
            f"the folder {folder} is in a file system of type {found}; expected one in memory (tmpfs): set {variable} "
            "to a folder in /dev/shm"
        )


@dataclass(frozen=True)
class StoredSegment(StoredFile):
    """A segment in the listing of a folder. `path` is that of its index."""

    def remove(self) -> None:
        """Remove a segment that no process uses.

        Raises:
            OSError: a process uses it, or it cannot be removed.
        """
        stem = self.path.stem
        with locks.held_alone(self.folder, stem) as alone:
            if not alone or locks.in_use(self.folder, stem + RANKS):
                raise OSError(errno.EBUSY, "in use")
            remove_segment(self.folder, stem)

    def damaged(self) -> list[str]:
        """Return the pages whose checksum is wrong. Reads the whole segment."""
        found = []
        with opened_folder(self.folder) as folder, opened_segment(folder, self.path.stem) as segment:
            for pool in segment.header.pools if segment is not None else ():
                assert segment is not None
                rows = np.flatnonzero(segment.records(pool)["key"].any(1)).tolist()
                found += [f"{self.path}, row {row} of {pool}" for row in rows if not segment.is_intact(pool, row)]
        return found

    @property
    def is_stale(self) -> bool:
        return self.state in ORPHANS


def stored_segments(folder: Path, names: Sequence[str] = ()) -> Iterator[StoredSegment]:
    """Yield the segments of a folder. `names`: only those of these models.

    Raises:
        OSError: the folder cannot be read.
    """
    with opened_folder(folder) as directory:
        for stem in stems_in(directory):
            used = locks.in_use(folder, stem) or locks.in_use(folder, stem + RANKS)
            with opened_segment(directory, stem) as segment:
                if not names or (segment is not None and segment.header.name in names):
                    yield _stored(folder, directory, stem, segment, used)


def _stored(folder: Path, directory: int, stem: str, segment: OpenSegment | None, used: bool) -> StoredSegment:
    path, size, changed = folder / (stem + INDEX), 0, 0.0
    for suffix in (INDEX, *(f".{pool}" for pool in POOLS)):
        with suppress(FileNotFoundError):
            status = status_of(stem + suffix, folder=directory)
            size, changed = size + status.st_blocks * 512, max(changed, status.st_mtime)
    if segment is None:
        state = USED if used else FORMER_FORMAT if _has_header(directory, stem) else TEMPORARY
        return StoredSegment(folder, path, "", state, size, changed, "", 0)
    records = [segment.records(pool) for pool in segment.header.pools]
    pages = [of_pool["used"][of_pool["key"].any(1)] for of_pool in records]
    last = max((float(times.max()) for times in pages if len(times)), default=changed)
    name, count = segment.header.name, sum(map(len, pages))
    return StoredSegment(folder, path, name, state_of_name(name, used), size, last, segment.header.weights, count)


def _has_header(directory: int, stem: str) -> bool:
    """Return True if an index was completed."""
    with suppress(OSError), opened_file(stem + INDEX, folder=directory) as index:
        return os.pread(index, 1, 0) not in (b"", b"\0")
    return False


def own_segment(folder: Path, header: Header) -> OwnSegment:
    """Take over a segment without an owner that has pages of this name, the last used first, or create one.

    Makes room for its rows (`make_room`).

    Raises:
        OSError: the folder cannot be read or written.
        RuntimeError: there is too little memory.
    """
    segment, lock = _locked_segment(folder, header.name)
    stem, held = (segment.path.stem, segment.bytes) if segment else (f"segment-{uuid.uuid4().hex}", 0)
    if lock is None:
        lock = _lock(folder, stem)
        assert lock is not None, "a new name is not locked"
    try:
        make_room(folder, max(0, header.total_bytes - held))
        return OwnSegment(folder, stem, lock, header)
    except (OSError, RuntimeError):
        if segment is None:
            remove_segment(folder, stem)
        os.close(lock)
        raise


def _locked_segment(folder: Path, name: str) -> tuple[StoredSegment | None, int | None]:
    """Find a segment without an owner that has pages of this name, and lock it. Return it and the lock's descriptor."""
    for _ in range(ATTEMPTS):
        known = list(stored_segments(folder, [name]))
        for segment in sorted(known, key=lambda segment: -segment.used_at):
            if segment.state != USED and (lock := _lock(folder, segment.path.stem)) is not None:
                return segment, lock
        if not known:
            break
        time.sleep(SECONDS_BETWEEN)
    return None, None


def _lock(folder: Path, stem: str) -> int | None:
    """Lock a segment as its owner. Return the descriptor, None if another process uses the segment."""
    with opened_folder(folder) as directory:
        lock = locks.acquire(stem, fcntl.LOCK_EX, folder=directory)
    if lock is not None and locks.in_use(folder, stem + RANKS):
        os.close(lock)
        return None
    return lock


def free_bytes(folder: Path) -> int:
    """Return the bytes that files of a folder in memory can still take."""
    status = os.statvfs(folder)
    return min(available_bytes(), status.f_bavail * status.f_frsize)


def unowned_bytes(folder: Path) -> int:
    """Return the bytes of the segments of a folder that no process uses."""
    return sum(segment.bytes for segment in stored_segments(folder) if segment.state != USED)


def make_room(folder: Path, needed: int) -> None:
    """Remove segments that no process uses until `needed` bytes are free: those that no server can read again, then
    the least recently used.

    Raises:
        RuntimeError: too little is available. If it would be too little without the segments, they stay.
    """
    unowned = [segment for segment in stored_segments(folder) if segment.state != USED]
    _require_room(folder, needed, free_bytes(folder) + sum(segment.bytes for segment in unowned))
    for segment in sorted(unowned, key=lambda segment: (not segment.is_stale, segment.used_at)):
        if segment.is_stale or free_bytes(folder) < needed:
            with suppress(OSError):  # another server has taken it over
                segment.remove()
                log.warning("host cache: removed %s, %d bytes, %s", segment.path, segment.bytes, segment.state)
    _require_room(folder, needed, free_bytes(folder))


def _require_room(folder: Path, needed: int, available: int) -> None:
    if available < needed:
        raise RuntimeError(
            f"{needed} bytes requested in {folder}, {available} are available; give it a larger file system in "
            "memory, or use fewer host blocks"
        )


def clear_segments(folder: Path, names: Sequence[str] = ()) -> Cleaning:
    """Remove the segments that no process uses. `names`: only those of these models."""
    return _clean(stored_segments(folder, names), lambda segment: True)


def prune_segments(folder: Path, names: Sequence[str] = (), unused_days: float | None = None) -> Cleaning:
    """Remove the segments that no server can read again. `names`, `unused_days`: as in `folder.prune`."""

    def unneeded(segment: StoredSegment) -> bool:
        return segment.is_stale or segment.name in names or segment.used_at <= unused_since(unused_days)

    return _clean(stored_segments(folder), unneeded)


def _clean(segments: Iterable[StoredSegment], unneeded: Callable[[StoredSegment], bool]) -> Cleaning:
    done = Cleaning()
    for segment in segments:
        if segment.state == USED:
            done.kept.append(segment)
        elif unneeded(segment):
            done.remove([segment])
    return done
