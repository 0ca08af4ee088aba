"""The snapshot pool as SGLang sees it: slots 1..size, the registry of what is in them, and the copies into live
slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

from dsv4_sglang.srt.prefix_cache.policy import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.timer import CopyTimer
from dsv4_sglang.srt.prefix_cache.tree import FreeList

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import StateSlotPool


class SnapshotSlots:
    """Stands where SGLang has its pool of int8 copies of Mamba states (`HybridReqToTokenPool.mamba_ckpt_pool`).

    Its leak check asks `available_size` and `num_slots`, its flush calls `clear`, and before a prefill step it calls
    `load_to_active` for requests that resume. Slots are plain ints here: nothing waits for the device.
    """

    def __init__(self, size: int, device: torch.device | str, snapshot_bytes: int = 0) -> None:
        self.num_slots, self.snapshot_bytes, self.host_rows = size, snapshot_bytes, 0
        self._free = FreeList(size)
        self._host_ids = torch.arange(size + 1, dtype=torch.int64)
        self._ids = self._host_ids.to(device)
        self.timer = CopyTimer(device)
        """Of the copies of prefill steps; those of decode steps are part of a CUDA graph."""
        self.registry = SnapshotRegistry(size)
        self.nodes: dict[int, Any] = {}
        """The tree node of each snapshot that hangs on the tree, by its number in the registry."""
        self.layer_transfer_counter: Any = None
        """Of the host cache: says when what a step reads has arrived."""
        self.waits = CopyTimer(device)
        """Of steps, for what they load from the host."""

    def add_host_cache(self, rows: int) -> None:
        """Snapshots may be in so many rows of host memory as well."""
        self.host_rows = rows
        self.forget()

    def available_size(self) -> int:
        return self._free.available_size()

    def free_slots(self) -> np.ndarray:
        """[n] int64, the slots that `take` would give."""
        return self._free.free_ids()

    def take(self) -> int:
        """A free slot, 0 if there is none."""
        taken = self._free.alloc(1)
        return 0 if taken is None else int(taken[0])

    def give_back(self, slots: Iterable[int]) -> None:
        given = np.fromiter(slots, dtype=np.int64)
        if len(given):
            self._free.free(given)

    def free(self, slots: Tensor) -> None:
        """Give back what a tree node held (`node_value`)."""
        self.give_back(slots.tolist())

    def clear(self) -> None:
        """All slots are free; what the registry has is the tree's to say."""
        self._free.clear()

    def forget(self) -> None:
        """The tree is empty."""
        self.registry = SnapshotRegistry(self.num_slots, self.host_rows)
        self.nodes.clear()

    def id_of(self, node: Any) -> int:
        """The number in the registry of a tree node's snapshot: its slot, or that of its row on the host if the
        device does not have it; 0 if there is none."""
        data = node.component_data[ComponentType.MAMBA]
        if data.value is not None:
            return int(data.value)
        return 0 if data.host_value is None else self.registry.host_id(int(data.host_value))

    def node_value(self, slot: int) -> Tensor:
        """[1] int64 on the host: what hangs on a tree node, readable without waiting."""
        return self._host_ids[slot : slot + 1]

    def device_index(self, slot: int) -> Tensor:
        """[1] int64 on the device."""
        return self._ids[slot : slot + 1]

    def load_to_active(self, live_pool: StateSlotPool, snapshots: Tensor, live: Tensor) -> None:
        if self.layer_transfer_counter is not None:
            # Snapshots come with the first layer.
            with self.waits.measure():
                self.layer_transfer_counter.wait_until(0)
        with self.timer.measure():
            live_pool.storage.load(snapshots.to(torch.int32), live.to(torch.int32))
