"""Notes of this package on SGLang's requests and batches. Each has one attribute of this package, its note."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

ATTRIBUTE = "dsv4"
# For each request of a prefill step, (length, slot) of its snapshots, ascending.
PrefillPlan = list[list[tuple[int, int]]]
NoteType = TypeVar("NoteType", bound="Note")


class Note:
    """Note on an object of SGLang, which lives as long as the object."""

    @classmethod
    def of(cls: type[NoteType], owner: Any) -> NoteType:
        """Return the note on a request or batch, a new one if there is none."""
        note = vars(owner).get(ATTRIBUTE)
        if note is None:
            note = cls()
            setattr(owner, ATTRIBUTE, note)
        assert isinstance(note, cls)
        return note


class Pending(NamedTuple):
    """A snapshot whose blocks are not inserted into the tree yet.

    `rolling`: a decode step takes it, and the next rolling snapshot replaces it.
    """

    length: int
    slot: int
    rolling: bool


@dataclass
class RequestNote(Note):
    """Note on a request.

    Attributes:
        pending: snapshots that are not attached to the tree yet, ascending by length. None before the first step of the
            request, after its end and after a retraction.
        reached: upper bound of the length after the last planned step, prefill or verify.
        first_token_waits_in: label `cache` of the metric of the first token; None once that is measured.
        keeps_cache: the request is retracted because memory is short, and its KV cache stays in the tree.
        matched: id of the tree node at which the last lookup of the request ended; None if it found nothing.
    """

    pending: list[Pending] | None = None
    reached: int = 0
    first_token_waits_in: str | None = None
    keeps_cache: bool = False
    matched: int | None = None


@dataclass
class BatchNote(Note):
    """Note on a batch.

    Attributes:
        prefill_plan: snapshots of each request that is planned so far for the prefill step.
        rolling_plan: for each request of a decode step, the slot of the rolling snapshot to take, 0 for none; empty if
            none is due.
        verify_plan: for each request, the slot of the snapshot to take if its verify step passes the length; 0 for
            none.
    """

    prefill_plan: PrefillPlan = field(default_factory=list)
    rolling_plan: list[int] = field(default_factory=list)
    verify_plan: list[int] = field(default_factory=list)
