"""DSPARK's draft model as SGLang builds it, with the attention of its stages replaced.

The stages have the window alone. Their cache is one more layer of the served model's each: behind the last one. Two
things write it: a block that is drafted, for its own queries, and then, in the same rows and behind them, the context
that they read: projections of the served model's hidden states, for each token that it has run.
"""

from __future__ import annotations

from typing import Any

from sglang.kernels.ops.speculative.dspark.dspark_draft_model import CommitKvProj
from sglang.srt.models import deepseek_v4_dspark as in_tree
from torch import Tensor, nn

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.srt.models.deepseek_v4 import CachedAttention, DecoderLayer, replaced


class Stage(in_tree.DSparkV4Stage, DecoderLayer):
    """A stage: SGLang's, with our attention, and on a CPU what our layers have there."""

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
        # Context is projected by `wkv` alone, and SGLang's loader of this model dequantises wo_a.
        projections = {"fuse_wqa_wkv": False, "wo_a_fp8": False, "wo_a_keeps_quant_config": False}
        return CachedAttention(config, layer_id, quant_config, prefix, alt_streams, is_draft=True, **projections)


class DeepseekV4ForCausalLMDSpark(in_tree.DeepseekV4ForCausalLMDSpark):
    """The class that SGLang drafts with: same architecture name and checkpoint names as its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced(in_tree, DSparkV4Stage=Stage):
            super().__init__(*args, **kwargs)

    def context_rows(self, target_hidden: Tensor) -> list[tuple[int, LayerWeights, Tensor]]:
        """Of each stage its layer in the cache, its weights, and its raw window projections [T, 512] of the served
        model's hidden states [T, target layers * hidden]."""
        attention = [stage.self_attn for stage in self.stages]
        projected = CommitKvProj.execute(
            main_x=self.project_target_hidden(target_hidden), wkv_linears=[layer.wkv for layer in attention]
        )
        return [(layer.attn_mqa.layer_id, layer.cache_weights(), kv) for layer, kv in zip(attention, projected)]


EntryClass = DeepseekV4ForCausalLMDSpark
