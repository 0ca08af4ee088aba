"""Weights that hints of requests give to snapshots, and how far the hints of a tenant are trusted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dsv4_sglang.srt.prefix_cache.eviction_order import Ranking

# Weight of a demoted snapshot: less than the ratio of any two values, so that it is evicted first.
DEMOTED = 2.0**-80

# Hints over which the share that came true is averaged, and least number of hints before that share counts.
TRUST_MEMORY, LEAST_JUDGED = 64, 16

# Least share of retained conversations that return, and of demoted ones that do not, for such hints to be applied. A
# wrong demotion costs more, and most traffic has conversations that do not return, so it needs more evidence.
RETAIN_TRUST, DEMOTE_TRUST = 0.75, 0.95

# A conversation that does not return within this multiple of the mean wait between uses is judged as ended.
MOST_WAITS = 3
REMEMBERED = 4

# Most tenants whose hints are judged. The one judged longest ago is forgotten, and has to prove itself again.
MOST_TENANTS = 1024


class Hint(NamedTuple):
    """A hint on one snapshot.

    Attributes:
        weight: factor on the value of the snapshot: above 1 retains it, below 1 demotes it.
        tenant: `cache_salt` of its request, empty without one.
    """

    weight: float
    tenant: str
    seconds: float = 0.0


class HintTrust:
    """Share of the hints that came true, by tenant and kind. Retained conversations are expected to return, demoted
    ones are not."""

    def __init__(self) -> None:
        # (hints that were judged, share that came true): the mean at first, then a moving average.
        self._shares: dict[tuple[str, bool], tuple[int, float]] = {}
        self._paces: dict[str, tuple[float, float]] = {}

    def came_true(self, hint: Hint, wait: float) -> None:
        if hint.seconds:
            kept = 1 - 1 / TRUST_MEMORY
            waits, seconds = self._paces.get(hint.tenant, (0.0, 0.0))
            self._paces[hint.tenant] = waits * kept + wait, seconds * kept + hint.seconds

    def expected_wait(self, hint: Hint) -> float:
        waits, seconds = self._paces.get(hint.tenant, (0.0, 0.0))
        return hint.seconds * waits / seconds if seconds else 0.0

    def judge(self, hint: Hint, *, returned: bool) -> None:
        """Count whether the conversation of a hint returned."""
        key = hint.tenant, hint.weight > 1
        judged, share = self._shares.pop(key, (0, 0.0))
        judged = min(judged + 1, TRUST_MEMORY)
        self._shares[key] = judged, share + ((returned == (hint.weight > 1)) - share) / judged
        if len(self._shares) > 2 * MOST_TENANTS:
            del self._shares[next(iter(self._shares))]

    def trusts(self, hint: Hint) -> bool:
        judged, share = self._shares.get((hint.tenant, hint.weight > 1), (0, 0.0))
        return judged >= LEAST_JUDGED and share >= (RETAIN_TRUST if hint.weight > 1 else DEMOTE_TRUST)


class Evicted(NamedTuple):
    """Hint on an evicted end of a conversation. `last`: last use of the conversation, in admitted requests."""

    hint: Hint
    last: int


class HintWeights:
    """Hints on the snapshots of a registry, and the weights that follow from them.

    A hint ends when a request resumes from the snapshot, when its time is over, or with the snapshot. Hints are judged
    by whether the conversation returns (`HintTrust`), also after its eviction. A hint that is not trusted is judged,
    but does not change the weight: wrong hints cost nothing.
    """

    def __init__(self, size: int) -> None:
        """`size`: numbers of snapshots, with 0."""
        self.weight = np.ones(size, dtype=np.float64)
        self.expected = np.zeros(size, dtype=np.float64)
        self.trust = HintTrust()
        self._hints: dict[int, Hint] = {}
        # Snapshots whose hint ends at a time, by that time in seconds.
        self._ends = Ranking()
        # Hints that wait for their judgement, by path hash. The oldest eviction is the first.
        self._evicted: dict[int, Evicted] = {}
        # Path hashes of those that end at a time, by that time, and of the others, by the time of their eviction.
        self._evicted_ends, self._evicted_at = Ranking(), Ranking()

    def give(self, number: int, hint: Hint, until: float | None) -> bool:
        """Give a snapshot a hint, which replaces an earlier one. Return False if it is not trusted.

        Args:
            number: the snapshot.
            hint: the hint.
            until: time in seconds at which it ends (`expire`). None: never.
        """
        self.drop(number)
        self._hints[number] = hint
        if until is not None:
            self._ends.put(number, until)
        if trusted := self.trust.trusts(hint):
            self.weight[number] = hint.weight
            self.expected[number] = self.trust.expected_wait(hint)
        return trusted

    def drop(self, number: int) -> Hint | None:
        """End the hint of a snapshot without an outcome. Return it, or None without a hint."""
        self.weight[number], self.expected[number] = 1.0, 0.0
        self._ends.drop(number)
        return self._hints.pop(number, None)

    def move(self, number: int, to: int) -> None:
        """Give the hint of a snapshot to its new number."""
        end = self._ends.key(number)
        self.weight[to], self.weight[number] = self.weight[number], 1.0
        self.expected[to], self.expected[number] = self.expected[number], 0.0
        self._ends.drop(number)
        if end is not None:
            self._ends.put(to, end)
        if (hint := self._hints.pop(number, None)) is not None:
            self._hints[to] = hint

    def used(self, number: int, wait: float) -> None:
        """Judge and end the hint of a snapshot from which a request resumes."""
        if (hint := self.drop(number)) is not None:
            self.trust.judge(hint, returned=True)
            self.trust.came_true(hint, wait)

    def evicted(self, number: int, path_hash: int, now: int, last: int) -> None:
        """End the hint of an evicted snapshot. It is judged later.

        Args:
            number: the snapshot.
            path_hash: hash of its token path. 0 if its conversation does not end there; it is not judged then.
            now: time in admitted requests.
        """
        end = self._ends.key(number)
        if (hint := self.drop(number)) is not None and path_hash:
            self._take(path_hash)
            self._evicted[path_hash] = Evicted(hint, last)
            if end is None:
                self._evicted_at.put(path_hash, now)
            else:
                self._evicted_ends.put(path_hash, end)
            if len(self._evicted) > REMEMBERED * len(self.weight):
                self._take(next(iter(self._evicted)))

    def _take(self, path_hash: int) -> Evicted | None:
        """Remove and return the hint of an evicted conversation, or return None without one."""
        self._evicted_at.drop(path_hash)
        self._evicted_ends.drop(path_hash)
        return self._evicted.pop(path_hash, None)

    def returned(self, path_hashes: Iterable[int], now: int, mean_wait: float) -> None:
        """Judge the hint of an evicted conversation that a request recomputes, and of those that stayed away too long.

        Args:
            path_hashes: hashes of the recomputed prefixes, longest first. Only the first one with a hint counts.
            now: time in admitted requests.
            mean_wait: mean time between uses, 0 if unknown.
        """
        for path_hash in path_hashes if self._evicted else ():
            if (found := self._take(path_hash)) is not None:
                self.trust.judge(found.hint, returned=True)
                self.trust.came_true(found.hint, now - found.last)
                break
        while mean_wait and (first := self._evicted_at.first()) and now - first[0] >= MOST_WAITS * mean_wait:
            if (found := self._take(first[1])) is not None:
                self.trust.judge(found.hint, returned=False)

    def expire(self, now: float) -> list[int]:
        """End the hints whose time is over, and judge them as unused. Return their snapshots."""
        ended = []
        while (first := self._ends.first()) is not None and first[0] <= now:
            number = first[1]
            if (hint := self.drop(number)) is not None:
                self.trust.judge(hint, returned=False)
            ended.append(number)
        while (first := self._evicted_ends.first()) is not None and first[0] <= now:
            if (found := self._take(first[1])) is not None:
                self.trust.judge(found.hint, returned=False)
        return ended
