"""NIXL's file plugins as a storage of the host cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

from dsv4_sglang.srt.host_cache.checksummed import ChecksummedEntries
from dsv4_sglang.srt.host_cache.folder import FOLDERS, Cleaning, own_folder, require_names, stored_files
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS
from dsv4_sglang.srt.host_cache.storage import (
    DISK_FULL,
    LONGEST_KEY,
    LONGEST_UPDATE,
    WRONG_CHECKSUM,
    WritePause,
    remove_page,
)
from dsv4_sglang.srt.host_cache.used_folder import UsedFolder
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.sglang.storage import nixl_names


class NixlStorage(ChecksummedEntries, HiCacheNixl):
    """Storage with one file per row.

    NIXL opens files by path and follows links, so no group may write the folders.

    Raises:
        LaunchError: the plugin does not store files, or a folder is not usable (`own_folder`).
    """

    def __init__(self, storage_config: Any, file_path: str = FOLDERS["nixl"][1]) -> None:
        variable, _ = FOLDERS["nixl"]
        named = os.environ.get(variable, "")
        folders = [own_folder(folder.strip(), file_path, variable, by_group=False) for folder in named.split(",")]
        super().__init__(storage_config, file_path)
        self._pause = WritePause()
        self._first_suffix: str = self.config_suffix
        if self.file_manager is None:
            raise LaunchError(
                f"--hicache-storage-backend nixl with the plugin {self.backend_selector.backend_name}: only plugins "
                "that store files are supported; set SGLANG_HICACHE_NIXL_BACKEND_PLUGIN to POSIX or another of these"
            )
        longest = self.names(SNAPSHOTS, [f"{LONGEST_KEY}{LONGEST_UPDATE}"])[0]
        require_names(Path(self.file_manager.get_file_path(longest)), variable)
        self._folders = [UsedFolder(folder, False, self._restore) for folder in folders]
        self._use_folders()

    def available(self) -> bool:
        return not [folder for folder in self._folders if not folder.available()]  # a list: each folder logs its state

    def _restore(self) -> None:
        """Create the subfolders of a folder again after it was missing."""
        assert self.file_manager is not None
        with suppress(OSError):  # another folder is still missing
            self.file_manager.ensure_all_bucket_dirs()

    def _use_folders(self) -> None:
        for folder in self._folders:
            folder.use(self.config_suffix[1:])

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        self._pause.check()
        stored = super().batch_set_v1(keys, host_indices, extra_info)
        self._pause_unless(stored, PoolName.KV, keys)
        return stored

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        self._pause.check()
        stored = super().batch_set_v2(transfers, extra_info)
        for transfer in transfers:
            self._pause_unless(stored[transfer.name], transfer.name, transfer.keys or [])
        return stored

    def _pause_unless(self, stored: Sequence[bool], pool: Any, keys: Sequence[str]) -> None:
        """Remove what is left of pages that could not be written, and write none for a while. NIXL does not say why.

        Raises:
            StorageFull: a page could not be written.
        """
        assert self.file_manager is not None
        if all(stored):
            return
        for name, done in zip(self.names(pool, keys), stored):
            if not done:
                with suppress(OSError):
                    Path(self.file_manager.get_file_path(name)).unlink()
        left = [os.statvfs(folder.path).f_bavail for folder in self._folders if folder.available()]
        self._pause.begin(self._folders[0].path, "NIXL cannot write pages" if all(left) else DISK_FULL)

    def names(self, pool: Any, keys: Sequence[str]) -> list[str]:
        return nixl_names(self, pool, keys)

    def discard(self, names: Sequence[str], pool: Any, found: list[bool], usable: list[bool]) -> None:
        """Remove unusable pages. NIXL reads all pages of a request or none, so pages of a wrong size are removed too:
        they may be the reason that the others were not found."""
        assert self.file_manager is not None
        for name, there, good in zip(names, found, usable):
            path = Path(self.file_manager.get_file_path(name))
            if there and not good:
                remove_page(path, WRONG_CHECKSUM)
                continue
            with suppress(OSError):  # the file does not exist, or another rank has removed it
                if (size := path.stat().st_size) != pool.row_bytes:
                    remove_page(path, f"it has {size} bytes, not {pool.row_bytes}")

    def use_name(self, name: str) -> None:
        """Use another page name from now on, after a weight update. The pages of the former name are removed, unless
        another process uses them."""
        self.config_suffix: str = f"{self._first_suffix}-{name}"
        self._use_folders()

    def clear(self) -> bool:
        """Remove the pages of this model, also for other servers. Pages of other models in the same folders stay."""
        for folder in self._folders:
            with suppress(OSError):  # the folder is missing
                Cleaning().remove(stored_files(folder.path, [self.config_suffix[1:]]))
        return True
