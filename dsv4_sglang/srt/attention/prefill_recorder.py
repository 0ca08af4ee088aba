"""Prefill steps in CUDA graphs: metadata at fixed addresses, the scratch memory of the graphs, and their two forms.

A recorded step does the same work for any batch, so the longest context of a batch decides what it costs. A large step
is recorded in two forms. The long form takes any batch: it selects index entries for a few tokens at a time, since each
has a score for every entry of the longest context, and reads KV entries in place. The short form takes batches within
the limits of a `ShortForm`: all scores of 2,048 tokens fit in the scratch at once, and the attention kernel of prefill
steps gathers the entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from dsv4_sglang.attention.metadata import build_recorded, recorded_step
from dsv4_sglang.attention.step_buffers import LIST_ALIGNMENT, PrefillBuffers, align
from dsv4_sglang.cache.step import StepMetadata, prefill_window_size
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO
from dsv4_sglang.srt.attention.layer_ops import LayerOps
from dsv4_sglang.srt.attention.snapshot_writer import SlotCopies
from dsv4_sglang.srt.attention.step_scratch import RECORDED_SCRATCH_BYTES

# Smallest recorded step with a short form. At fewer tokens the forms take nearly the same time.
SHORT_FORM_TOKENS = 256
# Maximum blocks of a request of a step in its short form, 65,536 tokens. It has 16,384 scores per token, as many as the
# selection kernel holds in registers (csrc/index/select.cu), and 2,048 tokens fill RECORDED_SCRATCH_BYTES.
SHORT_FORM_CONTEXT_BLOCKS = 512
# Tokens of a step in its short form for which index entries are selected at once.
SHORT_FORM_SELECTED = 2048
# Maximum gathered entries of all requests of a step in its short form, 56 MiB. Gathering them pays in a step of
# SHORT_FORM_TOKENS (`sparse_prefill.MAX_GATHERED_PER_TOKEN`). In V4 they are entries of 229,376 tokens.
SHORT_FORM_ENTRIES = 1792 * BLOCK_TOKENS // CSA_RATIO


class ShortForm(NamedTuple):
    """Limits of the batches that the short form of a recorded step takes.

    Attributes:
        context_blocks: blocks of the longest request after the step.
        blocks: blocks of all requests after the step.
    """

    context_blocks: int
    blocks: int


class PrefillRecorder:
    """Metadata of the prefill steps that CUDA graphs record. A graph reads its inputs from buffers at fixed addresses,
    which are allocated for the first graph, the largest one, and filled before each replay.

    Args:
        max_blocks: blocks of the longest context; 0 for layers without compressed entries.
        requests: largest number of requests of a step.
        staging_slots: state slots that hold the snapshots of a step until its end.
        limits: most entries that a token reads, by their ratio (`layer_spec.entry_limits`).
        layers: layers of the backend.
        has_short_forms: large steps have a short form. The ranks of DP attention must replay graphs with the same
            addresses of collective operations, but do not know each other's lengths, so they have long forms only.
    """

    def __init__(
        self,
        max_blocks: int,
        requests: int,
        staging_slots: range,
        limits: Mapping[int, int | None],
        layers: LayerOps,
        *,
        has_short_forms: bool,
    ) -> None:
        self.max_blocks, self.requests, self.staging_slots, self.limits = max_blocks, requests, staging_slots, limits
        self.layers, self.has_short_forms = layers, has_short_forms
        # True if the current step is a prefill step in a CUDA graph.
        self.active = False
        # Limits of the current step's short form, None in its long form.
        self.form: ShortForm | None = None
        self._buffers: PrefillBuffers | None = None

    def short_form(self, tokens: int) -> ShortForm | None:
        """Return the limits of the short form of a step of `tokens` tokens, None if it is recorded in its long form
        only: small steps, and layers without entries."""
        scratch = self.layers.scratch
        if not self.has_short_forms or not scratch.scored_per_block or tokens < SHORT_FORM_TOKENS:
            return None
        for blocks in range(min(SHORT_FORM_CONTEXT_BLOCKS, align(self.max_blocks)), 0, -LIST_ALIGNMENT):
            if 4 * min(tokens, SHORT_FORM_SELECTED) * scratch.score_width(blocks) <= RECORDED_SCRATCH_BYTES:
                return ShortForm(blocks, SHORT_FORM_ENTRIES // scratch.scored_per_block)
        return None

    def record(self, tokens: int, out_loc: Tensor) -> StepMetadata:
        """Return the metadata of a step to record, in its long form. All its tokens are padding tokens, so that
        recording writes nothing.

        Args:
            tokens: tokens of the step. SGLang records the largest step first.
            out_loc: int64 [tokens], pool slot of each token.
        """
        self.active = True
        if self._buffers is None:
            self._buffers = self._allocate(tokens)
        self._buffers.clear()
        return self.take_form(recorded_step(self._buffers, tokens, out_loc), None)

    def _allocate(self, tokens: int) -> PrefillBuffers:
        scratch = self.layers.scratch
        buffers = PrefillBuffers(
            tokens, self.requests, self.max_blocks, self.staging_slots, scratch.device, limits=self.limits
        )
        width = scratch.score_width(buffers.block_table.shape[1])
        scratch.reserve(tokens, self.layers.padded_heads, max(width, min(tokens * width, RECORDED_SCRATCH_BYTES // 4)))
        window_size = prefill_window_size(tokens, self.requests + 1)
        scratch.reserve_window(window_size)
        if self.has_short_forms and scratch.scored_per_block and tokens >= SHORT_FORM_TOKENS:
            for kernel in self.layers.kernels:
                kernel.reserve(window_size, SHORT_FORM_ENTRIES // scratch.scored_per_block, scratch.device)
        return buffers

    def take_form(self, step: StepMetadata, form: ShortForm | None) -> StepMetadata:
        """Choose the form of the current step, for its recording or its replay.

        Args:
            step: metadata of the step in its long form.
            form: limits of the short form, None for the long form.

        Returns:
            The metadata of the step in this form.
        """
        self.form = form
        if form is None or step.hca_indices is None:
            return step
        columns = slice(form.context_blocks)
        return replace(step, block_table=step.block_table[:, columns], hca_indices=step.hca_indices[:, columns])

    def build(self, step: StepMetadata) -> SlotCopies:
        """Build the metadata of a recorded step, which is the first work of its graph, and prepare for its layers.

        Returns:
            The copies of its snapshots. Those that are not due have a snapshot slot below 1.
        """
        assert self._buffers is not None, "a step is recorded before it is built"
        build_recorded(self._buffers, step.positions.shape[0], step.out_loc)
        self.layers.begin_step(step, None if self.form is None else self.form.blocks, recorded=True)
        return SlotCopies(self._buffers.copy_src, self._buffers.copy_dst)

    def replay(self, inputs: dict[str, Any], copies: SlotCopies | None, rolling: Tensor | None) -> None:
        """Write the inputs of a batch before its graph is replayed.

        Args:
            inputs: arguments of `PrefillBuffers.fill`, except for `copy_dst` and `rolling_dst`.
            copies: copies of the snapshots of the step, None without snapshots.
            rolling: as `rolling_dst` of `PrefillBuffers.fill`.
        """
        assert self._buffers is not None, "a step is recorded before it is replayed"
        self._buffers.fill(**inputs, copy_dst=None if copies is None else copies.dst, rolling_dst=rolling)
        self.active = True

    def replays_large(self, size: int, tokens: int, prefix_lens: Sequence[int]) -> bool:
        """Return True if the graph of a step beyond `prefill_graphs.SIZES` is faster than an eager step: in its short
        form, which has the same kernels. In the long form they would take longer than launches do. Without short forms
        the answer is always True, since the ranks of DP attention must agree.

        Args:
            size: tokens of the graph.
            tokens: tokens of the step.
            prefix_lens: tokens of each request before the step. The batch counts as the one that needs most blocks.
        """
        form = self.short_form(size)
        if form is None:
            return not self.has_short_forms
        most = -(-tokens // BLOCK_TOKENS)
        blocks = [-(-prefix // BLOCK_TOKENS) for prefix in prefix_lens]
        return max(blocks) + most <= form.context_blocks and sum(blocks) + most + len(blocks) <= form.blocks

    def choose_form(self, step: StepMetadata, prefix_lens: Sequence[int], chunk_lens: Sequence[int]) -> StepMetadata:
        """Choose the form in which a step is replayed: the short one if the batch is within its limits.

        Args:
            step: metadata of the step in its long form.
            prefix_lens: tokens of each request before the step.
            chunk_lens: tokens of each request in the step.

        Returns:
            The metadata of the step in this form.
        """
        form = self.short_form(step.positions.shape[0])
        if form is not None:
            blocks = [-(-(prefix + chunk) // BLOCK_TOKENS) for prefix, chunk in zip(prefix_lens, chunk_lens)]
            if max(blocks) > form.context_blocks or sum(blocks) > form.blocks:
                form = None
        return self.take_form(step, form)
