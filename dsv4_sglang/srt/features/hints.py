"""Hints of requests (`kv_hints`) on their way to the prefix cache: validation, the time, and the limit of pins.

Hints end at a time. The processes of a rank must agree on it, so none of them reads its own clock: once a request has
had hints, its HTTP process sends the time to all ranks, every second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, RpcReqInput

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.features.integrity.report import requests_of
from dsv4_sglang.srt.memory.sizing import tokens_of_context
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.hints import NONE, hints_of
from dsv4_sglang.srt.prefix_cache.pins import PinKey
from dsv4_sglang.srt.sglang.scheduler import send_to_schedulers, wrap_dispatcher

# `RpcReqInput.method` of a message with the time.
METHOD = "dsv4_time"
SECONDS_BETWEEN = 1.0
# Attribute of a tokenizer manager: the task that sends the time.
CLOCK = "dsv4_clock"


# In an HTTP process


def take_from_custom_params(request: Any) -> None:
    """Move hints from `sampling_params.custom_params.kv_hints` to `kv_hints`.

    The bodies of SGLang's OpenAI routes have `custom_params`, but not `kv_hints`.

    Raises:
        ValueError: there are hints in both places.
    """
    params = request.sampling_params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    if not isinstance(custom, dict) or "kv_hints" not in custom:
        return
    if request.kv_hints is not None:
        raise ValueError("kv_hints is given, and again in custom_params; expected one of them")
    request.kv_hints = custom["kv_hints"] or None
    request.sampling_params = {**params, "custom_params": {k: v for k, v in custom.items() if k != "kv_hints"} or None}


def check_hints(manager: Any, envelope: Any) -> None:
    """Check the hints of a request, and start the clock of this process if it does not run.

    Raises:
        ValueError: a hint is invalid.
    """
    clock = getattr(manager, CLOCK, None)
    if hints_of(envelope) != NONE and (clock is None or clock.done()):
        send_time(manager)
        setattr(manager, CLOCK, asyncio.get_running_loop().create_task(_send_times(manager)))


async def _send_times(manager: Any) -> None:
    while True:
        await asyncio.sleep(SECONDS_BETWEEN)
        send_time(manager)


def send_time(manager: Any) -> None:
    send_to_schedulers(manager, RpcReqInput(method=METHOD, parameters={"now": time.monotonic()}))


# In a scheduler


def receive_times(scheduler: Any) -> None:
    """Let a scheduler pass the time to its prefix cache."""

    def dispatch_or_take(dispatch: Callable[[Any], Any], request: Any) -> Any:
        if not (isinstance(request, RpcReqInput) and request.method == METHOD):
            return dispatch(request)
        if isinstance(scheduler.tree_cache, PrefixCache):
            scheduler.tree_cache.at_time(float((request.parameters or {})["now"]))
        return None

    wrap_dispatcher(scheduler, dispatch_or_take)


def limit_pins(scheduler: Any, percent: int, tenant_percent: int) -> None:
    """Set the limits of pins: `percent` of the device's tokens and snapshot slots, and never so much that a request of
    the context length would not fit beside the pins. One tenant may use `tenant_percent` of that."""
    cache = scheduler.tree_cache
    if isinstance(cache, PrefixCache):
        size = cache.token_to_kv_pool_allocator.size
        longest = tokens_of_context(scheduler.model_config.context_len)
        cache.pins.most_tokens = max(0, min(size * percent // 100, size - longest))
        cache.pins.tenant_percent = tenant_percent
        cache.pins.most_pins = cache.req_to_token_pool.mamba_ckpt_pool.num_slots * percent // 100


def reject_pin(original: Callable[..., None], scheduler: Any, recv_req: Any, **named: Any) -> None:
    """AROUND `Scheduler.handle_generate_request`: reject a request whose pin does not fit into the limit."""
    cache, hints = scheduler.tree_cache, hints_of(recv_req.kv_hints)
    if hints.pin is not None and hints.pin.seconds and isinstance(cache, PrefixCache):
        key = recv_req.cache_salt or "", hints.pin.name
        longest = recv_req.sampling_params.max_new_tokens
        try:
            cache.pins.check(key, _tokens(scheduler, len(recv_req.input_ids), longest), _unfinished(scheduler))
        except ValueError as error:
            reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": str(error)}
            scheduler.send_abort_output(AbortReq(rid=recv_req.rid, finished_reason=reason), recv_req)
            return
    original(scheduler, recv_req, **named)


def _unfinished(scheduler: Any) -> Iterator[tuple[PinKey, int]]:
    """Yield the key and the tokens of each request that will pin its conversation."""
    for req in requests_of(scheduler):
        if req.kv_hints is not None and not req.finished() and (pin := hints_of(req.kv_hints).pin) and pin.seconds:
            tokens = _tokens(scheduler, len(req.origin_input_ids), req.sampling_params.max_new_tokens)
            yield (req.cache_salt or "", pin.name), tokens


def _tokens(scheduler: Any, prompt: int, longest: int | None) -> int:
    """Return the tokens of the blocks of a prompt and its longest answer."""
    total = scheduler.max_req_len if longest is None else min(prompt + longest, scheduler.max_req_len)
    return -(-max(prompt, total) // BLOCK) * BLOCK
