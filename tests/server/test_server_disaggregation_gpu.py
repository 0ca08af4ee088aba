"""Prefill and decode server on two GPUs with NIXL: bf16 compute, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from reference.oracle import Oracle
from support.disaggregation import Disaggregated, a_pair, by, needs
from support.server import DRAFTS, RETRACTABLE, Generated, assert_near, greedy, only, prompt
from support.server_plugin import broken

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu]

# Up to 2,048 tokens the indexer selects all entries. Beyond that, noise swaps entries with nearly equal scores.
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700, 1900)
GENERATED = 40
COMMON = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "7936", "--enable-metrics")
COMMON += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--max-total-tokens", "65536")
EAGER = ("--disable-cuda-graph", "--disable-overlap-schedule")
HOST = ("--max-total-tokens", "8192", "--enable-hierarchical-cache", "--hicache-ratio", "8")
# 64 blocks, fewer than the requests need when they have grown.
SMALL = ("--max-total-tokens", "8192", "--max-running-requests", "64", "--num-reserved-decode-tokens", "128")
# Flags of both servers, of the prefill server and of the decode server.
SERVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "fp8": (("--chunked-prefill-size", "4096"), (), ()),
    "bf16, chunks of 256, no graphs, no overlap": (
        ("--chunked-prefill-size", "256", "--kv-cache-dtype", "bfloat16", *EAGER),
        (),
        (),
    ),
    "fp8, host cache": (("--chunked-prefill-size", "1024"), HOST, ()),
    "fp8, 3 drafts, decode server small": (
        ("--chunked-prefill-size", "1024", *DRAFTS),
        ("--max-running-requests", "64"),
        SMALL,
    ),
    "fp8, two GPUs each": (("--chunked-prefill-size", "1024", "--tp-size", "2"), (), ()),
    "fp8, two GPUs to one": (("--chunked-prefill-size", "1024"), ("--tp-size", "2"), ()),
    "fp8, one GPU to two": (("--chunked-prefill-size", "1024"), (), ("--tp-size", "2")),
}
Asked = list[tuple[list[int], Generated]]


@pytest.fixture(scope="module")
def model(name: str, tiny: Callable[..., Path]) -> Path:
    return tiny(seed=1, nextn="drafts" in name)


@pytest.fixture(scope="module")
def servers(name: str, plugin: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disaggregated]:
    """Start one pair after the other; `-k` selects some. Each server sees both GPUs because it maps the other's
    memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    needs("nixl")
    both, prefill, decode = SERVERS[name]
    flags = (*COMMON, *by("nixl"), *both)
    if "--tp-size" not in (*both, *decode):
        decode = (*decode, "--base-gpu-id", "1")
    with pytest.MonkeyPatch.context() as patch:
        # Both servers allocate memory at the same time, and the first requests wait for kernels to compile.
        patch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
        for wait in ("WAITING", "BOOTSTRAP"):
            patch.setenv(f"SGLANG_DISAGGREGATION_{wait}_TIMEOUT", "300")
        with a_pair(model, tmp_path_factory.mktemp("apart"), flags, prefill, decode) as servers:
            yield servers


@pytest.fixture
def check(servers: Disaggregated, oracle: Oracle, name: str) -> Callable[[Asked], None]:
    """Return a function that compares answers with the oracle as test_server_gpu.py does."""

    def checked(asked: Asked) -> None:
        servers.wait_idle()
        assert_near(oracle, asked, 0.025 if name.startswith("bf16") else 0.068)

    return checked


def test_one_at_a_time(servers: Disaggregated, check: Callable[[Asked], None]) -> None:
    """Answers are right on the first visit and on the second, for which cached prompts are transferred."""
    found = [[servers.generate(prompt(n), GENERATED) for n in LENGTHS] for _ in range(2)]
    assert [got.cached for got in found[1]] == [(n - 1) // 128 * 128 for n in LENGTHS]
    check([(prompt(n), got) for visit in found for n, got in zip(LENGTHS, visit)])


def test_batch_of_16(servers: Disaggregated, check: Callable[[Asked], None]) -> None:
    prompts = [prompt(n, seed) for seed in (5, 6) for n in LENGTHS][:16]
    check(list(zip(prompts, servers.generate_all(prompts, GENERATED))))


def test_next_turns_and_branches(servers: Disaggregated, check: Callable[[Asked], None]) -> None:
    """The next turn hits the previous prompt on the prefill server, which recomputes the generated tokens."""
    trunk = prompt(700, seed=7)
    first = servers.generate(trunk, 230)
    turn = [*trunk, *first.tokens, *prompt(30, seed=8)]
    branch = [*trunk[:333], *prompt(90, seed=9)]
    asked = [(ids, servers.generate(ids, GENERATED)) for ids in (turn, branch, branch)]
    assert asked[0][1].cached == 640 and asked[2][1].cached >= 256
    check([(trunk, first), *asked])


@only("fp8")
@pytest.mark.parametrize("kind", ["the last block stays behind", "the slot stays behind"])
def test_missing_transfers_are_detected(
    servers: Disaggregated, check: Callable[[Asked], None], plugin: Path, kind: str
) -> None:
    ids = prompt(250, seed=13)
    with broken(plugin, kind):
        wrong = servers.generate(ids, GENERATED)
    with pytest.raises(AssertionError, match="d log p"):
        check([(ids, wrong)])
    check([(ids, servers.generate(ids, GENERATED))])


@only("fp8, 3 drafts, decode server small")
def test_a_decode_server_that_is_full(servers: Disaggregated, check: Callable[[Asked], None]) -> None:
    """With 48 requests that grow to 400 tokens in 64 blocks, some wait on the host, and all answers are right."""
    prompts = [prompt(100 + 2 * i, seed=14) for i in range(48)]
    answers = servers.generate_all(prompts, sampling_params=RETRACTABLE)
    assert servers.retractions(), "no request was retracted, so the test checks nothing"
    check(list(zip(prompts[::6], answers[::6])))
    got = servers.post("/generate", greedy(prompt(1000, seed=43), 600))["meta_info"]
    assert got["completion_tokens"] / got["spec_verify_ct"] > 1.3, "few drafts are accepted after a transferred prompt"


@only("fp8, host cache")
def test_from_the_host(servers: Disaggregated, check: Callable[[Asked], None]) -> None:
    """24 prompts exceed the device. Their second visits load from the prefill server's host cache and are right."""
    prompts = [prompt(1500, seed=200 + i) for i in range(24)]
    visits = [[servers.generate(ids, 16) for ids in prompts] for _ in range(2)]
    assert [{got.cached for got in visit} for visit in visits] == [{0}, {1408}]
    assert servers.prefill.metrics()["hit_tokens_host"] > 12 * 1408, "too little came from the host"
    check(list(zip(prompts[::4], visits[1][::4])))
