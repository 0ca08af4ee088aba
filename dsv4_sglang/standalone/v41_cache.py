"""`V41Cache`: the pools of a DeepSeek-V4.1 model without a server."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.paged_cache import make_paged_pools
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.cache.v41 import v41_layout
from dsv4_sglang.cache.v41_step import V41Step
from dsv4_sglang.model.v41 import V41Config, v41_schedule
from dsv4_sglang.standalone.step import NO_BLOCK, Step


class V41Cache:
    """Pools of `num_slots` state slots, `num_blocks` blocks of 128 tokens and `snapshots` of states at multiples of
    128.

    A block id stands for 128 tokens in every layer that owns entries. The caller manages the ownership of slots and
    blocks: it writes to `block_tables` [num_slots, num_blocks] int32 the block ids of each slot's request in the order
    of its tokens, then -1. Slots need not be cleared for a new request. A request that resumes from a snapshot
    (`state.load`) shares the blocks before it.

    With `draft_tokens` d above 1 a step may have up to d tokens of each request, the same number for each, and the next
    step may roll back all but the first of them. `draft_layers`: number of DSPARK's stages after the model's layers.

    Attributes:
        schedule, layout: the layers and what they store.
        state: rings, compressor states and snapshots (`StateStorage.store`, `load`).
        pools: one per layer, None for layers without entries of their own.
    """

    def __init__(
        self,
        config: V41Config,
        *,
        num_slots: int,
        num_blocks: int,
        snapshots: int = 0,
        draft_tokens: int = 0,
        draft_layers: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(device)
        self.schedule = v41_schedule(config, draft_layers)
        self.layout = v41_layout(self.schedule, self.device, draft_tokens=draft_tokens, draft_layers=draft_layers)
        self.draft_tokens = draft_tokens
        self.state = StateStorage(self.layout, num_slots, snapshots, positions=False)
        self.pools = make_paged_pools(self.layout, dict.fromkeys(self.layout.kinds, num_blocks))
        self.block_tables: Tensor = torch.full((num_slots, num_blocks), NO_BLOCK, dtype=torch.int32, device=self.device)

    def begin_step(
        self, request_slots: Tensor, positions: Tensor, request_ids: Tensor, track_slots: Tensor | None = None
    ) -> V41Step:
        """Return a step for the tokens of a forward pass.

        Args:
            request_slots, positions, request_ids: see `Step`, which also defines what is rejected.
            track_slots: [T] int32, state slot that also receives this token's window entry, for a snapshot, or -1. A
                snapshot of L tokens receives the entries of the positions L - 128 to L - 1.
        """
        step = Step(
            request_slots,
            positions,
            request_ids,
            self.block_tables,
            draft_tokens=self.draft_tokens,
            ring_rows=self.layout.ring_rows,
        )
        step.check_blocks()
        metadata = replace(step.metadata, track_slots=track_slots)
        return V41Step(self.config, self.schedule, self.state, self.pools, metadata)

    def memory_bytes(self) -> int:
        """Return the bytes of all pools."""
        return self.state.memory_bytes() + sum(pool.memory_bytes() for pool in self.pools if pool is not None)
