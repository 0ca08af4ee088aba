"""Tests of what the eviction policy keeps under memory pressure, with the simulation of `benchmarks/`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.agent_trace import TraceConfig, Turn, load, trace
from benchmarks.prefix_simulation import BLOCK_BYTES, INTERVAL, LeastRecentlyUsed, expected_blind
from benchmarks.simulated_server import Simulation
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache import policy as policy_module
from dsv4_sglang.srt.prefix_cache.host_copy import TRANSITIONS, CopyEvent, HostCopy
from dsv4_sglang.srt.prefix_cache.path_hash import path_hashes
from dsv4_sglang.srt.prefix_cache.policy import ANSWERED, SUPERSEDED, EvictionPolicy
from dsv4_sglang.srt.prefix_cache.registry import REMEMBERED, SnapshotRegistry


def hits(turns: Iterable[Turn], tokens: int, policy: type[EvictionPolicy] = EvictionPolicy) -> float:
    """Return the fraction of an infinite cache's hits in a pool of `tokens` tokens with enough snapshots."""
    simulation = Simulation(tokens // BLOCK, tokens // 2048, INTERVAL, policy=policy)
    simulation.run(turns)
    return simulation.hit_tokens / simulation.ideal_tokens


def agents(active: int, visits: int) -> tuple[list[Turn], int]:
    """Return turns of conversations with random reuse intervals, and the number of live tokens at the end."""
    turns = load(active, visits, systems=(BLOCK,), tokens=(4_000, 40_000), generate=(8, 64))
    ends = {turn.conversation: turn.end for turn in turns}
    return turns, sum(list(ends.values())[-active:])


def test_working_set_that_fits_hits() -> None:
    turns, live = agents(50, 6)
    assert hits(turns, 3 * live) > 0.975


def test_expected_hits_without_foresight() -> None:
    turns, live = agents(400, 5)

    def expected(tokens: int) -> float:
        return expected_blind(turns, tokens / BLOCK * BLOCK_BYTES / 1e9, (BLOCK,))["blind"]

    assert expected(live) == 1.0
    assert expected(0) == expected_blind(turns, 0.0, (BLOCK,))["systems"]
    assert 0.7 * expected(live // 4) < hits(turns, live // 4) < 1.1 * expected(live // 4)


def test_hits_degrade_smoothly_beyond_the_capacity() -> None:
    """The hit rate is about the fraction that fits, while LRU evicts conversations just before their next turn."""
    turns, live = agents(400, 5)
    assert hits(turns, live // 2) > 0.45
    assert hits(turns, live // 10) > 0.05
    assert hits(turns, live // 10, LeastRecentlyUsed) < 0.04


def test_path_hashes() -> None:
    """Hashes are equal for equal paths of one name space, whatever follows. From the first differing token on, or after
    a swap of tokens or blocks, all hashes differ."""
    tokens = array("q", (7 * i % 1009 for i in range(5 * BLOCK + 3)))
    hashes = path_hashes(tokens, None)
    assert len(hashes) == 5 and not len(path_hashes(tokens[: BLOCK - 1], None))
    assert path_hashes(tokens[: 3 * BLOCK].tolist(), None).tolist() == hashes[:3].tolist()
    spaces = [path_hashes(tokens, *space) for space in ((None, None), ("tenant", None), (None, "tenant"))]
    assert len(np.unique(np.concatenate(spaces))) == 3 * len(hashes)
    for at, other in ((2 * BLOCK, 2 * BLOCK + 1), (BLOCK + 5, 3 * BLOCK + 5)):
        swapped = tokens[:]
        swapped[at], swapped[other] = swapped[other], swapped[at]
        same = path_hashes(swapped, None) == hashes
        assert same.tolist() == [block < at // BLOCK for block in range(5)]
    blocks = tokens[BLOCK : 2 * BLOCK] + tokens[:BLOCK] + tokens[2 * BLOCK :]
    assert not (path_hashes(blocks, None) == hashes).any()


def test_the_end_of_a_prompt_keeps_value_beside_that_of_its_answer() -> None:
    registry, cost = SnapshotRegistry(9), 1600

    def factors(*numbers: int) -> list[float]:
        found = registry.policy.recompute_cost()[list(numbers)] / cost
        assert [registry.policy.entry(n, for_rows=True).cost / cost for n in numbers] == pytest.approx(found.tolist())
        return found.tolist()

    registry.add(1, cost, 0)
    registry.add(2, 2 * cost, 1)
    registry.take(3, in_answer=True)
    registry.add(3, 3 * cost, 2)
    assert factors(1, 2, 3) == [SUPERSEDED, ANSWERED, 1]
    registry.move(3, 4)
    assert factors(1, 2, 4) == [SUPERSEDED, ANSWERED, 1]
    registry.add(5, 3 * cost, 2)  # the next prompt leaves out the answer
    assert factors(2, 4, 5) == [1, 1, 1]
    registry.remove(4)
    assert factors(1, 2, 5) == [SUPERSEDED, SUPERSEDED, 1]
    registry.take(4, in_answer=True)
    registry.add(4, 4 * cost, 5)
    registry.take(6, in_answer=True)
    registry.add(6, 5 * cost, 4)  # an answer that goes on
    assert factors(5, 4, 6) == [ANSWERED, SUPERSEDED, 1]


def without_answers(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Yield the turns of chats whose next prompt leaves out the last answer's reasoning, two thirds of it."""
    before: dict[tuple[int, int], Turn] = {}
    for turn in turns:
        last = before.get((turn.conversation, turn.base))
        if last is not None:
            cut = min(turn.cut, last.prompt)
            turn = replace(turn, cut=cut, append=turn.append + last.generate // 3)
        before[turn.key] = turn
        yield turn


def test_chats_that_leave_out_reasoning_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = TraceConfig(240, 80, turns=(3, 12), tokens=(2_000, 30_000), generate=(200, 2_000))
    turns = list(without_answers(trace(lengths)))
    found = hits(turns, 500_000)
    monkeypatch.setattr(policy_module, "ANSWERED", SUPERSEDED)
    assert found > hits(turns, 500_000) + 0.05


def test_new_conversations_replace_ended_ones() -> None:
    """Repeat the same load with new conversations: the first ones are never reused."""
    turns, live = agents(150, 5)
    simulation = Simulation(live // BLOCK, live // 2048, INTERVAL)
    simulation.run(turns)
    before = simulation.hit_tokens, simulation.ideal_tokens
    simulation.run(replace(turn, conversation=turn.conversation + 1000) for turn in turns)
    assert simulation.hit_tokens - before[0] > 0.85 * (simulation.ideal_tokens - before[1])


def test_a_new_mean_interval_counts_as_a_change() -> None:
    """`mean_interval` orders the branches that were never reused. A caller that caches an order by `changes` must see
    each new estimate: after a use, a removal, and a ghost hit."""
    registry = SnapshotRegistry(4)

    def use() -> None:
        registry.use(1)

    def remove() -> None:
        registry.remove(2, path_hash=7)

    def return_after_eviction() -> None:
        registry.ghost_hit([7])

    for slot in (1, 2, 3):
        registry.add(slot, 128, 0)
    for step in (use, remove, return_after_eviction):
        registry.tick()
        changes, interval = registry.changes, registry.reuse.mean_interval
        step()
        assert registry.reuse.mean_interval != interval and registry.changes > changes, step.__name__


def test_the_mean_interval() -> None:
    """Waits of branch ends per reuse, limited by the mean wait of the reused ones. Only ends of branches count."""
    registry, decay = SnapshotRegistry(8), 1 - 1 / 256

    def wait(ticks: int) -> None:
        for _ in range(ticks):
            registry.tick()

    registry.add(1, 10 * BLOCK, 0)
    wait(4)
    assert registry.use(1) == registry.reuse.mean_interval == registry.interval[1] == 4
    wait(2)
    assert registry.use(1) == 2
    assert registry.interval[1] == (4 + 2) / 2
    assert registry.reuse.mean_interval == pytest.approx((4 * decay + 2) / (decay + 1))
    registry.add(2, 20 * BLOCK, 1)
    registry.add(3, 30 * BLOCK, 1)
    assert registry.interval[[2, 3]].tolist() == [3, 0], "a continued branch inherits, a fork does not"
    before = registry.reuse.mean_interval
    wait(100)
    registry.use(1)
    assert registry.reuse.mean_interval == before, "no end of a branch"
    registry.remove(3)
    reused = 4 + (2 - 4) / 32
    assert registry.reuse.mean_interval == 2 * reused, "the limit"
    for _ in range(3):
        registry.use(2)
    waits, uses = ((4 * decay + 2) * decay + 100) * decay + 100, ((decay + 1) * decay) * decay + 1
    waits, uses = waits * decay * decay, (uses * decay + 1) * decay + 1
    reused += (100 - reused) / 32
    reused += (0 - reused) / 32
    reused += (0 - reused) / 32
    assert registry.reuse.mean_interval == pytest.approx(min(waits / uses, 2 * reused))
    registry.remove(1)
    assert registry.reuse.mean_interval == pytest.approx(min(waits / uses, 2 * reused)), "no end of a branch either"


def test_ghosts_are_counted_once_and_forgotten_oldest_first() -> None:
    registry = SnapshotRegistry(2)
    most = REMEMBERED * len(registry.in_registry)
    for path_hash in range(1, most + 2):
        registry.add(1, BLOCK, 0)
        registry.tick()
        registry.tick()
        registry.remove(1, path_hash)
        if path_hash == 2:  # 1 is evicted again and becomes younger than 2
            registry.add(1, BLOCK, 0)
            registry.remove(1, 1)
    now = registry.now
    assert registry.ghost_hit([2]) == 0, "forgotten"
    assert registry.ghost_hit([1]) == now - 4
    assert registry.ghost_hit([999, 4, 5]) == now - 6, "the time since its last use, of the longest path"
    assert registry.ghost_hit([4]) == 0, "counted already"
    assert registry.ghost_hit([5]) == now - 8
    registry.add(1, BLOCK, 0)
    registry.remove(1)
    assert registry.ghost_hit([0]) == 0, "no ghost without a hash"


def test_most_valuable_snapshots_are_saved_first() -> None:
    registry = SnapshotRegistry(6)
    for slot in range(1, 7):
        registry.add(slot, slot * BLOCK, 0)
    for slot in range(1, 6):
        registry.note_copy(CopyEvent.NEED, slot)
    registry.note_copy(CopyEvent.DEFER, 4)
    registry.note_copy(CopyEvent.SAVE, 5)
    assert registry.policy.to_save() == [3, 2, 1]
    registry.note_copy(CopyEvent.DEFER, 2)
    assert registry.policy.to_save() == [3, 1]


def test_host_copy_states_follow_the_table() -> None:
    """Every state is reached, each event leads where the three facts behind the state lead, and others are errors.

    The facts: a copy is needed, it is not due before the device evicts the snapshot, the host has one.
    """
    facts = {
        HostCopy.NOT_NEEDED: (False, False, False),
        HostCopy.DUE: (True, False, False),
        HostCopy.DEFERRED: (True, True, False),
        HostCopy.SAVED_NOT_NEEDED: (False, False, True),
        HostCopy.SAVED_DUE: (True, False, True),
        HostCopy.SAVED_DEFERRED: (True, True, True),
    }

    def after(event: CopyEvent, needed: bool, deferred: bool, saved: bool) -> tuple[bool, bool, bool] | None:
        """Return the facts after an event, None if it is impossible."""
        if event is CopyEvent.NEED:
            return True, deferred, saved
        if event is CopyEvent.DEFER:
            return True, True, saved
        if event is CopyEvent.LOAD:
            return None if needed or deferred or saved else (True, True, True)
        return None if saved == (event is CopyEvent.SAVE) else (needed, deferred, event is CopyEvent.SAVE)

    assert set(TRANSITIONS) == set(HostCopy) == set(facts)
    reached, waiting = {HostCopy.NOT_NEEDED}, [HostCopy.NOT_NEEDED]
    while waiting:
        state = waiting.pop()
        for event in CopyEvent:
            copies = SnapshotRegistry(3).copies
            copies.states[2] = state
            expected = after(event, *facts[state])
            if expected is None:
                with pytest.raises(
                    ValueError, match=f"snapshot 2: {event.name} is not possible in the state {state.name}"
                ):
                    copies.apply(event, 2)
                continue
            copies.apply(event, 2)
            needed, deferred, saved = facts[copies[2]]
            assert (needed, deferred, saved) == expected
            assert copies.is_saved(2) == saved == copies.saved()[2] and not copies.saved()[[0, 1, 3]].any()
            assert copies.is_unsaved(2) == (needed and not saved)
            assert copies.due().tolist() == ([2] if needed and not deferred and not saved else [])
            if copies[2] not in reached:
                reached.add(copies[2])
                waiting.append(copies[2])
    assert reached == set(HostCopy)
    copies.forget(2)
    assert copies[2] is HostCopy.NOT_NEEDED
