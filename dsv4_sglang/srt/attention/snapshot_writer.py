"""Writing of snapshots: copies of state slots to the snapshot slots that the prefix cache has planned."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer
from dsv4_sglang.srt.prefix_cache.notes import PrefillPlan


class SlotCopies(NamedTuple):
    """Copies from state slots `src` int32 [n] to snapshot slots `dst` int32 [n]. A negative `src` or a `dst` below 1 is
    skipped."""

    src: Tensor
    dst: Tensor


class StagedSnapshots(NamedTuple):
    """Snapshots of a prefill step, at most K of a request, ascending by length.

    Attributes:
        staging_slots: int32 [requests, K], state slots that the layers write the snapshots to, -1 for none.
        lengths: int32 [requests, K], lengths of the snapshots, 0 for none.
    """

    staging_slots: Tensor
    lengths: Tensor


class SnapshotWriter:
    """Snapshots of the steps of a backend.

    - Prefill: `stage` assigns staging slots. The layers write the states to them, and `store` copies them to the
      snapshot slots after the last layer. For a recorded step the backend sets `staged`.
    - Decode: the metadata of the step lists the copies; `store` makes them. A decode step that has become a prefill
      step has them too (`rolling`).
    - Verify: the backend sets `verified`; `commit` makes the copies after the draft model has run.

    Args:
        state: storage of the state slots and of the snapshots.
        staging_slots: state slots for the snapshots of a prefill step.
        timer: timer of the copies of eager prefill steps; None if a server has no snapshots.
    """

    def __init__(self, state: StateStorage, staging_slots: range, timer: CopyTimer | None) -> None:
        self.state, self.staging_slots, self.timer = state, staging_slots, timer
        # Copies that `store` makes after the last layer of the prefill step.
        self.staged: SlotCopies | None = None
        # Copies that `commit` makes after the draft model's part of the speculative round. Until then nothing that they
        # copy is overwritten: a snapshot at 128 n contains only state before 128 n.
        self.verified: SlotCopies | None = None

    def stage(self, plan: PrefillPlan | None, requests: int) -> StagedSnapshots | None:
        """Assign staging slots to the snapshots of a prefill step, in their order. The copies follow the same order.

        Everything is computed on the host and sent in one transfer, which does not wait for the device.

        Args:
            plan: snapshots of each request; None without snapshots.
            requests: number of requests with padding requests, which take no snapshots; at least `len(plan)`.
        """
        self.staged = None
        if plan is None:
            return None
        most, free = max(map(len, plan)), iter(self.staging_slots)
        slots, lengths, copies = [-1] * (requests * most), [0] * (requests * most), list[tuple[int, int]]()
        for request, taken in enumerate(plan):
            for at, (length, snapshot) in enumerate(taken, request * most):
                slots[at], lengths[at] = next(free), length
                copies.append((slots[at], snapshot))
        sources, targets = zip(*copies)
        table = torch.tensor([[*slots, *sources], [*lengths, *targets]], dtype=torch.int32)
        staged, due = self._send(table).split([requests * most, len(copies)], dim=1)
        self.staged = SlotCopies(*due)
        return StagedSnapshots(*staged.view(2, requests, most))

    def rolling(self, plan: list[int] | None, requests: int) -> Tensor | None:
        """Return int32 [requests], the snapshot slot to which the state slot of each request is copied after the step,
        0 for none; None if no snapshot is due.

        Args:
            plan: slots of the first requests, None without snapshots.
            requests: number of requests, with padding requests.
        """
        if plan is None:
            return None
        return self._send(torch.tensor([*plan, *[0] * (requests - len(plan))], dtype=torch.int32))

    def _send(self, table: Tensor) -> Tensor:
        """Return a table of the host on the device, without waiting for it."""
        device = self.state.rings.device
        return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)

    def store(self, step: StepMetadata, *, timed: bool) -> None:
        """Take the snapshots of a decode or prefill step, after its last layer.

        Args:
            step: metadata of the step.
            timed: measure the copies of a prefill step. CUDA graphs cannot contain the timer's events.
        """
        if step.copy_src is not None and step.copy_dst is not None:
            self.state.store(step.copy_src, step.copy_dst)
        staged, self.staged = self.staged, None
        if staged is not None:
            with self.timer.measure() if timed and self.timer is not None else nullcontext():
                self.state.store(*staged)

    def commit(self) -> None:
        """Take the snapshots of the requests that passed a multiple of 128 in this round. Call it after the draft model
        has processed the accepted tokens."""
        verified, self.verified = self.verified, None
        if verified is not None:
            self.state.store(*verified)
