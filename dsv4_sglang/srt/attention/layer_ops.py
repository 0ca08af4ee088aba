"""The cache ops of a model's layers. Each layer runs one append, one selection (CSA layers only) and one attention
kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  registers torch.ops.dsv4_sglang
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, EntryList, LayerOutput
from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.cache.schema import LayerCacheSchema
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.srt.attention.step_scratch import RECORDED_SCRATCH_BYTES, SCRATCH_BYTES, StepScratch


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


class LayerOps:
    """The cache ops of all layers of a model.

    Args:
        schemas: schema of each layer.
        tables: cache tensors of each layer.
        kernels: attention kernels, fastest first. The last one takes any step.
        heads: query heads of a layer in this process.
        scratch: scratch memory of the backend.
    """

    def __init__(
        self,
        schemas: Sequence[LayerCacheSchema],
        tables: Sequence[LayerTables],
        kernels: Sequence[AttentionKernel],
        heads: int,
        scratch: StepScratch,
    ) -> None:
        self.schemas, self.tables, self.kernels = schemas, tables, kernels
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
        self.score_bytes = RECORDED_SCRATCH_BYTES if recorded else SCRATCH_BYTES
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
        self, layer: int, weights: LayerWeights, inputs: Projections, step: StepMetadata, window: Tensor | None
    ) -> None:
        """Write all cache contents that a layer keeps of the step's tokens. Arguments as in `append_layer`."""
        append_layer(self.schemas[layer], self.tables[layer], weights, inputs, step, window)

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
        schema, tables = self.schemas[layer], self.tables[layer]
        entries = None
        if schema.ratio:
            assert tables.entries is not None
            lists = (self._select(layer, inputs, step), step.csa_lens) if schema.has_indexer else step.hca_list()
            entries = EntryList(tables.entries, *lists)
        read = AttendInputs(
            sink=inputs.sink[: q.shape[1]],
            heads=self.heads,
            window=EntryList(tables.ring if window is None else window, step.window_indices, step.window_lens),
            entries=entries,
            positions=step.positions,
            rope=inputs.weights.rope,
            scale=scale,
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
        tokens = step.positions.shape[0]
        indices = self.scratch.indices(tokens)
        # With less scratch than tokens the op works in slices. A decode step has few tokens and needs one slice.
        at_once = tokens if step.is_decode else self.scratch.scored_at_once(tokens, step.block_table, self.score_bytes)
        torch.ops.dsv4_sglang.index_topk(
            inputs.index_query.query,
            inputs.index_query.weights,
            self.tables[layer].index_keys,
            step.block_table,
            step.token_request,
            step.positions,
            inputs.weights.rope,
            self.schemas[layer].key_format.code,
            self.scratch.scores(at_once, step.block_table),
            indices,
        )
        return indices

    def free_scratch(self) -> None:
        """Free the scratch memory of the attention kernels that grows on demand."""
        for kernel in self.kernels:
            kernel.free_scratch()
