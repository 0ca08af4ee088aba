"""Host cache of a server on a GPU: bf16 compute, FP8 entries, pinned memory, CUDA graphs, overlap scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conversations import LONGEST, ends_of
from faulty_cache import HOST_FAULTS, broken
from server_harness import DRAFTS, Generated, Server, assert_as_cold, prompt, running

pytestmark = [pytest.mark.server, pytest.mark.gpu]

DEVICE_TOKENS = 8192
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "8192", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-total-tokens", str(DEVICE_TOKENS))
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "8", "--schedule-conservativeness", "0.3")
EAGER = ("--disable-cuda-graph", "--disable-overlap-schedule", "--chunked-prefill-size", "256")
SERVERS: dict[str, tuple[str, ...]] = {
    "write_through": ("--max-running-requests", "16"),
    "write_back": ("--max-running-requests", "16"),
    "write_through_selective, no graphs, no overlap": ("--max-running-requests", "16", *EAGER),
    "write_through, 3 drafts": ("--max-running-requests", "16", *DRAFTS),
    "write_through, two GPUs": ("--max-running-requests", "16", "--tp-size", "2"),
}
GPUS = {name: 2 for name in SERVERS if "two" in name}
OPTIONS = {"snapshot_interval": 512, "max_snapshots": 64}


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, fault: Path, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if GPUS.get(request.param, 1) > torch.cuda.device_count():
        pytest.skip(f"needs {GPUS[request.param]} GPUs")
    policy = ("--hicache-write-policy", request.param.split(",")[0])
    flags = (*FLAGS, *policy, *SERVERS[request.param])
    log = tmp_path_factory.mktemp("host") / "log"
    with running(tiny(seed=1, nextn="drafts" in request.param), log, *flags, cpu=False, **OPTIONS) as server:
        yield server


def test_conversations_beyond_the_device(server: Server) -> None:
    """24 conversations of 1,500 tokens exceed the device; their next two visits hit the maximum and are right."""
    prompts = [prompt(1500, seed=i) for i in range(24)]
    server.flush()
    before = server.metrics()
    visits = [[server.generate(ids, 16) for ids in prompts] for _ in range(3)]
    assert [{got.cached for got in visit} for visit in visits] == [{0}, {1408}, {1408}]
    after = server.metrics()
    change = {name: after[name] - before[name] for name in after}
    tiers = [change[f"hit_tokens_{tier}"] for tier in ("device", "host", "storage")]
    assert sum(tiers) == change["hit_tokens"] and tiers[1] > 24 * 1408 and tiers[2] == 0, tiers
    assert change["host_saves_skipped"] == change["host_loads_failed"] == 0
    loaded, seconds = change["host_loaded_bytes"], change["host_load_seconds_sum"]
    saved, saving = change["host_saved_bytes"], change["host_save_seconds_sum"]
    print(
        f"loaded {loaded / 1e6:.0f} MB in {1e3 * seconds:.1f} ms, saved {saved / 1e6:.0f} MB in {1e3 * saving:.1f} ms"
    )
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


def test_answers_end_where_cold_ones_do(server: Server) -> None:
    """Warm answers of 200 conversations, more than device and host hold, are on average as long as cold ones.

    With bf16 compute many answers differ after a near tie, so only the distributions of lengths are compared.
    """
    server.flush()
    ends = ends_of(server, 200, tolerance=0.5, at_once=16)
    cold, warm = torch.tensor(ends.lengths, dtype=torch.float32).T
    longest = [(lengths == LONGEST).sum().item() for lengths in (cold, warm)]
    print(
        f"{ends.parted} of {len(cold)} parted, {ends.cached} tokens found; mean lengths {cold.mean():.2f} and "
        f"{warm.mean():.2f}, {longest} as long as may be"
    )
    assert len(cold.unique()) > 8 and ends.cached > 0
    spread = (cold - warm).std() / len(cold) ** 0.5
    assert abs(cold.mean() - warm.mean()) <= 4 * spread
    assert abs(longest[0] - longest[1]) <= 4 * (ends.parted + 1) ** 0.5
    server.wait_idle()


def test_retracted_requests_resume_from_the_host(server: Server) -> None:
    """Retracted requests resume from the host or the device at the last snapshot of their prompts.

    12 requests grow from 48 of 64 blocks to 108. Each begins when the previous one decodes, so that all are admitted.
    They resume from their prompts' snapshots because their output needs log p. Blocks that no request has reused are
    still on the device.
    """
    prompts = [prompt(500 + i, seed=44) for i in range(12)]
    server.flush()
    before, retracted = server.metrics(), server.retracted()
    running_requests = [server.begin(ids, 600, 3, ignore_eos=False) for ids in prompts]
    answers = [answer() for answer in running_requests]
    after = server.published()
    times, tokens = (now - then for now, then in zip(server.retracted(), retracted))
    assert times > 0, "no request was retracted, so the test checks nothing"
    found, from_host = (after[name] - before[name] for name in ("hit_tokens", "hit_tokens_host"))
    print(f"{times:.0f} times retracted, {found:.0f} tokens found again, {from_host:.0f} of them on the host")
    assert from_host > 0, "no tokens came from the host"
    assert 0 < tokens - found <= 128 * times, f"of prompts of {tokens:.0f} tokens {found:.0f} were found again"
    assert_as_cold(server, {f"request {i}": (prompts[i], answers[i]) for i in range(0, 12, 2)})
    server.wait_idle()


@pytest.mark.parametrize("kind", HOST_FAULTS)
def test_a_broken_load_shows(server: Server, fault: Path, kind: str) -> None:
    """Each fault in a load changes the answer enough for the other tests to notice."""
    # Among equal eviction values the device evicts the newest first.
    before, behind = ([prompt(1500, seed=60 + 10 * side + i) for i in range(6)] for side in range(2))
    ids = prompt(1500, seed=50)
    server.flush()
    reference = server.cold(ids, 16)

    def loaded() -> Generated:
        server.flush()
        for other in (*before, ids, *behind):
            server.generate(other, 1)
        hits = server.metrics()["hit_tokens_host"]
        got = server.score(ids, reference.tokens)
        assert got.cached == 1408 and server.published()["hit_tokens_host"] > hits
        return got

    right = loaded()
    with broken(fault, kind):
        wrong = loaded()
    apart = [(torch.tensor(got.logprobs) - torch.tensor(reference.logprobs)).abs().mean() for got in (right, wrong)]
    print(f"{kind}: {apart[0]:.4f} right, {apart[1]:.4f} wrong")
    assert apart[0] < 0.1 and apart[1] > 2 * apart[0] + 0.1


@pytest.mark.parametrize("storage", ["file", "nixl"])
def test_a_server_that_starts_again_finds_its_files(tiny: Callable[..., Path], tmp_path: Path, storage: str) -> None:
    if storage == "nixl":
        pytest.importorskip("nixl", reason="NIXL is no dependency: pip install nixl")
    flags = (*FLAGS, *SERVERS["write_through"], "--hicache-storage-backend", storage)
    flags += ("--hicache-storage-backend-extra-config", '{"l3_cleaner_enabled": false}')
    prompts = [prompt(1500, seed=70 + i) for i in range(4)]
    folder = tmp_path / "files"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("FILE", "NIXL"):
            patch.setenv(f"SGLANG_HICACHE_{kind}_BACKEND_STORAGE_DIR", str(folder))
        patch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "POSIX")
        with running(tiny(seed=1), tmp_path / "first", *flags, cpu=False, **OPTIONS) as server:
            first = [server.generate(ids, 16) for ids in prompts]
            server.wait_idle()
            count = -1
            while count != (count := sum(path.is_file() for path in folder.rglob("*"))) or count < 4 * 12:
                server.generate(prompt(5), 1)
        with running(tiny(seed=1), tmp_path / "second", *flags, cpu=False, **OPTIONS) as server:
            again = [server.generate(ids, 16) for ids in prompts]
            assert [got.cached for got in first + again] == [0] * 4 + [1408] * 4
            assert server.published()["hit_tokens_storage"] == 4 * 1408
            assert_as_cold(server, {f"prompt {i}": (ids, got) for i, (ids, got) in enumerate(zip(prompts, again))})
