"""Real servers for tests: each has its own process group and a free port, and is always stopped.

The tests wait for a server while it makes progress (liveness.py), so no result depends on the speed or load of the
machine.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import select
import shlex
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import torch
from reference.oracle import Oracle
from reference.oracle_v41 import OracleV41

from benchmarks import ports
from benchmarks.servers import one_core_each
from dsv4_sglang.cli.client import Server as Client
from dsv4_sglang.cli.client import samples
from dsv4_sglang.cli.server import Endpoint, RequestError, start, stop, wait_ready
from dsv4_sglang.requirements import plugin_fault
from dsv4_sglang.srt.launch.command import OPT_IN_FLAG, OPT_IN_KEY, server_command
from dsv4_sglang.srt.prefix_cache.metrics import PREFIX
from support import server_forkserver
from support.lifecycle import Driver, Shape, play
from support.liveness import LONG, POLL_SECONDS, STUCK_SECONDS, Process, Progress, wait
from support.memory_maps import shared_mappings

# On a machine with a GPU all servers of the tests use it.
CPU = not torch.cuda.is_available()
# Timeouts of SGLang that end a server: for the other processes of its group, and for a step.
UNHURRIED = ("--dist-timeout", "7200", "--watchdog-timeout", "7200")
# A host cache of four times the device's size. Servers of several test files use it.
HOST_CACHE = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
# Options of a cache without rounding.
FP32 = {"entry_format": "fp32", "indexer_format": "fp32"}
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1")
DRAFTS = (*EAGLE, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4")
# Sampling of requests that may be retracted: SGLang 0.5.23 reserves all tokens of one that ignores the end token.
RETRACTABLE = {"max_new_tokens": 256, "temperature": 0}
# The prefill chunk of the oracle.
CHUNK = 128
# Attempts of a test that needs several requests to run together. A busy machine may start them one after another.
ATTEMPTS = 5


@dataclass(frozen=True)
class Generated:
    """One answer of /generate: log p of each token, and the number of prompt tokens from the cache.

    others: log p of the other most likely tokens at each place. Empty if the tokens were given.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    others: list[dict[int, float]] = field(default_factory=list)


