"""Eviction policy of the prefix cache: the registry of all snapshots, and the value of each.

The registry does not depend on a tree or a server. A snapshot is identified by a number:

- 1..capacity: the slot that it has in the snapshot pool on the device;
- capacity + 1 and up: the row that it has in host memory, if the device does not have it (`host_id`);
- 0: no snapshot.

The snapshots form a forest of their own. `previous` is the next snapshot on the path to the root of the prefix tree, no
matter how many blocks or nodes are between the two. A branch is a path of snapshots without a fork, usually one
conversation. Its end is the snapshot that has no follower.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from dsv4_sglang.srt.prefix_cache.eviction_order import TIE, Entry, EvictionOrder

# Factor on the probability of reuse if a later snapshot exists on the same branch. A conversation normally resumes from
# its end; only an edited or repeated turn resumes from an earlier snapshot. `benchmarks/prefix_simulation.py` hits
# 98.1 % with 1/16, 97.4 % with 1/4, 97.7 % with 1/64.
SUPERSEDED = 1 / 16

# Larger than any real interval.
UNKNOWN = 1e12

# Number of branch ends, reused or evicted, over which the mean interval is averaged (exponentially).
MEMORY = 256

# Upper limit of the mean interval, as a multiple of the mean interval of branches that were reused. A larger limit
# favours workloads that reuse everything, a smaller one workloads with many finished conversations: factors 1.5, 2 and
# 3 hit 10.4, 13.9, 14.2 % of one load of `benchmarks/agent_trace.py` and 78, 74, 63 % of another.
INTERVAL_CAP = 2

# Evicted branches that are remembered for ghost hits, per place of the registry. Each takes about 100 bytes.
REMEMBERED = 4

# With a host cache, 1/MARGIN of the device is kept free or evictable without a copy (the host has one already), so that
# an allocation rarely waits for a save. With a larger share the host would hold more duplicates.
MARGIN = 32

# Most snapshots that a search for the next evictions returns for slots, and for blocks. All of a larger margin would
# take milliseconds to find, and one scheduler iteration saves fewer.
CANDIDATES = 256


class SnapshotRegistry:
    """Snapshots in slots 1..capacity of the device and in `host_rows` rows of the host cache.

    Time is counted in admitted requests (`tick`). The policy evicts the snapshot with the lowest value:

        value          = recompute_cost x probability of reuse
        recompute_cost = (length - length of `previous`) x (SUPERSEDED if a later snapshot is on the branch, else 1)
        probability    ~ 1 / reuse_interval
        reuse_interval = max(age, interval of the branch, or `mean_interval` while the branch was never reused)

    `recompute_cost` is the number of tokens to recompute without the snapshot. `age` is the time since the snapshot was
    taken or last resumed from. `interval` is a moving average of the times between uses of the branch. The code
    compares the reciprocal of the value, `eviction_score`: the highest score is evicted first. Blocks are evicted by
    `reuse_interval` alone, since every block saves the same number of tokens.

    A branch with an interval too long for the pool is thus evicted before branches that the pool can hold. Before the
    first reuse all intervals are UNKNOWN, and the oldest snapshots stay.

    `mean_interval` is the total time that branch ends have waited, divided by the number of their reuses. Three rules
    keep this estimate useful:

    - Branches evicted without reuse contribute their waiting time (censored observations). In a full pool only the
      shortest intervals end in a reuse. If only these counted, a pool for a tenth of the conversations would keep the
      newest ones, evict each just before its next turn, and hit almost nothing.
    - Conversations that return after their eviction count as reuses (ghost hits, `ghost_hit`). Without them the
      estimate stays too short while the working set grows, and the pool thrashes.
    - The estimate is limited to INTERVAL_CAP times the mean interval of the reuses. Otherwise a pool full of finished
      conversations would wait for them and keep out new ones.
    """

    def __init__(self, capacity: int, host_rows: int = 0) -> None:
        self.capacity = capacity
        self.now = 0
        # Mean time between uses over all branches. It applies to branches that were never reused.
        self.mean_interval = UNKNOWN
        self._waited = self._uses = self._used_after = 0.0
        # Incremented by each change that may alter the order of snapshots.
        self.changes = 0
        # Ghosts: path hash of the end of an evicted branch -> time of its last use. Oldest eviction first.
        self._ghosts: dict[int, int] = {}
        size = capacity + host_rows + 1
        # Columns by number of a snapshot. Tokens of the path that it covers.
        self.length = np.zeros(size, dtype=np.int64)
        # Time when the snapshot was taken or last resumed from.
        self.last = np.zeros(size, dtype=np.int64)
        # Moving average of the times between uses, 0 while unknown.
        self.interval = np.zeros(size, dtype=np.float64)
        # The snapshot is in the registry.
        self.held = np.zeros(size, dtype=bool)
        # Number of requests and copies that use it.
        self.locks = np.zeros(size, dtype=np.int32)
        # The next snapshot on the path to the root, or 0.
        self.previous = np.zeros(size, dtype=np.int64)
        # Number of snapshots that have this one as `previous`.
        self.followers = np.zeros(size, dtype=np.int64)
        # The next four apply to snapshots in device slots only.
        # The host has a copy.
        self.copied = np.zeros(size, dtype=bool)
        # The host must get a copy before the device evicts the snapshot.
        self.pending_write = np.zeros(size, dtype=bool)
        # No early copy is due: one was made, found no room, or is not needed before eviction.
        self.attempted = np.zeros(size, dtype=bool)
        # The snapshot is among the next that the device evicts (`note_eviction_candidates`).
        self.evicted_next = np.zeros(size, dtype=bool)
        # Snapshots whose blocks end in a leaf that the tree may evict, by reuse interval (`at_leaf`).
        self.leaves = EvictionOrder()
        # Snapshots in device slots that may be evicted for their slot, by eviction score.
        self._for_slots = EvictionOrder()

    def tick(self) -> None:
        self.now += 1
        self.changes += 1

    def add(self, slot: int, length: int, previous: int, following: Iterable[int] = ()) -> None:
        """Add a snapshot to the forest.

        Args:
            slot: number of the snapshot; must be unused.
            length: tokens of the path that it covers.
            previous: the next snapshot on the path to the root, or 0.
            following: followers of `previous` that now follow the new snapshot.

        Raises:
            ValueError: the number is in use.
        """
        if self.held[slot]:
            raise ValueError(f"snapshot slot {slot} is in the registry already, at length {self.length[slot]}")
        self.changes += 1
        # A continued branch keeps its interval. A fork starts a branch with no history.
        self.interval[slot] = self.interval[previous] if previous and not self.followers[previous] else 0.0
        self.held[slot] = True
        self.length[slot], self.last[slot], self.locks[slot] = length, self.now, 0
        following = list(following)
        self.previous[slot], self.previous[following] = previous, slot
        self.followers[slot] = len(following)
        self.followers[previous] += 1 - len(following)
        self._reorder(slot, previous, *following)

    def remove(self, slot: int, path_hash: int = 0) -> None:
        """Remove an evicted snapshot. Its followers follow the snapshot before it.

        Args:
            slot: number of the snapshot; must be unlocked.
            path_hash: hash of its token path if it is the end of a branch, for ghost hits. 0 records no ghost.

        Raises:
            ValueError: the snapshot is locked or not in the registry.
        """
        if not self.held[slot] or self.locks[slot]:
            raise ValueError(f"snapshot slot {slot} is {'locked' if self.held[slot] else 'not in the registry'}")
        self.changes += 1
        if not self.followers[slot]:
            self._waiting_ended(float(self.now - self.last[slot]), used=False)
            if path_hash:
                self._ghosts.pop(path_hash, None)
                self._ghosts[path_hash] = int(self.last[slot])
                if len(self._ghosts) > REMEMBERED * len(self.held):
                    del self._ghosts[next(iter(self._ghosts))]
        following, previous = list(self.following(slot)), int(self.previous[slot])
        self.previous[following] = previous
        self.followers[previous] += len(following) - 1
        self._forget(slot)
        self._reorder(previous, *following)

    def _forget(self, slot: int) -> None:
        for column in (self.held, self.copied, self.pending_write, self.attempted, self.evicted_next, self.followers):
            column[slot] = False
        self.leaves.drop(slot)
        self._for_slots.drop(slot)

    def host_id(self, row: int) -> int:
        """Return the number of the snapshot in host row `row` (0-based) that the device does not have."""
        return self.capacity + 1 + row

    def move(self, slot: int, to: int) -> None:
        """Give a snapshot a new number, `to`. It keeps its history and its neighbours.

        Raises:
            ValueError: the snapshot is not in the registry or is locked, or `to` is in use.
        """
        if not self.held[slot] or self.locks[slot] or self.held[to]:
            raise ValueError(f"snapshot {slot} cannot move to {to}: not held, locked, or taken")
        self.changes += 1
        self.previous[list(self.following(slot))] = to
        for column in (self.length, self.last, self.interval, self.previous, self.followers):
            column[to] = column[slot]
        self.locks[to] = 0
        at_leaf = slot in self.leaves
        self._forget(slot)
        self.held[to] = True
        self.at_leaf(to, at_leaf)
        self._reorder(to)

    def use(self, slot: int) -> float:
        """Record that a request resumes from the snapshot. Return the time since it was taken or last used."""
        self.changes += 1
        since = float(self.now - self.last[slot])
        known = self.interval[slot]
        self.interval[slot] = since if known == 0 else (known + since) / 2
        if not self.followers[slot]:
            self._waiting_ended(since, used=True)
        self.last[slot] = self.now
        self._reorder(slot)
        return since

    def ghost_hit(self, path_hashes: Iterable[int]) -> float:
        """Count a reuse if a request recomputes an evicted branch.

        Args:
            path_hashes: hashes of the request's recomputed prefixes, longest first. Only the first match counts.

        Returns:
            The time since the last use of the longest evicted path. 0 if none is remembered.
        """
        for path_hash in path_hashes if self._ghosts else ():
            if (last := self._ghosts.pop(path_hash, None)) is not None:
                since = float(self.now - last)
                self._reused_after(since)
                self._estimate()
                return since
        return 0.0

    def _waiting_ended(self, waited: float, *, used: bool) -> None:
        kept = 1 - 1 / MEMORY
        self._waited, self._uses = self._waited * kept + waited, self._uses * kept + used
        if used:
            self._reused_after(waited)
        self._estimate()

    def _reused_after(self, waited: float) -> None:
        self._used_after += (waited - self._used_after) / (32 if self._used_after else 1)

    def _estimate(self) -> None:
        """Update `mean_interval`: waiting time per reuse, which estimates the mean of censored intervals.

        Snapshots without a reuse are ordered by it, so each update increments `changes`.
        """
        self.changes += 1
        if self._uses:
            self.mean_interval = min(self._waited / self._uses, INTERVAL_CAP * self._used_after)

    def lock(self, slot: int) -> None:
        self.locks[slot] += 1
        self._for_slots.drop(slot)

    def unlock(self, slot: int) -> None:
        self.locks[slot] -= 1
        assert self.locks[slot] >= 0, f"snapshot slot {slot} unlocked once too often"
        self._reorder(slot)

    def at_leaf(self, number: int, at_leaf: bool) -> None:
        """Note that the blocks of a snapshot end in a leaf that the tree may evict, or that they do not any more."""
        if at_leaf:
            self.leaves.put(number, self._entry(number, 1.0))
        else:
            self.leaves.drop(number)

    def next_leaf(self) -> int:
        """Return the snapshot with the longest `reuse_interval` of those at a leaf, or 0 if there is none."""
        return self.leaves.first(self.now, self.mean_interval)[0]

    def _reorder(self, *numbers: int) -> None:
        """Update the eviction orders after a change of these snapshots. 0 is skipped."""
        for number in filter(None, numbers):
            if number in self.leaves:
                self.at_leaf(number, True)
            if self.held[number] and number <= self.capacity and not self.locks[number]:
                self._for_slots.put(number, self._entry(number, self._cost(number)))

    def misplaced(self) -> Iterator[int]:
        """Yield the snapshots whose place in an eviction order is not that of their columns, for the integrity
        audit."""
        evictable = set(
            np.flatnonzero(self.held[: self.capacity + 1] & (self.locks[: self.capacity + 1] == 0)).tolist()
        )
        for number in sorted(evictable | self._for_slots.entries.keys() | self.leaves.entries.keys()):
            expected = self._entry(number, self._cost(number)) if number in evictable else None
            at_leaf = self.leaves.entries.get(number)
            if self._for_slots.entries.get(number) != expected or at_leaf not in (None, self._entry(number, 1.0)):
                yield number

    def _entry(self, number: int, cost: float) -> Entry:
        return Entry(int(self.last[number]), self._interval(number), max(cost, 1e-9))

    def _interval(self, number: int) -> float:
        return float(self.interval[number])

    def _cost(self, number: int) -> float:
        """Return the element of `recompute_cost` for one snapshot."""
        saved = float(self.length[number] - self.length[self.previous[number]])
        return saved * (SUPERSEDED if self.superseded(number) else 1.0)

    def superseded(self, slot: int) -> bool:
        """Return True if a later snapshot is on the same branch, on the device or on the host."""
        return bool(self.followers[slot] == 1)

    def following(self, slot: int) -> set[int]:
        """Return the next snapshots on the paths below this one."""
        if not self.followers[slot]:
            return set()
        return set(np.flatnonzero(self.held & (self.previous == slot)).tolist())

    def recompute_cost(self, count: int | None = None) -> np.ndarray:
        """Return the tokens to recompute without each of the first `count` snapshots (default: all), times SUPERSEDED
        where that applies."""
        saved = self.length[:count] - self.length[self.previous[:count]]
        return saved * np.where(self.followers[:count] == 1, SUPERSEDED, 1.0)

    def reuse_interval(self, count: int | None = None) -> np.ndarray:
        """Return the expected time to reuse (reciprocal of its probability) of the first `count` snapshots (default:
        all), float64."""
        last, known = self.last[:count], self.interval[:count]
        interval = np.where(known > 0, known, self.mean_interval)
        return np.maximum(np.maximum(self.now - last, interval), 1.0) * (1 + TIE * last)

    def lowest_value(self, *, needed: bool, saves: int) -> int:
        """Return the device snapshot to evict for its slot, or 0 if there is none.

        Args:
            needed: the new snapshot will be used for certain. If False, return 0 unless some snapshot is worth less
                than the new one, which is assumed to be superseded.
            saves: recompute cost of the new snapshot in tokens.
        """
        slot, score = self._for_slots.first(self.now, self.mean_interval)
        least = 0.0 if needed else max(self.mean_interval, 1.0) / max(saves * SUPERSEDED, 1e-9)
        return slot if score > least else 0

    # Host cache

    def eviction_score(self, count: int | None = None) -> np.ndarray:
        """Return `reuse_interval` divided by `recompute_cost`, by number. The highest score is evicted first."""
        return self.reuse_interval(count) / np.maximum(self.recompute_cost(count), 1e-9)

    def to_copy(self) -> list[int]:
        """Return the slots that the host should copy at once, most valuable first."""
        slots = np.flatnonzero(self.held & self.pending_write & ~self.copied & ~self.attempted)
        return slots[np.argsort(self.eviction_score()[slots], kind="stable")].tolist() if len(slots) else []

    def note_eviction_candidates(self, tokens: int, slots: int, most: int = CANDIDATES) -> list[int]:
        """Return the snapshots that the device evicts next, in order, and mark them in `evicted_next`.

        Snapshots locked by requests are marked too if they would be candidates without the lock, but are not returned.

        Args:
            tokens: tokens of blocks to free, by evicting the ends of paths.
            slots: snapshot slots to free.
            most: limit of the snapshots that are noted for tokens, and of those for slots.
        """
        here, locks = (column[: self.capacity + 1] for column in (self.held, self.locks))
        # Candidates that only a running copy to the host locks become evictable when the copy ends.
        copying = (self.evicted_next & self.copied)[: len(here)] & (locks > 0)
        free = here & ((locks == 0) | copying)
        going: dict[int, None] = {}
        if slots > 0:
            score = self.eviction_score(len(here))
            order = _first(np.flatnonzero(here), score, free.astype(np.int64), slots, most)
            going.update(dict.fromkeys(order.tolist()))
        if tokens > 0:
            going.update(dict.fromkeys(islice(self._ends_to_evict(here, free, tokens, most), most)))
        self.evicted_next[:] = False
        self.evicted_next[list(going)] = True
        return [slot for slot in going if free[slot]]

    def _ends_to_evict(self, here: np.ndarray, free: np.ndarray, tokens: int, most: int) -> Iterator[int]:
        """Yield the snapshots that end paths on the device, in the order in which their blocks are evicted, until that
        frees `tokens` tokens. Those that are not `free` are yielded too, but free nothing."""
        ids, reuse_interval = np.flatnonzero(here), self.reuse_interval(len(here))
        followers = np.bincount(self.previous[ids], minlength=len(self.held))
        saved = np.where(free, self.length[: len(here)] - self.length[self.previous[: len(here)]], 0)
        order = _first(ids[followers[ids] == 0], reuse_interval, saved, tokens, most)
        ends = [(-reuse_interval[slot], slot) for slot in order.tolist()]
        while ends and tokens > 0:
            _, slot = heapq.heappop(ends)
            yield slot
            if not free[slot]:
                continue
            above = int(self.previous[slot])
            tokens -= int(saved[slot])
            followers[above] -= 1
            if 0 < above <= self.capacity and here[above] and not followers[above]:
                heapq.heappush(ends, (-reuse_interval[above], above))

    def host_value(self, score: np.ndarray) -> np.ndarray:
        """Return the value of each snapshot's host copy, by number. The host evicts the smallest first.

        While the device keeps a snapshot, its host copy is a duplicate. It has a negative value, lowest for snapshots
        that the device will keep longest. Other copies have the value of the snapshot itself, and so do copies of those
        that the device evicts next.

        Args:
            score: `eviction_score` if rows of snapshots are needed, `reuse_interval` if blocks are.
        """
        return np.where(self.copied & ~self.evicted_next, -1 / score, 1 / score)

    def on_host(self, value: np.ndarray, below: float = np.inf) -> list[int]:
        """Return the snapshots with a copy on the host and a `host_value` below `below`, in eviction order."""
        everywhere = np.arange(len(self.held))
        ids = everywhere[self.held & (self.copied | (everywhere > self.capacity)) & (value < below)]
        return ids[np.argsort(value[ids], kind="stable")].tolist()


def _first(ids: np.ndarray, score: np.ndarray, amount: np.ndarray, needed: int, most: int) -> np.ndarray:
    """Return the ids of highest score, in descending order, until their amounts add up to `needed`, at most `most`.

    `score` and `amount` are columns by id.
    """
    if len(ids) > most:
        scores = score[ids]
        ids = ids[scores >= np.partition(scores, -most)[-most]]
    order = ids[np.argsort(-score[ids], kind="stable")]
    return order[: min(most, int(np.searchsorted(np.cumsum(amount[order]), needed)) + 1)]
