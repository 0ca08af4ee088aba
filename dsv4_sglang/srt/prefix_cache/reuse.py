"""Estimate of the time between two uses of a conversation."""

from __future__ import annotations

from collections.abc import Iterable

# Larger than any real interval.
UNKNOWN = 1e12

# Number of branch ends, reused or evicted, over which the mean interval is averaged (exponentially).
MEMORY = 256

# Number of reuses over which their mean wait is averaged (exponentially).
REUSE_MEMORY = 32

# Upper limit of the mean interval, as a multiple of the mean interval of branches that were reused. A larger limit
# favours workloads that reuse everything, a smaller one workloads with many finished conversations: factors 1.5, 2 and
# 3 hit 10.4, 13.9, 14.2 % of one load of `benchmarks/agent_trace.py` and 78, 74, 63 % of another.
INTERVAL_CAP = 2


class ReuseEstimate:
    """Estimate of the mean time between uses over all branches, in admitted requests.

    `mean_interval` is the total time that branch ends have waited, divided by the number of their reuses. Three rules
    keep it useful:

    - Branches evicted without reuse contribute their waiting time (censored observations). In a full pool only the
      shortest intervals end in a reuse. If only these counted, a pool for a tenth of the conversations would keep the
      newest ones, evict each just before its next turn, and hit almost nothing.
    - Conversations that return after their eviction count as reuses (ghost hits, `ghost_hit`). Without them the
      estimate stays too short while the working set grows, and the pool thrashes.
    - The estimate is limited to INTERVAL_CAP times the mean interval of the reuses. Otherwise a pool full of finished
      conversations would wait for them and keep out new ones.
    """

    def __init__(self, most_ghosts: int) -> None:
        """`most_ghosts`: evicted branches that are remembered for ghost hits. Each takes about 100 bytes."""
        self.mean_interval = UNKNOWN
        # Moving sums over the last branch ends: the time that they waited, and how many of them were reused.
        self.wait_total = self.reuses = 0.0
        # Moving average of the wait of those that were reused, and the number of all of them.
        self.mean_reuse_wait = 0.0
        self.returns = 0
        # Ghosts: path hash of the end of an evicted branch -> time of its last use. Oldest eviction first.
        self._ghosts: dict[int, int] = {}
        self._most_ghosts = most_ghosts

    def wait_ended(self, wait: float, *, reused: bool) -> None:
        """Count the wait of a branch end that was reused, or evicted without a reuse."""
        kept = 1 - 1 / MEMORY
        self.wait_total, self.reuses = self.wait_total * kept + wait, self.reuses * kept + reused
        if reused:
            self._reused_after(wait)
        self._estimate()

    def remember(self, path_hash: int, last: int) -> None:
        """Remember an evicted branch as a ghost.

        Args:
            path_hash: hash of the token path of its end.
            last: time of its last use.
        """
        self._ghosts.pop(path_hash, None)
        self._ghosts[path_hash] = last
        if len(self._ghosts) > self._most_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def ghost_hit(self, path_hashes: Iterable[int], now: int) -> float | None:
        """Count a reuse if one of the paths was evicted. Only the first match counts.

        Returns:
            The time since the last use of that path. None if none is remembered.
        """
        for path_hash in path_hashes if self._ghosts else ():
            if (last := self._ghosts.pop(path_hash, None)) is not None:
                wait = float(now - last)
                self._reused_after(wait)
                self._estimate()
                return wait
        return None

    def typical_wait(self) -> float:
        """Return the mean wait of reused branches, or 0 while it is an average of a few."""
        return self.mean_reuse_wait if self.returns >= REUSE_MEMORY else 0.0

    def _reused_after(self, wait: float) -> None:
        self.returns += 1
        self.mean_reuse_wait += (wait - self.mean_reuse_wait) / (REUSE_MEMORY if self.mean_reuse_wait else 1)

    def _estimate(self) -> None:
        """Update `mean_interval`: waiting time per reuse, which estimates the mean of censored intervals."""
        if self.reuses:
            self.mean_interval = min(self.wait_total / self.reuses, INTERVAL_CAP * self.mean_reuse_wait)
