"""Agents of `benchmarks.tool_pauses` on a simulated server: a closed loop in simulated time."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from itertools import count as counter

from benchmarks import tool_pauses
from benchmarks.agent_trace import Turn
from benchmarks.simulated_server import Simulation
from benchmarks.tool_pauses import MARGIN, PAUSES, RIGHT, WRONG, Load
from dsv4_sglang.srt.prefix_cache.hint_weights import DEMOTED, Hint

# Further kinds of hints: right or wrong ones at random, right ones that all have the seconds of the longest pause, and
# right ones whose seconds are many after a short pause and few after a long one.
RANDOM, EQUAL, MISLEADING = "random", "equal", "misleading"
KINDS = (*tool_pauses.KINDS, RANDOM, EQUAL, MISLEADING)

# Tokens a second of prefill, one request at a time, and seconds of a decode step.
PREFILL, DECODE = 14_000, 0.006
# Seconds between two looks at the clock, after which hints end.
CLOCK = 1.0

# An agent yields the seconds of a pause, or the turn that it waits for.
Agent = Iterator[float | Turn]


class SimulatedAgents:
    """Runs agents on a simulation until the time of the load is over. Turns are admitted in order of arrival."""

    def __init__(self, simulation: Simulation, load: Load, kind: str) -> None:
        """`kind`: hints of the agents, one of KINDS."""
        self.simulation, self.load, self.kind = simulation, load, kind
        self._conversations, self._order = counter(), counter()
        # (time, order, agent that continues, turn that ends then).
        self._events: list[tuple[float, int, Agent, Turn | None]] = []
        self._waiting: deque[tuple[Turn, Agent]] = deque()
        self._running = 0
        self._rng = random.Random(0)
        # The time, that of the next look at the clock, and that at which all admitted prompts are computed.
        self._now = self._clock = self._prefilled = 0.0

    def run(self, agents: int) -> None:
        """Run this number of agents."""
        for _ in range(agents):
            self._continue(self._work())
        while self._events:
            self._now, _, agent, ended = heapq.heappop(self._events)
            self._look_at_the_clock()
            if ended is not None:
                self.simulation.finish(ended.key)
                self._running -= 1
            self._continue(agent)
            self._admit()

    def _work(self) -> Agent:
        while self._now <= self.load.seconds:
            begin, turns = self.load.conversation(next(self._conversations))
            yield begin
            for turn, pause in turns:
                if self._now > self.load.seconds:
                    return
                self._hint(turn, pause, last=turn is turns[-1][0])
                yield turn
                yield pause

    def _hint(self, turn: Turn, pause: float, *, last: bool) -> None:
        kind = self.kind if self.kind in tool_pauses.KINDS else RIGHT
        if self.kind == RANDOM:
            kind = self._rng.choice((RIGHT, WRONG))
        if (hint := self.load.hint(kind, pause, last=last)) is None:
            return
        seconds = hint[1].get("seconds", 0)
        if seconds and self.kind == EQUAL:
            seconds = math.ceil(MARGIN * PAUSES[1])
        elif seconds and self.kind == MISLEADING:
            seconds = math.ceil(pause) + 1 if pause > math.sqrt(math.prod(PAUSES)) else 1000
        self.simulation.hints[turn.key] = Hint(hint[1].get("weight", DEMOTED), "", seconds)

    def _continue(self, agent: Agent) -> None:
        wanted = next(agent, None)
        if isinstance(wanted, Turn):
            self._waiting.append((wanted, agent))
        elif wanted is not None:
            heapq.heappush(self._events, (self._now + wanted, next(self._order), agent, None))

    def _admit(self) -> None:
        while self._waiting and self._running < self.simulation.concurrency:
            turn, agent = self._waiting.popleft()
            hits = self.simulation.hit_tokens
            self.simulation.serve(turn)
            computed = turn.prompt - (self.simulation.hit_tokens - hits)
            self._prefilled = max(self._now, self._prefilled) + computed / PREFILL
            end = self._prefilled + turn.generate * DECODE
            heapq.heappush(self._events, (end, next(self._order), agent, turn))
            self._running += 1

    def _look_at_the_clock(self) -> None:
        while self._clock <= self._now:
            self.simulation.seconds = self._clock
            self.simulation.tree.registry.end_hints(self._clock)
            self._clock += CLOCK
