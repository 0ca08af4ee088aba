"""Free lists: which ids of a pool are free. They are on the host, so no call waits for the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class FreeList:
    """Allocator of the ids `first` .. `first + size - 1`: the id that was freed last is allocated first. Until then the
    lowest id is.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self._first = first
        # A stack whose top is the end.
        self._free = list(range(first + size - 1, first - 1, -1))
        self._is_free = bytearray(b"\1") * size

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Allocate `count` ids. Return None if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._is_free[number - self._first] = False
        return taken

    def free(self) -> list[int]:
        """Return the free ids, the next one to be allocated last."""
        return list(self._free)

    def is_free(self, number: int) -> bool:
        return bool(self._is_free[number - self._first])

    def give_back(self, numbers: Iterable[int]) -> None:
        """Free ids. Raise ValueError for an id that is not allocated."""
        for number in numbers:
            if not 0 <= number - self._first < len(self._is_free) or self.is_free(number):
                raise ValueError(f"{number} is freed, but it is not allocated (freed twice?)")
            self._is_free[number - self._first] = True
            self._free.append(number)


class FreeRows:
    """Allocator of `size` rows. It allocates consecutive ascending rows if possible, so that data saved together can be
    copied together.
    """

    def __init__(self, size: int) -> None:
        self._free = np.ones(size, dtype=bool)
        self.available, self._next = size, 0

    def take(self, count: int) -> np.ndarray | None:
        """Allocate `count` rows. Return None if fewer are free."""
        if count > self.available:
            return None
        rows = self._next + np.flatnonzero(self._free[self._next : self._next + 2 * count])[:count]
        if len(rows) < count:
            every = np.flatnonzero(self._free)
            rows = np.roll(every, -int(np.searchsorted(every, self._next)))[:count]
        self._free[rows] = False
        self.available -= count
        self._next = int(rows[-1]) + 1 if count else self._next
        return rows

    def remove(self, rows: np.ndarray) -> None:
        """Allocate these free rows."""
        self._free[rows] = False
        self.available -= len(rows)

    def free(self) -> np.ndarray:
        """Return the free rows, int64 [n], ascending."""
        return np.flatnonzero(self._free)

    def give_back(self, rows: np.ndarray) -> None:
        """Free rows. Raise ValueError for a row that is not allocated."""
        if self._free[rows].any() or len(np.unique(rows)) != len(rows):
            raise ValueError(f"host rows {rows.tolist()} are freed, but not all of them are allocated")
        self._free[rows] = True
        self.available += len(rows)
