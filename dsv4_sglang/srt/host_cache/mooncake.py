"""Mooncake's store as a storage of the host cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

from dsv4_sglang.srt.host_cache.checksummed import ChecksummedEntries
from dsv4_sglang.srt.host_cache.storage import WRONG_CHECKSUM
from dsv4_sglang.srt.sglang.storage import mooncake_names

log = logging.getLogger(__name__)

# Remove an object even if it was just read. Without this, Mooncake rejects the removal for some seconds.
FORCE = True


class MooncakeStorage(ChecksummedEntries, MooncakeStore):
    """Storage with one object per row, in the pooled memory of all Mooncake clients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first_prefix: str = self.config_prefix

    def use_name(self, name: str) -> None:
        """Use another page name from now on, after a weight update. Pages of the former name stay, since other servers
        may use them; the store evicts them once it is full."""
        self.config_prefix: str = f"{self._first_prefix}-{name}"

    def names(self, pool: Any, keys: Sequence[str]) -> list[str]:
        return mooncake_names(self, pool, keys)

    def discard(self, names: Sequence[str], pool: Any, found: list[bool], usable: list[bool]) -> None:
        for name, there, good in zip(names, found, usable):
            if there and not good:
                log.warning("host cache: the stored page %s cannot be used and is removed: %s", name, WRONG_CHECKSUM)
                self.store.remove(name, FORCE)

    def clear(self) -> None:
        """Remove the pages of this model, also for other servers. Pages of other models in the same store stay."""
        self.store.remove_by_regex(f"^{re.escape(self.config_prefix)}_", FORCE)
