"""A folder of stored pages that this process uses."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dsv4_sglang.srt.host_cache import locks
from dsv4_sglang.srt.host_cache.files import opened_folder
from dsv4_sglang.srt.host_cache.folder import clear, require_trusted

log = logging.getLogger(__name__)

# Attempts to lock a name at start, SECONDS_BETWEEN apart. `dsv4-sglang storage` locks a name for a moment to see if it
# is used.
ATTEMPTS, SECONDS_BETWEEN = 50, 0.01

_weights: dict[str, str] = {}
"""Description of the weights by page name, for the names that this process uses."""


def describe_weights(name: str, weights: str) -> None:
    """Set a readable description of the weights of pages with this name. `UsedFolder` stores it beside the pages."""
    _weights[name] = weights


def described(name: str) -> str:
    """Return the description for a name, or for the name before an update of the weights. "" if there is none."""
    if name in _weights:
        return _weights[name]
    before = next((weights for known, weights in _weights.items() if name.startswith(f"{known}-")), "")
    return before and f"{before}, updated"


class UsedFolder:
    """A folder that this process uses, for pages of one model name at a time.

    The process holds a lock on the name, so that other processes can tell used pages from unused ones. The lock's file
    says which weights the pages belong to.
    """

    def __init__(self, path: Path, by_group: bool, on_return: Callable[[], None]) -> None:
        """Use a folder, without a page name yet.

        Args:
            path: the folder.
            by_group: as in `require_trusted`.
            on_return: called when the folder was missing and exists again, or was replaced by another one.
        """
        self.path, self._by_group, self._on_return = path, by_group, on_return
        self._name = ""
        # Descriptor of the lock that is held, and the reason why none is held.
        self._lock: int | None = None
        self._unlocked = ""
        # Device and inode of the trusted folder, and the reason why it is not available.
        self._identity: tuple[int, int] | None = None
        self._lost = ""
        # The scheduler and SGLang's threads use the folder at the same time.
        self._look = threading.Lock()

    def use(self, name: str) -> None:
        """Use pages of this name from now on.

        The pages of the former name are removed if no process uses them any more: the last process that leaves the name
        removes them.
        """
        with self._look:
            former, self._name = self._name, name
            self._release()
            for _ in range(ATTEMPTS):
                if not self._visit() or self._unlocked or self._lock is not None:
                    break
                time.sleep(SECONDS_BETWEEN)
        if former and not locks.in_use(self.path, former):
            with suppress(OSError):  # the folder is missing
                clear(self.path, [former])

    def available(self) -> bool:
        """Return True if the folder exists and is trusted. Log when that changes."""
        with self._look:
            return self._visit()

    def _visit(self) -> bool:
        """Check the folder, and lock the name if the lock's file is not the folder's. Return True if it is usable."""
        lost, self._lost = self._lost, ""
        try:
            with opened_folder(self.path) as folder:
                status = os.fstat(folder)
                identity = status.st_dev, status.st_ino
                if lost or identity != self._identity:
                    require_trusted(self.path, self._by_group, "Or start the server with another folder")
                returned, self._identity = lost or self._identity not in (None, identity), identity
                self._keep_lock(folder)
        except (FileNotFoundError, NotADirectoryError):
            self._lost = f"the storage's folder {self.path} is gone"
        except (OSError, RuntimeError) as error:
            self._lost = str(error)
        if self._lost:
            if not lost:
                log.warning("host cache: %s; the server continues without stored pages until it is back", self._lost)
            return False
        if returned:
            log.warning("host cache: the storage's folder %s is back and in use again", self.path)
            self._on_return()
        return True

    def _keep_lock(self, folder: int) -> None:
        """Hold the lock of the name in this folder. Log why that is not possible, once."""
        if self._lock is not None and locks.is_current(self._lock, self._name, folder=folder):
            return
        self._release()
        before, self._unlocked = self._unlocked, ""
        try:
            self._lock = locks.acquire(self._name, fcntl.LOCK_SH, folder=folder)
            if self._lock is not None:
                locks.describe(self._lock, described(self._name))
        except OSError as error:
            self._unlocked = error.strerror or str(error)
        if self._unlocked and not before:
            name = self.path / (self._name + locks.SUFFIX)
            log.warning("host cache: cannot lock %s: %s. Other processes see its pages as unused", name, self._unlocked)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
