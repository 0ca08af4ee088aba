"""Server with `--kv-cache-dtype bfloat16` and fp32 compute."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from liveness import STUCK_SECONDS
from server_harness import CHUNK, Generated, Server, against_cold, assert_same, greedy, prompt

from benchmarks.reference.oracle import Oracle
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt.integration.options import Options
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.memory.sizing import StateDemand, table

pytestmark = pytest.mark.server

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700)
GENERATED = 40
MODEL = {"seed": 1}
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--kv-cache-dtype", "bfloat16")
FLAGS += ("--max-total-tokens", "16384", "--max-running-requests", "16", "--chunked-prefill-size", "4096")
# A different order of summation rounds some elements of an entry the other way, more of them in deeper layers. Rounding
# all elements moves log p by 0.004 on average and by 0.02 at most; one wrong entry moves it by eight times that average
# (tests/test_make_tiny.py checks both for this model). Two runs share most roundings, so the allowed average is half of
# 0.004.
SAME, SAME_ON_AVERAGE = 0.02, 0.002


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[int, Generated]:
    """Answers to each prompt on its own with an empty cache, by length."""
    answers = {}
    for length in LENGTHS:
        server.flush()
        answers[length] = server.generate(prompt(length), GENERATED)
        assert answers[length].cached == 0
    return answers


def test_oracle(oracle: Oracle, alone: dict[int, Generated]) -> None:
    """Answers are close to the oracle under teacher forcing, and greedy except for near ties."""
    scores = {n: oracle.score(prompt(n), alone[n].tokens, chunk=CHUNK) for n in LENGTHS}
    d = torch.cat([(torch.tensor(alone[n].logprobs) - scores[n].logprobs).abs() for n in LENGTHS])
    assert d.max() <= 0.05
    assert d.mean() <= 0.01
    assert max(score.margin.max() for score in scores.values()) <= 0.05


def test_batch_of_16(server: Server, alone: dict[int, Generated]) -> None:
    server.flush()
    lengths = (*LENGTHS, *LENGTHS)[:16]
    for n, got in zip(lengths, server.generate_all([prompt(n) for n in lengths], GENERATED)):
        assert_same(got, alone[n], SAME)


def test_warm_answers_are_as_cold_ones_but_for_rounding(server: Server) -> None:
    """Warm answers equal cold ones up to rounding, for branches around a block boundary and after a decoded turn.

    Scores are teacher-forced. Each branch is requested twice. The cold answers are computed in one step.
    """
    trunk, first = prompt(400, seed=3), prompt(200, seed=5)
    server.flush()
    server.generate(trunk, 1)
    asked = [trunk[:at] + prompt(60, seed=at) for at in (255, 256, 257, 300)]
    asked.append(first + server.generate(first, 70).tokens + prompt(30, seed=6))
    distances = []
    for ids in asked:
        for warm in (server.generate(ids, 8), server.generate(ids, 8)):
            apart = against_cold(server, ids, warm)
            assert apart.max() <= SAME, f"{len(ids)} tokens, {warm.cached} of them cached: {apart.max():.1e}"
            distances.append(apart)
        assert warm.cached == (len(ids) - 1) // 128 * 128
    assert torch.cat(distances).mean() <= SAME_ON_AVERAGE


def test_a_branch_of_any_length(server: Server) -> None:
    """A second branch at the same point resumes there, whatever the length of the first branch's prompt."""
    trunk = prompt(400, seed=13)
    for length in (384, 385, 386):
        server.flush()
        server.generate(trunk, 1)
        assert server.generate(trunk[:300] + prompt(length - 300, seed=14), 4).cached == 0
        assert server.generate(trunk[:300] + prompt(40, seed=15), 1).cached == 256, length


def test_slots_used_by_200_others(server: Server, alone: dict[int, Generated]) -> None:
    for seed in range(10):
        server.generate_all([prompt(1 + (7 * i + seed) % 23, seed=100 + seed) for i in range(20)], 1)
    server.flush()
    for n in (1, 3, 129, 300):
        assert_same(server.generate(prompt(n), 8), alone[n], SAME)


def test_abort_and_lost_client(server: Server, alone: dict[int, Generated]) -> None:
    body = json.dumps(greedy(prompt(300), 1000, stream=True)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=STUCK_SECONDS) as client:
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(4096)  # the request runs; then the client disconnects
    with ThreadPoolExecutor(1) as other:
        aborted = other.submit(server.generate, prompt(128), 1000, rid="to-abort")
        while not aborted.done() and not server.busy():
            time.sleep(0.05)
        server.post("/abort_request", {"rid": "to-abort"})
        assert len(aborted.result().tokens) < 1000
    server.wait_idle()
    server.flush()
    assert_same(server.generate(prompt(300), 8), alone[300], SAME)


def test_what_the_server_says_of_itself(server: Server, model: Path) -> None:
    """The start-up table and /get_server_info report 16 live slots, 32 staging slots, 32 snapshots and the blocks."""
    info = server.get("/get_server_info")
    assert info["max_total_num_tokens"] == 16384
    config = DSV4Config.from_hf(json.loads((model / "config.json").read_text()))
    layout = served_layout(config, torch.bfloat16, Options(), "cpu")
    demand = StateDemand(running=16, staging=32, snapshots=32)
    assert table(layout, 16384, demand) in server.log_text()
    blocks = sum(part.bytes for part in layout.block_parts(129))
    memory = info["internal_states"][0]["memory_usage"]
    assert memory["kvcache"] == pytest.approx((blocks + demand.bytes(layout)) / 2**30, abs=0.0051)
