"""Host cache of a real server: entries evicted from the device are loaded from the host.

Prefill steps of up to 40 tokens run like GPU graphs (recorded_prefills.py). test_server_speculation.py serves with
write_back, test_server_dspark.py with write_through_selective.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.server import ATTEMPTS, FP32, Generated, Server, assert_same, empty_device, prompt
from support.server_plugin import broken

from benchmarks import prefix_trace

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

TOLERANCE = 2e-3
BLOCK = 128
GRAPH_TOKENS = 40
# One layer of each kind. The indexer selects all entries (docs/design/prefix_policy.md).
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
# 2,048 tokens and 12 snapshots on the device and four times that on the host.
FLAGS = ("--dtype", "float32", "--context-length", "1792", "--max-running-requests", "4", "--max-total-tokens", "2048")
FLAGS += ("--chunked-prefill-size", "256", "--enable-metrics", "--enable-hierarchical-cache", "--hicache-ratio", "4")
OPTIONS = {**FP32, "snapshot_interval": 512, "max_snapshots": 12}


def test_conversations_beyond_the_device(server: Server) -> None:
    """Six conversations of 700 tokens exceed the device, and the second and third visits hit the maximum."""
    prompts = [prompt(700, seed=i) for i in range(6)]
    references = [server.cold(ids) for ids in prompts]
    server.flush()
    before = server.metrics()
    for visit in range(3):
        for ids, reference in zip(prompts, references):
            got = server.generate(ids)
            assert got.cached == (640 if visit else 0), visit
            assert_same(got, reference, TOLERANCE)
    after = server.metrics()
    change = {name: after[name] - before[name] for name in after}
    tiers = [change[f"hit_tokens_{tier}"] for tier in ("device", "host", "storage")]
    assert sum(tiers) == change["hit_tokens"] == 12 * 640
    assert tiers[1] > 4 * 640 and tiers[2] == 0, "too few tokens came from the host"
    assert change["host_saved_bytes"] > 0 and change["host_loaded_bytes"] > 0 and change["host_load_seconds_sum"] > 0
    assert after["host_tokens"] > 16 * 128, "the host holds no more tokens than the device could"
    assert change["host_saves_skipped"] == change["host_loads_failed"] == 0
    server.flush()
    assert server.generate(prompts[0]).cached == 0, "a flush empties the host, too"
    server.wait_idle()


def test_next_turns_and_branches_four_at_a_time(server: Server) -> None:
    """Next turns and branches, four at a time, hit the host cache and equal their cold answers."""
    first = [prompt(500, seed=20 + i) for i in range(5)]
    server.flush()
    answers = [server.generate(ids, 40) for ids in first]
    following = [ids + got.tokens + prompt(30, seed=40 + i) for i, (ids, got) in enumerate(zip(first, answers))]
    following += [ids[:300] + prompt(60, seed=60 + i) for i, ids in enumerate(first[:1])]
    warm = [got for at in (0, 4) for got in server.generate_all(following[at : at + 4], 8)]
    for ids, got in zip(following, warm):
        assert_same(got, server.cold(ids), TOLERANCE)
    assert all(got.cached >= 384 for got in warm[:5])
    server.wait_idle()


def test_a_sweep_of_working_sets(server: Server, tmp_path: Path) -> None:
    """`benchmarks.prefix_trace sweep` reports device hits for a small working set and host hits for a large one."""
    file = tmp_path / "rows"
    load = ["--tokens", "400", "--vocab", "384", "--steps", "1", "5"]
    prefix_trace.main(["sweep", "--url", server.url, *load, "--output", str(file)])
    device, host = rows = [json.loads(line) for line in file.read_text().splitlines()]
    # Hits are whole blocks: 384 of 401 tokens, 512 of 617.
    assert [row["cached_tokens"] for row in rows] == [384, 512 + 4 * 384]
    assert device["host_tokens"] == 0 < host["host_tokens"] == host["cached_tokens"] - host["device_tokens"]
    server.wait_idle()


def to_host_only(server: Server, ids: list[int]) -> None:
    """Serve `ids` and then a second prompt, whose host rows follow those of `ids`, and empty the device."""
    server.flush()
    server.generate(ids, 1)
    server.generate(prompt(500, seed=130), 1)
    empty_device(server)


def retracted(server: Server) -> tuple[float, float]:
    """Return the number of requests retracted for lack of memory and the number of their prompt tokens."""
    counted = server.metrics("sglang:num_retracted_")
    return counted.get("requests", 0), counted.get("input_tokens", 0)


def test_a_retracted_request_resumes_from_the_host(server: Server) -> None:
    """A retracted request resumes from the host if the device has evicted its prompt.

    In a pool of 16 blocks four requests grow to four blocks each; then the first needs a fifth. One of the others is
    retracted and resumes from the last snapshot of its prompt, because its output needs log p. The device no longer has
    that prompt, because SGLang allocates a block ahead for each remaining request.
    """
    prompts = [prompt(n, seed=100 + i) for i, n in enumerate((396, 356, 356, 376))]
    counts, ahead = (150, 60, 60, 60), (70, 3, 3, 3)
    references = [server.cold(ids, count) for ids, count in zip(prompts, counts)]
    for _ in range(ATTEMPTS):
        server.flush()
        before, retracted_before = server.metrics(), retracted(server)
        # Each request begins when the previous one decodes; otherwise SGLang would queue it until one ends.
        answers = [server.begin(ids, count, at) for ids, count, at in zip(prompts, counts, ahead)]
        for answer, reference in zip(answers, references):
            got = answer()
            assert len(got.tokens) == len(reference.tokens)
            assert_same(got, reference, TOLERANCE)
        after = server.published()
        times, tokens = (now - then for now, then in zip(retracted(server), retracted_before))
        if times:
            break
    assert times > 0, "no request was retracted, so the test checks nothing"
    found, from_host = (after[name] - before[name] for name in ("hit_tokens", "hit_tokens_host"))
    assert from_host == found > 0, f"of {found:.0f} tokens {from_host:.0f} came from the host"
    assert 0 < tokens - found <= BLOCK * times, f"of prompts of {tokens:.0f} tokens {found:.0f} were found again"
    server.wait_idle()


def scored_from_host(server: Server, ids: list[int], tokens: list[int]) -> Generated:
    before = server.metrics()["host_loaded_bytes"]
    got = server.score(ids, tokens)
    assert got.cached == len(ids) // BLOCK * BLOCK
    assert server.metrics()["host_loaded_bytes"] > before, "no prefix was loaded, so the test checks nothing"
    return got


# The last steps compute 16 tokens like a graph, which waits for all layers, and 96 tokens eagerly.
GRAPH, EAGER = 520, 600


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("the row behind each", GRAPH),
        ("a snapshot of somebody else", EAGER),
        ("layer 2 is not waited for", GRAPH),
        ("layer 2 is not waited for", EAGER),
        ("the snapshot is not waited for", EAGER),
    ],
)
def test_broken_loads_are_detected(server: Server, plugin: Path, kind: str, length: int) -> None:
    """Each fault in a load changes the answer enough for the other tests to notice, and the host copy stays right."""
    ids = prompt(length, seed=120)
    reference = server.cold(ids)
    to_host_only(server, ids)
    with broken(plugin, kind):
        got = scored_from_host(server, ids, reference.tokens)
    apart = (torch.tensor(got.logprobs) - torch.tensor(reference.logprobs)).abs().max()
    assert apart > 10 * TOLERANCE, f"{kind}: log p differs by {apart:.1e}, which the tests would not see"
    empty_device(server)
    assert_same(scored_from_host(server, ids, reference.tokens), reference, TOLERANCE)


@pytest.mark.parametrize("length", [GRAPH, EAGER])
def test_steps_wait_for_their_loads(server: Server, plugin: Path, length: int) -> None:
    """Answers are right if each load is delayed until a step waits for it.

    A step waits for the snapshot before it fills live slots, and for each layer before it reads it.
    """
    ids = prompt(length, seed=120)
    reference = server.cold(ids)
    to_host_only(server, ids)
    with broken(plugin, "loads come late"):
        assert_same(scored_from_host(server, ids, reference.tokens), reference, TOLERANCE)


def test_start_up_table_names_the_host(server: Server) -> None:
    """The start-up log reports the host cache's size.

    The model has a CSA and an HCA layer in fp32; a snapshot has three window rings and a CSA compressor state. The host
    has four times the bytes of 16 blocks and 12 snapshots, with 11/8 as many snapshots per block.
    """
    table = "host cache of this process: 6912 tokens in 54 blocks of 83968 bytes, 49 snapshots of 806912 bytes"
    assert table in server.log_text()
