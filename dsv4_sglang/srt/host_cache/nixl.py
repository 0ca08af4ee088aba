"""NIXL's plugins for files behind the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

from dsv4_sglang.srt.host_cache.checksummed import ChecksummedEntries
from dsv4_sglang.srt.host_cache.folder import UsedFolder, own_folder, require_names
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS
from dsv4_sglang.srt.host_cache.storage import LONGEST_KEY, LONGEST_UPDATE, WRONG_CHECKSUM, remove_page
from dsv4_sglang.srt.integration import compat

DEFAULT_FOLDER = "/tmp/hicache_storage"


class NixlStorage(ChecksummedEntries, HiCacheNixl):
    """A file a row.

    Raises ValueError for a plugin that has no files, RuntimeError for folders as `own_folder`.
    """

    def __init__(self, storage_config: Any, file_path: str = DEFAULT_FOLDER) -> None:
        variable = envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR
        named = (variable.get() or "").split(",")
        folders = [own_folder(folder.strip(), file_path, variable.name) for folder in named]
        super().__init__(storage_config, file_path)
        self._first_suffix: str = self.config_suffix
        if self.file_manager is None:
            raise ValueError(
                f"--hicache-storage-backend nixl with the plugin {self.backend_selector.backend_name}: pages have been "
                "stored in files only; set SGLANG_HICACHE_NIXL_BACKEND_PLUGIN to POSIX, or to another that has files"
            )
        longest = self.names(SNAPSHOTS, [f"{LONGEST_KEY}{LONGEST_UPDATE}"])[0]
        require_names(Path(self.file_manager.get_file_path(longest)), variable.name)
        self._folders = [UsedFolder(folder, bool(variable.get()), self._restore) for folder in folders]
        self._use_folders()

    def available(self) -> bool:
        return not [folder for folder in self._folders if not folder.available()]  # each looks, and logs

    def _restore(self) -> None:
        """The folders of files inside a folder that is there again."""
        assert self.file_manager is not None
        with suppress(OSError):  # another one is gone still
            self.file_manager.ensure_all_bucket_dirs()

    def _use_folders(self) -> None:
        for folder in self._folders:
            folder.use(self.config_suffix[1:])

    def names(self, pool: Any, keys: Sequence[str]) -> list[str]:
        return compat.nixl_names(self, pool, keys)

    def discard(self, names: Sequence[str], pool: Any, found: list[bool], usable: list[bool]) -> None:
        """NIXL reads all or none of what is asked for together: those of another size may be why."""
        assert self.file_manager is not None
        for name, there, good in zip(names, found, usable):
            path = Path(self.file_manager.get_file_path(name))
            if there and not good:
                remove_page(path, WRONG_CHECKSUM)
                continue
            with suppress(OSError):  # it is not there, or another process of the group has removed it
                if (size := path.stat().st_size) != pool.row_bytes:
                    remove_page(path, f"it has {size} bytes, not {pool.row_bytes}")

    def use_name(self, name: str) -> None:
        """Pages from now on are those of the model under another name."""
        self.config_suffix: str = f"{self._first_suffix}-{name}"
        self._use_folders()

    def clear(self) -> bool:
        """Remove the pages of this model; those of others in the same folders stay."""
        assert self.file_manager is not None
        for folder in self.file_manager.iter_all_base_dirs():
            # Behind the suffix stands which part of a page it is; behind that of other weights, their name.
            for path in Path(folder).rglob(f"*{escape(self.config_suffix)}_*"):
                with suppress(OSError):
                    path.unlink()
        return True
