"""Storage shared by servers that run one after another: a request hits only pages of its own model and tenant."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from liveness import POLL_SECONDS, STUCK_SECONDS
from server_harness import Server, assert_same, prompt, running, wait_for_pages
from typer.testing import CliRunner

from dsv4_sglang.cli import app

pytestmark = pytest.mark.server

FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--max-total-tokens", "4096")
FLAGS += ("--chunked-prefill-size", "256", "--enable-cache-report", "--random-seed", "1")
# The default of --hicache-ratio, which releases of SGLang resolve in different places.
FLAGS += ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "max_snapshots": 12}
TOLERANCE = 2e-3
PROMPT = prompt(400)
FOUND = 384
# Blocks of the prompt and one snapshot.
PAGES = 3 + 1
SALTS = ("a", "b", "c")


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], tmp_path: Path
) -> Callable[..., contextmanager[Server]]:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "pages"))
    model = tiny(seed=0, ratios=(0, 4, 128), index_topk=1536)

    @contextmanager
    def started(*flags: str) -> Iterator[Server]:
        with running(model, tmp_path / "log", *FLAGS, *flags, **OPTIONS) as server:
            yield server

    return started


def salted(server: Server, salt: str) -> int:
    """Return the cached tokens of a tenant's prompt, sent through the OpenAI endpoint."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    details = server.post("/v1/completions", body)["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def tool(command: str, folder: Path, *options: str, code: int = 0) -> str:
    """Return the output of `dsv4-sglang storage`."""
    ran = CliRunner().invoke(app, ["storage", command, str(folder), *options])
    assert ran.exit_code == code, ran.output
    return ran.output


def test_whose_pages_a_request_finds(start: Callable[..., contextmanager[Server]], tmp_path: Path) -> None:
    """After a restart, tenants hit only their own pages, and no request hits pages of random weights."""
    folder = tmp_path / "pages"
    with start("--load-format", "dummy") as server:
        server.generate(PROMPT)
        wait_for_pages(server, folder, PAGES)
    with start() as server:
        cold = server.generate(PROMPT)
        assert cold.cached == 0, "a server with random weights found pages of an earlier server"
        assert [salted(server, salt) for salt in SALTS] == [0] * 3
        assert server.generate(PROMPT, extra_key="x").cached == 0
        wait_for_pages(server, folder, (2 + 3 + 1) * PAGES)
    with start() as server:
        got = server.generate(PROMPT)
        assert got.cached == FOUND
        assert_same(got, cold, TOLERANCE)
        assert [salted(server, salt) for salt in SALTS] == [FOUND] * 3
        assert salted(server, "d") == server.generate(PROMPT, extra_key="y").cached == 0
        got = server.generate(PROMPT, extra_key="x")
        assert got.cached == FOUND
        assert_same(got, cold, TOLERANCE)
        wait_for_pages(server, folder, 8 * PAGES)
        server.wait_idle()
        model = server.get("/server_info")["model_path"]
        listed = tool("ls", folder).splitlines()
        assert any(re.search(rf"{model} +│ used +│ +{7 * PAGES} ", line) for line in listed), listed
        assert any(re.search(rf"{model}, random +│ unused +│ +{PAGES} ", line) for line in listed), listed
        assert tool("verify", folder) == f"{8 * PAGES} pages are sound, 0 are damaged, 0 files were not checked\n"
        assert f"kept, in use: {7 * PAGES} files" in tool("clear", folder, "--yes")
        assert server.generate([*PROMPT, 5], extra_key="x").cached == FOUND
    damaged = next(folder.glob("*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert f"damaged: {damaged}" in tool("verify", folder, code=1)
    begin = time.monotonic()
    while "kept, in use" in tool("clear", folder, "--yes"):  # a process of the server is still exiting
        assert time.monotonic() - begin < STUCK_SECONDS
        time.sleep(POLL_SECONDS / 10)
    assert not list(folder.iterdir())
