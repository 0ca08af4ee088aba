"""DSPARK's draft model as SGLang builds it, with the attention of its stages replaced.

The stages have a sliding window only. In the cache, each stage is a layer after the last one of the served model. Two
parts write it. A drafted block writes entries for its own queries. Then the context overwrites and extends them:
projections of the served model's hidden states, one for each token that it has run.
"""

from __future__ import annotations

from typing import Any

from sglang.kernels.ops.speculative.dspark.dspark_draft_model import CommitKvProj
from sglang.srt.models import deepseek_v4_dspark as in_tree
from torch import Tensor, nn

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.srt.models.attention import CachedAttention
from dsv4_sglang.srt.models.layers import DecoderLayer
from dsv4_sglang.srt.sglang.models import replaced


class Stage(in_tree.DSparkV4Stage, DecoderLayer):
    """SGLang's stage with this package's attention, and on a CPU with the CPU parts of `DecoderLayer`."""

    def _build_self_attn(
        self,
        *,
        config: Any,
        layer_id: int,
        quant_config: Any,
        prefix: str,
        alt_streams: Any,
        compress_ratio_override: int | None = None,
    ) -> nn.Module:
        # The context is projected by `wkv` alone, and SGLang's loader of this model dequantises wo_a.
        projections = {"fuse_wqa_wkv": False, "wo_a_fp8": False, "wo_a_keeps_quant_config": False}
        return CachedAttention(config, layer_id, quant_config, prefix, alt_streams, is_draft=True, **projections)


class DeepseekV4ForCausalLMDSpark(in_tree.DeepseekV4ForCausalLMDSpark):
    """The draft model that SGLang loads. It has the same architecture name and weight names as SGLang's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced(in_tree, DSparkV4Stage=Stage):
            super().__init__(*args, **kwargs)

    def context_projections(self, target_hidden: Tensor) -> list[tuple[int, LayerWeights, Tensor]]:
        """Return the window projections of the served model's hidden states.

        Args:
            target_hidden: [T, target layers * hidden].

        Returns:
            For each stage: its layer in the cache, its weights, and raw window projections [T, 512].
        """
        attention = [stage.self_attn for stage in self.stages]
        projected = CommitKvProj.execute(
            main_x=self.project_target_hidden(target_hidden), wkv_linears=[layer.wkv for layer in attention]
        )
        return [(layer.attn_mqa.layer_id, layer.cache_weights(), kv) for layer, kv in zip(attention, projected)]


EntryClass = DeepseekV4ForCausalLMDSpark
