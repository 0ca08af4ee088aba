"""Metrics of the cache: names, values and the timers of copies. docs/reference/metrics.md.

Names begin with `dsv4_` instead of SGLang's `sglang:`. Prometheus reserves the colon for recording rules, and its
releases before 3.0 replace it by an underscore. An event updates a number on the host; no code here waits for the
device.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dsv4_sglang import __version__
from dsv4_sglang.srt.prefix_cache.notes import RequestNote
from dsv4_sglang.srt.prefix_cache.tenants import DEVICE as ON_DEVICE
from dsv4_sglang.srt.sglang.scheduler import seconds_since_created

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer
    from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

log = logging.getLogger(__name__)

PREFIX = "dsv4_"
# Label of every metric: the DP attention rank.
RANK_LABEL = "dp_rank"
LOG_SECONDS = 60.0
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

COPY_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
FIRST_TOKEN_BUCKETS = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0)
REUSE_BUCKETS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000)


class Metric(NamedTuple):
    """Definition of one metric. All series, one for each of the `values` of `label`, exist from the start."""

    name: str
    kind: str
    text: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name under /metrics."""
        return PREFIX + "_".join([self.name, *(["total"] if self.kind == COUNTER else [])])


DEVICE, HOST, STORAGE = SOURCES = ("device", "host", "storage")
HIT, MISS, EVICTED = "hit", "miss", "evicted"
SLOTS, BLOCKS, SLEEP = REASONS = ("slots", "blocks", "sleep")
# Hints of requests: applied ones by action, and those without an effect.
RETAIN, PIN, DEMOTE = ACTIONS = ("retain", "pin", "demote")
UNTRUSTED, LOST = ("untrusted", "lost")

METRICS = (
    Metric("build_info", GAUGE, "Always 1; the label has this package's version.", "version", (__version__,)),
    Metric("prompt_tokens", COUNTER, "Tokens of the requests that began; a request counts again after a retraction."),
    Metric("hit_tokens", COUNTER, "Those tokens that came from the cache, by place.", "source", SOURCES),
    Metric("lost_tokens", COUNTER, "Tokens computed again although their blocks were cached: there was no snapshot."),
    Metric("first_token_seconds", HISTOGRAM, "Time to the first token.", "cache", (HIT, MISS), FIRST_TOKEN_BUCKETS),
    Metric(
        "reuse_interval_requests",
        HISTOGRAM,
        "Requests between two uses of a conversation; evicted: it was no longer cached.",
        "outcome",
        (HIT, EVICTED),
        REUSE_BUCKETS,
    ),
    Metric("snapshots", GAUGE, "Snapshot slots in use."),
    Metric("snapshot_capacity", GAUGE, "Snapshot slots."),
    Metric("snapshots_taken", COUNTER, "Snapshots taken."),
    Metric("snapshots_skipped", COUNTER, "Snapshots not taken: no slot was free or worth evicting."),
    Metric("snapshots_resumed", COUNTER, "Requests that resumed from a snapshot."),
    Metric(
        "snapshots_evicted",
        COUNTER,
        "Snapshots evicted from the device, by the resource that was needed.",
        "reason",
        REASONS,
    ),
    Metric(
        "hints",
        COUNTER,
        "Hints of requests, by effect; untrusted: too few came true; lost: there was no snapshot.",
        "effect",
        (*ACTIONS, UNTRUSTED, LOST),
    ),
    Metric("pinned_tokens", GAUGE, "Tokens of pinned conversations."),
    Metric("pin_capacity_tokens", GAUGE, "Tokens that may be pinned."),
    Metric("snapshot_copied_bytes", COUNTER, "Bytes copied to snapshots and from them."),
    Metric("snapshot_timed_bytes", COUNTER, "Those bytes that prefill steps copied."),
    Metric("snapshot_copy_seconds", COUNTER, "Device time of the copies of prefill steps."),
)
# Additional metrics of a server with a host cache.
HOST_METRICS = (
    Metric("host_tokens", GAUGE, "Tokens whose blocks are in the host cache."),
    Metric("host_capacity_tokens", GAUGE, "Tokens that the host cache has room for."),
    Metric("host_snapshots", GAUGE, "Snapshots in the host cache."),
    Metric("host_snapshot_capacity", GAUGE, "Snapshots that the host cache has room for."),
    Metric("host_saved_bytes", COUNTER, "Bytes copied to the host cache."),
    Metric("host_loaded_bytes", COUNTER, "Bytes copied from the host cache."),
    Metric("host_save_seconds", HISTOGRAM, "Device time of one save.", buckets=COPY_BUCKETS),
    Metric("host_load_seconds", HISTOGRAM, "Device time of one load.", buckets=COPY_BUCKETS),
    Metric("host_wait_seconds", COUNTER, "Device time that steps waited for the first layer of a load."),
    Metric("host_saves_skipped", COUNTER, "Snapshots not saved: the host cache had no room for them."),
    Metric("host_loads_failed", COUNTER, "Hits in the host cache computed again because the device had no room."),
    Metric(
        "host_snapshots_evicted",
        COUNTER,
        "Snapshots evicted that only the host cache had, by the resource that was needed.",
        "reason",
        (SLOTS, BLOCKS),
    ),
)

