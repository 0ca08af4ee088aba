"""The attention backend: one append, on CSA layers one selection, one read a layer; metadata once a step."""

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
from dsv4_sglang.attention.registry import begin_step, make_kernels
from dsv4_sglang.attention.step_buffers import DecodeBuffers, PrefillBuffers
from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.step import StepMetadata, prefill_window_size
from dsv4_sglang.formats import make_kv_buffers
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO
from dsv4_sglang.srt.attention.prefill_graphs import MOST_REQUESTS
from dsv4_sglang.srt.prefix_cache.snapshot_schedule import PrefillPlanTaker

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CompressedKVPool

# Index scores of a prefill step that exist at a time: of an eager step, and of one in a CUDA graph, whose tokens have a
# score for each entry of the longest context.
SCRATCH_BYTES = 256 << 20
RECORDED_SCRATCH_BYTES = 128 << 20


class IndexQuery(NamedTuple):
    """The indexer's side of a CSA layer: raw queries `[T, Hi, 128]`, head weights `[T, Hi]` fp32.

    The weights come without the scale factors 128^-0.5 and Hi^-0.5, which do not change what is selected (SPEC 4.1).
    `wait` must be called before either is read: another stream may still compute the query.
    """

    query: Tensor
    weights: Tensor
    wait: Callable[[], None]


class LayerInputs(NamedTuple):
    """What a layer hands to the backend besides its query and its raw window projection; `kv_score` and
    `index_kv_score` as in `cache.append.Projections`.

    `sink` [at least as many as `query_buffer` has heads] fp32, of which the layer's own come first.
    `wait_for_query` must be called before the query is read: another stream may still compute it.
    `accepts_rotated_output`: the layer applies the inverse RoPE to an output itself, which spares a launch where the
    attention kernel does not do it on the way.
    """

    weights: LayerWeights
    sink: Tensor
    wait_for_query: Callable[[], None]
    accepts_rotated_output: bool
    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_query: IndexQuery | None = None


