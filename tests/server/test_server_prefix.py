"""Prefix hits of a real server in fp32. Warm answers equal the oracle's or those of an empty cache.

Prefill steps of up to 200 tokens run like GPU graphs (recorded_prefills.py), longer ones eagerly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference.oracle import Oracle
from support.server import (
    ATTEMPTS,
    FP32,
    Generated,
    Server,
    assert_oracle_chooses,
    assert_same,
    distances,
    empty_device,
    live,
    prompt,
)
from support.server_plugin import broken

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

EXACT, TOLERANCE = 1e-4, 2e-3
BLOCK = 128
INTERVAL = 512
GRAPH_TOKENS = 200
# One layer of each kind. The indexer selects all entries. If it omitted some, scores that are equal up to rounding
# could be ordered differently in a step with other requests (docs/design/prefix_policy.md).
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "1792", "--max-running-requests", "6", "--enable-metrics")
FLAGS += ("--max-total-tokens", "2048", "--chunked-prefill-size", "256")
OPTIONS = {**FP32, "snapshot_interval": INTERVAL, "max_snapshots": 12, "integrity_check": True}


def steps(plugin: Path) -> list[list[int]]:
    """Return (size, tokens, requests, rolling snapshots) of all graph steps so far."""
    return [list(map(int, line.split())) for line in (plugin / "steps").read_text().splitlines()]


@pytest.mark.parametrize("new", [1, 4, 5, 128, 200])
def test_new_tokens_behind_a_hit(server: Server, oracle: Oracle, plugin: Path, new: int) -> None:
    ids = prompt(300, seed=1)
    server.generate(ids, 1)
    longer = ids[:256] + prompt(new, seed=2)
    got = server.generate(longer, 12)
    assert got.cached == 256
    size, tokens, requests, _ = steps(plugin)[-1]
    assert tokens == new and requests == 1 and size >= new
    assert_oracle_chooses(oracle, longer, got, EXACT)
    again = server.generate(longer, 12)
    assert again.cached == (len(longer) - 1) // BLOCK * BLOCK, "a snapshot inside the step"
    assert_same(again, got, EXACT)


def test_hits_and_misses_in_a_batch(server: Server, oracle: Oracle, plugin: Path) -> None:
    """Answers are right in a batch of hits and misses, with short last chunks and eager steps."""
    trunk = prompt(520, seed=3)
    asked = [trunk[:at] + prompt(n, seed=at) for at, n in ((130, 3), (256, 20), (384, 1))] + [prompt(40), prompt(7)]
    for _ in range(ATTEMPTS):
        server.flush()
        server.generate(trunk, 1)
        before = len(steps(plugin))
        for ids, got in zip(asked, server.generate_all(asked, 8)):
            assert_oracle_chooses(oracle, ids, got, EXACT)
        if any(requests > 1 for _, _, requests, _ in steps(plugin)[before:]):
            return
    pytest.fail("no step had several requests: the test does not test")


def test_log_probabilities_of_the_prompt(server: Server, oracle: Oracle) -> None:
    ids = prompt(150, seed=5)
    assert distances(oracle, ids[:90], server.score(ids[:90], ids[90:])).max() <= EXACT


@pytest.mark.parametrize("kind", ["padding tokens write", "the lengths of the step before"])
def test_broken_graphs_are_detected(server: Server, oracle: Oracle, plugin: Path, kind: str) -> None:
    server.flush()
    ids = prompt(300, seed=12)
    server.generate(ids, 1)
    longer = ids + prompt(20, seed=13)
    with broken(plugin, kind):
        got = server.generate(longer, 12)
    assert distances(oracle, longer, got).max() > 100 * EXACT
    server.flush()
    assert distances(oracle, longer, server.generate(longer, 12)).max() <= EXACT


def test_long_prompt_evicts_others(server: Server) -> None:
    """A prompt of 1,700 tokens in a pool of 2,048 is right when repeated or resumed midway, and so is an evicted
    one."""
    earlier, trunk = prompt(700, seed=8), prompt(1700, seed=2)
    server.flush()
    reference = server.generate(earlier, 4)
    evicted = server.metrics()["snapshots_evicted"]
    first = server.score(trunk[:1450], trunk[1450:])
    again, middle = server.score(trunk[:1670], trunk[1670:]), server.score(trunk[:1450], trunk[1450:1510])
    assert (first.cached, again.cached, middle.cached) == (0, 1664, 1450 // INTERVAL * INTERVAL)
    assert_same(again, Generated(first.tokens[-30:], first.logprobs[-30:], 0), TOLERANCE)
    assert_same(middle, first, TOLERANCE)
    found = [server.generate(earlier, 4) for _ in range(2)]
    for got in found:
        assert_same(got, reference, TOLERANCE)
    assert found[0].cached < found[1].cached == 640, "nothing was evicted"
    assert server.metrics()["snapshots_evicted"] > evicted


def test_a_branch_anywhere(server: Server) -> None:
    """Branches around a block boundary and inside a block hit the cache and equal their cold answers, each twice."""
    trunk = prompt(900, seed=2)
    server.flush()
    server.generate(trunk, 1)
    for at in (511, 513, 700):
        # The first branch resumes from the interval's snapshot and takes one where it leaves the trunk.
        for i, cached in enumerate((at // INTERVAL * INTERVAL, at // BLOCK * BLOCK)):
            ids = trunk[:at] + prompt(40, seed=at + i)
            warm = server.generate(ids, 4)
            assert warm.cached == cached, at
            assert_same(warm, server.cold(ids, 4), TOLERANCE)


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


def test_asleep_and_awake(server: Server) -> None:
    """A running request continues correctly although its memory is released and remapped with undefined contents."""
    ids = prompt(300, seed=8)
    reference = server.cold(ids, 40)
    answer = server.begin(ids, 40, 10)
    for _ in range(2):
        server.post("/release_memory_occupation", {})
    for _ in range(2):
        server.post("/resume_memory_occupation", {})
    assert_same(answer(), reference, TOLERANCE)
    assert server.generate(ids, 1).cached == 256
    empty_device(server)
    got = server.generate(ids, 40)
    assert got.cached == 0
    assert_same(got, reference, TOLERANCE)
    server.wait_idle()


def test_lifecycles(server: Server) -> None:
    live(server)


@pytest.mark.parametrize(
    "kind", ["the state at the end of the step", "previous rows dropped", "a slot reused without its state"]
)
def test_broken_caches_are_detected(server: Server, plugin: Path, kind: str) -> None:
    """Each fault of the prefix cache changes the answer enough for the tests above to notice.

    test_server_exact.py covers index keys, which matter only where the indexer omits entries.
    """
    ids = prompt(230, seed=11)
    reference = server.cold(ids)
    server.flush()
    server.generate(prompt(210, seed=12), 60)  # state of a different request in the slots
    with broken(plugin, kind):
        # The first run takes the snapshot, from which the second one resumes.
        got = [server.generate(ids, 1), server.score(ids, reference.tokens)]
    assert [g.cached for g in got] == [0, 128]
    apart = (torch.tensor(got[-1].logprobs) - torch.tensor(reference.logprobs)).abs().max()
    assert apart > 10 * TOLERANCE, f"{kind}: log p differs by {apart:.1e}, which the tests would not see"
    server.flush()
    assert_same(server.score(ids, reference.tokens), reference, TOLERANCE)
