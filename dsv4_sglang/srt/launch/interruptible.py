"""Run a module such that Ctrl-C ends it quietly while it starts: `python -m ...interruptible MODULE ARGUMENTS...`.

`serve` becomes this process with SIGINT blocked, so that the signal is not lost before Python handles it. All threads
and subprocesses inherit the mask: a terminal sends the signal to every process of a server, and each would print a
traceback. One thread receives it instead.
"""

from __future__ import annotations

import _thread
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, NoReturn

import psutil

# Seconds during which no other thread runs.
LONG = 1000.0
# A shell's exit code of a process that SIGINT ended.
INTERRUPTED = 128 + signal.SIGINT


def _end(_number: int, _frame: Any = None) -> NoReturn:
    """Handler of SIGINT until the server installs its own. End this process and its subprocesses."""
    started = [process.pid for process in psutil.Process().children(recursive=True)]
    print("dsv4-sglang: interrupted before the server was up", file=sys.stderr, flush=True)
    sys.setswitchinterval(LONG)  # the main thread must not see that a subprocess has ended, and report it
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(INTERRUPTED)


def _receive() -> None:
    while True:
        signal.sigwait({signal.SIGINT})
        if signal.getsignal(signal.SIGINT) is _end:
            _end(signal.SIGINT, None)  # now: the main thread may be loading a library
        _thread.interrupt_main(signal.SIGINT)


def main() -> None:
    signal.signal(signal.SIGINT, _end)
    # It is started with the first subprocess, and unblocks SIGINT. Later it finds that it runs.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_receive, name="SIGINT", daemon=True).start()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
