"""Watchdog for loads from the host: if a load does not end, its requests get an error and the server exits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.utils.watchdog import WatchdogRaw

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class Load:
    """A running load. Steps of `requests` wait for it."""

    number: int
    requests: list[Req]
    blocks: int
    snapshots: int
    # SGLang's events of the load's start and end on the device. None until it is launched.
    ack: Any = None

    @property
    def has_begun(self) -> bool:
        """True if the device has started the load, or while the scheduler launches it. A launched load that waits for
        earlier steps has not begun, so the limit does not count that time."""
        return self.ack is None or self.ack.start_event.query()

    @property
    def has_ended(self) -> bool:
        return self.ack is not None and self.ack.finish_event.query()


class LoadWatch:
    """The running loads, and the thread that limits their duration.

    A step waits for its loads on the device, and the host cannot end that wait. The stream of the steps stalls, and so
    does the scheduler when it needs a result. On a CPU the scheduler itself copies. Therefore a thread (SGLang's
    watchdog) detects the stall. The server cannot continue and exits, as after other device failures.
    """

    def __init__(self) -> None:
        self._loads: deque[Load] = deque()
        self._requests: list[Req] = []
        self._count = 0

    def expect(self, req: Req) -> None:
        """Note that the next load is also for this request."""
        self._requests.append(req)

    def begin(self, operations: Iterable[Any]) -> Load:
        """Record a load before its launch. `operations`: load operations of SGLang's controller."""
        while self._loads and self._loads[0].has_ended:
            self._loads.popleft()
        operations, requests = list(operations), self._requests
        blocks = sum(len(operation.host_indices) for operation in operations) // BLOCK
        snapshots = sum(len(rows.host_indices) for operation in operations for rows in operation.pool_transfers or ())
        self._count, self._requests = self._count + 1, []
        self._loads.append(load := Load(self._count, requests, blocks, snapshots))
        return load

    def oldest(self) -> Load | None:
        """Return the first load that has started and not ended. The watchdog thread calls this, so it must not change
        the state."""
        return next((load for load in tuple(self._loads) if not load.has_ended and load.has_begun), None)

    def start(self, scheduler: Any, seconds: float) -> None:
        """Start the watchdog, which ends the server if a load takes too long.

        Args:
            scheduler: SGLang's scheduler.
            seconds: limit of a load. The thread checks twice in that time, so the end may come 50 % later.
        """
        WatchdogRaw(
            debug_name="dsv4_sglang host cache",
            get_counter=lambda: load.number if (load := self.oldest()) else 0,
            is_active=lambda: self.oldest() is not None,
            watchdog_timeout=seconds,
            dump_info=partial(self.fail, scheduler, seconds),
        )

    def fail(self, scheduler: Any, seconds: float) -> str:
        """Answer the requests of the oldest load with an error.

        Returns:
            The error message. SGLang's watchdog logs it and ends the server.
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        if (load := self.oldest()) is None:
            return ""
        rids = ", ".join(req.rid for req in load.requests)
        message = (
            f"a load from host memory has not ended in {seconds:g} s: {load.blocks} blocks and {load.snapshots} "
            f"snapshots for the requests {rids}. Steps wait for it, so the server ends. If its copies are only slow, "
            "raise the option host_load_timeout_seconds"
        )
        reason = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError").to_json()
        for req in load.requests:
            answer = AbortReq(rid=req.rid, finished_reason=reason, http_worker_ipc=req.http_worker_ipc)
            scheduler.ipc_channels.send_to_tokenizer.send_output(answer, req)
        return message
