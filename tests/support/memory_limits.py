"""Limits of memory that a test lowers while servers run: the size of a file system in memory, and a control group.

Both need a user who may mount and may create control groups. Elsewhere the tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dsv4_sglang.cache.host_memory import CGROUP_FILES


@contextmanager
def file_system(folder: Path, size: int) -> Iterator[None]:
    """Context manager with a file system in memory of `size` bytes at `folder`."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def resized(folder: Path, limit: str) -> bool:
    """Set a limit of a file system in memory, such as `size=4096`. Return False if the system refuses."""
    return subprocess.run(["mount", "-o", f"remount,{limit}", folder], check=False).returncode == 0


class ControlGroup:
    """A control group whose processes have a limit of memory together. `folder` has its files."""

    def __init__(self, folder: Path, limit: str, usage: str) -> None:
        self.folder, self._limit, self._usage = folder, folder / limit, folder / usage

    def add(self, process: int) -> None:
        """Move a process to the group. Its later children start there."""
        (self.folder / "cgroup.procs").write_text(str(process))

    def processes(self) -> set[int]:
        return {int(line) for line in (self.folder / "cgroup.procs").read_text().split()}

    def lower(self, spare: int) -> None:
        """Limit the memory to what is used and `spare` bytes."""
        self._limit.write_text(str(int(self._usage.read_text()) + spare))

    def lift(self) -> None:
        """Remove the limit."""
        self._limit.write_text("max" if self._limit.name == "memory.max" else "-1")

    def exhaust(self, nbytes: int) -> None:
        """Use this much memory in a process of the group, until it or the system ends the process."""
        program = f"import sys; sys.stdin.read(1); kept = b'x' * {nbytes}"
        with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) as process:
            self.add(process.pid)
            process.communicate(b"x")


@contextmanager
def control_group(name: str) -> Iterator[ControlGroup]:
    """Context manager with a new control group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in CGROUP_FILES:
            mount, limit, usage, _ = CGROUP_FILES[controllers]
            own = Path("/", mount, path.lstrip("/"))
            # In version 2 a group with processes has no groups with limits below it.
            folder = (own if controllers else own.parent) / name
            with suppress(OSError):
                folder.mkdir()
                if (folder / limit).exists():
                    break
                folder.rmdir()
    else:
        pytest.skip("this user cannot create a control group with a limit of memory")
    try:
        yield ControlGroup(folder, limit, usage)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a control group as soon as its processes have ended."""
    for _ in range(100):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()
