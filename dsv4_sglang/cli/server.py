"""Start a server, wait until it is ready, ask it over HTTP, stop it: for commands, benchmarks and tests alike."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from dsv4_sglang.srt.integration.launch_command import Command

POLL_SECONDS = 0.5
REQUEST_SECONDS = 300.0
HEALTH_SECONDS = 5.0
STOP_SECONDS = 20.0
KILL_SECONDS = 60.0


class RequestError(RuntimeError):
    """A server answered a request with an error.

    Attributes:
        code: HTTP status.
        text: Body of the answer.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the server answered {code}: {text}")
        self.code, self.text = code, text


class Process(Protocol):
    """The part of `subprocess.Popen` that `stop` uses."""

    pid: int

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start(command: Command, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start a server as the leader of a process group of its own; `output`: a file for what it prints."""
    errors = None if output is None else subprocess.STDOUT
    environment = command.full_environment()
    return subprocess.Popen(command.argv, env=environment, stdout=output, stderr=errors, start_new_session=True)


def stop(process: Process, grace_seconds: float = STOP_SECONDS) -> None:
    """Stop a server and all of its process group: SIGTERM, and SIGKILL after `grace_seconds` seconds; 0: SIGKILL at
    once."""
    if grace_seconds:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group may outlive its leader
    process.kill()  # a process that has just been forked may not lead its group yet
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


@contextmanager
def running(command: Command, grace_seconds: float = STOP_SECONDS) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and stop it at the end, whatever happens."""
    process = start(command)
    try:
        yield process
    finally:
        stop(process, grace_seconds)


def _trusting(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever signed it need not be known
    pem = Path(certificate).read_text(encoding="ascii", errors="ignore")
    context.load_verify_locations(cadata="".join(pem.partition("-----END CERTIFICATE-----")[:2]))
    return context


class Endpoint:
    """The HTTP interface of a server at `url`. It is asked past any proxy.

    Over TLS the first certificate of the PEM file `certificate`, the server's own, is trusted and no other. The name in
    it is not compared: it may be the machine's while the server is asked on loopback, and whoever shows this very
    certificate is the server. Raises OSError if the file cannot be read as a certificate.
    """

    def __init__(self, url: str, api_key: str | None = None, certificate: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._certificate, self._context = certificate, None if certificate is None else _trusting(certificate)

    @contextmanager
    def send(
        self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS, method: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response, which may be a stream.

        Args:
            path: Route, such as /generate.
            body: Sent as JSON; None: nothing is sent.
            timeout: Seconds until a part of the response must come.
            method: GET without a body, POST with one, if it is not given.

        Raises:
            RequestError: The server answered with an error.
            RuntimeError: The server does not show its certificate.
            ValueError: `url` is not an address.
            OSError: There is no answer, or it broke off.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(
                f"{self.url!r} is not the address of a server; expected one such as http://127.0.0.1:30000"
            )
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), parts.path + path, data, headers=self._headers
            )
            with self._response(connection) as response:
                if response.status >= 400:
                    raise RequestError(response.status, response.read().decode(errors="replace"))
                yield response
        except ssl.SSLCertVerificationError as error:
            raise RuntimeError(f"{self.url} does not show the certificate {self._certificate}: {error}") from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"the server's answer broke off: {error!r}") from None
        finally:
            connection.close()

    def _response(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Wait for the response to the request that was sent."""
        return connection.getresponse()

    def request(self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS, method: str | None = None) -> Any:
        """Return what `send` reads: parsed if it is JSON, else its text. Raises what `send` raises."""
        with self.send(path, body, timeout, method) as response:
            text = response.read().decode(errors="replace")
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def ready(self, timeout: float) -> None:
        """Return if the server serves requests, else raise OSError."""
        try:
            self.request("/health", timeout=min(timeout, HEALTH_SECONDS))
        except RequestError as error:
            raise ConnectionError(str(error)) from None


def wait_ready(server: Endpoint, alive: Callable[[], bool], timeout: float) -> None:
    """Return when `server.ready` does.

    Raises:
        TimeoutError: It took more than `timeout` seconds.
        RuntimeError: `alive` turned false before, or `server.ready` raised it.
    """
    deadline = time.monotonic() + timeout
    while alive():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no server answered at {server.url} within {timeout:.0f} s")
        try:
            server.ready(left)
            return
        except OSError:  # not listening yet, or gone
            time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server at {server.url} ended before it was ready")
