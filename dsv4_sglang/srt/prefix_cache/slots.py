"""Snapshot pool in the form that SGLang expects: slots 1..size, the registry of their snapshots, and the copies into
live state slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

from dsv4_sglang.cache.contracts import SnapshotPool
from dsv4_sglang.cache.free_list import FreeList
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer
from dsv4_sglang.srt.prefix_cache.registry import SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.tenants import NO_LIMIT, Room, tenants_of


class SnapshotSlots(SnapshotPool):
    """Replacement of SGLang's pool of int8 copies of Mamba states (`HybridReqToTokenPool.mamba_ckpt_pool`).

    SGLang calls `available_size` and `num_slots` in its leak check, `clear` when it flushes, and `load_to_active`
    before a prefill step with requests that resume. Slots are Python ints, so no call synchronises with the device.
    """

    def __init__(self, size: int, device: torch.device | str, snapshot_bytes: int = 0) -> None:
        """Create the allocator and an empty registry.

        Args:
            size: number of snapshot slots.
            device: device of the snapshot pool.
            snapshot_bytes: bytes of a snapshot, for metrics.
        """
        self.num_slots, self.snapshot_bytes, self.host_rows = size, snapshot_bytes, 0
        # Largest share of a tenant in percent (option `tenant_percent`), and the tokens of device and host.
        self.tenant_percent = NO_LIMIT
        self.tokens = self.host_tokens = 0
        self.clear()
        self._host_ids = torch.arange(size + 1, dtype=torch.int64)
        self._ids = self._host_ids.to(device)
        # Copies of prefill steps. Those of decode steps are part of a CUDA graph and cannot be timed.
        self.timer = CopyTimer(device)
        self.registry = SnapshotRegistry(size)
        # Tree node of each snapshot that is attached to the tree, by its number in the registry.
        self.nodes: dict[int, Any] = {}
        # Set with a host cache: signals the arrival of each layer of a load.
        self.layer_transfer_counter: Any = None
        # Time that steps wait for loads from the host.
        self.waits = CopyTimer(device)

    def add_host_cache(self, rows: int) -> None:
        """Extend the registry by `rows` rows of host memory, and empty it."""
        self.host_rows = rows
        self.forget()

    def available_size(self) -> int:
        return self._free.available

    def free_slots(self) -> list[int]:
        """Return the slots that `take` would allocate, in reverse order."""
        return self._free.free()

    def take(self) -> int:
        taken = self._free.take(1)
        return taken[0] if taken else 0

    def give_back(self, slots: Iterable[int]) -> None:
        self._free.give_back(slots)

    def free(self, slots: Tensor) -> None:
        """Free the slot that was the value of a tree node (a `node_value`)."""
        self.give_back(slots.tolist())

    def clear(self) -> None:
        """Free all slots. The registry is not changed; the tree removes its snapshots with `forget`."""
        self._free = FreeList(self.num_slots, first=1)

    def forget(self) -> None:
        """Empty the registry, after the tree was emptied."""
        rooms = Room(self.tokens, self.num_slots), Room(self.host_tokens, self.host_rows)
        tenants = tenants_of(self.tenant_percent, rooms, self.num_slots + self.host_rows + 1)
        self.registry = SnapshotRegistry(self.num_slots, self.host_rows, tenants=tenants)
        self.nodes.clear()

    def id_of(self, node: Any) -> int:
        data = node.component_data[ComponentType.MAMBA]
        if data.value is not None:
            return int(data.value)
        return 0 if data.host_value is None else self.registry.host_id(int(data.host_value))

    def node_value(self, slot: int) -> Tensor:
        """Return the slot as a CPU tensor, [1] int64, for a tree node. Reading it does not wait for the device."""
        return self._host_ids[slot : slot + 1]

    def device_index(self, slot: int) -> Tensor:
        """Return the slot as a device tensor, [1] int64."""
        return self._ids[slot : slot + 1]

    def load_to_active(self, live_pool: Any, snapshots: Tensor, live: Tensor) -> None:
        """Copy snapshots into live state slots.

        Args:
            live_pool: `StateSlotPool` of the live slots.
            snapshots: [n] snapshot slots.
            live: [n] live slots.
        """
        if self.layer_transfer_counter is not None:
            # A load transfers the snapshots together with the first layer.
            with self.waits.measure():
                self.layer_transfer_counter.wait_until(0)
        with self.timer.measure():
            live_pool.storage.load(snapshots.to(torch.int32), live.to(torch.int32))
