"""Storages of SGLang that take rows of the host where they are, with checksums."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransferResult
from torch import Tensor

from dsv4_sglang.srt.integration import compat

if TYPE_CHECKING:
    from dsv4_sglang.srt.host_cache.pools import HostRows

log = logging.getLogger(__name__)


class ChecksummedEntries:
    """In front of such a storage in a class's bases: rows are checksummed before they are written; one that comes back
    otherwise is a miss, and goes, so that it is written anew. An error of the storage is a miss, too, and a line in the
    log: SGLang 0.5.17 would end the thread that asked, and with it all saves or all prefetches to come."""

    registered_pools: dict[PoolName, Any]

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        compat.blocks_of(self).checksum(host_indices, self.names(PoolName.KV, keys))
        failed = [False] * len(keys)
        return self._ask(failed, super().batch_set_v1, keys, host_indices, extra_info)  # type: ignore[misc]

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        failed = [False] * len(keys)
        found = self._ask(failed, super().batch_get_v1, keys, host_indices, extra_info)  # type: ignore[misc]
        return self._usable(PoolName.KV, compat.blocks_of(self), keys, host_indices, found)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        for transfer in transfers:
            names = self.names(transfer.name, transfer.keys or [])
            self.registered_pools[transfer.name].checksum(transfer.host_indices, names)
        return self._ask(_failed(transfers), super().batch_set_v2, transfers, extra_info)  # type: ignore[misc]

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        found = self._ask(_failed(transfers), super().batch_get_v2, transfers, extra_info)  # type: ignore[misc]
        return {
            transfer.name: self._usable(
                transfer.name,
                self.registered_pools[transfer.name],
                transfer.keys or [],
                transfer.host_indices,
                found[transfer.name],
            )
            for transfer in transfers
        }

    def batch_exists_v2(self, *arguments: Any, **named: Any) -> PoolTransferResult:
        return self._ask(PoolTransferResult(0, {}), super().batch_exists_v2, *arguments, **named)  # type: ignore[misc]

    def _ask(self, failed: Any, ask: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What the storage answers, or `failed` for an error of whatever library stands behind it."""
        return or_miss(failed, ask, *arguments, **named) if self.available() else failed

    def available(self) -> bool:
        """Return True if the storage can be asked. Log when that changes."""
        return True

    def _usable(
        self, name: PoolName, pool: HostRows, keys: Sequence[str], indices: Tensor, found: list[bool]
    ) -> list[bool]:
        """Which pages of a host pool were found and are what was stored."""
        names = self.names(name, keys)
        usable = [there and good for there, good in zip(found, pool.verify_checksum(indices, names))]
        if not all(usable):
            self.discard(names, pool, found, usable)
        return usable

    @abstractmethod
    def names(self, pool: PoolName, keys: Sequence[str]) -> list[str]:
        """What the storage calls the pages of a host pool, which are one buffer each: the model's name is in it."""

    @abstractmethod
    def discard(self, names: Sequence[str], pool: HostRows, found: list[bool], usable: list[bool]) -> None:
        """Remove the pages, with a warning each, that were found and cannot be used."""


def _failed(transfers: Sequence[Any]) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


def or_miss(miss: Any, ask: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what the storage answers, or `miss` for an error of whatever library is behind it, with the error logged.
    SGLang 0.5.17 would end the thread that asks, and with it all saves or all prefetches to come."""
    try:
        return ask(*arguments, **named)
    except Exception:
        log.exception("host cache: the storage failed; what was asked of it is a miss")
        return miss
