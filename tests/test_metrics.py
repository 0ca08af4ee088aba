"""Tests of metric names: the docs page and the code list the same names, and Prometheus accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4_sglang.srt.integration.metrics import HOST_METRICS, METRICS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^- `(dsv4_\w+)` \((\w+)\): (.+?)\.$", re.MULTILINE)
PUBLISH = """
from types import SimpleNamespace
from prometheus_client import generate_latest
from dsv4_sglang.srt.integration.metrics import CacheMetrics
slots = SimpleNamespace(timer=SimpleNamespace(), waits=SimpleNamespace())
CacheMetrics(slots, enabled=True, rank=0, silent=False, host=True)
text = generate_latest().decode()
print("\\n".join(line for line in text.splitlines() if "dsv4_" in line and "_created" not in line))
"""
COUNT = """
from types import SimpleNamespace
from prometheus_client import generate_latest
from dsv4_sglang.srt.integration.metrics import CacheMetrics
from dsv4_sglang.srt.memory.copy_timer import CopyTimer
timers = [CopyTimer("cpu") for _ in range(4)]
slots = SimpleNamespace(timer=timers[0], waits=timers[1], num_slots=9, available_size=lambda: 4, snapshot_bytes=10)
metrics = CacheMetrics(slots, enabled=True, rank=3, silent=False, host=True)
blocks = SimpleNamespace(saved_rows=2, loaded_rows=1, row_bytes=1000, held=3, page_num=10, page_size=128, size=1280)
snapshots = SimpleNamespace(saved_rows=1, loaded_rows=1, row_bytes=10, held=2, page_num=5, page_size=1, size=5)
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
    known = {metric.exposed: metric for metric in (*METRICS, *HOST_METRICS)}
    assert rows.keys() == known.keys()
    for name, (kind, text) in rows.items():
        assert kind == known[name].kind, name
        values = known[name].values if known[name].label and known[name].label != "version" else ()
        assert all(f"`{value}`" in text for value in values), f"{name}: {values} are not explained"
        assert not known[name].label or f"`{known[name].label}`" in text, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_has_no_complaint() -> None:
    page = subprocess.run([sys.executable, "-c", PUBLISH], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert page.count("# TYPE") == len(METRICS) + len(HOST_METRICS)
    checked = subprocess.run(["promtool", "check", "metrics"], input=page + "\n", capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
