"""Servers on a GPU: bf16 compute, CUDA graphs.

Answers are compared with the oracle, because kernels round depending on the batch size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reference.oracle import Oracle
from support.server import (
    DRAFTS,
    EAGLE,
    RETRACTABLE,
    Generated,
    Server,
    assert_as_cold,
    assert_as_near_as_the_format,
    assert_drafts_are_accepted,
    assert_near,
    greedy,
    on_rank,
    only,
    prompt,
    running,
)

from dsv4_sglang.srt.attention.prefill_graphs import SIZES

pytestmark = [pytest.mark.server, pytest.mark.gpu]

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700)
GENERATED = 40
SMALL = 8192
CONTEXT = SMALL - 256
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", str(CONTEXT))
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--enable-metrics")
INTERVAL = 512
MODEL = {"seed": 1}
OPTIONS = {"snapshot_interval": INTERVAL, "max_snapshots": 128}
LARGE = ("--max-total-tokens", "65536", "--max-running-requests", "16", "--chunked-prefill-size")
RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
SERVERS: dict[str, tuple[str, ...]] = {
    "fp8": (*LARGE, "4096"),
    "fp8, 3 drafts": (*LARGE, "4096", *DRAFTS),
    "fp8, no graphs, no overlap, chunks of 128": (*LARGE, "128", "--disable-cuda-graph", "--disable-overlap-schedule"),
    "bf16, chunks of 256": (*LARGE, "256", "--kv-cache-dtype", "bfloat16"),
    # Every prefill step here is a graph and every decode step is eager, without overlap.
    "bf16, graphs for prefill only, no overlap": (
        *(*LARGE, "1920", "--kv-cache-dtype", "bfloat16"),
        *("--cuda-graph-backend-decode", "disabled", "--disable-overlap-schedule"),
    ),
    "bf16, graphs of chunks": (
        *(*LARGE, "4096", "--kv-cache-dtype", "bfloat16"),
        *("--cuda-graph-bs-prefill", *map(str, (*SIZES, 2048, 4096))),
    ),
    # Admits more requests than fit into the pool after they have grown.
    "fp8, small, 3 drafts": (
        *("--max-total-tokens", str(SMALL), "--max-running-requests", "64"),
        *("--schedule-conservativeness", "0.3", *DRAFTS),
    ),
    "fp8, two GPUs": (*LARGE, "4096", "--tp-size", "2"),
    "fp8, two GPUs, 3 drafts": (*LARGE, "4096", "--tp-size", "2", *DRAFTS),
    "fp8, two GPUs, 1 draft": (
        *(*LARGE, "4096", "--tp-size", "2"),
        *(*EAGLE, "--speculative-num-steps", "1", "--speculative-num-draft-tokens", "2"),
    ),
    # 16 requests and chunks of 4,096 tokens per rank.
    "fp8, two ranks": (*LARGE, "8192", "--max-running-requests", "32", *RANKS),
    "fp8, four ranks": (
        *(*LARGE, "16384", "--max-running-requests", "64"),
        *("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"),
    ),
    "fp8, two ranks, 3 drafts": (*LARGE, "8192", "--max-running-requests", "32", *RANKS, *DRAFTS),
    "fp8, small, two ranks, 3 drafts": (
        *("--max-total-tokens", str(SMALL), "--max-running-requests", "128"),
        *("--schedule-conservativeness", "0.3", *RANKS, *DRAFTS),
    ),
    "bf16, chunks of 256, two GPUs, 7 drafts": (
        *(*LARGE, "256", "--kv-cache-dtype", "bfloat16", "--tp-size", "2"),
        *(*EAGLE, "--speculative-num-steps", "7", "--speculative-num-draft-tokens", "8"),
    ),
}
PREFILL_GRAPHS = "bf16, graphs for prefill only, no overlap"
TWO_RANKS = ("fp8, two ranks", "fp8, two ranks, 3 drafts")
# Bounds of the mean distance from fp32, by the format of KV entries: rounding the entries gives a mean |d log p| of
# 0.004 (bf16) and 0.053 (FP8), and bf16 compute adds 0.014. One corrupted entry gives at least 0.07
# (tests/testing/test_make_tiny.py), and attention of one GPU of two about 1.
NEAR = {"bf16": 0.025, "fp8": 0.068}
Asked = list[tuple[list[int], Generated]]


@pytest.fixture
def check(server: Server, oracle: Oracle, name: str) -> Callable[[Asked], None]:
    """Return a function that compares answers with the oracle, after a flush."""
    server.flush()
    return lambda asked: assert_near(oracle, asked, NEAR[name.split(",")[0]])


def test_one_at_a_time(server: Server, check: Callable[[Asked], None]) -> None:
    check([(prompt(n), server.generate(prompt(n), GENERATED)) for n in LENGTHS])


def test_batch_of_16(server: Server, check: Callable[[Asked], None]) -> None:
    prompts = [prompt(n, seed) for seed in (0, 5) for n in LENGTHS][:16]
    check(list(zip(prompts, server.generate_all(prompts, GENERATED))))


@only("fp8, two GPUs", "bf16, chunks of 256, two GPUs, 7 drafts")
def test_as_on_one_gpu(server: Server, name: str, flags: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    """Log p of two GPUs, cold, after hits and in a batch, are those of one GPU, of the same tokens."""
    server.flush()
    prompts = [prompt(n, seed=50) for n in LENGTHS]
    answers = [server.generate(ids, GENERATED) for ids in prompts for _ in range(2)]
    answers += server.generate_all(prompts, GENERATED)
    alone = tuple(word for word, before in zip(flags, ("", *flags)) if "--tp-size" not in (word, before))
    apart = []
    with running(model, tmp_path / "log", *alone, **OPTIONS) as one:
        for ids, got in zip([ids for ids in prompts for _ in range(2)] + prompts, answers):
            apart += [abs(a - b) for a, b in zip(got.logprobs, one.score(ids, got.tokens).logprobs)]
    assert sum(apart) / len(apart) <= NEAR[name.split(",")[0]]


@only("fp8", "bf16, chunks of 256", "fp8, 3 drafts", "fp8, two GPUs", PREFILL_GRAPHS)
def test_prefill_graphs(server: Server, check: Callable[[Asked], None]) -> None:
    """Short prefill steps after prefix hits run as graphs, alone and in a batch, with snapshots inside the step."""
    trunk = prompt(1500, seed=30)
    for length in (1500, 400, 300):  # leave snapshots at 1408, 384 and 256 tokens
        server.generate(trunk[:length], 1)
    mark = len(server.log_text())
    alone = [trunk[: 1408 - 128 * i] + prompt(new, seed=31) for i, new in enumerate((1, 3, 4, 33, 127, 128, 129, 255))]
    alone += [trunk[: 384 - 128 * i] + prompt(new, seed=32) for i, new in enumerate((5, 200))]
    asked = [(ids, server.generate(ids, GENERATED)) for ids in alone]
    together = [ids + prompt(20 + i, seed=33) for i, ids in enumerate(alone)]
    asked += list(zip(together, server.generate_all(together, GENERATED)))
    check(asked)
    assert all(got.cached for _, got in asked)
    steps = [line for line in server.log_text()[mark:].splitlines() if "Prefill batch" in line]
    assert all("cuda graph: True" in line for line in steps), steps


@only("bf16, graphs of chunks")
def test_chunks_in_graphs(server: Server, check: Callable[[Asked], None]) -> None:
    """Chunks run as graphs, cold and behind a prefix. The oracle has all index entries, as up to 2,048 tokens do. From
    then on answers are compared with each other: eager steps, other chunks and graphs compute the same."""
    mark = len(server.log_text())
    check([(prompt(n, seed=40), server.generate(prompt(n, seed=40), GENERATED)) for n in (1921, 2000, 2048)])
    asked = {}
    for seed, behind, length in ((41, 0, 4096), (42, 0, 7000), (43, 1408, 5600), (44, 3000, 7200)):
        ids = prompt(length, seed=seed)
        if behind:
            server.generate(ids[:behind], 1)
        asked[f"{length} behind {behind}"] = ids, server.generate(ids, GENERATED)
    sizes = [
        (int(line.split("#new-token: ")[1].split(",")[0]), "cuda graph: True" in line)
        for line in server.log_text()[mark:].splitlines()
        if "Prefill batch" in line
    ]
    assert all(in_graph == (new <= 2048 or new >= 3072) for new, in_graph in sizes), sizes
    assert sum(new == 4096 for new, _ in sizes) == 4 and (3000, False) in sizes, sizes
    assert_as_cold(server, asked)


@only(PREFILL_GRAPHS)
def test_duplicates_beside_running_requests(server: Server) -> None:
    """A decode step stores a running request's snapshot in the slot that a duplicate prompt has just freed. The graph
    of the prefill step before it has already made its copies, so that the slot keeps the running request's state."""
    server.flush()
    prompts, mark = [prompt(100 + i, seed=50) for i in range(12)], len(server.log_text())
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.generate_all, prompts, GENERATED)
        pairs = 0
        while not answers.done():
            duplicates = [prompt(150, seed=100 + pairs)] * 2
            server.post("/generate", {**greedy([], 1), "input_ids": duplicates})
            pairs += 1
    asked = {}
    for ids, answer in zip(prompts, answers.result()):
        following = ids + answer.tokens + prompt(60, seed=51)
        asked[f"after {len(ids)}, beside {pairs} pairs"] = following, server.generate(following, 16)
    assert [got.cached for _, got in asked.values()] == [128] * len(prompts)
    assert_as_cold(server, asked)
    steps = [
        line for line in server.log_text()[mark:].splitlines() if "Prefill batch" in line or "Decode batch" in line
    ]
    assert all(("Prefill batch" in line) == ("cuda graph: True" in line) for line in steps), steps


