"""Monitoring of a real server: KV events, metrics, `dsv4-sglang top`, and Prometheus with the dashboard and the rules.

A mirror that follows the KV events equals the server's tree and predicts the prefix hits.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from rich.console import Console
from sglang.srt.disaggregation.kv_events import KVEventBatch
from support.kv_mirror import Mirror
from support.liveness import STUCK_SECONDS, Progress
from support.server import FP32, Server, prompt, running
from typer.testing import CliRunner

from dsv4_sglang.cli import app, client
from dsv4_sglang.cli.top import Page, frame, scaled
from dsv4_sglang.srt.prefix_cache.metrics import HISTOGRAM, HOST_METRICS, METRICS, PREFIX

pytestmark = [pytest.mark.server, pytest.mark.full]

DOCKER = Path(__file__).parent.parent.parent / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "cache.json"
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
# 16 device blocks, 6 snapshots and a host cache of 1.5 times that size.
FLAGS = ("--dtype", "float32", "--context-length", "1792", "--max-running-requests", "2", "--max-total-tokens", "2048")
FLAGS += ("--chunked-prefill-size", "256", "--enable-metrics", "--decode-log-interval", "1")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")
OPTIONS = {**FP32, "snapshot_interval": 512, "max_snapshots": 6, "integrity_check": True}


class Router:
    """Subscriber to the KV events of a server, with a mirror of its blocks."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.mirror = endpoint, Mirror()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._events = zmq.Context.instance().socket(zmq.SUB)
        self._events.linger = self._events.rcvhwm = 0
        self._events.connect(endpoint)
        self._events.subscribe("")

    def settled(self, server: Server) -> Mirror:
        """Return the mirror once it equals the announced blocks of the server's tree.

        The integrity check compares those with `announced_by_rule`.
        """
        server.wait_idle()
        begin = time.monotonic()
        while True:
            while self._events.poll(20):
                *_, payload = self._events.recv_multipart()
                self.mirror.apply(self._decoder.decode(payload).events)
            (state,) = server.get("/server_info")["internal_states"]
            (report,) = state["dsv4_sglang_integrity"]
            assert not report["findings"], report["findings"]
            if report["announced"] == self.mirror.totals():
                return self.mirror
            assert time.monotonic() - begin < STUCK_SECONDS, "the events do not lead to the blocks of the tree"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Router:
    """Router that listens before the server starts, so it misses no event."""
    return Router(f"ipc://{tmp_path_factory.mktemp('events')}/events")


