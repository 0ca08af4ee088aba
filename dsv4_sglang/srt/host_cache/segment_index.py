"""Index of a segment of host rows: which page is in which row."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

# Version of the files of a segment. The format of a row follows from the page name.
SEGMENT_VERSION = 1
HEADER_BYTES = 4096
# SGLang's key of a page, a SHA-256.
KEY_BYTES = 32
# A row without a page has the key 0. `used`: seconds since 1970.
RECORD = np.dtype([("key", np.uint8, KEY_BYTES), ("used", "<f8")])
# A key is at one of WINDOW places from its hash on. With PLACES for each row, one of them is free nearly always.
PLACES, WINDOW = 4, 8
PLACE = np.dtype("<i4")


@dataclass(frozen=True)
class PoolSize:
    """Rows of a pool, and bytes of a row."""

    rows: int
    row_bytes: int

    @property
    def records_bytes(self) -> int:
        return self.rows * RECORD.itemsize

    @property
    def index_bytes(self) -> int:
        return self.records_bytes + PLACE.itemsize * (PLACES * self.rows + WINDOW)


@dataclass(frozen=True)
class Header:
    """The first bytes of an index.

    `name` is the page name of the rows, `weights` a readable description. `pools` are sizes by name of the pool.
    """

    name: str
    weights: str
    pools: Mapping[str, PoolSize]
    version: int = SEGMENT_VERSION

    def encode(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        if len(text) > HEADER_BYTES:
            raise ValueError(f"the description of a segment has {len(text)} bytes; expected at most {HEADER_BYTES}")
        return text.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, content: bytes) -> Header | None:
        """Return the header, or None if the index is not complete."""
        try:
            fields = json.loads(content.rstrip(b"\0"))
            sizes = {pool: PoolSize(**size) for pool, size in fields["pools"].items()}
            return cls(str(fields["name"]), str(fields["weights"]), sizes, int(fields["version"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def offset(self, pool: str) -> int:
        """Return the offset of a pool in the index."""
        before = list(self.pools)[: list(self.pools).index(pool)]
        return HEADER_BYTES + sum(self.pools[name].index_bytes for name in before)

    @property
    def total_bytes(self) -> int:
        """Bytes of the index and of all rows."""
        return self.index_bytes + sum(size.rows * size.row_bytes for size in self.pools.values())

    @property
    def index_bytes(self) -> int:
        return HEADER_BYTES + sum(size.index_bytes for size in self.pools.values())


def find(read: Callable[[int, int], bytes], size: PoolSize, key: bytes) -> int | None:
    """Return the row of a page in a pool of another process, or None.

    Args:
        read: returns bytes of the pool's index, given their number and their offset. Fewer bytes: it became shorter.
        size: size of the pool.
        key: key of the page.
    """
    places = np.frombuffer(_whole(read(WINDOW * PLACE.itemsize, _place_offset(size, key)), PLACE.itemsize), PLACE)
    for row in (places[places > 0] - 1).tolist():
        if read(KEY_BYTES, row * RECORD.itemsize) == key:
            return int(row)
    return None


def _whole(content: bytes, size: int) -> bytes:
    return content[: len(content) // size * size]


def _home(rows: int, key: bytes) -> int:
    """Return the first place of a key."""
    return int.from_bytes(key[:8], "little") % (PLACES * rows)


def _place_offset(size: PoolSize, key: bytes) -> int:
    return size.records_bytes + PLACE.itemsize * _home(size.rows, key)


class RowIndex:
    """The part of an index that describes one pool, as its owner sees it. Only the owner writes.

    A record is written after its row, and cleared before its row is written again. Places are hints: a reader compares
    the key in the record.
    """

    def __init__(self, memory: memoryview, size: PoolSize) -> None:
        """`memory`: the pool's bytes of the index, writable."""
        self._records = np.frombuffer(memory, RECORD, size.rows)
        self._places = np.frombuffer(memory, PLACE, offset=size.records_bytes)
        # Threads that read and that store pages set records at the same time.
        self._setting = threading.Lock()

    def key(self, row: int) -> bytes:
        return self._records["key"][row].tobytes()

    def set(self, row: int, key: bytes) -> None:
        """Publish the page of a row, whose bytes are complete."""
        with self._setting:
            home = _home(len(self._records), key)
            window = self._places[home : home + WINDOW]
            free = [i for i, place in enumerate(window.tolist()) if place - 1 in (-1, row) or self._stale(home + i)]
            window[free[0] if free else 0] = row + 1
            self._records["used"][row] = time.time()  # noqa: TID251  (a segment outlives a server)
            self._records["key"][row] = np.frombuffer(key, np.uint8)

    def _stale(self, place: int) -> bool:
        """Return True if no key at this place can be found there."""
        key = self.key(int(self._places[place]) - 1)
        home = _home(len(self._records), key)
        return not any(key) or not home <= place < home + WINDOW

    def clear(self, rows: np.ndarray) -> None:
        """Forget the pages of rows, before their bytes change."""
        self._records["key"][rows] = 0

    def mark_used(self, rows: list[int]) -> None:
        """Record that the pages of rows were used."""
        self._records["used"][rows] = time.time()  # noqa: TID251  (a segment outlives a server)

    def pages(self) -> list[tuple[int, bytes]]:
        """Return the rows that have a page, and its key, the least recently used first."""
        rows = np.flatnonzero(self._records["key"].any(1))
        rows = rows[np.argsort(self._records["used"][rows], kind="stable")]
        return [(row, self.key(row)) for row in rows.tolist()]

    def restore(self, records: np.ndarray) -> None:
        """Set the records of an index of another size, as far as there are rows."""
        for row, record in enumerate(records[: len(self._records)]):
            if record["key"].any():
                self.set(row, record["key"].tobytes())
                self._records["used"][row] = record["used"]

    def records(self) -> np.ndarray:
        """Return a copy of the records."""
        return self._records.copy()
