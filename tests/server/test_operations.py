"""Monitoring of a real server: metrics, `dsv4-sglang top`, and Prometheus with the rules and the dashboard."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from liveness import Progress
from rich.console import Console
from server_harness import Server, prompt

from dsv4_sglang.cli import client
from dsv4_sglang.cli.top import Page, frame
from dsv4_sglang.srt.integration.metrics import HISTOGRAM, HOST_METRICS, METRICS, PREFIX
from tools.draw_dashboard import ask, draw, panels, query

pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent.parent
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
# 16 device blocks, 6 snapshots and a host cache of 1.5 times that size.
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-running-requests", "2", "--max-total-tokens", "2048")
FLAGS += ("--chunked-prefill-size", "256", "--enable-metrics", "--decode-log-interval", "1")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "snapshot_interval": 512, "max_snapshots": 6}
WINDOW = "30m"
# Prometheus drops a scrape that takes longer, and has no gauges until the next one.
SCRAPE = "5s"


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Prometheus with the configuration of docker/ that scrapes the server every SCRAPE."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = (ROOT / "docker" / "prometheus.yml").read_text()
    assert "server:30000" in config and "15s" in config
    (folder / "prometheus.yml").write_text(
        config.replace("server:30000", f"127.0.0.1:{server.port}").replace("15s", SCRAPE)
    )
    shutil.copy(ROOT / "docker" / "alerts.yml", folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        url, progress = f"http://{address}", Progress(process, folder / "log")
        while not scraped(url):
            progress.check()
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


# Maximum seconds until each query has returned data once; scrapes of a busy machine fail.
INTERVAL_CAP = 90


def scraped(url: str) -> bool:
    """Return True if Prometheus has seen the server at least twice."""
    try:
        result = ask(url, "query", query="count_over_time(dsv4_build_info[1h])")["result"]
    except OSError:
        return False
    return bool(result) and float(result[0]["value"][1]) >= 2


def has_data(url: str, expression: str) -> bool:
    """Return True if a query of the dashboard returns a number."""
    result = ask(url, "query", query=query(expression, WINDOW))["result"]
    values = [float(series["value"][1]) for series in result]
    return any(value == value for value in values)


def load(server: Server, rounds: int) -> None:
    """Run conversations that exceed device and host memory, with different reuse intervals."""
    for _ in range(rounds):
        for i in range(8):
            server.generate(prompt(400, seed=i), 2)
            server.generate(prompt(600, seed=100 + i % 2), 2)
            server.generate(prompt(140, seed=300 + i), 2)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsv4_sglang.cli", *arguments], capture_output=True, text=True, cwd=ROOT
    )


def test_dashboard_and_rules(server: Server, prometheus: str, tmp_path: Path) -> None:
    """On a server that saves, loads and evicts, every dashboard query returns data and no alert rule fails."""
    load(server, 3)
    server.generate(prompt(5), 2)
    progress = Progress(server.process, server.log)
    missing = [target["expr"] for panel in panels() for target in panel["targets"]]
    for _ in range(INTERVAL_CAP):
        missing = [expression for expression in missing if not has_data(prometheus, expression)]
        if not missing:
            break
        progress.check()
        time.sleep(1)
    assert not missing
    picture = tmp_path / "dashboard.png"
    draw(prometheus, picture, 300, "1m")
    assert picture.stat().st_size > 10_000
    (group,) = ask(prometheus, "rules")["groups"]
    rules: dict[str, Any] = {rule["name"]: rule for rule in group["rules"]}
    assert len(rules) == 7 and all(rule["health"] != "err" for rule in rules.values()), rules


def test_every_metric_is_published(server: Server) -> None:
    """Every metric is published, and those of hits, evictions and loads increase."""
    page = client.Server.at(server.url).metrics()
    names = {sample.name for sample in client.samples(page, PREFIX)}
    for metric in (*METRICS, *HOST_METRICS):
        expected = {f"{metric.exposed}_{part}" for part in ("bucket", "sum", "count")}
        assert names >= (expected if metric.kind == HISTOGRAM else {metric.exposed}), metric.name
    load(server, 1)
    before = server.metrics()
    load(server, 1)
    server.generate(prompt(5), 2)
    after = server.metrics()
    for name in (
        "hit_tokens_device",
        "hit_tokens_host",
        "first_token_seconds_count_hit",
        "first_token_seconds_sum_miss",
        "reuse_interval_requests_count_hit",
        "snapshots_evicted_slots",
        "host_snapshots_evicted",
        "host_saved_bytes",
        "host_save_seconds_count",
        "host_loaded_bytes",
        "host_load_seconds_sum",
    ):
        assert after[name] > before[name], name
    assert after["first_token_seconds_count"] - before["first_token_seconds_count"] == 25, "one for each request"


def test_top(server: Server) -> None:
    shown = command("top", server.url, "--once")
    assert shown.returncode == 0, shown.stderr
    assert server.url in shown.stdout and "rank 0" in shown.stdout
    found = server.metrics()
    lines = dict(line.rsplit("  ", 1) for line in shown.stdout.splitlines() if "  " in line.strip())
    lines = {name.strip(): text.strip() for name, text in lines.items()}
    assert lines["tokens hit, host"] == f"{found['hit_tokens_host']:,.0f}"
    assert lines["snapshots"] == f"{found['snapshots']:.0f} of 6"
    assert lines["host loads"] == f"{found['host_load_seconds_count']:,.0f}"
    assert lines["evicted for slots"] == f"{found['snapshots_evicted_slots']:,.0f}"
    tokens = server.metrics("sglang:kv_")
    assert lines["tokens kept for reuse"] == f"{tokens['evictable_tokens']:,.0f}"


def test_top_shows_what_happens_now(server: Server) -> None:
    asked = client.Server.at(server.url)
    first = Page.read(asked)
    ids = prompt(300, seed=200)
    server.generate(ids, 1)
    server.generate(ids, 1)
    second = Page.read(asked, first)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(frame(second, asked.url))
    assert re.search(r"hit rate now +42\.7 %", capture.get()), f"not 256 of 600 tokens: {capture.get()}"
