"""The little HTTP that the commands need: where the server of given flags answers, and requests to it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_sglang.srt.integration import launch_command

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", "30000"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Who listens on every address is asked on this one."""
INTEGRITY_KEY = "dsv4_sglang_integrity"
"""`srt.integrity.KEY`, which this module does not import: that would import torch."""
POLL_SECONDS = 0.5
REQUEST_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """`cached_tokens` of the `prompt_tokens` came from the cache; seconds count from the request."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float


@dataclass(frozen=True)
class Scored:
    """Tokens with their log p; `cached` tokens before them came from the cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


@dataclass(frozen=True)
class Pools:
    """`used` tokens belong to running requests, `kept` ones wait for a request that begins like a finished one."""

    used: int
    kept: int
    tokens: int
    snapshots: int

    def __str__(self) -> str:
        return (
            f"{self.used} of {self.tokens} tokens used by running requests, {self.kept} kept for requests to come, "
            f"snapshots: {self.snapshots}"
        )


def bind(host: str, port: int) -> None:
    """Raise OSError if a server could not listen there: the port is in use, or this machine has no such address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: connections that are closed do not keep the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)


def _opener(certificate: str | None) -> urllib.request.OpenerDirector:
    """Asks this machine, past any proxy. Over TLS it trusts the first certificate of the PEM file `certificate`, the
    server's own, and no other.

    The name in it is not compared: it may be the machine's while we ask on loopback, and whoever shows this very
    certificate is the server.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever signed it need not be known
        pem = Path(certificate).read_text(encoding="ascii", errors="ignore")
        context.load_verify_locations(cadata="".join(pem.partition("-----END CERTIFICATE-----")[:2]))
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


class Server:
    """The server of `flags`, asked from this machine: its address, its key, its certificate.

    Raises OSError if the file of --ssl-certfile cannot be read as a certificate.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        host = launch_command.flag_value(flags, "--host") or DEFAULT_HOST
        host = LOOPBACK.get(host, host)
        port = launch_command.flag_value(flags, "--port") or DEFAULT_PORT
        certificate = launch_command.flag_value(flags, "--ssl-certfile")
        key = launch_command.flag_value(flags, "--api-key")  # --admin-api-key guards none of the routes below
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"Authorization": f"Bearer {key}"}
        )
        self._certificate = certificate
        self._opener = _opener(certificate)

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Server:
        """The server at an address, of which no flags are known."""
        server = cls([] if api_key is None else ["--api-key", api_key])
        server.url = url.rstrip("/")
        return server

    @contextmanager
    def _open(
        self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a GET, or to a POST of `body`. Raises RuntimeError with the server's words when it rejects,
        OSError when there is no answer.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(
                urllib.request.Request(self.url + path, data, self._headers), timeout=timeout
            ) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the server answered {error.code}: {error.read().decode(errors='replace')}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise RuntimeError(
                    f"{self.url} does not show the certificate {self._certificate}: {error.reason}"
                ) from None
            raise
        except http.client.HTTPException as error:
            raise ConnectionError(f"the server's answer broke off: {error!r}") from None

    def generate(self, prompt: str, max_tokens: int, timeout: float = REQUEST_SECONDS) -> Answer:
        """The greedy answer to `prompt`, of `max_tokens` tokens at most. Raises what `_open` raises."""
        body = {"text": prompt, "stream": True, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0}}
        start = time.monotonic()
        first = 0.0
        last: dict[str, Any] = {"error": "nothing"}
        with self._open("/generate", body, timeout) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - start
                    last = json.loads(line.removeprefix(b"data: "))
        if "error" in last:
            raise RuntimeError(f"the server answered {last['error']}")
        meta = last["meta_info"]
        return Answer(
            text=last["text"],
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            new_tokens=meta["completion_tokens"],
            first_token_seconds=first,
            seconds=time.monotonic() - start,
        )

    def integrity(self) -> list[dict[str, Any]]:
        """The reports of the integrity check (`srt/features/integrity.py`), of every process; [] where it is off.
        Raises what `_open` raises.
        """
        with self._open("/server_info") as response:
            states = json.load(response).get("internal_states") or []
        return [report for state in states for report in state.get(INTEGRITY_KEY) or []]

    def answer(self, ids: Sequence[int], count: int, **fields: Any) -> Scored:
        """`count` tokens, greedily. `fields` of the request besides. Raises what `_open` raises."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        meta = self._scored({"input_ids": list(ids), "sampling_params": sampling, **fields})
        pairs = meta["output_token_logprobs"]
        return Scored([pair[1] for pair in pairs], [pair[0] for pair in pairs], meta["cached_tokens"])

    def score(self, ids: Sequence[int], tokens: Sequence[int], **fields: Any) -> Scored:
        """Given tokens behind `ids`, computed as a prompt. Raises what `_open` raises."""
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        start = {"logprob_start_len": len(ids) - 1}
        meta = self._scored({"input_ids": [*ids, *tokens], "sampling_params": sampling, **start, **fields})
        return Scored(list(tokens), [pair[0] for pair in meta["input_token_logprobs"][1:]], meta["cached_tokens"])

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._open("/generate", {**body, "return_logprob": True}) as response:
            return json.load(response)["meta_info"]

    def pools(self) -> Pools:
        """What the server's Prometheus page says, of all ranks of DP attention together. Raises RuntimeError if it has
        none, else what `_open` raises.
        """
        with self._open("/metrics") as response:
            page = response.read().decode()
        found: dict[str, dict[str, float]] = {}
        for name, labels, value in re.findall(r"^(?:sglang|dsv4):(\w+)(?:\{([^}]*)\})? (\S+)$", page, re.MULTILINE):
            rank = re.search(r'dp_rank="(\d+)"', labels)
            found.setdefault(name, {})[rank[1] if rank else ""] = float(value)
        try:
            states = ("kv_used_tokens", "kv_evictable_tokens", "kv_available_tokens", "snapshots_held")
            used, kept, free, held = (int(sum(found[state].values())) for state in states)
            return Pools(used, kept, used + kept + free, held)
        except KeyError as error:
            raise RuntimeError(f"{self.url}/metrics has no {error}") from None


def wait_ready(server: Server, alive: Callable[[], bool], timeout: float) -> None:
    """Return when `server` has answered a request of one token.

    Not /health: SGLang answers it with 503 and a line in the log for as long as it warms up, while a request waits for
    its turn. Raises RuntimeError when `alive` turns false before or the server rejects, TimeoutError after `timeout`
    seconds.
    """
    deadline = time.monotonic() + timeout
    while alive():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no server answered at {server.url} within {timeout:.0f} s")
        try:
            server.generate("Ready?", max_tokens=1, timeout=left)
            return
        except OSError:  # not listening yet, or gone
            time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server at {server.url} ended before it was ready")
