"""Pages of the host behind NIXL's plugins for files: SGLang's storage, with checksums."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl
from torch import Tensor

from dsv4_sglang.srt import compat
from dsv4_sglang.srt.host.pools import HostRows
from dsv4_sglang.srt.host.storage import remove_page


class NixlStorage(HiCacheNixl):
    """Rows go to files and back without a copy on the way. A file that is torn or was changed is a miss and a warning,
    and goes, so that it is written anew.

    Raises ValueError for a plugin that has no files.
    """

    def __init__(self, storage_config: Any, *arguments: Any) -> None:
        super().__init__(storage_config, *arguments)
        if self.file_manager is None:
            raise ValueError(
                f"--hicache-storage-backend nixl with the plugin {self.backend_selector.backend_name}: pages have been "
                "stored in files only; set SGLANG_HICACHE_NIXL_BACKEND_PLUGIN to POSIX, or to another that has files"
            )

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        self.mem_pool_host.get_pool(PoolName.KV).seal(host_indices)
        return super().batch_set_v1(keys, host_indices, extra_info)

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        found = super().batch_get_v1(keys, host_indices, extra_info)
        return self._usable(self.mem_pool_host.get_pool(PoolName.KV), PoolName.KV, keys, host_indices, found)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        for transfer in transfers:
            self.registered_pools[transfer.name].seal(transfer.host_indices)
        return super().batch_set_v2(transfers, extra_info)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        found = super().batch_get_v2(transfers, extra_info)
        for transfer in transfers:
            pool = self.registered_pools[transfer.name]
            found[transfer.name] = self._usable(
                pool, transfer.name, transfer.keys or [], transfer.host_indices, found[transfer.name]
            )
        return found

    def _usable(
        self, pool: HostRows, name: PoolName, keys: Sequence[str], indices: Tensor, found: list[bool]
    ) -> list[bool]:
        """Of pages that were read, those that are what was stored. NIXL reads all or none, so what is torn goes where
        none was read."""
        files = compat.nixl_files(self, name, keys)
        if not all(found):
            for path in files:
                if path.is_file() and path.stat().st_size != pool.row_bytes:
                    remove_page(path, f"it has {path.stat().st_size} bytes, not {pool.row_bytes}")
            return [False] * len(files)
        usable = pool.intact(indices)
        for path, good in zip(files, usable):
            if not good:
                remove_page(path, "its checksum is another")
        return usable

    def clear(self) -> bool:
        """Remove the pages of this model; those of others in the same folders stay."""
        assert self.file_manager is not None
        for folder in self.file_manager.iter_all_base_dirs():
            for path in Path(folder).rglob(f"*{self.config_suffix}*"):
                with suppress(OSError):
                    path.unlink()
        return True
