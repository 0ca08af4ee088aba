"""Real servers for tests: one process group a set of flags, a free port, a bounded wait, always stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_sglang.cli.demo import free_port
from dsv4_sglang.srt import launch
from dsv4_sglang.testing.oracle import KeyFormat, Oracle, RowFormat

START_SECONDS = 240
REQUEST_SECONDS = 240
# SGLang answers a SIGTERM only when its step is over; then it is killed.
STOP_SECONDS = 3


@dataclass(frozen=True)
class Generated:
    """One answer of /generate: log p of each token, and how many tokens of the prompt were in the cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def _request(prompt: Sequence[int], count: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(prompt), "return_logprob": True, "sampling_params": sampling}


def _answer(meta: dict[str, Any]) -> Generated:
    pairs = meta["output_token_logprobs"]
    return Generated([p[1] for p in pairs], [p[0] for p in pairs], meta["cached_tokens"])


class Server:
    """A server process and the little HTTP that tests need."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log

    def post(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.loads(response.read())

    def generate(self, prompt: Sequence[int], count: int = 8, **fields: Any) -> Generated:
        return _answer(self.post("/generate", {**_request(prompt, count), **fields})["meta_info"])

    def begin(self, prompt: Sequence[int], count: int, generated: int) -> Callable[[], Generated]:
        """Start a request and return once it has generated so many tokens. Call for the whole answer."""
        body = json.dumps({**_request(prompt, count), "stream": True}).encode()
        request = urllib.request.Request(self.url + "/generate", body, {"Content-Type": "application/json"})
        response = urllib.request.urlopen(request, timeout=REQUEST_SECONDS)
        lines = (line[5:] for line in response if line.startswith(b"data:") and b"[DONE]" not in line)
        for line in lines:
            meta = json.loads(line)["meta_info"]
            if meta["completion_tokens"] >= generated:
                break

        def rest() -> Generated:
            with response:
                last = list(lines)[-1]
            return _answer(json.loads(last)["meta_info"])

        return rest

    def generate_all(self, prompts: Sequence[Sequence[int]], count: int | Sequence[int] = 8) -> list[Generated]:
        """All prompts at once, one connection each."""
        counts = [count] * len(prompts) if isinstance(count, int) else count
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.generate, prompts, counts))

    def cold(self, prompt: Sequence[int], count: int = 8) -> Generated:
        """The answer without a prefix hit: in a name space of its own, so that nothing has to be flushed."""
        got = self.generate(prompt, count, extra_key=uuid.uuid4().hex)
        assert got.cached == 0
        return got

    def cold_all(self, prompts: Sequence[Sequence[int]], count: int | Sequence[int] = 8) -> list[Generated]:
        """The same for prompts that share prefixes, all at once."""
        counts = [count] * len(prompts) if isinstance(count, int) else count
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.cold, prompts, counts))

    def score(self, prompt: Sequence[int], tokens: Sequence[int], **fields: Any) -> Generated:
        """Teacher-forced: log p of `tokens` after `prompt`, computed as a prompt. SGLang scores the last id of the
        vocabulary as 0."""
        body = {**_request([*prompt, *tokens], 1), "logprob_start_len": len(prompt) - 1, **fields}
        meta = self.post("/generate", body)["meta_info"]
        pairs = meta["input_token_logprobs"][1:]
        assert len(pairs) == len(tokens) and all(p[1] in (token, 0) for p, token in zip(pairs, tokens))
        return Generated(list(tokens), [p[0] for p in pairs], meta["cached_tokens"])

    def metrics(self, prefix: str = "dsv4:") -> dict[str, float]:
        """Values of /metrics by name, without labels and the `_total` of counters."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            lines = [row for row in response.read().decode().splitlines() if row.startswith(prefix)]
        found = {row.split("{")[0].split(" ")[0].removeprefix(prefix): float(row.rsplit(" ", 1)[1]) for row in lines}
        return {name.removesuffix("_total"): value for name, value in found.items() if not name.endswith("_created")}

    def flush(self) -> None:
        """Empty the prefix cache; SGLang refuses while the last step is being retired."""
        for _ in range(50):
            try:
                self.post("/flush_cache")
                return
            except urllib.error.HTTPError:
                time.sleep(0.1)
        raise AssertionError("the server refused /flush_cache for 5 s")

    def wait_idle(self) -> None:
        """Until nothing runs; SGLang checks its pools for leaks when it turns idle and dies of one."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            load = self.get("/get_load")
            if all(rank["num_reqs"] == 0 and rank["num_waiting_reqs"] == 0 for rank in load):
                time.sleep(1)  # the check runs in the next turn of the idle loop
                assert self.get("/get_load"), "the server is gone"
                return
            time.sleep(0.1)
        raise AssertionError(f"requests still run after 60 s: {self.get('/get_load')}")

    def retractions(self) -> int:
        """How often requests were retracted for want of memory."""
        return self.log_text().count("Retract requests")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    # The group may outlive its leader.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def launched(
    model: Path, log: Path, flags: Sequence[str], options: dict[str, Any], cpu: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process, in a process group of its own, stopped at the end."""
    overrides = json.dumps({launch.OPT_IN_KEY: options})
    command = launch.server_command(str(model), ["--host", "127.0.0.1", *flags, launch.OPT_IN_FLAG, overrides], cpu=cpu)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv,
            env=command.full_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _stop(process)


