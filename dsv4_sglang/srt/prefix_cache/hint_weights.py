"""Weights and expected waits that hints of requests give to snapshots, and the trust in the hints of a tenant."""

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

# An evicted conversation that does not return within this multiple of the mean wait between uses, or of the wait that
# its hint lets expect, is judged as ended.
MOST_WAITS = 3

# Least variance of `seconds` over which waits are fitted, as a share of their mean square. Less is rounding.
LEAST_VARIANCE = 1e-6

# Most tenants whose hints are judged. The one judged longest ago is forgotten, and has to prove itself again.
MOST_TENANTS = 1024


class Hint(NamedTuple):
    """A hint on one snapshot.

    Attributes:
        weight: factor on the value of the snapshot: above 1 retains it, below 1 demotes it.
        tenant: `cache_salt` of its request, empty without one.
        seconds: time within which the conversation returns. 0: unknown.
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


class ExpectedWaits:
    """Expected waits of retained conversations, by tenant: a line fitted to the waits of earlier ones that returned,
    over the `seconds` of their hints.

    `seconds` is an upper limit, so tenants differ in how long their conversations wait in relation to it. The slope is
    at least 0, where all conversations are expected after the mean wait, and at most the ratio of the means, where
    waits are proportional to `seconds`. Seconds that say nothing about the wait, or the opposite, thus have no effect.
    """

    def __init__(self) -> None:
        # By tenant: number of returns, and the averages of seconds s, wait w, s * s and s * w.
        self._fits: dict[str, tuple[int, float, float, float, float]] = {}

    def returned(self, hint: Hint, wait: float) -> None:
        """Count the wait of a retained conversation, in admitted requests."""
        if not (s := hint.seconds):
            return
        count, *means = self._fits.pop(hint.tenant, (0, 0.0, 0.0, 0.0, 0.0))
        count = min(count + 1, TRUST_MEMORY)
        s1, w1, ss, sw = (mean + (new - mean) / count for mean, new in zip(means, (s, wait, s * s, s * wait)))
        self._fits[hint.tenant] = count, s1, w1, ss, sw
        if len(self._fits) > MOST_TENANTS:
            del self._fits[next(iter(self._fits))]

    def of(self, hint: Hint) -> float:
        """Return the expected wait in admitted requests, or 0 if nothing is known."""
        if not hint.seconds or hint.tenant not in self._fits:
            return 0.0
        _, s, w, ss, sw = self._fits[hint.tenant]
        variance = ss - s * s
        slope = (sw - s * w) / variance if variance > LEAST_VARIANCE * ss else 0.0
        return w + min(max(slope, 0.0), w / s) * (hint.seconds - s)


class Evicted(NamedTuple):
    """Hint on an evicted end of a conversation. Times are in admitted requests.

    Attributes:
        hint: the hint.
        last: last use of the snapshot.
        at: time of the eviction.
    """

    hint: Hint
    last: int
    at: int


class HintWeights:
    """Hints on the snapshots of a registry, and the weights and expected waits that follow from them.

    A hint ends when a request resumes from the snapshot, when its time is over, or with the snapshot. Hints are judged
    by whether the conversation returns (`HintTrust`), also after its eviction. A hint that is not trusted is judged,
    but changes nothing: wrong hints cost nothing.
    """

    def __init__(self, size: int, most_evicted: int) -> None:
        """Create the columns without hints.

        Args:
            size: numbers of snapshots, with 0.
            most_evicted: hints of evicted conversations that wait for their judgement.
        """
        self.weight = np.ones(size, dtype=np.float64)
        # Expected wait from the last use on, in admitted requests. 0: it is not known from a hint.
        self.expected = np.zeros(size, dtype=np.float64)
        self.trust, self.waits = HintTrust(), ExpectedWaits()
        self._most_evicted = most_evicted
        self._hints: dict[int, Hint] = {}
        # Snapshots whose hint ends at a time, by that time in seconds.
        self._ends = Ranking()
        # Hints that wait for their judgement, by path hash. The oldest eviction is the first.
        self._evicted: dict[int, Evicted] = {}
        # Their path hashes by the earliest time at which they are judged as unused, in admitted requests.
        self._evicted_ends = Ranking()

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
            self.weight[number], self.expected[number] = hint.weight, self.waits.of(hint)
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
        """Judge and end the hint of a snapshot from which its conversation continues.

        Args:
            number: the snapshot.
            wait: time since its last use in admitted requests.
        """
        if (hint := self.drop(number)) is not None:
            self._came_back(hint, wait)

    def evicted(self, number: int, path_hash: int, *, last: int, now: int) -> None:
        """End the hint of an evicted snapshot. It is judged later.

        Args:
            number: the snapshot.
            path_hash: hash of its token path. 0 if its conversation does not end there; it is not judged then.
            last: time of its last use in admitted requests.
            now: time in admitted requests.
        """
        if (hint := self.drop(number)) is None or not path_hash:
            return
        self._forget(path_hash)
        self._evicted[path_hash] = Evicted(hint, last, now)
        self._evicted_ends.put(path_hash, now + MOST_WAITS * self.waits.of(hint))
        if len(self._evicted) > self._most_evicted:
            self._forget(next(iter(self._evicted)))

    def returned(self, path_hashes: Iterable[int], now: int, mean_wait: float) -> None:
        """Judge the hint of an evicted conversation that a request recomputes, and of those that stayed away too long.

        Args:
            path_hashes: hashes of the recomputed prefixes, longest first. Only the first one with a hint counts.
            now: time in admitted requests.
            mean_wait: mean time between uses, 0 if unknown.
        """
        for path_hash in path_hashes if self._evicted else ():
            if (found := self._forget(path_hash)) is not None:
                self._came_back(found.hint, now - found.last)
                break
        while mean_wait and (first := self._evicted_ends.first()) is not None and first[0] <= now:
            hint, _, at = self._evicted[path_hash := first[1]]
            if (end := at + MOST_WAITS * max(mean_wait, self.waits.of(hint))) > now:
                self._evicted_ends.put(path_hash, end)
            else:
                self._forget(path_hash)
                self.trust.judge(hint, returned=False)

    def _forget(self, path_hash: int) -> Evicted | None:
        """Remove and return the hint of an evicted conversation, or return None without one."""
        self._evicted_ends.drop(path_hash)
        return self._evicted.pop(path_hash, None)

    def _came_back(self, hint: Hint, wait: float) -> None:
        self.trust.judge(hint, returned=True)
        self.waits.returned(hint, wait)

    def expire(self, now: float) -> list[int]:
        """End the hints whose time is over, and judge them as unused. Return their snapshots."""
        ended = []
        while (first := self._ends.first()) is not None and first[0] <= now:
            number = first[1]
            if (hint := self.drop(number)) is not None:
                self.trust.judge(hint, returned=False)
            ended.append(number)
        return ended
