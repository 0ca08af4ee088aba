"""A seeded random DeepSeek-V4.1 checkpoint: like `tiny`, with the layers of V4.1 that matter to its cache (SPEC 11).

All roles of layers occur, and ratio 2 in two source layers, so that reading the wrong one is detected. The published
model's Engram layers, images and DSPARK stages are omitted.

The cache holds rounded numbers, and a number that is rounded differently changes all later roundings. Therefore a layer
adds little to its streams, as in a trained model and unlike in `tiny`. A different order of fp32 operations, as in a
step with other tokens, moves a log-probability by about 1e-5, unless it changes the selection of entries. Eight missing
entries of one layer move it by 0.01 to 0.1 (tests/testing/test_make_tiny.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_sglang.testing.tiny import (
    Draw,
    add_around_attention,
    add_attention_projections,
    add_indexer_projections,
    output_head,
    token_embedding,
    write_checkpoint,
)
from dsv4_sglang.testing.tiny_config import HEAD_DIM, INDEX_DIM, TinySizes, common_config

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


def _add_attention(draw: Draw, spec: TinyV41Spec, layer: int) -> None:
    add_attention_projections(draw, spec)
    if layer in KV_SOURCES:
        with draw.inside("compressor"):
            draw.add_linear("wkv", HEAD_DIM, spec.hidden)
            if RATIOS[layer] > 1:
                draw.add_linear("wgate", HEAD_DIM, spec.hidden, gain=1.5)
            draw.add_norm("norm", HEAD_DIM, ENTRY_GAIN)
    with draw.inside("indexer"):
        if layer in KV_SOURCES:
            draw.add_linear("wk", INDEX_DIM, HEAD_DIM)
            draw.add_norm("k_norm", INDEX_DIM)
        if layer in INDEX_SOURCES:
            add_indexer_projections(draw, spec, INDEX_HEADS)


def tiny_v41_tensors(spec: TinyV41Spec) -> dict[str, torch.Tensor]:
    """Return the tensors by name: bf16 weights, fp32 where the release has fp32."""
    draw = Draw(spec.seed)
    draw.add("embed.weight", token_embedding(draw, spec))
    draw.add("head.weight", output_head(draw, spec))
    draw.add_norm("norm", spec.hidden)
    for layer in range(len(RATIOS)):
        with draw.inside(f"layers.{layer}"):
            with draw.inside("attn"):
                _add_attention(draw, spec, layer)
            add_around_attention(draw, spec, hashed=False)
    for name, tensor in draw.weights.items():
        if name.endswith(("attn.wo_b.weight", ".w2.weight")):
            tensor *= ATTENTION_SHARE if name.endswith("attn.wo_b.weight") else EXPERTS_SHARE
    return draw.weights


def make_tiny_v41(folder: str | Path, spec: TinyV41Spec | None = None) -> Path:
    """Write a V4.1 checkpoint to `folder` and return it. Errors are those of `make_tiny`."""
    spec = spec or TinyV41Spec()
    return write_checkpoint(Path(folder), spec, config_json(spec), tiny_v41_tensors(spec))
