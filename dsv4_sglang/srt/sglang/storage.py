"""SGLang's storages of the host cache: names of pages, and the list of files of a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def nixl_names(storage: Any, pool: Any, keys: Sequence[str]) -> list[str]:
    """Return the names of a host pool's pages in a NIXL storage. A page is one buffer."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    if pool == PoolName.KV:
        return list(storage._get_key_list_from_meta(keys))
    return list(storage._get_hybrid_component_keys(keys, pool, 1))


def mooncake_names(storage: Any, pool: Any, keys: Sequence[str]) -> list[str]:
    """Return the names of a host pool's pages in a Mooncake store. A page is one buffer."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    part = "k" if pool == PoolName.KV else pool
    return storage._tag_keys([f"{key}_{storage.mla_suffix}_{part}" for key in keys])


def bound_folder(storage: Any, evictor: Callable[..., Any], config: Any) -> None:
    """Give a file storage an evictor for its whole folder, if it has a size limit and this process writes."""
    if not (storage._evictor.enabled and config.is_storage_writer):
        return
    cache = storage.metadata_cache
    storage._evictor = evictor(
        storage.file_path,
        tp_rank=config.tp_rank,
        extra_config=config.extra_config,
        on_evict=None if cache is None else cache.remove,
        owned_suffixes=("",),  # the empty suffix matches every name
    )


def lock_of_files(evictor: Any) -> Any:
    """Return the lock of an evictor's list of files."""
    return evictor._lock


def set_files(evictor: Any, sizes: dict[str, int]) -> None:
    """Replace an evictor's list of files. Files that are being written stay in it.

    Args:
        evictor: SGLang's evictor.
        sizes: bytes by name, first to be evicted first.
    """
    for name in evictor._pending_writes:
        sizes[name] = sizes.pop(name, evictor._lru[name])
    evictor._lru.clear()
    evictor._lru.update(sizes)
    evictor._total_bytes = sum(sizes.values())


def evictor_of(storage: Any) -> Any:
    """Return SGLang's evictor of a file storage, which counts its files and bounds their size."""
    return storage._evictor
