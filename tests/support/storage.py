"""File storages in a folder, without a server, and pages of other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from dsv4_sglang.srt.host_cache.folder import FOLDERS, PAGE_VERSION
from dsv4_sglang.srt.host_cache.storage import FileStorage

VARIABLE, _ = FOLDERS["file"]
# Bytes.
PAGE = 1000


def name_of(model: str) -> str:
    return f"{model}-dsv4v{PAGE_VERSION}-fp8-mxfp4-{'0' * 32}"


def open_storage(folder: Path, model: str = "m", **extra: Any) -> FileStorage:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=name_of(model),
        extra_config=extra,
    )
    return FileStorage(config, str(folder))


def key(at: int) -> str:
    return f"{at:064x}"


def store(storage: FileStorage, at: int) -> bool:
    return storage.set(key(at), torch.full([PAGE], at % 256, dtype=torch.uint8))


def stored(storage: FileStorage, at: int) -> bool:
    return storage.get(key(at), torch.zeros(PAGE, dtype=torch.uint8)) is not None


def put(folder: Path, name: str, age: float, size: int = PAGE) -> Path:
    """Create a file of another process with the given age in seconds."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / name).write_bytes(bytes(size))
    now = (folder / name).stat().st_mtime
    os.utime(folder / name, (now - age, now - age))
    return folder / name


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
