"""Default formats (FP8 entries, FP4 keys) with an indexer that omits entries, without prefix cache, chunks of 256.

The model has as many heads as the released one; other servers use 16.
"""

from __future__ import annotations

import pytest
from server_harness import Server, assert_as_near_as_the_format, prompt

from benchmarks.reference.oracle import Oracle

pytestmark = pytest.mark.server

MODEL = {"seed": 2, "index_topk": 128, "heads": 64}
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-total-tokens", "8192")
FLAGS += ("--max-running-requests", "4", "--disable-radix-cache", "--chunked-prefill-size", "256")


def test_no_further_from_fp32_than_the_format(server: Server, oracle: Oracle) -> None:
    asked = [(prompt(n), server.generate(prompt(n), 40)) for n in (1, 3, 4, 5, 127, 128, 129, 300, 700)]
    assert not any(got.cached for _, got in asked)
    assert_as_near_as_the_format(oracle, asked)


def test_the_same_twice(server: Server) -> None:
    """The same prompt gives bitwise equal answers without a prefix cache."""
    assert server.generate(prompt(300), 8) == server.generate(prompt(300), 8)
