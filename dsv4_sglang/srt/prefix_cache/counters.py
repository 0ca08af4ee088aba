"""What the prefix cache did, in the log and, with --enable-metrics, under /metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
COUNTERS = {
    "prefix_hit_tokens": "prompt tokens served from the cache",
    "prefix_lost_tokens": "prompt tokens whose blocks were cached, computed again for want of a snapshot",
    "prefix_snapshots_taken": "snapshots taken",
    "prefix_snapshots_evicted": "snapshots evicted, alone or with their blocks",
    "prefix_snapshots_rejected": "snapshots not taken because no slot was free or worth evicting",
    "prefix_snapshots_loaded": "snapshots that requests resumed from",
    "prefix_copied_bytes": "bytes copied to snapshots and from them",
    "prefix_timed_bytes": "those of copied_bytes that prefill steps copied, to which copy_seconds belongs",
    "prefix_copy_seconds": "device time of the copies of prefill steps; those of decode steps are part of a CUDA graph",
}
GAUGES = {"snapshots_held": "snapshot slots in use"}
RANK_LABEL = "dp_rank"
"""Of every metric, as SGLang calls it."""


class Metrics:
    """Prometheus' counters and gauges of one rank of DP attention, under the names `dsv4:` + theirs."""

    def __init__(self, counters: Mapping[str, str], gauges: Mapping[str, str], rank: int) -> None:
        """Names with what they say."""
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; the library reads it when it is imported.
        from prometheus_client import Counter, Gauge

        label, value = (RANK_LABEL,), str(rank)
        self._counters = {name: Counter(f"dsv4:{name}", text, label).labels(value) for name, text in counters.items()}
        self._gauges = {
            name: Gauge(f"dsv4:{name}", text, label, multiprocess_mode="mostrecent").labels(value)
            for name, text in gauges.items()
        }
        self._published: dict[str, float] = dict.fromkeys(counters, 0)

    def publish(self, counters: dict[str, float], gauges: dict[str, float]) -> None:
        for name, metric in self._counters.items():
            metric.inc(counters[name] - self._published[name])
        self._published = counters
        for name, gauge in self._gauges.items():
            gauge.set(gauges[name])


class PrefixCounters:
    """Plain numbers; `publish` copies them to Prometheus and, now and then, to the log. Nothing waits for the device.

    A request that was retracted counts again when it comes back.
    """

    def __init__(self, slots: SnapshotSlots, metrics: bool, rank: int = 0, silent: bool = False) -> None:
        """`rank`: of DP attention, whose ranks count for themselves."""
        self._slots, self._silent = slots, silent
        self.hit_tokens = self.lost_tokens = self.taken = self.evicted = self.rejected = self.loaded = 0
        self.timed_copies = 0
        """Snapshots copied by prefill steps, in either direction."""
        self._logged_at, self._logged = time.monotonic(), (0, 0)
        self._metrics = Metrics(COUNTERS, GAUGES, rank) if metrics and not silent else None

    def resumed(self, resumed: int, cached: int) -> None:
        """A request begins at `resumed` tokens; its path has blocks up to `cached`."""
        self.hit_tokens += resumed
        self.lost_tokens += max(0, cached - resumed)
        if resumed:
            self.loaded += 1
            self.timed_copies += 1
        self.publish()

    @property
    def held(self) -> int:
        return self._slots.num_slots - self._slots.available_size()

    def values(self) -> dict[str, float]:
        """All counters by name."""
        size = self._slots.snapshot_bytes
        return {
            "prefix_hit_tokens": self.hit_tokens,
            "prefix_lost_tokens": self.lost_tokens,
            "prefix_snapshots_taken": self.taken,
            "prefix_snapshots_evicted": self.evicted,
            "prefix_snapshots_rejected": self.rejected,
            "prefix_snapshots_loaded": self.loaded,
            "prefix_copied_bytes": (self.taken + self.loaded) * size,
            "prefix_timed_bytes": self.timed_copies * size,
            "prefix_copy_seconds": self._slots.timer.seconds(),
        }

    def publish(self) -> None:
        if self._metrics is not None:
            self._metrics.publish(self.values(), {"snapshots_held": self.held})
        now = time.monotonic()
        if not self._silent and now - self._logged_at >= LOG_SECONDS and (self.hit_tokens, self.taken) != self._logged:
            self._logged_at, self._logged = now, (self.hit_tokens, self.taken)
            log.info(str(self))

    def __str__(self) -> str:
        values = self.values()
        seconds, timed = values["prefix_copy_seconds"], values["prefix_timed_bytes"]
        rate = f" at {timed / seconds / 1e9:.0f} GB/s" if seconds and timed else ""
        return (
            f"prefix cache: {self.hit_tokens} tokens hit, {self.lost_tokens} lost for want of a snapshot; "
            f"snapshots {self.held} of {self._slots.num_slots} held, {self.taken} taken, {self.evicted} evicted, "
            f"{self.rejected} not taken, {self.loaded} resumed from; "
            f"{values['prefix_copied_bytes'] / 1e9:.2f} GB copied, of which prefill steps {timed / 1e9:.2f} GB in "
            f"{1e3 * seconds:.1f} ms{rate}"
        )
