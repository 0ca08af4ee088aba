"""DeepSeek-V4 and V4.1 as SGLang builds them, with this package's layers."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models import deepseek_v4 as in_tree
from torch import Tensor

from dsv4_sglang.model.config import DSV4Config, ModelConfig
from dsv4_sglang.model.supported import CONFIGS
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.models.layers import DecoderLayer
from dsv4_sglang.srt.models.layers_v41 import V41DecoderLayer
from dsv4_sglang.srt.sglang.models import replaced

LAYERS: dict[type[ModelConfig], type[DecoderLayer]] = {DSV4Config: DecoderLayer, V41Config: V41DecoderLayer}


class Model(in_tree.DeepseekV4Model):
    """SGLang's stack of layers. On a CPU the final collapse of the residual streams runs in PyTorch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.layers[0].on_cpu:
            self.use_fused_mhc_post_pre = False

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Run the layers. SGLang records this call as the graph of a prefill step; the LM head follows it."""
        get_attn_backend().begin_recorded()
        return super().forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)

    def hc_head(self, x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor) -> Tensor:
        if x.is_cuda:
            return super().hc_head(x, hc_fn, hc_scale, hc_base)
        return in_tree.hc_head_torch(x, hc_fn, hc_scale, hc_base, norm_eps=self.norm_eps, hc_eps=self.hc_eps)


class DeepseekV4ForCausalLM(in_tree.DeepseekV4ForCausalLM):
    """The model that SGLang serves. It has the same architecture name and weight names as SGLang's class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with replaced(in_tree, DeepseekV4Model=Model, DeepseekV4DecoderLayer=self.layer_class(config)):
            super().__init__(config, *args, **kwargs)

    @staticmethod
    def layer_class(config: Any) -> type[DecoderLayer]:
        """Return the layer class of a model, from SGLang's config."""
        return LAYERS[CONFIGS[config.model_type]]

    def post_load_weights(self, *args: Any, **kwargs: Any) -> None:
        super().post_load_weights(*args, **kwargs)
        for layer in self.model.layers:
            layer.self_attn.projections.fuse()

    def _prewarm_mhc_kernels(self) -> None:
        if self.model.layers[0].on_cpu:
            return
        super()._prewarm_mhc_kernels()


EntryClass = DeepseekV4ForCausalLM
