"""CPU servers and tests inside SGLang that are forked from a process that has imported SGLang once.

A server consists of a launcher, schedulers and a detokenizer. Each would import SGLang and torch for 13 s of CPU time.

A forked server otherwise starts as from its command. It has its own process group, environment, arguments and output
file, and SGLang's `launch_server` is the main program. There are four differences:

- The environment that SGLang reads when it is imported is the same for all servers, except SGLANG_TEST_RETRACT.
- A scheduler inherits the plugin from its launcher, and so do tokenizer workers unless NEW_WORKERS is set.
  test_commands.py and test_tokenizer_workers.py test that they load the plugin by themselves.
- SGLang's DP controller, which distributes requests to the ranks of DP attention, waits for them. By itself it polls
  its socket without a pause, which occupies a core.
- An idle scheduler sleeps for at most 50 ms instead of a second. While it sleeps it sees no copy that ends, and a rank
  of DP attention keeps the other ranks waiting.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import uvicorn._subprocess

from benchmarks import servers
from dsv4_sglang.cli.server import Endpoint, RequestError, stop
from dsv4_sglang.srt.launch.command import Command, cpu_environment
from support.liveness import LONG, wait

if TYPE_CHECKING:
    import pytest

IMPORTS = "support.imports_of_servers"
# Environment variable of a server whose tokenizer workers are new processes.
NEW_WORKERS = "DSV4_SGLANG_TEST_NEW_WORKERS"
SETTINGS = {
    # activate.py sets it before SGLang's model is imported, which is too late here.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    # Compilation takes more time than it saves here.
    "TORCHDYNAMO_DISABLE": "1",
    # By default uvicorn replaces a tokenizer worker whose imports take ten seconds, so on a busy machine none starts.
    "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "7200",
}
# Argument of a benchmark for its servers: without SGLang's request at the start, and asleep between requests. An idle
# scheduler would occupy a core.
QUICK = "--flags=--sleep-on-idle --skip-server-warmup"
# The environment before the fixtures of any module change it.
ENVIRONMENT = dict(os.environ)


class Forked:
    """A forked process with the part of `subprocess.Popen` that tests use."""

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

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def start(command: Command, log: Path) -> Forked:
    """Run a command for a CPU, `python -m MODULE ...`, in a new process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, IMPORTS])
    environment = {**ENVIRONMENT, **cpu_environment(ENVIRONMENT), **SETTINGS}
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
    with patch.dict(os.environ, environment, clear=True):
        forkserver.ensure_running()
    log.write_bytes(b"")
    _, _, module, *arguments = command.argv
    process = context.Process(target=_run_module, args=(module, arguments, command.full_environment(), log))
    process.start()
    return Forked(process)


def fork_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the servers of `benchmarks.servers`, ask for /ready, and end them at once.

    SGLang answers /health after a second, and looks for a SIGTERM every five seconds.
    """
    monkeypatch.setattr(servers, "start", lambda command, out: start(command, Path(out.name)))
    monkeypatch.setattr(servers, "stop", partial(stop, grace_seconds=0))
    monkeypatch.setattr(servers.Server, "ready", ready)


def ready(server: Endpoint, timeout: float) -> None:
    """Return if the server accepts requests, as `Endpoint.ready`. Unlike /health, /ready does not take a second."""
    try:
        server.request("/ready", timeout=min(timeout, LONG))
    except RequestError as error:
        raise ConnectionError(str(error)) from None


def run(command: Command, log: Path) -> None:
    """Run a command to its end. Raise AssertionError with the end of its output unless the exit code is 0."""
    process = start(command, log)
    try:
        code = wait(process, log)
    finally:
        # The group may outlive its leader.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, _said(log.read_text(errors="replace"))


def _said(text: str) -> str:
    """Return the end of an output, after pytest's lines on failed tests, which may be earlier in the output."""
    failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "\n".join([*failed, text[-8000:]])


def _read_retractions() -> None:
    """Read the variables that make a scheduler retract requests, as the import of SGLang does."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def _run_module(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    # Stay in the session of the tests: Linux shares cores between sessions first, and `nice` counts within one.
    os.setpgid(0, 0)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # uvicorn passes the number of this file to its workers. The workers of a forked process have only files 0, 1 and 2.
    os.dup2(sys.stdin.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    importlib.import_module(IMPORTS)  # already imported before the fork; repeated here to report an import error
    os.environ.update(environment)
    _read_retractions()
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, *arguments]
    # SGLang and uvicorn request spawned processes, which would import everything again.
    if NEW_WORKERS not in environment:
        uvicorn._subprocess.spawn = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[method-assign]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        # As the main program's; multiprocessing would print the traceback instead.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
