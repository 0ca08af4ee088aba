"""The processes of a gloo group, started from the process of the test."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from support.liveness import LONG


class Outcome(NamedTuple):
    """The end of a process.

    Attributes:
        value: what the function returned.
        error: traceback of the exception that it raised; empty if there was none.
        code: exit code of the process; negative: the signal that ended it.
    """

    value: Any
    error: str
    code: int | None


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, method: str = "fork") -> list[Outcome]:
    """Run `function(rank, *arguments)` in `size` processes, with torch's default process group, and wait for them.

    If one ends or raises, collectives of the others raise. `method`: as in multiprocessing; `spawn` for a GPU, which a
    forked process cannot use.
    """
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            given = (there, Path(folder, "store"), rank, size, function, arguments)
            process = context.Process(target=_run, args=given, daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        outcomes = []
        for process, here in started:
            try:
                value, error = here.recv()
            except EOFError:
                value, error = None, ""
            process.join()
            outcomes.append(Outcome(value, error, process.exitcode))
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return the values of processes that all have returned."""
    assert not any(outcome.error or outcome.code for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def _run(there: Any, store: Path, rank: int, size: int, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=LONG)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        there.send((function(rank, *arguments), ""))
    except BaseException:
        there.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
