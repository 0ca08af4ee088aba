"""Owners of the blocks and slots of a pool."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Kinds of owners: the free list, the tree, requests, and running copies between host and storage.
FREE, CACHED, REQUESTS, COPIES = OWNERS = ("free", "cached", "requests", "copies")


class Finding(NamedTuple):
    """An inconsistency. `what`: the object, such as "block 17". `wrong`: the description."""

    what: str
    wrong: str


class PoolOwners:
    """Owners of the `ids` of a pool. `thing` is what an id denotes, such as "block". Each id must have one owner."""

    def __init__(self, thing: str, ids: range) -> None:
        self.thing, self.ids = thing, ids
        # Number of owned ids by kind of owner.
        self.counts = Counter(dict.fromkeys(OWNERS, 0))
        self._owners: list[tuple[str, Sequence[int]]] = []

    def record_owner(self, kind: str, owner: str, ids: Sequence[int]) -> None:
        """Record an owner of ids.

        Args:
            kind: one of OWNERS.
            owner: description for findings, such as "request 3".
            ids: the ids that it owns.
        """
        if len(ids):
            self.counts[kind] += len(ids)
            self._owners.append((owner, ids))

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each id without an owner, with several owners, or outside the pool."""
        owners: dict[int, list[str]] = defaultdict(list)
        for owner, ids in self._owners:
            for i in ids:
                owners[i].append(owner)
        for i in self.ids:
            if not owners.get(i):
                yield Finding(f"{self.thing} {i}", "no owner: leaked")
        for i, names in sorted(owners.items()):
            if i not in self.ids:
                where = f"outside {self.ids.start}..{self.ids.stop - 1}"
                yield Finding(f"{self.thing} {i}", f"owned by {join_names(names)}, {where}")
            elif len(names) > 1:
                yield Finding(f"{self.thing} {i}", f"{len(names)} owners: {join_names(names)}")


def join_names(names: Sequence[str], most: int = 6) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
