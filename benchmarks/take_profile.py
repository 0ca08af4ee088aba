"""Profiles of a running server through SGLang's own profiler: some decode steps at a number of requests, one prefill.

Not by stage: there a rank that has no request never reaches the end of its stage, at which all ranks meet.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.profile_steps import Summary, summarise
from benchmarks.servers import Server

STEPS = 10
"""Decode steps of a profile. The first and the last are cut by its begin and end."""
RUNNING_SECONDS = 120.0


def decode(server: Server, prompts: Sequence[list[int]], tokens: int, keep: Path | None) -> Summary:
    """Of a decode step in which all of `prompts` run. `tokens` each must outlast the wait for that and STEPS steps.

    `keep`: where the first rank's trace is left; None deletes it. RuntimeError if the requests end too early.
    """
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        mark, burst = server.mark(), _Burst(server, prompts, tokens)
        deadline = time.monotonic() + RUNNING_SECONDS
        while servers.running_now(server.lines(mark)) != len(prompts):
            if burst.ended or time.monotonic() > deadline:
                burst.result()
                raise RuntimeError(f"{len(prompts)} requests were never seen decoding together")
            time.sleep(0.01)
        _start(server, folder, num_steps=STEPS)
        burst.result()
        if not _traces(Path(folder)):  # fewer steps came than were asked for
            server.request("/stop_profile", {})
        return _read(Path(folder), keep, whole=False)


def prefill(server: Server, prompt: list[int], keep: Path | None) -> Summary:
    """Of all that runs for one prompt and its first token."""
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        _start(server, folder)
        server.generate(prompt, 1, **on_first_rank(server, 1))
        server.request("/stop_profile", {})
        return _read(Path(folder), keep, whole=True)


def on_first_rank(server: Server, requests: int) -> dict[str, Any]:
    """A single request goes to the rank of which the trace is read."""
    return {"routed_dp_rank": 0} if requests == 1 and "--dp-size" in server.argv else {}


class _Burst:
    """Requests in a thread that does not keep the program from ending."""

    def __init__(self, server: Server, prompts: Sequence[list[int]], tokens: int) -> None:
        self._error: Exception | None = None
        single = len(prompts) == 1
        more = on_first_rank(server, len(prompts))

        def run() -> None:
            try:
                server.generate(prompts[0] if single else prompts, tokens, **more)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _start(server: Server, folder: str, **more: Any) -> None:
    asked = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False, **more}
    server.request("/start_profile", asked)


def _traces(folder: Path) -> list[Path]:
    """The first rank's: "ID-TP-0.trace.json.gz", with its other ranks behind TP-0."""
    return sorted(folder.glob("*-TP-0*.trace.json.gz"))


def _read(folder: Path, keep: Path | None, whole: bool) -> Summary:
    found = _traces(folder)
    if not found:
        raise RuntimeError(f"the server wrote no trace; {folder} has {[path.name for path in folder.iterdir()]}")
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found[0], keep)
    return summarise(found[0], whole)
