"""Servers that run one after another with one storage of files: how each one ends, and what the next one finds.

A storage is shared by models and tenants. A request hits only pages of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.utils.common import MultiprocessingSerializer
from support.faulty_cache import LAUNCH_ERROR
from support.liveness import POLL_SECONDS, Progress
from support.server import (
    BROKEN_OFF,
    FP32,
    Generated,
    Server,
    assert_same,
    empty_device,
    ends,
    prompt,
    running,
    schedulers,
)
from support.server_plugin import broken
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.cli.server import RequestError

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.usefixtures("plugin")]

MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "256", "--enable-cache-report", "--random-seed", "1")
# The default of --hicache-ratio, which releases of SGLang resolve in different places.
FLAGS += ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
OPTIONS = {**FP32, "max_snapshots": 12}
TOLERANCE = 2e-3
PROMPT = prompt(400)
FOUND = 3 * 128
# Blocks of the prompt and one snapshot.
PAGES = 3 + 1
SALTS = ("a", "b", "c")

Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="module")
def start(pages: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yield a function that starts a server, without SGLang's 5 s pause for diagnostics before exit."""

    def started(*flags: str, **options: Any) -> AbstractContextManager[Server]:
        return running(model, tmp_path_factory.mktemp("server") / "log", *FLAGS, *flags, **OPTIONS, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
        yield started


def wait_for_pages(server: Server, folder: Path, count: int) -> None:
    """Wait until SGLang's thread has written `count` pages after the answer."""
    progress = Progress(server.process)
    while len(list(folder.glob("*.bin"))) < count:
        progress.check()
        time.sleep(POLL_SECONDS / 10)
    assert len(list(folder.glob("*.bin"))) == count


def salted(server: Server, salt: str) -> int:
    """Return the cached tokens of a tenant's prompt, sent through the OpenAI endpoint."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    details = server.post("/v1/completions", body)["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def tool(command: str, folder: Path, *options: str) -> str:
    """Return the output of `dsv4-sglang storage`."""
    ran = CliRunner().invoke(app, ["storage", command, str(folder), *options])
    assert ran.exit_code == 0, ran.output
    return ran.output


class Ended(NamedTuple):
    """A server that has ended, with its first answer to PROMPT."""

    answer: Generated
    log: str
    errors: list[RequestError]


@pytest.fixture(scope="module")
def stuck(start: Start, plugin: Path, pages: Path) -> Ended:
    """Server with random weights that ends because a load does not."""
    with start("--load-format", "dummy", host_load_timeout_seconds=2) as server:
        got = server.generate(PROMPT)
        wait_for_pages(server, pages, PAGES)
        empty_device(server)
        other = server.begin(prompt(30), 900, 2)
        with ends(server), broken(plugin, "a load does not end"):
            with pytest.raises(RequestError) as failed:
                server.generate(PROMPT, rid="waits")
            with pytest.raises(BROKEN_OFF):
                other()
        return Ended(got, server.log_text(), [failed.value])


def test_stuck_load_ends_the_server(stuck: Ended) -> None:
    """A load that exceeds its timeout ends the server; the waiting request receives the error that the log has."""
    (error,) = stuck.errors
    assert error.code == 500
    assert "not ended in 2 s: 3 blocks and 1 snapshots for the requests waits. " in error.text
    assert "a load from host memory has not ended" in stuck.log
    assert "option host_load_timeout_seconds" in error.text


@pytest.fixture(scope="module")
def crashed(stuck: Ended, start: Start, plugin: Path, pages: Path) -> Ended:
    """Server that stores the prompt of several tenants and ends because a kernel fails."""
    with start() as server:
        got = server.generate(PROMPT)
        assert got.cached == 0, "a server found pages of an earlier server with random weights"
        assert [salted(server, salt) for salt in SALTS] == [0] * 3
        assert server.generate(PROMPT, extra_key="x").cached == 0
        wait_for_pages(server, pages, (2 + len(SALTS) + 1) * PAGES)
        # A stream that breaks off after some tokens does not count as an answer.
        streams = [server.begin(prompt(30, seed=seed), 900, 5) for seed in range(2)]
        with ends(server), broken(plugin, "a kernel fails"):
            for request in (*streams, lambda: server.generate(prompt(200))):
                with pytest.raises(BROKEN_OFF):
                    request()
        return Ended(got, server.log_text(), [])


def test_a_kernel_that_fails_ends_the_server(crashed: Ended) -> None:
    """A failing kernel ends the server and its requests with an error, and the log names the op in one line."""
    named = [line for line in crashed.log.splitlines() if "append: the launch" in line]
    assert named == [f"RuntimeError: {LAUNCH_ERROR}"]


@pytest.fixture(scope="module")
def restarted(crashed: Ended, start: Start) -> Iterator[Server]:
    with start() as server:
        yield server


def test_next_server_finds_stored_pages(restarted: Server, crashed: Ended, pages: Path) -> None:
    """Tenants hit their own pages only. `dsv4-sglang storage` lists the pages and keeps those in use."""
    for fields in ({}, {"extra_key": "x"}):
        got = restarted.generate(PROMPT, **fields)
        assert got.cached == FOUND
        assert_same(got, crashed.answer, TOLERANCE)
    assert [salted(restarted, salt) for salt in SALTS] == [FOUND] * 3
    assert restarted.published()["hit_tokens_storage"] == 5 * FOUND
    assert salted(restarted, "d") == restarted.generate(PROMPT, extra_key="y").cached == 0
    wait_for_pages(restarted, pages, 8 * PAGES)
    restarted.wait_idle()
    model = restarted.get("/server_info")["model_path"]
    listed = tool("ls", pages).splitlines()
    assert any(re.search(rf"{model} +│ used +│ +{7 * PAGES} ", line) for line in listed), listed
    assert any(re.search(rf"{model}, random +│ unused +│ +{PAGES} ", line) for line in listed), listed
    assert tool("verify", pages) == f"{8 * PAGES} pages are sound, 0 are damaged, 0 files were not checked\n"
    assert f"kept, in use: {7 * PAGES} files" in tool("clear", pages, "--yes")


def by_disk(server: Server, model: Path) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": False})["success"]


def by_tensors(server: Server, model: Path) -> None:
    """Update in the session that SGLang requires."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # by name, so that a different process can open it
    weights = list(load_file(model / "model.safetensors").items())
    body = {
        "serialized_named_tensors": [MultiprocessingSerializer.serialize(weights, output_str=True)],
        "flush_cache": False,
    }
    try:
        for path, asked in (
            ("/begin_weight_update", {}),
            ("/update_weights_from_tensor", body),
            ("/end_weight_update", {}),
        ):
            assert server.post(path, asked)["success"], path
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_new_weights_over_http_leave_nothing(
    restarted: Server, crashed: Ended, pages: Path, tiny: Callable[..., Path]
) -> None:
    """After a weight update without a flush, a prompt cached on device, host and storage is recomputed.

    The second update restores the original weights by a different route.
    """
    for send, seed in ((by_disk, 9), (by_tensors, 0)):
        assert restarted.generate(PROMPT).cached == FOUND
        restarted.wait_idle()
        old = set(pages.glob("*.bin"))
        assert old, "the storage has no page"
        send(restarted, tiny(**{**MODEL, "seed": seed}))
        assert not old & set(pages.glob("*.bin")), "files of the old weights"
        got = restarted.generate(PROMPT)
        assert got.cached == 0, send
        apart = max(abs(a - b) for a, b in zip(got.logprobs, crashed.answer.logprobs))
        assert (got.tokens != crashed.answer.tokens or apart > 1) == (seed != 0), send
        wait_for_pages(restarted, pages, PAGES)
    assert_same(got, crashed.answer, TOLERANCE)
    restarted.wait_idle()


def test_ended_process_ends_the_server(restarted: Server) -> None:
    """If the scheduler is killed, running requests fail and the server exits."""
    answer = restarted.begin(prompt(30), 900, 2)
    with ends(restarted) as processes:
        (scheduler,) = schedulers(processes)
        scheduler.kill()
        with pytest.raises(BROKEN_OFF):
            answer()
