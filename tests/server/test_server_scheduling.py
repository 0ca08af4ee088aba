"""Servers with `--schedule-policy`: SGLang looks up the prefix of every waiting request before each prefill step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from reference.oracle import Oracle
from support.liveness import POLL_SECONDS, Progress
from support.server import FP32, HOST_CACHE, Generated, Server, assert_oracle_chooses, distances, only, prompt

pytestmark = [pytest.mark.server, pytest.mark.full]

MODEL = {"seed": 0, "ratios": (0, 4), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-running-requests", "2", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "512", *HOST_CACHE)
SERVERS = {name: ("--schedule-policy", name) for name in ("lpm", "hrrn", "shortest-prefill-first")}
OPTIONS = {**FP32, "integrity_check": True}
TOLERANCE = 1e-4


def wait_for(server: Server, waiting: int) -> None:
    """Return when so many requests wait."""
    progress = Progress(server.process)
    while server.get("/v1/loads")["loads"][0]["num_waiting_reqs"] < waiting:
        progress.check()
        time.sleep(POLL_SECONDS)


@only("lpm", "shortest-prefill-first")
def test_waiting_prompts_that_hit_come_first(server: Server, oracle: Oracle) -> None:
    """Two requests run while four wait, the two with a cached prefix behind the others. They are answered first. What
    the lookups of waiting requests find is not counted as uses."""
    server.flush()
    known, new = [prompt(600, seed=seed) for seed in (1, 2)], [prompt(600, seed=seed) for seed in (3, 4)]
    for ids in known:
        server.generate(ids, 1)
    uses = server.published()["hit_tokens"]
    answered: list[tuple[float, list[int], Generated]] = []

    def ask(ids: list[int]) -> None:
        got = server.generate(ids, 6)
        answered.append((time.monotonic(), ids, got))

    rests = [server.begin(prompt(20, seed=seed), 1000, 1, rid=f"run-{seed}") for seed in (5, 6)]
    with ThreadPoolExecutor(4) as pool:
        for waiting, ids in enumerate([*new, *known], 1):
            pool.submit(ask, ids)
            wait_for(server, waiting)
        for seed in (5, 6):
            server.post("/abort_request", {"rid": f"run-{seed}"})
    for rest in rests:
        rest()
    assert len(answered) == 4
    for _, ids, got in answered:
        assert got.cached == (512 if ids in known else 0)
        assert_oracle_chooses(oracle, ids, got, TOLERANCE)
    assert all(ids in known for _, ids, _ in sorted(answered, key=lambda one: one[0])[:2])
    assert server.published()["hit_tokens"] - uses == 2 * 512
    server.wait_idle()


def test_chunks_beside_short_prompts(server: Server, oracle: Oracle) -> None:
    """Long prompts in chunks, short ones that `shortest-prefill-first` puts into the same steps, and branches, more
    than the pool holds."""
    trunks = [prompt(1500, seed=seed) for seed in (10, 11, 12)]
    asked = [*trunks, *(trunk[:1000] + prompt(9, seed=20) for trunk in trunks)]
    asked += [prompt(length, seed=30) for length in (5, 128, 129, 300)]
    for ids, got in zip(asked, server.generate_all(asked, 5)):
        assert distances(oracle, ids, got).max() <= TOLERANCE
    server.wait_idle()
