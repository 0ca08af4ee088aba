"""Tests of metrics: names as the docs page and Prometheus know them, and values in their units, each counted once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, without_a_server

from dsv4_sglang.srt.prefix_cache import copy_timer, metrics
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer
from dsv4_sglang.srt.prefix_cache.metrics import (
    HISTOGRAM,
    HOST,
    HOST_METRICS,
    METRICS,
    TENANT_METRICS,
    CacheMetrics,
    Metric,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^- `(dsv4_\w+)` \((\w+)\): (.+?)\.$", re.MULTILINE)
PUBLISH = """
from types import SimpleNamespace
from prometheus_client import generate_latest
from dsv4_sglang.srt.prefix_cache.metrics import CacheMetrics
slots = SimpleNamespace(timer=SimpleNamespace(), waits=SimpleNamespace())
CacheMetrics(slots, enabled=True, rank=0, silent=False, host=True, tenants=True)
text = generate_latest().decode()
print("\\n".join(line for line in text.splitlines() if "dsv4_" in line and "_created" not in line))
"""
COUNT = """
from types import SimpleNamespace
from prometheus_client import generate_latest
from dsv4_sglang.srt.prefix_cache.metrics import CacheMetrics
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer
timers = [CopyTimer("cpu") for _ in range(4)]
slots = SimpleNamespace(timer=timers[0], waits=timers[1], num_slots=9, available_size=lambda: 4, snapshot_bytes=10)
metrics = CacheMetrics(slots, enabled=True, rank=3, silent=False, host=True)
blocks = SimpleNamespace(
    saved_rows=2, loaded_rows=1, row_bytes=1000, used_rows=3, page_num=10, page_size=128, size=1280
)
snapshots = SimpleNamespace(saved_rows=1, loaded_rows=1, row_bytes=10, used_rows=2, page_num=5, page_size=1, size=5)
metrics.attach(blocks, snapshots, timers[2], timers[3])
metrics.add("hit_tokens", 7, "host")
metrics.add("host_saves_skipped")
metrics.copied_snapshots(3, timed=True)
metrics.copied_snapshots(2, timed=False)
for seconds, timer in enumerate(timers, 1):
    timer.finished(seconds)
