"""The alert rules of docker/: promtool accepts them, and each fires only on a server with its fault."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv4_sglang.srt.prefix_cache.metrics import HISTOGRAM, HOST_METRICS, METRICS

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
RULES, DASHBOARD = ROOT / "docker" / "alerts.yml", ROOT / "docker" / "grafana" / "dashboards" / "cache.json"
PARTS = ("_bucket", "_sum", "_count")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
@pytest.mark.parametrize(
    "arguments", [("check", "rules", RULES), ("test", "rules", ROOT / "tests/repository/alerts.test.yml")]
)
def test_promtool_accepts_the_rules(arguments: tuple[str | Path, ...]) -> None:
    checked = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("file", [RULES, DASHBOARD])
def test_rules_and_dashboard_ask_for_metrics_that_exist(file: Path) -> None:
    known = {m.exposed + part for m in (*METRICS, *HOST_METRICS) for part in (PARTS if m.kind == HISTOGRAM else ("",))}
    asked = set(re.findall(r"\bdsv4_\w+", file.read_text()))
    assert asked and asked <= known, asked - known


def test_every_alert_is_explained() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    page = (ROOT / "docs" / "guides" / "operating.md").read_text()
    assert alerts == set(re.findall(r"`(DSV4\w+)`", page))
