"""Bytes of a model's weights on one GPU, counted with the constructors that a server uses, on the meta device.

SGLang splits attention over the processes that share a request: all of them, or the `tp / dp` of a replica under DP
attention. Experts, shared experts and the output head are split over all processes. Compressors, indexers, routers,
hyper-connections and RoPE tables are whole on every GPU; under DP attention the embedding is, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dsv4_sglang.planner.ask_sglang import resolved_flags
from dsv4_sglang.planner.models import Format, Model
from dsv4_sglang.srt.integration import compat

FP8_TILE = 128
"""Columns of an expert are split in whole tiles, each with one scale."""
RESERVED = "embedding, head"
GROUPS = (
    ("shared_experts", "shared experts"),
    ("mlp.experts", "routed experts"),
    ("compressor", "compressors, indexers"),
    ("indexer", "compressors, indexers"),
    ("self_attn", "attention"),
    ("embed_tokens", RESERVED),
    ("lm_head", RESERVED),
)
"""What a parameter is for, by the first part of its name that matches."""
OTHERS = "routers, norms, streams"


class Split(NamedTuple):
    """`tp` processes, in `dp` replicas of the attention and its cache (1: plain tensor parallelism)."""

    tp: int
    dp: int = 1

    @property
    def attention(self) -> int:
        """Processes that share a request."""
        return self.tp // self.dp


def check_split(model: Model, split: Split) -> None:
    """ValueError for a split that SGLang cannot make of this model's matrices."""
    config = model.config
    if split.tp % split.dp:
        raise ValueError(f"--dp {split.dp} does not divide --tp {split.tp}")
    for what, number in (("attention heads", config.num_attention_heads), ("groups of output heads", config.o_groups)):
        if number % split.attention:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ValueError(
                f"--tp {split.tp} with --dp {split.dp} splits attention over {split.attention} GPUs, which does not "
                f"divide the {number} {what} of {model.name}; --tp / --dp may be {fitting}"
            )
    tile = FP8_TILE if model.quantised else 1
    if model.expert_width % (split.tp * tile):
        raise ValueError(
            f"--tp {split.tp} gives each GPU {model.expert_width / split.tp:g} of the {model.expert_width} columns of "
            f"an expert; expected a multiple of {tile}: give a smaller --tp"
        )


class DraftWeights(NamedTuple):
    """Bytes of the draft model on one GPU."""

    name: str
    layer: int
    """NextN layer: a decoder layer with the window alone, and the projections before it. DSPARK head: its stages, the
    projection of the layers that they read, and the matrices of the bias."""
    until_shared: int
    """The NextN layer's own embedding and output head. SGLang replaces them by the served model's after it has sized
    the cache, so the cache is sized as if they stayed."""


@dataclass(frozen=True)
class Weights:
    """Bytes on one GPU by what they are for, RoPE tables included, and those of the checkpoint's draft model."""

    parts: tuple[tuple[str, int], ...]
    draft: DraftWeights | None

    @property
    def bytes(self) -> int:
        """Without the draft model."""
        return sum(size for _, size in self.parts)


@cache
def count_weights(model: Model, split: Split, experts: Format) -> Weights:
    """Build the model of the first process of `split` on the meta device and count its parameters.

    Raises:
        ValueError: SGLang cannot split this model's matrices so.
    """
    check_split(model, split)
    built, draft = _built(model, split, experts)
    tables = _rope_tables(built)
    parts = {**_parameter_bytes(built), "RoPE tables": sum(tables.values())}
    if draft is None:
        return Weights(tuple(parts.items()), None)
    drafts = _parameter_bytes(draft)
    until_shared = drafts.pop(RESERVED, 0)
    own_tables = sum(size for table, size in _rope_tables(draft).items() if table not in tables)
    name = "DSPARK head" if model.dspark else "NextN layer"
    return Weights(tuple(parts.items()), DraftWeights(name, sum(drafts.values()) + own_tables, until_shared))


def _built(model: Model, split: Split, experts: Format) -> tuple[Any, Any]:
    """The served model and its draft model, without memory."""
    server_args, _, config = resolved_flags(
        model.text,
        tp_size=split.tp,
        dp_size=split.dp,
        enable_dp_attention=split.dp > 1,
        disable_shared_experts_fusion=True,
    )
    import torch
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from dsv4_sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
    from dsv4_sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
    from dsv4_sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    quantisation = None
    if model.quantised:
        quantisation = Fp8Config.from_config(model.values["quantization_config"])
        quantisation.is_fp4_experts = experts is Format.FP4
    drafting = DeepseekV4ForCausalLMDSpark if model.dspark else DeepseekV4ForCausalLMNextN
    with (
        compat.published(server_args, split.tp, split.dp),
        compat.fp8_output_projection(model.quantised),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        built = DeepseekV4ForCausalLM(config.hf_config, quantisation)
        has_draft = model.dspark is not None or model.config.num_nextn_predict_layers > 0
        return built, drafting(config.hf_config, quantisation) if has_draft else None


def _parameter_bytes(module: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        group = next((group for part, group in GROUPS if part in name), OTHERS)
        size = parameter.numel() * parameter.element_size()
        # SGLang loads the scales of FP4 experts, whose weights are bytes, as fp32; its kernels keep one byte of each.
        weight = parameters.get(name.replace("weight_scale_inv", "weight"))
        if "mlp.experts" in name and weight is not parameter and weight is not None and not weight.is_floating_point():
            size = parameter.numel()
        sums[group] = sums.get(group, 0) + size
    return sums


def _rope_tables(module: Any) -> dict[int, int]:
    """Bytes of each RoPE table by its identity: layers and models share tables."""
    named = (buffer for name, buffer in module.named_buffers() if name.endswith("freqs_cis"))
    return {id(table): table.numel() * table.element_size() for table in named}
