"""Prefill and decode on servers of their own: what SGLang's transfers have to know of this cache.

What travels, and from where, is said by the pools (`srt/pools.py`). Functions here are hooks of the table in `hooks`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode

from dsv4_sglang import __version__
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt.pools import CacheKVPool, CompressedKVPool, StateSlotPool

log = logging.getLogger(__name__)


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
        f"dsv4_sglang {__version__}: {layout.row_format.value} rows, {'/'.join(sorted(keys))} keys, "
        f"{first.hca_state.value} HCA state, {first.draft_tokens} draft tokens, attention TP {attention_ranks}, "
        f"model and bytes {digest}"
    )


def is_mla(original: Callable[..., bool], target_kv_pool: Any) -> bool:
    """AROUND `disaggregation.utils.is_mla_backend`: one vector is key and value, so a layer's buffers are no pairs."""
    return isinstance(target_kv_pool, (CacheKVPool, CompressedKVPool)) or original(target_kv_pool)


def refuse_other_caches(original: Callable[..., bool], manager: Any, bootstrap_addr: str) -> bool:
    """AROUND `CommonKVManager.try_ensure_parallel_info`, by which a decode server meets a prefill server: requests of
    one whose cache is another fail, with what differs. SGLang would end the decode server.
    """
    try:
        return original(manager, bootstrap_addr)
    except RuntimeError as error:
        reason = (
            f"the prefill server at {bootstrap_addr} has another cache than this decode server, and nothing was "
            f"transferred; what stands in brackets must be equal, too: {error}"
        )
    log.error("dsv4_sglang: %s", reason)
    for room in manager.addr_to_rooms_tracker.pop(bootstrap_addr, ()):
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)
    return False


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
