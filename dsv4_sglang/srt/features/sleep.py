"""Sleep, wake-up and weight updates. The functions here are hooks of the table in `hooks`.

SGLang releases memory by tag (`/release_memory_occupation`) and maps it again at the same addresses with undefined
contents (`/resume_memory_occupation`). See docs/guides/sleep.md.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import io_struct
from sglang.srt.platforms import current_platform

from dsv4_sglang.srt.features.control_requests import FatalError
from dsv4_sglang.srt.features.flush import wait_for_copies
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.sglang.scheduler import is_paused, set_paused

log = logging.getLogger(__name__)

# Attribute of a sleeping scheduler: True if it must be paused after wake-up.
PAUSED = "dsv4_paused"
# SGLang's output class for each kind of weight update.
UPDATES = {
    io_struct.UpdateWeightFromDiskReqInput: io_struct.UpdateWeightFromDiskReqOutput,
    io_struct.UpdateWeightsFromDistributedReqInput: io_struct.UpdateWeightsFromDistributedReqOutput,
    io_struct.UpdateWeightsFromTensorReqInput: io_struct.UpdateWeightsFromTensorReqOutput,
    io_struct.UpdateWeightsFromIPCReqInput: io_struct.UpdateWeightsFromIPCReqOutput,
}


def release_memory(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.release_memory_occupation`: release memory on a busy server too.

    SGLang's function ends a server that is not idle, and a server that gets the same tag twice. Here running requests
    are retracted to the queue and wait until all memory is mapped again.

    Raises:
        ValueError: the server was started without --enable-memory-saver, so no memory can be released.
    """
    if not updater.memory_saver_adapter.enabled:
        raise ValueError(
            "/release_memory_occupation releases nothing, because the server was started without "
            "--enable-memory-saver; start it on a GPU with that flag"
        )
    asked = recv_req.tags or GPU_MEMORY_ALL_TYPES
    tags = [tag for tag in asked if tag in GPU_MEMORY_ALL_TYPES and tag not in updater.offload_tags]
    if len(tags) < len(asked):
        log.warning(
            "dsv4_sglang: of the memory %s, %s is released; the rest is already released, or is none of %s",
            *(asked, tags, GPU_MEMORY_ALL_TYPES),
        )
    if not tags:
        return io_struct.ReleaseMemoryOccupationReqOutput()
    recv_req.tags, scheduler = tags, updater.scheduler
    if not updater.offload_tags:
        setattr(scheduler, PAUSED, _retract(scheduler))
        set_paused(scheduler, True)
    try:
        return _release(original, updater, recv_req)
    except Exception:
        if not updater.offload_tags:
            set_paused(scheduler, vars(scheduler).pop(PAUSED))
        raise


