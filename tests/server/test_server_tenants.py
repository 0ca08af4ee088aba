"""Shares of tenants on a real server (option `tenant_percent`): one tenant cannot evict what another one has."""

from __future__ import annotations

import pytest
from support.server import FP32, Server, kv_hints, prompt

from dsv4_sglang.cli.client import Server as Client
from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.full]

BLOCK = 128
MODEL = {"seed": 0, "ratios": (0, 4), "index_topk": 1536}
# 32 blocks on the device, and 48 on the host.
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--enable-hierarchical-cache", "--hicache-ratio", "1.5")
OPTIONS = {**FP32, "max_snapshots": 24, "host_snapshots": 36, "tenant_percent": 40, "integrity_check": True}
PROMPT, HIT = 600, 4 * BLOCK


def found(server: Server, seed: int, salt: str) -> tuple[int, int]:
    """Return the tokens of a prompt on the device and on the host."""
    (rank,) = server.post("/dsv4/lookup", {"input_ids": prompt(PROMPT, seed), "cache_salt": salt})["ranks"]
    return rank["device_tokens"], rank["host_tokens"]


def test_a_tenant_evicts_its_own_first(server: Server) -> None:
    """The conversations of `a` are the youngest when `b`, far above its share, goes on: without shares the device would
    evict them first, and the host too."""
    for seed in range(12):
        server.generate(prompt(PROMPT, seed), 1, cache_salt="b")
    for seed in range(2):
        server.generate(prompt(PROMPT, seed), 1, cache_salt="a")
    for seed in range(20, 40):
        server.generate(prompt(PROMPT, seed), 1, cache_salt="b")
    assert [found(server, seed, "a") for seed in range(2)] == [(HIT, 0)] * 2
    metrics = server.published()
    assert metrics["tenants"] == 2 and metrics["tenants_above_share"] == 1
    largest, second = (metrics[f"tenant_tokens_{rank}"] for rank in "12")
    assert second == 2 * HIT < largest <= 4096 - second
    assert metrics["tenant_tokens_3"] == metrics["tenant_tokens_other"] == 0
    server.wait_idle()
    assert not [report["findings"] for report in Client.at(server.url).integrity() if report["wrong"]]


def test_the_host_keeps_to_the_shares_too(server: Server) -> None:
    """Tenant `b` exceeds its share on device and host, and tenant `a` does not. Only the conversations of `b` return,
    so without shares `a` would be evicted."""
    server.flush()
    for seed in range(2):
        server.generate(prompt(PROMPT, seed), 1, cache_salt="a")
    for _ in range(3):
        for seed in range(20, 44):
            server.generate(prompt(PROMPT, seed), 1, cache_salt="b")
    assert [sum(found(server, seed, "a")) for seed in range(2)] == [HIT] * 2
    server.wait_idle()
    assert not [report["findings"] for report in Client.at(server.url).integrity() if report["wrong"]]


def test_pins_of_a_tenant_are_limited(server: Server) -> None:
    """Pins may hold 1,024 tokens here, those of a tenant 409."""
    server.flush()
    pin = kv_hints(pin={"name": "x", "seconds": 60})
    with pytest.raises(RequestError) as error:
        server.generate(prompt(500), 1, cache_salt="a", kv_hints=pin)
    assert error.value.code == 400 and "one tenant may hold 409 tokens" in error.value.text
    for salt in "ab":
        server.generate(prompt(300), 1, cache_salt=salt, kv_hints=pin)
    assert server.published()["pinned_tokens"] == 4 * BLOCK
