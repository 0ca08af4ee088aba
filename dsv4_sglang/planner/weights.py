"""Bytes of a model's weights on one GPU, counted by building the served model on the meta device.

SGLang shards attention over the processes that share a request: all of them, or the `tp / dp` of a replica under DP
attention. Routed experts, shared experts and the output head are sharded over all processes. Compressors, indexers,
routers, hyper-connections and RoPE tables are replicated on every GPU; under DP attention the embedding is, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dsv4_sglang.planner.ask_sglang import resolved_flags
from dsv4_sglang.planner.models import Format, Model
from dsv4_sglang.srt.sglang.planning import fp8_output_projection, published

# Experts are split along their columns in whole tiles of this width, each with one scale.
FP8_TILE = 128
RESERVED = "embedding, head"
# Group of a parameter, by the first entry that its name contains.
GROUPS = (
    ("shared_experts", "shared experts"),
    ("mlp.experts", "routed experts"),
    ("compressor", "compressors, indexers"),
    ("indexer", "compressors, indexers"),
    ("self_attn", "attention"),
    ("embed_tokens", RESERVED),
    ("lm_head", RESERVED),
)
OTHERS = "routers, norms, streams"


def check_split(model: Model, tp: int, dp: int) -> None:
    """Raise ValueError if SGLang cannot shard this model's matrices over `tp` processes in `dp` replicas of the
    attention."""
    config = model.config
    if tp % dp:
        raise ValueError(f"--dp {dp} does not divide --tp {tp}")
    for what, number in (("attention heads", config.num_attention_heads), ("groups of output heads", config.o_groups)):
        if number % (tp // dp):
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ValueError(
                f"--tp {tp} with --dp {dp} splits attention over {tp // dp} GPUs, which does not "
                f"divide the {number} {what} of {model.name}; --tp / --dp may be {fitting}"
            )
    tile, width = FP8_TILE if model.quantised else 1, model.fields.integer("moe_intermediate_size")
    if width % (tp * tile):
        raise ValueError(
            f"--tp {tp} gives each GPU {width / tp:g} of the {width} columns of an expert; expected a multiple of "
            f"{tile}: give a smaller --tp"
        )


class DraftWeights(NamedTuple):
    """Bytes of the draft model on one GPU."""

    name: str
    # NextN layer: a decoder layer with window attention only and its input projections. DSPARK head: its stages, the
    # projection of the target layers' hidden states, and the matrices of the Markov bias.
    layer: int
    # Embedding and output head of the NextN layer. SGLang replaces them by those of the served model only after it has
    # sized the cache, so they reduce the size of the cache.
    until_shared: int


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on one GPU by group, including RoPE tables, and those of the checkpoint's draft model."""

    parts: tuple[tuple[str, int], ...]
    draft: DraftWeights | None

    @property
    def bytes(self) -> int:
        """Total without the draft model."""
        return sum(size for _, size in self.parts)


@cache
def count_weights(model: Model, experts: Format, tp: int = 1, dp: int = 1) -> Weights:
    """Build the model of a server's first process on the meta device and count the bytes of its parameters.

    Args:
        model: Model to count.
        experts: Format of the routed experts.
        tp: Processes of the server. `check_split` accepts them.
        dp: Replicas of the attention and its cache (1: no DP attention).

    Returns:
        Bytes on one GPU.
    """
    built, draft = _built(model, experts, tp, dp)
    tables = _rope_tables(built)
    parts = {**_parameter_bytes(built), "RoPE tables": sum(tables.values())}
    if draft is None:
        return Weights(tuple(parts.items()), None)
    drafts = _parameter_bytes(draft)
    until_shared = drafts.pop(RESERVED, 0)
    own_tables = sum(size for table, size in _rope_tables(draft).items() if table not in tables)
    name = "DSPARK head" if model.dspark else "NextN layer"
    return Weights(tuple(parts.items()), DraftWeights(name, sum(drafts.values()) + own_tables, until_shared))


def _built(model: Model, experts: Format, tp: int, dp: int) -> tuple[Any, Any]:
    """Return the served model and its draft model (None if there is none), built on the meta device."""
    server_args, _, config = resolved_flags(
        model.text, tp_size=tp, dp_size=dp, enable_dp_attention=dp > 1, disable_shared_experts_fusion=True
    )
    import torch
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from dsv4_sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
    from dsv4_sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
    from dsv4_sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    quantisation = None
    if model.quantised:
        quantisation = Fp8Config.from_config(model.fields.get("quantization_config"))
        quantisation.is_fp4_experts = experts is Format.FP4
    drafting = DeepseekV4ForCausalLMDSpark if model.dspark else DeepseekV4ForCausalLMNextN
    with (
        published(server_args, tp, dp),
        fp8_output_projection(model.quantised),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        built = DeepseekV4ForCausalLM(config.hf_config, quantisation)
        return built, drafting(config.hf_config, quantisation) if model.draft_tokens else None


def _parameter_bytes(module: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        group = next((group for part, group in GROUPS if part in name), OTHERS)
        size = parameter.numel() * parameter.element_size()
        # The weights of FP4 experts have an integer dtype. SGLang loads their scales as fp32; its kernels keep one byte
        # of each.
        weight = parameters.get(name.replace("weight_scale_inv", "weight"))
        if "mlp.experts" in name and weight is not parameter and weight is not None and not weight.is_floating_point():
            size = parameter.numel()
        sums[group] = sums.get(group, 0) + size
    return sums


def _rope_tables(module: Any) -> dict[int, int]:
    """Return the bytes of each RoPE table by its id. Layers and models share tables."""
    named = (buffer for name, buffer in module.named_buffers() if name.endswith("freqs_cis"))
    return {id(table): table.numel() * table.element_size() for table in named}
