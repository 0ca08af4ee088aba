"""DSPARK with fp32 entries, fp32 keys and chunks of 128.

Tokens must be those of the oracle, and every drafted block must equal that of the head in plain PyTorch. The latter
shows that all context entries that a block reads are right.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reference.dspark import DSpark
from reference.oracle import Oracle
from support.recorded_drafts import recorded
from support.server import (
    FP32,
    HOST_CACHE,
    Server,
    assert_oracle_chooses,
    assert_replays_are_equal,
    assert_right_beside_cancels,
    greedy,
    prompt,
)

from dsv4_sglang.cli.server import RequestError
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import GPUS
from dsv4_sglang.planner.models import Format, Model
from dsv4_sglang.planner.plan import planned_layout
from dsv4_sglang.srt.launch.options import Options

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

CHUNK = 128
MODEL = {"seed": 0, "ratios": (0, 4, 128, 4), "index_topk": 64}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "2048", "--enable-metrics")
FLAGS += (
    "--max-running-requests",
    "4",
    "--chunked-prefill-size",
    str(CHUNK),
    "--speculative-algorithm",
    "DSPARK",
    "--tp-size",
    "2",
)
FLAGS += (*HOST_CACHE, "--hicache-write-policy", "write_through_selective")
OPTIONS = {**FP32, "integrity_check": True}
# By default SGLang computes the Markov bias from bf16 weights.
ENVIRONMENT = {"SGLANG_DSPARK_OPT_MARKOV_W2_BF16": "0"}
CUDA_LAYERS = True
RECORDS, GRAPH_TOKENS = ("drafts",), 100
# Tolerance of log p, and of a draft's logits, whose magnitude reaches 20.
TOLERANCE, LOGITS = 1e-4, 2e-3


@pytest.fixture(scope="module")
def head(model: Path) -> DSpark:
    return DSpark(model)


def generate(server: Server, ids: list[int], count: int, rid: str) -> dict[str, Any]:
    return server.post("/generate", greedy(ids, count, rid=rid))


def check(oracle: Oracle, head: DSpark, plugin: Path, asked: dict[str, list[int]], got: dict[str, Any]) -> None:
    """Assert that tokens are the oracle's and that drafts of every step are the head's."""
    for rid, ids in asked.items():
        tokens = got[rid]["output_ids"]
        assert len(tokens) == got[rid]["meta_info"]["completion_tokens"]
        assert oracle.score(ids, tokens, chunk=CHUNK).margin.max() <= 2 * TOLERANCE, "not the oracle's likeliest token"
        text = [*ids, *tokens]
        hidden = head.hidden(oracle, text)
        # The last step of a request may extend past its end.
        blocks = [block for block in recorded(plugin) if block.rid == rid and block.length < len(text)]
        assert len(blocks) >= got[rid]["meta_info"]["spec_verify_ct"] > 0
        for block in blocks:
            assert block.tokens[0] == text[block.length]
            wanted = head.logits(hidden[: block.length], block.tokens)
            assert (block.logits - wanted).abs().max() <= LOGITS, f"{rid} at {block.length}"
            assert block.logits.argmax(-1).tolist() == block.tokens[1:]


def test_a_batch(server: Server, oracle: Oracle, head: DSpark, plugin: Path) -> None:
    """Tokens and drafts are right in a batch of short and long requests that cross multiples of 4 and 128."""
    asked = {f"batch {n}": prompt(n) for n in (1, 5, 126, 300)}
    with ThreadPoolExecutor(len(asked)) as pool:
        got = dict(zip(asked, pool.map(lambda rid: generate(server, asked[rid], 40, rid), asked)))
    check(oracle, head, plugin, asked, got)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in got.values())
    assert steps < 0.7 * 4 * 40, f"{steps} steps for 160 tokens"


def test_replay_of_opaque_ids(server: Server, oracle: Oracle) -> None:
    assert_replays_are_equal(server, oracle, TOLERANCE)


def test_retries_of_cancelled_requests(server: Server, oracle: Oracle) -> None:
    assert_right_beside_cancels(server, oracle, TOLERANCE)


def test_warm(server: Server, oracle: Oracle, head: DSpark, plugin: Path) -> None:
    """Tokens and drafts are right after a snapshot of a prefill step and after one that a verify step took at 384."""
    ids = prompt(300, seed=1)
    server.flush()
    cold = generate(server, ids, 110, "cold")
    asked = {"cold": ids, "warm": ids, "turn": [*ids, *cold["output_ids"]]}
    got = {"cold": cold, **{rid: generate(server, asked[rid], 12, rid) for rid in ("warm", "turn")}}
    cached = [got[rid]["meta_info"]["cached_tokens"] for rid in asked]
    assert cached == [0, 256, 384]
    check(oracle, head, plugin, asked, got)


def test_from_the_host(server: Server, oracle: Oracle, head: DSpark, plugin: Path) -> None:
    """After a load from the host the drafts are those of a cold prompt: snapshots include the rings of the stages."""
    asked = {f"host {n}": prompt(600, seed=10 + n) for n in range(5)}
    server.flush()
    for rid, ids in asked.items():
        generate(server, ids, 1, f"first {rid}")
    before = server.metrics()
    got = {rid: generate(server, ids, 16, rid) for rid, ids in asked.items()}
    assert all(answer["meta_info"]["cached_tokens"] == 512 for answer in got.values())
    generate(server, prompt(5), 1, "counters are published when requests come and go")
    assert server.metrics()["hit_tokens_host"] - before["hit_tokens_host"] >= 2 * 512
    check(oracle, head, plugin, asked, got)
    server.wait_idle()


def test_sizes_are_as_planned(server: Server, model: Path) -> None:
    layout = planned_layout(
        Choice(
            Model.from_file(model / "config.json"),
            GPUS["h200"],
            count=1,
            tp=1,
            dp=1,
            experts=Format.BF16,
            running=4,
            chunk=CHUNK,
            context_length=1024,
            request=1024,
            options=Options(entry_format="fp32", indexer_format="fp32"),
            draft_tokens=6,
        )
    )
    table = server.log_text()
    assert f"state slots of {layout.slot_bytes} bytes (4 requests, 1 for the snapshots of a step" in table
    assert f"snapshots of {layout.snapshot_bytes} bytes" in table
    assert f" {layout.token_bytes:.2f} bytes a token" in table
    assert "rings of 4 layers and 3 of the draft model" in table


def test_unsupported_requests_are_rejected_singly(server: Server) -> None:
    with pytest.raises(RequestError) as error:
        server.post("/generate", greedy(prompt(5), 4, sampling_params={"temperature": 0.5}))
    assert error.value.code == 400 and "temperature 0" in error.value.text
    assert len(generate(server, prompt(5), 4, "after")["output_ids"]) == 4
    server.wait_idle()


def test_log_probabilities(server: Server, oracle: Oracle) -> None:
    ids = prompt(200, seed=2)
    assert_oracle_chooses(oracle, ids, server.generate(ids, 20), TOLERANCE)
