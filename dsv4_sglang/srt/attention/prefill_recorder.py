"""Prefill steps in CUDA graphs: metadata at fixed addresses, and the scratch memory of the graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsv4_sglang.attention.metadata import build_recorded, recorded_step
from dsv4_sglang.attention.step_buffers import PrefillBuffers
from dsv4_sglang.cache.step import StepMetadata, prefill_window_size
from dsv4_sglang.srt.attention.prefill_graphs import MAX_RECORDED_REQUESTS
from dsv4_sglang.srt.attention.snapshot_writer import SlotCopies
from dsv4_sglang.srt.attention.step_scratch import RECORDED_SCRATCH_BYTES, StepScratch


class PrefillRecorder:
    """Metadata of the prefill steps that CUDA graphs record. A graph reads its inputs from buffers at fixed addresses,
    which are allocated for the first graph, the largest one, and filled before each replay.

    Args:
        max_blocks: blocks of the longest context; 0 for layers without compressed entries.
        staging_slots: state slots that hold the snapshots of a step until its end.
        limits: most entries that a token reads, by their ratio (`layer_spec.entry_limits`).
        scratch: scratch memory of the backend.
        padded_heads: heads of a query buffer with padding heads; 0 if the queries have none.
    """

    def __init__(
        self,
        max_blocks: int,
        staging_slots: range,
        limits: Mapping[int, int | None],
        scratch: StepScratch,
        padded_heads: int,
    ) -> None:
        self.max_blocks, self.staging_slots, self.limits = max_blocks, staging_slots, limits
        self.scratch, self.padded_heads = scratch, padded_heads
        # True if the current step is a prefill step in a CUDA graph.
        self.active = False
        self._buffers: PrefillBuffers | None = None

    def record(self, tokens: int, out_loc: Tensor) -> StepMetadata:
        """Return the metadata of a step to record. All its tokens are padding tokens, so that recording writes nothing.

        Args:
            tokens: tokens of the step. SGLang records the largest step first.
            out_loc: int64 [tokens], pool slot of each token.
        """
        self.active = True
        if self._buffers is None:
            self._buffers = self._allocate(tokens)
        self._buffers.clear()
        return recorded_step(self._buffers, tokens, out_loc)

    def _allocate(self, tokens: int) -> PrefillBuffers:
        scratch = self.scratch
        buffers = PrefillBuffers(
            tokens, MAX_RECORDED_REQUESTS, self.max_blocks, self.staging_slots, scratch.device, limits=self.limits
        )
        at_once = scratch.scored_at_once(tokens, buffers.block_table, RECORDED_SCRATCH_BYTES)
        scratch.reserve(tokens, self.padded_heads, at_once, buffers.block_table)
        scratch.reserve_window(prefill_window_size(tokens, MAX_RECORDED_REQUESTS + 1))
        return buffers

    def build(self, step: StepMetadata) -> SlotCopies:
        """Build the metadata of a recorded step, which is the first work of its graph.

        Returns:
            The copies of its snapshots. Those that are not due have a snapshot slot below 1.
        """
        assert self._buffers is not None, "a step is recorded before it is built"
        build_recorded(self._buffers, step.positions.shape[0], step.out_loc)
        return SlotCopies(self._buffers.copy_src, self._buffers.copy_dst)

    def replay(self, inputs: dict[str, Any], copies: SlotCopies | None) -> None:
        """Write the inputs of a batch before its graph is replayed.

        Args:
            inputs: arguments of `PrefillBuffers.fill`, except for `copy_dst`.
            copies: copies of the snapshots of the step, None without snapshots.
        """
        assert self._buffers is not None, "a step is recorded before it is replayed"
        self._buffers.fill(**inputs, copy_dst=None if copies is None else copies.dst)
        self.active = True
