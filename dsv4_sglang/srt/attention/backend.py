"""Attention backend: SGLang's interface to the layers of this cache. The metadata of a step is built once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_sglang.attention.base import LayerOutput
from dsv4_sglang.attention.metadata import build_decode, build_prefill, gather_decode, step_of
from dsv4_sglang.attention.step_buffers import DecodeBuffers
from dsv4_sglang.cache.append import LayerWeights, Projections
from dsv4_sglang.cache.layer_spec import entry_limits
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.srt.attention.layer_arrivals import LayerArrivals
from dsv4_sglang.srt.attention.layer_ops import LayerInputs, make_layers, make_scratch
from dsv4_sglang.srt.attention.prefill_graphs import MAX_JOINED_REQUESTS, MAX_RECORDED_REQUESTS
from dsv4_sglang.srt.attention.prefill_recorder import PrefillRecorder
from dsv4_sglang.srt.attention.snapshot_writer import SlotCopies, SnapshotWriter, StagedSnapshots
from dsv4_sglang.srt.prefix_cache.snapshot_schedule import PrefillPlanTaker


class StepKind(NamedTuple):
    """Form of a step that is no prefill.

    Attributes:
        tokens_per_request: tokens of each request.
        cached_offset: a request has SGLang's `seq_lens` + `cached_offset` tokens before the step.
    """

    tokens_per_request: int
    cached_offset: int


class HybridCacheBackend(AttentionBackend, PrefillPlanTaker):
    """Attention backend for prefill, decode and verify steps of all layers of a model.

    The model is the served one or the draft model (docs/guides/speculation.md). CUDA graphs record decode steps,
    verify steps and short prefill steps, including their metadata.

    Args:
        runner: SGLang's model runner.
        draft_step: index of the draft model's decode step in a speculative round. 0 for the served model.
    """

    # With speculation the lengths reach the host one round late, and no step waits for them.
    needs_cpu_seq_lens = False
    # A recorded prefill step reads its metadata from `PrefillBuffers`, which each replay fills.
    use_captured_forward_metadata_for_breakable_cuda_graph = True

    def __init__(self, runner: Any, draft_step: int = 0) -> None:
        super().__init__()
        config = runner.model_config.hf_config
        self.is_draft, self.draft_step = runner.is_draft_worker, draft_step
        # DSPARK drafts a block at once. A verify step has one more token per request, the last accepted one.
        self.drafts_blocks = runner.is_draft_worker and runner.spec_algorithm.is_dspark()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        live = runner.req_to_token_pool.mamba_pool
        self.state = live.storage
        blocks = runner.token_to_kv_pool.full_kv_pool
        self.specs = blocks.layout.schemas
        self.draft_tokens = self.specs[0].draft_tokens
        # Drafts may exceed the end of the context. Layers of a draft model have no entries.
        longest = runner.model_config.context_len + self.draft_tokens
        self.max_blocks = 0 if self.is_draft else -(-longest // BLOCK_TOKENS)
        # A step's snapshots are complete after this layer: the draft model runs after the served one.
        self.last_layer = len(self.specs) - 1
        # Layers of a draft model have a window only.
        self.limits: dict[int, int | None] = {} if self.is_draft else entry_limits(self.specs, config.index_topk)
        self.heads = config.num_attention_heads // get_parallel().attn_tp_size
        self.metadata: StepMetadata | None = None
        self._graph_buffers: DecodeBuffers | None = None
        self._decode_buffers: DecodeBuffers | None = None
        self._verify_mask = make_verify_mask(self, requests=1)
        top_k = 0 if self.is_draft else config.index_topk
        self.scratch = make_scratch(self.specs, self.device, runner.dtype, top_k)
        self.layers = make_layers(self.state, blocks, self.heads, self.scratch)
        staging_slots = range(live.size + 1, live.size + 1 + live.staging)
        slots = getattr(runner.req_to_token_pool, "mamba_ckpt_pool", None)
        has_host_cache = runner.server_args.enable_hierarchical_cache and not self.is_draft
        self.arrivals = LayerArrivals(
            self.token_to_kv_pool, len(self.specs), self.scratch.device, has_host_cache=has_host_cache
        )
        self.snapshots = SnapshotWriter(self.state, staging_slots, None if slots is None else slots.timer)
        has_short_forms = get_parallel().attn_dp_size == 1
        requests = MAX_RECORDED_REQUESTS
        if not has_short_forms:
            requests = max(requests, min(MAX_JOINED_REQUESTS, self.req_to_token_pool.size))
        self.recorder = PrefillRecorder(
            self.max_blocks, requests, staging_slots, self.limits, self.layers, has_short_forms=has_short_forms
        )

    # Metadata of a step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graph_buffers = self._make_buffers(max_bs, max_num_tokens // max_bs)
        self._verify_mask = make_verify_mask(self, requests=max_bs)
        scores = max_num_tokens * self.scratch.score_width(self._graph_buffers.block_table.shape[1])
        self.scratch.reserve(max_num_tokens, self.layers.padded_heads, scores)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    @property
    def verify_mask(self) -> VerifyMask | None:
        """SGLang's mask for a tree of drafts. No step here reads it, since drafts form a chain, but SGLang fills it. If
        it did not exist, SGLang would make one with a column for every token of the context."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: the metadata of a step depends on lengths only, not on the drafts."""

    def _make_buffers(self, requests: int, each: int) -> DecodeBuffers:
        ring_rows = self.state.layout.ring_rows
        return DecodeBuffers(
            requests, self.max_blocks, self.device, ring_rows, each, self.drafts_blocks, limits=self.limits
        )

    def _kind_of(self, mode: Any) -> StepKind:
        """Return the form of a step that is no prefill.

        In a decode step SGLang's `seq_lens` already include the new token (offset -1). In the draft model's decode
        steps and in a verify step they are the lengths before the round (offset 0 or the draft step). In a draft-extend
        step they include all draft tokens. The block that DSPARK drafts has the mode of a verify step.
        """
        if mode.is_target_verify():
            return StepKind(self.draft_tokens - 1 if self.drafts_blocks else self.draft_tokens, 0)
        if mode.is_draft_extend_v2():
            return StepKind(self.draft_tokens, -self.draft_tokens)
        return StepKind(1, self.draft_step if self.is_draft else -1)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Build all metadata of a prefill step. For other steps, build what a CUDA graph must not read (see
        `gather_decode`)."""
        mode = forward_batch.forward_mode
        # A recorded prefill step has taken its snapshots inside its graph, which runs no Python.
        self.snapshots.staged = None
        if mode.is_idle():
            return
        self.recorder.active = False
        if not mode.is_extend_without_speculative():
            self.gather_tables(forward_batch)
            return
        lengths = [
            prefix + chunk
            for prefix, chunk in zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
        ]
        # If attention is split over some ranks only, SGLang rounds the tokens of a step up to a multiple of them.
        padding = forward_batch.positions.shape[0] - sum(forward_batch.extend_seq_lens_cpu)
        staged = self.snapshots.stage(self.take_prefill_plan(), forward_batch.req_pool_indices.shape[0])
        self.metadata = build_prefill(
            **prefill_inputs(forward_batch, self.req_to_token_pool, staged),
            positions=forward_batch.positions,
            out_loc=forward_batch.out_cache_loc,
            limits=self.limits,
            max_length=max(lengths),
            padding=padding,
        )
        rolling = self.snapshots.rolling(self.take_rolling_plan(), self.metadata.slots.shape[0])
        if rolling is not None:
            self.metadata.copy_src, self.metadata.copy_dst = self.metadata.slots, rolling
        self.layers.begin_step(self.metadata, sum(-(-length // BLOCK_TOKENS) for length in lengths))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Build the metadata of a step that is no prefill. A CUDA graph records this before the layers."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or mode.is_extend_without_speculative():
            return
        assert self._decode_buffers is not None, "a decode step begins with gather_tables"
        tokens = forward_batch.seq_lens.shape[0] * self._decode_buffers.tokens_per_request
        self.metadata = build_decode(
            self._decode_buffers,
            seq_lens=forward_batch.seq_lens,
            # The draft model gets the slots of all its steps from SGLang; its layers write no entries.
            out_loc=forward_batch.out_cache_loc[:tokens],
            snapshot_mask=forward_batch.mamba_track_mask,
            snapshot_slots=forward_batch.mamba_track_indices,
            length_offset=self._kind_of(mode).cached_offset,
        )
        self.layers.begin_step(self.metadata)

    def gather_tables(self, forward_batch: Any, like: HybridCacheBackend | None = None) -> None:
        """Copy a step's parts of SGLang's tables of all requests. For steps that are no prefill.

        Args:
            forward_batch: SGLang's batch. Its views may have more rows than the batch has requests.
            like: backend that has gathered the tables for the same requests. Its state slots are used then, and no
                block table, since the layers have no entries.
        """
        count, mode = forward_batch.batch_size, forward_batch.forward_mode
        each = self._kind_of(mode).tokens_per_request
        buffers = self._graph_buffers
        if buffers is None or count > buffers.slots.shape[0] or buffers.tokens_per_request != each:
            buffers = self._make_buffers(count, each)
        self._decode_buffers = buffers
        if like is not None and like._decode_buffers is not None:
            buffers.state_slots = like._decode_buffers.state_slots
            return
        seq_lens = forward_batch.seq_lens[:count]
        gather_decode(
            buffers,
            req_pool_indices=forward_batch.req_pool_indices[:count],
            seq_lens=seq_lens + each if mode.is_target_verify() else seq_lens,
            req_to_token=self.req_to_token_pool.req_to_token,
            state_slot_of_request=self.req_to_token_pool.req_index_to_mamba_index_mapping,
        )

    # Prefill steps in CUDA graphs

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> StepMetadata:
        """Prepare the recording of a prefill step. SGLang records the largest step first, with a dummy batch."""
        self.metadata = self.recorder.record(forward_batch.positions.shape[0], forward_batch.out_cache_loc)
        self.begin_recorded()
        return self.metadata

    def begin_recorded(self) -> None:
        """Build the metadata of a recorded prefill step, first in its graph. Does nothing in other steps."""
        if not self.recorder.active:
            return
        assert self.metadata is not None
        self.snapshots.staged = self.recorder.build(self.metadata)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: StepMetadata, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        """Prepare the replay of a recorded prefill step."""
        requests = forward_batch.req_pool_indices.shape[0]
        staged = self.snapshots.stage(self.take_prefill_plan(), requests)
        rolling = self.snapshots.rolling(self.take_rolling_plan(), requests)
        inputs = prefill_inputs(forward_batch, self.req_to_token_pool, staged)
        self.recorder.replay(inputs, self.snapshots.staged, rolling)
        lens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        self.metadata = self.recorder.choose_form(capture_metadata, *lens)
        self.arrivals.expect()

    # Snapshots of verify steps

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        model: Any,
        req_pool_indices: Tensor | None = None,
    ) -> None:
        """Note the snapshots that are due after a verify step. SGLang calls this. `SnapshotWriter.commit` takes them,
        once the draft model has written its entries of the accepted tokens.

        Args:
            last_correct_step_indices: unused.
            mamba_track_indices: [B] planned snapshot slots, 0 for none.
            mamba_steps_to_track: [B], -1 for requests that passed no multiple of 128.
            model: unused.
            req_pool_indices: unused.
        """
        self.snapshots.verified = None
        if mamba_track_indices is None or mamba_steps_to_track is None:
            return
        assert self._decode_buffers is not None, "a verify step begins with gather_tables"
        to = mamba_track_indices.masked_fill(mamba_steps_to_track < 0, -1).to(torch.int32)
        self.snapshots.verified = SlotCopies(self._decode_buffers.slots[: to.shape[0]], to)

    # Entries of a draft model that does not run within the steps of the served model (DSPARK)

    def write_context(
        self, layers: Iterable[tuple[int, LayerWeights, Tensor]], out_loc: Tensor, requests: int | None
    ) -> None:
        """Write window entries for the tokens of the served model's last step, then take the snapshots that are due.

        Entries of rejected drafts are written too. Their positions are beyond the request's length, and the ring has
        room for them.

        Args:
            layers: for each layer, its number in the cache, its weights and its raw projections [T, 512].
            out_loc: [T] token slots.
            requests: number of requests of a verify step, None after a prefill step.
        """
        if requests is None:
            step = self.step_of_tokens(out_loc)
        else:
            assert self._decode_buffers is not None, "a verify step begins with gather_tables"
            step = step_of(self._decode_buffers, requests, out_loc)
        window = None if step.is_decode else self.scratch.window(step.window_size)
        for layer, weights, kv in layers:
            self.layers.append(layer, weights, Projections(kv), step, window)
        self.snapshots.store(step, timed=not self.recorder.active)
        self.snapshots.commit()

    # One layer

    def query_buffer(self, tokens: int) -> Tensor:
        """Return a buffer `[tokens, H, 512]` for the queries of a layer (`LayerOps.query_buffer`)."""
        return self.layers.query_buffer(tokens)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        inputs: LayerInputs,
    ) -> LayerOutput:
        """Write the step's entries of a layer, then compute its attention.

        Args:
            q: [T, H, 512] from `query_buffer`, queries.
            k: window projections of the tokens, raw, [T, 512] after flattening.
            v: unused; the same tensor as `k`.
            layer: SGLang's layer, with its number in the cache.
            forward_batch: SGLang's batch.
            save_kv_cache: unused.
            inputs: other inputs of the layer.

        Returns:
            The output of the layer's heads, and whether RoPE is still applied to it.
        """
        if forward_batch.forward_mode.is_idle():
            # An idle rank of DP attention joins a step of the other ranks with padding tokens.
            return LayerOutput(torch.zeros_like(q[:, : self.heads]), rotated=False)
        padded = self.is_draft and not self.has_metadata_of(q)
        if padded and not forward_batch.forward_mode.is_extend_without_speculative():
            # DP attention pads eager steps of a draft model after its worker has asked for their metadata.
            self.init_forward_metadata(forward_batch)
        step, number, window = self.step_of_tokens(q), layer.layer_id, None
        if not step.is_decode:
            self.arrivals.wait(number, recorded=self.recorder.active)
            window = self.scratch.window(step.window_size)
        projections = Projections(k.flatten(1), inputs.kv_score, inputs.index_kv_score)
        self.layers.append(number, inputs.weights, projections, step, window, inputs.keys_of)
        if number == self.last_layer:
            self.snapshots.store(step, timed=not self.recorder.active)
        return self.layers.attend(q, number, layer.scaling, inputs, step, window)

    def step_of_tokens(self, tokens: Tensor) -> StepMetadata:
        """Return the metadata of the step with `tokens` [T, ...]. A recorded step has padding tokens after those of its
        batch. They are left out for a caller outside the graph.

        Raises:
            RuntimeError: the metadata belongs to a step of another size.
        """
        if self.recorder.active and self.metadata is not None and tokens.shape[0] < self.metadata.positions.shape[0]:
            return self.metadata.first_tokens(tokens)
        if self.metadata is None or not self.has_metadata_of(tokens):
            raise RuntimeError(
                f"no metadata for a step of {tokens.shape[0]} tokens: init_forward_metadata was not called"
            )
        return self.metadata

    def has_metadata_of(self, tokens: Tensor) -> bool:
        """Return whether the metadata is that of a step with `tokens` [T, ...]."""
        return self.metadata is not None and self.metadata.positions.shape[0] == tokens.shape[0]

    def free_scratch(self) -> None:
        """Free the scratch that grows on demand. The scratch of CUDA graphs stays."""
        self.scratch.free()
        self.layers.free_scratch()


def prefill_inputs(forward_batch: Any, req_to_token_pool: Any, staged: StagedSnapshots | None) -> dict[str, Any]:
    """Return the inputs of the metadata of a prefill step.

    Args:
        forward_batch: SGLang's batch.
        req_to_token_pool: SGLang's tables of all requests.
        staged: snapshots of the step.
    """
    return {
        "req_pool_indices": forward_batch.req_pool_indices,
        "prefix_lens": forward_batch.extend_prefix_lens,
        "chunk_lens": forward_batch.extend_seq_lens,
        "req_to_token": req_to_token_pool.req_to_token,
        "state_slot_of_request": req_to_token_pool.req_index_to_mamba_index_mapping,
        "staging_slots": None if staged is None else staged.staging_slots,
        "snapshot_lens": None if staged is None else staged.lengths,
    }


def make_verify_mask(backend: HybridCacheBackend, requests: int) -> VerifyMask | None:
    """Return SGLang's mask for drafts of up to `requests` requests, or None for a draft model and without
    speculation."""
    return maybe_create_verify_mask(
        is_draft_runner=backend.is_draft,
        skip_prefill=False,
        max_bs=requests,
        max_context_len=0,  # used by another mask mode only
        num_draft_tokens=backend.draft_tokens,
        device=backend.device,
        is_read=False,
    )
