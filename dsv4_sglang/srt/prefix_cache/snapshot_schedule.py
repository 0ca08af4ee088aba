"""Plan of the snapshots that each step takes. It replaces the ping-pong slots of SGLang's scheduler.

Prefill: the backend gets the lengths and snapshot slots of each request when SGLang makes the step from the batch.
SGLang's own tensors hold one snapshot per request; they stay None.

Decode: `mamba_track_indices` [requests] int64 as in SGLang, with 0 where no snapshot is due, so that CUDA graphs see
tensors of the expected form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.prefix_cache.notes import BatchNote, PrefillPlan, RequestNote
from dsv4_sglang.srt.sglang.scheduler import (
    deferred_caching,
    note_track_positions,
    track_entry,
    without_recurrent_state,
)


class PrefillPlanTaker:
    """Backend that receives the snapshots of a prefill step. None means no snapshots. `rolling_plan` has those of a
    decode step, for the case that it becomes a prefill step (`join_prefill`)."""

    prefill_plan: PrefillPlan | None = None
    rolling_plan: list[int] | None = None

    def take_prefill_plan(self) -> PrefillPlan | None:
        """Return the snapshots of the step that begins, which then belong to no other step."""
        plan, self.prefill_plan = self.prefill_plan, None
        return plan

    def take_rolling_plan(self) -> list[int] | None:
        """Return the rolling snapshots of the step that begins, which then belong to no other step."""
        plan, self.rolling_plan = self.rolling_plan, None
        return plan


def prepare_for_extend(original: Callable[..., None], batch: Any) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`, which calls `plan_request` for each request."""
    note = BatchNote.of(batch)
    note.prefill_plan, note.rolling_plan = [], []
    original(batch)
    batch.mamba_track_mask = batch.mamba_track_indices = batch.mamba_track_seqlens = None


def pass_plan_to_backend(
    original: Callable[..., Any], cls: Any, batch: Any, model_runner: Any, **arguments: Any
) -> Any:
    """AROUND `ForwardBatch.init_new`: pass the plan to the backend. This is the last call that gets the scheduler's
    batch; the step follows in the same thread."""
    if isinstance(model_runner.attn_backend, PrefillPlanTaker):
        note, backend = BatchNote.of(batch), model_runner.attn_backend
        is_prefill = batch.forward_mode.is_extend_without_speculative()
        backend.prefill_plan = note.prefill_plan if is_prefill and any(note.prefill_plan) else None
        # Beside idle ranks SGLang makes a decode step a prefill step after this.
        may_join = is_prefill or batch.forward_mode.is_decode()
        backend.rolling_plan = note.rolling_plan if may_join and any(note.rolling_plan) else None
    return original(cls, batch, model_runner, **arguments)


def plan_request(batch: Any, req: Any) -> Any:
    """REPLACE `targets.TRACK_REQUEST`: plan the snapshots of one request."""
    plan = BatchNote.of(batch).prefill_plan
    room = batch.req_to_token_pool.mamba_pool.staging - sum(map(len, plan))
    taken = component_of(batch.tree_cache).planner.plan_prefill(req, room)
    plan.append(taken)
    return track_entry(bool(taken))


def plan_decode(batch: Any, track_positions: Any = None) -> None:
    """REPLACE `schedule_batch.set_mamba_track_indices_from_reqs`: take a rolling snapshot every 128 tokens.

    SGLang's lengths include the token of this step. Two tokens after a snapshot, the step that took it has finished,
    also with overlap scheduling. So the earlier snapshot that it replaces can be freed.

    The number of accepted tokens of a verify step is known on the device only. The batch gets the slots that
    `plan_verify` planned, or None if there are none.
    """
    if not batch.spec_algorithm.is_none():
        planned = BatchNote.of(batch).verify_plan
        batch.mamba_track_indices = (
            torch.tensor(planned, dtype=torch.int64).to(batch.device, non_blocking=True) if any(planned) else None
        )
        return
    note_track_positions(batch)
    planner = component_of(batch.tree_cache).planner
    at = batch.seq_lens_cpu % BLOCK
    for row in torch.nonzero(at == 2).flatten().tolist():
        planner.free_replaced(batch.reqs[row])
    due = torch.nonzero(at == 0).flatten().tolist()
    BatchNote.of(batch).rolling_plan = []
    if not due:
        batch.mamba_track_indices = torch.zeros(len(batch.reqs), dtype=torch.int64, device=batch.device)
        return
    slots = torch.zeros(len(batch.reqs), dtype=torch.int64)
    for row in due:
        slots[row] = planner.plan_decode(batch.reqs[row], int(batch.seq_lens_cpu[row]))
    BatchNote.of(batch).rolling_plan = slots.tolist()
    batch.mamba_track_indices = slots.to(batch.device, non_blocking=True)


