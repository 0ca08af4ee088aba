"""Client of a running server for the commands: finds its address from its flags and parses its responses."""

from __future__ import annotations

import errno
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from dsv4_sglang.cli.server import REQUEST_SECONDS, Endpoint, RequestError
from dsv4_sglang.srt.launch.command import flag_value
from dsv4_sglang.srt.prefix_cache.metrics import PREFIX

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", "30000"
# A server that listens on all addresses is reached on the loopback address.
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Copy of `srt.features.integrity.report.KEY`. An import of that module would import torch.
INTEGRITY_KEY = "dsv4_sglang_integrity"
SGLANG_PREFIX = "sglang:"


@dataclass(frozen=True)
class Answer:
    """Response to a generate request.

    `cached_tokens` of the `prompt_tokens` came from the cache. Times are in seconds since the request was sent.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float


@dataclass(frozen=True)
class Scored:
    """Tokens and their log probabilities. `cached` tokens of the prompt came from the cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


@dataclass(frozen=True)
class Pools:
    """Usage of the device cache, in tokens.

    `used` tokens belong to running requests. `kept` tokens belong to finished requests and are cached for reuse.
    """

    used: int
    kept: int
    tokens: int
    snapshots: int

    def __str__(self) -> str:
        return (
            f"{self.used} of {self.tokens} tokens used by running requests, {self.kept} kept for requests to come, "
            f"snapshots: {self.snapshots}"
        )


def samples(page: str, prefix: str = "") -> Iterator[Sample]:
    """Yield the samples of a Prometheus page whose names begin with `prefix`, without the `_created` timestamps."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
                yield sample


def bind(host: str, port: int) -> None:
    """Raise OSError if a server cannot listen at this address (port in use, or not an address of this machine)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    with socket.socket(family, kind, protocol) as listener:
        # Servers set this option too: closed connections do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)


def without_password(url: str) -> str:
    """Return a URL for an error message, without the user name and the password in it."""
    return re.sub(r"//.*@", "//...@", url, flags=re.DOTALL)


