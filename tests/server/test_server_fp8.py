"""Default formats (FP8 entries, FP4 keys) with an indexer that omits entries, without prefix cache, chunks of 256.

The model has as many heads as the released one; other servers use 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from server_harness import CHUNK, Server, prompt, running

from benchmarks.reference.oracle import Oracle

pytestmark = pytest.mark.server

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700)
GENERATED = 40


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny(seed=2, index_topk=128, heads=64)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fp8") / "log"
    flags = (
        "--dtype",
        "float32",
        "--context-length",
        "2048",
        "--max-total-tokens",
        "8192",
        "--max-running-requests",
        "4",
        "--disable-radix-cache",
    )
    with running(model, log, *flags, "--chunked-prefill-size", "256") as server:
        yield server


def test_no_further_from_fp32_than_the_format(server: Server, oracle: Oracle) -> None:
    ours, format_alone = [], []
    for n in LENGTHS:
        got = server.generate(prompt(n), GENERATED)
        assert got.cached == 0
        exact = oracle.score(prompt(n), got.tokens, chunk=CHUNK).logprobs
        ours.append((torch.tensor(got.logprobs) - exact).abs())
        quantised = oracle.score(prompt(n), got.tokens, "fp8", "mxfp4", CHUNK).logprobs
        format_alone.append((quantised - exact).abs())
    mean, allowed = torch.cat(ours).mean(), 1.5 * torch.cat(format_alone).mean()
    assert mean <= allowed, f"mean distance {mean:.4f}, the format alone {allowed / 1.5:.4f}"


def test_the_same_twice(server: Server) -> None:
    """The same prompt gives bitwise equal answers without a prefix cache."""
    assert server.generate(prompt(300), 8) == server.generate(prompt(300), 8)
