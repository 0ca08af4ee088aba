"""Tests of the estimate of resume points, and of its effect on the value of snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.prefix_tree import TreeServer, without_a_server

from benchmarks.agent_trace import TraceConfig, Turn, trace, without_reasoning
from benchmarks.prefix_simulation import INTERVAL, AnswersRepeated
from benchmarks.simulated_server import Simulation
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.placement import due_in_prefill
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.resume_points import SUPERSEDED, ResumeEstimate, ResumePoint

WITHIN, PROMPT, ANSWER = ResumePoint
COST = 1600


def added(registry: SnapshotRegistry, *snapshots: tuple[int, ResumePoint, int]) -> None:
    """Add snapshots with these numbers and points after others, each COST tokens longer."""
    for number, point, previous in snapshots:
        registry.set_point(number, point)
        registry.add(number, int(registry.length[previous]) + COST, previous)


def needed(registry: SnapshotRegistry, *numbers: int) -> list[float]:
    """Return the factors of the recompute costs, which column and element must agree on."""
    found = registry.policy.recompute_cost()[list(numbers)] / COST
    assert [registry.policy.entry(n, for_rows=True).cost / COST for n in numbers] == pytest.approx(found.tolist())
    return found.tolist()


def counted(*points: ResumePoint) -> ResumeEstimate:
    estimate = ResumeEstimate()
    for point in points:
        estimate.count(point)
    return estimate


def test_probabilities_follow_what_requests_do() -> None:
    estimate = counted()
    assert (estimate.needed(ANSWER), estimate.needed(PROMPT), estimate.needed(PROMPT, ANSWER)) == (0.75, 1, 0.25)
    assert estimate.needed(WITHIN, PROMPT) == SUPERSEDED
    estimate = counted(*[PROMPT] * 16)
    assert (estimate.needed(ANSWER), estimate.needed(PROMPT, ANSWER)) == pytest.approx((0.75 / 2, 1 - 0.75 / 2))
    estimate = counted(*[PROMPT] * 1000)
    assert estimate.needed(PROMPT, ANSWER) == pytest.approx(1) and estimate.needed(ANSWER) == SUPERSEDED
    for _ in range(1000):
        estimate.count(WITHIN)
    assert sum(estimate.probability) == pytest.approx(1)
    assert estimate.needed(WITHIN, PROMPT) == pytest.approx(1) == pytest.approx(estimate.needed(WITHIN, ANSWER))
    assert estimate.needed(PROMPT) == estimate.needed(ANSWER) == SUPERSEDED
    assert estimate.needed(ANSWER, PROMPT) == SUPERSEDED, "the next turn covers it"


def test_a_snapshot_is_needed_for_what_no_later_one_covers() -> None:
    registry = SnapshotRegistry(9)
    registry.resumes = counted(*[PROMPT] * 8, *[WITHIN] * 8)
    within, prompt, answer = (registry.resumes.probability[point] for point in (WITHIN, PROMPT, ANSWER))
    added(registry, (1, WITHIN, 0), (2, PROMPT, 1), (3, ANSWER, 2))
    assert needed(registry, 1, 2, 3) == pytest.approx([within, prompt, answer])
    registry.move(3, 4)
    assert needed(registry, 1, 2, 4) == pytest.approx([within, prompt, answer])
    added(registry, (5, PROMPT, 2))  # the next prompt leaves out the answer: which of the two goes on?
    assert needed(registry, 2, 4, 5) == pytest.approx([1, answer, prompt + answer])
    registry.remove(4)
    assert needed(registry, 1, 2, 5) == pytest.approx([within, SUPERSEDED, prompt + answer])
    added(registry, (4, ANSWER, 5), (6, ANSWER, 4))  # an answer that goes on after a retraction
    assert needed(registry, 5, 4, 6) == pytest.approx([prompt, SUPERSEDED, answer])
    registry.remove(6)
    registry.remove(4)
    assert needed(registry, 2, 5) == pytest.approx([SUPERSEDED, prompt + answer])


def test_each_snapshot_of_a_prefill_has_a_point() -> None:
    due = due_in_prefill(0, 20 * BLOCK, prompt=20 * BLOCK, interval=8 * BLOCK, branch=5 * BLOCK + 1)
    points = {length // BLOCK: point for length, _, point in due}
    assert points == {5: WITHIN, 8: WITHIN, 16: WITHIN, 19: PROMPT, 20: PROMPT}


def served(server: TreeServer, keys: list[int], tail: int) -> None:
    """Serve a prompt of whole blocks and `tail` tokens, with an answer of two blocks of key 50."""
    request = server.admit(keys, tail)
    assert request is not None
    server.prefill_all(request)
    for _ in range(2):
        assert server.decode(request, 50)
    server.finish(request)
    server.check()


@pytest.mark.parametrize(
    ("tail", "goes_on", "point"),
    [
        (0, lambda keys: [*keys, 50, 50, 7, 8], ANSWER),
        (0, lambda keys: [*keys, 7, 8], PROMPT),
        (0, lambda keys: [*keys, 50, 7, 8], PROMPT),  # a part of the answer
        (1, lambda keys: [*keys, 7, 8], PROMPT),
        (1, lambda keys: [*keys[:-1], 6, 7, 8], WITHIN),
    ],
)
def test_sglangs_tree_shows_where_conversations_go_on(
    monkeypatch: pytest.MonkeyPatch, tail: int, goes_on: Callable[[list[int]], list[int]], point: ResumePoint
) -> None:
    without_a_server(monkeypatch)
    server = TreeServer(blocks=200, snapshots=60, interval=30, chunk=30)
    keys = [1, 2, 3]
    turns = 5
    for _ in range(turns):
        served(server, keys, tail)
        keys = goes_on(keys)
    found = server.component.slots.registry.resumes.probability
    assert found == pytest.approx(counted(*[point] * (turns - 1)).probability)


def test_a_retraction_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_server(monkeypatch)
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)
    server.component.slots.registry.resumes = counted(PROMPT)
    request = server.admit([1, 2, 3], 0)
    assert request is not None
    server.prefill_all(request)
    for _ in range(3):
        server.decode(request, 50)
    server.retract(request)
    again = server.admit([1, 2, 3, 50, 50, 50], 5)
    assert again is not None and len(again.prefix_indices) == 6 * BLOCK
    # The tokens that it has generated are no part of its prompt.
    again.origin_input_ids, again.output_ids = again.origin_input_ids[:-BLOCK], again.origin_input_ids[-BLOCK:]
    server.prefill_all(again)
    assert server.component.slots.registry.resumes.probability == counted(PROMPT).probability


@pytest.mark.full
@pytest.mark.parametrize("edited", [0, 300])
def test_chats_that_change_what_they_repeat_hit(edited: int) -> None:
    lengths = TraceConfig(240, 80, turns=(3, 12), tokens=(2_000, 30_000), generate=(200, 2_000))
    turns = list(without_reasoning(trace(lengths), edited))

    def hits(resumes: ResumeEstimate) -> float:
        simulation = Simulation(500_000 // BLOCK, 500_000 // 2048, INTERVAL)
        simulation.tree.registry.resumes = resumes
        simulation.run(turns)
        return simulation.hit_tokens / simulation.ideal_tokens

    assert hits(ResumeEstimate()) > hits(AnswersRepeated()) + 0.05


def test_before_the_first_return() -> None:
    """A hundred conversations that leave out their answers begin before the first goes on. Two snapshots each fit."""
    simulation = Simulation(40_000, 200, INTERVAL)
    first = [Turn(number, 0, 0, -1, 0, 16_000 + 40 * number, 300) for number in range(100)]
    simulation.run(first + [Turn(turn.conversation, 1, 0, 0, turn.prompt, 500, 300) for turn in first])
    assert simulation.hit_tokens > 0.98 * simulation.ideal_tokens