# Additional metrics of a server with shares of tenants. Tenants are not named: their salts may be secrets.
TENANT_RANKS, OTHER_TENANTS = ("1", "2", "3", "4"), "other"
TENANT_METRICS = (
    Metric(
        "tenant_tokens",
        GAUGE,
        "Tokens on the GPU of the tenants that hold most, by rank, and of all others.",
        "rank",
        (*TENANT_RANKS, OTHER_TENANTS),
    ),
    Metric("tenants", GAUGE, "Tenants that hold tokens on the GPU."),
    Metric("tenants_above_share", GAUGE, "Those of them that hold more than their share."),
)


def _series(metrics: tuple[Metric, ...], rank: int) -> dict[tuple[str, str], Any]:
    """Create Prometheus objects. Return them by metric name and label value."""
    # SGLang sets PROMETHEUS_MULTIPROC_DIR before this import; the library reads it when it is imported.
    from prometheus_client import Counter, Gauge, Histogram

    kinds: dict[str, Callable[..., Any]] = {
        COUNTER: Counter,
        GAUGE: partial(Gauge, multiprocess_mode="mostrecent"),
        HISTOGRAM: Histogram,
    }
    series = {}
    for metric in metrics:
        buckets = {"buckets": metric.buckets} if metric.buckets else {}
        labels = [RANK_LABEL, *filter(None, [metric.label])]
        family = kinds[metric.kind](PREFIX + metric.name, metric.text, labels, **buckets)
        for value in metric.values:
            series[metric.name, value] = family.labels(str(rank), *([value] if metric.label else []))
    return series


class HostPool(Protocol):
    """Counters of one pool of the host cache, which is above this package.

    Attributes:
        size: tokens or snapshots that the pool has room for.
        page_size: tokens or snapshots of a row.
        page_num: rows.
        row_bytes: bytes of a row.
        saved_rows: rows copied to the pool since the start.
        loaded_rows: rows copied from it.
    """

    size: int
    page_size: int
    page_num: int
    row_bytes: int
    saved_rows: int
    loaded_rows: int

    @property
    def used_rows(self) -> int:
        """Number of rows in use."""


class PinLimits(Protocol):
    """Pins of the prefix cache: the tokens that they are charged with, and the limit."""

    most_tokens: int

    @property
    def tokens(self) -> int: ...


