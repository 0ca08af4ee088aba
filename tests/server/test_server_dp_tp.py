"""DP attention with two processes per rank, which split the heads. Two of the four processes hold an expert.

SGLang pads steps to an even number of tokens.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from reference.oracle import Oracle
from support.liveness import POLL_SECONDS, Progress
from support.server import FP32, HOST_CACHE, Server, assert_burst, assert_same, distances, mappings_of, on_rank, prompt
from support.server_plugin import broken

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin", "pages")]

TOLERANCE = 1e-4
MODEL = {"seed": 0, "ratios": (0, 4, 128)}
FLAGS = ("--dtype", "float32", "--context-length", "768", "--max-total-tokens", "1024")
FLAGS += ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2")
FLAGS += ("--max-running-requests", "12", "--chunked-prefill-size", "512", *HOST_CACHE)
FLAGS += ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
CUDA_LAYERS = True
OPTIONS = {**FP32, "max_snapshots": 12}
# (tokens, tokens to generate, rank). Odd numbers of tokens are padded to even ones.
ASKED = [(131, 6, 0), (5, 10, 1), (3, 4, 1)]


def test_two_processes_a_rank(server: Server, oracle: Oracle) -> None:
    assert_burst(server, oracle, ASKED, seed=50, tolerance=TOLERANCE)
    ids = prompt(259, seed=9)
    cold = server.generate(ids, 8, **on_rank(1))
    warm = server.generate(ids, 8, **on_rank(1))
    assert (cold.cached, warm.cached) == (0, 256)
    assert distances(oracle, ids, cold).max() <= TOLERANCE
    assert_same(warm, cold, TOLERANCE)
    server.wait_idle()


def test_ranks_have_a_host_cache_each(server: Server) -> None:
    """The two processes of a rank share one. Tests of its contents are in test_server_shared_host.py."""
    segments = [tuple(found["inode"] for found in process) for process in mappings_of(server)]
    assert sorted(map(segments.count, set(segments))) == [2, 2] and len({*sum(segments, ())}) == 4


def test_a_prefetch_loads_where_the_next_request_goes(server: Server) -> None:
    """A conversation of one rank, which is stored: the other one loads it from the files if the body names that rank.
    Without a rank, the one that has it is chosen, and the answer says which."""
    ids, hit = prompt(400, seed=21), 384
    server.flush()

    def prefetch(**fields: int) -> dict[str, int]:
        answer: dict[str, int] = server.post("/dsv4/prefetch", {"input_ids": ids, **fields})
        return answer

    assert server.generate(ids, 1, **on_rank(1)).cached == 0
    progress = Progress(server.process)
    while server.post("/dsv4/lookup", {"input_ids": ids, "files": True})["ranks"][0]["files_tokens"] < hit:
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    here = {"prompt_tokens": 400, "dp_rank": 1, "device_tokens": hit, "loaded_tokens": 0}
    assert prefetch() == prefetch(**on_rank(1)) == here
    assert prefetch(**on_rank(0)) == here | {"dp_rank": 0, "loaded_tokens": hit}
    assert [rank["device_tokens"] for rank in server.post("/dsv4/lookup", {"input_ids": ids})["ranks"]] == [hit, hit]
    assert server.generate(ids, 1, **on_rank(0)).cached == hit
    server.wait_idle()


@pytest.mark.parametrize("kind", ["experts see tokens of one rank", "padding owns a request's slot"])
def test_broken_rank_is_detected(server: Server, oracle: Oracle, plugin: Path, kind: str) -> None:
    with broken(plugin, kind), pytest.raises(AssertionError):
        assert_burst(server, oracle, ASKED, seed=60, tolerance=TOLERANCE)
    server.flush()
