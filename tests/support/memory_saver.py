"""Memory that a server on a GPU releases while it sleeps."""

from __future__ import annotations

import re

import torch

from support.server import Server


def table_bytes(server: Server) -> int:
    """Return the bytes of the pools of a process according to the start-up table."""
    found = re.search(r"([\d.]+) GiB in all", server.log_text())
    assert found, "no start-up table"
    return int(float(found[1]) * (1 << 30))


def free_bytes() -> int:
    """Return the free bytes of the first GPU."""
    return torch.cuda.mem_get_info(0)[0]


def release(server: Server, *tags: str) -> int:
    """Release the memory of these tags and return the number of bytes that become free."""
    before = free_bytes()
    server.post("/release_memory_occupation", {"tags": list(tags)})
    return free_bytes() - before


def resume(server: Server, *tags: str) -> int:
    """Resume the memory of these tags and return the number of bytes that are allocated."""
    before = free_bytes()
    server.post("/resume_memory_occupation", {"tags": list(tags)})
    return before - free_bytes()
