"""Hypothesis state machine over tree, slots and allocators, and a long run of the same random steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from prefix_model import TIMES, MiniServer, Request

KEYS = st.integers(0, 2)
PROMPT = st.lists(KEYS, min_size=1, max_size=12)


class PrefixMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.server = MiniServer(blocks=40, snapshots=7)

    def _admitted(self, keys: list[int]) -> object:
        request = self.server.admit(keys)
        return multiple() if request is None else request

    @rule(target=requests, keys=PROMPT)
    def admit(self, keys: list[int]) -> object:
        return self._admitted(keys)

    @rule(target=requests, data=st.data(), more=PROMPT)
    def next_turn(self, data: st.DataObject, more: list[int]) -> object:
        if not self.server.history:
            return multiple()
        past = data.draw(st.sampled_from(self.server.history))
        return self._admitted([*past[: data.draw(st.integers(0, len(past)))], *more])

    @rule(target=requests, request=requests, at=st.integers(0, 12), more=PROMPT)
    def branch(self, request: Request, at: int, more: list[int]) -> object:
        return self._admitted([*request.keys[:at], *more])

    @rule(request=requests)
    def extend(self, request: Request) -> None:
        self.server.prefill(request)

    @rule(request=requests, key=KEYS)
    def decode(self, request: Request, key: int) -> None:
        self.server.prefill_all(request)
        self.server.decode(request, key)

    @rule(request=consumes(requests))
    def finish(self, request: Request) -> None:
        self.server.finish(request)

    @rule(request=consumes(requests))
    def retract(self, request: Request) -> None:
        self.server.retract(request)

    @rule(blocks=st.integers(0, 40), snapshots=st.integers(0, 7))
    def evict(self, blocks: int, snapshots: int) -> None:
        self.server.press(blocks, snapshots)

    @rule()
    def flush(self) -> None:
        self.server.flush()

    @invariant()
    def sound(self) -> None:
        self.server.check()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def random_step(server: MiniServer, rng: random.Random) -> None:
    """Run one random step of a server. A busy server drains at times, so that flushes happen too."""
    kind = rng.random()
    some = rng.choice(server.running) if server.running else None
    if some is None or (kind < 0.25 and len(server.running) < 6):
        base: list[int] = []
        lines = [list(keys) for keys in server.history] + [request.keys for request in server.running]
        if lines and rng.random() < 0.7:
            line = rng.choice(lines)
            base = line[: rng.randint(0, len(line))]
        server.admit([*base, *(rng.randrange(3) for _ in range(rng.randint(1, 8)))])
    elif kind < 0.45:
        server.prefill(some)
    elif kind < 0.75:
        server.prefill_all(some)
        server.decode(some, rng.randrange(3))
    elif kind < 0.88:
        server.finish(some)
    elif kind < 0.92:
        server.retract(some)
    elif kind < 0.98:
        server.press(rng.randint(0, 40), rng.randint(0, 3))
    else:
        for request in list(server.running):
            server.finish(request)
        server.flush()


@pytest.mark.slow
def test_random_steps_keep_every_block_and_slot_accounted_for() -> None:
    """Check every state in 10^5 steps, scaled by TIMES."""
    for seed in range(50 * TIMES):
        rng = random.Random(seed)
        server = MiniServer(
            blocks=rng.randint(14, 60),
            snapshots=rng.randint(1, 12),
            interval=rng.randint(1, 5),
            chunk=rng.randint(1, 6),
        )
        for _ in range(2000):
            random_step(server, rng)
            server.check()
