"""Host cache of a server on a GPU: bf16 compute, FP8 entries, pinned memory, CUDA graphs, overlap scheduling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.restarts import restarted
from support.server import DRAFTS, Generated, Server, assert_as_cold, assert_one_copy, only, prompt

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu]

FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "7936", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--max-total-tokens", "8192")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "8", "--schedule-conservativeness", "0.3")
EAGER = ("--disable-cuda-graph", "--disable-overlap-schedule", "--chunked-prefill-size", "256")
POLICY = "--hicache-write-policy"
SERVERS: dict[str, tuple[str, ...]] = {
    "write_through": (POLICY, "write_through"),
    "write_back, 3 drafts": (POLICY, "write_back", *DRAFTS),
    "write_through_selective, no graphs, no overlap": (POLICY, "write_through_selective", *EAGER),
    "write_through, two GPUs": (POLICY, "write_through", "--tp-size", "2"),
}
MODEL = {"seed": 1}
OPTIONS = {"snapshot_interval": 512, "max_snapshots": 64}


def test_conversations_beyond_the_device(server: Server) -> None:
    """24 conversations of 1,500 tokens exceed the device; their next two visits hit the maximum and are right."""
    prompts = [prompt(1500, seed=i) for i in range(24)]
    server.flush()
    before = server.published()
    visits = [[server.generate(ids, 16) for ids in prompts] for _ in range(3)]
    assert [{got.cached for got in visit} for visit in visits] == [{0}, {1408}, {1408}]
    after = server.published()
    change = {name: after[name] - before[name] for name in after}
    tiers = [change[f"hit_tokens_{tier}"] for tier in ("device", "host", "storage")]
    assert sum(tiers) == change["hit_tokens"] and tiers[1] > 24 * 1408 and tiers[2] == 0, tiers
    assert change["host_saves_skipped"] == change["host_loads_failed"] == 0
    assert_as_cold(server, {f"visit 3 of {i}": (prompts[i], visits[2][i]) for i in range(0, 24, 4)})
    server.wait_idle()


def test_next_turns_while_others_decode(server: Server) -> None:
    """Next turns, eight at a time, are loaded from the last snapshot while other requests decode."""
    first = [prompt(600 + 37 * i, seed=40) for i in range(16)]
    server.flush()
    turns = server.generate_all(first, 60)
    following = [[*ids, *got.tokens, *prompt(60, seed=41)] for ids, got in zip(first, turns)]
    other = server.begin(prompt(100, seed=42), 700, 10)
    found: list[Generated] = []
    for at in (0, 8):
        found += server.generate_all(following[at : at + 8], 16)
    whole = other()
    expected = [(len(ids) + 59) // 128 * 128 for ids in first]
    assert [got.cached for got in found] == expected
    asked = {f"after {len(ids)}": (turn, got) for ids, turn, got in zip(first, following, found)}
    ids = [*prompt(100, seed=42), *whole.tokens[:-100]]
    asked["the other"] = ids, Generated(whole.tokens[-100:], whole.logprobs[-100:], 0)
    assert_as_cold(server, asked)
    server.wait_idle()


@only("write_through, two GPUs")
def test_processes_hold_one_copy(server: Server) -> None:
    assert_one_copy(server)


@pytest.mark.parametrize(
    ("storage", "gpus"),
    [("file", 1), ("nixl", 1), ("shm", 1), ("file", 2), ("shm", 2)],
    ids=["file", "nixl", "shm", "file, two GPUs", "shm, two GPUs"],
)
def test_a_server_that_starts_again_finds_its_files(
    tiny: Callable[..., Path], tmp_path: Path, storage: str, gpus: int
) -> None:
    if storage == "nixl":
        pytest.importorskip("nixl", reason="NIXL is no dependency: pip install nixl")
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs 2 GPUs")
    prompts = [prompt(1500, seed=70 + i) for i in range(4)]
    flags = (*FLAGS, "--tp-size", str(gpus))
    with restarted(tiny(seed=1), tmp_path, storage, flags, prompts, pages=4 * 12, **OPTIONS) as (server, again):
        assert [got.cached for got in again] == [1408] * 4
        assert server.published()["hit_tokens_storage"] == 4 * 1408
        assert_as_cold(server, {f"prompt {i}": (ids, got) for i, (ids, got) in enumerate(zip(prompts, again))})
