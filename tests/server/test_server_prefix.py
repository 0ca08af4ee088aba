"""Prefix hits of a real server in fp32: warm answers equal those of an empty cache.

test_server_exact.py and test_server_fp8_prefix.py use chunks of 128, test_server_bf16.py chunks of 4,096.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faulty_cache import FAULTS, broken
from server_harness import Generated, Server, assert_same, empty_device, prompt

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("fault")]

TOLERANCE = 2e-3
BLOCK = 128
INTERVAL = 512
# One layer of each kind. The indexer selects all entries. If it omitted some, scores that are equal up to rounding
# could be ordered differently in a step with other requests (docs/design/prefix_policy.md).
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "6144", "--max-running-requests", "4")
FLAGS += ("--max-total-tokens", "6144", "--chunked-prefill-size", "256", "--enable-metrics")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "snapshot_interval": INTERVAL, "max_snapshots": 12}


def aligned(length: int) -> int:
    """Return the hit of a repeated prompt of this length. At least one token is always computed."""
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("length", [129, 256, 300])
def test_a_repeated_prompt(server: Server, length: int) -> None:
    """After a flush nothing is hit, and stale state in the slots does not change answers."""
    ids = prompt(length, seed=1)
    reference = server.cold(ids)
    for expected in (0, aligned(length)) * 2:
        if expected == 0:
            server.flush()
        warm = server.generate(ids, 8)
        assert_same(warm, reference, TOLERANCE)
        assert warm.cached == expected


def test_a_long_prompt_and_what_it_pushes_out(server: Server) -> None:
    """A prompt of 5,000 tokens in a pool of 6,144 is right when repeated or resumed midway, and so is an evicted
    one."""
    earlier, trunk = prompt(1300, seed=8), prompt(5000, seed=2)
    server.flush()
    reference = server.generate(earlier, 4)
    evicted = server.metrics()["snapshots_evicted"]
    first = server.score(trunk[:4321], trunk[4321:])
    again, middle = server.score(trunk[:4993], trunk[4993:]), server.score(trunk[:4321], trunk[4321:4381])
    assert (first.cached, again.cached, middle.cached) == (0, 4992, 4320 // INTERVAL * INTERVAL)
    assert_same(again, Generated(first.tokens[-7:], first.logprobs[-7:], 0), TOLERANCE)
    assert_same(middle, first, TOLERANCE)
    found = [server.generate(earlier, 4) for _ in range(2)]
    for got in found:
        assert_same(got, reference, TOLERANCE)
    assert found[0].cached < found[1].cached == 1280, "nothing was evicted"
    assert server.metrics()["snapshots_evicted"] > evicted


def test_a_branch_anywhere(server: Server) -> None:
    """Branches around a block boundary and inside a block hit the cache and equal their cold answers, each twice."""
    trunk = prompt(900, seed=2)
    positions = (511, 512, 513, 700)
    twice = [[trunk[:at] + prompt(40, seed=at + i) for i in (0, 1)] for at in positions]
    cold = [server.cold_all(pair, 4) for pair in twice]
    server.flush()
    server.generate(trunk, 1)
    for at, pair, references in zip(positions, twice, cold):
        warm = [server.generate(ids, 4) for ids in pair]
        for got, reference in zip(warm, references):
            assert_same(got, reference, TOLERANCE)
        # The first branch resumes from the interval's snapshot and takes one where it leaves the trunk.
        assert [got.cached for got in warm] == [at // INTERVAL * INTERVAL, at // BLOCK * BLOCK], at


@pytest.mark.parametrize("count", [1, 150])
def test_the_next_turn(server: Server, count: int) -> None:
    """The next turn hits the last snapshot of decode, which takes one every 128 tokens."""
    server.flush()
    ids = prompt(250, seed=3)
    turn = server.generate(ids, count)
    following = ids + turn.tokens + prompt(60, seed=4)
    warm = server.generate(following, 8)
    # The next turn computes the last token of an answer.
    assert warm.cached == (len(ids) + count - 1) // BLOCK * BLOCK
    assert_same(warm, server.cold(following), TOLERANCE)


def test_a_branch_off_a_running_request(server: Server) -> None:
    ids = prompt(400, seed=5)
    branch = ids[:330] + prompt(50, seed=6)
    reference, other = server.cold(ids, 100), server.cold(branch)
    running_request = server.begin(ids, 100, 3)
    warm = server.generate(branch, 8)
    assert_same(running_request(), reference, TOLERANCE)
    assert_same(warm, other, TOLERANCE)


def test_a_pause_that_retracts(server: Server) -> None:
    """A request that a pause retracts resumes from its prompt's snapshot and is right."""
    ids = prompt(300, seed=7)
    reference = server.cold(ids, 100)
    server.flush()
    before = server.metrics()["hit_tokens"]
    paused = server.begin(ids, 100, 20)
    server.post("/pause_generation", {"mode": "retract"})
    server.post("/continue_generation", {})
    assert_same(paused(), reference, TOLERANCE)
    assert server.published()["hit_tokens"] - before == 256
    server.wait_idle()


