"""One copy of the host rows for the processes of a TP group on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4_sglang.cache.host_sharing import HostSharing


def sharing_of(params: Any, server_args: Any) -> HostSharing:
    """Return the processes that share host rows with this one.

    All ranks of tensor parallelism hold the same bytes and choose host rows in lockstep. Ranks of DP attention do not.

    Args:
        params: SGLang's parameters of the prefix cache.
        server_args: SGLang's ServerArgs.
    """
    return HostSharing(params.tp_cache_group, server_args.node_rank)


class StorageReadByAnother:
    """Storage of a process that does not read: the first process of the machine reads into the shared rows.

    Every page counts as read here. SGLang uses the pages that all processes have read.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def batch_get_v2(self, transfers: Sequence[Any], *arguments: Any, **named: Any) -> dict[Any, list[bool]]:
        return {transfer.name: [True] * len(transfer.keys or []) for transfer in transfers}


def count_pages_read(operation: Any, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> int:
    """Return how many pages of blocks count as read in a process that does not read: all. SGLang's `page_get_func`."""
    return len(keys)
