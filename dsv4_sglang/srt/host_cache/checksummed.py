"""Mixin that adds checksums to SGLang storages which read and write host rows in place."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransferResult
from torch import Tensor

if TYPE_CHECKING:
    from dsv4_sglang.srt.host_cache.pools import HostRows

log = logging.getLogger(__name__)


class ChecksummedEntries:
    """Mixin, to be placed before the storage class in the bases.

    Rows are checksummed before they are written. A page with a wrong checksum is a miss and is removed, so that it is
    stored again. An error of the storage is logged and counts as a miss too.
    """

    mem_pool_host: HostRows  # of blocks
    registered_pools: dict[PoolName, HostRows]

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        self.mem_pool_host.checksum(host_indices, self.names(PoolName.KV, keys))
        failed = [False] * len(keys)
        return self._ask(failed, super().batch_set_v1, keys, host_indices, extra_info)  # type: ignore[misc]

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        failed = [False] * len(keys)
        found = self._ask(failed, super().batch_get_v1, keys, host_indices, extra_info)  # type: ignore[misc]
        return self._usable(PoolName.KV, self.mem_pool_host, keys, host_indices, found)

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
        """Return the answer of the storage, or `failed` if it is not available or raises an error."""
        return or_miss(failed, ask, *arguments, **named) if self.available() else failed

    def available(self) -> bool:
        """Return True if the storage is available. Log when that changes."""
        return True

    def _usable(
        self, name: PoolName, pool: HostRows, keys: Sequence[str], indices: Tensor, found: list[bool]
    ) -> list[bool]:
        """Return, for each page of a host pool, True if it was found with a correct checksum. Discard the others."""
        names = self.names(name, keys)
        usable = [there and good for there, good in zip(found, pool.verify_checksum(indices, names))]
        if not all(usable):
            self.discard(names, pool, found, usable)
        return usable

    @abstractmethod
    def names(self, pool: PoolName, keys: Sequence[str]) -> list[str]:
        """Return the names of a host pool's pages in the storage, with the model's name in each. A page is one
        buffer."""

    @abstractmethod
    def discard(self, names: Sequence[str], pool: HostRows, found: list[bool], usable: list[bool]) -> None:
        """Remove the pages that were found but are not usable, with a warning for each.

        Args:
            names: names of the pages in the storage.
            pool: host pool of the pages.
            found: for each page, True if the storage returned it.
            usable: for each page, True if its checksum is correct.
        """


def _failed(transfers: Sequence[Any]) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


def or_miss(miss: Any, ask: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the storage, and return `miss` if it raises any error, which is logged."""
    try:
        return ask(*arguments, **named)
    except Exception:
        log.exception("host cache: the storage failed; the request counts as a miss")
        return miss
