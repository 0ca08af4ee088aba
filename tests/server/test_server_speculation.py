"""EAGLE with the checkpoint's NextN layer, through HTTP, in fp32.

Tokens must be those of the oracle, and drafts those of the layer in plain PyTorch. The latter shows that all KV entries
that the layer reads are right. `test_scheduler_speculation.py` covers more cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from reference.nextn import NextN
from reference.oracle import Oracle
from support.recorded_drafts import recorded
from support.server import (
    DRAFTS,
    FP32,
    HOST_CACHE,
    Generated,
    Server,
    assert_oracle_chooses,
    assert_replays_are_equal,
    assert_right_around_one_block,
    assert_right_beside_cancels,
    on_rank,
    prompt,
)
from support.server_plugin import broken
from transformers import DynamicCache

from dsv4_sglang.srt.plugin.server_context import GREEDY_ON_CPU

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

MODEL = {"ratios": (0, 4, 128), "index_topk": 64}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "2048", "--max-running-requests", "4")
FLAGS += (*DRAFTS, "--chunked-prefill-size", "128", "--enable-metrics", "--tp-size", "2")
FLAGS += (*HOST_CACHE, "--hicache-write-policy", "write_back")
OPTIONS = {**FP32, "integrity_check": True}
CUDA_LAYERS = True
RECORDS, GRAPH_TOKENS = ("drafts",), 100
LENGTHS, GENERATED = (1, 127, 300, 600), 40
# Tolerance of log p, and of the layer's streams and logits, whose magnitude reaches 20.
TOLERANCE, DRAFTED = 1e-4, 1e-3


@pytest.fixture(scope="module")
def layer(model: Path) -> NextN:
    return NextN(model)


Compare = Callable[[str, list[int], Generated], list[float]]
Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def apart(oracle: Oracle, layer: NextN, plugin: Path) -> Compare:
    """Return a function that computes the distance of each verify step of a request from the layer in plain PyTorch."""

    def compare(rid: str, ids: list[int], got: Generated) -> list[float]:
        text = [*ids, *got.tokens]
        streams, cache, written = oracle.streams(text, chunk=128), DynamicCache(config=layer.config), 0
        # The last step of a request may extend past its end.
        blocks = [block for block in recorded(plugin) if block.rid == rid and block.length < len(text)]
        found = []
        for block in sorted(blocks, key=lambda block: block.length):
            decided, *drafted = block.tokens
            assert decided == text[block.length]
            logits, own = layer.forward(text[written + 1 : block.length + 1], streams[written : block.length], cache)
            written, ahead, own = block.length, copy.deepcopy(cache), own[-1:]
            distances = [own.flatten() - block.streams]
            assert logits[-1].max() - logits[-1, drafted[0]] <= 2 * DRAFTED, "not the layer's likeliest token"
            assert block.logits.argmax(-1).tolist() == drafted[1:]
            for token, made in zip(drafted, block.logits):
                logits, own = layer.forward([token], own, ahead)
                distances.append(logits[-1] - made)
            found.append(max(float(distance.abs().max()) for distance in distances))
        assert found
        return found

    return compare


def test_oracle(server: Server, oracle: Oracle, apart: Compare) -> None:
    """Tokens, log p and drafts are right in a batch, in which the longest prompt selects 64 of 150 entries."""
    asked = {f"batch {length}": prompt(length) for length in LENGTHS}
    server.flush()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda rid: server.generate(asked[rid], GENERATED, rid=rid), asked))
    for (rid, ids), got in zip(asked.items(), answers):
        assert len(got.tokens) == GENERATED and got.cached == 0
        assert_oracle_chooses(oracle, ids, got, TOLERANCE)
        assert max(apart(rid, ids, got)) <= DRAFTED


def test_the_next_turn(server: Server, oracle: Oracle, apart: Compare) -> None:
    """The next turn resumes from a snapshot of a verify step and is right."""
    ids = prompt(230, seed=3)
    turn = server.generate(ids, GENERATED)
    following = ids + turn.tokens + prompt(20, seed=4)
    got = server.generate(following, 8, rid="turn")
    assert got.cached == 256
    assert_oracle_chooses(oracle, following, got, TOLERANCE)
    assert max(apart("turn", following, got)) <= DRAFTED


def test_drafts_behind_a_load_from_the_host(server: Server, apart: Compare) -> None:
    """After a load from the host, answers equal the cold ones and drafts are right: snapshots include the draft's ring.

    Eight conversations of three blocks exceed a device of sixteen blocks.
    """
    prompts = {f"host {i}": prompt(390, seed=20 + i) for i in range(8)}
    server.flush()
    before = server.metrics()["hit_tokens_host"]
    cold, warm = ([server.generate(ids, 8, rid=f"{visit} {rid}") for rid, ids in prompts.items()] for visit in "12")
    assert [got.cached for got in (*cold, *warm)] == [0] * 8 + [384] * 8
    assert server.metrics()["hit_tokens_host"] - before >= 3 * 384, "too few tokens came from the host"
    assert [got.tokens for got in warm] == [got.tokens for got in cold]
    for (rid, ids), got in [*zip(prompts.items(), warm)][::2]:
        assert max(apart(f"2 {rid}", ids, got)) <= DRAFTED
    server.wait_idle()


def test_prefixes_around_one_block_at_once(server: Server, oracle: Oracle) -> None:
    assert_right_around_one_block(server, oracle, TOLERANCE)


def test_retries_of_cancelled_requests(server: Server, oracle: Oracle) -> None:
    assert_right_beside_cancels(server, oracle, TOLERANCE)


def test_replay_of_opaque_ids(server: Server, oracle: Oracle) -> None:
    assert_replays_are_equal(server, oracle, TOLERANCE)


def test_ranks_of_dp_attention(start: Start, oracle: Oracle, apart: Compare) -> None:
    """Tokens and drafts are right beside a rank that prefills, and in steps that SGLang pads to those of the other."""
    asked = [("first", prompt(20, seed=50), 0), ("second", prompt(300, seed=51), 0), ("other", prompt(600, seed=52), 1)]
    flags = ("--dp-size", "2", "--enable-dp-attention", "--chunked-prefill-size", "256")
    with start(*flags) as server, ThreadPoolExecutor(len(asked)) as pool:
        waiting = [
            pool.submit(server.generate, ids, GENERATED, rid=f"ranks {name}", **on_rank(rank))
            for name, ids, rank in asked
        ]
        answers = [answer.result() for answer in waiting]
    for (name, ids, _), got in zip(asked, answers, strict=True):
        assert_oracle_chooses(oracle, ids, got, TOLERANCE)
        assert max(apart(f"ranks {name}", ids, got)) <= DRAFTED


def test_missing_draft_ring_is_detected(server: Server, oracle: Oracle, apart: Compare, plugin: Path) -> None:
    """A snapshot without the draft model's ring changes the drafts, but neither tokens nor the acceptance length."""
    ids, found = prompt(390, seed=40), []
    with broken(plugin, "snapshots without the draft model's ring"):
        for visit, cached in (("cold", 0), ("warm", 384)):
            got = server.generate(ids, 8, rid=f"without {visit}")
            assert got.cached == cached
            assert_oracle_chooses(oracle, ids, got, TOLERANCE)
            found.append(apart(f"without {visit}", ids, got))
    cold, warm = found
    assert max(cold) <= DRAFTED and min(warm) > 100 * DRAFTED, found


def test_the_server_says_that_a_cpu_answers_greedily(server: Server) -> None:
    assert server.log_text().count(GREEDY_ON_CPU % "EAGLE") == 1
