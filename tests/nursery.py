"""Servers on a CPU that import nothing: forked of a process that has imported SGLang once.

A server is a launcher, schedulers and a detokenizer, and each would import SGLang and torch for 13 s of CPU time. Apart
from that a server starts as by its command: with a process group, an environment, arguments and a file for its output
of its own, and SGLang's `launch_server` as the main program. But what is read of the environment when SGLang is
imported is the same for all, and a scheduler has the plugin from its launcher (test_commands.py: it loads its own).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from dsv4_sglang.srt.launch import Command, cpu_environment

IMPORTS = "imports_of_servers"
# activate.py sets it before SGLang's model is imported, which is too late here.
NO_FP8_CHECKPOINT = {"SGLANG_OPT_FP8_WO_A_GEMM": "0"}
# As it is before the fixtures of any module change it.
ENVIRONMENT = dict(os.environ)


class Forked:
    """A forked process, with what tests use of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()


def start(command: Command, log: Path) -> Forked:
    """Run a server's command for a CPU, `python -m sglang.launch_server ...`, in a process group of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTS])
    environment = {**ENVIRONMENT, **cpu_environment(ENVIRONMENT), **NO_FP8_CHECKPOINT}
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    with patch.dict(os.environ, environment, clear=True):
        forkserver.ensure_running()
    log.write_bytes(b"")
    _, _, module, *arguments = command.argv
    process = context.Process(target=_serve, args=(module, arguments, command.full_environment(), log))
    process.start()
    return Forked(process)


def _serve(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    # In the session of the tests: Linux shares cores between sessions first, and `nice` counts within one.
    os.setpgid(0, 0)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    importlib.import_module(IMPORTS)  # it was before the fork; if that failed, nobody has said why
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, *arguments]
    # SGLang wants its processes spawned, which would import everything.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
