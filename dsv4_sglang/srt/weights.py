"""Bytes of a model's weights on one GPU: shapes of the parameters, and how SGLang 0.5.17 splits and quantises them.

Attention is split over the processes that share a request (all of them, or the `tp / dp` of a replica under DP
attention), experts, shared experts and the output head over all. Compressors, indexers, routers, hyper-connections and
RoPE tables are whole on every GPU, and under DP attention the embedding, too (`models/deepseek_v4.py`,
`models/deepseek_v2.py` and `layers/quantization` of SGLang).
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsv4_sglang.model.config import DSV4Config, Fields
from dsv4_sglang.model.geometry import CSA_RATIO

FP8_TILE = 128
"""An fp32 scale for each 128 x 128 values of a matrix."""
FP4_GROUP = 32
"""A scale of one byte for each 32 values of a row."""
BF16, FP32, INT32, COMPLEX64 = 2, 4, 4, 8


class Format(enum.Enum):
    """How a matrix is stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3 with a scale a tile."""
    FP4 = "fp4"
    """e2m1 with a scale a group; experts only."""

    def bytes(self, rows: int, columns: int) -> int:
        if self is Format.BF16:
            return rows * columns * BF16
        if self is Format.FP8:
            return rows * columns + -(-rows // FP8_TILE) * -(-columns // FP8_TILE) * FP32
        return rows * columns // 2 + rows * (columns // FP4_GROUP)


class DSparkHead(NamedTuple):
    """`stages` layers that draft `block` tokens at once, with a first-order bias of rank `markov_rank`."""

    stages: int
    block: int
    markov_rank: int


@dataclass(frozen=True)
class Model:
    """A model's widths: those that the cache depends on, and those that only its weights do.

    `quantised`: matrices are FP8 and the experts FP4 or FP8; else all is bf16.
    """

    name: str
    path: str
    """What `--model-path` takes."""
    config: DSV4Config
    routed_experts: int
    shared_experts: int
    experts_per_token: int
    expert_width: int
    vocabulary: int
    streams: int
    """Residual streams of the hyper-connections (`hc_mult`)."""
    quantised: bool
    dspark: DSparkHead | None = None
    """In the place of a NextN layer."""

    @classmethod
    def flash(cls) -> Model:
        """As released: 284 B parameters."""
        path = "deepseek-ai/DeepSeek-V4-Flash"
        return cls("DeepSeek-V4-Flash", path, DSV4Config.flash(), 256, 1, 6, 2048, 129280, 4, True)

    @classmethod
    def pro(cls) -> Model:
        """As released: 1.6 T parameters."""
        path = "deepseek-ai/DeepSeek-V4-Pro"
        return cls("DeepSeek-V4-Pro", path, DSV4Config.pro(), 384, 1, 6, 3072, 129280, 4, True)

    @classmethod
    def from_file(cls, path: Path) -> Model:
        """From a config.json. KeyError, TypeError or ValueError for what is wrong in it."""
        values: Any = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise TypeError(f"{path} holds {type(values).__name__}; expected an object")
        fields = Fields(values)
        quantised = fields.get("quantization_config") is not None
        if quantised and (method := fields.mapping("quantization_config").get("quant_method")) != "fp8":
            raise ValueError(f"config field 'quantization_config.quant_method' is {method!r}; expected 'fp8'")
        return cls(
            path.parent.resolve().name,
            str(path.parent),
            DSV4Config.from_hf(values),
            routed_experts=fields.integer("n_routed_experts"),
            shared_experts=fields.integer("n_shared_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            expert_width=fields.integer("moe_intermediate_size"),
            vocabulary=fields.integer("vocab_size"),
            streams=fields.integer("hc_mult"),
            quantised=quantised,
            dspark=_dspark_head(fields),
        )

    @property
    def matrices(self) -> Format:
        return Format.FP8 if self.quantised else Format.BF16

    @property
    def experts(self) -> Format:
        """Of the routed experts as released."""
        return Format.FP4 if self.quantised else Format.BF16


def _dspark_head(fields: Fields) -> DSparkHead | None:
    if not fields.get("dspark_target_layer_ids"):
        return None
    stages = len(fields.integers("dspark_target_layer_ids"))
    return DSparkHead(stages, fields.integer("dspark_block_size"), fields.integer("dspark_markov_rank"))


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


def weight_bytes(model: Model, split: Split, experts: Format) -> dict[str, int]:
    """Bytes on one GPU by what they are for. Checks the split."""
    check_split(model, split)
    config, hidden = model.config, model.config.hidden_size
    ratios = [config.ratio(layer) for layer in range(config.num_hidden_layers)]
    layers, csa = len(ratios), ratios.count(CSA_RATIO)
    hashed = min(config.num_hash_layers, layers)
    compressors = sum(_compressor(hidden, ratio, config.head_dim) for ratio in ratios if ratio)
    return {
        "routed experts": layers * model.routed_experts * _expert(model, split, experts),
        "shared experts": layers * _shared(model, split),
        "attention": layers * _attention(model, split),
        "compressors, indexers": compressors + csa * _indexer(model),
        "embedding, head": _embedding_and_head(model, split),
        "routers, norms, streams": layers * _beside(model)
        + (layers - hashed) * model.routed_experts * FP32
        + hashed * model.vocabulary * model.experts_per_token * INT32
        + _last(model),
        # SGLang keeps one table for the layers with compressed entries and one for those without.
        "RoPE tables": len({ratio > 0 for ratio in ratios}) * _rope_table(config),
    }


class DraftWeights(NamedTuple):
    """Bytes of the draft model of EAGLE on one GPU (`models/deepseek_v4_nextn.py` of SGLang)."""

    layer: int
    """The NextN layer: a decoder layer with the window alone, and the projections before it."""
    until_shared: int
    """An embedding and a head of its own. SGLang gives it the served model's instead once the cache is there, so the
    cache is divided as if they stayed."""


def draft_weight_bytes(model: Model, split: Split, experts: Format) -> DraftWeights:
    """Of a split that `weight_bytes` has checked."""
    config, hidden = model.config, model.config.hidden_size
    windows_alone = any(config.ratio(layer) == 0 for layer in range(config.num_hidden_layers))
    return DraftWeights(
        layer=model.routed_experts * (_expert(model, split, experts) + FP32)
        + _shared(model, split)
        + _attention(model, split)
        + _beside(model)
        + 2 * model.matrices.bytes(hidden, hidden)
        + 2 * hidden * BF16
        + _last(model)
        # Layers of the served model that have the window alone have the same table.
        + (0 if windows_alone else _rope_table(config)),
        until_shared=_embedding_and_head(model, split),
    )


def dspark_weight_bytes(model: Model, split: Split, experts: Format) -> int:
    """Bytes of a DSPARK head on one GPU, of a split that `weight_bytes` has checked
    (`models/deepseek_v4_dspark.py` of SGLang): stages, which are decoder layers with the window alone, the projection
    of the layers that they read, and the two matrices of the bias, whole on every GPU. Embedding and output head are
    the served model's. ValueError for a model without one."""
    if (head := model.dspark) is None:
        raise ValueError(f"{model.name} has no DSPARK head (dspark_target_layer_ids in its config.json)")
    config, hidden = model.config, model.config.hidden_size
    stage = (
        model.routed_experts * (_expert(model, split, experts) + FP32)
        + _shared(model, split)
        + _stage_attention(model, split)
        + _beside(model)
    )
    windows_alone = any(config.ratio(layer) == 0 for layer in range(config.num_hidden_layers))
    return (
        head.stages * stage
        + model.matrices.bytes(hidden, head.stages * hidden)
        + hidden * BF16
        + _last(model)
        + 2 * model.vocabulary * head.markov_rank * BF16
        + (0 if windows_alone else _rope_table(config))
    )


