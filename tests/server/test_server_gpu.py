"""Servers on a GPU: bf16 compute, CUDA graphs.

Answers are compared with the oracle, because kernels round depending on the batch size.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import server_harness
import torch
from server_harness import (
    DRAFTS,
    EAGLE,
    Generated,
    Server,
    assert_as_cold,
    assert_drafts_are_accepted,
    on_rank,
    prompt,
    running,
)

from benchmarks.reference.oracle import Oracle
from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.gpu]

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700)
GENERATED = 40
CONTEXT = 8192
COMMON = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", str(CONTEXT))
COMMON += ("--cuda-graph-max-bs-decode", "16", "--enable-metrics")
INTERVAL = 512
OPTIONS = {"snapshot_interval": INTERVAL, "max_snapshots": 128}
LARGE = ("--max-total-tokens", "65536", "--max-running-requests", "16", "--chunked-prefill-size")
SERVERS: dict[str, tuple[str, ...]] = {
    "fp8": (*LARGE, "4096"),
    "fp8, no graphs, no overlap, chunks of 128": (*LARGE, "128", "--disable-cuda-graph", "--disable-overlap-schedule"),
    "bf16, chunks of 256": (*LARGE, "256", "--kv-cache-dtype", "bfloat16"),
    # Admits more requests than fit into the pool after they have grown.
    "fp8, small": (
        *("--max-total-tokens", str(CONTEXT), "--max-running-requests", "64"),
        *("--schedule-conservativeness", "0.3"),
    ),
    "fp8, two GPUs": (*LARGE[:-1], "--tp-size", "2"),
    # 16 requests and chunks of 4,096 tokens per rank.
    "fp8, two ranks": (
        *(*LARGE, "8192", "--max-running-requests", "32"),
        *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    ),
}
SERVERS |= {
    f"{name}, 3 drafts": (*SERVERS[name], *DRAFTS)
    for name in ("fp8", "fp8, small", "fp8, two ranks", "fp8, no graphs, no overlap, chunks of 128")
}
SERVERS["bf16, chunks of 256, two GPUs, 7 drafts"] = (
    *(*SERVERS["bf16, chunks of 256"], *EAGLE, "--speculative-num-steps", "7", "--speculative-num-draft-tokens", "8"),
    *("--tp-size", "2"),
)
GPUS = {name: 2 for name in SERVERS if "two" in name}
# Prefix hits depend on the rank. Tests that assume a single cache leave the second rank idle.
FIELDS = {name: on_rank(0) for name in SERVERS if "ranks" in name}
# Maximum mean |d log p|. Rounding the entries gives 0.004 (bf16) and 0.053 (FP8), and bf16 compute adds 0.014. One
# corrupted entry gives at least 0.07 (tests/test_make_tiny.py).
ALLOWED = {name: 0.025 if name.startswith("bf16") else 0.068 for name in SERVERS}


def drafts(name: str) -> bool:
    """Return True if the server speculates. Its checkpoint has a NextN layer and a different head."""
    return "drafts" in name


@pytest.fixture(scope="module")
def oracle(tiny: Callable[..., Path]) -> Callable[[str], Oracle]:
    """Return the oracle of a server's model by the name of the server."""
    return functools.cache(lambda name: Oracle(tiny(seed=1, nextn=drafts(name)), device="cuda"))


@pytest.fixture(scope="module", params=SERVERS)
def name(request: pytest.FixtureRequest) -> str:
    if GPUS.get(request.param, 1) > torch.cuda.device_count():
        pytest.skip(f"needs {GPUS[request.param]} GPUs")
    return request.param


