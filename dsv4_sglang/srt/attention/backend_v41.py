"""The attention backend of DeepSeek-V4.1: what layers share of a step lives in a `V41Step`, one a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dsv4_sglang.attention.base import LayerOutput
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.cache.v41_step import V41LayerWeights, V41Step
from dsv4_sglang.model.v41 import MODEL_TYPES, V41Config, v41_schedule
from dsv4_sglang.srt.attention.backend import HybridCacheBackend
from dsv4_sglang.srt.integration import compat

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CompressedKVPool


class V41LayerInputs(NamedTuple):
    """What a layer hands to the backend besides its query and its raw window projection.

    `sink` [at least as many as the query has heads] fp32. Of a layer with entries of its own `compressor`, as
    `V41Step.append` takes it, and `keys_of`, from latents [T, 512] to raw index keys [T, 128]; of one that selects
    `index_query` [T, Hi, 128], not rotated, and `index_weights` [T, Hi].
    """

    weights: V41LayerWeights
    sink: Tensor
    compressor: Tensor | None
    keys_of: Callable[[Tensor], Tensor] | None
    index_query: Tensor | None
    index_weights: Tensor | None


class V41Backend(HybridCacheBackend):
    """Serves prefill and decode steps of all layers of a V4.1 model."""

    def __init__(self, runner: Any) -> None:
        config = compat.model_config(runner.model_config.hf_config)
        assert isinstance(config, V41Config)
        self.config, self.schedule = config, v41_schedule(config)
        super().__init__(runner)

    def prepare_layers(self, blocks: CompressedKVPool) -> None:
        self.pools = blocks.pools
        self.step: V41Step | None = None

    def begin_layers(self, step: StepMetadata, lengths: list[int] | None) -> None:
        self.step = V41Step(self.config, self.schedule, self.state, self.pools, step)

    def forward(  # type: ignore[override]  # what a layer hands over is of its model
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
        """Write the step's rows of a layer, then read what its tokens see."""
        metadata, step, number = self.step_of_tokens(q), self.step, layer.layer_id
        assert step is not None, "a layer comes after the beginning of its step"
        if not metadata.is_decode:
            # Entries that the layer shares are of a layer before it, which has arrived as well then.
            self.token_to_kv_pool.wait_for_layer(number)
        latents = step.append(number, inputs.weights, k.flatten(1), inputs.compressor)
        if latents is not None:
            assert inputs.keys_of is not None
            step.append_keys(number, inputs.weights, inputs.keys_of(latents))
        if inputs.index_query is not None:
            assert inputs.index_weights is not None
            step.select(number, inputs.weights, inputs.index_query, inputs.index_weights)
        if number == self.last_layer:
            self.store_snapshots(metadata)
        out = step.attend(number, inputs.weights, q, inputs.sink[: q.shape[1]], layer.scaling)
        return LayerOutput(out, rotated=False)


def backend_class(hf_config: Any) -> type[HybridCacheBackend]:
    """The backend of a model by SGLang's config."""
    return V41Backend if hf_config.model_type in MODEL_TYPES else HybridCacheBackend
