"""Locks of page names: the file `<name>.lock` in a folder of stored pages.

Each process that uses the pages of a name holds a shared lock. A process that removes them holds the exclusive lock,
and removes the lock's file only while it holds it. Whoever gets a lock checks that its file is still in the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsv4_sglang.srt.host_cache.files import exists, open_file, opened_file, opened_folder, status_of

SUFFIX = ".lock"
# Bound on the bytes of a lock's file, which describes the weights.
_MOST_BYTES = 1 << 16


def acquire(name: str, kind: int, *, folder: int, create: bool = True) -> int | None:
    """Lock a page name, until the returned descriptor is closed.

    Args:
        name: the page name.
        kind: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
        folder: descriptor of the folder.
        create: create the file of the lock if it does not exist.

    Returns:
        The descriptor of the file, or None if another process holds a conflicting lock.

    Raises:
        OSError: the file cannot be opened, or it is not a regular file.
    """
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    mode = os.fstat(folder).st_mode & 0o666
    while True:
        file = open_file(name + SUFFIX, flags, mode, folder=folder)
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            if is_current(file, name, folder=folder):
                return file
        except BlockingIOError:
            os.close(file)
            return None
        os.close(file)  # another process has removed the file since it was opened


def is_current(file: int, name: str, *, folder: int) -> bool:
    """Return True if the descriptor `file` of a lock is the file that the folder has for this page name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), status_of(name + SUFFIX, folder=folder))
    return False


def in_use(folder: Path, name: str) -> bool:
    """Return True if a process uses pages of this name, or if that cannot be determined."""
    try:
        with opened_folder(folder) as directory:
            file = acquire(name, fcntl.LOCK_EX, folder=directory, create=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if file is None:
        return True
    os.close(file)
    return False


@contextmanager
def held_alone(folder: Path, name: str) -> Iterator[bool]:
    """Context manager that holds the exclusive lock of a page name. Inside, `remove` may remove the lock's file.

    Yields:
        False, without the lock, if another process uses the name.

    Raises:
        OSError: the lock cannot be opened.
    """
    with opened_folder(folder) as directory:
        existed = exists(name + SUFFIX, folder=directory)
        file = acquire(name, fcntl.LOCK_EX, folder=directory)
        if file is None:
            yield False
            return
        try:
            yield True
        finally:
            if not existed:
                remove(folder, name)
            os.close(file)


def remove(folder: Path, name: str) -> None:
    """Remove the file of a lock that this process holds alone."""
    with suppress(OSError), opened_folder(folder) as directory:
        os.unlink(name + SUFFIX, dir_fd=directory)


def describe(file: int, weights: str) -> None:
    """Write a readable description of the weights to the file of a lock."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"weights": weights}).encode(), 0)


def weights_of(folder: Path, name: str) -> str:
    """Return the description of the weights of pages with this name, "" if the folder has none."""
    try:
        with opened_folder(folder) as directory, opened_file(name + SUFFIX, folder=directory) as file:
            return str(json.loads(os.read(file, _MOST_BYTES))["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
