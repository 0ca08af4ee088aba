"""SGLang's copies of tree nodes to host memory."""

from __future__ import annotations

from typing import Any


def start_backup(cache: Any, node_id: int, device_blocks: Any, transfers: Any) -> Any:
    """Start to copy a node to the host. Return the host indices of its blocks, or None without room for all of it."""
    return cache._execute_kv_backup(node_id, device_blocks, transfers, [])


def note_backup(cache: Any, node_id: int, lock: Any) -> None:
    """Record a running copy of a node. `lock` is released when it ends."""
    cache._track_write_through_node(node_id, lock, publish_node_ids=[node_id])