def _release(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """Release the memory with the tags of a request. The scheduler is paused."""
    scheduler = updater.scheduler
    wait_for_copies(scheduler)
    keeping: AbstractContextManager[None] = nullcontext()
    if GPU_MEMORY_TYPE_KV_CACHE in recv_req.tags:
        for runner in _runners(updater):
            runner.attn_backend.free_scratch()
        if isinstance(scheduler.tree_cache, PrefixCache):
            keeping = scheduler.tree_cache.keep_host_cache()
    with keeping, _hidden_queue(scheduler):
        return original(updater, recv_req)


def resume_memory(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.resume_memory_occupation`: restore the initial content of the cache."""
    asked = recv_req.tags or GPU_MEMORY_ALL_TYPES
    tags = [tag for tag in asked if tag in updater.offload_tags]
    if recv_req.tags and len(tags) < len(asked):
        log.warning("dsv4_sglang: of the memory %s, %s is resumed; the rest was not released", asked, tags)
    if not tags:
        return io_struct.ResumeMemoryOccupationReqOutput()
    recv_req.tags, scheduler = tags, updater.scheduler
    output = original(updater, recv_req)
    if GPU_MEMORY_TYPE_KV_CACHE in tags:
        runner = updater.tp_worker.model_runner
        runner.req_to_token_pool.req_to_token.zero_()
        runner.req_to_token_pool.mamba_pool.reset()
        runner.token_to_kv_pool.full_kv_pool.reset()
        current_platform.synchronize()
    if not updater.offload_tags:
        set_paused(scheduler, vars(scheduler).pop(PAUSED))
    return output


def keep_paused(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """AROUND `Scheduler.continue_generation`: keep the scheduler paused, since nothing can run while memory is
    released."""
    original(scheduler, recv_req)
    if scheduler.weight_updater.offload_tags:
        setattr(scheduler, PAUSED, False)
        set_paused(scheduler, True)


def update_weights(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND the four `SchedulerWeightUpdaterManager.update_weights_from_*`: invalidate all cached results of the old
    weights, on the device, the host and a storage, whether the update succeeds or fails half-way.

    This includes updates with `flush_cache` false, which marks one of several updates: a flush takes only a
    millisecond here. Tokens of paused requests are recomputed too. SGLang ends the server if it has to flush the cache
    while a request is paused.
    """
    if GPU_MEMORY_TYPE_WEIGHTS in updater.offload_tags:
        reason = "the memory of the weights is released: call /resume_memory_occupation with the tag weights first"
        return UPDATES[type(recv_req)](success=False, message=reason)
    recv_req.flush_cache = False
    with _invalidated_cache(updater, recv_req.torch_empty_cache):
        return original(updater, recv_req)


def end_update(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.end_weight_update`: invalidate the cache, even if no update came before."""
    with _invalidated_cache(updater, empty_cache=False):
        return original(updater, recv_req)


@contextmanager
def _invalidated_cache(updater: Any, empty_cache: bool) -> Iterator[None]:
    """Context manager around a weight update: invalidate the cache, whether the update succeeds or fails.

    Raises:
        ValueError: nothing was updated, because requests run that cannot be retracted.
        FatalError: the update is done, and the cache could not be flushed.
    """
    scheduler = updater.scheduler
    set_paused(scheduler, _retract(scheduler))
    wait_for_copies(scheduler)
    with _hidden_queue(scheduler):
        if not scheduler.is_fully_idle():
            raise ValueError(
                f"weights cannot be updated while requests run on a server with --disaggregation-mode "
                f"{scheduler.disaggregation_mode.value}; wait until they have ended, and update again"
            )
    try:
        yield
    finally:
        with _hidden_queue(scheduler):
            flushed = updater.flush_cache(empty_cache=empty_cache)
        if not flushed:
            raise FatalError(
                "dsv4_sglang: the weights were updated, but the cache of the old weights could not be flushed"
            )
        if isinstance(scheduler.tree_cache, PrefixCache):
            # The request does not identify the new weights, so they get a random name.
            name = [uuid.uuid4().hex[:16]]
            torch.distributed.broadcast_object_list(name, group=updater.tp_cpu_group, group_src=0)
            scheduler.tree_cache.invalidate_storage(name[0])


def _retract(scheduler: Any) -> bool:
    """Retract running requests to the queue, including those of the running step. Return True if the scheduler was
    paused before."""
    paused = is_paused(scheduler)
    if scheduler.disaggregation_mode is DisaggregationMode.NULL:
        scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
    return paused


@contextmanager
def _hidden_queue(scheduler: Any) -> Iterator[None]:
    """Context manager that hides waiting requests. They hold nothing of the cache, but SGLang does not flush
    while there are any."""
    grammars = scheduler.grammar_manager
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    compiling, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue, grammars.grammar_queue = waiting, compiling


def _runners(updater: Any) -> Iterator[Any]:
    """Yield the model runners of the model and, if present, of the draft model."""
    yield updater.tp_worker.model_runner
    if updater.draft_worker is not None:
        yield updater.draft_worker.draft_worker.draft_runner