@pytest.fixture(scope="module")
def server(router: Router, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = json.dumps({"publisher": "zmq", "endpoint": router.endpoint})
    log = tmp_path_factory.mktemp("server") / "log"
    with running(model, log, *FLAGS, "--kv-events-config", config, **OPTIONS) as server:
        yield server


def assert_predicted(
    server: Server, router: Router, ids: list[int], predicted: int, cached: int | None = None, **fields: Any
) -> None:
    """Assert the hit that the mirror predicts for a prompt, and the hit that the server reports."""
    assert router.settled(server).found(ids[:-1]) == predicted
    assert server.generate(ids, 4, **fields).cached == (predicted if cached is None else cached)


def test_router_predicts_hits(server: Server, router: Router) -> None:
    """The prediction equals the hit for new, repeated and continued prompts."""
    first = prompt(700, seed=1)
    assert_predicted(server, router, first, 0)
    assert_predicted(server, router, first, 640)
    answer = server.generate(first, 90).tokens
    assert_predicted(server, router, [*first, *answer, *prompt(40, seed=2)], 768)
    assert router.settled(server).blocks["GPU"]


def test_branch_is_announced_with_its_snapshot(server: Server, router: Router) -> None:
    """Before a branch has its own snapshot, the prediction is too high by less than the distance to the previous
    one."""
    trunk = prompt(900, seed=3)
    server.generate(trunk, 1)
    assert_predicted(server, router, [*trunk[:300], *prompt(300, seed=4)], 256, cached=0)
    assert_predicted(server, router, [*trunk[:300], *prompt(300, seed=5)], 256)


def test_evicted_blocks_are_withdrawn(server: Server, router: Router) -> None:
    """Ten conversations exceed 16 blocks and 6 snapshots, on the device and on the host."""
    removed = router.mirror.removed
    prompts = [prompt(400 + 20 * i, seed=10 + i) for i in range(10)]
    for ids in (*prompts, *prompts[::-1], *prompts[2:5]):
        predicted = router.settled(server).found(ids[:-1])
        assert server.generate(ids, 4).cached == predicted
    mirror = router.settled(server)
    assert mirror.removed > removed, "no block was evicted, so the test checks nothing"
    assert mirror.blocks["CPU_PINNED"]


def test_tenants_are_not_announced(server: Server, router: Router) -> None:
    ids = prompt(500, seed=40)
    assert_predicted(server, router, ids, 0, extra_key="tenant")
    assert_predicted(server, router, ids, 0, cached=384, extra_key="tenant")
    assert_predicted(server, router, ids, 0)


def test_a_flush_is_announced(server: Server, router: Router) -> None:
    server.generate(prompt(300, seed=50), 1)
    assert any(router.settled(server).blocks.values())
    server.flush()
    assert not any(router.settled(server).blocks.values())
    assert router.mirror.cleared
    assert_predicted(server, router, prompt(300, seed=50), 0)


def load(server: Server) -> None:
    """Run conversations that exceed device and host memory, with different reuse intervals."""
    for i in range(8):
        server.generate(prompt(400, seed=i), 2)
        server.generate(prompt(600, seed=100 + i % 2), 2)
        server.generate(prompt(140, seed=300 + i), 2)


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a Prometheus with the configuration and the rules of docker/ that scrapes the server."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    shutil.copy(DOCKER / "alerts.yml", tmp_path)
    config = (DOCKER / "prometheus.yml").read_text()
    assert "server:30000" in config and "15s" in config
    # A scrape of a busy machine takes seconds, and Prometheus drops one that takes longer than its interval.
    config = config.replace("server:30000", f"127.0.0.1:{server.port}").replace("15s", "3s")
    (tmp_path / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def ask(url: str, path: str, **parameters: str) -> Any:
    """Return the data of one request to Prometheus' HTTP API. An invalid query raises HTTPError."""
    address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=30) as response:
        return json.load(response)["data"]


def has_data(url: str, expression: str) -> bool:
    """Return True if a query of the dashboard returns a number. A Prometheus that is not ready has none."""
    query = expression.replace("$__rate_interval", "30m").replace("$instance", ".*")  # Grafana's variables
    try:
        found = ask(url, "query", query=query)["result"]
    except OSError:
        return False
    return any(series["value"][1] != "NaN" for series in found)


def test_the_dashboard_has_data_and_the_rules_run(server: Server, prometheus: str) -> None:
    """A server that saves, loads and evicts has data for every query of the dashboard."""
    progress = Progress(server.process, server.log)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    missing = [target["expr"] for panel in panels for target in panel["targets"]]
    begin = time.monotonic()
    while missing := [expression for expression in missing if not has_data(prometheus, expression)]:
        load(server)
        server.generate(prompt(5), 2)
        progress.check()
        assert time.monotonic() - begin < STUCK_SECONDS, missing
    (group,) = ask(prometheus, "rules")["groups"]
    assert len(group["rules"]) == 7 and all(rule["health"] != "err" for rule in group["rules"]), group


def test_every_metric_is_published(server: Server) -> None:
    """Every metric is published, and those of hits, evictions and loads increase."""
    page = client.Server.at(server.url).metrics()
    names = {sample.name for sample in client.samples(page, PREFIX)}
    for metric in (*METRICS, *HOST_METRICS):
        expected = {f"{metric.exposed}_{part}" for part in ("bucket", "sum", "count")}
        assert names >= (expected if metric.kind == HISTOGRAM else {metric.exposed}), metric.name
    increasing = (
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
    )
    load(server)
    before = server.metrics()
    # How long saves take decides whether blocks or slots run out first, so a load may evict for blocks only.
    loads, constant = 0, [*increasing]
    while constant and loads < 5:
        load(server)
        loads, after = loads + 1, server.metrics()
        constant = [name for name in increasing if after[name] <= before[name]]
    assert not constant
    server.generate(prompt(5), 2)
    counted = server.metrics()["first_token_seconds_count"] - before["first_token_seconds_count"]
    assert counted == 24 * loads + 1, "one for each request"


def test_top(server: Server) -> None:
    shown = CliRunner().invoke(app, ["top", server.url, "--once"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert server.url in shown.output
    found, tokens = server.metrics(), server.metrics("sglang:kv_")
    lines = dict(re.split("  +", line.rstrip(), maxsplit=1) for line in shown.output.splitlines())
    assert f", {scaled(found['hit_tokens_host'])} host," in lines["tokens hit"]
    assert lines["snapshots"].endswith(f"  {found['snapshots']:.0f} of 6")
    assert lines["host loads"].startswith(f"{found['host_load_seconds_count']:,.0f}, mean ")
    assert lines["evicted"].startswith(f"{found['snapshots_evicted_slots']:,.0f} for slots, ")
    assert f" {scaled(tokens['evictable_tokens'])} cached," in lines["tokens"]


def test_top_shows_what_happens_now(server: Server) -> None:
    asked = client.Server.at(server.url)
    first = Page.read(asked)
    for _ in range(2):
        server.generate(prompt(300, seed=200), 1)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(frame(Page.read(asked, first), asked.url))
    assert re.search(r"hit rate .* 42\.7 % now", capture.get()), f"not 256 of 600 tokens: {capture.get()}"