def may_join_prefill(original: Callable[..., bool], **step: Any) -> bool:
    """AROUND `targets.PREFILL_GRAPH_VOTE`, by which a rank of DP attention says whether it can take part in a recorded
    prefill step of another rank: let a decoding rank do so.

    SGLang's function declines for all models with recurrent state. It also declines for verify steps, whose lengths are
    known on the device only.
    """
    with without_recurrent_state():
        return original(**step)


def join_prefill(original: Callable[..., None], batch: Any) -> None:
    """AROUND `ScheduleBatch.convert_decode_to_extend`, which makes the decode step of a rank of DP attention a prefill
    step with one token per request. Its rolling snapshots are copies of state slots, as in a decode step: a prefill
    step writes snapshots from the tokens of its chunk, and one token is not a window."""
    original(batch)
    BatchNote.of(batch).prefill_plan = []
    batch.mamba_track_mask = batch.mamba_track_indices = batch.mamba_track_seqlens = None


def plan_verify(original: Callable[..., None], batch: Any) -> None:
    """AROUND `spec_utils.spec_prepare_for_decode`: plan the snapshots that the next verify step may take."""
    original(batch)
    if not isinstance(batch.tree_cache, PrefixCache):
        return
    planner = component_of(batch.tree_cache).planner
    draft_tokens = get_spec().speculative_num_draft_tokens
    BatchNote.of(batch).verify_plan = [planner.plan_verify(req, draft_tokens) for req in batch.reqs]


def retract_for_memory(original: Callable[..., Any], batch: Any, idx: int, *arguments: Any, **named: Any) -> Any:
    """AROUND `ScheduleBatch.release_req`, which retracts a decoding request to make room for others: mark the request,
    so that `keep_on_retraction` keeps its KV cache. Return the result of SGLang's function."""
    RequestNote.of(batch.reqs[idx]).keeps_cache = True
    return original(batch, idx, *arguments, **named)


def keep_on_retraction(original: Callable[..., None], req: Any, tree_cache: Any, *arguments: Any, **named: Any) -> None:
    """AROUND the `release_kv_cache` that retraction calls, which inserts nothing into the tree.

    Insert the tokens up to the last snapshot, unlocked, so that they are evicted like other cached prefixes. A host
    cache saves them. SGLang also retracts all requests when it pauses, for example to update weights; then nothing is
    inserted.
    """
    note = RequestNote.of(req)
    for_memory, note.keeps_cache = note.keeps_cache, False
    if for_memory and req.kv.holds_kv:
        req.refresh_fill_ids()
        tree_cache.checkpoint(req, up_to=req.owned_kv_len())
    original(req, tree_cache, *arguments, **named)
    if for_memory and isinstance(tree_cache, PrefixCache):
        tree_cache.retracted(req)


def send_before_caching(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """AROUND `SchedulerBatchResultProcessor.process_batch_result_prefill`: send the first tokens of a step, then insert
    its requests into the tree.

    SGLang's function ends with sending. An insertion takes 0.5 ms of the CPU per request (a cached prefix of 20,000
    tokens), and every first token of the step would wait for all of them.
    """
    with deferred_caching() as calls:
        original(processor, batch, result)
    allocator = processor.token_to_kv_pool_allocator
    allocator.free_group_begin()
    for call in calls:
        call()
    allocator.free_group_end()


def note_running_batch(
    original: Callable[..., Any], scheduler: Any, running_batch: Any, *arguments: Any, **named: Any
) -> Any:
    """AROUND `Scheduler.get_new_batch_prefill`, which skips the queue while the batch is marked as full: tell the
    prefix cache the batch, whose mark (`batch_is_full`) it clears when it frees memory."""
    if isinstance(scheduler.tree_cache, PrefixCache):
        scheduler.tree_cache.running_batch = running_batch
    return original(scheduler, running_batch, *arguments, **named)
