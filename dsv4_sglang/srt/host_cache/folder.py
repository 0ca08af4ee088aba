"""Folder of stored pages: its permissions and its files.

This module does not import SGLang: `dsv4-sglang storage` reads folders without a server.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_sglang.ops.trust import reject_writable_by_all, require_own, require_owner
from dsv4_sglang.srt.host_cache import locks
from dsv4_sglang.srt.host_cache.files import open_file, opened_file, opened_folder, status_of
from dsv4_sglang.srt.launch.error import LaunchError

# Environment variable with the folder of a storage, and the folder without it.
FOLDERS = {
    "file": ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/tmp/hicache"),
    "nixl": ("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", "/tmp/hicache_storage"),
    "shm": ("SGLANG_HICACHE_SHM_BACKEND_STORAGE_DIR", f"/dev/shm/dsv4_sglang-{os.geteuid()}"),
}
# Version of the page format, for changes that `page_names.page_name` does not hash.
PAGE_VERSION = 4
# Length of SGLang's key of a page, a SHA-256 in hexadecimal.
KEY_CHARACTERS = 64
# Bytes of the checksum at the end of each page.
CHECKSUM_BYTES = 16
# Errors of a file system, a quota or a file size limit that leave no space.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Age in seconds from which a temporary file is assumed to be left by a killed process. Writing a page takes
# milliseconds.
STALE_SECONDS = 3600
USED, UNUSED = "used", "unused"
FORMER_WEIGHTS, FORMER_FORMAT, TEMPORARY = "former weights", "former format", "temporary"
# States of files that no server can read again.
ORPHANS = (FORMER_WEIGHTS, FORMER_FORMAT, TEMPORARY)
# `page_names.page_name`, with two or three formats, which are shorter than a digest, and the digest of updated weights.
_NAME = (
    r"(?P<name>.+-dsv4v(?P<version>\d+)(?:-[a-z0-9]{1,15}){2,3}-(?:[0-9a-f]{32}|[0-9a-f]{16})"
    r"(?P<update>-[0-9a-f]{16})?)"
)
_PAGE = re.compile(rf"[0-9a-f]{{{KEY_CHARACTERS}}}(?:\.[a-z0-9_]+)?_{_NAME}(?P<end>_[a-z0-9_]+|\.bin|)")
# Name of a file while SGLang writes it.
_NAMELESS_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


def own_folder(named: str | None, default: str, variable: str, *, by_group: bool = True) -> Path:
    """Make the folder with mode 0700 if it does not exist, and return it.

    Args:
        named: value of the environment variable `variable`, or None if it is not set.
        default: folder to use otherwise. Its name in /tmp is known to all users.
        variable: name of the variable, for error messages.
        by_group: a folder that `variable` names may be writable by a group.

    Raises:
        LaunchError: the folder cannot be created or written, or another user owns it or can write to it, so its pages
            cannot be trusted. A default folder must not be a symbolic link.
    """
    folder, advice = Path(named or default), f"set {variable} to a folder that is yours alone"
    other = f"Or {advice}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not named and folder.is_symlink():
            raise RuntimeError(f"{folder} is a link; expected a folder; {advice}")
        require_trusted(folder, bool(named) and by_group, other)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RuntimeError(f"{folder} cannot be written by user {os.geteuid()}; {advice}")
    except OSError as error:
        raise LaunchError(f"the folder {folder} cannot be created: {error.strerror}; {advice}") from None
    except RuntimeError as error:
        raise LaunchError(str(error)) from None
    return folder


def require_trusted(folder: Path, by_group: bool, other: str) -> None:
    """Raise RuntimeError if another user may have written pages in a folder.

    Args:
        folder: the folder.
        by_group: True if a group may write the folder, which the user then chose.
        other: advice for the error message, such as to choose another folder.
    """
    if by_group:
        require_owner(folder, other)
        reject_writable_by_all(folder, adding=True)
    else:
        require_own(folder, other)


def require_names(path: Path, variable: str) -> None:
    """Raise LaunchError if a file of this path, the longest that a storage writes, cannot be created. A full disk is
    not an error, since pages are stored once there is space."""
    try:
        with opened_folder(path.parent) as folder:
            os.close(open_file(path.name, os.O_WRONLY | os.O_CREAT, folder=folder))
            with suppress(FileNotFoundError):  # another process of the server has removed it
                os.unlink(path.name, dir_fd=folder)
        with suppress(FileNotFoundError):
            path.lstat()  # SGLang uses paths, whose length is limited too
    except OSError as error:
        if error.errno not in FULL:
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


@dataclass(frozen=True)
class StoredFile:
    """A file of a storage.

    `folder` is the storage's folder. `name` is the model's page name, empty if the file name does not contain it.
    `used_at` is in seconds since 1970. `weights` describes the model's weights, empty if the folder does not say it.
    `pages` is the number of pages in the file.
    """

    folder: Path
    path: Path
    name: str
    state: str
    bytes: int
    used_at: float
    weights: str
    pages: int = 1

    def remove(self) -> None:
        """Remove the file, if it still exists.

        Raises:
            OSError: the file cannot be removed.
        """
        with suppress(FileNotFoundError), opened_folder(self.folder, self._below) as folder:
            os.unlink(self.path.name, dir_fd=folder)

    @property
    def is_stale(self) -> bool:
        """True if a file can be removed without loss: no server can read it again, and no process is writing it."""
        if self.state == TEMPORARY:
            return time.time() - self.used_at > STALE_SECONDS  # noqa: TID251  (a file outlives a server)
        return self.state in ORPHANS

    def damaged(self) -> list[str]:
        """Return the pages whose checksum is wrong, or that are not a regular file. Reads the whole file.

        Raises:
            OSError: the file is gone or cannot be read.
        """
        return [] if self._is_intact() else [f"{self.path}, {self.bytes} bytes"]

    def _is_intact(self) -> bool:
        with opened_folder(self.folder, self._below) as folder:
            if not stat.S_ISREG(status_of(self.path.name, folder=folder).st_mode):
                return False
            with opened_file(self.path.name, folder=folder) as file, os.fdopen(file, "rb", closefd=False) as page:
                content = page.read()
        name = self.path.name.removesuffix(".bin")
        return content[-CHECKSUM_BYTES:] == page_checksum(name, memoryview(content)[:-CHECKSUM_BYTES])

    @property
    def _below(self) -> Path:
        return self.path.parent.relative_to(self.folder)


def stored_files(folder: Path, names: Sequence[str] = ()) -> Iterator[StoredFile]:
    """Yield the pages and temporary files of this package in a folder and its subfolders. Skip other files.

    A link or a FIFO that is named as a page is one of them: it can be removed, not read.

    Args:
        folder: folder of the storage.
        names: yield only the files of these models.

    Raises:
        OSError: the folder cannot be read.
    """
    used, weights = {"": False}, {"": ""}
    for at, _, files, directory in os.fwalk(folder, onerror=_raise):
        for file in files:
            page = _PAGE.fullmatch(file)
            name = page["name"] if page else ""
            if (page is None and not _NAMELESS_TEMPORARY.fullmatch(file)) or (names and name not in names):
                continue
            try:
                status = status_of(file, folder=directory)
            except OSError:  # another process removed the file
                continue
            if name not in used:
                used[name], weights[name] = locks.in_use(folder, name), locks.weights_of(folder, name)
            state = _state_of(page, used[name])
            yield StoredFile(folder, Path(at, file), name, state, status.st_size, status.st_mtime, weights[name])


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


def state_of_name(name: str, used: bool) -> str:
    """Return the state of pages with a model's page name. `used`: a process uses them."""
    return _state_of(re.fullmatch(_NAME, name), used)


