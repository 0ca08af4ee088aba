"""Prefix hits with FP8 entries, FP4 keys, an indexer that omits entries, chunks of 128, and EAGLE.

Steps with different other tokens round activations differently, and an element of an entry may then round to the next
FP8 value. Warm answers may differ from cold ones by the effect of this rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from server_harness import CHUNK, DRAFTS, Generated, Server, prompt, running

from benchmarks.reference.oracle import Oracle

pytestmark = pytest.mark.server

FIELDS = {"seed": 2, "index_topk": 64, "ratios": (0, 4, 128, 4), "nextn": True}
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-total-tokens", "4096", "--max-running-requests", "4")
FLAGS += ("--chunked-prefill-size", "128", *DRAFTS)
# Maximum mean |d log p|. Rounding all entries to FP8 moves log p by 0.05, one corrupted entry by at least 0.07
# (tests/test_make_tiny.py).
NOISE = 0.02


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fp8_prefix") / "log"
    with running(tiny(**FIELDS), log, *FLAGS, snapshot_interval=256) as server:
        yield server


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


def test_warm_answers_are_as_cold_ones_but_for_rounding(
    server: Server, asked: list[tuple[list[int], Generated]]
) -> None:
    apart = []
    for ids, got in asked:
        cold = server.score(ids, got.tokens, extra_key=f"cold {len(ids)}")
        assert cold.cached == 0
        apart.append((torch.tensor(got.logprobs) - torch.tensor(cold.logprobs)).abs())
    each = [f"{len(ids)} tokens, {got.cached} cached: {d.mean():.4f}" for (ids, got), d in zip(asked, apart)]
    assert torch.cat(apart).mean() <= NOISE, each


def test_warm_answers_are_no_further_from_fp32_than_the_format(
    tiny: Callable[..., Path], asked: list[tuple[list[int], Generated]]
) -> None:
    oracle, ours, format_alone = Oracle(tiny(**FIELDS)), [], []
    for ids, got in [(ids, got) for ids, got in asked if len(ids) < 400]:  # the oracle is slow
        exact = oracle.score(ids, got.tokens, chunk=CHUNK).logprobs
        ours.append((torch.tensor(got.logprobs) - exact).abs())
        format_alone.append((oracle.score(ids, got.tokens, "fp8", "mxfp4", CHUNK).logprobs - exact).abs())
    mean, allowed = torch.cat(ours).mean(), 1.5 * torch.cat(format_alone).mean()
    assert mean <= allowed, f"mean distance {mean:.4f}, the format alone {allowed / 1.5:.4f}"


def test_drafts_are_accepted(server: Server) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    meta = server.post("/generate", {"input_ids": prompt(200, seed=7), "sampling_params": sampling})["meta_info"]
    assert meta["completion_tokens"] == 40 and meta["spec_accept_length"] > 1.5
