"""Contracts of the parts of the cache: who calls a method, what it changes, and when its result is valid.

    BlockPool             memory of compressed entries and index keys of one layer, in blocks that requests share
    StateSlots            memory of windows and compressor states: slots of running requests, and snapshots
    SnapshotPool          which snapshot slots are free, and which snapshot a tree node has
    PrefixCacheContract   blocks and snapshots of computed tokens, in SGLang's radix tree
    HostCacheContract     copies of both in host memory

No method waits for the device, unless it says so. Copies are ordered by streams: a method that starts a copy returns
before the copy has run, and a later step or copy on the same stream sees its result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor


class BlockPool(ABC):
    """Blocks of 128 tokens of one layer. The owner of a block is known to SGLang's allocator only.

    The append ops write entries, attention and index read them. A full block is never written again. An unwritten
    entry is never read, because attention kernels stop at floor((t + 1) / ratio). So nothing is cleared when a block
    changes its owner.
    """

    @abstractmethod
    def block_views(self) -> list[Tensor]:
        """Return views with a block in every row, [num_blocks, n] without gaps in a row: all bytes of a block.

        Called once by host pools and transfers between servers. Valid as long as the pool, also after `reset`.
        """

    @abstractmethod
    def reset(self) -> None:
        """Zero all blocks in place, whatever the memory contains.

        Called when a server wakes up, while no request holds a block.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Return the bytes of the allocations, block padding included."""


class StateSlots(ABC):
    """Constant-size state of requests in slots, and copies of it in snapshots, which are numbered from 1."""

    @abstractmethod
    def store(self, slots: Tensor, snapshots: Tensor) -> None:
        """Copy slots to snapshots. Called by the attention backend after the last layer of a step.

        The lengths of the requests must be multiples of 128. A snapshot is valid for work on the same stream, and for
        copies to the host that wait for that stream.

        Args:
            slots: int32 [n] on the device; a negative slot is skipped.
            snapshots: int32 [n] on the device; a snapshot below 1 is skipped.
        """

    @abstractmethod
    def load(self, snapshots: Tensor, slots: Tensor) -> None:
        """Copy snapshots to the slots of the requests that resume from them, before their first step.

        The snapshots must stay locked until the step is launched. Arguments as in `store`.
        """

    @abstractmethod
    def snapshot_tables(self) -> list[Tensor]:
        """Return the contents of all snapshots as bytes: [snapshots, n] uint8 for each layer's ring, then for each CSA
        layer's compressor states. Row 0 is snapshot 1.

        Called once by host pools. Valid as long as the storage, also after `reset`.
        """

    @abstractmethod
    def reset(self) -> None:
        """Empty all slots and snapshots in place, whatever the memory contains.

        Called when a server wakes up, while no request holds a slot.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Return the bytes of rings and compressor states, including snapshots and block padding."""


class SnapshotPool(ABC):
    """Ownership of snapshot slots: a slot is free, pending in a request, or attached to a tree node."""

    @abstractmethod
    def take(self) -> int:
        """Allocate the slot that was freed last. Return 0 if none is free.

        Called before the step that writes the snapshot. The caller owns the slot until it attaches it to the tree or
        gives it back.
        """

    @abstractmethod
    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots of the caller. Raise ValueError for a slot that is not allocated.

        A running step may still write a slot that was given back. The next owner's copy runs later on the same stream.
        """

    @abstractmethod
    def available_size(self) -> int:
        """Return the number of free slots."""

    @abstractmethod
    def id_of(self, node: Any) -> int:
        """Return the number of a tree node's snapshot in the registry: its slot, or the number of its host row if the
        device does not have it. Return 0 if the node has no snapshot.

        The number is valid until the device or the host evicts the snapshot, or a load begins. A locked node keeps it.
        """


class PrefixCacheContract(ABC):
    """Calls of this package's rooms to the prefix cache, besides SGLang's interface. One thread calls it, the
    scheduler's, and every TP rank makes the same calls in the same order."""

    @abstractmethod
    def retracted(self, req: Any) -> None:
        """Handle a request that was retracted because memory is short, after its tokens were inserted into the tree.

        Called by the scheduler's retraction (`snapshot_schedule.keep_on_retraction`). With a host cache it waits until
        the prefix is saved, since it is the first eviction candidate.
        """

    @abstractmethod
    def wait_for_copies(self, waiting: Iterable[Any], most_checks: int | None = None) -> None:
        """Wait for running copies, and cancel the loads of queued requests.

        Called before memory is released or weights change (`srt/features/sleep.py`), and before a flush
        (`srt/features/flush.py`). Afterwards no copy reads or writes device memory until the next step.

        Args:
            waiting: requests in the scheduler's queue.
            most_checks: maximum number of checks, at least a millisecond apart. It is no time, so that all TP ranks
                stop waiting together. None: no limit.
        """

    @abstractmethod
    def keep_host_cache(self) -> AbstractContextManager[None]:
        """Context manager around the release of device memory, in which SGLang flushes the cache.

        With a host cache, first save the snapshots and blocks of the device, as far as the host has room. Inside, a
        flush does not empty the host cache.

        Raises:
            RuntimeError: requests hold tokens of the device.
        """

    @abstractmethod
    def invalidate_storage(self, name: str) -> None:
        """Invalidate stored pages after a weight update, with the tree empty.

        Later pages have a new name. Pages of the old weights stay as long as other servers use them.

        Args:
            name: identifies the new weights in a storage. It is equal on all ranks. A server that starts later must
                not find pages of these weights under its own name.
        """


class HostCacheContract(ABC):
    """Use of host memory by the prefix cache.

    The way of a snapshot: the component marks it (`mark_for_saving`), `HostSaves` plans its save when it is due or
    before its eviction, `HostEvictions` makes room, and the copy runs behind the steps. `HostCopy` has its states.
    SGLang calls `check_hicache_events` once per scheduler iteration: it finishes the copies that have ended, so that
    their nodes can be evicted, and starts the saves that are due.
    """

    @abstractmethod
    def finish_saves(self) -> bool:
        """Wait for running saves. Return True if there were any, so that their blocks can be evicted now."""

    @abstractmethod
    def evict_host(self, num_tokens: int, component_type: Any) -> int:
        """Free host memory, least valuable entries first. Nodes with a running copy are skipped.

        Called by SGLang for pages that it fetches from a storage. The rows are free at once.

        Args:
            num_tokens: tokens of blocks, or rows of snapshots.
            component_type: FULL frees blocks, MAMBA frees rows of snapshots.

        Returns:
            Tokens or rows that were freed.
        """
