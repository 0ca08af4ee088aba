"""Which snapshot and which blocks to give up: the registry of all snapshots, with what each is worth.

Knows nothing of trees and servers. A snapshot is its slot in the snapshot pool, 1 or more; 0 means none. One that
only the host has is a number behind those of the slots (`host_id`). The registry keeps the snapshots in a forest of
their own: `previous` is the next one up the path to the root, whatever blocks lie between.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

SUPERSEDED = 1 / 16
"""What the likelihood of use is multiplied by when a later snapshot lies on the same line: conversations go on from
their end; edited and repeated turns are the exception. On the trace of `benchmarks/prefix_simulation.py` (100 active
conversations, 20 GB, 6 % of it in snapshots) factors 1, 1/4, 1/16, 1/64 hit 93.8, 97.4, 98.1 and 97.7 %."""

UNKNOWN = 1e12
"""More than any time between uses."""

MEMORY = 256
"""Ends of lines, used or given up, over which the usual time between uses is estimated."""

INTERVAL_CAP = 2
"""Agent conversations of 2,000 to 80,000 tokens (`load` of `benchmarks/agent_trace.py`) in a pool of 1 M tokens, three
seeds: factors 1.5, 2, 3 and no limit hit 10.4, 13.9, 14.2 and 14.5 % of what can hit behind system prompts with two
turns each of 790 conversations, 11.8, 11.6, 11.2 and 11.0 % with five, and 78, 74, 63 and 21 % with five turns each of
155 that come after 300 others."""

REMEMBERED = 4
"""So many lines for each place of the registry are remembered when they were given up; who takes turns with more is not
known again. A line takes some 100 bytes."""

MARGIN = 32
"""One part of so many of a device is kept at hand: free, or of snapshots of which the host has a copy, so that who
needs room does not wait for one. Agent conversations of ten times a device of 1.0 M tokens, a host of eight times
(`benchmarks/tier_simulation.py`), three seeds: 6 % of what is saved is waited for. With 16 it would be 1.1 %, and 0.1 %
less would be found, since the host has that much twice."""


class SnapshotRegistry:
    """Snapshots in slots 1..capacity, and in `host_rows` rows of the host cache. Time is counted in admitted requests
    (`tick`).

    Value of a snapshot = tokens computed again without it x likelihood of use. The first is `length` minus the
    length of `previous`. The second is 1 / max(age, interval): `age` since it was taken or last resumed from,
    `interval` the usual time between uses of its line, 0 while unknown, when that of all lines stands in. What is used
    more rarely than the pool can keep is so given up before what it can keep; before anything was used, what came first
    stays.

    The usual interval is the time that ends of lines spent waiting over the number of their uses: what was given up
    unused has waited too. If only uses counted, which in a full pool are the soonest ones, a pool that holds a tenth of
    the conversations would keep the newest of all, give each up just before its turn, and hit next to nothing. At most
    INTERVAL_CAP times what used ones waited: else a pool full of conversations that are over would wait for them and
    keep out all others. Lines that were given up when their turn came count among these: else a pool in which more and
    more conversations take turns would never learn how long they wait, give each up just before its turn, and hit
    nothing any more.
    """

    def __init__(self, capacity: int, host_rows: int = 0) -> None:
        self.capacity = capacity
        self.now = 0
        self.usual_interval = UNKNOWN
        """Usual time between uses of a line, over all lines; for lines that have not been used again yet."""
        self._waited = self._uses = self._used_after = 0.0
        self.changes = 0
        """Counts what may change the order of snapshots."""
        self._ghosts: dict[int, int] = {}
        """When the ends of lines that were given up had last been used, by their marks, oldest first."""
        size = capacity + host_rows + 1
        self.length = np.zeros(size, dtype=np.int64)
        self.recompute_cost = np.zeros(size, dtype=np.float64)
        """Tokens that the snapshot saves, times SUPERSEDED where that applies."""
        self.last = np.zeros(size, dtype=np.int64)
        self.interval = np.zeros(size, dtype=np.float64)
        self.held = np.zeros(size, dtype=bool)
        self.locks = np.zeros(size, dtype=np.int32)
        self.at_leaf = np.zeros(size, dtype=bool)
        """Whether its blocks end in a leaf that may be evicted; set by the tree."""
        self.previous = np.zeros(size, dtype=np.int64)
        self._following: list[set[int]] = [set() for _ in range(size)]
        self.copied = np.zeros(size, dtype=bool)
        """Of one in a slot: the host has a copy."""
        self.pending_write = np.zeros(size, dtype=bool)
        """Of one in a slot: the host is to have a copy before the device gives it up."""
        self.attempted = np.zeros(size, dtype=bool)
        """Of one in a slot: the host has had a copy, or no room, or need not have one before."""
        self.evicted_next = np.zeros(size, dtype=bool)
        """Of one in a slot: it is among those that the device gives up next (`note_eviction_candidates`)."""

    def tick(self) -> None:
        self.now += 1
        self.changes += 1

    def add(self, slot: int, length: int, previous: int, following: Iterable[int] = ()) -> None:
        """A snapshot at `length`, between `previous` and those of its followers that now come after it."""
        if self.held[slot]:
            raise ValueError(f"snapshot slot {slot} is in the registry already, at length {self.length[slot]}")
        self.changes += 1
        self.held[slot] = True
        self.length[slot], self.last[slot], self.locks[slot] = length, self.now, 0
        # A line that goes on keeps its rhythm; a branch starts a line of its own.
        self.interval[slot] = self.interval[previous] if previous and not self._following[previous] else 0.0
        self.previous[slot] = previous
        self._following[slot] = set(following)
        self._following[previous] -= self._following[slot]
        self._following[previous].add(slot)
        for after in self._following[slot]:
            self.previous[after] = slot
            self._value(after)
        self._value(slot)
        self._value(previous)

    def remove(self, slot: int, mark: int = 0) -> None:
        """Forget a snapshot; what followed it follows the one before. `mark`: of a line's end, a number that only its
        path has, by which `missed` knows it; 0: none."""
        if not self.held[slot] or self.locks[slot]:
            raise ValueError(f"snapshot slot {slot} is {'locked' if self.held[slot] else 'not in the registry'}")
        self.changes += 1
        if not self._following[slot]:
            self._waiting_ended(float(self.now - self.last[slot]), used=False)
            if mark:
                self._ghosts.pop(mark, None)
                self._ghosts[mark] = int(self.last[slot])
                if len(self._ghosts) > REMEMBERED * len(self.held):
                    del self._ghosts[next(iter(self._ghosts))]
        previous = int(self.previous[slot])
        self._following[previous].discard(slot)
        self._following[previous] |= self._following[slot]
        for after in self._following[slot]:
            self.previous[after] = previous
            self._value(after)
        self._following[slot] = set()
        self._forget(slot)
        self._value(previous)

    def _forget(self, slot: int) -> None:
        for column in (self.held, self.at_leaf, self.copied, self.pending_write, self.attempted, self.evicted_next):
            column[slot] = False

    def host_id(self, row: int) -> int:
        """The number of a snapshot that only the host has, in its row `row` (from 0 on)."""
        return self.capacity + 1 + row

    def move(self, slot: int, to: int) -> None:
        """A snapshot is at another place now, with its history and its neighbours."""
        if not self.held[slot] or self.locks[slot] or self.held[to]:
            raise ValueError(f"snapshot {slot} cannot move to {to}: not held, locked, or taken")
        self.changes += 1
        for column in (self.length, self.recompute_cost, self.last, self.interval, self.previous):
            column[to] = column[slot]
        self.locks[to] = 0
        following, self._following[slot] = self._following[slot], set()
        self._following[to] = following
        for after in following:
            self.previous[after] = to
        siblings = self._following[int(self.previous[slot])]
        siblings.discard(slot)
        siblings.add(to)
        self._forget(slot)
        self.held[to] = True

    def use(self, slot: int) -> None:
        """A request resumes from the snapshot."""
        self.changes += 1
        since = float(self.now - self.last[slot])
        known = self.interval[slot]
        self.interval[slot] = since if known == 0 else (known + since) / 2
        if not self._following[slot]:
            self._waiting_ended(since, used=True)
        self.last[slot] = self.now

    def ghost_hit(self, marks: Iterable[int]) -> None:
        """A request computes again what it might have resumed from: `marks` of its paths, the longest first."""
        for mark in marks if self._ghosts else ():
            if (last := self._ghosts.pop(mark, None)) is not None:
                self._reused_after(float(self.now - last))
                self._estimate()
                return

    def _waiting_ended(self, waited: float, *, used: bool) -> None:
        kept = 1 - 1 / MEMORY
        self._waited, self._uses = self._waited * kept + waited, self._uses * kept + used
        if used:
            self._reused_after(waited)
        self._estimate()

    def _reused_after(self, waited: float) -> None:
        self._used_after += (waited - self._used_after) / (32 if self._used_after else 1)

    def _estimate(self) -> None:
        """`usual` anew: the reciprocal rate of uses where some waits were cut off; newer ones weigh more. It orders the
        lines that were not used again yet, so `changes` counts each estimate."""
        self.changes += 1
        if self._uses:
            self.usual_interval = min(self._waited / self._uses, INTERVAL_CAP * self._used_after)

    def lock(self, slot: int) -> None:
        self.locks[slot] += 1

    def unlock(self, slot: int) -> None:
        self.locks[slot] -= 1
        assert self.locks[slot] >= 0, f"snapshot slot {slot} unlocked once too often"

    def superseded(self, slot: int) -> bool:
        """Whether a later snapshot lies on the same line, in either place."""
        return len(self._following[slot]) == 1

    def following(self, slot: int) -> frozenset[int]:
        """The next snapshots down the paths from this one; from 0: the first of all paths."""
        return frozenset(self._following[slot])

    def __len__(self) -> int:
        return int(self.held.sum())

    def _value(self, slot: int) -> None:
        if slot:
            saved = self.length[slot] - self.length[self.previous[slot]]
            self.recompute_cost[slot] = saved * (SUPERSEDED if self.superseded(slot) else 1.0)

    def reuse_interval(self) -> np.ndarray:
        """1 / likelihood of use, by slot: the larger, the sooner given up."""
        interval = np.where(self.interval > 0, self.interval, self.usual_interval)
        # Of equals the youngest is first: what came first stays, so a loop over more than fits keeps hitting a part.
        return np.maximum(np.maximum(self.now - self.last, interval), 1.0) * (1 + 1e-9 * self.last)

    def lowest_value(self, *, needed: bool, saves: int) -> int:
        """The snapshot to give up for its slot, 0 if all are locked; unless the new one is `needed`, 0 also if none
        is worth less than one that saves `saves` tokens and lies before another on its line. Not those that only the
        host has."""
        free = (self.held & (self.locks == 0))[: self.capacity + 1]
        score = np.where(free, self.eviction_score()[: len(free)], -1.0)
        slot = int(score.argmax())
        least = 0.0 if needed else max(self.usual_interval, 1.0) / max(saves * SUPERSEDED, 1e-9)
        return slot if free[slot] and score[slot] > least else 0

    def least_used_leaf(self) -> int:
        """The snapshot whose leaf to give up for its blocks; 0 if there is none."""
        score = np.where(self.at_leaf, self.reuse_interval(), -1.0)
        slot = int(score.argmax())
        return slot if self.at_leaf[slot] else 0

    # The host cache

    def eviction_score(self) -> np.ndarray:
        """ReuseInterval by worth, by number: the larger, the sooner given up for its slot or row."""
        return self.reuse_interval() / np.maximum(self.recompute_cost, 1e-9)

    def to_copy(self) -> list[int]:
        """The slots of which the host is to have a copy at once, those worth most first."""
        slots = np.flatnonzero(self.held & self.pending_write & ~self.copied & ~self.attempted)
        return slots[np.argsort(self.eviction_score()[slots], kind="stable")].tolist() if len(slots) else []

    def note_eviction_candidates(self, tokens: int, slots: int) -> list[int]:
        """The snapshots that the device gives up next, in this order: for `slots` slots, and with the ends of paths
        for blocks of `tokens` tokens. Those that would be among them if no request held them are noted, too."""
        here = self.held[: self.capacity + 1]
        # Those that a copy to the host locks leave when it is done.
        copying = self.evicted_next & self.copied & (self.locks > 0)
        free = here & ((self.locks == 0) | copying)[: len(here)]
        ids = np.flatnonzero(here)
        going: dict[int, None] = {}
        if slots > 0:
            order = ids[np.argsort(-self.eviction_score()[ids], kind="stable")]
            going.update(dict.fromkeys(order[: np.searchsorted(np.cumsum(free[order]), slots) + 1].tolist()))
        if tokens > 0:
            reuse_interval = self.reuse_interval()
            followers = np.bincount(self.previous[ids], minlength=len(self.held))
            order = ids[followers[ids] == 0]
            order = order[np.argsort(-reuse_interval[order], kind="stable")]
            freed = np.cumsum(np.where(free[order], self.length[order] - self.length[self.previous[order]], 0))
            ends = [(-reuse_interval[slot], slot) for slot in order[: np.searchsorted(freed, tokens) + 1].tolist()]
            while ends and tokens > 0:
                _, slot = heapq.heappop(ends)
                going[slot] = None
                if not free[slot]:
                    continue
                above = int(self.previous[slot])
                tokens -= int(self.length[slot] - self.length[above])
                followers[above] -= 1
                if above <= self.capacity and here[above] and not followers[above]:
                    heapq.heappush(ends, (-reuse_interval[above], above))
        self.evicted_next[:] = False
        self.evicted_next[list(going)] = True
        return [slot for slot in going if free[slot]]

    def host_value(self, score: np.ndarray) -> np.ndarray:
        """By number, what a copy on the host is worth: the host gives up the smallest first. `score`: `eviction_score`
        where a row of a snapshot is wanted, `reuse_interval` where blocks are.

        Copies of what the device keeps are worth less than nothing, the less the longer it keeps them; the others are
        worth what they save, also copies of what the device gives up next.
        """
        return np.where(self.copied & ~self.evicted_next, -1 / score, 1 / score)

    def on_host(self, value: np.ndarray, below: float = np.inf) -> list[int]:
        """Those of which the host has a copy, alone or not, that is worth less than `below` by `host_value`: in the
        order in which the host gives them up."""
        everywhere = np.arange(len(self.held))
        ids = everywhere[self.held & (self.copied | (everywhere > self.capacity)) & (value < below)]
        return ids[np.argsort(value[ids], kind="stable")].tolist()
