"""Segments of host rows in a folder of the test, and servers that end without the end of their process."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_HICACHE_SHM_BACKEND_STORAGE_DIR"


@contextmanager
def new_folder() -> Iterator[Path]:
    """Context manager with a folder in memory for the storage `shm`, which is removed at the end."""
    folder = Path("/dev/shm", f"dsv4_sglang-test-{os.getpid()}-{uuid.uuid4().hex}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def end(server: Any) -> None:
    """End the storage threads of a `HostCacheServer` and release its segment, whose rows stay as they are.

    The end of a process does both.
    """
    server.controller._stop_storage_threads()
    shared = server.cache.full_kv_pool_host.shared
    if shared is not None and shared.segment is not None:
        shared.segment.release()