def greedy(prompt: Sequence[int], count: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a request for `count` tokens at temperature 0."""
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **fields}


def _request(prompt: Sequence[int], count: int) -> dict[str, Any]:
    return greedy(prompt, count, return_logprob=True, top_logprobs_num=4)


def _answer(meta: dict[str, Any]) -> Generated:
    pairs = meta["output_token_logprobs"]
    # The first of equally likely tokens in the list may differ from the sampled one.
    others = [
        {token: logprob for logprob, token, *_ in row if token != taken}
        for (_, taken, *_), row in zip(pairs, meta["output_top_logprobs"])
    ]
    return Generated([p[1] for p in pairs], [p[0] for p in pairs], meta["cached_tokens"], others)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. Raise ConnectionError if it ends without its end marker.

    If a server ends between two events, http.client reports a normal end of the answer.
    """
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    raise ConnectionError("the server broke the stream off")


class Server(Endpoint):
    """A server process and its requests. `fields` are default fields of every request."""

    def __init__(self, process: Process, port: int, log: Path) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self.process, self.port, self.log = process, port, log
        self.fields: dict[str, Any] = {}
        # True if a test has ended the server on purpose.
        self.killed = False

    def _response(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Wait for a response without a deadline. Fail if the server is stuck."""
        progress, answered = Progress(self.process), select.poll()  # also for descriptors beyond 1,023
        answered.register(connection.sock, select.POLLIN)
        while not answered.poll(1e3 * POLL_SECONDS):
            progress.check()
        return super()._response(connection)

    ready = server_forkserver.ready

    def post(self, path: str, body: Any = None) -> Any:
        return self.request(path, body, method="POST")

    def get(self, path: str) -> Any:
        return self.request(path)

    def generate(self, prompt: Sequence[int], count: int = 8, **fields: Any) -> Generated:
        body = {**_request(prompt, count), **self.fields, **fields}
        return _answer(self.post("/generate", body)["meta_info"])

    def begin(self, prompt: Sequence[int], count: int, generated: int, **fields: Any) -> Callable[[], Generated]:
        """Start a request and return once it has generated `generated` tokens.

        The returned function returns the whole answer.
        """
        body = {**_request(prompt, count), **self.fields, **fields, "stream": True}
        answer = ExitStack()
        events = _events(answer.enter_context(self.send("/generate", body)))
        for event in events:
            if event["meta_info"]["completion_tokens"] >= generated:
                break

        def rest() -> Generated:
            with answer:
                *_, last = events
            return _answer(last["meta_info"])

        return rest

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        count: int | Sequence[int] = 8,
        ranks: Sequence[int] | None = None,
        **fields: Any,
    ) -> list[Generated]:
        """Send all prompts at once, one connection each. `ranks` are their ranks of DP attention."""
        counts = [count] * len(prompts) if isinstance(count, int) else count
        own = [{} if ranks is None else on_rank(ranks[i]) for i in range(len(prompts))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids, n, rank: self.generate(ids, n, **rank, **fields), prompts, counts, own))

    def generate_batch(self, prompts: Sequence[Sequence[int]], count: int = 8) -> list[Generated]:
        """Send all prompts in one request, which the scheduler receives at once."""
        body = {**_request([], count), **self.fields, "input_ids": [list(prompt) for prompt in prompts]}
        return [_answer(answer["meta_info"]) for answer in self.post("/generate", body)]

    def cold(self, prompt: Sequence[int], count: int = 8) -> Generated:
        """Return the answer without a prefix hit. A new name space makes a flush unnecessary."""
        got = self.generate(prompt, count, extra_key=uuid.uuid4().hex)
        assert got.cached == 0
        return got

    def score(self, prompt: Sequence[int], tokens: Sequence[int], **fields: Any) -> Generated:
        """Return log p of `tokens` after `prompt`, teacher-forced: the tokens are computed as a prompt.

        SGLang scores the last id of the vocabulary as 0.
        """
        start = {"logprob_start_len": len(prompt) - 1}
        body = {**_request([*prompt, *tokens], 1), **start, **self.fields, **fields}
        meta = self.post("/generate", body)["meta_info"]
        pairs = meta["input_token_logprobs"][1:]
        assert len(pairs) == len(tokens) and all(p[1] in (token, 0) for p, token in zip(pairs, tokens))
        return Generated(list(tokens), [p[0] for p in pairs], meta["cached_tokens"])

    def metrics(self, prefix: str = PREFIX, rank: int = 0) -> dict[str, float]:
        """Return the values of /metrics by name, without `prefix` and the `_total` of counters.

        A labelled metric has one value per label value, such as `hit_tokens_host`, and their sum.

        Args:
            prefix: Prefix of the metrics to return.
            rank: Rank of DP attention.
        """
        found: dict[str, float] = defaultdict(float)
        for sample in samples(self.request("/metrics"), prefix):
            if "le" not in sample.labels and sample.labels.pop("dp_rank", str(rank)) == str(rank):
                name = sample.name.removeprefix(prefix).removesuffix("_total")
                for key in (name, *(f"{name}_{value}" for value in sample.labels.values())):
                    found[key] += sample.value
        return dict(found)

    def published(self) -> dict[str, float]:
        """Return `metrics` after a request, because the server publishes counters when a request begins or ends."""
        self.generate(prompt(5), 1)
        return self.metrics()

    def flush(self) -> None:
        """Empty the prefix cache. The server rejects this while requests run, such as those of clients that left."""
        progress, pause = Progress(self.process), 0.05
        while True:
            try:
                self.post("/flush_cache")
                return
            except RequestError:
                progress.check()
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)

    def busy(self) -> int:
        """Return the number of requests that run or wait on all ranks."""
        return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in self.get("/v1/loads")["loads"])

    def wait_idle(self) -> None:
        """Wait until no request runs. An idle SGLang checks its pools for leaks and exits if it finds one."""
        progress = Progress(self.process)
        while self.busy():
            progress.check()
            time.sleep(0.1)
        # The scheduler answers once per iteration of its loop. In the first it may still retire a step, in the second
        # it checks its pools, and in the third it answers only if it is alive.
        for _ in range(3):
            self.get("/server_info")

    def retractions(self) -> int:
        """Return the number of retractions for lack of memory in the log, summed over the processes."""
        return self.log_text().count("Retract requests")

    def kill(self) -> None:
        """Kill all processes of the server at once."""
        self.killed = True
        stop(self.process, grace_seconds=0)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def launched(model: Path, log: Path, flags: Sequence[str], options: dict[str, Any]) -> Iterator[Process]:
    """Start the server's process in a new process group, and stop it at the end.

    On a CPU each process of tensor parallelism gets cores of its own. On a GPU, DSV4_SGLANG_TEST_FLAGS holds additional
    flags that SGLang needs on this machine.
    """
    assert not (fault := plugin_fault()), fault
    if not CPU:
        flags = [*flags, *shlex.split(os.environ.get("DSV4_SGLANG_TEST_FLAGS", ""))]
    overrides = json.dumps({OPT_IN_KEY: options})
    command = server_command(str(model), ["--host", "127.0.0.1", *flags, OPT_IN_FLAG, overrides], cpu=CPU)
    if CPU:
        sizes = [int(value) for flag, value in pairwise(flags) if flag == "--tp-size"]
        if sizes and sizes[-1] > 1:
            command.environment["SGLANG_CPU_OMP_THREADS_BIND"] = one_core_each(sizes[-1])
        process: Process = server_forkserver.start(command, log)
    else:
        with log.open("wb") as output:
            process = start(command, output)
    try:
        yield process
    finally:
        stop(process, grace_seconds=0)  # SGLang checks for a SIGTERM every five seconds


@contextmanager
def running(model: Path, log: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """Yield a server that answers. Fail with the end of its log if it ends or is stuck, at the start or later."""
    # An idle scheduler would occupy a core that the oracle needs.
    base = ["--skip-server-warmup", "--sleep-on-idle", *UNHURRIED]
    with ports.reserved() as port, launched(model, log, [*ports.flags(port), *base, *flags], options) as process:
        server, progress = Server(process, port, log), Progress(process, log)
        wait_ready(server, lambda: progress.check() is None, math.inf)
        yield server
        if not server.killed:
            Progress(process, log).check()


def kv_hints(**actions: dict[str, Any]) -> dict[str, Any]:
    """Return the field `kv_hints` with the actions of these types and payloads."""
    listed = [
        {"action_id": kind, "action_type": kind, "action_version": "1", "payload": payload}
        for kind, payload in actions.items()
    ]
    return {"protocol_version": "1", "message_id": uuid.uuid4().hex, "actions": listed}


def empty_device(server: Server) -> None:
    """Release and resume the memory of the cache. A host cache keeps its contents."""
    server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


def on_rank(rank: int) -> dict[str, int]:
    """Return the request field that selects a rank of DP attention."""
    return {"routed_dp_rank": rank}


# The exceptions of a request whose server ends.
BROKEN_OFF = (RequestError, http.client.HTTPException, OSError, KeyError)


@contextmanager
def ends(server: Server) -> Iterator[list[psutil.Process]]:
    """Assert that the code inside makes the server exit with an error, and that none of its processes is left."""
    own = psutil.Process(server.process.pid)
    processes = [own, *own.children(recursive=True)]
    server.killed = True
    yield processes
    assert wait(server.process, server.log) != 0
    alive, since = processes, time.monotonic()
    # An ended process stays in the system's table until its parent waits for it.
    while alive := [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() - since < STUCK_SECONDS, alive
        time.sleep(0.05)
    with pytest.raises(OSError):
        server.get("/server_info")


def schedulers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if any("scheduler" in word for word in process.cmdline())]


def mappings_of(server: Server) -> list[list[dict[str, int]]]:
    """Return the mappings of shared host memory of each scheduler."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return [shared_mappings(process.pid) for process in schedulers(processes)]


def assert_one_copy(server: Server) -> None:
    """Assert that two processes map the same memory, for blocks and for snapshots, and that it exists once.

    Its size is that of the rows in the log.
    """
    first, second = mappings_of(server)
    assert len(first) == 2 and [found["inode"] for found in first] == [found["inode"] for found in second]
    logged = re.search(
        r"host cache of 2 processes: \d+ tokens in (\d+) blocks of (\d+) bytes, (\d+) snapshots of (\d+) bytes",
        server.log_text(),
    )
    assert logged is not None
    blocks, block_bytes, snapshots, snapshot_bytes = map(int, logged.groups())
    pages = sum(-(-size // 4096) for size in (blocks * block_bytes, snapshots * snapshot_bytes))
    taken = sum(found["Pss"] for found in (*first, *second))
    assert abs(taken - 4 * pages) <= 4, f"{taken} KiB for {4 * pages} KiB of rows"


def only(*names: str) -> pytest.MarkDecorator:
    """Run a test of a module with SERVERS on these servers only."""
    return pytest.mark.parametrize("name", names, indirect=True, scope="module")


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random ordinary tokens."""
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def distances(oracle: Oracle | OracleV41, ids: Sequence[int], got: Generated) -> torch.Tensor:
    """Return |log p of the server - log p of the oracle| for each generated token, teacher-forced."""
    return (torch.tensor(got.logprobs) - oracle.score(ids, got.tokens, chunk=CHUNK).logprobs).abs()


def assert_oracle_chooses(oracle: Oracle, ids: Sequence[int], got: Generated, tolerance: float) -> None:
    """Assert that each token of `got` is the oracle's most likely one, with the same log p."""
    score = oracle.score(ids, got.tokens, chunk=CHUNK)
    assert (torch.tensor(got.logprobs) - score.logprobs).abs().max() <= tolerance
    # The server's choice and the oracle's choice may each differ by the tolerance.
    assert score.margin.max() <= 2 * tolerance, "not the oracle's likeliest token"


def assert_near(oracle: Oracle, asked: Sequence[tuple[Sequence[int], Generated]], allowed: float) -> None:
    """Compare answers of bf16 compute with the oracle.

    The mean |d log p| is at most `allowed`, and no token is much less likely than the oracle's most likely one. A draft
    that was wrongly accepted is unlikely for both, so the first comparison alone would miss it.
    """
    scores = [oracle.score(ids, got.tokens, chunk=CHUNK) for ids, got in asked]
    apart = torch.cat([(torch.tensor(got.logprobs) - s.logprobs.cpu()).abs() for s, (_, got) in zip(scores, asked)])
    assert apart.mean() <= allowed, f"mean |d log p| {apart.mean():.4f} over {len(apart)} tokens"
    behind = torch.cat([s.margin.cpu() for s in scores])
    assert behind.max() <= 10 * allowed, f"{behind.max():.3f} behind the likeliest, at {int(behind.argmax())}"


def assert_as_near_as_the_format(oracle: Oracle, asked: Sequence[tuple[Sequence[int], Generated]]) -> None:
    """Assert that answers with FP8 entries and FP4 keys are about as far from fp32 as the oracle with these formats."""
    apart = []
    for ids, got in asked:
        exact = oracle.score(ids, got.tokens, chunk=CHUNK).logprobs
        quantised = oracle.score(ids, got.tokens, "fp8", "mxfp4", CHUNK).logprobs
        apart.append(torch.stack([torch.tensor(got.logprobs) - exact, quantised - exact]).abs())
    ours, format_alone = torch.cat(apart, 1).mean(1).tolist()
    assert ours <= 1.5 * format_alone, f"mean distance {ours:.4f}, the format alone {format_alone:.4f}"


def assert_right_though_retracted(server: Server, oracle: Oracle | OracleV41, tolerance: float, **fields: Any) -> None:
    """Assert that requests are right after a retraction.

    In a pool of eight blocks four requests grow to two blocks, then the first one needs a third. The last one is
    retracted and resumes later. All requests finish with the right answer. The test repeats if no request was retracted
    because the later requests began too late on a busy machine.
    """
    before, counts, ahead = server.retractions(), (150, 60, 60, 60), (70, 3, 3, 3)
    for seed in range(20, 20 + 10 * ATTEMPTS, 10):
        prompts = [prompt(n, seed=seed + i) for i, n in enumerate((140, 100, 100, 120))]
        # Each request begins while the previous one decodes. Otherwise SGLang would delay it until another one ends.
        running_requests = [server.begin(ids, count, at, **fields) for ids, count, at in zip(prompts, counts, ahead)]
        for ids, answer, count in zip(prompts, running_requests, counts):
            got = answer()
            assert len(got.tokens) == count
            assert distances(oracle, ids, got).max() <= tolerance
        if server.retractions() > before:
            break
    else:
        pytest.fail("no request was retracted, so the test checks nothing")
    server.wait_idle()


def assert_drafts_are_accepted(server: Server) -> None:
    """Assert that drafts are accepted as often after a prefix hit as cold."""
    ids, lengths = prompt(1000, seed=43), {}
    server.flush()
    for run in ("cold", "warm"):
        got = server.post("/generate", greedy(ids, 600, **server.fields))["meta_info"]
        lengths[run] = got["completion_tokens"] / got["spec_verify_ct"]
    print(f"tokens a speculative round {lengths}")
    assert got["cached_tokens"] == 896 and min(lengths.values()) > 1.3
    assert abs(lengths["cold"] - lengths["warm"]) < 0.25


def assert_burst(
    server: Server, oracle: Oracle, asked: Sequence[tuple[int, int, int]], seed: int, tolerance: float
) -> None:
    """Assert that simultaneous requests get the oracle's answers.

    A request is (tokens, tokens to generate, rank of DP attention).
    """
    prompts = [prompt(length, seed=seed + i) for i, (length, _, _) in enumerate(asked)]
    counts, ranks = [count for _, count, _ in asked], [rank for _, _, rank in asked]
    for ids, got, count in zip(prompts, server.generate_all(prompts, counts, ranks), counts):
        assert len(got.tokens) == count
        assert distances(oracle, ids, got).max() <= tolerance


def assert_a_rank_joins(server: Server, oracle: Oracle | OracleV41, steps: Path, tolerance: float) -> None:
    """Assert that decode steps of rank 0 are recorded prefill steps of a token per request while rank 1 prefills, and
    that answers and the next turns are right.

    The next turns hit the only snapshots of the conversations, at 128 tokens. At least one of them is taken in such a
    step. Requests with log-probabilities do not join.

    Args:
        server: server with ranks of DP attention that runs prefill steps like graphs (recorded_prefills.py).
        oracle: the model in fp32.
        steps: file of these steps.
        tolerance: largest |d log p|.
    """
    for attempt in range(20):
        server.flush()
        before = steps.read_text() if steps.exists() else ""
        asked = [prompt(length, seed=length + 1000 * attempt) for length in (125, 121, 117)]
        others: list[tuple[list[int], Generated]] = []
        done = Event()

        def keep_prefilling(others: list[tuple[list[int], Generated]] = others, done: Event = done) -> None:
            while not done.is_set():
                ids = prompt(300, seed=20 + len(others))
                others.append((ids, server.generate(ids, 1, **on_rank(1))))

        with ThreadPoolExecutor(1 + len(asked)) as pool:
            begun = pool.submit(keep_prefilling)
            try:
                while not others:
                    time.sleep(0.01)
                bodies = [greedy(ids, 24, **on_rank(0)) for ids in asked]
                answers = list(pool.map(lambda body: server.post("/generate", body), bodies))
            finally:
                done.set()
            begun.result()
        taken = [tuple(map(int, line.split()[1:])) for line in steps.read_text()[len(before) :].splitlines()]
        joined = [rolling for tokens, requests, rolling in taken if tokens == requests]
        assert len(joined) > 3
        if sum(joined):
            break
    assert sum(joined), "no snapshot was due in a joined step"
    for ids, answer in others:
        assert_oracle_chooses(oracle, ids, answer, tolerance)
    for ids, answer in zip(asked, answers, strict=True):
        assert oracle.score(ids, answer["output_ids"], chunk=CHUNK).margin.max() <= 2 * tolerance
        turn = [*ids, *answer["output_ids"], *prompt(20, seed=13)]
        warm = server.generate(turn, 4, **on_rank(0))
        assert warm.cached == 128
        assert_oracle_chooses(oracle, turn, warm, tolerance)


def assert_right_around_one_block(server: Server, oracle: Oracle, tolerance: float) -> None:
    """Assert that requests with a common prefix of a block, one token less and one more are right beside others.

    All begin at once, with an empty cache and then with a full one (SGLang's issue 22819).
    """
    prefix, found = prompt(129, seed=60), []
    asked = [prefix[:at] + prompt(30, seed=at) for at in (127, 128, 129, 0)] + [prefix[:128], prefix]
    server.flush()
    for _ in range(2):
        for ids, got in zip(asked, server.generate_all(asked, 8)):
            assert_oracle_chooses(oracle, ids, got, tolerance)
            found.append(got.cached)
    assert set(found) == {0, 128}


def assert_replays_are_equal(server: Server, oracle: Oracle, tolerance: float) -> None:
    """Assert that a prompt with eight opaque ids has one answer, however often it is sent at once to a cold cache.

    SGLang's own cache lost ids with five drafts and under load (its issues 33800 and 33872).
    """
    ids = [token for i in range(8) for token in prompt(18, seed=80 + i) * 2] + prompt(3)
    assert len(ids) == 291
    server.flush()
    answers = {tuple(got.tokens): got for got in server.generate_all([ids] * 12, 16)}
    for got in answers.values():
        assert_oracle_chooses(oracle, ids, got, tolerance)
    assert len(answers) == 1


def assert_right_beside_cancels(server: Server, oracle: Oracle, tolerance: float) -> None:
    """Assert that requests are right while others with their prefix are cancelled and sent again.

    Requests share a prefix of one block. Two are aborted after 15 and 19 ms, and repeat their request ids. Other
    requests arrive meanwhile (SGLang's issue 23392).
    """

    def retry(ids: list[int], seconds: float) -> Generated:
        rid = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.generate, ids, rid=rid)
            time.sleep(seconds)
            server.post("/abort_request", {"rid": rid})
            with suppress(RequestError, KeyError):  # an aborted answer has no log p
                first.result()
        return server.generate(ids, rid=rid)

    for seed in range(70, 73):
        prefix = prompt(128, seed=seed)
        cancelled = [(prefix + prompt(20, seed=seed), 0.015), (prefix + prompt(33, seed=seed), 0.019)]
        others = [prefix + prompt(41, seed=seed), prefix, prompt(90, seed=seed), prompt(150, seed=seed)]
        with ThreadPoolExecutor(len(cancelled) + len(others)) as pool:
            retries = [pool.submit(retry, *one) for one in cancelled]
            answers = [pool.submit(server.generate, ids) for ids in others]
        for ids, got in zip([*(ids for ids, _ in cancelled), *others], [*retries, *answers]):
            assert_oracle_chooses(oracle, ids, got.result(), tolerance)
    server.wait_idle()


def live(server: Server, ranks: int = 1) -> None:
    """Run a burst of the lifecycle fuzzer: all kinds of ends, parallel samples, chunks, and a pause that retracts all.

    The server needs the option integrity_check, fp32 KV entries and a context of 640 tokens or more.
    """
    driver = Driver(server.url, 2290, Shape(context=640, burst=10, ranks=ranks), tolerance=2e-3)
    play(driver, driver.shape.burst, LONG)
    wanted = {"pause retract", "compared warm", "ended by length"}  # the other operations may come too late
    assert wanted <= driver.seen.keys(), driver.seen
    server.wait_idle()


def assert_same(got: Generated, reference: Generated, tolerance: float) -> None:
    """Assert that both answers have the same tokens with the same log p. `got` may be shorter than `reference`.

    The answers may diverge at a near tie, where the two tokens are equally likely within the tolerances. The tokens
    after it are not compared, because they follow different texts.
    """
    count = len(got.tokens)
    assert 0 < count <= len(reference.tokens)
    parted = next((i for i in range(count) if got.tokens[i] != reference.tokens[i]), count)
    if parted < count:
        token, others = got.tokens[parted], reference.others[parted]
        logprob = others.get(token, float("-inf"))
        assert reference.logprobs[parted] - logprob <= 2 * tolerance, (
            f"token {parted} is {token}, not {reference.tokens[parted]} of log p {reference.logprobs[parted]:.4f}; "
            f"others of the likeliest: {others}"
        )
        reference = replace(reference, logprobs=[*reference.logprobs[:parted], logprob])
    compared = min(count, parted + 1)
    worst = (torch.tensor(got.logprobs[:compared]) - torch.tensor(reference.logprobs[:compared])).abs().max()
    assert worst <= tolerance, f"log p differs by {worst:.1e}"


def assert_sound(server: Server) -> None:
    """Assert that the integrity check of each rank finds nothing. The server has the option `integrity_check`."""
    server.wait_idle()
    reports = Client.at(server.url).integrity()
    assert reports and not any(report["findings"] for report in reports), reports


def against_cold(server: Server, ids: list[int], got: Generated) -> torch.Tensor:
    """Return |log p of the answer - log p of the same tokens, teacher-forced, without a prefix hit|."""
    cold = server.score(ids, got.tokens, extra_key=f"cold {time.monotonic_ns()}")
    assert cold.cached == 0
    return (torch.tensor(got.logprobs) - torch.tensor(cold.logprobs)).abs()


def assert_as_cold(server: Server, asked: dict[str, tuple[list[int], Generated]]) -> None:
    """Assert that each answer of bf16 compute, by its name, is as near to a cold answer as cold answers are to each
    other.

    The noise is the difference between a decoded cold answer and the same tokens computed as a prompt. A corrupt KV
    entry changes log p by 0.07 or more. With FP8 entries one answer in eight may be further away: entries of decode
    steps and of prefill steps are rounded differently, and on an H200 1 of 64 next turns was 0.10 away in every run.
    With bf16 entries none was.
    """
    noise = {name: against_cold(server, ids, server.cold(ids, len(got.tokens))) for name, (ids, got) in asked.items()}
    warm = {name: against_cold(server, ids, got) for name, (ids, got) in asked.items()}
    lines = [
        f"{name}: {len(ids)} tokens, {got.cached} cached: mean {warm[name].mean():.4f}, max {warm[name].max():.3f} at "
        f"{int(warm[name].argmax())}; cold {noise[name].mean():.4f}, {noise[name].max():.3f}"
        for name, (ids, got) in asked.items()
    ]
    print("\n".join(lines))
    floor = torch.cat(list(noise.values())).mean()
    wrong = [line for line, d in zip(lines, warm.values()) if d.mean() > 3 * floor + 0.02]
    allowed = 0 if server.get("/get_server_info")["kv_cache_dtype"] == "bfloat16" else len(lines) // 8
    assert len(wrong) <= allowed, "\n".join([f"noise {floor:.4f}; too far from cold:", *wrong])
