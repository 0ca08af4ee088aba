"""Folder of stored pages: its permissions, its files, and the servers that use it.

This module does not import SGLang: `dsv4-sglang storage` reads folders without a server.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_sglang.ops.trust import reject_writable_by_all, require_own, require_owner
from dsv4_sglang.srt.integration.launch_error import LaunchError

log = logging.getLogger(__name__)

# Environment variable with the folder of a storage, and the folder without it.
FOLDERS = {
    "file": ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/tmp/hicache"),
    "nixl": ("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", "/tmp/hicache_storage"),
}
# Version of the page format, for changes that `page_names.page_name` does not hash.
PAGE_VERSION = 4
# Length of SGLang's key of a page, a SHA-256 in hexadecimal.
KEY_CHARACTERS = 64
# Bytes of the checksum at the end of each page.
CHECKSUM_BYTES = 16
# Age in seconds from which a temporary file is assumed to be left by a killed process. Writing a page takes
# milliseconds.
STALE_SECONDS = 3600
USED, UNUSED = "used", "unused"
FORMER_WEIGHTS, FORMER_FORMAT, TEMPORARY = "former weights", "former format", "temporary"
# States of files that no server can read again.
ORPHANS = (FORMER_WEIGHTS, FORMER_FORMAT, TEMPORARY)
_PAGE = re.compile(
    rf"[0-9a-f]{{{KEY_CHARACTERS}}}(?:\.[a-z0-9_]+)?_"
    r"(?P<name>.+-dsv4v(?P<version>\d+)-[a-z0-9]+-[a-z0-9]+-(?:[0-9a-f]{32}|[0-9a-f]{16})(?P<update>-[0-9a-f]{16})?)"
    r"(?P<end>_[a-z0-9_]+|\.bin|)"
)
# Name of a file while SGLang writes it.
_NAMELESS_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


def own_folder(named: str | None, default: str, variable: str) -> Path:
    """Make the folder with mode 0700 if it does not exist, and return it.

    Args:
        named: value of the environment variable `variable`, or None if it is not set.
        default: folder to use otherwise. Its name in /tmp is known to all users.
        variable: name of the variable, for error messages.

    Raises:
        LaunchError: the folder cannot be created or written, or another user owns it or can write to it, so its pages
            cannot be trusted. A folder that `variable` names may be writable by a group. A default folder must not be a
            symbolic link.
    """
    folder, advice = Path(named or default), f"set {variable} to a folder that is yours alone"
    other = f"Or {advice}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not named and folder.is_symlink():
            raise RuntimeError(f"{folder} is a link; expected a folder; {advice}")
        require_trusted(folder, bool(named), other)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RuntimeError(f"{folder} cannot be written by user {os.geteuid()}; {advice}")
    except OSError as error:
        raise LaunchError(f"the folder {folder} cannot be created: {error.strerror}; {advice}") from None
    except RuntimeError as error:
        raise LaunchError(str(error)) from None
    return folder


def require_trusted(folder: Path, named: bool, other: str) -> None:
    """Raise RuntimeError if another user may have written pages in a folder.

    Args:
        folder: the folder.
        named: True if the user chose the folder, which a group may then write. False for a default folder.
        other: advice for the error message, such as to choose another folder.
    """
    if named:
        require_owner(folder, other)
        reject_writable_by_all(folder, adding=True)
    else:
        require_own(folder, other)


def require_names(path: Path, variable: str) -> None:
    """Raise LaunchError if a file of this path, the longest that a storage writes, cannot be created. A full disk is
    not an error, since pages are stored once there is space."""
    try:
        path.touch(mode=0o600)
        path.unlink(missing_ok=True)  # another process of the server may have removed it
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise LaunchError(
                f"{path.parent} cannot hold a page: {error.strerror}, for a file name of {len(path.name)} characters. "
                f"Set {variable} to a folder that can"
            ) from None


def page_checksum(name: str, content: Any) -> bytes:
    """Return the checksum of a page, CHECKSUM_BYTES bytes.

    Args:
        name: name of the page in the storage.
        content: bytes of the page without its last CHECKSUM_BYTES, which hold the checksum.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(content)
    return digest.digest()


_weights: dict[str, str] = {}
"""Description of the weights by page name, for the names that this process uses."""


def describe_weights(name: str, weights: str) -> None:
    """Set a readable description of the weights of pages with this name. `UsedFolder` stores it beside the pages."""
    _weights[name] = weights


def _described(name: str) -> str:
    """Return the description for a name, or for the name before an update of the weights. "" if there is none."""
    if name in _weights:
        return _weights[name]
    before = next((weights for known, weights in _weights.items() if name.startswith(f"{known}-")), "")
    return before and f"{before}, updated"


