"""State of the host copy of each snapshot on the device."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class HostCopy(IntEnum):
    """State of the host copy of a snapshot in a device slot.

    A name that begins with SAVED says that the host has a copy. The rest is the state after the host evicts it.
    """

    # No request has used the snapshot, and --hicache-write-policy saves only those that were used.
    NOT_NEEDED = 0
    # To be saved as soon as the host has room.
    DUE = 1
    # To be saved before the device evicts it: an early save found no room, or the policy is write_back.
    DEFERRED = 2
    SAVED_NOT_NEEDED = 3
    SAVED_DUE = 4
    SAVED_DEFERRED = 5


class CopyEvent(IntEnum):
    """Events that change the state of a host copy."""

    # The host must get a copy.
    NEED = 0
    # The host needs no copy before the device evicts the snapshot.
    DEFER = 1
    # A save has ended, or a storage had the snapshot.
    SAVE = 2
    # The host has evicted its copy.
    LOSE = 3
    # A snapshot that only the host had is in a device slot again: loaded, or recomputed by a request.
    LOAD = 4


_SAVED = HostCopy.SAVED_NOT_NEEDED

# The legal transitions: state -> event -> next state.
TRANSITIONS: dict[HostCopy, dict[CopyEvent, HostCopy]] = {
    HostCopy.NOT_NEEDED: {
        CopyEvent.NEED: HostCopy.DUE,
        CopyEvent.DEFER: HostCopy.DEFERRED,
        CopyEvent.SAVE: HostCopy.SAVED_NOT_NEEDED,
        CopyEvent.LOAD: HostCopy.SAVED_DEFERRED,
    },
    HostCopy.DUE: {
        CopyEvent.NEED: HostCopy.DUE,
        CopyEvent.DEFER: HostCopy.DEFERRED,
        CopyEvent.SAVE: HostCopy.SAVED_DUE,
    },
    HostCopy.DEFERRED: {
        CopyEvent.NEED: HostCopy.DEFERRED,
        CopyEvent.DEFER: HostCopy.DEFERRED,
        CopyEvent.SAVE: HostCopy.SAVED_DEFERRED,
    },
    HostCopy.SAVED_NOT_NEEDED: {
        CopyEvent.NEED: HostCopy.SAVED_DUE,
        CopyEvent.DEFER: HostCopy.SAVED_DEFERRED,
        CopyEvent.LOSE: HostCopy.NOT_NEEDED,
    },
    HostCopy.SAVED_DUE: {
        CopyEvent.NEED: HostCopy.SAVED_DUE,
        CopyEvent.DEFER: HostCopy.SAVED_DEFERRED,
        CopyEvent.LOSE: HostCopy.DUE,
    },
    HostCopy.SAVED_DEFERRED: {
        CopyEvent.NEED: HostCopy.SAVED_DEFERRED,
        CopyEvent.DEFER: HostCopy.SAVED_DEFERRED,
        CopyEvent.LOSE: HostCopy.DEFERRED,
    },
}


class HostCopies:
    """The state of the host copy of each snapshot, by number. Snapshots that only the host has stay NOT_NEEDED."""

    def __init__(self, size: int) -> None:
        # HostCopy of each snapshot.
        self.states = np.zeros(size, dtype=np.int8)

    def __getitem__(self, number: int) -> HostCopy:
        return HostCopy(self.states[number])

    def apply(self, event: CopyEvent, number: int) -> None:
        """Change the state of a snapshot. Raise ValueError if the event is not possible in its state."""
        state = self[number]
        if event not in TRANSITIONS[state]:
            raise ValueError(f"snapshot {number}: {event.name} is not possible in the state {state.name}")
        self.states[number] = TRANSITIONS[state][event]

    def forget(self, number: int) -> None:
        """Reset the state after the device has evicted the snapshot."""
        self.states[number] = HostCopy.NOT_NEEDED

    def is_saved(self, number: int) -> bool:
        return bool(self.states[number] >= _SAVED)

    def is_unsaved(self, number: int) -> bool:
        """Return True if the host lacks a copy that it must get before the device evicts the snapshot."""
        return self.states[number] in (HostCopy.DUE, HostCopy.DEFERRED)

    def saved(self) -> np.ndarray:
        """Return a bool column by number: True if the host has a copy."""
        return self.states >= _SAVED

    def due(self) -> np.ndarray:
        """Return the numbers of the snapshots in the state DUE, ascending."""
        return np.flatnonzero(self.states == HostCopy.DUE)
