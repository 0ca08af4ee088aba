"""Snapshots of a running request: the slots that its next step writes, and those that wait for their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.notes import Pending, RequestNote
from dsv4_sglang.srt.prefix_cache.placement import Due, due_in_prefill, is_kept
from dsv4_sglang.srt.prefix_cache.resume_points import ResumePoint

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from dsv4_sglang.srt.prefix_cache.component import SnapshotComponent


class SnapshotPlanner:
    """Plan of the snapshots that the steps of requests take. The slots are allocated before the step runs."""

    def __init__(self, component: SnapshotComponent, interval: int) -> None:
        """`interval`: snapshots at multiples of this many tokens are kept while the request continues."""
        self.component, self.interval = component, interval

    def plan_prefill(self, req: Req, room: int) -> list[tuple[int, int]]:
        """Plan the snapshots of the next prefill step of a request, and allocate their slots.

        Args:
            req: request of SGLang.
            room: maximum number of snapshots, as the staging buffer allows.

        Returns:
            (length, slot) of each snapshot, ascending.
        """
        note = RequestNote.of(req)
        if note.pending is None:
            note.pending = []
            self.component.begin(req)
        begin, end = req.prefix_len, req.extend_end
        note.reached = end
        due = due_in_prefill(
            begin,
            end,
            prompt=len(req.full_untruncated_fill_ids),
            interval=self.interval,
            branch=req.mamba_branching_seqlen or 0,
        )
        # If not all fit, those with a known use come first, and the deepest of them, which saves most.
        due.sort(key=lambda d: (not d.needed, -d.length))
        taken = [(d.length, slot) for d in due[:room] if (slot := self._take(d))]
        self.component.metrics.add("snapshots_skipped", len(due) - len(taken))
        self.component.metrics.copied_snapshots(len(taken), timed=True)
        taken.sort()
        note.pending.extend(Pending(length, slot, rolling=False) for length, slot in taken)
        return taken

    def plan_decode(self, req: Req, length: int) -> int:
        """Allocate a slot for the rolling snapshot at `length`. Return 0 if none is free."""
        pending = RequestNote.of(req).pending
        if pending is None:
            return 0
        slot = self._take(Due(length, True, ResumePoint.ANSWER))
        if slot:
            self.component.metrics.copied_snapshots(1, timed=False)
            pending.append(Pending(length, slot, rolling=True))
        return slot

    def free_replaced(self, req: Req) -> None:
        """Free the rolling snapshots that the last one, now written, replaces.

        Snapshots of the prefill may be pending too and stay: with overlap scheduling the first decode step is prepared
        before the result of the prefill is processed, which inserts them.
        """
        note = RequestNote.of(req)
        if not note.pending:
            return
        old = [p for p in note.pending[:-1] if p.rolling and not is_kept(p.length, self.interval)]
        note.pending = [p for p in note.pending if p not in old]
        self.component.slots.give_back(p.slot for p in old)

    def plan_verify(self, req: Req, draft_tokens: int) -> int:
        """Return the slot for the rolling snapshot that the next verify step may take, or 0.

        The snapshot is due at the next multiple of 128 if the step may pass it. The device takes it when the step
        passes that length. Until the host knows the outcome, the snapshot is pending.

        The previous step may still run. The next one therefore begins at an unknown length: at most `draft_tokens`
        above the known length, and at most at the bound of the previous step. A slot is allocated only while no step
        can have passed the length already, since the device would never write such a snapshot.

        Args:
            req: request of SGLang.
            draft_tokens: tokens of a verify step.
        """
        note = RequestNote.of(req)
        pending = note.pending
        if pending is None:
            return 0
        known = req.kv.kv_committed_len
        begin = min(note.reached, known + draft_tokens)
        note.reached = begin + draft_tokens
        if len(pending) > 1 and pending[-1].length <= known:
            self.free_replaced(req)
        length = (known // BLOCK + 1) * BLOCK
        if pending and pending[-1].rolling and pending[-1].length == length:
            return pending[-1].slot
        return self.plan_decode(req, length) if begin < length <= begin + draft_tokens else 0

    def _take(self, due: Due) -> int:
        if slot := self.component.allocate_slot(needed=due.needed):
            self.component.slots.registry.set_point(slot, due.point)
        self.component.metrics.add("snapshots_taken", slot > 0)
        return slot
