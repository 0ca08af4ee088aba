"""Attention backend of DeepSeek-V4.1. A `V41Step` per step holds what its layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dsv4_sglang.attention.base import LayerOutput
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.cache.v41_step import V41LayerWeights, V41Step
from dsv4_sglang.model.v41 import MODEL_TYPES, V41Config, v41_schedule
from dsv4_sglang.srt.attention.backend import HybridCacheBackend
from dsv4_sglang.srt.attention.layer_ops import LayerOps
from dsv4_sglang.srt.sglang.models import model_config

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CompressedKVPool


class V41LayerInputs(NamedTuple):
    """Inputs of a layer besides its query and its raw window projection.

    Attributes:
        weights: weights of the layer's cache ops.
        sink: fp32, at least as many values as the query has heads.
        compressor: input of `V41Step.append`, in a layer with its own entries.
        keys_of: maps latents [T, 512] to raw index keys [T, 128], in a layer with its own entries.
        index_query: [T, Hi, 128] without RoPE, in a layer that selects.
        index_weights: [T, Hi], in a layer that selects.
    """

    weights: V41LayerWeights
    sink: Tensor
    compressor: Tensor | None
    keys_of: Callable[[Tensor], Tensor] | None
    index_query: Tensor | None
    index_weights: Tensor | None


class V41LayerOps(LayerOps):
    """The cache ops of all layers of a V4.1 model. They belong to a `V41Step`, and have no choice of kernels."""

    def __init__(self, backend: V41Backend, blocks: CompressedKVPool) -> None:
        super().__init__(backend.schemas, [], [], backend.heads, backend.scratch)
        self.config, self.schedule, self.state, self.pools = (
            backend.config,
            backend.schedule,
            backend.state,
            blocks.pools,
        )
        self.step: V41Step | None = None

    def begin_step(self, step: StepMetadata, most_blocks: int | None = None, *, recorded: bool = False) -> None:
        self.step = V41Step(self.config, self.schedule, self.state, self.pools, step)


class V41Backend(HybridCacheBackend):
    """Attention backend for prefill and decode steps of all layers of a V4.1 model."""

    def __init__(self, runner: Any) -> None:
        config = model_config(runner.model_config.hf_config)
        assert isinstance(config, V41Config)
        self.config, self.schedule = config, v41_schedule(config)
        super().__init__(runner)

    def make_layers(self, blocks: CompressedKVPool) -> LayerOps:
        self.ops = V41LayerOps(self, blocks)
        return self.ops

    def forward(  # type: ignore[override]  # the inputs of a layer depend on the model
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        inputs: V41LayerInputs,
    ) -> LayerOutput:
        """Do the same as `HybridCacheBackend.forward`, with the inputs of a V4.1 layer."""
        metadata, step, number = self.step_of_tokens(q), self.ops.step, layer.layer_id
        assert step is not None, "a layer comes after the beginning of its step"
        if not metadata.is_decode:
            # Shared entries belong to an earlier layer, which has then arrived too.
            self.token_to_kv_pool.wait_for_layer(number)
        latents = step.append(number, inputs.weights, k.flatten(1), inputs.compressor)
        if latents is not None:
            assert inputs.keys_of is not None
            step.append_keys(number, inputs.weights, inputs.keys_of(latents))
        if inputs.index_query is not None:
            assert inputs.index_weights is not None
            step.select(number, inputs.weights, inputs.index_query, inputs.index_weights)
        if number == self.last_layer:
            self.snapshots.store(metadata, timed=not self.recorder.active)
        out = step.attend(number, inputs.weights, q, inputs.sink[: q.shape[1]], layer.scaling)
        return LayerOutput(out, rotated=False)


def backend_class(hf_config: Any) -> type[HybridCacheBackend]:
    """Return the backend class for a model, from SGLang's config."""
    return V41Backend if hf_config.model_type in MODEL_TYPES else HybridCacheBackend
