"""`/flush_cache` on a server without running requests: it waits for copies and for the end of the last step.

SGLang rejects a flush while an answered request is still retired, or its cache is copied to the host or a storage. A
client sees an idle server by then. A flush while requests run, or wait on a server that is not paused, stays rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
)

from dsv4_sglang.srt.features.integrity.report import requests_of
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.sglang.scheduler import is_paused, wrap_dispatcher

# Checks for which a flush waits for copies, a millisecond or more apart. A storage that hangs must not stop the server.
MOST_CHECKS = 5_000


# In a scheduler


def settle_before_flushes(scheduler: Any) -> None:
    """Let a scheduler settle before a flush."""

    def settle_and_dispatch(dispatch: Callable[[Any], Any], request: Any) -> Any:
        if isinstance(request, FlushCacheReqInput):
            _settle(scheduler)
        return dispatch(request)

    wrap_dispatcher(scheduler, settle_and_dispatch)


def _settle(scheduler: Any) -> None:
    """Retire the last step and wait for copies, unless requests run or wait. On a paused scheduler requests may wait,
    since they hold nothing of the cache."""
    paused = is_paused(scheduler)
    unfinished = [req for req in requests_of(scheduler) if not req.finished()]
    if any(not paused or req.kv.holds_kv for req in unfinished):
        return
    if not paused and scheduler.disaggregation_mode is DisaggregationMode.NULL:
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    wait_for_copies(scheduler, MOST_CHECKS)


def wait_for_copies(scheduler: Any, most_checks: int | None = None) -> None:
    """Wait for running copies of the host cache, as `PrefixCache.wait_for_copies`."""
    if isinstance(scheduler.tree_cache, PrefixCache):
        scheduler.tree_cache.wait_for_copies(scheduler.waiting_queue, most_checks)


# In an HTTP process


def failures_first(answers: Sequence[Any]) -> list[Any]:
    """Return the answers of all ranks to a control request. If one could not flush, its answer is the first, which is
    the only one that SGLang reads."""
    return sorted(answers, key=lambda answer: not isinstance(answer, FlushCacheReqOutput) or answer.success)