class UsedFolder:
    """A folder that this process uses, for pages of one model name at a time.

    The process holds a lock on a file of that name in the folder for its lifetime, so that other processes can tell
    used pages from unused ones. The file says which weights the pages belong to.
    """

    def __init__(self, path: Path, named: bool, on_return: Callable[[], None]) -> None:
        """Use a folder, without a page name yet.

        Args:
            path: the folder.
            named: as in `require_trusted`.
            on_return: called when the folder was missing and exists again.
        """
        self.path, self._named, self._on_return = path, named, on_return
        self._name = ""
        self._file: int | None = None
        self._lost: str | None = None
        self._look = threading.Lock()

    def use(self, name: str) -> None:
        """Use pages of this name from now on."""
        if self._file is not None:
            os.close(self._file)
        self._name, self._file = name, None
        with suppress(OSError):  # no space, or no folder: others then see the pages as unused
            mode = self.path.stat().st_mode & 0o666
            self._file = os.open(_lock_file(self.path, name), os.O_RDWR | os.O_CREAT, mode)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({"weights": _described(name)}).encode(), 0)

    def available(self) -> bool:
        """Return True if the folder exists and is trusted. Log when that changes."""
        with self._look:
            reason = self._why_not()
            if reason and not self._lost:
                log.warning("host cache: %s; the server continues without stored pages until it is back", reason)
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
    """Return True if a process uses pages of this name, or if that cannot be determined."""
    try:
        with _lock_file(folder, name).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def weights_of(folder: Path, name: str) -> str:
    """Return the description of the weights of pages with this name, "" if the folder has none."""
    try:
        return str(json.loads(_lock_file(folder, name).read_text())["weights"])
    except (OSError, ValueError, KeyError):
        return ""


@dataclass(frozen=True)
class StoredFile:
    """A file of a storage.

    `name` is the model's page name, empty if the file name does not contain it. `used_at` is in seconds since 1970.
    """

    path: Path
    name: str
    state: str
    bytes: int
    used_at: float


def stored_files(folder: Path) -> Iterator[StoredFile]:
    """Yield the pages and temporary files of this package in a folder and its subfolders. Skip other files.

    Raises:
        OSError: the folder cannot be read.
    """
    names: dict[str, bool] = {}
    for at, _, files in os.walk(folder, onerror=_raise):
        for file in files:
            page, path = _PAGE.fullmatch(file), Path(at, file)
            if page is None and not _NAMELESS_TEMPORARY.fullmatch(file):
                continue
            try:
                status = path.stat()
            except OSError:  # another process removed the file
                continue
            name = page["name"] if page else ""
            if name not in names:
                names[name] = bool(name) and in_use(folder, name)
            state = _state_of(page, names[name])
            yield StoredFile(path, name, state, status.st_size, status.st_mtime)


def _raise(error: OSError) -> None:
    raise error


def _state_of(page: re.Match[str] | None, used: bool) -> str:
    if page is None:
        return TEMPORARY
    if used:
        return USED
    if int(page["version"]) < PAGE_VERSION:
        return FORMER_FORMAT
    return FORMER_WEIGHTS if page["update"] else UNUSED


def is_intact(file: StoredFile) -> bool:
    """Return True if a page has the checksum that it was stored with. Reads all of it."""
    content = file.path.read_bytes()
    name = file.path.name.removesuffix(".bin")
    return content[-CHECKSUM_BYTES:] == page_checksum(name, memoryview(content)[:-CHECKSUM_BYTES])


def clear(folder: Path, names: Sequence[str] = ()) -> tuple[list[StoredFile], list[StoredFile]]:
    """Remove the pages that no server uses.

    Args:
        folder: folder of the storage.
        names: remove the pages of these models only; of all models if empty.

    Returns:
        The files that were removed, and those that were kept because a server uses them or a process may write them.
    """
    unneeded: list[StoredFile] = []
    kept: list[StoredFile] = []
    for file in stored_files(folder):
        if not names or file.name in names:
            needed = file.state == USED or (file.state == TEMPORARY and not is_stale(file))
            (kept if needed else unneeded).append(file)
    return _remove(folder, unneeded), kept


def is_stale(file: StoredFile) -> bool:
    """Return True if a file can be removed without loss: no server can read it again, and no process is writing it."""
    if file.state == TEMPORARY:
        return time.time() - file.used_at > STALE_SECONDS  # noqa: TID251  (a file outlives a server)
    return file.state in ORPHANS


def prune(folder: Path, names: Sequence[str] = (), unused_days: float | None = None) -> list[StoredFile]:
    """Remove the files that no server can read again, and return them.

    Args:
        folder: folder of the storage.
        names: also remove unused pages with these model names.
        unused_days: also remove unused pages that were last written or read at least this many days ago.
    """
    before = -float("inf") if unused_days is None else time.time() - 86400 * unused_days  # noqa: TID251

    def unneeded(file: StoredFile) -> bool:
        return is_stale(file) or (file.state == UNUSED and (file.name in names or file.used_at <= before))

    return _remove(folder, filter(unneeded, stored_files(folder)))


def _remove(folder: Path, files: Iterable[StoredFile]) -> list[StoredFile]:
    """Remove files of a folder, then the locks of names without files. Return the files that existed."""
    removed = []
    for file in files:
        with suppress(FileNotFoundError):
            file.path.unlink()
            removed.append(file)
    left = {file.name for file in stored_files(folder)}
    for lock in folder.glob("*-dsv4v*.lock"):
        if lock.stem not in left and not in_use(folder, lock.stem):
            lock.unlink(missing_ok=True)
    return removed
