"""Options and config.json of the tiny checkpoints (`testing.tiny`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEAD_DIM, ROPE_DIM = 512, 64
INDEX_HEADS, INDEX_DIM = 64, 128
Q_LORA, O_LORA, O_GROUPS = 64, 32, 8
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH = 16, 6, 64
HC_MULT = 4
DEFAULT_RATIOS = (0, 4, 128, 4, 128, 4)
# As in the release: three stages, which take the streams of the target's last three layers.
DSPARK_STAGES = 3
MARKOV_RANK = 32


@dataclass(frozen=True)
class TinySizes:
    """Options that V4 and V4.1 share. `heads` are query heads, a multiple of `O_GROUPS`.

    Raises:
        ValueError: no loader accepts a value.
    """

    seed: int = 0
    hidden: int = 256
    heads: int = 64
    vocab: int = 384
    index_topk: int = 512
    context: int = 32768

    def __post_init__(self) -> None:
        if self.hidden < 128 or self.hidden % 128:
            raise ValueError(f"hidden {self.hidden}: must be a multiple of 128")
        if self.index_topk < 1:
            raise ValueError(f"index_topk {self.index_topk}: must be positive")


@dataclass(frozen=True)
class TinySpec(TinySizes):
    """Options of a V4 checkpoint.

    Attributes:
        ratios: compress ratios of the layers, without the MTP block's.
        hash_layers: number of layers with hash routing.
        nextn: write a NextN block.
        dspark: number of tokens that a DSPARK head drafts at once; None for no such head.
    """

    ratios: Sequence[int] = DEFAULT_RATIOS
    hash_layers: int = 2
    nextn: bool = False
    dspark: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratios or any(r not in (0, 4, 128) for r in self.ratios):
            raise ValueError(f"ratios {tuple(self.ratios)}: give one of 0, 4, 128 for each layer")
        if not 0 <= self.hash_layers <= len(self.ratios):
            raise ValueError(f"hash_layers {self.hash_layers}: must be between 0 and the number of layers")
        if self.dspark is None:
            return
        if self.dspark < 1:
            raise ValueError(f"dspark {self.dspark}: must be a number of tokens, such as 5 or 7")
        if self.nextn:
            raise ValueError("nextn and dspark: both are stored as mtp.0; give one of them")
        if len(self.ratios) < DSPARK_STAGES:
            raise ValueError(
                f"dspark with {len(self.ratios)} layers: the head reads the last {DSPARK_STAGES} layers; give that many"
            )


def common_config(spec: TinySizes) -> dict[str, Any]:
    """Return the fields of config.json that V4 and V4.1 share."""
    return {
        "torch_dtype": "bfloat16",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": Q_LORA,
        "o_lora_rank": O_LORA,
        "o_groups": O_GROUPS,
        "sliding_window": 128,
        "index_head_dim": INDEX_DIM,
        "index_topk": spec.index_topk,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": spec.context,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_WIDTH,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": HC_MULT,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def config_json(spec: TinySpec) -> dict[str, Any]:
    """Return config.json with the field names of the release."""
    dspark: dict[str, Any] = {}
    if spec.dspark is not None:
        layers = len(spec.ratios)
        dspark = {
            "compress_ratios": [*spec.ratios, *[0] * DSPARK_STAGES],
            "dspark_block_size": spec.dspark,
            "dspark_markov_rank": MARKOV_RANK,
            "dspark_noise_token_id": spec.vocab - 1,
            "dspark_target_layer_ids": list(range(layers - DSPARK_STAGES, layers)),
        }
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **common_config(spec),
        "num_hidden_layers": len(spec.ratios),
        "num_nextn_predict_layers": 1,
        "compress_ratios": [*spec.ratios, 0],
        "index_n_heads": INDEX_HEADS,
        "rms_norm_eps": 1e-6,
        "num_hash_layers": spec.hash_layers,
        **dspark,
    }
