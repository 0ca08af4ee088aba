"""Mappings of shared host memory, as the system counts them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from dsv4_sglang.cache.host_memory import SHARED_NAME
from support.server import Server, schedulers


def shared_mappings(process: int | str = "self") -> list[dict[str, int]]:
    """Return the mappings of shared host memory of a process: the inode, and the sizes of /proc/PID/smaps in KiB."""
    found: list[dict[str, int]] = []
    ours = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            if ours := f"/memfd:{SHARED_NAME}" in line:
                found.append({"inode": int(rest[3])})
        elif ours and rest[-1] == "kB":
            found[-1][name[:-1]] = int(rest[0])
    return found


def mappings_of(server: Server) -> list[list[dict[str, int]]]:
    """Return the mappings of shared host memory of each scheduler."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return [shared_mappings(process.pid) for process in schedulers(processes)]


def assert_one_copy(server: Server) -> None:
    """Assert that two processes map the same memory, for blocks and for snapshots, and that it exists once.

    Its size is that of the rows in the log.
    """
    first, second = mappings_of(server)
    assert len(first) == 2 and [found["inode"] for found in first] == [found["inode"] for found in second]
    logged = re.search(
        r"host cache of 2 processes: \d+ tokens in (\d+) blocks of (\d+) bytes, (\d+) snapshots of (\d+) bytes",
        server.log_text(),
    )
    assert logged is not None
    blocks, block_bytes, snapshots, snapshot_bytes = map(int, logged.groups())
    pages = sum(-(-size // 4096) for size in (blocks * block_bytes, snapshots * snapshot_bytes))
    taken = sum(found["Pss"] for found in (*first, *second))
    assert abs(taken - 4 * pages) <= 4, f"{taken} KiB for {4 * pages} KiB of rows"
