"""Warm = cold: prefix hits through a real server, in fp32, against the same prompts on an empty cache."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_harness import Generated, Server, assert_same, prompt, running

pytestmark = pytest.mark.server

TOLERANCE = 2e-3
BLOCK = 128
FLAGS = ("--dtype", "float32", "--context-length", "6144", "--max-running-requests", "4")
EXACT = {"entry_format": "fp32", "indexer_format": "fp32"}


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Chunks of 256, a checkpoint every 512 tokens, 10 checkpoints, 6,144 tokens of blocks.

    The indexer selects all entries up to 2,048 tokens: where it leaves some out, rounding of another batch now and then
    swaps two of equal score, and that is no matter of the cache.
    """
    log = tmp_path_factory.mktemp("prefix") / "log"
    flags = (*FLAGS, "--max-total-tokens", "6144", "--chunked-prefill-size", "256", "--enable-metrics")
    options = {**EXACT, "checkpoint_interval": 512, "max_checkpoints": 10}
    with running(tiny(seed=0, index_topk=512), log, *flags, **options) as server:
        yield server


def cold(server: Server, ids: list[int], count: int = 8) -> Generated:
    server.flush()
    got = server.generate(ids, count)
    assert got.cached == 0
    return got


@pytest.mark.parametrize("length", [129, 256, 300, 1500])
def test_a_repeated_prompt(server: Server, length: int) -> None:
    ids = prompt(length, seed=1)
    reference = cold(server, ids)
    warm = server.generate(ids, 8)
    assert_same(warm, reference, TOLERANCE)
    # At least one token is computed; a prompt on the grid has no checkpoint a block before its end yet.
    assert warm.cached == ((length - 1) // BLOCK * BLOCK if length % BLOCK else 0)


@pytest.mark.parametrize("at", [511, 512, 513, 600])
def test_a_branch_anywhere(server: Server, at: int) -> None:
    trunk = prompt(900, seed=2)
    ids, third = trunk[:at] + prompt(150, seed=at), trunk[:at] + prompt(100, seed=at + 1)
    references = cold(server, ids), cold(server, third)
    server.flush()
    server.generate(trunk, 1)
    first, second = server.generate(ids, 8), server.generate(third, 8)
    assert_same(first, references[0], TOLERANCE)
    assert_same(second, references[1], TOLERANCE)
    assert first.cached == at // 512 * 512, "the first branch resumes from the interval's checkpoint"
    assert second.cached == at // BLOCK * BLOCK, "the second from one at the branch point"


@pytest.mark.parametrize("count", [1, 220])
def test_the_next_turn(server: Server, count: int) -> None:
    """Decode takes a checkpoint every 128 tokens; the turn ends with the last of them."""
    server.flush()
    ids = prompt(300, seed=3)
    turn = server.generate(ids, count)
    following = ids + turn.tokens + prompt(60, seed=4)
    warm = server.generate(following, 8)
    # The last token of an answer is computed by the next turn.
    assert warm.cached == (len(ids) + count - 1) // BLOCK * BLOCK
    assert_same(warm, cold(server, following), TOLERANCE)


def test_a_branch_off_a_running_request(server: Server) -> None:
    ids = prompt(700, seed=5)
    branch = ids[:600] + prompt(50, seed=6)
    reference, other = cold(server, ids, 200), cold(server, branch)
    server.flush()
    with ThreadPoolExecutor(1) as pool:
        running_request = pool.submit(server.generate, ids, 200)
        while server.get("/get_load")[0]["num_reqs"] == 0:
            time.sleep(0.02)
        time.sleep(0.5)
        warm = server.generate(branch, 8)
        assert_same(running_request.result(), reference, TOLERANCE)
    assert_same(warm, other, TOLERANCE)


def test_several_at_once_under_eviction(server: Server) -> None:
    """Prompts that share prefixes, four at a time, more than blocks and checkpoints hold; twice."""
    rng = random.Random(0)
    prompts = [prompt(1200, seed=10)]
    while len(prompts) < 8:
        base = rng.choice(prompts)
        more = prompt(rng.randint(20, 600), seed=20 + len(prompts))
        prompts.append((base[: rng.randint(0, len(base))] + more)[:1500])
    counts = [rng.choice([1, 8, 140]) for _ in prompts]
    references = [cold(server, ids, count) for ids, count in zip(prompts, counts)]
    server.flush()
    hits = 0
    for _ in range(2):
        for at in range(0, len(prompts), 4):
            group = slice(at, at + 4)
            for got, reference in zip(server.generate_all(prompts[group], counts[group]), references[group]):
                assert_same(got, reference, TOLERANCE)
                hits += got.cached > 0
    assert hits >= len(prompts)
    server.wait_idle()


def test_the_counters_are_published(server: Server) -> None:
    import urllib.request

    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    for name in ("prefix_hit_tokens", "prefix_lost_tokens", "prefix_checkpoints_taken", "prefix_checkpoints_evicted"):
        line = next(row for row in text.splitlines() if row.startswith(f"dsv4:{name}"))
        assert float(line.rsplit(" ", 1)[1]) > 0, line
