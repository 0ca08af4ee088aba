"""Kind of each layer (SPEC 1.2)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO


class AttentionType(enum.Enum):
    """How a layer makes its entries; the value is its compression ratio. Every kind also has the sliding window."""

    # Sliding window only.
    SWA = 0
    # Compressed sparse attention: one entry per 4 tokens, overlapping windows, top-k selection by an indexer.
    CSA = CSA_RATIO
    # Heavily compressed attention: one entry per 128 tokens, all of them visible.
    HCA = HCA_RATIO
    # DeepSeek-V4.1: one entry and one index key per token.
    SINGLE = 1
    # DeepSeek-V4.1: one entry and one index key per two tokens, the first of which waits in a compressor state.
    PAIR = 2

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry, 0 if there are none."""
        return self.value


class FFNType(enum.Enum):
    """Feed-forward network of a layer."""

    # Mixture of experts, in every layer of V4.
    MOE = "moe"


class RouterMode(enum.Enum):
    """Choice of the experts of a token."""

    # A table lookup by token id, in the first `num_hash_layers` layers.
    HASH = "hash"
    # The best scores of a linear layer.
    DENSE = "dense"


@dataclass(frozen=True)
class LayerSpec:
    """Kind of one layer. The cache depends on `attn` alone."""

    layer_idx: int
    attn: AttentionType
    ffn: FFNType
    router_mode: RouterMode


def build_schedule(config: DSV4Config, draft_layers: int = 0) -> list[LayerSpec]:
    """Return the `num_hidden_layers` layers of the model in order, followed by `draft_layers` layers of a draft model.

    The draft model shares the cache: NextN's MTP block (SPEC 4.6) or DSPARK's stages. All its layers are SWA layers.
    """
    layers = config.num_hidden_layers
    kinds = [AttentionType(config.ratio(layer)) for layer in range(layers)] + [AttentionType.SWA] * draft_layers
    hashed = min(config.num_hash_layers, layers)
    routers = [RouterMode.HASH] * hashed + [RouterMode.DENSE] * (len(kinds) - hashed)
    return [LayerSpec(i, attn, FFNType.MOE, router) for i, (attn, router) in enumerate(zip(kinds, routers))]