metrics.publish()
blocks.saved_rows += 1
metrics.publish()
print(generate_latest().decode())
"""
COUNTED = {
    "prompt_tokens_total": 0,
    "hit_tokens_total": {"host": 7, "device": 0, "storage": 0},
    "snapshots": 5,
    "snapshot_capacity": 9,
    "snapshot_copied_bytes_total": 50,
    "snapshot_timed_bytes_total": 30,
    "snapshot_copy_seconds_total": 1,
    "host_wait_seconds_total": 2,
    "host_save_seconds_sum": 3,
    "host_save_seconds_count": 1,
    "host_load_seconds_sum": 4,
    "host_load_seconds_count": 1,
    "host_tokens": 3 * 128,
    "host_capacity_tokens": 1280,
    "host_snapshots": 2,
    "host_snapshot_capacity": 5,
    "host_saved_bytes_total": 3010,
    "host_loaded_bytes_total": 1010,
    "host_saves_skipped_total": 1,
    "host_loads_failed_total": 0,
}
VALUE = re.compile(r'^dsv4_(\w+)\{dp_rank="3"(?:,(?:source|le)="([^"]+)")?\} ([\d.e+]+)$', re.MULTILINE)


def test_each_event_counts_once() -> None:
    """A process of its own: Prometheus has one registry a process."""
    page = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found = {(name, label): float(value) for name, label, value in VALUE.findall(page)}
    for name, expected in COUNTED.items():
        for label, value in expected.items() if isinstance(expected, dict) else [("", expected)]:
            assert found[name, label] == value, (name, label)


def test_the_page_lists_what_the_code_publishes() -> None:
    rows = {name: (kind, text) for name, kind, text in ROW.findall(PAGE.read_text())}
    known = {metric.exposed: metric for metric in (*METRICS, *HOST_METRICS, *TENANT_METRICS)}
    assert rows.keys() == known.keys()
    for name, (kind, text) in rows.items():
        assert kind == known[name].kind, name
        values = known[name].values if known[name].label and known[name].label != "version" else ()
        assert all(f"`{value}`" in text for value in values), f"{name}: {values} are not explained"
        assert not known[name].label or f"`{known[name].label}`" in text, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_has_no_complaint() -> None:
    page = subprocess.run([sys.executable, "-c", PUBLISH], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert page.count("# TYPE") == len(METRICS) + len(HOST_METRICS) + len(TENANT_METRICS)
    checked = subprocess.run(["promtool", "check", "metrics"], input=page + "\n", capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


# Values. The devices and pools below are fakes with known numbers.

BYTES, RANK, NOW = 1000, 3, 5000.0
ALL = [(metric, value) for metric in (*METRICS, *HOST_METRICS) for value in metric.values]
COUNTERS = [(metric, value) for metric, value in ALL if metric.kind == "counter"]
HISTOGRAMS = [(metric, value) for metric, value in ALL if metric.kind == HISTOGRAM]


class Clock:
    """Clock that only the test moves."""

    now = NOW

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def slots() -> SimpleNamespace:
    timers = {"timer": CopyTimer("cpu"), "waits": CopyTimer("cpu")}
    return SimpleNamespace(num_slots=9, available_size=lambda: 2, snapshot_bytes=BYTES, **timers)


def pools() -> tuple[Any, Any]:
    blocks = SimpleNamespace(used_rows=5, page_size=BLOCK, size=40 * BLOCK, saved_rows=0, loaded_rows=0, row_bytes=10)
    snapshots = SimpleNamespace(used_rows=6, page_num=7, saved_rows=0, loaded_rows=0, row_bytes=100)
    return blocks, snapshots


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(copy_timer, "time", clock)
    return clock


@pytest.fixture
def counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheMetrics]:
    """Metrics of a server with a host cache that is published to a registry of its own."""
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        kind = getattr(prometheus_client, name)

        def create(*arguments: Any, kind: Any = kind, **named: Any) -> Any:
            return kind(*arguments, registry=registry, **named)

        monkeypatch.setattr(prometheus_client, name, create)
    found = CacheMetrics(slots(), enabled=True, rank=RANK, silent=False, host=True)
    found.registry = registry  # type: ignore[attr-defined]
    yield found


def published(found: Any, metric: Metric, value: str = "", part: str = "", **labels: str) -> float | None:
    labels |= {"dp_rank": str(RANK), **({metric.label: value} if metric.label else {})}
    number: float | None = found.registry.get_sample_value(metric.exposed + part, labels)
    return number


def everything(found: Any) -> dict[tuple[str, str], float | None]:
    """Return all published values: of counters and gauges, and the sums of histograms."""
    return {
        (metric.name, value): published(found, metric, value, "_sum" if metric.kind == HISTOGRAM else "")
        for metric, value in ALL
    }


def test_all_series_exist_from_the_start(counted: CacheMetrics) -> None:
    assert {key: number for key, number in everything(counted).items() if number != 0} == {
        ("build_info", metrics.__version__): 1
    }


@pytest.mark.parametrize(("metric", "value"), COUNTERS, ids=lambda each: getattr(each, "name", each))
def test_a_counter_is_counted_once(counted: CacheMetrics, metric: Metric, value: str) -> None:
    """Each event adds its amount to one series, and to no other."""
    before = everything(counted)
    counted.add(metric.name, 5, value)
    counted.add(metric.name, value=value)
    counted.add(metric.name, 0, value)
    changed = {key: number for key, number in everything(counted).items() if number != before[key]}
    assert changed == {(metric.name, value): 6}
    assert counted.total(metric.name, value) == counted.total(metric.name) == 6
    assert f"{metric.name} {value}".strip() + " 6" in str(counted).split(", ")


@pytest.mark.parametrize(("metric", "value"), HISTOGRAMS, ids=lambda each: getattr(each, "name", each))
def test_an_observation_is_in_its_bucket(counted: CacheMetrics, metric: Metric, value: str) -> None:
    low, high = metric.buckets[1], metric.buckets[-1] * 2
    counted.observe(metric.name, low, value)
    counted.observe(metric.name, high, value)
    assert published(counted, metric, value, "_count") == 2
    assert published(counted, metric, value, "_sum") == counted.total(metric.name, value) == low + high
    counts = [published(counted, metric, value, "_bucket", le=str(float(bound))) for bound in metric.buckets]
    assert counts == [0] + [1] * (len(metric.buckets) - 1)
    assert [*metric.buckets] == sorted(metric.buckets)


def test_values_of_a_label_are_summed(counted: CacheMetrics) -> None:
    for source, tokens in zip(metrics.SOURCES, (1, 20, 300)):
        counted.add("hit_tokens", tokens, source)
    assert (counted.total("hit_tokens"), counted.total("hit_tokens", HOST)) == (321, 20)


def test_copied_bytes(counted: CacheMetrics) -> None:
    counted.copied_snapshots(2, timed=True)
    counted.copied_snapshots(3, timed=False)
    assert counted.total("snapshot_copied_bytes") == 5 * BYTES and counted.total("snapshot_timed_bytes") == 2 * BYTES


def test_times_are_seconds(counted: Any, clock: Clock) -> None:
    saves, loads = CopyTimer("cpu"), CopyTimer("cpu")
    counted.attach(*pools(), saves, loads)
    timers = [counted._slots.timer, counted._slots.waits, saves, loads]
    names = ["snapshot_copy_seconds", "host_wait_seconds", "host_save_seconds", "host_load_seconds"]
    for timer, seconds in zip(timers, (0.5, 2, 30, 400)):
        with timer.measure():
            clock.now += seconds
    assert [counted.total(name) for name in names] == [0.5, 2, 30, 400]


class FakeEvent:
    """CUDA event that completes when the test says so. Its times are milliseconds."""

    now, completed = 0.0, False

    def record(self, *stream: Any) -> None:
        self.at, self.stream = FakeEvent.now, stream

    def query(self) -> bool:
        return FakeEvent.completed

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_gpu_times_are_read_when_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeEvent] = []

    def event() -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(copy_timer, "_event", event)
    monkeypatch.setattr(FakeEvent, "completed", False)
    timer, seen = CopyTimer("cuda:0"), list[float]()
    timer.finished = seen.append
    for milliseconds in (1500, 250):
        with timer.measure("stream"):  # type: ignore[arg-type]
            FakeEvent.now += milliseconds
        timer.poll()
    assert not seen and len(made) == 4 and all(event.stream == ("stream",) for event in made)
    FakeEvent.completed = True
    timer.poll()
    timer.poll()
    assert seen == [1.5, 0.25]
    with timer.measure():
        FakeEvent.now += 1000
    assert seen == [1.5, 0.25] and len(made) == 4, "events are used again"
    timer.poll()
    assert seen == [1.5, 0.25, 1]


def test_bytes_of_the_host_cache(counted: Any) -> None:
    blocks, snapshots = pools()
    counted.attach(blocks, snapshots, CopyTimer("cpu"), CopyTimer("cpu"))
    for saved in (3, 7):
        blocks.saved_rows, snapshots.saved_rows, blocks.loaded_rows, snapshots.loaded_rows = saved, 2, 4, saved
        for _ in range(2):  # reading counts nothing
            counted.publish()
            assert counted.total("host_saved_bytes") == saved * 10 + 2 * 100
            assert counted.total("host_loaded_bytes") == 4 * 10 + saved * 100


def test_gauges(counted: Any) -> None:
    counted.attach(*pools(), CopyTimer("cpu"), CopyTimer("cpu"))
    counted.pins = SimpleNamespace(tokens=256, most_tokens=512)
    counted.publish()
    gauges = {metric.name: published(counted, metric, value) for metric, value in ALL if metric.kind == "gauge"}
    del gauges["build_info"]
    assert gauges == {
        "snapshots": 7,
        "snapshot_capacity": 9,
        "pinned_tokens": 256,
        "pin_capacity_tokens": 512,
        "host_tokens": 5 * BLOCK,
        "host_capacity_tokens": 40 * BLOCK,
        "host_snapshots": 6,
        "host_snapshot_capacity": 7,
    }


def test_a_line_a_minute(counted: CacheMetrics, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The log gets a line a minute while requests begin."""
    caplog.set_level("INFO")
    seen = []
    for seconds, tokens in ((0, 5), (59, 5), (1, 5), (30, 5), (30, 0), (60, 0), (0, 5)):
        clock.now += seconds
        counted.add("prompt_tokens", tokens)
        counted.publish()
        seen.append(len(caplog.records))
    assert seen == [0, 0, 1, 1, 2, 2, 3]
    assert [int(tokens) for tokens in re.findall(r"cache: prompt_tokens (\d+)", caplog.text)] == [15, 20, 25]