@only("fp8, small, 3 drafts", "fp8, small, two ranks, 3 drafts")
def test_more_requests_than_fit(server: Server, check: Callable[[Asked], None]) -> None:
    """With 48 requests that grow to 400 tokens in a pool of 8,192, some are retracted, and all answers are right.

    The second rank of DP attention is idle.
    """
    prompts = [prompt(100 + 2 * i, seed=7) for i in range(48)]
    answers = server.generate_all(prompts, sampling_params=RETRACTABLE)
    assert server.retractions(), "no request was retracted, so the test checks nothing"
    check(list(zip(prompts[::6], answers[::6])))
    server.wait_idle()


@only(*TWO_RANKS)
def test_both_ranks_at_once(server: Server, check: Callable[[Asked], None]) -> None:
    """Answers are right in steps in which both ranks decode, one prefills, or one is idle, with and without graphs."""
    asked = [
        (n, 10 * (1 + i % 4), i % 2 if i < 8 else 1) for i, n in enumerate((*LENGTHS, 2000, 64, 30, 5, 1, 900, 17))
    ]
    prompts = [prompt(n, seed=30 + i) for i, (n, _, _) in enumerate(asked)]
    got = server.generate_all(prompts, [count for _, count, _ in asked], [rank for _, _, rank in asked])
    assert [len(answer.tokens) for answer in got] == [count for _, count, _ in asked]
    check(list(zip(prompts, got)))
    server.wait_idle()


