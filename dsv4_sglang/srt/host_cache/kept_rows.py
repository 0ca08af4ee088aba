"""Free rows whose pages can still be found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from dsv4_sglang.cache.free_list import FreeRows
from dsv4_sglang.srt.host_cache.segment_index import RowIndex


class KeptRows:
    """Allocator of rows that keeps the pages of free rows until it needs the rows.

    Empty rows are allocated first, then the rows that were freed first. A fetch gets back the rows that have its pages.
    Processes that share the rows call the methods in the same order, so that all of them choose the same rows.

    A name here says where a page is if it is anywhere in these rows. Whether a row has the page is up to the index,
    which only the first process has.
    """

    def __init__(self, size: int, pages: Iterable[tuple[int, bytes]] = (), index: RowIndex | None = None) -> None:
        """Create the allocator.

        Args:
            size: number of rows.
            pages: rows with a page, and its key, the least recently used first.
            index: index of these rows, None in processes that do not write it.
        """
        self.size, self.index = size, index
        self._empty = FreeRows(size)
        # Free rows with a page, the one that was freed first is the first.
        self._kept: dict[int, None] = {}
        self._key_of: dict[int, bytes] = {}
        self._row_of: dict[bytes, int] = {}
        for row, key in pages:
            self._name(row, key)
        self._empty.remove(np.array(list(self._key_of), dtype=np.int64))
        self._kept = dict.fromkeys(self._key_of)

    @property
    def available(self) -> int:
        return self._empty.available + len(self._kept)

    def free(self) -> np.ndarray:
        """Return the free rows, int64 [n], ascending."""
        return np.sort(np.concatenate([self._empty.free(), np.array([*self._kept], dtype=np.int64)]))

    def row_with(self, key: bytes) -> int | None:
        """Return the row that has a page, None if none has. For the process with the index."""
        row = self._row_of.get(key)
        return row if row is not None and self.has(row, key) else None

    def has(self, row: int, key: bytes) -> bool:
        """Return True if a row has a page. For the process with the index."""
        return self.index is not None and self.index.key(row) == key

    def take(self, count: int) -> np.ndarray | None:
        """Allocate `count` rows, whose pages are forgotten. Return None if fewer are free."""
        if count > self.available:
            return None
        self._forget(list(islice(self._kept, max(0, count - self._empty.available))))
        rows = self._empty.take(count)
        assert rows is not None
        if self.index is not None:
            self.index.clear(rows)
        return rows

    def take_for(self, keys: Sequence[bytes]) -> np.ndarray | None:
        """Allocate a row for each of these pages: the free row that has it, or another one. Return None if fewer rows
        are free."""
        if len(keys) > self.available:
            return None
        rows = np.array([row if (row := self._row_of.get(key)) in self._kept else -1 for key in keys], dtype=np.int64)
        for row in rows[rows >= 0].tolist():
            del self._kept[row]
        others = self.take(int((rows < 0).sum()))
        assert others is not None
        rows[rows < 0] = others
        for row, key in zip(rows.tolist(), keys):
            if key not in self._row_of:
                self._name(row, key)
        return rows

    def give_back(self, rows: np.ndarray) -> None:
        """Free rows. Raise ValueError for a row that is not allocated."""
        if len(np.unique(rows)) != len(rows) or any(row in self._kept for row in rows.tolist()):
            raise ValueError(f"host rows {rows.tolist()} are freed, but not all of them are allocated")
        named = [row for row in rows.tolist() if row in self._key_of]
        self._empty.give_back(np.array([row for row in rows.tolist() if row not in self._key_of], dtype=np.int64))
        self._kept.update(dict.fromkeys(named))
        if self.index is not None:
            self.index.mark_used(named)

    def name(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """Note which pages are in allocated rows. Free rows with the same pages become empty."""
        for row, key in zip(rows, keys):
            self._name(row, key)

    def _name(self, row: int, key: bytes) -> None:
        former = self._row_of.get(key)
        if former is not None and former != row:
            self._forget([former])
        if (other := self._key_of.get(row)) is not None:
            del self._row_of[other]
        self._key_of[row], self._row_of[key] = key, row

    def _forget(self, rows: Sequence[int]) -> None:
        kept = [row for row in rows if row in self._kept]
        for row in rows:
            del self._row_of[self._key_of.pop(row)]
        for row in kept:
            del self._kept[row]
        self._empty.give_back(np.array(kept, dtype=np.int64))

    def free_all(self) -> None:
        """Free all rows. Their pages are kept."""
        self.give_back(np.setdiff1d(np.arange(self.size), self.free()))

    def forget_all(self) -> None:
        """Forget all pages."""
        self._forget(list(self._key_of))
