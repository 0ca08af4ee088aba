"""The part of the cache of constant size: window rings and compressor states, one state slot per request."""

from __future__ import annotations

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.contracts import StateSlots
from dsv4_sglang.cache.device import clear_memory, resolve_device
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType


class StateStorage(StateSlots):
    """State of all layers: slots of running requests and compact snapshots of them, in a few tensors.

    - `rings` [layers, slots, R, width]: window entries, position t at index t % R (R: `CacheLayout.ring_rows`).
    - `compressor_states`: fp32, by kind, [layers, slots, *`LayerKVSpec.compressor_state_shape`]. Without drafts
      CSA [.., .., 24, 640]; HCA [.., .., 256, 512] raw, [.., .., 3, 512] online; V4.1's pairs [.., .., 1, 1024].

    Slots are numbered from 0, snapshots from 1. A snapshot of a state at a multiple of 128 keeps only what is live
    (SPEC 6.6). One allocation holds the rings of slots and snapshots. Another holds their CSA compressor states in
    units of four rows, of which a snapshot has two. So a copy between slots and snapshots is a slot copy.

    Which part of a slot is live follows from its request's length alone (SPEC 3.7), so a slot need not be cleared for a
    new request.

    Args:
        layout: layout of the model.
        num_slots: number of state slots.
        snapshots: number of snapshots.

    Raises:
        ValueError: `num_slots` is below 1.
    """

    def __init__(self, layout: CacheLayout, num_slots: int, snapshots: int = 0) -> None:
        if num_slots < 1:
            raise ValueError(f"{num_slots} state slots; expected at least 1")
        self.layout, self.num_slots, self.snapshots = layout, num_slots, snapshots
        self.device = resolve_device(layout.device)
        self._all_rings = layout.make_rings(num_slots + snapshots)
        self.rings: Tensor = self._all_rings[:, :num_slots]
        self.compressor_states: dict[AttentionType, Tensor] = {}
        self._compressor_state_units: Tensor | None = None
        spec = layout.kept
        self._kept = spec.kept_units if spec else ()
        self._units_per_slot = (
            spec.compressor_state_shape[0] // CSA_RATIO if spec and spec.compressor_state_shape else 0
        )
        for kind in layout.kinds:
            if part := layout.compressor_states(kind, num_slots):
                if layout.kept and layout.kept.kind is kind:
                    self.compressor_states[kind] = self._csa_compressor_states(part.shape[0], part.shape[-1])
                else:
                    self.compressor_states[kind] = torch.zeros(part.shape, device=self.device)
        self._compressor_state_of_layer = {
            layer: compressor_state
            for kind, compressor_states in self.compressor_states.items()
            for layer, compressor_state in zip(layout.layers(kind), compressor_states)
        }

    def _csa_compressor_states(self, layers: int, columns: int) -> Tensor:
        """Allocate the compressor states of slots and snapshots together. Return those of the slots, [layers, slots,
        rows, columns]."""
        live, kept = self.num_slots * self._units_per_slot, self._kept
        units = live + self.snapshots * len(kept)
        self._compressor_state_units = torch.zeros((layers, units, CSA_RATIO, columns), device=self.device)
        self._live_units = torch.empty(len(kept), dtype=torch.int32, device=self.device)
        self._snapshot_units = torch.empty_like(self._live_units)
        self._index_units()
        return self._compressor_state_units[:, :live].unflatten(1, (self.num_slots, self._units_per_slot)).flatten(2, 3)

    def _index_units(self) -> None:
        """Write the unit indices to which `_copy` adds the offset of a slot or snapshot.

        In a layer with 2 slots of 6 units and 2 snapshots, these units are live at a multiple of 128:

            unit   0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13      | 14 15
            of     slot 0      | slot 1        | snapshot 1 | snapshot 2
            live         ^   ^         ^    ^    ^  ^         ^  ^

        `_live_units` are those of slot 0: 3 and 5. `_snapshot_units` are the two units before snapshot 1, 10 and 11,
        because snapshots are numbered from 1: those of snapshot n are 2 n further.
        """
        live = self.num_slots * self._units_per_slot
        self._live_units.copy_(torch.tensor(self._kept, dtype=torch.int32))
        self._snapshot_units.copy_(torch.arange(live - len(self._kept), live, dtype=torch.int32))

    def reset(self) -> None:
        for tensor in self.allocations:
            clear_memory(tensor)
        if self._compressor_state_units is not None:
            self._index_units()

    def ring(self, layer: int) -> Tensor:
        """Return a layer's window rings, [slots, R, width]."""
        return self.rings[layer]

    def compressor_state(self, layer: int) -> Tensor | None:
        """Return a layer's compressor states, [slots, ...]; None without a compressor."""
        return self._compressor_state_of_layer.get(layer)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the slots. The second dimension is the slot."""
        return [self.rings, *self.compressor_states.values()]

    @property
    def allocations(self) -> list[Tensor]:
        """One view of each allocated piece of memory: slots, snapshots and unit indices."""
        tables = () if self._compressor_state_units is None else (self._live_units, self._snapshot_units)
        return [*self.tensors, *tables]

    def store(self, slots: Tensor, snapshots: Tensor) -> None:
        self._copy(slots, snapshots, to_snapshots=True)

    def load(self, snapshots: Tensor, slots: Tensor) -> None:
        self._copy(slots, snapshots, to_snapshots=False)

    def snapshot_tables(self) -> list[Tensor]:
        tables = list(self._all_rings[:, self.num_slots :])
        if self._compressor_state_units is not None:
            kept = self._compressor_state_units[:, self.num_slots * self._units_per_slot :]
            tables += kept.unflatten(1, (self.snapshots, len(self._kept)))
        return [_as_bytes(table) for table in tables]

    def _copy(self, slots: Tensor, snapshots: Tensor, *, to_snapshots: bool) -> None:
        # Few and small launches, because every decode step runs them even if no copy is due. `copy_state` skips pairs
        # with a negative slot; slot -1 gives negative units as well.
        none = snapshots < 1
        self._move(self._all_rings, slots, (snapshots + (self.num_slots - 1)).masked_fill(none, -1), to_snapshots)
        if self._compressor_state_units is not None:
            live = torch.add(self._live_units, slots[:, None], alpha=self._units_per_slot)
            kept = torch.add(self._snapshot_units, snapshots[:, None], alpha=self._snapshot_units.numel())
            kept = kept.masked_fill(none[:, None], -1)
            self._move(self._compressor_state_units, live.flatten(), kept.flatten(), to_snapshots)

    @staticmethod
    def _move(tensor: Tensor, live: Tensor, snapshot: Tensor, to_snapshots: bool) -> None:
        source, target = (live, snapshot) if to_snapshots else (snapshot, live)
        torch.ops.dsv4_sglang.copy_state(source, target, [tensor])

    def memory_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (self.rings, *self.compressor_states.values()))


def _as_bytes(table: Tensor) -> Tensor:
    """Return a view of [n, ...] as [n, bytes] uint8."""
    return (table if table.dim() > 1 else table[:, None]).view(torch.uint8).view(len(table), -1)