@contextmanager
def running(model: Path, log: Path, *flags: str, cpu: bool = True, **options: Any) -> Iterator[Server]:
    """A server that answers; fails with the end of its log if it does not come up in time."""
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}", log)
    # An idle scheduler would take a core from the oracle.
    base = ["--port", str(port), "--skip-server-warmup", "--sleep-on-idle"]
    with launched(model, log, [*base, *flags], options, cpu) as process:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"{server.url}/health", timeout=20).close()
                break
            except OSError:
                time.sleep(0.3)
        else:
            pytest.fail(
                f"no server within {START_SECONDS} s (exit code {process.poll()}):\n{server.log_text()[-4000:]}"
            )
        yield server


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ordinary tokens."""
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def distances(
    oracle: Oracle, ids: Sequence[int], got: Generated, rows: RowFormat = "fp32", keys: KeyFormat = "fp32"
) -> torch.Tensor:
    """|log p of the server - log p of the oracle| of each generated token, teacher-forced."""
    return (torch.tensor(got.logprobs) - oracle.score(ids, got.tokens, rows, keys).logprobs).abs()


def assert_oracle_chooses(oracle: Oracle, ids: Sequence[int], got: Generated, tolerance: float) -> None:
    """`got` is what the oracle finds likeliest, token by token, and as likely."""
    score = oracle.score(ids, got.tokens)
    assert (torch.tensor(got.logprobs) - score.logprobs).abs().max() <= tolerance
    assert score.margin.max() <= tolerance, "not the oracle's likeliest token"


def assert_right_though_retracted(server: Server, oracle: Oracle, tolerance: float) -> None:
    """In a pool of eight blocks four requests grow to two blocks, then the first needs a third: the last is retracted
    and comes back, all finish, all are right.
    """
    before = server.retractions()
    prompts = [prompt(n, seed=20 + i) for i, n in enumerate((140, 100, 100, 120))]
    counts, ahead = (150, 60, 60, 60), (70, 3, 3, 3)
    # Each begins when the one before decodes: SGLang would let it wait for the end of another.
    running_requests = [server.begin(ids, count, at) for ids, count, at in zip(prompts, counts, ahead)]
    for ids, answer, count in zip(prompts, running_requests, counts):
        got = answer()
        assert len(got.tokens) == count
        assert distances(oracle, ids, got).max() <= tolerance
    assert server.retractions() > before, "nothing was retracted: the test does not test"
    server.wait_idle()


def assert_same(got: Generated, reference: Generated, tolerance: float) -> None:
    """`got` may be shorter than `reference`."""
    count = len(got.tokens)
    assert count and got.tokens == reference.tokens[:count]
    worst = (torch.tensor(got.logprobs) - torch.tensor(reference.logprobs[:count])).abs().max()
    assert worst <= tolerance, f"log p differs by {worst:.1e}"
