"""Start and stop server processes, wait until they are ready and send HTTP requests to them.

Commands, benchmarks and tests use this module.
"""

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

from dsv4_sglang.srt.launch.command import Command

POLL_SECONDS = 0.2
REQUEST_SECONDS = 300.0
HEALTH_SECONDS = 5.0
STOP_SECONDS = 20.0
KILL_SECONDS = 60.0


class RequestError(RuntimeError):
    """Error response of a server.

    Attributes:
        code: HTTP status.
        text: Body of the response.
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
    """Start a server as the leader of a new process group.

    Args:
        command: Command line and environment of the server.
        output: File that receives stdout and stderr; None: those of the calling process.

    Returns:
        The server process.
    """
    errors = None if output is None else subprocess.STDOUT
    environment = command.full_environment()
    return subprocess.Popen(command.argv, env=environment, stdout=output, stderr=errors, start_new_session=True)


def stop(process: Process, grace_seconds: float = STOP_SECONDS) -> None:
    """Stop a server and its whole process group.

    Args:
        process: Leader of the process group.
        grace_seconds: Time between SIGTERM and SIGKILL; 0: send SIGKILL immediately.
    """
    if grace_seconds:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group may outlive its leader
    process.kill()  # a process that was just forked may not lead its group yet
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


@contextmanager
def running(command: Command, grace_seconds: float = STOP_SECONDS) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager: start a server and stop it on exit."""
    process = start(command)
    try:
        yield process
    finally:
        stop(process, grace_seconds)


def _trusting(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accept a certificate whose issuer is unknown
    pem = Path(certificate).read_text(encoding="ascii", errors="ignore")
    context.load_verify_locations(cadata="".join(pem.partition("-----END CERTIFICATE-----")[:2]))
    return context


class Endpoint:
    """HTTP client of the server at `url`. Requests bypass proxies.

    Over TLS the client trusts only the first certificate in the PEM file `certificate`, which is the server's own. It
    does not compare the host name: the certificate may name the machine while the request goes to the loopback address.
    Only the owner of this certificate can present it, so the server is still authenticated. The constructor raises
    OSError if the file cannot be read as a certificate.
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
            body: Object to send as JSON; None: no body.
            timeout: Maximum seconds between two parts of the response.
            method: HTTP method. The default is GET without a body and POST with one.

        Raises:
            RequestError: The server returned an error.
            RuntimeError: The server does not present the expected certificate.
            OSError: The server did not respond, or the connection broke off.
        """
        parts = urlsplit(self.url)
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
        """Wait for the response to the request that was sent on `connection`."""
        return connection.getresponse()

    def text(self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS, method: str | None = None) -> str:
        """Return the body of the response. Arguments and errors are those of `send`."""
        with self.send(path, body, timeout, method) as response:
            return response.read().decode(errors="replace")

    def request(self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS, method: str | None = None) -> Any:
        """Return the body of the response, parsed if it is JSON, else as text. Arguments and errors are those of
        `send`."""
        text = self.text(path, body, timeout, method)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def ready(self, timeout: float) -> None:
        """Return if the server accepts requests.

        Raises:
            ConnectionError: the server answers with an error. The other errors of `send` propagate.
        """
        try:
            self.request("/health", timeout=min(timeout, HEALTH_SECONDS))
        except RequestError as error:
            raise ConnectionError(str(error)) from None


def wait_ready(server: Endpoint, alive: Callable[[], bool], timeout: float) -> None:
    """Wait until `server.ready` returns.

    Args:
        server: Server to wait for.
        alive: Returns False when the server process has ended.
        timeout: Maximum seconds to wait.

    Raises:
        TimeoutError: The server was not ready after `timeout` seconds.
        RuntimeError: The server process ended first, or `server.ready` raised this error.
    """
    deadline = time.monotonic() + timeout
    while alive():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no server answered at {server.url} within {timeout:.0f} s")
        try:
            server.ready(left)
            return
        except OSError:  # the server does not listen yet, or has ended
            time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server at {server.url} ended before it was ready")
