"""Profile a running server with SGLang's own profiler: some decode steps at a number of requests, or one prefill.

The profiler's mode by stage is not used: ranks synchronise at the end of a stage, which a rank without requests never
reaches.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.profile_steps import Summary, summarise
from benchmarks.servers import Server

# Decode steps of a profile. The first and the last are incomplete.
STEPS = 10
RUNNING_SECONDS = 120.0


def decode(server: Server, prompts: Sequence[list[int]], tokens: int, keep: Path | None) -> Summary:
    """Profile a decode step in which all of `prompts` run.

    Args:
        server: server that is profiled.
        prompts: one per request.
        tokens: tokens per request; enough for the wait until all run, and STEPS steps.
        keep: file to which the first rank's trace is copied, or None.

    Raises:
        RuntimeError: the requests ended too early.
    """
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        mark, burst = server.mark(), _sent(server, prompts, tokens)
        deadline = time.monotonic() + RUNNING_SECONDS
        while servers.running_now(server.lines(mark)) != len(prompts):
            if burst.done() or time.monotonic() > deadline:
                burst.result()
                raise RuntimeError(f"{len(prompts)} requests never decoded together")
            time.sleep(0.01)
        _start(server, folder, num_steps=STEPS)
        burst.result()
        if not _traces(Path(folder)):  # fewer steps ran than were requested
            server.request("/stop_profile", {})
        return _read(Path(folder), keep, whole=False)


def prefill(server: Server, prompt: list[int], keep: Path | None) -> Summary:
    """Profile everything that runs for one prompt and its first token.

    Args:
        server: server that is profiled.
        prompt: token ids.
        keep: file to which the first rank's trace is copied, or None.
    """
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        _start(server, folder)
        server.generate(prompt, 1, **on_first_rank(server, 1))
        server.request("/stop_profile", {})
        return _read(Path(folder), keep, whole=True)


def on_first_rank(server: Server, requests: int) -> dict[str, Any]:
    """Return the field that routes a single request to the rank whose trace is read."""
    return {"routed_dp_rank": 0} if requests == 1 and "--dp-size" in server.argv else {}


def _sent(server: Server, prompts: Sequence[list[int]], tokens: int) -> Future[Any]:
    """Send the prompts as one request from a thread."""
    pool = ThreadPoolExecutor(1)
    ids = prompts[0] if len(prompts) == 1 else prompts
    burst = pool.submit(server.generate, ids, tokens, **on_first_rank(server, len(prompts)))
    pool.shutdown(wait=False)
    return burst


def _start(server: Server, folder: str, **more: Any) -> None:
    asked = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False, **more}
    server.request("/start_profile", asked)


def _traces(folder: Path) -> list[Path]:
    """Return the traces of the first rank: "ID-TP-0.trace.json.gz", with DP, PP or EP ranks after TP-0."""
    return sorted(folder.glob("*-TP-0*.trace.json.gz"))


def _read(folder: Path, keep: Path | None, whole: bool) -> Summary:
    found = _traces(folder)
    if not found:
        raise RuntimeError(f"the server wrote no trace; {folder} has {[path.name for path in folder.iterdir()]}")
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found[0], keep)
    return summarise(found[0], whole)
