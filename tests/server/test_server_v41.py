"""DeepSeek-V4.1 on a CPU server, in chunks of 128, compared with the formulas of the whole model (SPEC 11).

The cache holds rounded entries, as in training. fp32 activations that are summed in a different order round some of
them the other way: log p moves by 1e-6, and by up to 0.016 if all are rounded at random (test_make_tiny.py). The number
of such entries depends on the processor. Where the indexer omits entries, such an entry may change the selection, and
log p then moves by up to 0.1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reference.oracle_v41 import OracleV41
from support.liveness import POLL_SECONDS, Progress
from support.rounds import take_turns
from support.segments import VARIABLE, new_folder
from support.server import (
    HOST_CACHE,
    Generated,
    Server,
    assert_right_though_retracted,
    assert_sound,
    distances,
    empty_device,
    kv_hints,
    on_rank,
    only,
    prompt,
    running,
)
from support.server_plugin import broken
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache.stored_segments import stored_segments

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.usefixtures("plugin", "pages", "segments"),
]

LENGTHS = (1, 2, 3, 127, 128, 129, 300, 700)
GENERATED = 8
# Tolerance of each token where all entries are selected. The injected faults move log p by more on average.
TOLERANCE = 0.02
# The indexer selects every visible entry.
V41_MODEL = {"index_topk": 1024}
SELECTING = {"index_topk": 64, "candidate_blocks": 12}
# Maximum mean |d log p| where 64 entries are selected. Selecting all entries moves it by 0.14 on average.
NOISE = 0.03
LARGE = ("--dtype", "float32", "--context-length", "768", "--max-running-requests", "8", "--disable-overlap-schedule")
LARGE += ("--chunked-prefill-size", "128", "--max-total-tokens", "4096", "--enable-metrics")
# A pool so small that requests are retracted.
FLAGS = (*LARGE, "--max-total-tokens", "1024", "--schedule-conservativeness", "0.1")
OPTIONS = {"integrity_check": True, "max_snapshots": 16, "tenant_percent": 40}
ONE, HALVES, RANKS = "one process, host cache", "heads in halves, files", "a cache per rank, shm"
STORAGE = (*HOST_CACHE, "--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend")
SERVERS: dict[str, tuple[str, ...]] = {
    ONE: HOST_CACHE,
    HALVES: ("--tp-size", "2", "--max-total-tokens", "2560", *STORAGE, "file"),
    RANKS: (
        *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        *("--max-running-requests", "16", "--chunked-prefill-size", "256", *STORAGE, "shm"),
    ),
}
BLOCK = 128


@pytest.fixture(scope="module")
def segments() -> Iterator[Path]:
    """Folder of the segments of all servers that the module starts."""
    with new_folder() as folder, patch.dict(os.environ, {VARIABLE: str(folder)}):
        yield folder


def assert_right(oracle: OracleV41, answers: Iterable[tuple[list[int], Generated]]) -> None:
    for ids, got in answers:
        assert len(got.tokens) == GENERATED
        assert distances(oracle, ids, got).max() <= TOLERANCE, len(ids)


@only(ONE)
def test_alone(server: Server, oracle: OracleV41) -> None:
    assert_right(oracle, [(ids, server.generate(ids, GENERATED)) for ids in map(prompt, LENGTHS)])


@only(ONE, HALVES)
def test_all_at_once(server: Server, oracle: OracleV41) -> None:
    prompts = [prompt(length, seed=1) for length in LENGTHS]
    assert_right(oracle, zip(prompts, server.generate_all(prompts, GENERATED)))


@only(ONE)
def test_answers_of_automodel(server: Server, model: Path, automodel: ModuleType) -> None:
    """Answers agree with a model that shares no code with the project."""
    outside = automodel.Automodel(model)
    for ids in (prompt(length, seed=50) for length in (3, 129, 500)):
        got = server.generate(ids, GENERATED)
        apart = torch.tensor(got.logprobs) - outside.score(ids, got.tokens).logprobs
        assert apart.abs().max() <= TOLERANCE, len(ids)


@only(ONE)
def test_branches(server: Server, oracle: OracleV41) -> None:
    """Branches around a block boundary are right, and the first leaves a snapshot at the branch point."""
    trunk = prompt(530, seed=2)
    for at in (383, 385):
        server.flush()
        server.generate(trunk, 1)
        ids = trunk[:at] + prompt(30, seed=at)
        found = [server.generate(ids, 6) for _ in range(2)]
        assert [got.cached for got in found] == [0, 384]
        for got in found:
            assert distances(oracle, ids, got).max() <= TOLERANCE


def test_the_next_turn(server: Server, oracle: OracleV41) -> None:
    """The next turn is right after an odd number of decoded tokens, which leave a compression pair open."""
    server.flush()
    ids = prompt(250, seed=3)
    turn = server.generate(ids, 11)
    following = ids + turn.tokens + prompt(60, seed=4)
    warm = server.generate(following, GENERATED)
    assert warm.cached == 256
    assert distances(oracle, following, warm).max() <= TOLERANCE


@only(ONE)
def test_more_requests_than_fit(server: Server, oracle: OracleV41) -> None:
    server.flush()
    assert_right_though_retracted(server, oracle, TOLERANCE)
    assert_sound(server)


def test_asleep_and_awake(server: Server, oracle: OracleV41) -> None:
    ids = prompt(300, seed=8)
    answer = server.begin(ids, 20, 5)
    server.post("/release_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    assert distances(oracle, ids, answer()).max() <= TOLERANCE


@only(ONE)
def test_new_weights(server: Server, oracle: OracleV41, model: Path, tiny_v41: Callable[..., Path]) -> None:
    """After an update nothing of the old weights is hit, and answers are those of the new ones."""
    ids, other = prompt(300, seed=12), tiny_v41(**V41_MODEL, seed=9)
    server.generate(ids, 1)
    for weights, expected in ((other, OracleV41(other)), (model, oracle)):
        assert server.post("/update_weights_from_disk", {"model_path": str(weights)})["success"]
        got = server.generate(ids, GENERATED)
        assert got.cached == 0
        assert_right(expected, [(ids, got)])


@only(ONE)
def test_hits_of_the_host(server: Server, oracle: OracleV41, plugin: Path) -> None:
    """A prefix that the device has lost is loaded from the host: entries, keys and windows, also if the loads are late.
    Other rows and missing waits are detected."""
    ids, right = prompt(700, seed=20), ("", "loads come late")
    late = "the snapshot is not waited for", "layer 1 is not waited for"
    for fault in (*right, "the row behind each", "a snapshot of somebody else", *late):
        server.flush()
        server.generate(ids, 1)
        server.generate(prompt(500, seed=21), 1)
        empty_device(server)
        before = server.metrics()["hit_tokens_host"]
        with broken(plugin, fault):
            got = server.generate(ids, GENERATED)
        assert got.cached == server.published()["hit_tokens_host"] - before == 640
        apart = distances(oracle, ids, got)
        assert apart.max() <= TOLERANCE if fault in right else apart.max() > TOLERANCE, fault


def wait_for(server: Server, stored: Callable[[], int], count: int) -> None:
    """Wait until the storage has at least `count` pages."""
    progress = Progress(server.process)
    while stored() < count:
        progress.check()
        time.sleep(POLL_SECONDS / 10)


@only(HALVES)
def test_hits_of_files(server: Server, oracle: OracleV41, pages: Path) -> None:
    """A prefix that device and host have lost is loaded from files by both processes."""
    ids, stored = prompt(500, seed=70), lambda: len(list(pages.glob("*.bin")))
    before = stored()
    server.generate(ids, 1)
    wait_for(server, stored, before + 3 + 1)
    server.wait_idle()
    server.flush()
    got = server.generate(ids, GENERATED)
    assert got.cached == server.published()["hit_tokens_storage"] == 3 * BLOCK
    assert_right(oracle, [(ids, got)])


@only(RANKS)
def test_hits_of_another_rank(server: Server, oracle: OracleV41, segments: Path) -> None:
    """A rank finds in shared memory what the other one has computed."""
    ids, stored = prompt(300, seed=80), lambda: sum(segment.pages for segment in stored_segments(segments))
    before = stored()
    server.generate(ids, 1)
    wait_for(server, stored, before + 2 + 1)
    got = server.generate(ids, GENERATED, **on_rank(1))
    server.generate(prompt(5), 1, **on_rank(1))
    assert got.cached == server.metrics(rank=1)["hit_tokens_storage"] == 2 * BLOCK
    assert_right(oracle, [(ids, got)])


@only(ONE)
def test_conversations_in_turn(server: Server, oracle: OracleV41) -> None:
    """Conversations beyond the device hit all whole blocks, and their next answers are right."""
    figures, following = take_turns(server, conversations=6, tokens=300, concurrency=2, compared=3)
    assert figures["cached_tokens"] == 6 * 2 * BLOCK and figures["host_tokens"] > 0
    answers = [(ids, server.generate(ids, GENERATED)) for ids in following]
    assert [got.cached for _, got in answers] == [4 * BLOCK] * 3
    assert_right(oracle, answers)


def found(server: Server, ids: list[int], **fields: Any) -> tuple[int, int]:
    """Return the tokens of a prompt on the device and on the host."""
    (rank,) = server.post("/dsv4/lookup", {"input_ids": ids, **fields})["ranks"]
    return rank["device_tokens"], rank["host_tokens"]


def flood(server: Server, count: int, seed: int, **fields: Any) -> None:
    for i in range(count):
        server.generate(prompt(300, seed=seed + i), 1, **fields)


@only(HALVES)
def test_pins_lookup_and_prefetch(server: Server, oracle: OracleV41) -> None:
    """A pin survives a flood of a full device, and a prompt like it does not, whether the oldest prompts are evicted or
    the newest. A prefetch loads it from the host before its request."""
    server.flush()
    flood(server, 10, seed=100)
    pinned, other, hit = prompt(200, seed=1), prompt(200, seed=2), BLOCK
    server.generate(pinned, 1, kv_hints=kv_hints(pin={"name": "agent", "seconds": 600}))
    server.generate(other, 1)
    flood(server, 12, seed=200)
    assert (found(server, pinned), found(server, other)) == ((hit, 0), (0, hit))
    assert server.published()["pinned_tokens"] == hit
    loaded = server.post("/dsv4/prefetch", {"input_ids": other})
    assert loaded["loaded_tokens"] == loaded["device_tokens"] == hit and found(server, other) == (hit, 0)
    answers = [(ids, server.generate(ids, GENERATED)) for ids in (pinned, other)]
    assert [got.cached for _, got in answers] == [hit] * 2
    assert_right(oracle, answers)
    server.generate(prompt(5), 1, kv_hints=kv_hints(pin={"name": "agent", "seconds": 0}))
    assert server.published()["pinned_tokens"] == 0


@only(ONE)
def test_shares_of_tenants(server: Server, oracle: OracleV41) -> None:
    """The only prompt of a tenant stays on the device while another one exceeds its share."""
    server.flush()
    ids = prompt(300, seed=3)
    flood(server, 4, seed=300, cache_salt="b")
    server.generate(ids, 1, cache_salt="a")
    flood(server, 6, seed=400, cache_salt="b")
    assert found(server, ids, cache_salt="a") == (2 * BLOCK, 0)
    metrics = server.published()
    assert (metrics["tenants"], metrics["tenants_above_share"]) == (2, 1)
    got = server.generate(ids, GENERATED, cache_salt="a")
    assert got.cached == 2 * BLOCK
    assert_right(oracle, [(ids, got)])


@only(ONE)
def test_check(server: Server) -> None:
    """The command `check` finds a sound cache, and warm answers like cold ones."""
    ran = CliRunner().invoke(app, ["check", server.url, "--prompts", "2"])
    assert ran.exit_code == 0 and "the cache is sound, and 2 warm answers match cold answers" in ran.output, ran.output


@only(RANKS)
def test_both_ranks(server: Server, oracle: OracleV41) -> None:
    """Each rank answers right while the other one is idle, and when both run."""
    server.flush()
    asked = [(prompt(300, seed=30 + rank), rank) for rank in (0, 1)]
    answers = [(ids, server.generate(ids, GENERATED, **on_rank(rank))) for ids, rank in asked]
    prompts, ranks = [prompt(n, seed=40) for n in LENGTHS], [i % 2 for i in range(len(LENGTHS))]
    answers += zip(prompts, server.generate_all(prompts, [GENERATED] * len(prompts), ranks))
    assert_right(oracle, answers)
    assert_sound(server)


@only(ONE)
def test_injected_fault_is_detected(server: Server, oracle: OracleV41, plugin: Path) -> None:
    """An injected fault changes the answer after a prefix hit, and the next answer without the fault is right."""
    ids = prompt(390, seed=9)  # most of its window precedes the snapshot
    server.flush()
    with broken(plugin, "snapshots with empty rings"):
        server.generate(ids, 1)
        wrong = server.generate(ids, GENERATED)
    assert wrong.cached == 384
    assert distances(oracle, ids, wrong).mean() > TOLERANCE
    server.flush()
    server.generate(ids, 1)
    whole = server.generate(ids, GENERATED)
    assert whole.cached == 384
    assert distances(oracle, ids, whole).max() <= TOLERANCE


def test_selection(plugin: Path, tiny_v41: Callable[..., Path], tmp_path: Path) -> None:
    """Answers are right where the indexer selects 64 of up to 700 entries, in some layers from 96 candidates."""
    folder = tiny_v41(**SELECTING)
    oracle, prompts = OracleV41(folder), [prompt(length, seed=11) for length in (300, 700)]

    def mean_distance(server: Server, cached: bool) -> float:
        answers = server.generate_all(prompts, GENERATED)
        assert [got.cached > 0 for got in answers] == [cached] * len(prompts)
        return torch.cat([distances(oracle, ids, got) for ids, got in zip(prompts, answers)]).mean().item()

    with running(folder, tmp_path / "log", *LARGE) as server:
        for cached in (False, True):
            assert mean_distance(server, cached) <= NOISE
        server.flush()
        with broken(plugin, "candidates of nobody"):
            assert mean_distance(server, cached=False) > 2 * NOISE
