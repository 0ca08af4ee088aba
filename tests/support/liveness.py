"""Waits without deadlines: the tests wait for a process while it makes progress, however slow the machine is.

A process that has ended is an error at once. A process that has done almost no work for STUCK_SECONDS is an error, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

STUCK_SECONDS = 300.0
# The CPU time of a process in STUCK_SECONDS on a machine with fifty times more work than cores.
LITTLE_WORK = 0.02 * STUCK_SECONDS
POLL_SECONDS = 1.0
# Timeout in seconds for calls that need one and that fail by themselves when their server ends.
LONG = 3600.0


class Process(Protocol):
    """The part of `subprocess.Popen` that the tests use. server_forkserver.py has another implementation."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Progress:
    """The progress of a process and all its descendants from now on. `log` is a file to which they write."""

    def __init__(self, process: Process, log: Path | None = None) -> None:
        self.process, self.log = process, log
        self._since, self._used, self._lines = time.monotonic(), self._cpu_seconds(), self._lines_of_log()

    def check(self) -> None:
        """Raise AssertionError with the end of the log if the process has ended or is stuck."""
        code = self.process.poll()
        assert code is None, f"the process has ended with exit code {code}{self.end_of_log()}"
        now, used, lines = time.monotonic(), self._cpu_seconds(), self._lines_of_log()
        if abs(used - self._used) >= LITTLE_WORK or lines > self._lines:
            self._since, self._used, self._lines = now, used, lines
        assert now - self._since < STUCK_SECONDS, (
            f"the process lives, but in {now - self._since:.0f} s it wrote nothing and used no more than "
            f"{used - self._used:.1f} s of CPU time{self.end_of_log()}"
        )

    def end_of_log(self) -> str:
        return "" if self.log is None else ":\n" + self.log.read_text(errors="replace")[-4000:]

    def _cpu_seconds(self) -> float:
        used = 0.0
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    used += sum(member.cpu_times()[:4])  # includes children that have ended
        return used

    def _lines_of_log(self) -> int:
        """Return the number of log lines, without those of HTTP requests. A request is no progress."""
        text = b"" if self.log is None else self.log.read_bytes()
        return text.count(b"\n") - text.count(b" HTTP/1.1")


def wait(process: Process, log: Path | None = None) -> int:
    """Wait for a process that ends by itself. Return its exit code."""
    progress = Progress(process, log)
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            break
        progress.check()
    return process.returncode


def has_ended(process: psutil.Process) -> bool:
    """Wait until a killed process has ended, which may be no child of this one. Return False if it goes on."""
    deadline = time.monotonic() + STUCK_SECONDS
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def communicate(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a process that ends by itself. Return what it writes to its pipes."""
    progress = Progress(process)
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if process.poll() is None:
                progress.check()


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `subprocess.run` with both outputs captured as text. If the wait fails, kill the process group."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes, **options) as process:
        try:
            out, err = communicate(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
