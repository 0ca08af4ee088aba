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