def test_asleep_and_awake(server: Server) -> None:
    """A running request continues correctly although its memory is released and remapped with undefined contents."""
    ids = prompt(300, seed=8)
    reference = server.cold(ids, 40)
    answer = server.begin(ids, 40, 10)
    server.post("/release_memory_occupation", {})
    server.post("/release_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    assert_same(answer(), reference, TOLERANCE)
    assert server.generate(ids, 1).cached == 256
    empty_device(server)
    got = server.generate(ids, 40)
    assert got.cached == 0
    assert_same(got, reference, TOLERANCE)
    server.wait_idle()


def test_new_weights_in_a_pause(server: Server, tiny: Callable[..., Path]) -> None:
    """After a weight update in a pause, the paused request is recomputed with the new weights, and nothing old is
    hit."""
    ids = prompt(300, seed=10)
    other, model = (str(tiny(**{**MODEL, "seed": seed})) for seed in (9, 0))
    server.generate(ids, 1)
    answer = server.begin(ids, 40, 5)
    server.post("/pause_generation", {"mode": "retract"})
    assert server.post("/update_weights_from_disk", {"model_path": other, "flush_cache": False})["success"]
    server.post("/continue_generation", {})
    got = answer()
    server.wait_idle()
    assert_same(server.generate(ids), server.cold(ids), TOLERANCE)
    after = server.score(ids, got.tokens, extra_key="new").logprobs
    apart = [abs(a - b) for a, b in zip(got.logprobs, after)]
    assert max(apart[-8:]) < TOLERANCE and max(apart[:5]) > 10 * TOLERANCE, apart
    assert server.post("/update_weights_from_disk", {"model_path": model})["success"]
    assert server.generate(ids, 1).cached == 0


def test_several_at_once_under_eviction(server: Server) -> None:
    """Concurrent prompts with shared prefixes, more than blocks and snapshots hold, are right on both visits."""
    rng = random.Random(0)
    prompts = [prompt(1000, seed=10)]
    while len(prompts) < 8:
        base = rng.choice(prompts)
        more = prompt(rng.randint(20, 400), seed=20 + len(prompts))
        prompts.append((base[: rng.randint(0, len(base))] + more)[:1200])
    counts = [1, 40, 8, 40, 1, 8, 40, 8]
    references = [*server.cold_all(prompts[:4], counts[:4]), *server.cold_all(prompts[4:], counts[4:])]
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


@pytest.mark.parametrize("kind", sorted(set(FAULTS) - {"indexer compressor state dropped"}))
def test_a_broken_cache_shows(server: Server, fault: Path, kind: str) -> None:
    """Each fault of the prefix cache changes the answer enough for the tests above to notice.

    test_server_exact.py covers index keys, which matter only where the indexer omits entries.
    """
    ids = prompt(230, seed=11)
    reference = server.cold(ids)
    server.flush()
    server.generate(prompt(210, seed=12), 60)  # state of a different request in the slots
    with broken(fault, kind):
        # The first run takes the snapshot. The second resumes from it and, with a shared snapshot, corrupts it.
        got = [server.generate(ids, 1), server.generate(ids, 1), server.score(ids, reference.tokens)]
    assert [g.cached for g in got] == [0, 128, 128]
    apart = (torch.tensor(got[-1].logprobs) - torch.tensor(reference.logprobs)).abs().max()
    assert apart > 10 * TOLERANCE, f"{kind}: log p differs by {apart:.1e}, which the tests would not see"
    server.flush()
    assert_same(server.score(ids, reference.tokens), reference, TOLERANCE)


def test_the_counters_are_published(server: Server) -> None:
    found = server.metrics()
    size = found["snapshot_copied_bytes"] / (found["snapshots_taken"] + found["snapshots_resumed"])
    assert size == 4 * (3 * 128 * 512 + 8 * 640), "three rings and the state of a CSA layer"
    names = ("hit_tokens", "lost_tokens", "snapshots_evicted", "snapshot_copy_seconds", "snapshot_timed_bytes")
    for name in (*names, "first_token_seconds_count_hit", "first_token_seconds_count_miss", "prompt_tokens"):
        assert found[name] > 0, name
    assert 0 < found["snapshots"] <= 12
    assert found["snapshot_timed_bytes"] < found["snapshot_copied_bytes"], "no decode step copied a snapshot"
