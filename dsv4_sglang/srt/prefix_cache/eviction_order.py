"""Eviction order of snapshots, kept up to date with each change, so that the next victim is found without a search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Relative weight of `last` that breaks ties: of snapshots with equal reuse intervals, the youngest is evicted first. A
# loop over more than the pool holds then still hits a part.
TIE = 1e-9


class Ranking:
    """Items in ascending order of their keys.

    A change of a key leaves the old entry in the heap. Old entries are skipped, and removed when they outnumber the
    items, so that they take no more memory than the items do.
    """

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def entries(self) -> int:
        """Number of entries in memory, with the old ones."""
        return len(self._heap)

    def key(self, item: int) -> float | None:
        return self._keys.get(item)

    def put(self, item: int, key: float) -> None:
        """Add an item, or change its key."""
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._heap, (key, item))
            self._compact()

    def drop(self, item: int) -> None:
        """Remove an item, if it is there."""
        if self._keys.pop(item, None) is not None:
            self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, int] | None:
        """Return the smallest key and its item (of equal keys, the smallest item), or None without items."""
        while self._heap and self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def ascending(self) -> Iterator[tuple[float, int]]:
        """Yield the keys and items, smallest first. Only as much of the heap is read as is asked for. The items must
        not change meanwhile."""
        # Entries of the heap whose parents were read, with their indices.
        reached = [(*self._heap[0], 0)] if self._heap else []
        last = None
        while reached:
            key, item, i = heapq.heappop(reached)
            if self._keys.get(item) == key and (key, item) != last:
                last = key, item
                yield last
            for child in range(2 * i + 1, min(2 * i + 3, len(self._heap))):
                heapq.heappush(reached, (*self._heap[child], child))


class Entry(NamedTuple):
    """Inputs of the eviction score of a snapshot, besides the time and the mean interval.

    Attributes:
        last: time when the snapshot was taken or last resumed from.
        interval: its reuse interval, 0 while unknown.
        cost: its recompute cost, times the weight of its hint.
    """

    last: int
    interval: float
    cost: float

    def score(self, now: int, mean_interval: float) -> float:
        """Return the eviction score, as in `EvictionPolicy.eviction_score`."""
        reuse_interval = max(float(now - self.last), self.interval or mean_interval, 1.0) * (1 + TIE * self.last)
        return reuse_interval / self.cost


class Heads:
    """The oldest snapshot of each cost. Each eviction compares all of them, so they are columns."""

    def __init__(self) -> None:
        # By row: `last`, 1 + TIE * last, cost and number, float64. The first len(self) columns are used.
        self._columns = np.empty((4, 16))
        self._costs: list[float] = []
        self._index: dict[float, int] = {}

    def __len__(self) -> int:
        return len(self._costs)

    def columns(self) -> np.ndarray:
        """Return the heads, float64 [4, len(self)]."""
        return self._columns[:, : len(self)]

    def put(self, cost: float, last: float, number: int) -> None:
        """Note the head of a cost, or replace it."""
        if (at := self._index.get(cost)) is None:
            at = self._index[cost] = len(self._costs)
            self._costs.append(cost)
            if at == self._columns.shape[1]:
                self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._columns[:, at] = last, 1 + TIE * last, cost, number

    def drop(self, cost: float) -> None:
        """Remove the head of a cost. The last one takes its place."""
        at, last = self._index.pop(cost), self._costs.pop()
        if last != cost:
            self._costs[at], self._index[last] = last, at
            self._columns[:, at] = self._columns[:, len(self._costs)]


class EvictionOrder:
    """Snapshots, of which `first` returns the one with the highest eviction score.

    The order changes with time, because the age of a snapshot does. Each score is however the larger of two numbers,
    (age / cost) and (interval / cost), so the highest score is the highest of these numbers:

    - the longest known interval / cost, which does not change with time;
    - the mean interval / cost, for snapshots with an unknown interval. The mean is a common factor, so the order does
      not change either;
    - the age / cost. Of snapshots with equal costs, the oldest has the highest. Costs are multiples of 128 tokens,
      times one of a few weights, so the number of different ones is bounded by the context length, not by the number
      of snapshots. There may be thousands, which `Heads` compares at once.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._known, self._unknown = Ranking(), Ranking()
        # Cost -> snapshots of this cost by age.
        self._oldest: dict[float, Ranking] = {}
        self._heads = Heads()

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, number: int) -> bool:
        return number in self.entries

    def rankings(self) -> list[Ranking]:
        """Return all rankings, for checks of their sizes."""
        return [self._known, self._unknown, *self._oldest.values()]

    def put(self, number: int, entry: Entry) -> None:
        """Add a snapshot, or change what its score depends on."""
        if self.entries.get(number) == entry:
            return
        self.drop(number)
        self.entries[number] = entry
        tie = 1 + TIE * entry.last
        if entry.interval:
            self._known.put(number, -max(entry.interval, 1.0) * tie / entry.cost)
        else:
            self._unknown.put(number, -tie / entry.cost)
        self._oldest.setdefault(entry.cost, Ranking()).put(number, entry.last)
        self._note_head(entry.cost)

    def drop(self, number: int) -> None:
        """Remove a snapshot, if it is there."""
        if (entry := self.entries.pop(number, None)) is None:
            return
        (self._known if entry.interval else self._unknown).drop(number)
        self._oldest[entry.cost].drop(number)
        self._note_head(entry.cost)

    def _note_head(self, cost: float) -> None:
        if (head := self._oldest[cost].first()) is None:
            del self._oldest[cost]
            self._heads.drop(cost)
        else:
            self._heads.put(cost, *head)

    def first(self, now: int, mean_interval: float) -> tuple[int, float]:
        """Return the snapshot with the highest eviction score (of equal ones, the smallest number) and the score.
        Return (0, 0.0) without snapshots."""
        return self._first_of([self], now, mean_interval)

    def _first_of(self, orders: Sequence[EvictionOrder], now: int, mean_interval: float) -> tuple[int, float]:
        """Return `first` of all snapshots in the given orders, which are in this one too."""
        tops = {_longest_waiting([order._heads for order in orders], now)}
        for rankings in ([order._known for order in orders], [order._unknown for order in orders]):
            tops.add(min((top for ranking in rankings if (top := ranking.first())), default=(0.0, 0))[1])
        best = 0, 0.0
        for number in tops - {0}:
            score = self.entries[number].score(now, mean_interval)
            if score > best[1] or (score == best[1] and number < best[0]):
                best = number, score
        return best

    def descending(self, now: int, mean_interval: float) -> Iterator[tuple[float, int]]:
        """Yield eviction scores and snapshots, highest score first (of equal ones, the smallest number first). The
        snapshots must not change meanwhile."""

        def unknown() -> Iterator[tuple[float, int]]:
            for key, number in self._unknown.ascending():
                yield key * max(mean_interval, 1.0), number

        def waiting(cost: float, oldest: Ranking) -> Iterator[tuple[float, int]]:
            for last, number in oldest.ascending():
                yield -(now - last) * (1 + TIE * last) / cost, number

        seen = set()
        ages = (waiting(cost, oldest) for cost, oldest in self._oldest.items())
        for _, number in heapq.merge(self._known.ascending(), unknown(), *ages):
            if number not in seen:  # the larger of its two numbers, which is its score, comes first
                seen.add(number)
                yield self.entries[number].score(now, mean_interval), number


def _longest_waiting(heads: Sequence[Heads], now: int) -> int:
    """Return the snapshot with the highest age / cost (of equal ones, the smallest number), or 0 without heads."""
    columns = [of.columns() for of in heads]
    last, tie, cost, numbers = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    if not len(numbers):
        return 0
    waiting = (now - last) * tie / cost
    return int(numbers[waiting == waiting.max()].min())
