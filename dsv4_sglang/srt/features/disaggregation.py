"""Disaggregated prefill and decode servers: hooks that adapt SGLang's transfers to this cache.

The pools describe the buffers to transfer (`srt/memory/pools.py`). The functions here are hooks of the table in
`hooks`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from threading import Condition, Thread
from typing import Any

import requests
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

from dsv4_sglang import __version__
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.config import ModelConfig
from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool, StateSlotPool

log = logging.getLogger(__name__)

# Delays in seconds before the first notifications of a prefill server about failed requests, and between later ones.
FIRST_NOTIFICATIONS, NOTIFICATION_INTERVAL = (0, 0.5, 2, 8), 30
# An address comes from a request, so a client may name many. Limits of the addresses that this process remembers, of
# the requests that one of them is notified of, and of the threads that notify them.
MAX_ADDRESSES, MAX_ROOMS, MAX_THREADS = 64, 4096, 4
# Prefill servers that this process has rejected: address -> reason and time. The oldest one is first.
_rejected: dict[str, tuple[str, float]] = {}


class DecodeStateReqToTokenPool(HybridMambaDecodeReqToTokenPool):
    """Request pool of a decode server: token tables and state slots of running requests, and of requests that a prefill
    server is sending."""

    mamba_pool_cls = StateSlotPool


def cache_name(layout: CacheLayout, model: ModelConfig) -> str:
    """Return the name of a cache layout. Two servers can exchange blocks and slots only if their names are equal.

    The name contains a digest of the fields of the model's config and of the parts of a block and a slot, with the
    padding of blocks. It does not contain the TP size: every process has all of each entry.
    """
    first = layout.schemas[0]
    parts = [*layout.block_parts(1), *layout.state_parts(1)]
    keys = {schema.key_format.value for schema in layout.schemas}
    digest = hashlib.sha256(repr((model, parts)).encode()).hexdigest()[:12]
    return (
        f"dsv4_sglang {__version__}: {layout.ring_format.value} entries, {'/'.join(sorted(keys))} keys, "
        f"{first.draft_tokens} draft tokens, model and bytes {digest}"
    )


def is_mla(original: Callable[..., bool], target_kv_pool: Any) -> bool:
    """AROUND `disaggregation.utils.is_mla_backend`: return True for this package's pools. An entry is key and value at
    once, so the buffers of a layer are not key/value pairs."""
    return isinstance(target_kv_pool, (CacheKVPool, CompressedKVPool)) or original(target_kv_pool)


def without_draft_pool(original: Callable[[Any], Any], queue: Any) -> Any:
    """AROUND `_init_kv_manager` of SGLang's queues on both servers, which collects the buffers to transfer: leave out
    those of the draft model. It shares the pool of the model, and its window rings are part of a slot."""
    queue.draft_token_to_kv_pool = None
    return original(queue)


def require_distinct_buffers(args: Any) -> None:
    """Raise RuntimeError if a buffer occurs more than once among those that a server transfers, in its KVArgs."""
    buffers = [*args.kv_data_ptrs, *chain.from_iterable(args.state_data_ptrs)]
    if len(set(buffers)) < len(buffers):
        raise RuntimeError(
            f"dsv4_sglang cannot serve: only {len(set(buffers))} of {len(buffers)} buffers to transfer are distinct"
        )


def reject_other_caches(original: Callable[..., bool], manager: Any, bootstrap_addr: str) -> bool:
    """AROUND `CommonKVManager.try_ensure_parallel_info`, the first contact of a decode server with a prefill server.

    If the caches differ, the requests for that prefill server fail with the difference as the reason. SGLang would end
    the decode server.
    """
    try:
        met = original(manager, bootstrap_addr)
        _rejected.pop(bootstrap_addr, None)
        return met
    except RuntimeError as error:
        reason = (
            f"the prefill server at {bootstrap_addr} has another cache layout than this decode server, so nothing was "
            f"transferred; the text in parentheses must be equal too: {error}"
        )
    log.error("dsv4_sglang: %s", reason)
    _remember(bootstrap_addr, reason)
    rooms = manager.addr_to_rooms_tracker.pop(bootstrap_addr, set())
    for room in rooms:
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)
    if rooms:
        _notifier.add(manager, bootstrap_addr, rooms)
    return False


def _seconds_to_remember() -> float:
    """Return the seconds after which no request waits on a prefill server for what has failed here."""
    return envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get() + NOTIFICATION_INTERVAL


def _remember(bootstrap_addr: str, reason: str) -> None:
    """Remember the reason of a rejection for as long as a request may wait. The oldest of too many is forgotten."""
    _rejected.pop(bootstrap_addr, None)
    if len(_rejected) == MAX_ADDRESSES:
        del _rejected[next(iter(_rejected))]
    _rejected[bootstrap_addr] = reason, time.monotonic()


def record_failure_reason(
    original: Callable[..., None], receiver: Any, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None
) -> None:
    """AROUND `CommonKVReceiver.__init__`, a request's receiver on a decode server: if its prefill server was rejected,
    record the reason at once.

    SGLang retries once a second by the clock of each process, so the process that answers the client may not be the one
    that detects the failure.
    """
    original(receiver, mgr, bootstrap_addr, bootstrap_room)
    reason, rejected = _rejected.get(bootstrap_addr, ("", 0.0))
    if bootstrap_room is not None and reason:
        if time.monotonic() - rejected > _seconds_to_remember():
            del _rejected[bootstrap_addr]
        else:
            mgr.record_failure(bootstrap_room, reason)


@dataclass
class _Notice:
    """Failed requests of a prefill server: when it is notified next, and until when, by room."""

    manager: Any
    rooms: dict[int, float]
    due: float
    pauses: Iterator[float]

    @classmethod
    def of(cls, manager: Any, rooms: Iterable[int]) -> _Notice:
        now = time.monotonic()
        until = now + _seconds_to_remember()
        first, *others = FIRST_NOTIFICATIONS
        return cls(manager, dict.fromkeys(rooms, until), now + first, chain(others, repeat(NOTIFICATION_INTERVAL)))

    def wait_again(self) -> None:
        """Choose the time of the next notification, and forget requests that do not wait any more."""
        self.due = time.monotonic() + next(self.pauses)
        self.rooms = {room: until for room, until in self.rooms.items() if until >= self.due}


class FailureNotifier:
    """Notifies prefill servers that requests have failed, as SGLang does for aborted ones. Otherwise each waits there
    for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, and a router waits with it.

    A message is lost if a request has not arrived there yet or the server cannot be reached. It is therefore repeated
    for as long as a request may wait.
    """

    def __init__(self) -> None:
        self._notices: dict[str, _Notice] = {}  # by address; without those that a thread works on
        self._changed = Condition()
        self._threads = 0

    def add(self, manager: Any, bootstrap_addr: str, rooms: Iterable[int]) -> None:
        """Notify a prefill server of failed requests, now and repeatedly."""
        with self._changed:
            self._put(bootstrap_addr, _Notice.of(manager, rooms))
            if self._threads < MAX_THREADS:
                self._threads += 1
                Thread(target=self._run, daemon=True).start()
            self._changed.notify()

    def _put(self, bootstrap_addr: str, notice: _Notice) -> None:
        """Add a notice. The newer one of an address determines when it is notified."""
        if (other := self._notices.pop(bootstrap_addr, None)) is not None:
            notice.rooms |= other.rooms
            if other.due < notice.due:
                notice.due, notice.pauses = other.due, other.pauses
        for room in sorted(notice.rooms, key=notice.rooms.__getitem__)[:-MAX_ROOMS]:  # the oldest ones
            del notice.rooms[room]
        if len(self._notices) == MAX_ADDRESSES:
            forgotten = next(iter(self._notices))
            del self._notices[forgotten]
            log.warning("dsv4_sglang: the prefill server at %s is no longer notified of failed requests", forgotten)
        self._notices[bootstrap_addr] = notice

    def _run(self) -> None:
        """Send notices that are due, until none is left."""
        while (taken := self._take()) is not None:
            bootstrap_addr, notice = taken
            try:
                _notify_prefill_server(notice.manager, bootstrap_addr, set(notice.rooms))
            except Exception as error:  # the address and what answers there come from a client
                log.warning(
                    "dsv4_sglang: the prefill server at %s was not notified of failed requests: %s",
                    *(bootstrap_addr, error),
                )
            notice.wait_again()
            if notice.rooms:
                with self._changed:
                    self._put(bootstrap_addr, notice)
                    self._changed.notify()

    def _take(self) -> tuple[str, _Notice] | None:
        """Wait for a notice that is due, and take it. Return None, which ends the thread, if there is no notice."""
        with self._changed:
            while self._notices:
                bootstrap_addr, notice = min(self._notices.items(), key=lambda item: item[1].due)
                if (pause := notice.due - time.monotonic()) <= 0:
                    return bootstrap_addr, self._notices.pop(bootstrap_addr)
                self._changed.wait(pause)
            self._threads -= 1
            return None


_notifier = FailureNotifier()


def _notify_prefill_server(manager: Any, bootstrap_addr: str, rooms: set[int]) -> None:
    """Send the notification once, to one of the server's processes. They agree on failed requests."""
    rank = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    own = manager.local_ip.encode(), str(manager.rank_port).encode()
    found = requests.get(f"http://{bootstrap_addr}/route?{rank}", timeout=5).json()
    address = NetworkAddress(found["rank_ip"], found["rank_port"])
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.IPV6, address.is_ipv6)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address.to_tcp())
        for room in rooms:
            socket.send_multipart([b"ABORT", str(room).encode(), *own])


def allow_pageable_indices(original: Callable[..., None], sender: Any, *arguments: Any, **named: Any) -> None:
    """AROUND `CommonKVSender.__init__`: let the sender of a request use block indices in pageable memory."""
    original(sender, *arguments, **named)
    sender.supports_host_tensor_indices = False


def finish_step_before_retraction(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND `Scheduler.update_running_batch`, which retracts requests when blocks run out.

    A decode server copies the state of retracted requests to the host. With overlap scheduling the device is one step
    ahead of the scheduler, and the online HCA state cannot be rolled back by a token. So process the result of that
    step first.
    """
    decodes = scheduler.disaggregation_mode is DisaggregationMode.DECODE
    if decodes and scheduler.enable_overlap and scheduler.last_batch and scheduler.result_queue:
        running = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        if running and not batch.check_decode_mem(running):
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
            scheduler.last_batch = None
    return original(scheduler, batch)
