"""Mappings of shared host memory, as the system counts them."""

from __future__ import annotations

from pathlib import Path

from dsv4_sglang.cache.host_memory import SHARED_NAME


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
