"""Control requests, such as weight updates and aborts: an exception becomes the answer, and the server goes on.

SGLang's scheduler ends the server if a control request raises an exception. Here the scheduler answers with
`RpcReqOutput`, and the HTTP process raises `ControlRequestError`, which SGLang returns with status 400. A request that
waits for other processes (features/weight_groups.py) is sent again until they have joined.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Protocol

import torch
from fastapi import HTTPException  # noqa: TID251  an exception class; nothing listens
from sglang.srt.managers import io_struct
from sglang.srt.managers.communicator import FanOutCommunicator

from dsv4_sglang.srt.features import weight_groups
from dsv4_sglang.srt.features.flush import failures_first
from dsv4_sglang.srt.features.integrity.report import requests_of
from dsv4_sglang.srt.sglang.scheduler import add_result_handler, wrap_dispatcher

log = logging.getLogger(__name__)

# Requests that SGLang schedules. `request_validation` checks them before they are sent.
SCHEDULED = (
    io_struct.TokenizedGenerateReqInput,
    io_struct.TokenizedEmbeddingReqInput,
    io_struct.BatchTokenizedGenerateReqInput,
    io_struct.BatchTokenizedEmbeddingReqInput,
)
# Seconds until a request that waits for other processes is sent again.
POLL_SECONDS = 0.2


class Receiver(Protocol):
    """A call of an HTTP process that waits for the answers of schedulers."""

    def handle_recv(self, answer: Any, /) -> None: ...


# The waiting calls of this HTTP process, by the id of their control request.
_waiting: dict[str, Receiver] = {}


class FatalError(RuntimeError):
    """Error of a control request after which the server must end, because its answers would be wrong."""


class ControlRequestError(HTTPException):
    """Error answer to a control request."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, message)

    def __str__(self) -> str:
        return str(self.detail)


# In a scheduler


def guard_control_requests(original: Callable[..., None], scheduler: Any) -> None:
    """AROUND `Scheduler.init_request_dispatcher`: answer a control request that raises an exception with the error."""
    original(scheduler)
    wrap_dispatcher(scheduler, lambda dispatch, request: _answer(scheduler, dispatch, request))


def _answer(scheduler: Any, dispatch: Callable[..., Any], request: Any) -> Any:
    """Return the answer to a request, or send the error.

    All processes of an attention group run this call, and the first one answers.
    """
    if isinstance(request, SCHEDULED):
        return dispatch(request)
    output, error = None, ""
    try:
        if isinstance(request, weight_groups.JOINS):
            output = weight_groups.join(dispatch, request, lambda state: _of_group(scheduler, state))
        else:
            output = dispatch(request)
    except FatalError:
        raise
    except weight_groups.StillWaiting:
        error = weight_groups.WAITING
    except Exception as caught:
        error, described = " ".join(str(caught).split()), isinstance(caught, ValueError)
        # A ValueError describes a wrong request. The place of another exception is worth a traceback.
        if not described:
            error = f"{type(caught).__name__}: {error}"
        log.error("dsv4_sglang: %s failed: %s", type(request).__name__, error, exc_info=not described)
    if not _is_awaited(request):
        return output
    if not (errors := _of_group(scheduler, error)):
        return output
    # A returned RpcReqOutput would go to the engine that sends RpcReqInput.
    scheduler.send_control_output(_failed(request, "; ".join(errors)), request)
    return None


def _is_awaited(request: Any) -> bool:
    """Return True if the HTTP process waits for an answer."""
    return bool(request.rid) or isinstance(
        request, (io_struct.UpdateWeightFromDiskReqInput, io_struct.OpenSessionReqInput)
    )


def _of_group(scheduler: Any, error: str) -> list[str]:
    """Return the different errors of all processes of the attention group. An empty string is no error."""
    errors = [error]
    group = scheduler.attn_tp_cpu_group
    if (size := torch.distributed.get_world_size(group)) > 1:
        errors = [""] * size
        torch.distributed.all_gather_object(errors, error, group=group)
    return [*dict.fromkeys(filter(None, errors))]


def _failed(request: Any, message: str) -> Any:
    """Return the error answer to a request, in the class that its waiting call expects."""
    if isinstance(request, io_struct.UpdateWeightFromDiskReqInput):
        return io_struct.UpdateWeightFromDiskReqOutput(success=False, message=message)
    if isinstance(request, io_struct.OpenSessionReqInput):
        return io_struct.OpenSessionReqOutput(session_id=request.session_id, success=False)
    return io_struct.RpcReqOutput(rid=request.rid, success=False, message=message)


def abort_one(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """AROUND `Scheduler.abort_request`: hide the other requests whose ids begin with the id of the aborted one."""
    others = []
    if not recv_req.abort_all:
        same = [req for req in requests_of(scheduler) if req.rid.startswith(recv_req.rid) and req.rid != recv_req.rid]
        others = [(req, req.rid) for req in same]
    for req, rid in others:
        req.rid = f"\0{rid}"
    try:
        original(scheduler, recv_req)
    finally:
        for req, rid in others:
            req.rid = rid


# In an HTTP process


def receive_errors(original: Callable[..., None], manager: Any) -> None:
    """AROUND `TokenizerManager.init_communicators`: pass the error answers of schedulers to the waiting calls."""
    original(manager)
    add_result_handler(manager, io_struct.RpcReqOutput, _receive)


def _receive(answer: io_struct.RpcReqOutput) -> None:
    if (receiver := _waiting.get(answer.rid or "")) is not None:
        receiver.handle_recv(answer)


@contextmanager
def receiving(rid: str, receiver: Receiver) -> Iterator[None]:
    """Context manager: pass each `RpcReqOutput` with the id `rid` to `receiver`."""
    _waiting[rid] = receiver
    try:
        yield
    finally:
        del _waiting[rid]


async def raise_errors(original: Callable[..., Any], communicator: FanOutCommunicator[Any], obj: Any) -> Any:
    """AROUND `FanOutCommunicator.__call__`: raise ControlRequestError if a scheduler answers with an error."""
    obj.rid = uuid.uuid4().hex
    with receiving(obj.rid, communicator):
        while errors := _errors(answers := await original(communicator, obj)):
            if errors != [weight_groups.WAITING]:
                raise ControlRequestError("; ".join(errors))
            await asyncio.sleep(POLL_SECONDS)
    return failures_first(answers)


def _errors(answers: list[Any]) -> list[str]:
    """Return the different errors of schedulers."""
    return [*dict.fromkeys(answer.message for answer in answers if isinstance(answer, io_struct.RpcReqOutput))]