@contextmanager
def errors_in_one_line(command: str, url: str) -> Iterator[None]:
    """Print an error of a request to the server at `url` as one line, and exit with 1.

    Args:
        command: name of the command.
        url: address of the server, as given.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"no server answers at {without_password(url)}: {error}" if isinstance(error, OSError) else error
        typer.echo(f"dsv4-sglang {command}: {reason}", err=True)
        raise typer.Exit(1) from None


class Server(Endpoint):
    """Client of a server that generates text or tokens."""

    @classmethod
    def of(cls, flags: Sequence[str]) -> Server:
        """Return a client for the local server that was started with `flags`.

        Raises OSError if the file of --ssl-certfile cannot be read as a certificate.
        """
        host = flag_value(flags, "--host") or DEFAULT_HOST
        host = LOOPBACK.get(host, host)
        port = flag_value(flags, "--port") or DEFAULT_PORT
        certificate = flag_value(flags, "--ssl-certfile")
        key = flag_value(flags, "--api-key")  # --admin-api-key protects none of the routes below
        scheme = "http" if certificate is None else "https"
        return cls(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", key, certificate)

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Server:
        """Return a client for the server at `url`, whose flags are unknown.

        Raises ValueError if `url` is not an HTTP address or has a user name in it.
        """
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises ValueError if it is not a number from 0 to 65535
            valid = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna"))
        except ValueError:
            valid = False
        if not valid or re.search(r"[^!-~]", url):  # http.client sends no other characters
            shown = without_password(url)
            raise ValueError(f"{shown!r} is not the address of a server; expected one such as http://127.0.0.1:30000")
        if "@" in parts.netloc:
            raise ValueError(
                f"{without_password(url)} has a user name or a password, which SGLang does not take; give the address "
                "without it, and the server's key as --api-key"
            )
        return cls(url, api_key)

    def ready(self, timeout: float) -> None:
        """Return when the server has generated a token.

        /health is not used: during warm-up SGLang answers it with 503 and writes a log line each time, while a generate
        request waits in the queue.
        """
        self.generate("Ready?", max_tokens=1, timeout=timeout)

    def generate(self, prompt: str, max_tokens: int, timeout: float = REQUEST_SECONDS) -> Answer:
        """Generate at most `max_tokens` tokens greedily.

        Raises:
            RuntimeError: the stream ends with an error. The errors of `send` propagate.
        """
        body = {"text": prompt, "stream": True, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0}}
        start = time.monotonic()
        first = 0.0
        last: dict[str, Any] = {"error": "nothing"}
        with self.send("/generate", body, timeout) as response:
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
        """Return the reports (`srt/features/integrity/report.py`) of all processes, of audits after this call.

        A server repeats its last report until the next audit is due, so this asks until all reports are new. The list
        is empty if the check is off. Raises RuntimeError if this is not a server of SGLang, and the errors of `send`.
        """
        begin = time.monotonic()
        while True:
            info = self.request("/server_info")
            if not isinstance(info, dict):
                raise RuntimeError(f"{self.url} is not a server of SGLang")
            states = info.get("internal_states") or []
            reports = [report for state in states for report in state.get(INTEGRITY_KEY) or []]
            if all(report.get("age_seconds", 0) <= time.monotonic() - begin for report in reports):
                return reports
            time.sleep(0.05)

    def answer(self, ids: Sequence[int], count: int, **fields: Any) -> Scored:
        """Generate exactly `count` tokens greedily. Raises the errors of `send`.

        Args:
            ids: Token ids of the prompt.
            count: Number of tokens to generate.
            fields: Further fields of the request.

        Returns:
            The generated tokens and their log probabilities.
        """
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        meta = self._scored({"input_ids": list(ids), "sampling_params": sampling, **fields})
        pairs = meta["output_token_logprobs"]
        return Scored([pair[1] for pair in pairs], [pair[0] for pair in pairs], meta["cached_tokens"])

    def score(self, ids: Sequence[int], tokens: Sequence[int], **fields: Any) -> Scored:
        """Return the log probabilities of `tokens` after `ids`, computed as one prompt. Raises the errors of `send`.

        Args:
            ids: Token ids of the prompt.
            tokens: Token ids to score.
            fields: Further fields of the request.
        """
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        start = {"logprob_start_len": len(ids) - 1}
        meta = self._scored({"input_ids": [*ids, *tokens], "sampling_params": sampling, **start, **fields})
        return Scored(list(tokens), [pair[0] for pair in meta["input_token_logprobs"][1:]], meta["cached_tokens"])

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = self.request("/generate", {**body, "return_logprob": True})["meta_info"]
        return meta

    def metrics(self, timeout: float = REQUEST_SECONDS) -> str:
        """Return the server's Prometheus page. Raises RuntimeError if it has none, and the errors of `send`."""
        try:
            return self.text("/metrics", timeout=timeout)
        except RequestError as error:
            hint = "; is the server started with --enable-metrics?" if error.code == 404 else ""
            raise RuntimeError(f"{error}{hint}") from None

    def pools(self) -> Pools:
        """Return the usage of the cache, summed over all DP attention ranks. Raises the errors of `metrics`."""
        page = self.metrics()
        found: dict[str, dict[str, float]] = {}
        for sample in samples(page):
            found.setdefault(sample.name, {})[sample.labels.get("dp_rank", "")] = sample.value
        tokens = (f"{SGLANG_PREFIX}kv_{state}_tokens" for state in ("used", "evictable", "available"))
        try:
            used, kept, free, held = (int(sum(found[state].values())) for state in (*tokens, f"{PREFIX}snapshots"))
            return Pools(used, kept, used + kept + free, held)
        except KeyError as error:
            raise RuntimeError(f"{self.url}/metrics has no {error}") from None
