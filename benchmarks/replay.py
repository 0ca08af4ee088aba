"""Replay the turns of a trace on a running server (/generate with input_ids); record hits and times."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.parse
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.agent_trace import Ideal, Turn
from benchmarks.trace_file import FIRST_TOKEN_ID

TIERS = ("device", "host", "storage")


@dataclass
class Answer:
    tokens: list[int]
    cached: int
    of_tiers: dict[str, int]
    first_token_s: float
    total_s: float


@dataclass
class Served:
    """A served turn.

    Attributes:
        prompt: tokens of the prompt.
        cached: prompt tokens that the server had cached.
        of_tiers: `cached` by tier (TIERS).
        ideal: prompt tokens that an infinite cache would have had.
    """

    turn: Turn
    prompt: int
    cached: int
    of_tiers: dict[str, int]
    ideal: int
    first_token_s: float
    total_s: float


class Client:
    """HTTP client of one server, usable from many threads."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.hostname is None:
            raise ValueError(f"server URL is {url!r}; expected http://HOST:PORT")
        self.host, self.port, self.timeout_s = parts.hostname, parts.port or 80, timeout_s

    def generate(self, prompt: array[int], count: int) -> Answer:
        """Generate exactly `count` tokens greedily, streamed to measure the time to first token.

        Raises:
            RuntimeError: the server answers with an error.
        """
        return self.prepared(prompt, count)()

    def prepared(self, prompt: array[int], count: int) -> Callable[[], Answer]:
        """Return `generate` with these arguments as a function whose request body is already encoded.

        Encoding holds the GIL for milliseconds, which would keep requests from starting together.
        """
        body = {
            "input_ids": prompt.tolist(),
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "stream": True,
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
            first, last = 0.0, b""
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
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
            first - begin,
            time.perf_counter() - begin,
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


class Replay:
    """Sends turns in order, at most `concurrency` at a time. A turn waits for the turn it is based on."""

    def __init__(self, client: Client, *, concurrency: int, vocab: int, seed: int = 0) -> None:
        self.client, self.concurrency, self.vocab, self.seed = client, concurrency, vocab, seed
        self._ready = threading.Condition()
        self._error: BaseException | None = None
        self._forget()

    def _forget(self) -> None:
        self.served: list[Served] = []
        self._ideal = Ideal()
        self._left: dict[tuple[int, int], array[int]] = {}

    def run(self, turns: Iterable[Turn]) -> list[Served]:
        """Replay turns and return them in order of completion. The first error of any request ends the replay."""
        waiting = list(turns)
        waiting.reverse()
        begun = len(self.served)
        with ThreadPoolExecutor(self.concurrency) as pool:
            for _ in range(self.concurrency):
                pool.submit(self._work, waiting)
        if self._error is not None:
            raise self._error
        return self.served[begun:]

    def restart(self) -> None:
        """Forget earlier turns and empty the server's cache."""
        self._forget()
        self.client.flush()

    def _work(self, waiting: list[Turn]) -> None:
        try:
            while (turn := self._next(waiting)) is not None:
                self._serve(*turn)
        except BaseException as error:
            with self._ready:
                self._error = self._error or error
                self._ready.notify_all()

    def _next(self, waiting: list[Turn]) -> tuple[Turn, int] | None:
        """Return the first turn in order whose base is done, and its ideal hit."""
        with self._ready:
            while waiting and self._error is None:
                for at in range(len(waiting) - 1, max(-1, len(waiting) - 1 - 4 * self.concurrency), -1):
                    turn = waiting[at]
                    if turn.base < 0 or (turn.conversation, turn.base) in self._left:
                        del waiting[at]
                        return turn, self._ideal.hit(turn)
                self._ready.wait()
            return None

    def _serve(self, turn: Turn, ideal: int) -> None:
        prompt = self.prompt(turn)
        answer = self.client.generate(prompt, turn.generate)
        with self._ready:
            times = answer.first_token_s, answer.total_s
            self.served.append(Served(turn, len(prompt), answer.cached, answer.of_tiers, ideal, *times))
            self._left[turn.key] = prompt + array("i", answer.tokens)
            self._ready.notify_all()

    def prompt(self, turn: Turn) -> array[int]:
        if turn.base >= 0:
            past = self._left[turn.conversation, turn.base][: turn.cut]
        else:
            past = self._tokens(turn.cut, f"system {self.seed} {turn.system}")
        return past + self._tokens(turn.append, f"{self.seed} {turn.conversation} {turn.number}")

    def _tokens(self, count: int, name: str) -> array[int]:
        rng = random.Random(name)
        return array("i", (rng.randrange(FIRST_TOKEN_ID, self.vocab) for _ in range(count)))
