"""Prefix hits with FP8 entries, FP4 keys, an indexer that omits entries, chunks of 128, and EAGLE.

Steps with different other tokens round activations differently, and an element of an entry may then round to the next
FP8 value. Warm answers may differ from cold ones by the effect of this rounding only.
"""

from __future__ import annotations

import pytest
import torch
from reference.oracle import Oracle
from support.server import DRAFTS, Generated, Server, against_cold, assert_as_near_as_the_format, greedy, prompt

pytestmark = pytest.mark.server

MODEL = {"seed": 2, "index_topk": 64, "ratios": (0, 4, 128, 4)}
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-total-tokens", "4096", "--max-running-requests", "4")
FLAGS += ("--chunked-prefill-size", "128", *DRAFTS)
OPTIONS = {"snapshot_interval": 256}
# Maximum mean |d log p|. Rounding all entries to FP8 moves log p by 0.05, one corrupted entry by at least 0.07
# (tests/testing/test_make_tiny.py).
NOISE = 0.02


@pytest.fixture(scope="module")
def asked(server: Server) -> list[tuple[list[int], Generated]]:
    """Prompts with their warm answers: repeated prompts, branches and a next turn."""
    answers = []
    for length, cached in ((129, 128), (700, 640)):
        ids = prompt(length)
        server.generate(ids, 1)
        answers.append((ids, server.generate(ids, 16)))
        assert answers[-1][1].cached == cached
    trunk = prompt(700)
    for at in (511, 512, 513, 600):
        ids = trunk[:at] + prompt(40, seed=at)
        answers.append((ids, server.generate(ids, 8)))
        assert answers[-1][1].cached == at // 256 * 256
    first = prompt(200, seed=5)
    ids = first + server.generate(first, 70).tokens + prompt(30, seed=6)
    answers.append((ids, server.generate(ids, 16)))
    assert answers[-1][1].cached == 256
    return answers


def test_warm_answers_equal_cold_up_to_rounding(server: Server, asked: list[tuple[list[int], Generated]]) -> None:
    apart = [against_cold(server, ids, got) for ids, got in asked]
    each = [f"{len(ids)} tokens, {got.cached} cached: {d.mean():.4f}" for (ids, got), d in zip(asked, apart)]
    assert torch.cat(apart).mean() <= NOISE, each


def test_warm_answers_are_within_the_formats_error(oracle: Oracle, asked: list[tuple[list[int], Generated]]) -> None:
    assert_as_near_as_the_format(oracle, [(ids, got) for ids, got in asked if len(ids) < 400])  # the oracle is slow


def test_drafts_are_accepted(server: Server) -> None:
    meta = server.post("/generate", greedy(prompt(200, seed=7), 40))["meta_info"]
    assert meta["completion_tokens"] == 40 and meta["spec_accept_length"] > 1.5
