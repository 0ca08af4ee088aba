"""Process groups for weight updates: a thread joins a group, and the scheduler goes on with its requests.

A group forms when all of its processes have joined. SGLang's scheduler waits for them up to 30 minutes and serves
nothing meanwhile, so a wrong address would stop the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.runtime_context import get_parallel
from torch.distributed import PrefixStore, rendezvous

# Requests that join a group.
JOINS = (io_struct.InitWeightsUpdateGroupReqInput, io_struct.InitWeightsSendGroupForRemoteInstanceReqInput)
# State of a group that other processes have yet to join.
WAITING = "waiting for the other processes of the group"
# Time limit of a group without --dist-timeout. A trainer may open its port after it sends the request.
DEFAULT_SECONDS = 120
# Threads of failed joins. A thread whose peer accepts connections and never answers does not end.
MAX_THREADS = 8
THREAD_NAME = "dsv4-join-group"

# The joins that a request still asks for, by its id. All processes of a server have the same.
_joins: dict[str, Join] = {}


class StillWaiting(Exception):
    """Other processes have yet to join the group of a request. The request is sent again later."""


def time_limit() -> int:
    """Return the seconds in which a group must form, and in which a step of a gloo group must end."""
    return get_parallel().dist_timeout or DEFAULT_SECONDS


class Join:
    """A thread that joins a group. The request's `dispatch` is SGLang's function."""

    def __init__(self, dispatch: Callable[[Any], Any], request: Any) -> None:
        self.request, self.output, self.error = request, None, ""
        self._since = time.monotonic()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        if sum(thread.name == THREAD_NAME for thread in threading.enumerate()) >= MAX_THREADS:
            self.error = f"{MAX_THREADS} failed joins of groups still wait for their peers; restart the server"
        else:
            threading.Thread(target=self._run, args=(dispatch,), name=THREAD_NAME, daemon=True).start()

    def _run(self, dispatch: Callable[[Any], Any]) -> None:
        try:
            with torch.cuda.device(self._device):
                output = dispatch(self.request)
        except Exception as caught:
            self.error = repr(caught)
        else:
            if output.success:
                self.output = output
            else:
                self.error = output.message

    def state(self) -> str:
        """Return "" if this process has joined, WAITING if it waits, otherwise an error."""
        if self.error or self.output is not None:
            return self.error
        if time.monotonic() - self._since < (limit := time_limit()):
            return WAITING
        request = self.request
        ports = getattr(request, "ports", None) or request.master_port
        return (
            f"group {request.group_name!r} of {request.world_size} processes at {request.master_address}:{ports} did "
            f"not form in {limit} s (--dist-timeout); check the address, and that every process has joined"
        )


def join(dispatch: Callable[[Any], Any], request: Any, of_group: Callable[[str], list[str]]) -> Any:
    """Return the answer to a request of JOINS, which a thread runs.

    Args:
        dispatch: SGLang's function.
        request: one of JOINS. The same `rid` continues a join.
        of_group: returns the different states of all processes of the server, without "".

    Raises:
        StillWaiting: other processes have yet to join.
        ValueError: a process of this server could not join, or the time is over.
    """
    if request.rid not in _joins:
        if any(other.request.group_name == request.group_name for other in _joins.values()):
            raise ValueError(f"group {request.group_name!r} is being joined by another request")
        _joins[request.rid] = Join(dispatch, request)
    states = of_group(_joins[request.rid].state())
    if states == [WAITING]:
        raise StillWaiting
    joined = _joins.pop(request.rid)
    if states:
        raise ValueError("; ".join(state for state in states if state != WAITING))
    return joined.output


def bound_group(
    original: Callable[..., Any],
    backend: str | None = None,
    init_method: str = "",
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> Any:
    """AROUND `init_custom_process_group` of weight updates: use `time_limit` instead of 30 minutes.

    A step of an NCCL group keeps torch's limit, because torch ends the process after it.
    """
    limit = timedelta(seconds=time_limit())
    store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=limit))
    store.set_timeout(limit)
    timeout = None if "nccl" in str(backend) else limit
    store = PrefixStore(group_name, store)
    return original(backend, None, timeout, world_size, rank, store, group_name, pg_options, device_id)
