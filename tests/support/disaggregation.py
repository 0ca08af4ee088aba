"""A prefill server and a decode server for tests, and a small client that sends each request to both.

Each server has its own process group.
"""

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

from benchmarks import ports
from support.server import CPU, Server, running

# The module that each transfer backend imports.
MODULES = {"mooncake_tcp": "mooncake.engine", "nixl": "nixl._api"}


def needs(backend: str) -> None:
    """Skip the test if the module of this transfer backend is not installed. No transfer backend is a dependency."""
    command = [sys.executable, "-c", f"import torch, {MODULES[backend]}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{backend} cannot be imported: {found.stderr.strip().splitlines()[-1]}")


def by(backend: str) -> tuple[str, str]:
    return "--disaggregation-transfer-backend", backend


@contextmanager
def long_timeouts() -> Iterator[None]:
    """Give the servers started inside long timeouts, for a loaded machine.

    They apply to waiting for the other server, and to treating a server that does not answer as dead.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
        patch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "5")
        patch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "7200")
        patch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "7200")
        yield


class Disaggregated(Server):
    """A decode server together with the prefill server that receives the same requests.

    The interface for requests, answers and waits is that of a single server.
    """

    def __init__(self, prefill: Server, decode: Server, bootstrap: int) -> None:
        super().__init__(decode.process, decode.port, decode.log)
        self.prefill, self.decode, self.bootstrap = prefill, decode, bootstrap
        self.rooms, self.sender = count(1), ThreadPoolExecutor(64)

    def room(self) -> dict[str, Any]:
        """Return the fields by which the two servers find each other for one request."""
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
    **options: Any,
) -> Iterator[Disaggregated]:
    """Start both servers with `flags`, plus the flags of each server."""
    with ExitStack() as stack:
        bootstrap = stack.enter_context(ports.reserved())
        flags = (*flags, "--disaggregation-bootstrap-port", str(bootstrap))

        def start(mode: str, more: Sequence[str]) -> Server:
            given = (*flags, "--disaggregation-mode", mode, *more)
            return stack.enter_context(running(model, folder / mode, *given, **options))

        # CPU servers are forked with a patched environment, so they start one at a time.
        with ThreadPoolExecutor(1 if CPU else 2) as pool:
            starts = [pool.submit(start, mode, more) for mode, more in (("prefill", prefill), ("decode", decode))]
        yield Disaggregated(*(started.result() for started in starts), bootstrap)