class HybridCacheBackend(AttentionBackend, PrefillPlanTaker):
    """Serves prefill, decode and verify steps of all layers of a model: the served one, or the draft model behind it
    (docs/speculation.md). CUDA graphs record decode steps, verify steps and short prefill steps, metadata included.

    `draft_step`: which of the decode steps of a turn of the draft model; the served model has no such steps.
    """

    # With speculation the host learns lengths a turn late, and no step waits for them.
    needs_cpu_seq_lens = False
    # A recorded prefill step reads its metadata from `PrefillBuffers`, which each replay fills.
    use_captured_forward_metadata_for_breakable_cuda_graph = True

    def __init__(self, runner: Any, draft_step: int = 0) -> None:
        super().__init__()
        config = runner.model_config.hf_config
        self.is_draft, self.draft_step = runner.is_draft_worker, draft_step
        # DSPARK drafts a block at once; what a request is verified with has the last accepted token, too.
        self.drafts_blocks = runner.is_draft_worker and runner.spec_algorithm.is_dspark()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        live = runner.req_to_token_pool.mamba_pool
        self.state, self.last_live_slot, self.staging = live.storage, live.size, live.staging
        blocks = runner.token_to_kv_pool.full_kv_pool
        self.schemas = blocks.layout.schemas
        self.draft_tokens = self.schemas[0].draft_tokens
        # Drafts may lie behind the end of the context. Layers of a draft model have no entries.
        longest = runner.model_config.context_len + self.draft_tokens
        self.max_blocks = 0 if self.is_draft else -(-longest // BLOCK_TOKENS)
        # The one behind which a step's snapshots are complete: the draft model runs after the served one.
        self.last_layer = len(self.schemas) - 1
        self.top_k = config.index_topk
        self.metadata: StepMetadata | None = None
        self.heads, self.dtype = config.num_attention_heads // get_parallel().attn_tp_size, runner.dtype
        self.kernels: list[AttentionKernel] = []
        self.kernel: AttentionKernel | None = None
        self.prepare_layers(blocks)
        self._crossings: tuple[Tensor, Tensor] | None = None
        self._graph_buffers: DecodeBuffers | None = None
        self._decode_buffers: DecodeBuffers | None = None
        self._prefill_buffers: PrefillBuffers | None = None
        self._recorded = False
        """The metadata is that of a prefill step in a CUDA graph."""
        self._verify_mask = self._make_verify_mask(1)
        self._workspace: Tensor | None = None
        self._recorded_workspace: Tensor | None = None
        self._graph_scratch: dict[str, list[Tensor]] = {}
        self._scratch: dict[str, Tensor] = {}
        self._staged: tuple[Tensor, Tensor] | None = None

    def prepare_layers(self, blocks: CompressedKVPool) -> None:
        """What writes and reads the layers of this model."""
        self.tables = [
            LayerTables(self.state.ring(i), self.state.compressor_state(i), blocks.entries(i), blocks.keys(i))
            for i in range(len(self.schemas))
        ]
        assert isinstance(blocks.layout, CacheLayout)
        device = resolve_device(self.device)  # registers its ops
        self.kernels = make_kernels(device, blocks.blocks, self.heads, self.dtype, blocks.layout.kv_format)

    # Metadata of a step

    def begin_layers(self, step: StepMetadata, lengths: list[int] | None) -> None:
        """The last thing before the layers of a step; `lengths`: tokens of each request after a prefill step, None in
        any other."""
        self.kernel = begin_step(self.kernels, step, lengths)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graph_buffers = self._make_buffers(max_bs, max_num_tokens // max_bs)
        self._verify_mask = self._make_verify_mask(max_bs)
        self._reserve_scratch(max_num_tokens, max_num_tokens, self._graph_buffers.block_table)

    def _reserve_scratch(self, tokens: int, scored_tokens: int, block_table: Tensor) -> None:
        """Allocate what recorded steps of `tokens` tokens or fewer write to; `scored_tokens` are scored at once."""
        heads = max(kernel.query_heads(self.heads) for kernel in self.kernels)
        if heads > self.heads:
            self._reserve("query", tokens * heads * ENTRY_DIM, self.dtype)
        if not self.is_draft:
            self._reserve("rows", tokens * self.top_k, torch.int32)
            self._reserve("scores", scored_tokens * self._score_width(block_table), torch.float32)

    def _reserve(self, name: str, elements: int, dtype: torch.dtype) -> None:
        """Graphs that were recorded with a smaller tensor keep theirs."""
        reserved = self._graph_scratch.setdefault(name, [])
        if not reserved or reserved[-1].numel() < elements:
            reserved.append(torch.zeros(elements, dtype=dtype, device=self.device))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    @property
    def verify_mask(self) -> VerifyMask | None:
        """SGLang's mask of a tree of drafts, which no step here reads: drafts are a chain. It is filled all the same,
        and one that nobody has made would have a column for every token of the context."""
        return self._verify_mask

    def _make_verify_mask(self, requests: int) -> VerifyMask | None:
        """None for a draft model, and without speculation."""
        return maybe_create_verify_mask(
            is_draft_runner=self.is_draft,
            skip_prefill=False,
            max_bs=requests,
            max_context_len=0,  # of another mode
            num_draft_tokens=self.draft_tokens,
            device=self.device,
            is_read=False,
        )

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: a step's metadata depends on lengths alone, not on the drafts."""

    def _make_buffers(self, requests: int, each: int) -> DecodeBuffers:
        ring_rows = self.state.layout.ring_rows
        return DecodeBuffers(requests, self.max_blocks, self.device, ring_rows, each, sees_block=self.drafts_blocks)

    def _tokens_of(self, mode: Any) -> tuple[int, int]:
        """Tokens of a request in a step that is no prefill, and `before` of `build_decode`: SGLang's lengths count the
        token of a decode step; in the turns of the draft model and in a verify step they are those before the turn, and
        behind it those with all drafts. The block that DSPARK drafts has the mode of a verify step."""
        if mode.is_target_verify():
            return self.draft_tokens - self.drafts_blocks, 0
        if mode.is_draft_extend_v2():
            return self.draft_tokens, -self.draft_tokens
        return 1, self.draft_step if self.is_draft else -1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """All of a prefill step; of another what a CUDA graph must not read (see `gather_decode`)."""
        mode = forward_batch.forward_mode
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
        # With attention split over some of the processes SGLang rounds the tokens of a step up to their number.
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
        """Return what an eager and a recorded prefill step take of a batch, and stage the snapshots that are due."""
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
        """The last thing before the layers of any step, and the first that a CUDA graph records."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or mode.is_extend_without_speculative():
            return
        assert self._decode_buffers is not None, "a decode step begins with gather_tables"
        tokens = forward_batch.seq_lens.shape[0] * self._decode_buffers.tokens_per_request
        self.metadata = build_decode(
            self._decode_buffers,
            seq_lens=forward_batch.seq_lens,
            # For the draft model SGLang has those of all its steps; its layers write no entries.
            out_loc=forward_batch.out_cache_loc[:tokens],
            track_mask=forward_batch.mamba_track_mask,
            track_slots=forward_batch.mamba_track_indices,
            top_k=self.top_k,
            length_offset=self._tokens_of(mode)[1],
        )
        self.begin_layers(self.metadata, lengths=None)

    def gather_tables(self, forward_batch: Any, like: HybridCacheBackend | None = None) -> None:
        """Copy what a step that is no prefill needs of SGLang's tables of all requests.

        `like`: a backend that has just done so for the same requests, in a layer without entries; its slots serve.
        SGLang's views of a batch may have more rows than the batch.
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
        """SGLang's call before it records a prefill step, the largest first. The batch that it records with is a dummy:
        all of its tokens are padding tokens, so that recording writes nothing."""
        tokens, self._recorded = forward_batch.positions.shape[0], True
        if self._prefill_buffers is None:
            staging_slots = range(self.last_live_slot + 1, self.last_live_slot + 1 + self.staging)
            buffers = PrefillBuffers(tokens, MOST_REQUESTS, self.max_blocks, staging_slots, self.device)
            self._prefill_buffers = buffers
            at_once = self._scored_at_once(tokens, buffers.block_table)
            self._reserve_scratch(tokens, at_once, buffers.block_table)
            self._window(prefill_window_size(tokens, MOST_REQUESTS + 1))
            self._recorded_workspace = self._workspace
        self._prefill_buffers.clear()
        self.metadata = recorded_step(self._prefill_buffers, tokens, forward_batch.out_cache_loc)
        self.begin_recorded()
        return self.metadata

    def begin_recorded(self) -> None:
        """The first thing that the graph of a prefill step records; nothing in any other step."""
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
        """SGLang's call before it replays a recorded prefill step. The graph waits for no layer of the host cache: the
        step waits here for all of them."""
        assert self._prefill_buffers is not None
        inputs = self._prefill_inputs(forward_batch)
        self._prefill_buffers.fill(**inputs, snapshots=None if self._staged is None else self._staged[1])
        self._recorded = True
        self.metadata = capture_metadata
        self.token_to_kv_pool.wait_for_layer(self.last_layer)

    def _snapshots_due(self, requests: int) -> tuple[Tensor | None, Tensor | None]:
        """Staging slots and lengths, [requests, K], of the snapshots of a prefill step (`prefix.schedule`).

        The layers write the states to staging slots; the last one moves them to their snapshots.
        """
        plan, self.prefill_plan, self._staged = self.prefill_plan, None, None
        if plan is None:
            return None, None
        # Padding requests take none.
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
        """SGLang's call behind a verify step: `mamba_steps_to_track` [B] is -1 where no multiple of 128 was passed,
        `mamba_track_indices` [B] the snapshots planned (0: none).

        The copies wait for `take_crossings`: the draft model's rows of the accepted tokens are not there yet. Nothing
        that is copied is rejected or lost until then: what a snapshot at 128 n keeps lies before 128 n.
        """
        self._crossings = None
        if mamba_track_indices is None or mamba_steps_to_track is None:
            return
        assert self._decode_buffers is not None
        to = mamba_track_indices.masked_fill(mamba_steps_to_track < 0, -1).to(torch.int32)
        self._crossings = self._decode_buffers.slots[: to.shape[0]], to

    def take_crossings(self) -> None:
        """Take the snapshots of the requests that passed a multiple of 128 in this turn; the draft model has read
        what was accepted."""
        crossings, self._crossings = self._crossings, None
        if crossings is not None:
            self.state.store(*crossings)

    # Rows of a draft model that runs in no step of the served model (DSPARK)

    def write_context(
        self, layers: Iterable[tuple[int, LayerWeights, Tensor]], out_loc: Tensor, requests: int | None
    ) -> None:
        """Write the window rows of layers for the tokens of the served model's step that has just run: of each its
        number in the cache, its weights, and its raw projections [T, 512]. Then take the snapshots that are due.

        `out_loc` [T]: the tokens' pool slots. `requests`: of a verify step, None behind a prefill step. Rows of drafts
        that were rejected are written, too: they lie behind the request's length, and the ring has room for them.
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
        self.take_crossings()

    # One layer

    def query_buffer(self, tokens: int) -> Tensor:
        """`[tokens, H, 512]` to write a layer's queries to, where the attention kernel of the step takes them: the
        layer's heads come first, those behind them are zero and stay so."""
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
        """Write the step's rows of a layer, then read what its tokens see."""
        if forward_batch.forward_mode.is_idle():
            # An idle rank of DP attention joins a step of the others with tokens that are nobody's.
            return LayerOutput(torch.zeros_like(q[:, : self.heads]), rotated=False)
        step = self.step_of_tokens(q)
        window = None
        if not step.is_decode:
            if not self._recorded:
                self.token_to_kv_pool.wait_for_layer(layer.layer_id)
            window = self._window(step.window_size)
        self._append(k, layer.layer_id, inputs, step, window)
        if layer.layer_id == self.last_layer:
            self.store_snapshots(step)
        return self._read(q, layer, inputs, step, self.tables[layer.layer_id].ring if window is None else window)

    def store_snapshots(self, step: StepMetadata) -> None:
        """Take the step's snapshots. Those of a verify step are taken later: the draft model has yet to read what was
        accepted (`speculation`)."""
        if step.copy_src is not None:
            self.state.store(step.copy_src, step.copy_dst)
        staged, self._staged = self._staged, None
        if staged is not None:
            # A graph cannot hold the timer's events.
            with nullcontext() if self._recorded else self.req_to_token_pool.mamba_ckpt_pool.timer.measure():
                self.state.store(*staged)

    def step_of_tokens(self, tokens: Tensor) -> StepMetadata:
        """The metadata of the step of `tokens` [T, ...]. A recorded step has padding tokens behind those of its batch,
        which a caller outside the graph leaves out."""
        if self._recorded and self.metadata is not None and tokens.shape[0] < self.metadata.positions.shape[0]:
            return self.metadata.first_tokens(tokens)
        if self.metadata is None or self.metadata.positions.shape[0] != tokens.shape[0]:
            raise RuntimeError(
                f"no metadata for a step of {tokens.shape[0]} tokens: init_forward_metadata was not called"
            )
        return self.metadata

    def _append(self, kv: Tensor, layer: int, inputs: LayerInputs, step: StepMetadata, window: Tensor | None) -> None:
        projections = Projections(kv.flatten(1), inputs.kv_score, inputs.index_kv_score)
        append_layer(self.schemas[layer], self.tables[layer], inputs.weights, projections, step, window)

    def _read(self, q: Tensor, layer: Any, inputs: LayerInputs, step: StepMetadata, window: Tensor) -> LayerOutput:
        schema, table = self.schemas[layer.layer_id], self.tables[layer.layer_id].entries
        entries = None
        if schema.has_indexer:
            entries = EntryList(table, self._select(layer.layer_id, inputs, step), step.csa_lens)
        elif schema.ratio:
            entries = EntryList(table, step.hca_indices, step.hca_lens)
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
        """Table rows `[T, top_k]` of the entries that the tokens read."""
        assert inputs.index_query is not None
        inputs.index_query.wait()
        tokens, width = step.positions.shape[0], self._score_width(step.block_table)
        rows = self._buffer("rows", tokens, self.top_k, torch.int32)
        # With less scratch than tokens the op scores in slices; a decode step has few tokens and scores at once.
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
            rows,
        )
        return rows

    # Memory of a step

    def _window(self, rows: int) -> Tensor:
        """Row table of `rows` rows, shared by all layers: a step reads it in the layer that wrote it."""
        if self._recorded_workspace is not None and self._recorded_workspace.shape[1] >= rows:
            return self._recorded_workspace[:, :rows]
        if self._workspace is None or self._workspace.shape[1] < rows:
            self._workspace = make_kv_buffers(1, 1, rows, self.state.layout.kv_format, torch.device(self.device))[0]
        return self._workspace[:, :rows]

    def forget_scratch(self) -> None:
        """Give back what grows as steps need it. Graphs write to what `init_cuda_graph_state` has made."""
        self._workspace = None
        self._scratch.clear()
        for kernel in self.kernels:
            kernel.forget_scratch()

    def _scored_at_once(self, tokens: int, block_table: Tensor) -> int:
        """Tokens of a prefill step whose index scores exist at a time."""
        scratch = RECORDED_SCRATCH_BYTES if self._recorded else SCRATCH_BYTES
        return min(tokens, max(1, scratch // max(1, 4 * self._score_width(block_table))))

    def _score_width(self, block_table: Tensor) -> int:
        """Scores of a token: one an entry of the longest context, none where every entry is read."""
        visible = block_table.shape[1] * (BLOCK_TOKENS // CSA_RATIO)
        return visible if visible > self.top_k else 0

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Scratch `[rows, columns]`: what recorded graphs write to, which is never let go, or what grows as needed.

        It begins as zeros. A name is used with one number of columns only, where some of them must stay zero.
        """
        needed = rows * columns
        for scratch in (*self._graph_scratch.get(name, ()), self._scratch.get(name)):
            if scratch is not None and scratch.numel() >= needed:
                return scratch[:needed].view(rows, columns)
        self._scratch[name] = torch.zeros(needed, dtype=dtype, device=self.device)
        return self._scratch[name].view(rows, columns)
