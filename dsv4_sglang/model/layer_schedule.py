"""Kind of each layer (SPEC 1.2)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO


class AttentionType(enum.Enum):
    """Attention of a layer. Every kind also has the sliding window."""

    # Sliding window only.
    SWA = "swa"
    # Compressed sparse attention: one entry per 4 tokens, overlapping windows, top-k selection by an indexer.
    CSA = "csa"
    # Heavily compressed attention: one entry per 128 tokens, all of them visible.
    HCA = "hca"

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry, 0 if there are none."""
        return {AttentionType.SWA: 0, AttentionType.CSA: CSA_RATIO, AttentionType.HCA: HCA_RATIO}[self]

    @classmethod
    def from_ratio(cls, ratio: int) -> AttentionType:
        """Return the kind of layers with this compression ratio. Raise ValueError for an unknown ratio."""
        for kind in cls:
            if kind.ratio == ratio:
                return kind
        raise ValueError(f"compression ratio {ratio}: expected 0 (SWA), 4 (CSA) or 128 (HCA)")


class FFNType(enum.Enum):
    """Feed-forward part of a layer. All layers of DeepSeek-V4 have experts."""

    MOE = "moe"


class RouterMode(enum.Enum):
    """How a layer's tokens choose experts."""

    # By a fixed table of token ids (the first `num_hash_layers` layers).
    HASH = "hash"
    # By learned scores over all experts.
    DENSE = "dense"


@dataclass(frozen=True)
class LayerSpec:
    """Kind of one layer: its attention, its feed-forward part and its routing."""

    layer_idx: int
    attn: AttentionType
    ffn: FFNType
    router_mode: RouterMode


def build_schedule(config: DSV4Config, draft_layers: int = 0) -> list[LayerSpec]:
    """Return the `num_hidden_layers` layers of the model in order, followed by `draft_layers` layers of a draft model.

    The draft model shares the cache: NextN's MTP block (SPEC 4.6) or DSPARK's stages. All its layers are SWA layers.
    """
    kinds = [AttentionType.from_ratio(config.ratio(layer)) for layer in range(config.num_hidden_layers)]
    return [
        LayerSpec(
            layer_idx=layer,
            attn=kind,
            ffn=FFNType.MOE,
            router_mode=RouterMode.HASH if layer < config.num_hash_layers else RouterMode.DENSE,
        )
        for layer, kind in enumerate(kinds + [AttentionType.SWA] * draft_layers)
    ]
