"""HTTP client of a server (/generate with input_ids) that measures times and hits of streamed answers."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

TIERS = ("device", "host", "storage")


@dataclass
class Answer:
    """An answer that was streamed.

    Attributes:
        tokens: token ids.
        cached: prompt tokens that the server had cached.
        of_tiers: `cached` by tier (TIERS).
        first_token_s: seconds from sending to the first token.
        total_s: seconds from sending to the end.
        arrivals: time of `time.perf_counter` of each delivery. One has a token, with speculation those of a round.
    """

    tokens: list[int]
    cached: int
    of_tiers: dict[str, int]
    first_token_s: float
    total_s: float
    arrivals: list[float] = field(default_factory=list)


def deliveries(response: Iterable[bytes]) -> Iterator[tuple[float, bytes]]:
    """Yield (time of `time.perf_counter`, line) of each delivery of a streamed answer."""
    for line in response:
        if line.startswith(b"data: {"):
            yield time.perf_counter(), line


class Client:
    """HTTP client of one server, usable from many threads.

    `timeout_s`: for one delivery. Behind hundreds of clients a first token can take more than 10 minutes.
    """

    def __init__(self, url: str, timeout_s: float = 3600.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.hostname is None:
            raise ValueError(f"server URL is {url!r}; expected http://HOST:PORT")
        self.host, self.port, self.timeout_s = parts.hostname, parts.port or 80, timeout_s

    def generate(self, prompt: array[int], count: int, **fields: Any) -> Answer:
        """Generate exactly `count` tokens greedily, streamed to measure the time to first token.

        `fields`: further fields of the request.

        Raises:
            RuntimeError: the server answers with an error.
        """
        return self.prepared(prompt, count, **fields)()

    def prepared(self, prompt: array[int], count: int, **fields: Any) -> Callable[[], Answer]:
        """Return `generate` with these arguments as a function whose request body is already encoded.

        Encoding holds the GIL for milliseconds, which would keep requests from starting together.
        """
        body = {
            "input_ids": prompt.tolist(),
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "stream": True,
            **fields,
        }
        return partial(self._send, json.dumps(body).encode(), len(prompt), count)

    def _send(self, body: bytes, prompt_tokens: int, count: int) -> Answer:
        begin = time.perf_counter()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"/generate of {prompt_tokens} tokens: {response.status} {response.read(500)!r}")
            arrivals, last = [], b""
            for now, line in deliveries(response):
                arrivals.append(now)
                last = line
        finally:
            connection.close()
        answer = json.loads(last[len(b"data: ") :] or b"{}")
        if "error" in answer or "meta_info" not in answer:
            raise RuntimeError(f"/generate of {prompt_tokens} tokens: {answer}")
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
        return Answer(
            answer["output_ids"][-count:],
            meta["cached_tokens"],
            {tier: details.get(tier, 0) for tier in TIERS},
            arrivals[0] - begin,
            time.perf_counter() - begin,
            arrivals,
        )

    def flush(self) -> None:
        """Empty the cache. Retry, because the server rejects this while it retires its last step."""
        for _ in range(100):
            connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
            connection.request("POST", "/flush_cache")
            status = connection.getresponse().status
            connection.close()
            if status == 200:
                return
            time.sleep(0.1)
        raise RuntimeError("the server rejected /flush_cache for 10 s: are requests running?")
