"""A server that ends, and its successor on the same storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsv4_sglang.srt.host_cache.folder import stored_files
from dsv4_sglang.srt.host_cache.stored_segments import stored_segments
from support.segments import new_folder
from support.server import Generated, Server, prompt, running


def stored_pages(folder: Path) -> int:
    return sum(found.pages for found in (*stored_files(folder), *stored_segments(folder)))


@contextmanager
def restarted(
    model: Path,
    path: Path,
    storage: str,
    flags: Sequence[str],
    prompts: Sequence[list[int]],
    pages: int,
    **options: Any,
) -> Iterator[tuple[Server, list[Generated]]]:
    """Serve prompts, end the server once it has stored them, and yield the next server and its answers to them.

    Args:
        model: checkpoint folder.
        path: folder for logs and stored pages.
        storage: value of --hicache-storage-backend.
        flags: other flags, with those of a host cache.
        prompts: prompts of 128 tokens or more.
        pages: pages that the first server stores.
        options: options of the package.
    """
    flags = (*flags, "--hicache-storage-backend", storage)
    flags += ("--hicache-storage-backend-extra-config", '{"l3_cleaner_enabled": false}')
    files = path / "files"
    files.mkdir()

    def serve(server: Server) -> list[Generated]:
        return [server.generate(ids, 16) for ids in prompts]

    with pytest.MonkeyPatch.context() as patch, new_folder() as segments:
        folder = segments if storage == "shm" else files
        for kind in ("FILE", "NIXL", "SHM"):
            patch.setenv(f"SGLANG_HICACHE_{kind}_BACKEND_STORAGE_DIR", str(folder))
        patch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "POSIX")
        with running(model, path / "first", *flags, **options) as server:
            assert [got.cached for got in serve(server)] == [0] * len(prompts)
            server.wait_idle()
            count = -1
            while count != (count := stored_pages(folder)) or count < pages:
                server.generate(prompt(5), 1)
        with running(model, path / "second", *flags, **options) as server:
            yield server, serve(server)
