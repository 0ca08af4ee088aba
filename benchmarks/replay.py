"""Replay the turns of a trace on a running server; record hits and times."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.agent_trace import Ideal, Turn
from benchmarks.client import Client
from benchmarks.trace_file import FIRST_TOKEN_ID


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

    def serve(self, turn: Turn, **fields: Any) -> None:
        """Serve a turn whose base is done, beside others. `fields`: further fields of the request."""
        with self._ready:
            ideal = self._ideal.hit(turn)
        self._serve(turn, ideal, **fields)

    def _serve(self, turn: Turn, ideal: int, **fields: Any) -> None:
        prompt = self.prompt(turn)
        answer = self.client.generate(prompt, turn.generate, **fields)
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