@dataclass
class Cleaning:
    """Result of cleaning a folder.

    Attributes:
        removed: files that were removed.
        kept: files that stay, because a server uses them or a process may be writing them.
        failed: files that could not be removed, and why.
    """

    removed: list[StoredFile] = field(default_factory=list)
    kept: list[StoredFile] = field(default_factory=list)
    failed: dict[StoredFile, str] = field(default_factory=dict)

    def remove(self, files: Iterable[StoredFile]) -> None:
        for file in files:
            try:
                file.remove()
                self.removed.append(file)
            except OSError as error:
                self.failed[file] = error.strerror or str(error)

    def add(self, other: Cleaning) -> None:
        """Add the result of another folder or of other files."""
        self.removed += other.removed
        self.kept += other.kept
        self.failed |= other.failed


def clear(folder: Path, names: Sequence[str] = ()) -> Cleaning:
    """Remove the pages that no server uses.

    Args:
        folder: folder of the storage.
        names: remove the pages of these models only; of all models if empty.
    """

    def unneeded(file: StoredFile) -> bool:
        return file.state != USED and (file.state != TEMPORARY or file.is_stale)

    files = list(stored_files(folder, names))
    done = _clean(folder, files, unneeded, names)
    done.kept += [file for file in files if not unneeded(file)]
    return done


def unused_since(days: float | None) -> float:
    """Return the time N days ago in seconds since 1970, before all times if `days` is None."""
    return -float("inf") if days is None else time.time() - 86400 * days  # noqa: TID251  (a file outlives a server)


def prune(folder: Path, names: Sequence[str] = (), unused_days: float | None = None) -> Cleaning:
    """Remove the files that no server can read again.

    Args:
        folder: folder of the storage.
        names: also remove unused pages with these model names.
        unused_days: also remove unused pages that were last written or read at least this many days ago.
    """
    before = unused_since(unused_days)

    def unneeded(file: StoredFile) -> bool:
        return file.is_stale or (file.state == UNUSED and (file.name in names or file.used_at <= before))

    return _clean(folder, list(stored_files(folder)), unneeded)


def _clean(
    folder: Path, files: Sequence[StoredFile], unneeded: Callable[[StoredFile], bool], names: Sequence[str] = ()
) -> Cleaning:
    """Remove the unneeded ones of the files of a folder, and the locks of names without files.

    Args:
        folder: folder of the storage.
        files: all files of `names`.
        unneeded: returns True for a file to remove.
        names: page names, all of the folder if empty.
    """
    done, by_name = Cleaning(), defaultdict[str, list[StoredFile]](list)
    for file in files:
        by_name[file.name].append(file)
    for lock in folder.glob(f"*-dsv4v*{locks.SUFFIX}"):
        if not names or lock.stem in names:
            by_name.setdefault(lock.stem, [])
    done.remove(filter(unneeded, by_name.pop("", [])))
    for name, of_name in by_name.items():
        going = list(filter(unneeded, of_name))
        if going or not of_name:
            _clean_name(folder, name, going, done, all_go=len(going) == len(of_name))
    return done


def _clean_name(folder: Path, name: str, going: list[StoredFile], done: Cleaning, *, all_go: bool) -> None:
    """Remove files of one page name under its exclusive lock, so that a server that starts meanwhile loses no page that
    it has found. Remove the lock's file with the last page."""
    try:
        with locks.held_alone(folder, name) as alone:
            if not alone:
                done.kept += going
                return
            done.remove(going)
            if all_go and not done.failed.keys() & set(going):
                locks.remove(folder, name)
    except OSError as error:
        done.failed |= dict.fromkeys(going, error.strerror or str(error))
