"""Loads from the host that do not end: the requests that wait for one get an error, and the server ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.cache_controller import LayerLoadingEvent
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.utils.watchdog import WatchdogRaw

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class LoadEvents(LayerLoadingEvent):
    """SGLang's events of a load by layers, and how many of them are recorded: one that is not counts as reached."""

    launched = 0

    def complete(self, layer_index: int) -> None:
        super().complete(layer_index)
        self.launched = layer_index + 1

    def missing(self) -> int:
        """Return the first layer that has not arrived."""
        layers = range(self.launched)
        return next((layer for layer in layers if not self.load_events[layer].query()), self.launched)


@dataclass
class Load:
    """A load under way; steps of `requests` wait for it."""

    number: int
    requests: list[Req]
    blocks: int
    snapshots: int
    events: LoadEvents
    ack: Any = None
    """SGLang's events of the load's begin and end on the device; None until it is launched."""

    @property
    def has_begun(self) -> bool:
        """A load waits for the steps before it, which is no fault of the load."""
        return self.ack is None or self.ack.start_event.query()

    @property
    def has_ended(self) -> bool:
        return self.ack is not None and self.ack.finish_event.query()


class LoadWatch:
    """The loads under way, and the thread that bounds them.

    A step waits for its loads on the device, where the host cannot end the wait: the stream of steps stands still, and
    the scheduler with it as soon as it needs a result. On a CPU the scheduler itself copies. So a thread must notice
    (SGLang's own watchdog), and nothing can go on: the server ends, as after other failures of a device.
    """

    def __init__(self) -> None:
        self._loads: deque[Load] = deque()
        self._requests: list[Req] = []
        self._count = 0

    def expect(self, req: Req) -> None:
        """The next load is for this request, too."""
        self._requests.append(req)

    def begin(self, operations: Iterable[Any], events: LoadEvents) -> Load:
        """Note a load of these operations of SGLang's controller, before its launch."""
        while self._loads and self._loads[0].has_ended:
            self._loads.popleft()
        operations, requests = list(operations), self._requests
        blocks = sum(len(operation.host_indices) for operation in operations) // BLOCK
        snapshots = sum(len(rows.host_indices) for operation in operations for rows in operation.pool_transfers or ())
        self._count, self._requests = self._count + 1, []
        events.launched = 0
        self._loads.append(load := Load(self._count, requests, blocks, snapshots, events))
        return load

    def oldest(self) -> Load | None:
        """The first load that has begun and not ended. Called by the thread, so nothing changes here."""
        return next((load for load in tuple(self._loads) if not load.has_ended and load.has_begun), None)

    def start(self, scheduler: Any, seconds: float) -> None:
        """From now on, end the server when a load takes longer than `seconds`, or half as long again: the thread looks
        twice in that time."""
        WatchdogRaw(
            debug_name="dsv4_sglang host cache",
            get_counter=lambda: load.number if (load := self.oldest()) else 0,
            is_active=lambda: self.oldest() is not None,
            watchdog_timeout=seconds,
            dump_info=partial(self.fail, scheduler, seconds),
        )

    def fail(self, scheduler: Any, seconds: float) -> str:
        """Answer the requests of the oldest load with an error; return its message, which SGLang's watchdog logs before
        it ends the server."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        if (load := self.oldest()) is None:
            return ""
        rids, layer = ", ".join(req.rid for req in load.requests), load.events.missing()
        message = (
            f"a load from host memory has not ended in {seconds:g} s: {load.blocks} blocks and {load.snapshots} "
            f"snapshots for the requests {rids}; layer {layer} has not arrived. Steps wait for it, so the server "
            "ends. If its copies are only slow, raise the option host_load_timeout_seconds"
        )
        reason = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError").to_json()
        for req in load.requests:
            answer = AbortReq(rid=req.rid, finished_reason=reason, http_worker_ipc=req.http_worker_ipc)
            scheduler.ipc_channels.send_to_tokenizer.send_output(answer, req)
        return message
