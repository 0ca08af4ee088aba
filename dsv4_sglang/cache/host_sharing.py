"""Processes that hold one copy of the host memory: which of them does what, and how they agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class HostSharing:
    """The processes of one server on one machine, which share their host memory.

    The processes of `group` must call the methods with a collective (`gather`, `agreed`, `wait`) in the same order.

    Attributes:
        rank: number of this process among those of its machine.
        size: number of processes on this machine; 1: nothing is shared.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, machine: int = 0) -> None:
        """Find the processes of this machine.

        Args:
            group: processes with equal contents of the host memory, on one or several machines. None: only this one.
            machine: number of this machine among those of the group.
        """
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        machines = self._gather(machine)
        self._here = [rank for rank, number in enumerate(machines) if number == machine]
        self.rank = 0 if self._group is None else self._here.index(dist.get_rank(self._group))
        self.size = len(self._here)

    @property
    def leads(self) -> bool:
        """True for the one process of each machine that does what is needed once: create memory, read files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes on this machine, by rank."""
        values = self._gather(value)
        return [values[rank] for rank in self._here]

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes of the group."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, self._group)
        return values

    def wait(self) -> None:
        """Wait until all processes of the group are here."""
        if self._group is not None:
            dist.barrier(self._group)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Context manager: a RuntimeError inside is raised in all processes of the group, so that no process waits for
        one that has failed."""
        error = None
        try:
            yield
        except RuntimeError as raised:
            error = str(raised)
        if (first := next(filter(None, self._gather(error)), None)) is not None:
            raise RuntimeError(first)

    def part(self, count: int, first_row: int) -> range:
        """Return the part of a list of rows that this process copies. The parts of all processes are the list.

        A part is contiguous, because consecutive rows are one copy. The first row decides which process takes the first
        part, so that lists with a single row are divided among the processes too.

        Args:
            count: number of rows.
            first_row: number of the first row.
        """
        place = (self.rank + first_row) % self.size
        return range(count * place // self.size, count * (place + 1) // self.size)