@pytest.fixture(scope="module")
def server(name: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server after the other; `-k` selects some, for parallel runs on several GPUs."""
    flags = (*COMMON, *SERVERS[name])
    log = tmp_path_factory.mktemp("gpu") / "log"
    with running(tiny(seed=1, nextn=drafts(name)), log, *flags, cpu=False, **OPTIONS) as server:
        server.fields = FIELDS.get(name, {})
        yield server


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names, indirect=True, scope="module")


def assert_near(oracle: Callable[[str], Oracle], name: str, asked: list[tuple[list[int], Generated]]) -> None:
    server_harness.assert_near(oracle(name), asked, ALLOWED[name])


def test_one_at_a_time(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    server.flush()
    assert_near(oracle, name, [(prompt(n), server.generate(prompt(n), GENERATED)) for n in LENGTHS])


def test_batch_of_16(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    server.flush()
    prompts = [prompt(n, seed) for seed in (0, 5) for n in LENGTHS][:16]
    assert_near(oracle, name, list(zip(prompts, server.generate_all(prompts, GENERATED))))


@only("fp8", "bf16, chunks of 256", "fp8, 3 drafts")
def test_prefill_graphs(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    """Short prefill steps after prefix hits run as graphs, alone and in a batch, with snapshots inside the step."""
    server.flush()
    trunk = prompt(1500, seed=30)
    for length in (1500, 400, 300):  # leave snapshots at 1408, 384 and 256 tokens
        server.generate(trunk[:length], 1)
    mark = len(server.log_text())
    alone = [trunk[: 1408 - 128 * i] + prompt(new, seed=31) for i, new in enumerate((1, 3, 4, 33, 127, 128, 129, 255))]
    alone += [trunk[: 384 - 128 * i] + prompt(new, seed=32) for i, new in enumerate((5, 200))]
    asked = [(ids, server.generate(ids, GENERATED)) for ids in alone]
    together = [ids + prompt(20 + i, seed=33) for i, ids in enumerate(alone)]
    asked += list(zip(together, server.generate_all(together, GENERATED)))
    assert_near(oracle, name, asked)
    assert all(got.cached for _, got in asked)
    steps = [line for line in server.log_text()[mark:].splitlines() if "Prefill batch" in line]
    assert all("cuda graph: True" in line for line in steps), steps


def test_warm(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    """A repeated prompt, the next turn and a branch inside a block hit the cache and are as close as cold answers."""
    server.flush()
    trunk = prompt(700)
    first = server.generate(trunk, 230)
    turn = [*trunk, *first.tokens, *prompt(30, seed=3)]
    branch = [*trunk[:333], *prompt(90, seed=4)]
    asked = [(ids, server.generate(ids, GENERATED)) for ids in (trunk, turn, branch, branch)]
    assert [got.cached >= 128 for _, got in asked[:2]] == [True, True]
    assert_near(oracle, name, asked)


def test_slots_used_by_200_others(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    for seed in range(10):
        server.generate_all([prompt(1 + (7 * i + seed) % 23, seed=100 + seed) for i in range(20)], 3)
    server.wait_idle()
    server.flush()
    assert_near(oracle, name, [(prompt(n), server.generate(prompt(n), GENERATED)) for n in (1, 3, 129, 300)])


def test_abort_then_right(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    with ThreadPoolExecutor(1) as other:
        aborted = other.submit(server.generate, prompt(128), 7000, rid="to-abort")
        while not server.busy():
            pass
        server.post("/abort_request", {"rid": "to-abort"})
        assert len(aborted.result(60).tokens) < 7000
    server.wait_idle()
    server.flush()
    assert_near(oracle, name, [(prompt(n), server.generate(prompt(n), GENERATED)) for n in (5, 300)])


def test_longer_than_the_context(server: Server) -> None:
    with pytest.raises(RequestError) as rejected:
        server.generate(prompt(CONTEXT), 4)
    assert rejected.value.code == 400 and str(CONTEXT) in rejected.value.text
    assert server.generate([5], 4).tokens
    server.wait_idle()


@only("fp8, small", "fp8, small, 3 drafts")
def test_more_requests_than_fit(server: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    """With 48 requests that grow to 400 tokens in a pool of 8,192, some are retracted, and all answers are right."""
    prompts = [prompt(100 + 2 * i, seed=7) for i in range(48)]
    answers = server.generate_all(prompts, 256, ignore_eos=False)
    assert server.retractions(), "no request was retracted, so the test checks nothing"
    assert_near(oracle, name, list(zip(prompts[::6], answers[::6])))
    server.wait_idle()


two_ranks = only(*(name for name in SERVERS if "ranks" in name))


@pytest.fixture
def ranks(server: Server) -> Server:
    """Server with two DP attention ranks and empty caches."""
    server.flush()
    return server


@two_ranks
def test_both_ranks_at_once(ranks: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    """Answers are right in steps in which both ranks decode, one prefills, or one is idle, with and without graphs."""
    asked = [
        (n, 10 * (1 + i % 4), i % 2 if i < 8 else 1) for i, n in enumerate((*LENGTHS, 2000, 64, 30, 5, 1, 900, 17))
    ]
    prompts = [prompt(n, seed=30 + i) for i, (n, _, _) in enumerate(asked)]
    got = ranks.generate_all(prompts, [count for _, count, _ in asked], [rank for _, _, rank in asked])
    assert [len(answer.tokens) for answer in got] == [count for _, count, _ in asked]
    assert_near(oracle, name, list(zip(prompts, got)))
    ranks.wait_idle()


@two_ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_is_idle(ranks: Server, oracle: Callable[[str], Oracle], name: str, rank: int) -> None:
    asked = [(prompt(n), ranks.generate(prompt(n), GENERATED, **on_rank(rank))) for n in LENGTHS]
    assert_near(oracle, name, asked)


@two_ranks
def test_hits_are_those_of_a_rank(ranks: Server, oracle: Callable[[str], Oracle], name: str) -> None:
    ids = prompt(700, seed=42)
    found = [ranks.generate(ids, GENERATED, **on_rank(rank)) for rank in (0, 1, 0, 1)]
    assert [got.cached for got in found] == [0, 0, 640, 640]
    assert_near(oracle, name, [(ids, got) for got in found])
    assert all(ranks.metrics(rank=rank)["hit_tokens"] >= 640 for rank in (0, 1))


@only("fp8", "fp8, 3 drafts")
def test_samples_follow_the_distribution(server: Server, name: str) -> None:
    """At temperature 1 sampled tokens follow their reported log p, also where drafts are accepted or rejected.

    A chi-squared test over the ranks of the sampled tokens, 1 to 20 and all others, for 10^5 tokens of 64 requests.
    """
    ranks, count, requests = 20, 1600, 64

    def one(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        sampling = {"max_new_tokens": count, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt(50, seed=60 + seed), "return_logprob": True, "top_logprobs_num": ranks}
        meta = server.post("/generate", {**body, "sampling_params": sampling, **server.fields})["meta_info"]
        top = meta["output_top_logprobs"]
        likely = torch.tensor([[entry[0] for entry in row] for row in top], dtype=torch.float64).exp()
        expected = torch.cat([likely, (1 - likely.sum(1, keepdim=True)).clamp_min(0)], 1).sum(0)
        names = [[entry[1] for entry in row] for row in top]
        came = [pair[1] for pair in meta["output_token_logprobs"]]
        at = [row.index(token) if token in row else ranks for row, token in zip(names, came)]
        return expected, torch.bincount(torch.tensor(at), minlength=ranks + 1).double()

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(requests)))
    expected, came = sum(e for e, _ in found), sum(c for _, c in found)
    assert isinstance(expected, torch.Tensor) and isinstance(came, torch.Tensor)
    statistic = float(((came - expected) ** 2 / expected).sum())
    print(f"{name}: chi-squared {statistic:.1f} of {ranks} degrees of freedom, {int(came.sum())} tokens")
    # 99.9999 % quantile of chi-squared with 20 degrees of freedom.
    assert statistic < 65.4, (came, expected)


@only(*filter(drafts, SERVERS))
def test_drafts_are_accepted(server: Server, name: str) -> None:
    """The acceptance length of this model hardly depends on the draft model's KV entries; test_server_drafts_gpu.py
    compares the draft model's output.
    """
    assert_drafts_are_accepted(server, name)


# Warm answers equal cold ones


def test_repeated_prompts(server: Server) -> None:
    asked = {}
    for length in (129, 256, 300, 1500):
        ids = prompt(length, seed=11)
        server.generate(ids, 1)
        asked[f"repeated {length}"] = ids, server.generate(ids, 16)
    found = {name: got.cached for name, (_, got) in asked.items()}
    assert found == {name: (len(ids) - 1) // 128 * 128 for name, (ids, _) in asked.items()}
    assert_as_cold(server, asked)


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
    if server.get("/get_server_info")["max_total_num_tokens"] > CONTEXT:
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


@only("fp8, small", "fp8, small, 3 drafts")
def test_after_eviction_and_a_flush(server: Server) -> None:
    """In the small pool, evicted prompts are right, and a flush clears the cache."""
    ids = prompt(1400, seed=19)
    server.flush()
    server.generate(ids, 1)
    server.generate(prompt(7000, seed=20), 1)
    found = [server.generate(ids, 16) for _ in range(2)]
    assert found[0].cached < found[1].cached == 1280, [got.cached for got in found]
    assert_as_cold(server, {f"evicted and back, {i}": (ids, got) for i, got in enumerate(found)})
    server.flush()
    assert server.generate(ids, 1).cached == 0
    server.wait_idle()


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
    with running(model, tmp_path / "log", *flags, cpu=False) as server:
        first = server.generate(ids, 16)
        server.flush()
        again = server.generate(ids, 16)
        assert again.cached == 0 and again.tokens == first.tokens
