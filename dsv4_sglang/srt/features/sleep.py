"""Sleep and wake, and new weights: what becomes of the cache. Functions here are hooks of the table in `hooks`.

SGLang gives memory back by tag (`/release_memory_occupation`) and has it again at the same addresses with anything in
it (`/resume_memory_occupation`); docs/guides/sleep.md.
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

from dsv4_sglang.srt.integration import compat
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache

log = logging.getLogger(__name__)

PAUSED = "dsv4_paused"
"""Attribute of a scheduler that sleeps: whether it is paused when it wakes."""
UPDATES = {
    io_struct.UpdateWeightFromDiskReqInput: io_struct.UpdateWeightFromDiskReqOutput,
    io_struct.UpdateWeightsFromDistributedReqInput: io_struct.UpdateWeightsFromDistributedReqOutput,
    io_struct.UpdateWeightsFromTensorReqInput: io_struct.UpdateWeightsFromTensorReqOutput,
    io_struct.UpdateWeightsFromIPCReqInput: io_struct.UpdateWeightsFromIPCReqOutput,
}
"""What SGLang answers to each way to bring new weights."""


def fall_asleep(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.release_memory_occupation`, which ends a server that is not idle, and one
    that is asked for the same twice.

    Requests go back to the queue, as in a pause that retracts, and wait until all is there again.
    """
    asked = recv_req.tags or GPU_MEMORY_ALL_TYPES
    tags = [tag for tag in asked if tag in GPU_MEMORY_ALL_TYPES and tag not in updater.offload_tags]
    if len(tags) < len(asked):
        log.warning(
            "dsv4_sglang: of the memory %s, %s is given back: the rest is away already, or none of %s",
            *(asked, tags, GPU_MEMORY_ALL_TYPES),
        )
    if not tags:
        return io_struct.ReleaseMemoryOccupationReqOutput()
    recv_req.tags, scheduler = tags, updater.scheduler
    if not updater.offload_tags:
        setattr(scheduler, PAUSED, _retract(scheduler))
        compat.set_paused(scheduler, True)
    _settle(scheduler)
    keeping: AbstractContextManager[None] = nullcontext()
    if GPU_MEMORY_TYPE_KV_CACHE in tags:
        for runner in _runners(updater):
            runner.attn_backend.forget_scratch()
        if isinstance(scheduler.tree_cache, PrefixCache):
            keeping = scheduler.tree_cache.leaving_device()
    with keeping, _nobody_waiting(scheduler):
        return original(updater, recv_req)


def wake(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.resume_memory_occupation`: the cache is as it was when it was made."""
    asked = recv_req.tags or GPU_MEMORY_ALL_TYPES
    tags = [tag for tag in asked if tag in updater.offload_tags]
    if recv_req.tags and len(tags) < len(asked):
        log.warning("dsv4_sglang: of the memory %s, %s comes back: the rest was not given back", asked, tags)
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
        compat.set_paused(scheduler, vars(scheduler).pop(PAUSED))
    return output


def stay_asleep(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """AROUND `Scheduler.continue_generation`: nothing can run while memory is away."""
    original(scheduler, recv_req)
    if scheduler.weight_updater.offload_tags:
        setattr(scheduler, PAUSED, False)
        compat.set_paused(scheduler, True)


def update_weights(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND the four `SchedulerWeightUpdaterManager.update_weights_from_*`: nothing that other weights have computed
    is served any more, from the device, the host or a storage, whether the update succeeds or stops half-way.

    Also with `flush_cache` false, which is for one update of several: a flush takes a millisecond here. And what a
    paused request has computed is computed again; SGLang ends a server that it asks to flush beside such a request.
    """
    if GPU_MEMORY_TYPE_WEIGHTS in updater.offload_tags:
        reason = "the memory of the weights is given back: call /resume_memory_occupation with the tag weights first"
        return UPDATES[type(recv_req)](success=False, message=reason)
    recv_req.flush_cache = False
    with _forgetting(updater, recv_req.torch_empty_cache):
        return original(updater, recv_req)


def end_update(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """AROUND `compat.END_WEIGHT_UPDATE`: the same, whether there was an update before it or not."""
    with _forgetting(updater, empty_cache=False):
        return original(updater, recv_req)


@contextmanager
def _forgetting(updater: Any, empty_cache: bool) -> Iterator[None]:
    """Weights change in between: what was computed before is forgotten, however that ends."""
    scheduler = updater.scheduler
    compat.set_paused(scheduler, _retract(scheduler))
    _settle(scheduler)
    try:
        yield
    finally:
        with _nobody_waiting(scheduler):
            flushed = updater.flush_cache(empty_cache=empty_cache)
        if not flushed:
            raise RuntimeError("dsv4_sglang: there are new weights, and the cache of the old ones cannot be flushed")
        if isinstance(scheduler.tree_cache, PrefixCache):
            # Nothing says which weights these are.
            name = [uuid.uuid4().hex[:16]]
            torch.distributed.broadcast_object_list(name, group=updater.tp_cpu_group, group_src=0)
            scheduler.tree_cache.forget_stored(name[0])


def _retract(scheduler: Any) -> bool:
    """Send what runs back to the queue, the step under way included; whether the scheduler was paused before."""
    paused = compat.is_paused(scheduler)
    if scheduler.disaggregation_mode is DisaggregationMode.NULL:
        scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
    return paused


def _settle(scheduler: Any) -> None:
    """Wait for what the host cache copies."""
    if isinstance(scheduler.tree_cache, PrefixCache):
        scheduler.tree_cache.settle(scheduler.waiting_queue)


@contextmanager
def _nobody_waiting(scheduler: Any) -> Iterator[None]:
    """Requests that wait hold nothing of the cache, but SGLang 0.5.17 flushes nothing beside them."""
    grammars = scheduler.grammar_manager
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    compiling, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue, grammars.grammar_queue = waiting, compiling


def _runners(updater: Any) -> Iterator[Any]:
    """Of the model, and of the draft model if there is one."""
    yield updater.tp_worker.model_runner
    if updater.draft_worker is not None:
        yield updater.draft_worker.draft_worker.draft_runner
