"""Eviction policy of the prefix cache: the value of each snapshot, and the orders in which device and host evict."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from dsv4_sglang.srt.prefix_cache.eviction_order import TIE, Entry, EvictionOrder
from dsv4_sglang.srt.prefix_cache.resume_points import ResumePoint
from dsv4_sglang.srt.prefix_cache.tenants import DEVICE, HOST

if TYPE_CHECKING:
    from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry

# Most snapshots that a search for the next evictions returns for slots, and for blocks. All of a larger margin would
# take milliseconds to find, and one scheduler iteration saves fewer.
CANDIDATES = 256

# Index of all snapshots in a column.
EVERY = slice(None)


class EvictionPolicy:
    """Value of the snapshots of a registry. The snapshot with the lowest value is evicted:

        value          = recompute_cost x probability of reuse x weight
        recompute_cost = (length - length of `previous`) x probability that it is needed (`SnapshotRegistry.needed`)
        probability    ~ 1 / reuse_interval
        reuse_interval = max(age, interval of the branch, or the mean interval while the branch was never reused)

    `recompute_cost` is the number of tokens to recompute without the snapshot. `age` is the time since the snapshot was
    taken or last resumed from. `interval` is a moving average of the times between uses of the branch, and the mean is
    that of `ReuseEstimate`. A hint (`HintWeights`) replaces both by the wait that it lets expect, and has a `weight`,
    else 1. The code compares the reciprocal of the value, `eviction_score`: the highest score is evicted first. Blocks
    are evicted by `reuse_interval` divided by `weight`, since every block saves the same number of tokens.

    A branch with an interval too long for the pool is thus evicted before branches that the pool can hold. Before the
    first reuse all intervals are unknown, and the oldest snapshots stay.
    """

    def __init__(self, registry: SnapshotRegistry) -> None:
        self.registry, tenants = registry, registry.tenants
        # Snapshots whose blocks end in a leaf that the tree may evict, by reuse interval (`at_leaf`).
        self.leaves = tenants.order(DEVICE)
        # Snapshots in device slots that may be evicted for their slot, by eviction score.
        self._for_slots = tenants.order(DEVICE)
        # Copies on the host that are no duplicates, by eviction score and by reuse interval.
        self.host_rows, self.host_blocks = tenants.order(HOST), tenants.order(HOST)
        # Result of the last search for the snapshots that the device evicts next (`mark_next_evicted`).
        self._next_evicted = np.zeros(registry.size, dtype=bool)

    # Values

    def _interval(self, number: int) -> float:
        return float(self.registry.hints.expected[number] or self.registry.interval[number])

    def _cost(self, number: int) -> float:
        """Return the element of `recompute_cost` for one snapshot."""
        registry = self.registry
        saved = float(registry.length[number] - registry.length[registry.previous[number]])
        return saved * float(registry.needed[number])

    def _entry(self, number: int, cost: float) -> Entry:
        weight = float(self.registry.hints.weight[number])
        return Entry(int(self.registry.last[number]), self._interval(number), max(cost, 1e-9) * weight)

    def recompute_cost(self, at: slice | np.ndarray = EVERY) -> np.ndarray:
        """Return the tokens to recompute without each of the snapshots `at`, times the probability that it is
        needed."""
        registry = self.registry
        saved = np.subtract(registry.length[at], registry.length[registry.previous[at]], dtype=np.float64)
        saved *= registry.needed[at]
        return saved

    def reuse_interval(self, at: slice | np.ndarray = EVERY) -> np.ndarray:
        """Return the expected time to reuse (reciprocal of its probability) of the snapshots `at`, divided by the
        weights of their hints, float64."""
        last, known, hinted = self.registry.last[at], self.registry.interval[at], self.registry.hints.expected[at]
        # In place, because the columns of a large registry do not fit into the processor's caches.
        expected = np.where(known > 0, known, self.registry.reuse.mean_interval)
        np.copyto(expected, hinted, where=hinted > 0)
        np.maximum(expected, self.registry.now - last, out=expected)
        np.maximum(expected, 1.0, out=expected)
        expected *= 1 + TIE * last
        expected /= self.registry.hints.weight[at]
        return expected

    def eviction_score(self, at: slice | np.ndarray = EVERY) -> np.ndarray:
        """Return `reuse_interval` divided by `recompute_cost`. The highest score is evicted first."""
        return self.reuse_interval(at) / np.maximum(self.recompute_cost(at), 1e-9)

    # Orders that are kept up to date

    def changed(self, *numbers: int) -> None:
        """Update the eviction orders after a change of these snapshots. 0 is skipped."""
        for number in filter(None, numbers):
            if number in self.leaves:
                self.at_leaf(number, True)
            for order, entry in self._places(number):
                if entry is None:
                    order.drop(number)
                else:
                    order.put(number, entry)

    def _places(self, number: int) -> Iterator[tuple[EvictionOrder, Entry | None]]:
        """Yield the orders that are derived from the registry, each with the entry of a snapshot. None: it has none."""
        registry = self.registry
        here = bool(registry.in_registry[number])
        on_host = here and (
            number > registry.capacity or bool(self._next_evicted[number] and registry.copies.is_saved(number))
        )
        for_slot = here and number <= registry.capacity and not registry.locks[number]
        by_score = self._entry(number, self._cost(number)) if for_slot or on_host else None
        yield self._for_slots, by_score if for_slot else None
        yield self.host_rows, by_score if on_host else None
        yield self.host_blocks, self._entry(number, 1.0) if on_host else None

    def forget(self, number: int) -> None:
        """Drop a number that no longer denotes a snapshot from all orders."""
        self._next_evicted[number] = False
        self.leaves.drop(number)
        for order in (self._for_slots, self.host_rows, self.host_blocks):
            order.drop(number)

    def at_leaf(self, number: int, at_leaf: bool) -> None:
        """Note that the blocks of a snapshot end in a leaf that the tree may evict, or that they do not any more."""
        if at_leaf:
            self.leaves.put(number, self._entry(number, 1.0))
        else:
            self.leaves.drop(number)

    def misplaced(self) -> Iterator[int]:
        """Yield the snapshots whose place in an eviction order is not that of their columns, for the integrity
        audit."""
        orders = (self.leaves, self._for_slots, self.host_rows, self.host_blocks)
        listed = {number for order in orders for number in order.entries}
        for number in sorted(listed | set(np.flatnonzero(self.registry.in_registry).tolist())):
            at_leaf = self.leaves.entries.get(number)
            places = self._places(number)
            if at_leaf not in (None, self._entry(number, 1.0)) or any(o.entries.get(number) != e for o, e in places):
                yield number

    # Evictions from the device

    def next_leaf(self) -> int:
        """Return the snapshot with the longest `reuse_interval` of those at a leaf, or 0 if there is none."""
        return self.leaves.first(self.registry.now, self.registry.reuse.mean_interval)[0]

    def lowest_value(self, *, needed: bool, saves: int) -> int:
        """Return the device snapshot to evict for its slot, or 0 if there is none.

        Args:
            needed: the new snapshot will be used for certain. If False, return 0 unless some snapshot is worth less
                than the new one, which is assumed to lie within a prompt.
            saves: recompute cost of the new snapshot in tokens.
        """
        mean_interval = self.registry.reuse.mean_interval
        slot, score = self._for_slots.first(self.registry.now, mean_interval)
        within = self.registry.resumes.needed(ResumePoint.WITHIN, ResumePoint.PROMPT)
        least = 0.0 if needed else max(mean_interval, 1.0) / max(saves * within, 1e-9)
        return slot if score > least else 0

    def next_evicted(self, tokens: int, slots: int, most: int = CANDIDATES) -> list[int]:
        """Return the snapshots that the device evicts next, in order. Does not change the registry.

        Snapshots locked by requests are returned too if they would be evicted without the lock. They free nothing.

        Args:
            tokens: tokens of blocks to free, by evicting the ends of paths.
            slots: snapshot slots to free.
            most: limit of the snapshots that are returned for tokens, and of those for slots.
        """
        registry = self.registry
        here, locks = (column[: registry.capacity + 1] for column in (registry.in_registry, registry.locks))
        # Snapshots of the last search that only a running copy to the host locks become evictable when the copy ends.
        copying = (self._next_evicted & registry.copies.saved())[: len(here)] & (locks > 0)
        free = here & ((locks == 0) | copying)
        leaving: dict[int, None] = {}
        device = slice(len(here))
        reuse_interval = self.reuse_interval(device) * registry.tenants.factor(DEVICE, device)
        if slots > 0:
            cost = self.recompute_cost(device)
            score = reuse_interval / np.maximum(cost, 1e-9, out=cost)
            order = _first(here, score, lambda ids: free[ids], slots, most)
            leaving.update(dict.fromkeys(order.tolist()))
        if tokens > 0:
            ends = self._ends_to_evict(here, free, reuse_interval, tokens, most)
            leaving.update(dict.fromkeys(islice(ends, most)))
        return list(leaving)

    def _ends_to_evict(
        self, here: np.ndarray, free: np.ndarray, reuse_interval: np.ndarray, tokens: int, most: int
    ) -> Iterator[int]:
        """Yield the snapshots that end paths on the device, in the order in which their blocks are evicted, until that
        frees `tokens` tokens. Those that are not `free` are yielded too, but free nothing."""
        registry = self.registry
        length, previous = registry.length, registry.previous
        followers = np.bincount(previous[: len(here)] * here, minlength=registry.size)

        def saved(ids: np.ndarray) -> np.ndarray:
            return free[ids] * (length[ids] - length[previous[ids]])

        order = _first(here & (followers[: len(here)] == 0), reuse_interval, saved, tokens, most)
        ends = [(-reuse_interval[slot], slot) for slot in order.tolist()]
        while ends and tokens > 0:
            _, slot = heapq.heappop(ends)
            yield slot
            if not free[slot]:
                continue
            above = int(previous[slot])
            tokens -= int(length[slot] - length[above])
            followers[above] -= 1
            if 0 < above <= registry.capacity and here[above] and not followers[above]:
                heapq.heappush(ends, (-reuse_interval[above], above))

    # Host cache

    def mark_next_evicted(self, numbers: Iterable[int]) -> None:
        """Note the result of the last search. The host keeps the copies of these snapshots (`duplicates`)."""
        before = np.flatnonzero(self._next_evicted).tolist()
        self._next_evicted[:] = False
        self._next_evicted[leaving := list(numbers)] = True
        self.changed(*before, *leaving)

    def to_save(self) -> list[int]:
        """Return the slots that the host should copy at once, most valuable first."""
        slots = self.registry.copies.due()
        return slots[np.argsort(self.eviction_score()[slots], kind="stable")].tolist() if len(slots) else []

    def duplicates(self) -> np.ndarray:
        """Return a bool column by number: True if the host has a copy of a snapshot that the device keeps."""
        return self.registry.copies.saved() & ~self._next_evicted

    def entry(self, number: int, *, for_rows: bool) -> Entry:
        """Return the element of `eviction_score`, or of `reuse_interval`, for one snapshot."""
        return self._entry(number, self._cost(number) if for_rows else 1.0)


def _first(
    wanted: np.ndarray, score: np.ndarray, amount: Callable[[np.ndarray], np.ndarray], needed: int, most: int
) -> np.ndarray:
    """Return the ids of highest score, in descending order, until their amounts add up to `needed`, at most `most`.

    Args:
        wanted: bool column by id: True if an id may be returned.
        score: column by id, above 0.
        amount: function that returns the amounts of ids.
        needed: sum of the amounts.
        most: limit of the ids.
    """
    scores = score * wanted
    least = np.partition(scores, -most)[-most] if len(scores) > most else 0.0
    ids = np.flatnonzero(wanted & (scores >= least))
    order = ids[np.argsort(-score[ids], kind="stable")]
    return order[: min(most, int(np.searchsorted(np.cumsum(amount(order)), needed)) + 1)]
