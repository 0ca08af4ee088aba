"""Shares of tenants (option `tenant_percent`): what each one holds, and the eviction order in which tenants above their
share come first. A tenant is a `cache_salt`; requests without one are a tenant, too."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dsv4_sglang.srt.prefix_cache.eviction_order import Entry, EvictionOrder

# Factor on the eviction score of a tenant above its share. It is larger than the ratio of any two scores.
ABOVE_SHARE = 2.0**200

# Places in which shares are counted: the device, and what only the host has.
DEVICE, HOST = PLACES = (0, 1)


class Room(NamedTuple):
    """Size of a place in tokens and in snapshots."""

    tokens: int
    snapshots: int


class TenantShares:
    """Tokens and snapshots of each tenant on the device and on the host."""

    def __init__(self, percent: int, rooms: tuple[Room, Room], size: int) -> None:
        """Create the counts.

        Args:
            percent: largest share of a place for one tenant, without being evicted before others.
            rooms: sizes of device and host.
            size: numbers of snapshots, with 0.
        """
        self.percent, self._rooms = percent, rooms
        # Index of the tenant of each snapshot. An index is reused once its tenant holds nothing.
        self.of = np.zeros(size, dtype=np.int32)
        self.names: dict[int, str] = {}
        self._indices: dict[str, int] = {}
        self._free: list[int] = []
        # By place: tenant -> (tokens, snapshots), and the tenants above their share.
        self.held: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
        self.above: tuple[set[int], ...] = (set(), set())

    def index(self, tenant: str) -> int:
        """Return the index of a tenant, a new one if it holds nothing."""
        if (index := self._indices.get(tenant)) is None:
            index = self._free.pop() if self._free else len(self._indices)
            self._indices[tenant], self.names[index] = index, tenant
        return index

    def count(self, place: int, tenant: int, tokens: int, snapshots: int) -> None:
        """Add tokens and snapshots to what a tenant holds, or subtract them."""
        held, above = self.held[place], self.above[place]
        before = held.get(tenant, (0, 0))
        now = held[tenant] = before[0] + tokens, before[1] + snapshots
        if any(100 * amount > self.percent * room for amount, room in zip(now, self._rooms[place])):
            above.add(tenant)
        else:
            above.discard(tenant)
        if now == (0, 0):
            del held[tenant]
            if not any(tenant in other for other in self.held):
                del self._indices[self.names.pop(tenant)]
                self._free.append(tenant)

    def largest(self, place: int, count: int) -> tuple[list[int], int]:
        """Return the tokens of the `count` tenants that hold most, in descending order, and the sum of the others."""
        tokens = [tokens for tokens, _ in self.held[place].values()]
        first = heapq.nlargest(count, tokens)
        return first, sum(tokens) - sum(first)


class TenantOrder(EvictionOrder):
    """Eviction order of a place in which snapshots of tenants above their share come before all others.

    Each snapshot is in this order and in that of its tenant. At most 100 / percent tenants are above their share, so a
    search reads a bounded number of orders.
    """

    def __init__(self, shares: TenantShares, place: int) -> None:
        super().__init__()
        self._shares, self._place = shares, place
        self._of_tenant: dict[int, EvictionOrder] = {}
        self._tenants: dict[int, int] = {}

    def put(self, number: int, entry: Entry) -> None:
        if self.entries.get(number) == entry:
            return
        super().put(number, entry)
        tenant = self._tenants[number] = int(self._shares.of[number])
        self._of_tenant.setdefault(tenant, EvictionOrder()).put(number, entry)

    def drop(self, number: int) -> None:
        super().drop(number)
        if (tenant := self._tenants.pop(number, None)) is not None:
            (order := self._of_tenant[tenant]).drop(number)
            if not len(order):
                del self._of_tenant[tenant]

    def _above(self) -> list[EvictionOrder]:
        return [self._of_tenant[tenant] for tenant in self._shares.above[self._place] if tenant in self._of_tenant]

    def first(self, now: int, mean_interval: float) -> tuple[int, float]:
        firsts = [order.first(now, mean_interval) for order in self._above()]
        if not firsts:
            return super().first(now, mean_interval)
        number, score = min(firsts, key=lambda first: (-first[1], first[0]))
        return number, score * ABOVE_SHARE

    def descending(self, now: int, mean_interval: float) -> Iterator[tuple[float, int]]:
        above = self._above()
        ordered = [((-score, number) for score, number in order.descending(now, mean_interval)) for order in above]
        for score, number in heapq.merge(*ordered):
            yield -score * ABOVE_SHARE, number
        first = {number for order in above for number in order.entries}
        for score, number in super().descending(now, mean_interval):
            if number not in first:
                yield score, number


def order_of(shares: TenantShares | None, place: int) -> EvictionOrder:
    """Return an empty eviction order of a place, without or with shares of tenants."""
    return EvictionOrder() if shares is None else TenantOrder(shares, place)


def above_share(shares: TenantShares | None, at: slice | np.ndarray, place: int) -> np.ndarray | float:
    """Return the factor on the scores of the snapshots `at` by which tenants above their share are evicted first."""
    if shares is None or not shares.above[place]:
        return 1.0
    return np.where(np.isin(shares.of[at], list(shares.above[place])), ABOVE_SHARE, 1.0)