class CacheMetrics:
    """Metrics of one DP attention rank, written to the log and, with --enable-metrics, to /metrics."""

    def __init__(
        self,
        slots: SnapshotSlots,
        *,
        enabled: bool,
        rank: int,
        silent: bool,
        host: bool = False,
        tenants: bool = False,
    ) -> None:
        """Create the metrics and connect the snapshot timers.

        Args:
            slots: Snapshot slots, whose timers report here.
            enabled: Publish the metrics to Prometheus.
            rank: DP attention rank.
            silent: Do not publish or log, because a different process of the rank does.
            host: The server has a host cache.
            tenants: Tenants have shares.
        """
        self._slots, self._silent, self._tenants = slots, silent, tenants
        # Label of evicted snapshots, one of REASONS.
        self.eviction_reason = BLOCKS
        self._pools: tuple[HostPool, HostPool] | None = None
        self.pins: PinLimits | None = None
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self._logged_at, self._logged = time.monotonic(), 0.0
        self._series: dict[tuple[str, str], Any] = {}
        if enabled and not silent:
            more = (*(HOST_METRICS if host else ()), *(TENANT_METRICS if tenants else ()))
            self._series = _series((*METRICS, *more), rank)
            self._series["build_info", __version__].set(1)
        slots.timer.finished = partial(self.add, "snapshot_copy_seconds")
        slots.waits.finished = partial(self.add, "host_wait_seconds")

    def attach(self, blocks: HostPool, snapshots: HostPool, saves: CopyTimer, loads: CopyTimer) -> None:
        """Connect the pools of the host cache and the timers of its copies."""
        self._pools = blocks, snapshots
        saves.finished = partial(self.observe, "host_save_seconds")
        loads.finished = partial(self.observe, "host_load_seconds")
        self._timers = saves, loads

    # Events

    def admitted(
        self, req: Req, resumed: int, hits: dict[str, int], since_use: float | None, since_eviction: float
    ) -> None:
        """Count a request that begins.

        Args:
            req: request of SGLang.
            resumed: tokens that it does not compute.
            hits: those tokens by the place that had them, one of SOURCES.
            since_use: requests since the last use of the snapshot from which it resumes, None without one.
            since_eviction: requests since the last use of its evicted conversation, 0 without one.
        """
        if since_use is not None:
            self.observe("reuse_interval_requests", since_use, HIT)
        if since_eviction:
            self.observe("reuse_interval_requests", since_eviction, EVICTED)
        if not len(req.output_ids):
            RequestNote.of(req).first_token_waits_in = HIT if resumed else MISS
        self.add("prompt_tokens", len(req.full_untruncated_fill_ids))
        self.add("lost_tokens", max(0, (req.mamba_branching_seqlen or 0) - resumed))
        if resumed:
            self.add("snapshots_resumed")
            self.copied_snapshots(1, timed=True)
        for source, tokens in hits.items():
            self.add("hit_tokens", tokens, source)
        self.publish()

    def first_token(self, req: Req) -> None:
        """Observe the time to the first token of a request, if it has a token and was not observed before."""
        note = RequestNote.of(req)
        if len(req.output_ids) and (cache := note.first_token_waits_in):
            note.first_token_waits_in = None
            self.observe("first_token_seconds", seconds_since_created(req), cache)

    @contextmanager
    def evicting(self, reason: str) -> Iterator[None]:
        """Context manager: count snapshots that are evicted inside under `reason`, one of REASONS."""
        before, self.eviction_reason = self.eviction_reason, reason
        try:
            yield
        finally:
            self.eviction_reason = before

    def add(self, name: str, amount: float = 1, value: str = "") -> None:
        """Add `amount` to a counter. `value` is the value of its label."""
        if amount:
            self._sums[name, value] += amount
            if series := self._series.get((name, value)):
                series.inc(amount)

    def observe(self, name: str, amount: float, value: str = "") -> None:
        """Add one observation to a histogram. `value` is the value of its label."""
        self._sums[name, value] += amount
        if series := self._series.get((name, value)):
            series.observe(amount)

    def copied_snapshots(self, count: int, *, timed: bool) -> None:
        """Count the bytes of `count` copied snapshots. `timed` means that a prefill step copies them."""
        self.add("snapshot_copied_bytes", count * self._slots.snapshot_bytes)
        if timed:
            self.add("snapshot_timed_bytes", count * self._slots.snapshot_bytes)

    def total(self, name: str, value: str | None = None) -> float:
        """Return the value of a counter or the sum of a histogram. Without `value`, sum over all label values."""
        self._poll()
        return sum(amount for (of, label), amount in self._sums.items() if of == name and value in (None, label))

    # Gauges

    @property
    def used_slots(self) -> int:
        """Number of snapshot slots in use."""
        return self._slots.num_slots - self._slots.available_size()

    def states(self) -> dict[str, float]:
        """Return all gauges by name."""
        states: dict[str, float] = {"snapshots": self.used_slots, "snapshot_capacity": self._slots.num_slots}
        if self.pins is not None:
            states |= {"pinned_tokens": self.pins.tokens, "pin_capacity_tokens": self.pins.most_tokens}
        if self._pools is not None:
            blocks, snapshots = self._pools
            states |= {"host_tokens": blocks.used_rows * blocks.page_size, "host_capacity_tokens": blocks.size}
            states |= {"host_snapshots": snapshots.used_rows, "host_snapshot_capacity": snapshots.page_num}
        if self._tenants:
            tenants = self._slots.registry.tenants
            states |= {
                "tenants": len(tenants.held[ON_DEVICE]),
                "tenants_above_share": len(tenants.above[ON_DEVICE]),
            }
        return states

    def tenant_tokens(self) -> dict[str, int]:
        """Return the tokens on the device of the largest tenants by rank, and of the others. Empty without shares."""
        if not self._tenants:
            return {}
        first, others = self._slots.registry.tenants.largest(ON_DEVICE, len(TENANT_RANKS))
        ranks = dict.fromkeys(TENANT_RANKS, 0) | dict(zip(TENANT_RANKS, first))
        return {**ranks, OTHER_TENANTS: others}

    def _poll(self) -> None:
        """Collect finished copies and the counters of the host pools."""
        self._slots.timer.poll()
        self._slots.waits.poll()
        if self._pools is not None:
            for timer in self._timers:
                timer.poll()
            for name, total in (
                ("host_saved_bytes", sum(pool.saved_rows * pool.row_bytes for pool in self._pools)),
                ("host_loaded_bytes", sum(pool.loaded_rows * pool.row_bytes for pool in self._pools)),
            ):
                self.add(name, total - self._sums[name, ""])

    def publish(self) -> None:
        """Update all gauges, collect finished copies and write the log line when it is due.

        Called when a request begins or ends, and after saves.
        """
        self._poll()
        if self._series:
            for name, value in self.states().items():
                self._series[name, ""].set(value)
            for rank, value in self.tenant_tokens().items():
                self._series["tenant_tokens", rank].set(value)
        now, prompts = time.monotonic(), self._sums["prompt_tokens", ""]
        if not self._silent and now - self._logged_at >= LOG_SECONDS and prompts != self._logged:
            self._logged_at, self._logged = now, prompts
            log.info("cache: %s", self)

    def __str__(self) -> str:
        """Return all values but zeros, each with its name and label under /metrics. A histogram has its sum."""
        self._poll()
        values = {**self._sums, **{(name, ""): amount for name, amount in self.states().items()}}
        values |= {("tenant_tokens", rank): tokens for rank, tokens in self.tenant_tokens().items()}
        keys = [
            (metric.name, value) for metric in (*METRICS, *HOST_METRICS, *TENANT_METRICS) for value in metric.values
        ]
        return ", ".join(f"{' '.join(key).strip()} {values[key]:.6g}" for key in keys if values.get(key))