@only("fp8, two ranks")
def test_a_prefill_graph_beside_an_idle_rank(server: Server) -> None:
    """Short prefill steps run as graphs while the other rank is idle, and the idle rank keeps its own prefixes."""
    server.flush()
    trunks, asked = [prompt(700, seed=60 + rank) for rank in (0, 1)], {}
    for rank, trunk in enumerate(trunks):
        server.generate(trunk, 1, **on_rank(rank))
    mark = len(server.log_text())
    for turn, rank in enumerate((0, 1, 0)):
        ids = [*trunks[rank][:640], *prompt(40, seed=62 + turn)]
        asked[f"turn {turn}"] = ids, server.generate(ids, GENERATED, **on_rank(rank))
    steps = [line for line in server.log_text()[mark:].splitlines() if "Prefill batch" in line]
    assert [got.cached for _, got in asked.values()] == [640] * 3
    assert all("cuda graph: True" in line for line in steps), steps
    assert_as_cold(server, asked)


@only("fp8, two ranks", "fp8, four ranks")
def test_a_decoding_rank_joins_prefill_graphs(server: Server, oracle: Oracle) -> None:
    """Prefill steps of a rank are graphs while another decodes, and the next turns hit what was decoded in them.

    Two of four ranks are idle. Steps with a rolling snapshot are eager. Requests with log-probabilities do not join.
    The decoded tokens differ from run to run, and after some of them the formats alone are 0.13 from fp32.
    """
    server.flush()
    asked, mark = [prompt(length, seed=90) for length in (70, 100, 130)], len(server.log_text())
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(server.post, "/generate", greedy(ids, 500, **on_rank(0))) for ids in asked]
        for seed in itertools.count(100):
            server.post("/generate", greedy(prompt(700, seed=seed), 1, **on_rank(1)))
            if all(answer.done() for answer in answers):
                break
    steps = [line for line in server.log_text()[mark:].splitlines() if "Prefill batch" in line]
    assert len(steps) > 10 and sum("cuda graph: True" in line for line in steps) > len(steps) / 2, steps
    prompts = [[*ids, *answer.result()["output_ids"], *prompt(20, seed=91)] for ids, answer in zip(asked, answers)]
    warm = [server.generate(ids, GENERATED, **on_rank(0)) for ids in prompts]
    assert [got.cached for got in warm] == [(len(ids) + 499) // 128 * 128 for ids in asked]
    assert_as_near_as_the_format(oracle, list(zip(prompts, warm)))


@only("fp8, two ranks")
def test_decode_of_every_size(server: Server, check: Callable[[Asked], None]) -> None:
    """Decode graphs of 1 to 16 requests are right: SGLang pads the rows of the ranks differently for small steps."""
    for count in (1, 2, 3, 5, 8, 13, 16):
        prompts = [prompt(20 + 9 * i, seed=70 + count) for i in range(count)]
        ranks = [i % 2 if count > 2 else 0 for i in range(count)]
        got = server.generate_all(prompts, [GENERATED] * count, ranks)
        check(list(zip(prompts, got)))


@only(*TWO_RANKS)
def test_hits_are_those_of_a_rank(server: Server, check: Callable[[Asked], None]) -> None:
    ids = prompt(700, seed=42)
    found = [server.generate(ids, GENERATED, **on_rank(rank)) for rank in (0, 1, 0, 1)]
    assert [got.cached for got in found] == [0, 0, 640, 640]
    check([(ids, got) for got in found])
    assert all(server.metrics(rank=rank)["hit_tokens"] >= 640 for rank in (0, 1))


@only(*(name for name in SERVERS if "drafts" in name))
def test_drafts_are_accepted(server: Server) -> None:
    """The acceptance length of this model hardly depends on the draft model's KV entries; test_server_drafts_gpu.py
    compares the draft model's output.
    """
    assert_drafts_are_accepted(server)


# Warm answers equal cold ones


def test_5000_tokens(server: Server) -> None:
    """A prompt of 5,000 tokens and a branch hit the cache and are as close as cold answers.

    Where the indexer omits entries, noise swaps entries with nearly equal scores, in cold runs too.
    """
    server.flush()
    trunk = prompt(5000, seed=12)
    server.generate(trunk, 1)
    branch = trunk[:4321] + prompt(60, seed=13)
    asked = {"repeated": (trunk, server.generate(trunk, 16)), "branch": (branch, server.generate(branch, 16))}
    assert [got.cached for _, got in asked.values()] == [4992, 4321 // INTERVAL * INTERVAL]
    assert_as_cold(server, asked)


def test_branches_anywhere(server: Server) -> None:
    """Branches around a block boundary and inside a block hit the cache and are right, twice and then all at once."""
    server.flush()
    trunk, asked = prompt(1500, seed=14), {}
    server.generate(trunk, 1)
    branches = {at: trunk[:at] + prompt(50, seed=at) for at in (511, 512, 513, 700, 1279, 1280, 1281, 1400)}
    for at, ids in branches.items():
        first = server.generate(ids, 16)
        second = trunk[:at] + prompt(40, seed=at + 1)
        asked[f"first at {at}"] = ids, first
        asked[f"second at {at}"] = second, server.generate(second, 16)
        # The first branch takes a snapshot where it leaves the trunk.
        assert [first.cached >= at // INTERVAL * INTERVAL, asked[f"second at {at}"][1].cached] == [
            True,
            at // 128 * 128,
        ]
    for (at, ids), got in zip(branches.items(), server.generate_all(list(branches.values()), 16)):
        asked[f"again at {at}, together"] = ids, got
    assert_as_cold(server, asked)


@pytest.mark.parametrize("count", [1, 700])
def test_next_turns(server: Server, count: int) -> None:
    """Next turns of eight concurrent conversations hit snapshots taken in decode, also inside CUDA graphs."""
    server.flush()
    first = [prompt(150 + 37 * i, seed=15) for i in range(8)]
    turns = server.generate_all(first, count)
    asked = {}
    for ids, turn in zip(first, turns):
        following = ids + turn.tokens + prompt(60, seed=16)
        asked[f"after {len(ids)} + {count}"] = following, server.generate(following, 16)
        # The next turn computes the last token of an answer. In a full pool the hit may be shorter.
        assert asked[f"after {len(ids)} + {count}"][1].cached <= (len(ids) + count - 1) // 128 * 128
    if server.get("/get_server_info")["max_total_num_tokens"] > SMALL:
        expected = [(len(ids) + count - 1) // 128 * 128 for ids in first]
        assert [got.cached for _, got in asked.values()] == expected
    assert_as_cold(server, asked)


def test_a_branch_off_a_running_request(server: Server) -> None:
    server.flush()
    ids = prompt(700, seed=17)
    branch = ids[:600] + prompt(50, seed=18)
    running_request = server.begin(ids, 1200, 10)
    asked = {"branch": (branch, server.generate(branch, 16))}
    assert server.busy(), "the request that it branches off had ended"
    whole = running_request()
    last = Generated(whole.tokens[-200:], whole.logprobs[-200:], 0)
    asked["the other"] = ids + whole.tokens[:-200], last
    assert asked["branch"][1].cached == 512
    assert_as_cold(server, asked)


def test_copies_are_timed(server: Server) -> None:
    """Copies are timed by CUDA events without synchronization."""
    ids = prompt(1500, seed=21)
    server.flush()
    for _ in range(3):
        server.generate(ids, 1)
    time.sleep(0.2)
    found = server.published()
    assert 0 < found["snapshot_timed_bytes"] <= found["snapshot_copied_bytes"], found
    rate = found["snapshot_timed_bytes"] / found["snapshot_copy_seconds"] / 1e9
    print(f"{found['snapshot_timed_bytes'] / 1e6:.1f} MB at {rate:.0f} GB/s")
    # Snapshots of this model are small (0.6 MB), so launch overhead takes most of the time.
    assert 0.5 < rate < 10_000, found


def test_graphs_keep_what_they_write_to(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Decode is right after a prefill that needs more scratch than the 16 MiB of the CUDA graphs, and after a flush.

    The flush returns unused memory to CUDA, and the decode steps run the indexer's selection.
    """
    context = 1 << 20
    flags = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", str(context))
    flags += ("--max-total-tokens", str(context + 65536), "--max-running-requests", "16")
    flags += ("--chunked-prefill-size", "4096")
    model, ids = tiny(seed=1, context=context), prompt(4000, seed=23)
    with running(model, tmp_path / "log", *flags) as server:
        first = server.generate(ids, 16)
        server.flush()
        again = server.generate(ids, 16)
        assert again.cached == 0 and again.tokens == first.tokens
