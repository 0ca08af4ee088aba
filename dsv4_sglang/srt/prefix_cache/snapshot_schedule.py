"""How SGLang's scheduler tells a step which snapshots to take: replacements for its ping-pong slots.

Prefill: the backend gets a table [requests, most of a request, 2] int64, length and snapshot slot (0: none), when its
step is made of the batch; SGLang's own tensors have room for one snapshot a request and stay None. Decode: as SGLang
has it, `mamba_track_indices` [requests] int64, 0 where nothing is due, so that CUDA graphs see what they expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration import compat
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.component import component_of

PLAN, TABLE = "dsv4_plan", "dsv4_plan_table"
"""Attributes of a batch: what its requests take, as lists; the same as a tensor."""
VERIFY_PLAN = "dsv4_verify_plan"
"""Attribute of a batch: the slot of the snapshot that each request takes if its verify step passes the length."""
KEEP = "dsv4_keep"
"""Attribute of a request that is retracted for want of memory."""


class PrefillPlanTaker:
    """A backend that takes the table of a prefill step, None without snapshots."""

    prefill_plan: torch.Tensor | None = None


def prepare_for_extend(original: Callable[..., None], batch: Any) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`, which calls `plan_request` for each request."""
    setattr(batch, PLAN, [])
    setattr(batch, TABLE, None)
    original(batch)
    plan: list[list[tuple[int, int]]] = getattr(batch, PLAN)
    batch.mamba_track_mask = batch.mamba_track_indices = batch.mamba_track_seqlens = None
    if not any(plan):
        return
    table = torch.zeros(len(plan), max(1, *(len(taken) for taken in plan)), 2, dtype=torch.int64)
    for row, taken in enumerate(plan):
        if taken:
            table[row, : len(taken)] = torch.tensor(taken)
    setattr(batch, TABLE, table.to(batch.device, non_blocking=True))


def hand_over(original: Callable[..., Any], cls: Any, batch: Any, model_runner: Any, **arguments: Any) -> Any:
    """AROUND `ForwardBatch.init_new`, the last that sees the scheduler's batch; the step follows in the same thread."""
    if isinstance(model_runner.attn_backend, PrefillPlanTaker):
        model_runner.attn_backend.prefill_plan = (
            getattr(batch, TABLE, None) if batch.forward_mode.is_extend_without_speculative() else None
        )
    return original(cls, batch, model_runner, **arguments)


def plan_request(batch: Any, req: Any) -> Any:
    """REPLACE `compat.TRACK_REQUEST`: snapshots of one request."""
    plan = getattr(batch, PLAN)
    room = batch.req_to_token_pool.mamba_pool.staging - sum(len(taken) for taken in plan)
    taken = component_of(batch.tree_cache).plan_prefill(req, room)
    plan.append(taken)
    return compat.track_entry(bool(taken))


def plan_decode(batch: Any, track_positions: Any = None) -> None:
    """REPLACE `schedule_batch.set_mamba_track_indices_from_reqs`: every 128 tokens a rolling snapshot.

    SGLang counts the token of the step already. Two tokens later the step before is known to be over also with overlap
    scheduling, and what the new snapshot replaces can go.

    Of a verify step only the device knows how many tokens it keeps, so it gets what `plan_verify` has planned, None if
    that is nothing.
    """
    if not batch.spec_algorithm.is_none():
        planned = getattr(batch, VERIFY_PLAN, [])
        batch.mamba_track_indices = (
            torch.tensor(planned, dtype=torch.int64).to(batch.device, non_blocking=True) if any(planned) else None
        )
        return
    compat.note_track_positions(batch)
    component = component_of(batch.tree_cache)
    at = batch.seq_lens_cpu % BLOCK
    for row in torch.nonzero(at == 2).flatten().tolist():
        component.settle(batch.reqs[row])
    due = torch.nonzero(at == 0).flatten().tolist()
    if not due:
        batch.mamba_track_indices = torch.zeros(len(batch.reqs), dtype=torch.int64, device=batch.device)
        return
    slots = torch.zeros(len(batch.reqs), dtype=torch.int64)
    for row in due:
        slots[row] = component.plan_decode(batch.reqs[row], int(batch.seq_lens_cpu[row]))
    batch.mamba_track_indices = slots.to(batch.device, non_blocking=True)


def plan_verify(original: Callable[..., None], batch: Any) -> None:
    """AROUND `spec_utils.spec_prepare_for_decode`: the snapshots that the next verify step may take."""
    original(batch)
    if not isinstance(batch.tree_cache, PrefixCache):
        return
    component = component_of(batch.tree_cache)
    draft_tokens = get_spec().speculative_num_draft_tokens
    setattr(batch, VERIFY_PLAN, [component.plan_verify(req, draft_tokens) for req in batch.reqs])


def retract_for_memory(original: Callable[..., Any], batch: Any, idx: int, *arguments: Any, **named: Any) -> Any:
    """AROUND `ScheduleBatch.release_req`, by which a decoding request makes room for others. What it returns says
    whether the request can go on."""
    setattr(batch.reqs[idx], KEEP, True)
    return original(batch, idx, *arguments, **named)


def keep_on_retraction(original: Callable[..., None], req: Any, tree_cache: Any, *arguments: Any, **named: Any) -> None:
    """AROUND the `release_kv_cache` that retraction calls, to insert nothing: insert what reaches to the last
    snapshot, unlocked, so that it is evicted like anything else that nobody runs; with a host cache it is saved.

    A pause that retracts all requests, as before new weights, comes here too, and inserts nothing.
    """
    for_memory = vars(req).pop(KEEP, False)
    compat.release_retracted(original, req, tree_cache, for_memory, *arguments, **named)
    if for_memory and isinstance(tree_cache, PrefixCache):
        tree_cache.retracted(req)


def look_again(original: Callable[..., Any], scheduler: Any, running_batch: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND `Scheduler.get_new_batch_prefill`, which does not look at its queue while the batch is marked as full. The
    mark goes when a request ends, or when the prefix cache clears it.

    It also goes where it was set while a prompt was under way in chunks: SGLang 0.5.17 counts that one among the
    requests that need a slot, while it has its own, and would leave the last slot empty.
    """
    in_chunks = scheduler.chunked_req is not None
    if isinstance(scheduler.tree_cache, PrefixCache):
        scheduler.tree_cache.running_batch = running_batch
    plan = original(scheduler, running_batch, *arguments, **named)
    if in_chunks:
        plan.running_batch.batch_is_full = False
    return plan
