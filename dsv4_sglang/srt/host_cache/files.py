"""Files of a folder that other users may write.

A member of the folder's group can plant a link, a FIFO or a device under any name. Files are therefore opened relative
to the descriptor of their folder, without following a link, and only regular files are used.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK the open of a FIFO waits for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def opened_folder(folder: Path, below: Path = Path()) -> Iterator[int]:
    """Context manager with the descriptor of `folder`, or of its subfolder `below`, which is reached without links.

    Raises:
        OSError: the folder cannot be opened, or a part of `below` is a link.
    """
    descriptor = os.open(folder, _FOLDER)
    try:
        for part in below.parts:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(name: str, flags: int = os.O_RDONLY, mode: int = 0o600, *, folder: int) -> int:
    """Open a regular file and return its descriptor.

    A file that is opened to be written must not have a second name: it may be a file of this user elsewhere.

    Args:
        name: name of the file in the folder.
        flags, mode: as in `os.open`.
        folder: descriptor of the folder.

    Raises:
        OSError: the file cannot be opened, or it is a link, a FIFO or a device.
    """
    try:
        file = os.open(name, flags | _FILE, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link; expected a regular file", name) from None
        raise
    status = os.fstat(file)
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if not stat.S_ISREG(status.st_mode) or (writes and status.st_nlink > 1):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file with one name", name)
    return file


@contextmanager
def opened_file(name: str, *, folder: int) -> Iterator[int]:
    """Context manager with the descriptor of a regular file that is read. `folder`: as in `open_file`."""
    file = open_file(name, folder=folder)
    try:
        yield file
    finally:
        os.close(file)


def read_into(buffer: memoryview, name: str, *, folder: int) -> int:
    """Read the start of a file into `buffer`. Return the number of bytes, less than the buffer's for a short file."""
    done = 0
    with opened_file(name, folder=folder) as file:
        while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], done)):
            done += count
    return done


def write_file(name: str, content: Any, mode: int, *, folder: int) -> None:
    """Create or replace a file. Other processes see all of its content or none of it.

    Args:
        name: name of the file in the folder.
        content: an object with the buffer interface.
        mode: permissions of the file.
        folder: descriptor of the folder.

    Raises:
        OSError: the file cannot be written completely, for example because the disk is full. Nothing is left of it.
    """
    temporary = f".{uuid.uuid4().hex}.tmp"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
    try:
        try:
            os.fchmod(file, mode)
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def status_of(name: str, *, folder: int) -> os.stat_result:
    """Return the status of a file, or of the link itself."""
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def exists(name: str, *, folder: int) -> bool:
    """Return True if the folder has anything of this name."""
    try:
        status_of(name, folder=folder)
    except FileNotFoundError:
        return False
    return True
