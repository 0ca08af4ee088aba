"""NIXL's plugins for files behind the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

from dsv4_sglang.srt import compat
from dsv4_sglang.srt.host.sealed import SealedRows
from dsv4_sglang.srt.host.storage import remove_page


class NixlStorage(SealedRows, HiCacheNixl):
    """A file a row.

    Raises ValueError for a plugin that has no files.
    """

    def __init__(self, storage_config: Any, *arguments: Any) -> None:
        super().__init__(storage_config, *arguments)
        if self.file_manager is None:
            raise ValueError(
                f"--hicache-storage-backend nixl with the plugin {self.backend_selector.backend_name}: pages have been "
                "stored in files only; set SGLANG_HICACHE_NIXL_BACKEND_PLUGIN to POSIX, or to another that has files"
            )

    def discard(self, name: Any, pool: Any, keys: Sequence[str], found: list[bool], usable: list[bool]) -> None:
        """NIXL reads all or none of what is asked for together: those of another size may be why."""
        for path, there, good in zip(compat.nixl_files(self, name, keys), found, usable):
            if there and not good:
                remove_page(path, "its checksum is another")
            elif path.is_file() and path.stat().st_size != pool.row_bytes:
                remove_page(path, f"it has {path.stat().st_size} bytes, not {pool.row_bytes}")

    def clear(self) -> bool:
        """Remove the pages of this model; those of others in the same folders stay."""
        assert self.file_manager is not None
        for folder in self.file_manager.iter_all_base_dirs():
            for path in Path(folder).rglob(f"*{self.config_suffix}*"):
                with suppress(OSError):
                    path.unlink()
        return True
