"""Prefill and decode on servers of their own: what SGLang's transfers have to know of this cache.

What travels, and from where, is said by the pools (`srt/memory/pools.py`). Functions here are hooks of the table in
`hooks`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from threading import Thread
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
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool, StateSlotPool

log = logging.getLogger(__name__)

TOLD_FIRST, TOLD_EVERY = (0, 0.5, 2, 8), 30
"""Seconds before each of the first times that a prefill server is told of requests that failed, and of the later ones.
"""
_rejected: dict[str, str] = {}
"""Why, by address, of prefill servers that this process has rejected."""


class DecodeStateReqToTokenPool(HybridMambaDecodeReqToTokenPool):
    """The request pool of a decode server: token tables and state slots of the requests that run, and of those that
    are on their way from a prefill server.
    """

    mamba_pool_cls = StateSlotPool


def cache_name(layout: CacheLayout, model: DSV4Config, attention_ranks: int) -> str:
    """What two servers must have in common to exchange blocks and slots; `attention_ranks` are the processes that
    share the heads of attention. Of model and bytes a digest: of the fields of its config, and of the parts of a block
    and of a slot, block padding included.
    """
    first = layout.schemas[0]
    parts = [*layout.block_parts(1), *layout.state_parts(1)]
    keys = {schema.key_format.value for schema in layout.schemas}
    digest = hashlib.sha256(repr((model, parts)).encode()).hexdigest()[:12]
    return (
        f"dsv4_sglang {__version__}: {layout.ring_format.value} rows, {'/'.join(sorted(keys))} keys, "
        f"{first.hca_state.value} HCA state, {first.draft_tokens} draft tokens, attention TP {attention_ranks}, "
        f"model and bytes {digest}"
    )


def is_mla(original: Callable[..., bool], target_kv_pool: Any) -> bool:
    """AROUND `disaggregation.utils.is_mla_backend`: one vector is key and value, so a layer's buffers are no pairs."""
    return isinstance(target_kv_pool, (CacheKVPool, CompressedKVPool)) or original(target_kv_pool)


def reject_other_caches(original: Callable[..., bool], manager: Any, bootstrap_addr: str) -> bool:
    """AROUND `CommonKVManager.try_ensure_parallel_info`, by which a decode server meets a prefill server: requests of
    one whose cache is another fail, with what differs. SGLang would end the decode server.
    """
    try:
        met = original(manager, bootstrap_addr)
        _rejected.pop(bootstrap_addr, None)
        return met
    except RuntimeError as error:
        reason = (
            f"the prefill server at {bootstrap_addr} has another cache than this decode server, and nothing was "
            f"transferred; what stands in brackets must be equal, too: {error}"
        )
    log.error("dsv4_sglang: %s", reason)
    _rejected[bootstrap_addr] = reason
    rooms = manager.addr_to_rooms_tracker.pop(bootstrap_addr, set())
    for room in rooms:
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)
    if rooms:
        Thread(target=_end_at_prefill_server, args=(manager, bootstrap_addr, rooms), daemon=True).start()
    return False


def say_why(
    original: Callable[..., None], receiver: Any, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None
) -> None:
    """AROUND `CommonKVReceiver.__init__`, of a request's end on a decode server: for a prefill server that was rejected
    the reason is known before it fails. SGLang tries again once a second, by each process's clock, and the process that
    answers the client may not be the one that finds out.
    """
    original(receiver, mgr, bootstrap_addr, bootstrap_room)
    if bootstrap_room is not None and bootstrap_addr in _rejected:
        mgr.record_failure(bootstrap_room, _rejected[bootstrap_addr])


def _end_at_prefill_server(manager: Any, bootstrap_addr: str, rooms: set[int]) -> None:
    """Tell the prefill server that requests are over, as SGLang does of aborted ones: otherwise each waits there for
    SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, and a router with it.

    A request that has not arrived there yet is not known, and the message is lost. So the message is repeated for as
    long as a request may wait there, and also if the server could not be reached.
    """
    rounds = -(-envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get() // TOLD_EVERY)
    for pause in (*TOLD_FIRST, *[TOLD_EVERY] * rounds):
        time.sleep(pause)
        try:
            _tell_prefill_server(manager, bootstrap_addr, rooms)
        except (requests.RequestException, zmq.ZMQError) as error:
            log.warning(
                "dsv4_sglang: the prefill server at %s was not told that requests failed: %s", bootstrap_addr, error
            )


def _tell_prefill_server(manager: Any, bootstrap_addr: str, rooms: set[int]) -> None:
    """Send the message once, to one of the server's processes: they agree on what failed."""
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


def take_pageable_indices(original: Callable[..., None], sender: Any, *arguments: Any, **named: Any) -> None:
    """AROUND `compat.KV_SENDER`: the sender of a request takes the numbers of its blocks as they are."""
    original(sender, *arguments, **named)
    sender.supports_host_tensor_indices = False


def settle_before_retraction(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND `Scheduler.update_running_batch`, which retracts requests when blocks run out: a decode server copies
    their state to the host, and with overlap scheduling the device is one step ahead of what the scheduler knows. The
    online HCA state cannot go back a token, so the step's result comes first.
    """
    decodes = scheduler.disaggregation_mode is DisaggregationMode.DECODE
    if decodes and scheduler.enable_overlap and scheduler.last_batch and scheduler.result_queue:
        running = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        if running and not batch.check_decode_mem(running):
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
            scheduler.last_batch = None
    return original(scheduler, batch)
