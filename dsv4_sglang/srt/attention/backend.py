"""Attention backend. Each layer runs one append, one selection (CSA layers only) and one attention kernel. The metadata
of a step is built once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from torch.nn.functional import pad

import dsv4_sglang.ops  # noqa: F401  registers torch.ops.dsv4_sglang
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, EntryList, LayerOutput
from dsv4_sglang.attention.metadata import (
    build_decode,
    build_prefill,
    build_recorded,
    gather_decode,
    recorded_step,
    step_of,
)
from dsv4_sglang.attention.registry import make_kernels
from dsv4_sglang.attention.step_buffers import DecodeBuffers, PrefillBuffers
from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.step import StepMetadata, prefill_window_size
from dsv4_sglang.formats import make_kv_buffers
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO
from dsv4_sglang.srt.attention.prefill_graphs import MAX_RECORDED_REQUESTS
from dsv4_sglang.srt.prefix_cache.snapshot_schedule import PrefillPlanTaker

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CompressedKVPool

# Bytes of index scores that a prefill step computes at a time: in an eager step, and in a CUDA graph. A token in a CUDA
# graph has a score for every entry of the longest context.
SCRATCH_BYTES = 256 << 20
RECORDED_SCRATCH_BYTES = 128 << 20


class IndexQuery(NamedTuple):
    """Indexer inputs of a CSA layer: raw queries `[T, Hi, 128]` and head weights `[T, Hi]` fp32.

    The weights come without the scale factors 128^-0.5 and Hi^-0.5, which do not change the selection (SPEC 4.1).
    `wait` must be called before either is read: another stream may still compute the query.
    """

    query: Tensor
    weights: Tensor
    wait: Callable[[], None]


class LayerInputs(NamedTuple):
    """Inputs of a layer besides its query and its raw window projection.

    Attributes:
        weights: weights of the layer's cache ops.
        sink: fp32, at least as many values as `query_buffer` has heads. The layer's own heads come first.
        wait_for_query: must be called before the query is read, since another stream may still compute it.
        accepts_rotated_output: the layer can apply the inverse RoPE to the output itself. This saves a launch for
            attention kernels that do not fuse it.
        kv_score: as in `cache.append.Projections`.
        index_kv_score: as in `cache.append.Projections`.
        index_query: indexer inputs of a CSA layer.
    """

    weights: LayerWeights
    sink: Tensor
    wait_for_query: Callable[[], None]
    accepts_rotated_output: bool
    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_query: IndexQuery | None = None


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
        self.state, self.last_live_slot, self.staging = live.storage, live.size, live.staging
        blocks = runner.token_to_kv_pool.full_kv_pool
        self.schemas = blocks.layout.schemas
        self.draft_tokens = self.schemas[0].draft_tokens
        # Drafts may exceed the end of the context. Layers of a draft model have no entries.
        longest = runner.model_config.context_len + self.draft_tokens
        self.max_blocks = 0 if self.is_draft else -(-longest // BLOCK_TOKENS)
        # A step's snapshots are complete after this layer: the draft model runs after the served one.
        self.last_layer = len(self.schemas) - 1
        self.top_k = config.index_topk
        self.metadata: StepMetadata | None = None
        self.heads, self.dtype = config.num_attention_heads // get_parallel().attn_tp_size, runner.dtype
        self.kernels: list[AttentionKernel] = []
        self.kernel: AttentionKernel | None = None
        self.prepare_layers(blocks)
        self._due_snapshots: tuple[Tensor, Tensor] | None = None
        self._graph_buffers: DecodeBuffers | None = None
        self._decode_buffers: DecodeBuffers | None = None
        self._prefill_buffers: PrefillBuffers | None = None
        # True if the metadata belongs to a prefill step in a CUDA graph.
        self._recorded = False
        self._verify_mask = self._make_verify_mask(1)
        self._workspace: Tensor | None = None
        self._recorded_workspace: Tensor | None = None
        self._graph_scratch: dict[str, list[Tensor]] = {}
        self._scratch: dict[str, Tensor] = {}
        self._staged: tuple[Tensor, Tensor] | None = None

    def prepare_layers(self, blocks: CompressedKVPool) -> None:
        """Collect the buffers of each layer, and create the attention kernels of this model."""
        self.tables = [
            LayerTables(self.state.ring(i), self.state.compressor_state(i), blocks.entries(i), blocks.keys(i))
            for i in range(len(self.schemas))
        ]
        device = resolve_device(self.device)  # registers its ops
        self.kernels = make_kernels(device, blocks.blocks, self.heads, self.dtype, blocks.layout.schemas[0].kv_format)

    # Metadata of a step

    def begin_layers(self, step: StepMetadata, lengths: list[int] | None) -> None:
        """Finish the metadata of a step before its layers run. `lengths`: tokens of each request after a prefill step,
        None in other steps."""
        self.kernel = next(kernel for kernel in self.kernels if kernel.begin_step(step, lengths))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graph_buffers = self._make_buffers(max_bs, max_num_tokens // max_bs)
        self._verify_mask = self._make_verify_mask(max_bs)
        self._reserve_scratch(max_num_tokens, max_num_tokens, self._graph_buffers.block_table)

    def _reserve_scratch(self, tokens: int, scored_tokens: int, block_table: Tensor) -> None:
        """Allocate the scratch of recorded steps.

        Args:
            tokens: maximum number of tokens of a step.
            scored_tokens: tokens whose index scores are computed at once.
            block_table: block table of the steps, for the width of the scores.
        """
        heads = max(kernel.query_heads(self.heads) for kernel in self.kernels)
        if heads > self.heads:
            self._reserve("query", tokens * heads * ENTRY_DIM, self.dtype)
        if not self.is_draft:
            self._reserve("indices", tokens * self.top_k, torch.int32)
            self._reserve("scores", scored_tokens * self._score_width(block_table), torch.float32)

    def _reserve(self, name: str, elements: int, dtype: torch.dtype) -> None:
        """Reserve scratch for graphs. Graphs that were recorded with a smaller tensor keep it."""
        reserved = self._graph_scratch.setdefault(name, [])
        if not reserved or reserved[-1].numel() < elements:
            reserved.append(torch.zeros(elements, dtype=dtype, device=self.device))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    @property
    def verify_mask(self) -> VerifyMask | None:
        """SGLang's mask for a tree of drafts. No step here reads it, since drafts form a chain, but SGLang fills it. If
        it did not exist, SGLang would make one with a column for every token of the context."""
        return self._verify_mask

    def _make_verify_mask(self, requests: int) -> VerifyMask | None:
        """Return the mask, or None for a draft model and without speculation."""
        return maybe_create_verify_mask(
            is_draft_runner=self.is_draft,
            skip_prefill=False,
            max_bs=requests,
            max_context_len=0,  # used by another mask mode only
            num_draft_tokens=self.draft_tokens,
            device=self.device,
            is_read=False,
        )

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: the metadata of a step depends on lengths only, not on the drafts."""

    def _make_buffers(self, requests: int, each: int) -> DecodeBuffers:
        ring_rows = self.state.layout.ring_rows
        return DecodeBuffers(requests, self.max_blocks, self.device, ring_rows, each, sees_block=self.drafts_blocks)

    def _tokens_of(self, mode: Any) -> tuple[int, int]:
        """Return (tokens of a request, offset from `seq_lens` to its cached length) of a step that is no prefill.

        In a decode step SGLang's `seq_lens` already include the new token (offset -1). In the draft model's decode
        steps and in a verify step they are the lengths before the round (offset 0 or the draft step). In a draft-extend
        step they include all draft tokens. The block that DSPARK drafts has the mode of a verify step.
        """
        if mode.is_target_verify():
            return self.draft_tokens - self.drafts_blocks, 0
        if mode.is_draft_extend_v2():
            return self.draft_tokens, -self.draft_tokens
        return 1, self.draft_step if self.is_draft else -1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Build all metadata of a prefill step. For other steps, build what a CUDA graph must not read (see
        `gather_decode`)."""
        mode = forward_batch.forward_mode
        # A recorded prefill step has taken its snapshots inside its graph, which runs no Python.
        self._staged = None
        if mode.is_idle():
            return
        self._recorded = False
        if not mode.is_extend_without_speculative():
            self.gather_tables(forward_batch)
            return
        lengths = [
            prefix + chunk
            for prefix, chunk in zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
        ]
        # If attention is split over some ranks only, SGLang rounds the tokens of a step up to a multiple of them.
        padding = forward_batch.positions.shape[0] - sum(forward_batch.extend_seq_lens_cpu)
        self.metadata = build_prefill(
            **self._prefill_inputs(forward_batch),
            positions=forward_batch.positions,
            out_loc=forward_batch.out_cache_loc,
            top_k=self.top_k,
            max_length=max(lengths),
            padding=padding,
        )
        self.begin_layers(self.metadata, [*lengths, padding] if padding else lengths)

    def _prefill_inputs(self, forward_batch: Any) -> dict[str, Any]:
        """Return the inputs of the metadata of a prefill step, and stage the snapshots that are due."""
        track_slots, track_lens = self._snapshots_due(forward_batch.req_pool_indices.shape[0])
        return {
            "req_pool_indices": forward_batch.req_pool_indices,
            "prefix_lens": forward_batch.extend_prefix_lens,
            "chunk_lens": forward_batch.extend_seq_lens,
            "req_to_token": self.req_to_token_pool.req_to_token,
            "state_slot_of_request": self.req_to_token_pool.req_index_to_mamba_index_mapping,
            "track_slots": track_slots,
            "track_lens": track_lens,
        }

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
            track_mask=forward_batch.mamba_track_mask,
            track_slots=forward_batch.mamba_track_indices,
            top_k=self.top_k,
            length_offset=self._tokens_of(mode)[1],
        )
        self.begin_layers(self.metadata, lengths=None)

    def gather_tables(self, forward_batch: Any, like: HybridCacheBackend | None = None) -> None:
        """Copy a step's parts of SGLang's tables of all requests. For steps that are no prefill.

        Args:
            forward_batch: SGLang's batch. Its views may have more rows than the batch has requests.
            like: backend that has gathered the tables for the same requests. Its state slots are used then, and no
                block table, since the layers have no entries.
        """
        count, mode = forward_batch.batch_size, forward_batch.forward_mode
        each, _ = self._tokens_of(mode)
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
        """Prepare the recording of a prefill step. SGLang records the largest step first, with a dummy batch. All
        tokens are padding tokens, so that recording writes nothing."""
        tokens, self._recorded = forward_batch.positions.shape[0], True
        if self._prefill_buffers is None:
            staging_slots = range(self.last_live_slot + 1, self.last_live_slot + 1 + self.staging)
            buffers = PrefillBuffers(tokens, MAX_RECORDED_REQUESTS, self.max_blocks, staging_slots, self.device)
            self._prefill_buffers = buffers
            at_once = self._scored_at_once(tokens, buffers.block_table)
            self._reserve_scratch(tokens, at_once, buffers.block_table)
            self._window(prefill_window_size(tokens, MAX_RECORDED_REQUESTS + 1))
            self._recorded_workspace = self._workspace
        self._prefill_buffers.clear()
        self.metadata = recorded_step(self._prefill_buffers, tokens, forward_batch.out_cache_loc)
        self.begin_recorded()
        return self.metadata

    def begin_recorded(self) -> None:
        """Build the metadata of a recorded prefill step, first in its graph. Does nothing in other steps."""
        if not self._recorded:
            return
        buffers, step = self._prefill_buffers, self.metadata
        assert buffers is not None and step is not None
        build_recorded(buffers, step.positions.shape[0], step.out_loc, self.top_k)
        self._staged = buffers.staging_slots, buffers.snapshots
        self.begin_layers(step, lengths=None)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: StepMetadata, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        """Prepare the replay of a recorded prefill step. The graph cannot wait for single layers of a load from the
        host cache, so the step waits here for all of them."""
        assert self._prefill_buffers is not None
        inputs = self._prefill_inputs(forward_batch)
        self._prefill_buffers.fill(**inputs, snapshots=None if self._staged is None else self._staged[1])
        self._recorded = True
        self.metadata = capture_metadata
        self.token_to_kv_pool.wait_for_layer(self.last_layer)

    def _snapshots_due(self, requests: int) -> tuple[Tensor | None, Tensor | None]:
        """Return staging slots and lengths, [requests, K], of a prefill step's snapshots.

        The layers write the states to staging slots, and the last layer copies them to the snapshot slots.
        """
        plan, self.prefill_plan, self._staged = self.prefill_plan, None, None
        if plan is None:
            return None, None
        # Padding requests take no snapshots.
        lengths, snapshots = pad(plan, (0, 0, 0, 0, 0, requests - plan.shape[0])).unbind(-1)
        due = snapshots > 0
        order = due.flatten().cumsum(0).view_as(snapshots)
        slots = torch.where(due, self.last_live_slot + order, -1).to(torch.int32)
        self._staged = slots.flatten(), snapshots.flatten().to(torch.int32)
        return slots, lengths

    # Snapshots of verify steps

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        model: Any,
        req_pool_indices: Tensor | None = None,
    ) -> None:
        """Note the snapshots that are due after a verify step. SGLang calls this.

        The copies are made in `commit_snapshots`, once the draft model has written its entries of the accepted tokens.
        Until then nothing that they copy is overwritten: a snapshot at 128 n contains only state before 128 n.

        Args:
            last_correct_step_indices: unused.
            mamba_track_indices: [B] planned snapshot slots, 0 for none.
            mamba_steps_to_track: [B], -1 for requests that passed no multiple of 128.
            model: unused.
            req_pool_indices: unused.
        """
        self._due_snapshots = None
        if mamba_track_indices is None or mamba_steps_to_track is None:
            return
        assert self._decode_buffers is not None
        to = mamba_track_indices.masked_fill(mamba_steps_to_track < 0, -1).to(torch.int32)
        self._due_snapshots = self._decode_buffers.slots[: to.shape[0]], to

    def commit_snapshots(self) -> None:
        """Take the snapshots of the requests that passed a multiple of 128 in this round. Call it after the draft model
        has processed the accepted tokens."""
        due, self._due_snapshots = self._due_snapshots, None
        if due is not None:
            self.state.store(*due)

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
        window = None if step.is_decode else self._window(step.window_size)
        for layer, weights, kv in layers:
            append_layer(self.schemas[layer], self.tables[layer], weights, Projections(kv), step, window)
        self.store_snapshots(step)
        self.commit_snapshots()

    # One layer

    def query_buffer(self, tokens: int) -> Tensor:
        """Return a buffer `[tokens, H, 512]` for the queries of a layer, in the form that the step's attention kernel
        expects. The layer's heads come first. Padding heads are zero and must stay so."""
        heads = self.kernel.query_heads(self.heads) if self.kernel else self.heads
        if heads == self.heads:
            return torch.empty(tokens, heads, ENTRY_DIM, dtype=self.dtype, device=self.device)
        return self._buffer("query", tokens, heads * ENTRY_DIM, self.dtype).view(tokens, heads, ENTRY_DIM)

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
        step = self.step_of_tokens(q)
        window = None
        if not step.is_decode:
            if not self._recorded:
                self.token_to_kv_pool.wait_for_layer(layer.layer_id)
            window = self._window(step.window_size)
        projections = Projections(k.flatten(1), inputs.kv_score, inputs.index_kv_score)
        tables = self.tables[layer.layer_id]
        append_layer(self.schemas[layer.layer_id], tables, inputs.weights, projections, step, window)
        if layer.layer_id == self.last_layer:
            self.store_snapshots(step)
        return self._read(q, layer, inputs, step, tables.ring if window is None else window)

    def store_snapshots(self, step: StepMetadata) -> None:
        """Take the step's snapshots. Those of a verify step are taken later, since the draft model must process the
        accepted tokens first (`speculation`)."""
        if step.copy_src is not None:
            self.state.store(step.copy_src, step.copy_dst)
        staged, self._staged = self._staged, None
        if staged is not None:
            # CUDA graphs cannot contain the timer's events.
            with nullcontext() if self._recorded else self.req_to_token_pool.mamba_ckpt_pool.timer.measure():
                self.state.store(*staged)

    def step_of_tokens(self, tokens: Tensor) -> StepMetadata:
        """Return the metadata of the step with `tokens` [T, ...]. A recorded step has padding tokens after those of its
        batch. They are left out for a caller outside the graph.

        Raises:
            RuntimeError: the metadata belongs to a step of another size.
        """
        if self._recorded and self.metadata is not None and tokens.shape[0] < self.metadata.positions.shape[0]:
            return self.metadata.first_tokens(tokens)
        if self.metadata is None or self.metadata.positions.shape[0] != tokens.shape[0]:
            raise RuntimeError(
                f"no metadata for a step of {tokens.shape[0]} tokens: init_forward_metadata was not called"
            )
        return self.metadata

    def _read(self, q: Tensor, layer: Any, inputs: LayerInputs, step: StepMetadata, window: Tensor) -> LayerOutput:
        schema, table = self.schemas[layer.layer_id], self.tables[layer.layer_id].entries
        entries = None
        if schema.has_indexer:
            entries = EntryList(table, self._select(layer.layer_id, inputs, step), step.csa_lens)
        elif schema.ratio:
            entries = EntryList(table, *step.hca_list())
        read = AttendInputs(
            sink=inputs.sink[: q.shape[1]],
            heads=self.heads,
            window=EntryList(window, step.window_indices, step.window_lens),
            entries=entries,
            positions=step.positions,
            rope=inputs.weights.rope,
            scale=layer.scaling,
            kv_format=schema.kv_format,
            ratio=schema.ratio,
        )
        assert self.kernel is not None, "a layer comes after the beginning of its step"
        inputs.wait_for_query()
        return self.kernel.attend(q, read, output_is_rotated=inputs.accepts_rotated_output)

    def _select(self, layer: int, inputs: LayerInputs, step: StepMetadata) -> Tensor:
        """Return the buffer indices of the entries that each token selects, int32 [T, top_k], -1 for none."""
        assert inputs.index_query is not None
        inputs.index_query.wait()
        tokens, width = step.positions.shape[0], self._score_width(step.block_table)
        indices = self._buffer("indices", tokens, self.top_k, torch.int32)
        # With less scratch than tokens the op works in slices. A decode step has few tokens and needs one slice.
        at_once = tokens if step.is_decode else self._scored_at_once(tokens, step.block_table)
        torch.ops.dsv4_sglang.index_topk(
            inputs.index_query.query,
            inputs.index_query.weights,
            self.tables[layer].index_keys,
            step.block_table,
            step.token_request,
            step.positions,
            inputs.weights.rope,
            self.schemas[layer].key_format.code,
            self._buffer("scores", at_once, width, torch.float32),
            indices,
        )
        return indices

    # Memory of a step

    def _window(self, entries: int) -> Tensor:
        """Return a KV buffer of `entries` window entries. All layers share it, since a layer reads only entries that it
        wrote in the same step."""
        if self._recorded_workspace is not None and self._recorded_workspace.shape[1] >= entries:
            return self._recorded_workspace[:, :entries]
        if self._workspace is None or self._workspace.shape[1] < entries:
            self._workspace = make_kv_buffers(1, 1, entries, self.state.layout.ring_format, torch.device(self.device))[
                0
            ]
        return self._workspace[:, :entries]

    def free_scratch(self) -> None:
        """Free the scratch that grows on demand. The scratch of CUDA graphs stays."""
        self._workspace = None
        self._scratch.clear()
        for kernel in self.kernels:
            kernel.free_scratch()

    def _scored_at_once(self, tokens: int, block_table: Tensor) -> int:
        """Return the number of tokens of a prefill step whose index scores are computed at once."""
        scratch = RECORDED_SCRATCH_BYTES if self._recorded else SCRATCH_BYTES
        return min(tokens, max(1, scratch // max(1, 4 * self._score_width(block_table))))

    def _score_width(self, block_table: Tensor) -> int:
        """Return the scores per token: one per entry of the longest context, or none if all entries are selected."""
        visible = block_table.shape[1] * (BLOCK_TOKENS // CSA_RATIO)
        return visible if visible > self.top_k else 0

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return scratch `[rows, columns]`: the scratch of recorded graphs, which is never freed, or one that grows.

        It is initialised with zeros. Each name is used with a single number of columns, since padding columns must stay
        zero.
        """
        needed = rows * columns
        for scratch in (*self._graph_scratch.get(name, ()), self._scratch.get(name)):
            if scratch is not None and scratch.numel() >= needed:
                return scratch[:needed].view(rows, columns)
        self._scratch[name] = torch.zeros(needed, dtype=dtype, device=self.device)
        return self._scratch[name].view(rows, columns)