def _stage_attention(model: Model, split: Split) -> int:
    """As `_attention`, with two projections of the input for one and the first of the output in bf16."""
    config, matrix = model.config, model.matrices
    rows, columns = config.o_groups * config.o_lora_rank // split.attention, _group_columns(config)
    apart = matrix.bytes(config.q_lora_rank, config.hidden_size) + matrix.bytes(config.head_dim, config.hidden_size)
    together = matrix.bytes(config.q_lora_rank + config.head_dim, config.hidden_size)
    return _attention(model, split) + apart - together + Format.BF16.bytes(rows, columns) - matrix.bytes(rows, columns)


def _group_columns(config: DSV4Config) -> int:
    """Outputs of the heads of one group."""
    return config.num_attention_heads * config.head_dim // config.o_groups


def _embedding_and_head(model: Model, split: Split) -> int:
    each = model.vocabulary * model.config.hidden_size * BF16
    return each // (1 if split.dp > 1 else split.tp) + each // split.tp


def _rope_table(config: DSV4Config) -> int:
    return config.max_position_embeddings * (config.rope_dim // 2) * COMPLEX64


def _expert(model: Model, split: Split, experts: Format) -> int:
    hidden, width = model.config.hidden_size, model.expert_width // split.tp
    return experts.bytes(2 * width, hidden) + experts.bytes(hidden, width)


def _shared(model: Model, split: Split) -> int:
    hidden, width = model.config.hidden_size, model.shared_experts * model.expert_width // split.tp
    return model.matrices.bytes(2 * width, hidden) + model.matrices.bytes(hidden, width)


def _attention(model: Model, split: Split) -> int:
    """Projections, sink and norms of one layer."""
    config, matrix = model.config, model.matrices
    heads = config.num_attention_heads * config.head_dim
    latent = config.o_groups * config.o_lora_rank // split.attention
    return (
        matrix.bytes(config.q_lora_rank + config.head_dim, config.hidden_size)
        + matrix.bytes(heads // split.attention, config.q_lora_rank)
        + matrix.bytes(latent, _group_columns(config))
        + matrix.bytes(config.hidden_size, latent)
        + config.num_attention_heads * FP32
        + (config.q_lora_rank + config.head_dim) * BF16
    )


def _compressor(hidden: int, ratio: int, dim: int) -> int:
    """Position bias, projections to keys and scores, norm (SPEC 3.1)."""
    columns = (2 if ratio == CSA_RATIO else 1) * dim
    return ratio * columns * FP32 + Format.BF16.bytes(2 * columns, hidden) + dim * FP32


def _indexer(model: Model) -> int:
    config = model.config
    return (
        model.matrices.bytes(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        + Format.BF16.bytes(config.index_n_heads, config.hidden_size)
        + _compressor(config.hidden_size, CSA_RATIO, config.index_head_dim)
    )


def _beside(model: Model) -> int:
    """Router, norms and the two hyper-connections of one layer."""
    hidden, n = model.config.hidden_size, model.streams
    mixed = (2 + n) * n
    connection = (mixed * n * hidden + mixed + 3) * FP32
    return model.routed_experts * hidden * BF16 + 2 * hidden * BF16 + 2 * connection


def _last(model: Model) -> int:
    """Norm and collapse of the streams behind the last layer."""
    hidden, n = model.config.hidden_size, model.streams
    return hidden * BF16 + (n * n * hidden + n + 1) * FP32
