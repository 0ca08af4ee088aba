"""A seeded random DeepSeek-V4.1 checkpoint: like `tiny`, with the layers of V4.1 that matter to its cache (SPEC 11).

All roles of layers occur, and ratio 2 in two source layers, so that reading the wrong one is detected. The published
model's Engram layers, images and DSPARK stages are omitted.

The cache holds rounded numbers, and a number that is rounded differently changes all later roundings. Therefore a layer
adds little to its streams, as in a trained model and unlike in `tiny`. A different order of fp32 operations, as in a
step with other tokens, moves a log-probability by about 1e-5, unless it changes the selection of entries. Eight missing
entries of one layer move it by 0.01 to 0.1 (tests/test_make_tiny.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_sglang.testing.tiny import (
    HEAD_DIM,
    INDEX_DIM,
    Q_LORA,
    Draw,
    TinySizes,
    around_attention,
    attention_projections,
    common_config,
    norm_weight,
    output_head,
    token_embedding,
    write_checkpoint,
)

INDEX_HEADS = 32
RATIOS = (0, 2, 2, 2, 1, 1, 1, 1)
KV_SOURCES = (1, 3, 4)
INDEX_SOURCES = (1, 3, 4, 6)
CANDIDATE_SOURCE = 4
CANDIDATE_BLOCK = 8
# RMS of the compressed entries, larger than that of window entries.
ENTRY_GAIN = 2.0
# Factors of the output of attention and experts; powers of two, to stay exact in bf16.
ATTENTION_SHARE = 1 / 16
EXPERTS_SHARE = 1 / 4


@dataclass(frozen=True)
class TinyV41Spec(TinySizes):
    """Options of a V4.1 checkpoint.

    Attributes:
        candidate_blocks: number of candidate blocks of 8 entries that layer 4 chooses and layer 6 selects within.
    """

    candidate_blocks: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidate_blocks < 1:
            raise ValueError(f"candidate_blocks {self.candidate_blocks}: must be positive")


def config_json(spec: TinyV41Spec) -> dict[str, Any]:
    """Return config.json with the field names of the release."""
    text = {
        "model_type": "deepseek_v41_text",
        **common_config(spec),
        "num_hidden_layers": len(RATIOS),
        "num_nextn_predict_layers": 0,
        "compress_ratios": list(RATIOS),
        "kv_source_layer_ids": list(KV_SOURCES),
        "index_source_layer_ids": list(INDEX_SOURCES),
        "candidate_source_layer_id": CANDIDATE_SOURCE,
        "candidate_topk_blocks": spec.candidate_blocks,
        "candidate_block_size": CANDIDATE_BLOCK,
        "index_n_heads": INDEX_HEADS,
        "rms_norm_eps": 1e-20,
        "engram_layer_ids": [],
    }
    return {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text}


def _attention(draw: Draw, prefix: str, spec: TinyV41Spec, layer: int) -> dict[str, torch.Tensor]:
    tensors = attention_projections(draw, prefix, spec)
    ratio, compressor, indexer = RATIOS[layer], f"{prefix}.compressor", f"{prefix}.indexer"
    if layer in KV_SOURCES:
        tensors[f"{compressor}.wkv.weight"] = draw.linear(f"{compressor}.wkv", HEAD_DIM, spec.hidden)
        if ratio > 1:
            tensors[f"{compressor}.wgate.weight"] = draw.linear(f"{compressor}.wgate", HEAD_DIM, spec.hidden, gain=1.5)
        norm = draw.normal(f"{compressor}.norm", HEAD_DIM, std=0.1 * ENTRY_GAIN, mean=ENTRY_GAIN)
        tensors[f"{compressor}.norm.weight"] = norm
        tensors[f"{indexer}.wk.weight"] = draw.linear(f"{indexer}.wk", INDEX_DIM, HEAD_DIM)
        tensors[f"{indexer}.k_norm.weight"] = draw.normal(f"{indexer}.k_norm", INDEX_DIM, std=0.1, mean=1.0)
    if layer in INDEX_SOURCES:
        tensors[f"{indexer}.wq_b.weight"] = draw.linear(f"{indexer}.wq_b", INDEX_HEADS * INDEX_DIM, Q_LORA)
        tensors[f"{indexer}.weights_proj.weight"] = draw.linear(f"{indexer}.weights_proj", INDEX_HEADS, spec.hidden)
    tensors[f"{prefix}.wo_b.weight"] *= ATTENTION_SHARE
    return tensors


def _around_attention(draw: Draw, prefix: str, spec: TinyV41Spec) -> dict[str, torch.Tensor]:
    tensors = around_attention(draw, prefix, spec, hashed=False)
    for name, tensor in tensors.items():
        if name.endswith(".w2.weight"):
            tensor *= EXPERTS_SHARE
    return tensors


def tiny_v41_tensors(spec: TinyV41Spec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in file order: bf16 weights, fp32 where the release has fp32."""
    draw = Draw(spec.seed)
    yield "embed.weight", token_embedding(draw, spec)
    for layer in range(len(RATIOS)):
        yield from _attention(draw, f"layers.{layer}.attn", spec, layer).items()
        yield from _around_attention(draw, f"layers.{layer}", spec).items()
    yield from norm_weight(draw, "norm", spec).items()
    yield "head.weight", output_head(draw, spec)


def make_tiny_v41(folder: str | Path, spec: TinyV41Spec | None = None) -> Path:
    """Write a V4.1 checkpoint to `folder` and return it. Errors are those of `make_tiny`."""
    spec = spec or TinyV41Spec()
    return write_checkpoint(Path(folder), spec, config_json(spec), tiny_v41_tensors(spec))
