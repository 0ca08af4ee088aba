"""File storage of the host cache: SGLang's files with checksums, in a folder with a bound on its total size."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolTransferResult
from sglang.srt.mem_cache.storage.file.lru_file_evictor import LRUFileEvictor
from torch import Tensor

from dsv4_sglang.srt.host_cache.checksummed import or_miss
from dsv4_sglang.srt.host_cache.folder import (
    FOLDERS,
    KEY_CHARACTERS,
    ORPHANS,
    TEMPORARY,
    UNUSED,
    USED,
    UsedFolder,
    is_stale,
    own_folder,
    require_names,
    stored_files,
)
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS, checksum, verify_checksum
from dsv4_sglang.srt.integration import compat

log = logging.getLogger(__name__)

# Reason for a page that was changed, or that belongs to another name.
WRONG_CHECKSUM = "wrong checksum"
# The longest key of a page, and the longest suffix that `use_name` appends to its name.
LONGEST_KEY, LONGEST_UPDATE = "f" * KEY_CHARACTERS, f"-{'f' * 16}"
# Eviction order of pages by state: smallest first.
EVICTED = dict.fromkeys(ORPHANS, 0) | {UNUSED: 1, USED: 2}
# A storage scans the folder again after it has written 1/LOOKS of the size limit.
LOOKS = 16


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
            with suppress(OSError):  # removed by another process, or owned by another user
                os.utime(tensor_path)

    def clear(self) -> None:
        super().clear()
        self._look()

    def _look(self) -> None:
        with compat.lock_of_files(self):
            self._scan_existing_files()

    def _scan_existing_files(self) -> None:
        """Remove the temporary files of killed processes, and count all pages of the folder."""
        found, folder = [], Path(self.file_path)
        with suppress(OSError):  # the folder is missing
            for file in stored_files(folder):
                if file.state == TEMPORARY and is_stale(file):
                    file.path.unlink(missing_ok=True)
                elif file.path.suffix == ".bin" and file.path.parent == folder:
                    found.append((EVICTED[file.state], file.used_at, file.path.stem, file.bytes))
        compat.set_files(self, {stem: size for _, _, stem, size in sorted(found)})
        self._written = 0


class FileStorage(HiCacheFile):
    """SGLang's file storage, with a checksum in each file. A truncated or changed file is a miss. It is removed with a
    warning, so that the page is stored again."""

    def __init__(self, storage_config: Any, file_path: str = FOLDERS["file"][1]) -> None:
        variable, _ = FOLDERS["file"]
        named = os.environ.get(variable) or (storage_config.extra_config or {}).get("file_storage_path")
        folder = own_folder(named, file_path, variable)
        self._mode = folder.stat().st_mode & 0o666
        super().__init__(storage_config, file_path)
        self._first_suffix: str = self.config_suffix
        longest = f"{LONGEST_KEY}.{SNAPSHOTS}{self.config_suffix}{LONGEST_UPDATE}.bin"
        require_names(folder / longest, variable)
        self._folder = UsedFolder(folder, bool(named), self._forget)
        self._folder.use(self.config_suffix[1:])
        compat.bound_folder(self, FolderEvictor, storage_config)

    def available(self) -> bool:
        """Return True if the folder is available. Log when that changes."""
        return self._folder.available()

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page. Return False if there is no space. numpy reports no error if the end of a file could not be
        written, so the size is checked."""
        if not self.available():
            return False
        checksum(value, self._path(key).stem)
        if not super().set(key, value, target_location, target_sizes):
            return False
        with suppress(OSError):  # evicted by another process, or stored before by another user
            if (size := self._path(key).stat().st_size) != value.numel():
                self._remove(key, f"it has {size} bytes of {value.numel()}; is the file system full?")
                return False
            self._path(key).chmod(self._mode)
        return True

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        if not self.available():
            return None
        try:
            found = super().get(key, target_location, target_sizes)
        except OSError as error:
            self._remove(key, str(error))
            return None
        if found is not None and not verify_checksum(found, self._path(key).stem):
            self._remove(key, WRONG_CHECKSUM)
            return None
        return found

    def batch_exists_v2(self, *arguments: Any, **named: Any) -> PoolTransferResult:
        nothing = PoolTransferResult(0, {})
        return or_miss(nothing, super().batch_exists_v2, *arguments, **named) if self.available() else nothing

    def _remove(self, key: str, why: str) -> None:
        path = self._path(key)
        remove_page(path, why)
        if self.metadata_cache is not None:
            self.metadata_cache.remove(path.stem)

    def _path(self, key: str) -> Path:
        return Path(self.file_path) / f"{key}{self.config_suffix}.bin"

    def use_name(self, name: str) -> None:
        """Use another page name from now on, after a weight update."""
        self.config_suffix: str = f"{self._first_suffix}-{name}"
        self._folder.use(self.config_suffix[1:])

    def clear(self) -> bool:
        """Remove the pages of this model. Pages of other models in the same folder stay."""
        for path in Path(self.file_path).glob("*.bin"):
            if path.stem.endswith(self.config_suffix):
                with suppress(OSError):
                    path.unlink()
        self._forget()
        return True

    def _forget(self) -> None:
        """Drop the cached list of the folder's files, because the folder has changed."""
        if self.metadata_cache is not None:
            self.metadata_cache.clear()
        compat.forget_files(self)


def remove_page(path: Path, why: str) -> None:
    """Remove the file of an unusable page, with a warning."""
    log.warning("host cache: the stored page %s cannot be used and is removed: %s", path, why)
    with suppress(OSError):
        path.unlink()


def register_storages() -> None:
    """Register this package's storages as values of `--hicache-storage-backend`. SGLang logs a warning for each."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    StorageBackendFactory.register_backend("file", __name__, FileStorage.__name__)
    # Registered by name: the packages of these storages are needed only if they are used.
    StorageBackendFactory.register_backend("nixl", "dsv4_sglang.srt.host_cache.nixl", "NixlStorage")
    StorageBackendFactory.register_backend("mooncake", "dsv4_sglang.srt.host_cache.mooncake", "MooncakeStorage")
