"""Registry of all snapshots: their places, their history, and which follows which.

The registry does not depend on a tree or a server. A snapshot is identified by a number:

- 1..capacity: the slot that it has in the snapshot pool on the device;
- capacity + 1 and up: the row that it has in host memory, if the device does not have it (`host_id`);
- 0: no snapshot.

The snapshots form a forest of their own. `previous` is the next snapshot on the path to the root of the prefix tree, no
matter how many blocks or nodes are between the two. A branch is a path of snapshots without a fork, usually one
conversation. Its end is the snapshot that has no follower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dsv4_sglang.srt.prefix_cache.hint_weights import Hint, HintWeights
from dsv4_sglang.srt.prefix_cache.host_copy import CopyEvent, HostCopies
from dsv4_sglang.srt.prefix_cache.policy import EvictionPolicy
from dsv4_sglang.srt.prefix_cache.resume_points import BEFORE, ResumeEstimate, ResumePoint
from dsv4_sglang.srt.prefix_cache.reuse import ReuseEstimate
from dsv4_sglang.srt.prefix_cache.tenants import DEVICE, HOST, Tenants

# Evicted branches that are remembered for ghost hits and for the judgement of hints, per place of the registry.
REMEMBERED = 4


class SnapshotRegistry:
    """Snapshots in slots 1..capacity of the device and in `host_rows` rows of the host cache.

    Time is counted in admitted requests (`tick`).
    """

    def __init__(
        self,
        capacity: int,
        host_rows: int = 0,
        policy: type[EvictionPolicy] = EvictionPolicy,
        *,
        tenants: Tenants | None = None,
    ) -> None:
        """Create an empty registry.

        Args:
            capacity: snapshot slots of the device.
            host_rows: rows of the host cache.
            policy: eviction policy.
            tenants: what tenants hold (`tenants_of`). None: it is not limited.
        """
        self.capacity = capacity
        self.now = 0
        # Incremented by each change that may alter the order of snapshots.
        self.changes = 0
        self.size = size = capacity + host_rows + 1
        # Columns by number of a snapshot. Tokens of the path that it covers.
        self.length = np.zeros(size, dtype=np.int64)
        # Time when the snapshot was taken or last resumed from.
        self.last = np.zeros(size, dtype=np.int64)
        # Moving average of the times between uses, 0 while unknown.
        self.interval = np.zeros(size, dtype=np.float64)
        # The number denotes a snapshot.
        self.in_registry = np.zeros(size, dtype=bool)
        # Its `ResumePoint` (`set_point`). Those of a storage are not known and count as ends of prompts.
        self.point = np.full(size, ResumePoint.PROMPT, dtype=np.int8)
        # The newest snapshot after this end of a prompt was the end of the answer.
        self.answered = np.zeros(size, dtype=bool)
        # Probability that a request needs it to go on with its conversation, when its neighbours last changed.
        self.needed = np.ones(size, dtype=np.float64)
        # Number of requests and copies that use it.
        self.locks = np.zeros(size, dtype=np.int32)
        # The next snapshot on the path to the root, or 0.
        self.previous = np.zeros(size, dtype=np.int64)
        # Number of snapshots that have this one as `previous`.
        self.followers = np.zeros(size, dtype=np.int64)
        self.copies = HostCopies(size)
        self.hints = HintWeights(size, REMEMBERED * size)
        self.tenants = tenants or Tenants()
        self.reuse = ReuseEstimate(REMEMBERED * size)
        self.resumes = ResumeEstimate()
        self.policy = policy(self)

    def tick(self) -> None:
        self.now += 1
        self.changes += 1

    def set_point(self, slot: int, point: ResumePoint) -> None:
        """Note which resume point a step writes to an unused slot, before `add`."""
        self.point[slot] = point

    def add(self, slot: int, length: int, previous: int, following: Iterable[int] = (), *, tenant: str = "") -> None:
        """Add a snapshot to the forest.

        Args:
            slot: number of the snapshot; must be unused.
            length: tokens of the path that it covers.
            previous: the next snapshot on the path to the root, or 0.
            following: followers of `previous` that now follow the new snapshot.
            tenant: the tenant that it belongs to.

        Raises:
            ValueError: the number is in use.
        """
        if self.in_registry[slot]:
            raise ValueError(f"snapshot slot {slot} is in the registry already, at length {self.length[slot]}")
        self.changes += 1
        # A continued branch keeps its interval. A fork starts a branch with no history.
        self.interval[slot] = self.interval[previous] if previous and self.ends_branch(previous) else 0.0
        self.in_registry[slot] = True
        self.length[slot], self.last[slot], self.locks[slot] = length, self.now, 0
        following = list(following)
        self.previous[slot], self.previous[following] = previous, slot
        self.tenants.assign(slot, tenant)
        self._count(slot, self._tokens_of(slot), 1)
        for number in following:
            self._count(number, -self._tokens_of(slot), 0)
        self.followers[slot] = len(following)
        self.followers[previous] += 1 - len(following)
        self.answered[slot] = False
        self.answered[previous] = self.point[slot] == ResumePoint.ANSWER and self.point[previous] == ResumePoint.PROMPT
        self._weigh(slot, following)
        self._weigh(previous, [slot])
        self.policy.changed(slot, previous, *following)

    def remove(self, slot: int, path_hash: int = 0) -> None:
        """Remove an evicted snapshot. Its followers follow the snapshot before it.

        Args:
            slot: number of the snapshot; must be unlocked.
            path_hash: hash of its token path if it is the end of a branch, for ghost hits. 0 records no ghost.

        Raises:
            ValueError: the snapshot is locked or not in the registry.
        """
        if not self.in_registry[slot] or self.locks[slot]:
            raise ValueError(f"snapshot slot {slot} is {'locked' if self.in_registry[slot] else 'not in the registry'}")
        self.changes += 1
        if self.ends_branch(slot):
            self.reuse.wait_ended(float(self.now - self.last[slot]), reused=False)
            if path_hash:
                self.reuse.remember(path_hash, int(self.last[slot]))
        self.hints.evicted(slot, path_hash, last=int(self.last[slot]), now=self.now)
        following, previous = list(self.following(slot)), int(self.previous[slot])
        for number in following:
            self._count(number, self._tokens_of(slot), 0)
        self._count(slot, -self._tokens_of(slot), -1)
        self.previous[following] = previous
        self.followers[previous] += len(following) - 1
        self._forget(slot)
        self._weigh(previous, following)
        self.policy.changed(previous, *following)

    def count_tenants(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """Return `Tenants.held` as a scan of all snapshots finds it, for the integrity audit."""
        numbers = np.flatnonzero(self.in_registry).tolist()
        return self.tenants.sums((self._place(number), number, self._tokens_of(number)) for number in numbers)

    def _place(self, number: int) -> int:
        return DEVICE if number <= self.capacity else HOST

    def _tokens_of(self, number: int) -> int:
        """Return the tokens after the snapshot before this one."""
        return int(self.length[number] - self.length[self.previous[number]])

    def _count(self, number: int, tokens: int, snapshots: int) -> None:
        """Add tokens and snapshots to what the tenant of a snapshot holds."""
        self.tenants.count(self._place(number), number, tokens, snapshots)

    def _weigh(self, slot: int, following: Sequence[int]) -> None:
        """Update `needed` of a snapshot after a change of its followers. `following`: some of them."""
        if self.followers[slot] > 1:  # a fork
            self.needed[slot] = 1.0
        elif not self.followers[slot]:
            self.needed[slot] = self.resumes.needed(self.point[slot])
        else:
            after = next(iter(following or self.following(slot)))
            self.needed[slot] = self.resumes.needed(self.point[slot], self.point[after])

    def _forget(self, slot: int) -> None:
        self.in_registry[slot] = False
        self.point[slot] = ResumePoint.PROMPT
        self.followers[slot] = 0
        self.copies.forget(slot)
        self.hints.drop(slot)
        self.policy.forget(slot)

    def host_id(self, row: int) -> int:
        """Return the number of the snapshot in host row `row` (0-based) that the device does not have."""
        return self.capacity + 1 + row

    def move(self, slot: int, to: int) -> None:
        """Give a snapshot a new number, `to`. It keeps its history and its neighbours. The host keeps its copy.

        Raises:
            ValueError: the snapshot is not in the registry or is locked, or `to` is in use.
        """
        if not self.in_registry[slot] or self.locks[slot] or self.in_registry[to]:
            raise ValueError(f"snapshot {slot} cannot move to {to}: not in the registry, locked, or taken")
        self.changes += 1
        self.previous[list(self.following(slot))] = to
        history = self.length, self.last, self.interval, self.point, self.answered, self.needed
        for column in (*history, self.previous, self.followers):
            column[to] = column[slot]
        self.locks[to] = 0
        self.hints.move(slot, to)
        self.tenants.move(slot, to)
        self._count(to, self._tokens_of(to), 1)
        self._count(slot, -self._tokens_of(to), -1)
        at_leaf = slot in self.policy.leaves
        self._forget(slot)
        self.in_registry[to] = True
        if slot > self.capacity >= to:
            self.copies.apply(CopyEvent.LOAD, to)
        self.policy.at_leaf(to, at_leaf)
        self.policy.changed(to)

    def use(self, slot: int) -> float:
        """Record that a request resumes from the snapshot. Return the time since it was taken or last used."""
        self.changes += 1
        since = float(self.now - self.last[slot])
        known = self.interval[slot]
        self.interval[slot] = since if known == 0 else (known + since) / 2
        if self.ends_branch(slot):
            self.reuse.wait_ended(since, reused=True)
            self.hints.used(slot, since)
        else:
            self.hints.drop(slot)
        self.last[slot] = self.now
        self.policy.changed(slot)
        return since

    def resumed(self, slot: int, below: Sequence[int] | None, *, recomputes: bool) -> None:
        """Count at which resume point a request goes on with a conversation, if that is known.

        Args:
            slot: the snapshot from which it resumes, or 0.
            below: the next snapshots after the place where it leaves the cached path; None if that is at `slot`.
            recomputes: it recomputes an evicted branch (`ghost_hit`).
        """
        if below:
            after = below[0]
            of_last_turn = len(below) == 1 and (self.ends_branch(after) or self.answered[after])
            if of_last_turn and self.point[after] in BEFORE:
                self.resumes.count(BEFORE[self.point[after]])
        elif slot and self.followers[slot] <= 1:  # which conversation of a fork goes on is not known
            ends = self.ends_branch(slot)
            if self.answered[slot] and (ends or below is None):
                # The blocks of the answer, or a memory of them, outlive its snapshot.
                repeats = below is not None or recomputes
                self.resumes.count(ResumePoint.ANSWER if repeats else ResumePoint.PROMPT)
            elif self.point[slot] == ResumePoint.ANSWER and ends:
                self.resumes.count(ResumePoint.ANSWER)

    def hint(self, slot: int, hint: Hint, until: float | None = None) -> bool:
        """Give a snapshot a hint until a time in seconds (`HintWeights.give`). Return False if it is not trusted."""
        self.changes += 1
        trusted = self.hints.give(slot, hint, until)
        self.policy.changed(slot)
        return trusted

    def end_hints(self, now: float) -> None:
        """End the hints whose time is over at `now`, in seconds."""
        if ended := self.hints.expire(now):
            self.changes += 1
            self.policy.changed(*ended)

    def ghost_hit(self, path_hashes: Iterable[int]) -> float:
        """Count a reuse if a request recomputes an evicted branch.

        Args:
            path_hashes: hashes of the request's recomputed prefixes, longest first. Only the first match counts.

        Returns:
            The time since the last use of the longest evicted path. 0 if none is remembered.
        """
        path_hashes = list(path_hashes)
        self.hints.returned(path_hashes, self.now, self.reuse.typical_wait())
        since = self.reuse.ghost_hit(path_hashes, self.now)
        if since is None:
            return 0.0
        # The order of snapshots without a reuse depends on the estimate.
        self.changes += 1
        return since

    def note_copy(self, event: CopyEvent, slot: int) -> None:
        """Change the state of the host copy of a snapshot in a device slot (`HostCopies.apply`)."""
        self.copies.apply(event, slot)
        self.policy.changed(slot)

    def lock(self, slot: int) -> None:
        self.locks[slot] += 1
        if self.locks[slot] == 1:  # further locks change no order
            self.policy.changed(slot)

    def unlock(self, slot: int) -> None:
        self.locks[slot] -= 1
        assert self.locks[slot] >= 0, f"snapshot slot {slot} unlocked once too often"
        if not self.locks[slot]:
            self.policy.changed(slot)

    def ends_branch(self, slot: int) -> bool:
        """Return True if no later snapshot is on a path through this one, so that it belongs to one conversation."""
        return not self.followers[slot]

    def superseded(self, slot: int) -> bool:
        """Return True if a later snapshot is on the same branch, on the device or on the host."""
        return bool(self.followers[slot] == 1)

    def following(self, slot: int) -> set[int]:
        """Return the next snapshots on the paths below this one."""
        if self.ends_branch(slot):
            return set()
        return set(np.flatnonzero(self.in_registry & (self.previous == slot)).tolist())
