"""Agents that wait for tools between their turns, with right, wrong or no hints on what they will do next.

Each agent runs one conversation after the other. After each turn but the last of a conversation it pauses for a tool,
5 to 120 s divided by a factor. A right hint retains the conversation for as long as the pause may take, or demotes it
after its last turn. A wrong hint is the opposite one.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from dataclasses import dataclass
from itertools import count as counter
from typing import Any

from benchmarks.agent_trace import TraceConfig, Turn, script
from benchmarks.replay import Replay, Served

# Hints of agents.
NO_HINTS, RIGHT, WRONG = KINDS = ("none", "right", "wrong")
# Shortest and longest pause for a tool in seconds; their logarithm is uniformly distributed.
PAUSES = 5.0, 120.0
# A retained conversation is kept for this multiple of the pause.
MARGIN = 2


def agent_lengths(seed: int, tokens: tuple[int, int] = (2_000, 12_000)) -> TraceConfig:
    """Return the lengths of the agents' conversations. `tokens`: smallest and largest length of a conversation."""
    return TraceConfig(conversations=0, active=0, seed=seed, turns=(4, 16), tokens=tokens, systems=(512, 1024))


@dataclass(frozen=True)
class Load:
    """Load of tool-using agents.

    Attributes:
        config: lengths of the conversations.
        speed: factor by which pauses are shorter than those of real tools.
        seconds: duration. Turns that have begun end later.
        weight: weight of retained conversations.
    """

    config: TraceConfig
    speed: float
    seconds: float
    weight: int

    def agents(self, tokens: int) -> int:
        """Return the number of agents whose conversations hold about `tokens` tokens at a time."""
        ends = [turn.end for conversation in range(200) for turn in script(self.config, conversation)]
        return max(1, round(tokens / statistics.fmean(ends)))

    def conversation(self, number: int) -> tuple[float, list[tuple[Turn, float]]]:
        """Return the seconds before a conversation, and its turns with the seconds of the pause after each."""
        rng = random.Random(f"pauses {number}")
        # Agents do not start together.
        begin = rng.uniform(0, PAUSES[0]) / self.speed
        turns = script(self.config, number)
        return begin, [(turn, math.exp(rng.uniform(*map(math.log, PAUSES))) / self.speed) for turn in turns]

    def hint(self, kind: str, pause: float, *, last: bool) -> tuple[str, dict[str, int]] | None:
        """Return the action and the payload of a hint after a turn, or None.

        Args:
            kind: one of KINDS.
            pause: seconds until the next turn.
            last: the turn is the last one of its conversation.
        """
        if kind == NO_HINTS:
            return None
        if last == (kind == RIGHT):
            return "demote", {}
        return "retain", {"seconds": math.ceil(MARGIN * pause), "weight": self.weight}


class Agents:
    """Runs agents on a server until the time of the load is over."""

    def __init__(self, replay: Replay, load: Load, kind: str) -> None:
        """`kind`: hints of the agents, one of KINDS."""
        self.replay, self.load, self.kind = replay, load, kind
        self._conversations, self._lock = counter(), threading.Lock()
        self._error: BaseException | None = None
        self._began = time.monotonic()

    def run(self, agents: int) -> list[Served]:
        """Return the turns of this number of agents. The first error of any request ends the load."""
        begun = len(self.replay.served)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(agents)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self.replay.served[begun:]

    def _work(self) -> None:
        try:
            while not self._over():
                with self._lock:
                    number = next(self._conversations)
                begin, turns = self.load.conversation(number)
                self._sleep(begin)
                for turn, pause in turns:
                    if self._over():
                        return
                    self.replay.serve(turn, **self._hints(pause, last=turn is turns[-1][0]))
                    self._sleep(pause)
        except BaseException as error:
            self._error = self._error or error

    def _hints(self, pause: float, *, last: bool) -> dict[str, Any]:
        """Return the fields of a request's hints."""
        if (hint := self.load.hint(self.kind, pause, last=last)) is None:
            return {}
        action = {"action_id": "1", "action_type": hint[0], "action_version": "1", "payload": hint[1]}
        return {"kv_hints": {"protocol_version": "1", "message_id": "1", "actions": [action]}}

    def _over(self) -> bool:
        return self._error is not None or time.monotonic() - self._began > self.load.seconds

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._over():
            time.sleep(min(left, 0.5))
