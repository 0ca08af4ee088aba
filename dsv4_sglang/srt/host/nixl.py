"""NIXL's plugins for files behind the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

from dsv4_sglang.srt import compat
from dsv4_sglang.srt.host.sealed import SealedRows
from dsv4_sglang.srt.host.storage import WRONG_CHECKSUM, own_folder, remove_page

DEFAULT_FOLDER = "/tmp/hicache_storage"


class NixlStorage(SealedRows, HiCacheNixl):
    """A file a row.

    Raises ValueError for a plugin that has no files, RuntimeError for folders as `own_folder`.
    """

    def __init__(self, storage_config: Any, file_path: str = DEFAULT_FOLDER) -> None:
        variable = envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR
        for named in (variable.get() or "").split(","):
            own_folder(named.strip(), file_path, variable.name)
        super().__init__(storage_config, file_path)
        self._first_suffix: str = self.config_suffix
        if self.file_manager is None:
            raise ValueError(
                f"--hicache-storage-backend nixl with the plugin {self.backend_selector.backend_name}: pages have been "
                "stored in files only; set SGLANG_HICACHE_NIXL_BACKEND_PLUGIN to POSIX, or to another that has files"
            )

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

    def clear(self) -> bool:
        """Remove the pages of this model; those of others in the same folders stay."""
        assert self.file_manager is not None
        for folder in self.file_manager.iter_all_base_dirs():
            # Behind the suffix stands which part of a page it is; behind that of other weights, their name.
            for path in Path(folder).rglob(f"*{escape(self.config_suffix)}_*"):
                with suppress(OSError):
                    path.unlink()
        return True
