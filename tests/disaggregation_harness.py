"""A prefill and a decode server for tests, one process group each, and a small client that sends a request to both."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from server_harness import Server, running

from benchmarks import ports

MODULES = {"mooncake_tcp": "mooncake.engine", "nixl": "nixl._api"}
"""What each transfer backend imports."""


def needs(backend: str) -> None:
    """Skip unless transfers can be by this backend: neither is a dependency."""
    command = [sys.executable, "-c", f"import torch, {MODULES[backend]}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{backend} cannot be imported: {found.stderr.strip().splitlines()[-1]}")


def by(backend: str) -> tuple[str, str]:
    return "--disaggregation-transfer-backend", backend


@contextmanager
def long_timeouts() -> Iterator[None]:
    """Servers started within wait for each other as long as it takes on a loaded machine, and take one for dead that
    has not answered for several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
        patch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "5")
        patch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "7200")
        patch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "7200")
        yield


class Disaggregated(Server):
    """A decode server with the prefill server that its requests go to as well. Requests, answers and waits are as those
    of one server."""

    def __init__(self, prefill: Server, decode: Server, bootstrap: int) -> None:
        super().__init__(decode.process, decode.port, decode.log)
        self.prefill, self.decode, self.bootstrap = prefill, decode, bootstrap
        self.rooms, self.sender = count(1), ThreadPoolExecutor(64)

    def room(self) -> dict[str, Any]:
        """Where the two servers meet for one request."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap,
            "bootstrap_room": next(self.rooms),
        }

    def send(self, path: str, body: Any = None, *how: Any) -> AbstractContextManager[http.client.HTTPResponse]:
        if path == "/generate":
            body = {**body, **self.room()}
            self.sender.submit(self.prefill.post, path, {**body, "stream": False})
        return super().send(path, body, *how)

    def wait_idle(self) -> None:
        self.prefill.wait_idle()
        super().wait_idle()


@contextmanager
def a_pair(
    model: Path,
    folder: Path,
    flags: Sequence[str],
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    cpu: bool = True,
    **options: Any,
) -> Iterator[Disaggregated]:
    """Both servers, with `flags` and those of each."""
    with ExitStack() as stack:
        bootstrap = stack.enter_context(ports.reserved())
        flags = (*flags, "--disaggregation-bootstrap-port", str(bootstrap))

        def start(mode: str, more: Sequence[str]) -> Server:
            given = (*flags, "--disaggregation-mode", mode, *more)
            return stack.enter_context(running(model, folder / mode, *given, cpu=cpu, **options))

        # The processes of a CPU are forked with a patched environment, one at a time.
        with ThreadPoolExecutor(1 if cpu else 2) as pool:
            starts = [pool.submit(start, mode, more) for mode, more in (("prefill", prefill), ("decode", decode))]
        yield Disaggregated(*(started.result() for started in starts), bootstrap)
