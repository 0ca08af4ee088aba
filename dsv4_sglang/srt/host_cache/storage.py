"""File storage of the host cache: SGLang's files with checksums, in a folder with a bound on its total size."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolTransferResult
from sglang.srt.mem_cache.storage.file.lru_file_evictor import LRUFileEvictor
from torch import Tensor

from dsv4_sglang.srt.host_cache.checksummed import or_miss
from dsv4_sglang.srt.host_cache.files import exists, opened_folder, read_into, status_of, write_file
from dsv4_sglang.srt.host_cache.folder import (
    FOLDERS,
    FULL,
    KEY_CHARACTERS,
    ORPHANS,
    TEMPORARY,
    UNUSED,
    USED,
    Cleaning,
    own_folder,
    require_names,
    stored_files,
)
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS, checksum, verify_checksum
from dsv4_sglang.srt.host_cache.used_folder import UsedFolder
from dsv4_sglang.srt.sglang.storage import bound_folder, evictor_of, lock_of_files, set_files

log = logging.getLogger(__name__)

# Reason for a page that was changed, or that belongs to another name.
WRONG_CHECKSUM = "wrong checksum"
# The longest key of a page, and the longest suffix that `use_name` appends to its name.
LONGEST_KEY, LONGEST_UPDATE = "f" * KEY_CHARACTERS, f"-{'f' * 16}"
# Eviction order of pages by state: smallest first.
EVICTED = dict.fromkeys(ORPHANS, 0) | {UNUSED: 1, USED: 2}
# A storage scans the folder again after it has written 1/LOOKS of the size limit.
LOOKS = 16
# After a page could not be written, none is written for this time, and the reason is logged once.
PAUSE_SECONDS = 60.0
DISK_FULL = "the file system is full, free some space"


class StorageFull(OSError):
    """Pages are not stored for now. The reason has been logged."""


class WritePause:
    """Times in which no page is written, since the last one could not be."""

    # Time of `time.monotonic` at which the pause ends.
    _until = -float("inf")

    def check(self) -> None:
        """Raise StorageFull during a pause."""
        if time.monotonic() < self._until:
            raise StorageFull

    def begin(self, folder: Path, reason: str) -> NoReturn:
        """Log why pages are not stored, begin a pause, and raise StorageFull."""
        self._until = time.monotonic() + PAUSE_SECONDS
        log.warning("host cache: no pages are stored in %s for %d s: %s", folder, round(PAUSE_SECONDS), reason)
        raise StorageFull


class FolderEvictor(LRUFileEvictor):
    """Keep all pages of a folder within SGLang's size limit, including those of other servers and former weights.

    SGLang's evictor counts the pages of one name only. Here, pages that no server can read again are evicted first,
    then pages that no server uses. Within a state the least recently used page is evicted first. Modification times of
    the files record their last use, so that all servers of a folder agree.
    """

    _written = 0

    def reserve(self, suffixed_key: str, value_bytes: int, key: str = "") -> bool:
        self._written += value_bytes
        if self.enabled and 0 < self.max_size_bytes < LOOKS * self._written:
            self._look()
        return super().reserve(suffixed_key, value_bytes, key)

    def touch(self, suffixed_key: str, tensor_path: str) -> None:
        super().touch(suffixed_key, tensor_path)
        if self.enabled:
            # Removed by another process, or owned by another user. A link is not followed.
            with suppress(OSError):
                os.utime(tensor_path, follow_symlinks=False)

    def clear(self) -> None:
        super().clear()
        self._look()

    def _look(self) -> None:
        with lock_of_files(self):
            self._scan_existing_files()

    def _scan_existing_files(self) -> None:
        """Remove the temporary files of killed processes, and count all pages of the folder."""
        found, folder = [], Path(self.file_path)
        with suppress(OSError):  # the folder is missing
            for file in stored_files(folder):
                if file.state == TEMPORARY and file.is_stale:
                    Cleaning().remove([file])
                elif file.path.suffix == ".bin" and file.path.parent == folder:
                    found.append((EVICTED[file.state], file.used_at, file.path.stem, file.bytes))
        set_files(self, {stem: size for _, _, stem, size in sorted(found)})
        self._written = 0


class FileStorage(HiCacheFile):
    """SGLang's file storage, with a checksum in each file. A truncated or changed file is a miss. It is removed with a
    warning, so that the page is stored again."""

    def __init__(self, storage_config: Any, file_path: str = FOLDERS["file"][1]) -> None:
        variable, _ = FOLDERS["file"]
        named = os.environ.get(variable) or (storage_config.extra_config or {}).get("file_storage_path")
        folder = own_folder(named, file_path, variable)
        self._mode = folder.stat().st_mode & 0o666
        self._pause = WritePause()
        super().__init__(storage_config, file_path)
        self._first_suffix: str = self.config_suffix
        longest = f"{LONGEST_KEY}.{SNAPSHOTS}{self.config_suffix}{LONGEST_UPDATE}.bin"
        require_names(folder / longest, variable)
        self._folder = UsedFolder(folder, bool(named), self._forget)
        self._folder.use(self.config_suffix[1:])
        bound_folder(self, FolderEvictor, storage_config)

    def available(self) -> bool:
        """Return True if the folder is available. Log when that changes."""
        return self._folder.available()

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page. Return True if the storage has it.

        Raises:
            StorageFull: there is no space, or the folder cannot be written.
        """
        if not self.available():
            return False
        stem = f"{key}{self.config_suffix}"
        try:
            with opened_folder(self._folder.path) as folder:
                if self._has(stem, value.numel(), folder):
                    return True
                self._pause.check()
                checksum(value, stem)
                self._write(stem, value, folder)
        except FileNotFoundError:  # the folder was removed just now
            return False
        if self.metadata_cache is not None:
            self.metadata_cache.add(stem)
        return True

    def _has(self, stem: str, size: int, folder: int) -> bool:
        """Return True if the storage has a page of this size. A file of another size is removed."""
        name = f"{stem}.bin"
        if not exists(name, folder=folder):
            return False
        if (found := status_of(name, folder=folder).st_size) != size:
            self._remove(stem, f"it has {found} bytes, not {size}")
            return False
        evictor_of(self).touch(stem, str(self._folder.path / name))
        return True

    def _write(self, stem: str, page: Tensor, folder: int) -> None:
        evictor = evictor_of(self)
        if not evictor.reserve(stem, page.numel(), key=stem):
            self._pause.begin(self._folder.path, "its limits max_size and min_free_space leave no space")
        try:
            write_file(f"{stem}.bin", page.numpy(), self._mode, folder=folder)
        except FileNotFoundError:
            evictor.abort(stem)
            raise
        except OSError as error:
            evictor.abort(stem)
            full = f"{DISK_FULL}: " if error.errno in FULL else ""
            self._pause.begin(self._folder.path, f"{full}{error.strerror}")
        evictor.commit(stem)

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        if not self.available():
            return None
        stem = f"{key}{self.config_suffix}"
        try:
            with opened_folder(self._folder.path) as folder:
                size = read_into(target_location.numpy().data, f"{stem}.bin", folder=folder)
        except FileNotFoundError:
            if self.metadata_cache is not None:
                self.metadata_cache.remove(stem)
            return None
        except OSError as error:
            self._remove(stem, error.strerror or str(error))
            return None
        if size < target_location.numel() or not verify_checksum(target_location, stem):
            self._remove(stem, WRONG_CHECKSUM)
            return None
        evictor_of(self).touch(stem, str(self._folder.path / f"{stem}.bin"))
        if self.metadata_cache is not None:
            self.metadata_cache.add(stem)
        return target_location

    def batch_exists_v2(self, *arguments: Any, **named: Any) -> PoolTransferResult:
        nothing = PoolTransferResult(0, {})
        return or_miss(nothing, super().batch_exists_v2, *arguments, **named) if self.available() else nothing

    def _remove(self, stem: str, why: str) -> None:
        remove_page(self._folder.path / f"{stem}.bin", why)
        if self.metadata_cache is not None:
            self.metadata_cache.remove(stem)

    def use_name(self, name: str) -> None:
        """Use another page name from now on, after a weight update. The pages of the former name are removed, unless
        another process uses them."""
        self.config_suffix: str = f"{self._first_suffix}-{name}"
        self._folder.use(self.config_suffix[1:])
        self._forget()

    def clear(self) -> bool:
        """Remove the pages of this model, also for other servers. Pages of other models in the same folder stay."""
        with suppress(OSError):  # the folder is missing
            Cleaning().remove(stored_files(self._folder.path, [self.config_suffix[1:]]))
        self._forget()
        return True

    def _forget(self) -> None:
        """Drop the cached list of the folder's files, because the folder has changed."""
        if self.metadata_cache is not None:
            self.metadata_cache.clear()
        evictor_of(self).clear()


def remove_page(path: Path, why: str) -> None:
    """Remove the file of an unusable page, with a warning."""
    log.warning("host cache: the stored page %s cannot be used and is removed: %s", path, why)
    with suppress(OSError):
        path.unlink()


def register_storages() -> None:
    """Register this package's storages as values of `--hicache-storage-backend`. SGLang logs a warning for each."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    StorageBackendFactory.register_backend("file", __name__, FileStorage.__name__)
    StorageBackendFactory.register_backend("shm", "dsv4_sglang.srt.host_cache.shared_memory", "SharedMemoryStorage")
    # Registered by name: the packages of these storages are needed only if they are used.
    StorageBackendFactory.register_backend("nixl", "dsv4_sglang.srt.host_cache.nixl", "NixlStorage")
    StorageBackendFactory.register_backend("mooncake", "dsv4_sglang.srt.host_cache.mooncake", "MooncakeStorage")
