"""The cache ops of a model's layers. Each layer runs one append, a selection if it has an indexer, and one attention
kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  registers torch.ops.dsv4_sglang
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, EntryList, LayerOutput
from dsv4_sglang.attention.registry import make_kernels
from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.layer_spec import LayerKVSpec, Selection, source_of
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.srt.attention.step_scratch import RECORDED_SCRATCH_BYTES, SCRATCH_BYTES, StepScratch

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CompressedKVPool


# The last arguments of `index_topk` in a selection of one level.
NO_CANDIDATES = 0, None, None


class IndexQuery(NamedTuple):
    """Indexer inputs of a layer that selects entries: raw queries `[T, Hi, 128]` and head weights `[T, Hi]` fp32.

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
        index_query: indexer inputs of a layer that selects entries.
        keys_of: as in `cache.append.append_layer`.
    """

    weights: LayerWeights
    sink: Tensor
    wait_for_query: Callable[[], None]
    accepts_rotated_output: bool
    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_query: IndexQuery | None = None
    keys_of: Callable[[Tensor], Tensor] | None = None


def make_scratch(
    specs: Sequence[LayerKVSpec], device: torch.device | str, dtype: torch.dtype, top_k: int
) -> StepScratch:
    """Return the scratch memory of the steps of a model.

    Args:
        specs: spec of each layer.
        device: device of the model.
        dtype: dtype of the queries.
        top_k: entries that a token selects; 0 for layers that attend to no entries.
    """
    selecting = [spec for spec in specs if spec.selection is Selection.TOP_K]
    return StepScratch(
        device,
        dtype,
        top_k,
        specs[0].ring_format,
        candidate_blocks=max((spec.candidates.blocks for spec in selecting if spec.candidates), default=0),
        # The selection of keys without the transform is in Triton and PyTorch, which allocate (`triton_index`).
        scored_per_block=max((spec.entries_per_block for spec in selecting if spec.hadamard), default=0),
    )


def make_layers(state: StateStorage, blocks: CompressedKVPool, heads: int, scratch: StepScratch) -> LayerOps:
    """Collect the buffers of each layer, and create the attention kernels of a model.

    Args:
        state: state slots of the server.
        blocks: pool of compressed entries and index keys.
        heads: query heads of a layer in this process.
        scratch: scratch memory of the backend.
    """
    specs, device = blocks.layout.schemas, resolve_device(scratch.device)  # registers its ops
    tables = [
        LayerTables(state.ring(layer), state.compressor_state(layer), blocks.entries(layer), blocks.keys(layer))
        for layer in range(len(specs))
    ]
    kernels = make_kernels(device, blocks.blocks, heads, scratch.dtype, specs[0].ring_format)
    return LayerOps(specs, tables, kernels, heads, scratch)


class LayerOps:
    """The cache ops of all layers of a model.

    Args:
        specs: spec of each layer.
        tables: cache tensors of each layer.
        kernels: attention kernels, fastest first. The last one takes any step.
        heads: query heads of a layer in this process.
        scratch: scratch memory of the backend.
    """

    def __init__(
        self,
        specs: Sequence[LayerKVSpec],
        tables: Sequence[LayerTables],
        kernels: Sequence[AttentionKernel],
        heads: int,
        scratch: StepScratch,
    ) -> None:
        self.specs, self.tables, self.kernels = specs, tables, kernels
        # For each layer, the one whose entries it attends to.
        self.sources = [source_of(specs, layer) for layer in range(len(specs))]
        # Their ratios, 0 without entries.
        self.ratios = [specs[source].ratio for source in self.sources]
        self.heads, self.scratch = heads, scratch
        # Attention kernel of the current step.
        self.kernel: AttentionKernel | None = None
        # Maximum size of the index scores that the current prefill step computes at a time.
        self.score_bytes = SCRATCH_BYTES

    def begin_step(self, step: StepMetadata, most_blocks: int | None = None, *, recorded: bool = False) -> None:
        """Prepare for the layers of a step.

        Args:
            step: metadata of the step.
            most_blocks: upper bound of the number of blocks of all requests after a prefill step, None in other steps
                and if there is no such bound.
            recorded: the step is a prefill step in a CUDA graph.
        """
        self.score_bytes, self.scratch.recorded = RECORDED_SCRATCH_BYTES if recorded else SCRATCH_BYTES, recorded
        self.kernel = next(kernel for kernel in self.kernels if kernel.begin_step(step, most_blocks))

    @property
    def padded_heads(self) -> int:
        """Largest number of heads of a query buffer, or 0 if no attention kernel pads them."""
        most = max((kernel.query_heads(self.heads) for kernel in self.kernels), default=self.heads)
        return most if most > self.heads else 0

    def query_buffer(self, tokens: int) -> Tensor:
        """Return a buffer `[tokens, H, 512]` for the queries of a layer, in the form that the step's attention kernel
        expects. The layer's heads come first. Padding heads are zero and must stay so."""
        heads = self.kernel.query_heads(self.heads) if self.kernel else self.heads
        if heads == self.heads:
            return torch.empty(tokens, heads, ENTRY_DIM, dtype=self.scratch.dtype, device=self.scratch.device)
        return self.scratch.padded_query(tokens, heads)

    def append(
        self,
        layer: int,
        weights: LayerWeights,
        inputs: Projections,
        step: StepMetadata,
        window: Tensor | None,
        keys_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Write all cache contents that a layer keeps of the step's tokens. Arguments as in `append_layer`."""
        append_layer(self.specs[layer], self.tables[layer], weights, inputs, step, window, keys_of)

    def attend(
        self, q: Tensor, layer: int, scale: float, inputs: LayerInputs, step: StepMetadata, window: Tensor | None
    ) -> LayerOutput:
        """Compute the attention of a layer, after its append.

        Args:
            q: [T, H, 512] from `query_buffer`, queries.
            layer: number of the layer in the cache.
            scale: factor of the logits.
            inputs: other inputs of the layer.
            step: metadata of the step.
            window: window workspace of a prefill step; None in a decode step, which reads the ring.
        """
        spec, tables = self.specs[layer], self.tables[layer]
        read = AttendInputs(
            sink=inputs.sink[: q.shape[1]],
            heads=self.heads,
            window=EntryList(tables.ring if window is None else window, step.window_indices, step.window_lens),
            entries=self._entries(layer, inputs, step),
            positions=step.positions,
            rope=inputs.weights.rope,
            scale=scale,
            kv_format=spec.ring_format,
            entry_format=spec.entry_format,
            ratio=self.ratios[layer],
        )
        assert self.kernel is not None, "a layer comes after the beginning of its step"
        inputs.wait_for_query()
        return self.kernel.attend(q, read, output_is_rotated=inputs.accepts_rotated_output)

    def _entries(self, layer: int, inputs: LayerInputs, step: StepMetadata) -> EntryList | None:
        """Return the entries that each token of a layer attends to, None in a layer with a window only."""
        selection, source = self.specs[layer].selection, self.sources[layer]
        if selection is Selection.NONE:
            return None
        entries = self.tables[source].entries
        assert entries is not None, f"layer {layer} attends to the entries of layer {source}, which has none"
        if selection is Selection.ALL:
            return EntryList(entries, *step.hca_list())
        # The layers after one that selects reuse its selection: all layers share this buffer.
        indices = self.scratch.indices(step.positions.shape[0])
        if selection is Selection.TOP_K:
            self._select(layer, inputs, step, indices)
        return EntryList(entries, indices, step.entry_lens[self.ratios[layer]])

    def _select(self, layer: int, inputs: LayerInputs, step: StepMetadata, indices: Tensor) -> None:
        """Write the buffer indices of the entries that each token selects to `indices` [T, top_k], -1 for none."""
        assert inputs.index_query is not None
        inputs.index_query.wait()
        tokens, spec = step.positions.shape[0], self.specs[layer]
        candidates = self._candidates(layer, tokens) if spec.candidates else NO_CANDIDATES
        # With less scratch than tokens the op works in slices. A decode step has few tokens and needs one slice.
        at_once = tokens if step.is_decode else self.scratch.scored_at_once(tokens, step.block_table, self.score_bytes)
        torch.ops.dsv4_sglang.index_topk(
            inputs.index_query.query,
            inputs.index_query.weights,
            self.tables[self.sources[layer]].index_keys,
            step.block_table,
            step.token_request,
            step.positions,
            inputs.weights.rope,
            spec.key_format.code,
            self.scratch.scores(at_once, step.block_table),
            indices,
            self.ratios[layer],
            spec.hadamard,
            *candidates,
        )

    def _candidates(self, layer: int, tokens: int) -> tuple[int, Tensor | None, Tensor | None]:
        """Return the last arguments of `index_topk`: entries of a candidate block, the blocks to write, the blocks to
        select within."""
        candidates = self.specs[layer].candidates
        assert candidates is not None
        blocks = self.scratch.candidates(tokens)
        return candidates.block_size, blocks if candidates.chooses else None, None if candidates.chooses else blocks

    def free_scratch(self) -> None:
        """Free the scratch memory of the attention kernels that grows on demand."""
        for kernel in self.kernels:
            kernel.free_scratch()
