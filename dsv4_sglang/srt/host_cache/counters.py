"""What the host cache did, in the log and, with --enable-metrics, under /metrics."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dsv4_sglang.srt.prefix_cache.counters import LOG_SECONDS, Metrics
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

if TYPE_CHECKING:
    from dsv4_sglang.srt.host_cache.pools import HostBlocks, HostSnapshots

log = logging.getLogger(__name__)

COUNTERS = {
    "host_hit_tokens_device": "prompt tokens served from what the device had",
    "host_hit_tokens_host": "prompt tokens served from what the host had",
    "host_hit_tokens_storage": "prompt tokens served from what the storage behind the host had",
    "host_saved_bytes": "bytes copied to the host",
    "host_save_seconds": "device time of these copies",
    "host_loaded_bytes": "bytes copied from the host",
    "host_load_seconds": "device time of these copies",
    "host_wait_seconds": "device time that steps waited for the first layer of what they load",
    "host_saves_rejected": "snapshots not saved: the host had no room for something worth no more",
    "host_loads_failed": "hits on the host that were computed again for want of room on the device",
    "host_snapshots_evicted": "snapshots that the host gave up",
}
GAUGES = {
    "host_blocks_held": "host blocks in use",
    "host_snapshots_held": "host snapshots in use",
}


class HostCounters:
    """Plain numbers; `publish` copies them to Prometheus and, now and then, to the log. Nothing waits for the device.

    The three tiers of hits add up to the tokens that requests resumed from.
    """

    def __init__(self, slots: SnapshotSlots, metrics: bool, rank: int, silent: bool) -> None:
        """As `PrefixCounters`."""
        self._slots, self._silent = slots, silent
        self._blocks: HostBlocks | None = None
        self._snapshots: HostSnapshots | None = None
        self.device_tokens = self.host_tokens = self.storage_tokens = 0
        self.saves_rejected = self.loads_failed = self.snapshots_evicted = 0
        self._logged_at, self._logged = time.monotonic(), (0, 0)
        self._metrics = Metrics(COUNTERS, GAUGES, rank) if metrics and not silent else None

    def attach(self, blocks: HostBlocks, snapshots: HostSnapshots) -> None:
        self._blocks, self._snapshots = blocks, snapshots

    def resumed(self, tokens: int, from_host: int, from_storage: int) -> None:
        """A request begins at `tokens`, of which so many were on the host, and so many of these in the storage."""
        self.device_tokens += tokens - from_host
        self.host_tokens += from_host - from_storage
        self.storage_tokens += from_storage

    def values(self) -> dict[str, float]:
        """All counters by name."""
        pools = [pool for pool in (self._blocks, self._snapshots) if pool is not None]
        return {
            "host_hit_tokens_device": self.device_tokens,
            "host_hit_tokens_host": self.host_tokens,
            "host_hit_tokens_storage": self.storage_tokens,
            "host_saved_bytes": sum(pool.saved_rows * pool.row_bytes for pool in pools),
            "host_save_seconds": sum(pool.saving.seconds() for pool in pools),
            "host_loaded_bytes": sum(pool.loaded_rows * pool.row_bytes for pool in pools),
            "host_load_seconds": sum(pool.loading.seconds() for pool in pools),
            "host_wait_seconds": self._slots.waits.seconds(),
            "host_saves_rejected": self.saves_rejected,
            "host_loads_failed": self.loads_failed,
            "host_snapshots_evicted": self.snapshots_evicted,
        }

    def held(self) -> dict[str, float]:
        """Gauges by name."""
        if self._blocks is None or self._snapshots is None:
            return dict.fromkeys(GAUGES, 0)
        return {"host_blocks_held": self._blocks.held, "host_snapshots_held": self._snapshots.held}

    def publish(self) -> None:
        if self._metrics is not None:
            self._metrics.publish(self.values(), self.held())
        now = time.monotonic()
        copied = (self.host_tokens, 0 if self._blocks is None else self._blocks.saved_rows)
        if not self._silent and now - self._logged_at >= LOG_SECONDS and copied != self._logged:
            self._logged_at, self._logged = now, copied
            log.info(str(self))

    def __str__(self) -> str:
        values, held = self.values(), self.held()
        return (
            f"host cache: {held['host_blocks_held']} blocks and {held['host_snapshots_held']} snapshots held; "
            f"tokens hit on the device {self.device_tokens}, on the host {self.host_tokens}, in the storage "
            f"{self.storage_tokens}; {values['host_saved_bytes'] / 1e9:.2f} GB saved in "
            f"{values['host_save_seconds']:.2f} s, {values['host_loaded_bytes'] / 1e9:.2f} GB loaded in "
            f"{values['host_load_seconds']:.2f} s, {1e3 * values['host_wait_seconds']:.1f} ms waited for; "
            f"{self.saves_rejected} saves rejected, {self.loads_failed} loads failed, {self.snapshots_evicted} "
            f"snapshots given up"
        )
