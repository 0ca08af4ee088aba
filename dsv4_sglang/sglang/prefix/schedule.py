"""How SGLang's scheduler tells a step which checkpoints to take: replacements for its ping-pong slots.

Prefill: `mamba_track_indices` and `mamba_track_seqlens` become [requests, most of a request] int64, checkpoint slot (0:
none) and length. Decode: `mamba_track_indices` [requests] int64, 0 where nothing is due, as CUDA graphs expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_sglang.sglang.options import BLOCK
from dsv4_sglang.sglang.prefix.component import component_of

PLAN = "dsv4_plan"


def prepare_for_extend(original: Callable[..., None], batch: Any) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`, which calls `plan_request` for each request."""
    setattr(batch, PLAN, [])
    original(batch)
    plan: list[list[tuple[int, int]]] = getattr(batch, PLAN)
    if not plan:
        return
    width = max(1, *(len(taken) for taken in plan))
    lengths = torch.zeros(len(plan), width, dtype=torch.int64)
    slots = torch.zeros(len(plan), width, dtype=torch.int64)
    for row, taken in enumerate(plan):
        for column, (length, slot) in enumerate(taken):
            lengths[row, column], slots[row, column] = length, slot
    batch.mamba_track_seqlens = lengths.to(batch.device, non_blocking=True)
    batch.mamba_track_indices = slots.to(batch.device, non_blocking=True)


def plan_request(batch: Any, req: Any) -> Any:
    """REPLACE `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: checkpoints of one request."""
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    plan = getattr(batch, PLAN)
    room = batch.req_to_token_pool.mamba_pool.staging - sum(len(taken) for taken in plan)
    taken = component_of(batch.tree_cache).plan_prefill(req, room)
    plan.append(taken)
    return _MambaRadixCacheV2TrackEntry(track_mask=bool(taken), track_index=0, track_seqlen=0)


def plan_decode(batch: Any, track_positions: Any = None) -> None:
    """REPLACE `schedule_batch.set_mamba_track_indices_from_reqs`: every 128 tokens a rolling checkpoint.

    SGLang counts the token of the step already. Two tokens later the step before is known to be over also with overlap
    scheduling, and what the new checkpoint replaces can go.
    """
    component = component_of(batch.tree_cache)
    at = batch.seq_lens_cpu % BLOCK
    for row in torch.nonzero(at == 2).flatten().tolist():
        component.settle(batch.reqs[row])
    slots = torch.zeros(len(batch.reqs), dtype=torch.int64)
    for row in torch.nonzero(at == 0).flatten().tolist():
        slots[row] = component.plan_decode(batch.reqs[row], int(batch.seq_lens_cpu[row]))
    batch.mamba_track_indices = slots.to(batch.device, non_blocking=True)
