"""Shares of tenants (option `tenant_percent`): what each one holds, and the eviction order in which tenants above their
share come first. A tenant is a `cache_salt`; requests without one are a tenant, too."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dsv4_sglang.srt.prefix_cache.eviction_order import Entry, EvictionOrder

# Percentage with which no tenant is ever above its share.
NO_LIMIT = 100

# Factor on the eviction score of a tenant above its share. It is larger than the ratio of any two scores.
ABOVE_SHARE = 2.0**200

# Places in which shares are counted: the device, and what only the host has.
DEVICE, HOST = PLACES = (0, 1)


class Room(NamedTuple):
    """Size of a place in tokens and in snapshots."""

    tokens: int
    snapshots: int


class Tenants:
    """Tenants without a limit. Nothing is counted, and all are equal."""

    def __init__(self) -> None:
        # By place: tenant -> (tokens, snapshots), and the tenants above their share.
        self.held: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
        self.above: tuple[set[int], ...] = (set(), set())

    def assign(self, number: int, tenant: str) -> None:
        """Note the tenant of a new snapshot."""

    def move(self, number: int, to: int) -> None:
        """Give the tenant of a snapshot to its new number."""

    def count(self, place: int, number: int, tokens: int, snapshots: int) -> None:
        """Add tokens and snapshots to what the tenant of a snapshot holds in a place, or subtract them."""

    def factor(self, place: int, at: int | slice | np.ndarray) -> Any:
        """Return the factor on the eviction scores of the snapshots `at`, by which tenants above their share are first:
        a column for several snapshots, else a number."""
        return 1.0

    def order(self, place: int) -> EvictionOrder:
        """Return an empty eviction order of a place."""
        return EvictionOrder()

    def sums(self, held: Iterable[tuple[int, int, int]]) -> tuple[dict[int, tuple[int, int]], ...]:
        """Return what `held` would be after counting all of these snapshots: (place, number, tokens)."""
        return {}, {}

    def largest(self, place: int, count: int) -> tuple[list[int], int]:
        """Return the tokens of the `count` tenants that hold most, in descending order, and the sum of the others."""
        tokens = [tokens for tokens, _ in self.held[place].values()]
        first = heapq.nlargest(count, tokens)
        return first, sum(tokens) - sum(first)


class TenantShares(Tenants):
    """Tokens and snapshots of each tenant on the device and on the host."""

    def __init__(self, percent: int, rooms: tuple[Room, Room], size: int) -> None:
        """Create the counts.

        Args:
            percent: largest share of a place for one tenant, without being evicted before others.
            rooms: sizes of device and host.
            size: numbers of snapshots, with 0.
        """
        super().__init__()
        self.percent, self._rooms = percent, rooms
        # Index of the tenant of each snapshot. An index is reused once its tenant holds nothing.
        self.of = np.zeros(size, dtype=np.int32)
        self.names: dict[int, str] = {}
        self._indices: dict[str, int] = {}
        self._free: list[int] = []
        # By place and index of a tenant.
        self._factors = np.ones((len(PLACES), size))

    def assign(self, number: int, tenant: str) -> None:
        if (index := self._indices.get(tenant)) is None:
            index = self._free.pop() if self._free else len(self._indices)
            self._indices[tenant], self.names[index] = index, tenant
        self.of[number] = index

    def move(self, number: int, to: int) -> None:
        self.of[to] = self.of[number]

    def count(self, place: int, number: int, tokens: int, snapshots: int) -> None:
        tenant, held = int(self.of[number]), self.held[place]
        before = held.get(tenant, (0, 0))
        now = held[tenant] = before[0] + tokens, before[1] + snapshots
        if any(100 * amount > self.percent * room for amount, room in zip(now, self._rooms[place])):
            self.above[place].add(tenant)
            self._factors[place, tenant] = ABOVE_SHARE
        elif tenant in self.above[place]:
            self.above[place].remove(tenant)
            self._factors[place, tenant] = 1.0
        if now == (0, 0):
            del held[tenant]
            if not any(tenant in other for other in self.held):
                del self._indices[self.names.pop(tenant)]
                self._free.append(tenant)

    def factor(self, place: int, at: int | slice | np.ndarray) -> Any:
        return self._factors[place, self.of[at]]

    def order(self, place: int) -> EvictionOrder:
        return TenantOrder(self, place)

    def sums(self, held: Iterable[tuple[int, int, int]]) -> tuple[dict[int, tuple[int, int]], ...]:
        found: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
        for place, number, tokens in held:
            before = found[place].get(tenant := int(self.of[number]), (0, 0))
            found[place][tenant] = before[0] + tokens, before[1] + 1
        return found


class TenantOrder(EvictionOrder):
    """Eviction order of a place in which snapshots of tenants above their share come before all others.

    Each snapshot is in this order and in that of its tenant. Fewer than 100 / percent tenants are above their share in
    tokens, and as many in snapshots, so a search reads a bounded number of orders.
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
        if not (above := self._above()):
            return super().first(now, mean_interval)
        number, score = self._first_of(above, now, mean_interval)
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


def tenants_of(percent: int, rooms: tuple[Room, Room], size: int) -> Tenants:
    """Return the tenants of an empty registry. Arguments are those of `TenantShares`."""
    return TenantShares(percent, rooms, size) if percent < NO_LIMIT else Tenants()
