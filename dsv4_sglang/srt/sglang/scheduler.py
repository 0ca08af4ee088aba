"""SGLang's scheduler and tokenizer manager: their requests, messages and checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dsv4_sglang.srt.sglang.models import replaced


def is_paused(scheduler: Any) -> bool:
    """Return True if the scheduler processes control requests only."""
    return bool(scheduler._engine_paused)


def set_paused(scheduler: Any, paused: bool) -> None:
    """Pause or continue the scheduler."""
    scheduler._engine_paused = paused


def wrap_dispatcher(scheduler: Any, wrapper: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Call `wrapper(dispatch, request)` for each request that a scheduler receives. `dispatch(request)` is SGLang's."""
    dispatch = scheduler._request_dispatcher
    scheduler._request_dispatcher = lambda request: wrapper(dispatch, request)


def add_result_handler(manager: Any, kind: type, handler: Callable[[Any], None]) -> None:
    """Call `handler` for each message of the class `kind` that a tokenizer manager receives from a scheduler."""
    from sglang.utils import TypeBasedDispatcher

    manager._result_dispatcher += TypeBasedDispatcher([(kind, handler)])


async def tokenize(manager: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, as a tokenizer manager computes them for a request.

    Raises:
        ValueError: the server runs with --skip-tokenizer-init.
    """
    ids, _ = await manager._tokenize_texts(text)
    return list(ids)


def send_to_schedulers(manager: Any, message: Any) -> None:
    """Send a message from a tokenizer manager to all schedulers."""
    manager._dispatch_to_scheduler(message)


def track_entry(taken: bool) -> Any:
    """Return the result of `TRACK_REQUEST` for a request. Its slot and length are not used."""
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    return _MambaRadixCacheV2TrackEntry(taken, 0, 0)


def note_track_positions(batch: Any) -> None:
    """Set the snapshot position of each request, which the processing of a decode step reads. There is one here."""
    batch.mamba_track_buffer_indices = [0] * len(batch.reqs)


@contextmanager
def deferred_caching() -> Iterator[list[Callable[[], None]]]:
    """Context manager: the result of a step does not insert its requests into the prefix tree, and frees nothing of
    finished ones. Yield the list of these calls, in order, for the caller to make."""
    from sglang.srt.managers.scheduler_components import batch_result_processor as results

    calls: list[Callable[[], None]] = []

    def defer(function: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **named: calls.append(partial(function, *arguments, **named))

    deferred = {name: defer(getattr(results, name)) for name in ("checkpoint_kv_cache", "release_kv_cache")}
    with replaced(results, **deferred):
        yield calls


@contextmanager
def without_recurrent_state() -> Iterator[None]:
    """Context manager: the exchange of steps between ranks of DP attention sees a model without recurrent state."""
    from sglang.srt.managers.scheduler_components import dp_attn

    with replaced(dp_attn, uses_ssm_state=lambda model_config: False):
        yield


def seconds_since_created(req: Any) -> float:
    """Return the seconds since the HTTP server received a request, or since the scheduler did if that is unknown."""
    times = req.time_stats
    return time.perf_counter() - (times.created_time or times.scheduler_recv_time)


def disaggregated_requests(scheduler: Any) -> list[Any]:
    """Return requests that are in no batch and no queue: those to be aborted, and those between two servers."""
    found = [] if scheduler._pending_chunked_abort_req is None else [scheduler._pending_chunked_abort_req]
    mode = scheduler.disaggregation_mode.value
    if mode == "prefill":
        found += [*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.disagg_prefill_inflight_queue]
    if mode == "decode":
        arriving = [*scheduler.disagg_decode_prealloc_queue.queue, *scheduler.disagg_decode_transfer_queue.queue]
        found += [entry.req for entry in arriving] + scheduler.disagg_decode_prealloc_queue.retracted_queue
    return found


def idle_differences(scheduler: Any) -> list[str]:
    """Return the findings of SGLang's check of an idle server: pools whose parts do not add up to their size."""
    leaks, lines = scheduler.invariant_checker._check_all_pools(scheduler.pool_stats_observer.get_pool_stats())
    return lines if leaks else []
