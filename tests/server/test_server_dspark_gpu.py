"""DSPARK on a GPU: bf16 compute, CUDA graphs.

Greedy answers are compared with the oracle up to near ties, because kernels round depending on the batch size. Drafts
are covered here by the acceptance length only: test_server_dspark.py compares them with PyTorch on a CPU, and
test_server_drafts_gpu.py checks the rings of the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from reference.oracle import KVFormat, Oracle
from support.server import (
    CHUNK,
    Server,
    assert_drafts_are_accepted,
    greedy,
    prompt,
)

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu]

FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "8192")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--max-total-tokens", "65536")
FLAGS += ("--speculative-algorithm", "DSPARK")
# A name begins with the KV format.
SERVERS: dict[str, tuple[str, ...]] = {
    "fp8, blocks of 5": ("--chunked-prefill-size", "4096"),
    "fp8, blocks of 5, no graphs, no overlap": (
        *("--chunked-prefill-size", "128"),
        *("--disable-cuda-graph", "--disable-overlap-schedule"),
    ),
    "bf16, blocks of 7": ("--chunked-prefill-size", "256", "--kv-cache-dtype", "bfloat16"),
    "fp8, blocks of 5, two GPUs": ("--chunked-prefill-size", "4096", "--tp-size", "2"),
}
# Maximum distance of a token's log p from that of the oracle's best token, as in test_server_gpu.py.
NEAR = {"fp8": 0.68, "bf16": 0.25}
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700, 2600)
GENERATED = 60
BATCH = [prompt(n, seed) for seed in (0, 5) for n in LENGTHS][4:]


@pytest.fixture(scope="module")
def model(name: str, tiny: Callable[..., Path]) -> Path:
    return tiny(seed=1, dspark=7 if "blocks of 7" in name else 5)


def generate(server: Server, ids: list[int], count: int = GENERATED) -> list[int]:
    return server.post("/generate", greedy(ids, count))["output_ids"]


def assert_near(oracle: Oracle, name: str, asked: list[tuple[list[int], list[int]]]) -> None:
    """Assert that each token is the oracle's best one with the server's formats, or nearly as likely."""
    rows: KVFormat = "bf16" if name.startswith("bf16") else "fp8"
    behind = [oracle.score(ids, tokens, rows, "mxfp4", CHUNK).margin.cpu() for ids, tokens in asked]
    print([f"{len(ids)}: {found.max():.3f} at {int(found.argmax())}" for (ids, _), found in zip(asked, behind)])
    assert torch.cat(behind).max() <= NEAR[rows]


def test_one_at_a_time(server: Server, oracle: Oracle, name: str) -> None:
    server.flush()
    assert_near(oracle, name, [(prompt(n), generate(server, prompt(n))) for n in LENGTHS])


def test_batch_of_16(server: Server, oracle: Oracle, name: str) -> None:
    server.flush()
    assert len(BATCH) == 16
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda ids: generate(server, ids), BATCH))
    assert_near(oracle, name, list(zip(BATCH, got)))


def test_warm(server: Server, oracle: Oracle, name: str) -> None:
    """Answers are right for the next turn after a verify step's snapshot and for a branch inside a block, each
    twice."""
    server.flush()
    trunk = prompt(700, seed=1)
    first = generate(server, trunk, 230)
    following = [*trunk, *first, *prompt(30, seed=3)], [*trunk[:333], *prompt(90, seed=4)]
    again = [server.post("/generate", greedy(ids, GENERATED)) for ids in (*following, *following)]
    cached = [answer["meta_info"]["cached_tokens"] for answer in again]
    assert [cached[0], *cached[2:]] == [896, 896, 384]
    assert_near(oracle, name, [(trunk, first), *zip(following * 2, (answer["output_ids"] for answer in again))])


def test_drafts_are_accepted(server: Server) -> None:
    """Snapshots include the rings of the stages."""
    assert_drafts_are_accepted(server)


def test_sampled_and_greedy_in_a_batch(server: Server) -> None:
    sampled = {**greedy(prompt(9), 100), "sampling_params": {"max_new_tokens": 100, "top_p": 0.9, "ignore_eos": True}}
    with ThreadPoolExecutor(8) as pool:
        asked = [sampled if i % 2 else greedy(prompt(9), 100) for i in range(8)]
        got = list(pool.map(lambda body: server.post("/generate", body)["output_ids"], asked))
    assert all(len(tokens) == 100 for tokens in got)
    assert len({tuple(tokens) for tokens in got[1::2]}) > 1
    server.wait_idle()