def test_one_process_of_a_rank_reports(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = CacheMetrics(slots(), enabled=True, rank=RANK, silent=True)
    clock.now += 100
    found.add("prompt_tokens", 5)
    found.publish()
    assert not caplog.records and not found._series


def test_requests_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is computed, hit on the device, and loaded from the host."""
    without_a_server(monkeypatch)
    server = HostCacheServer(monkeypatch, seed=1)
    component, prompt = server.component, [1 + at // BLOCK for at in range(5 * BLOCK + 60)]
    total = component.metrics.total
    component.slots.snapshot_bytes = BYTES

    def counts() -> list[float]:
        names = ("prompt_tokens", "snapshots_resumed", "snapshots_taken", "snapshots_skipped", "lost_tokens")
        hits = [total("hit_tokens", source) for source in metrics.SOURCES]
        return [*(total(name) for name in names), *hits, total("snapshot_copied_bytes") / BYTES]

    assert server.serve(prompt) == 0
    taken = component.metrics.used_slots
    assert taken and counts() == [700, 0, taken, 0, 0, 0, 0, 0, taken]
    assert server.serve(prompt) == 5 * BLOCK
    assert counts() == [1400, 1, taken, 0, 0, 5 * BLOCK, 0, 0, taken + 1]
    assert component.metrics.total("reuse_interval_requests", metrics.HIT) == 1
    for i in range(60):
        server.serve([900 + i] * 300)
    evicted = [total("snapshots_evicted", reason) for reason in metrics.REASONS]
    assert total("snapshots_evicted") == sum(evicted) > 40
    assert total("snapshots_taken") == component.metrics.used_slots + sum(evicted), "each is held or was evicted"
