"""A folder of stored pages: who may write it, what lies in it, and which servers use it.

Nothing here needs SGLang: `dsv4-sglang storage` reads folders without a server.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsv4_sglang.ops.trust import reject_writable_by_all, require_own, require_owner

log = logging.getLogger(__name__)

PAGE_VERSION = 4
"""The version of what a page holds, beyond what `names.page_name` hashes."""
KEY_CHARACTERS = 64
"""Length of SGLang's key of a page, a SHA-256 in hexadecimal."""
LONGEST_TEMPORARY = 66
"""Characters that SGLang 0.5.17 appends to the name of a file while it writes it: process, thread and a UUID."""
STALE_SECONDS = 3600
"""Age from which a temporary file is one of a killed process. A page is written in milliseconds."""
USED, UNUSED = "used", "unused"
FORMER_WEIGHTS, FORMER_FORMAT, TEMPORARY = "former weights", "former format", "temporary"
ORPHANS = (FORMER_WEIGHTS, FORMER_FORMAT, TEMPORARY)
"""States of pages that no server can ever read again."""
_PAGE = re.compile(
    rf"[0-9a-f]{{{KEY_CHARACTERS}}}(?:\.[a-z0-9_]+)?_"
    r"(?P<name>.+-dsv4v(?P<version>\d+)-[a-z0-9]+-[a-z0-9]+-(?:[0-9a-f]{32}|[0-9a-f]{16})(?P<update>-[0-9a-f]{16})?)"
    r"(?P<end>_[a-z0-9_]+|\.bin(?:\.tmp\..*)?|)"
)
_NAMELESS_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
"""What SGLang 0.5.23 calls a file while it writes it."""


def own_folder(named: str | None, default: str, variable: str) -> Path:
    """Make the folder with mode 0700 if it does not exist, and return it.

    Args:
        named: the value of `variable` of the environment, None if it is not set.
        default: the folder without it. Its name in /tmp is known to all users.
        variable: named in errors.

    Raises:
        RuntimeError: another user owns the folder or can write it, so pages there may be anybody's. A group may write
            a folder that is named. A default folder may not be a link.
    """
    folder, other = Path(named or default), f"Or set {variable} to a folder that is yours alone"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not named and folder.is_symlink():
        raise RuntimeError(f"{folder} is a link; expected a folder. {other}")
    require_trusted(folder, bool(named), other)
    return folder


def require_trusted(folder: Path, named: bool, other: str) -> None:
    """Raise RuntimeError if pages in a folder may be another user's."""
    if named:
        require_owner(folder, other)
        reject_writable_by_all(folder, adding=True)
    else:
        require_own(folder, other)


def require_names(path: Path, variable: str) -> None:
    """Raise RuntimeError if a file of this path, the longest that a storage writes, cannot be made. A disk without room
    is no error: pages are stored again when there is some."""
    try:
        path.touch(mode=0o600)
        path.unlink(missing_ok=True)  # another process of the server tries the same
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RuntimeError(
                f"{path.parent} cannot hold a page: {error.strerror}, for a file name of {len(path.name)} characters. "
                f"Set {variable} to a folder that can"
            ) from error


class UsedFolder:
    """A folder in use by this process, for pages of one name at a time.

    The name is that of a file in the folder which the process holds a lock of as long as it lives, so that others can
    tell pages that are in use from those that are not.
    """

    def __init__(self, path: Path, named: bool, on_return: Callable[[], None]) -> None:
        """`named`: as in `require_trusted`; `on_return` is called when the folder was gone and is there again."""
        self.path, self._named, self._on_return = path, named, on_return
        self._name = ""
        self._file: int | None = None
        self._lost: str | None = None
        self._look = threading.Lock()

    def use(self, name: str) -> None:
        """Pages are those of this name from now on."""
        if self._file is not None:
            os.close(self._file)
        self._name, self._file = name, None
        with suppress(OSError):  # no room, or the folder is gone: others take the pages for unused ones then
            mode = self.path.stat().st_mode & 0o666
            self._file = os.open(_lock_file(self.path, name), os.O_RDWR | os.O_CREAT, mode)
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def available(self) -> bool:
        """Return True if the folder is there. Log when that changes."""
        with self._look:
            reason = self._why_not()
            if reason and not self._lost:
                log.warning("host cache: %s; the server goes on without stored pages until it is back", reason)
            if self._lost and not reason:
                log.warning("host cache: the storage's folder %s is back and in use again", self.path)
                self.use(self._name)
                self._on_return()
            self._lost = reason
            return not reason

    def _why_not(self) -> str | None:
        if not self.path.is_dir():
            return f"the storage's folder {self.path} is gone"
        if self._lost:
            try:
                require_trusted(self.path, self._named, "Or start the server with another folder")
            except (OSError, RuntimeError) as error:
                return str(error)
        return None


def _lock_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def in_use(folder: Path, name: str) -> bool:
    """Return True if a process uses pages of this name, or if that cannot be told."""
    try:
        with _lock_file(folder, name).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass(frozen=True)
class StoredFile:
    """A file of a storage. `name`: of its model, empty where the file does not say; `used_at`: seconds since 1970."""

    path: Path
    name: str
    state: str
    bytes: int
    used_at: float


def stored_files(folder: Path) -> Iterator[StoredFile]:
    """Yield the pages and temporary files of this package in a folder, in subfolders too. Files of others are left out.

    Raises OSError if the folder cannot be read.
    """
    names: dict[str, bool] = {}
    for at, _, files in os.walk(folder, onerror=_raise):
        for file in files:
            page, path = _PAGE.fullmatch(file), Path(at, file)
            if page is None and not _NAMELESS_TEMPORARY.fullmatch(file):
                continue
            try:
                status = path.stat()
            except OSError:  # removed meanwhile
                continue
            name = page["name"] if page else ""
            if name not in names:
                names[name] = bool(name) and in_use(folder, name)
            state = _state_of(page, names[name])
            yield StoredFile(path, name, state, status.st_size, status.st_mtime)


def _raise(error: OSError) -> None:
    raise error


def _state_of(page: re.Match[str] | None, used: bool) -> str:
    if page is None or ".tmp." in page["end"]:
        return TEMPORARY
    if used:
        return USED
    if int(page["version"]) < PAGE_VERSION:
        return FORMER_FORMAT
    return FORMER_WEIGHTS if page["update"] else UNUSED


def is_stale(file: StoredFile) -> bool:
    """Return True if a file can be removed without any loss: no server reads it again, and none writes it."""
    if file.state == TEMPORARY:
        return time.time() - file.used_at > STALE_SECONDS
    return file.state in ORPHANS


def prune(folder: Path, names: Sequence[str] = (), unused_days: float | None = None) -> list[StoredFile]:
    """Remove what no server can read again, and return what was removed.

    Args:
        folder: of the storage.
        names: remove the pages of these models too, unless a server uses them.
        unused_days: remove pages that no server uses and that were last written or read that many days ago too.
    """
    before = -float("inf") if unused_days is None else time.time() - 86400 * unused_days
    removed = []
    for file in stored_files(folder):
        unused = file.state == UNUSED and (file.name in names or file.used_at <= before)
        if is_stale(file) or unused:
            with suppress(FileNotFoundError):
                file.path.unlink()
                removed.append(file)
    left = {file.name for file in stored_files(folder)}
    for lock in folder.glob("*-dsv4v*.lock"):
        if lock.stem not in left and not in_use(folder, lock.stem):
            lock.unlink(missing_ok=True)
    return removed
