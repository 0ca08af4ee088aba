"""A step of DeepSeek-V4.1: what its layers write, select and read, over pools that a server or a library owns.

Only the layers of role FULL own entries and index keys; the others read those of `V41LayerSpec.kv_source`. Only layers
of role FULL and REINDEX select, and a REUSE layer takes the latest selection. So what layers share lives as long as a
step does, in `V41Step` (SPEC 11.2, 11.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.cache.v41 import V41PagedPool
from dsv4_sglang.model.v41 import V41Config, V41LayerSpec


@dataclass(frozen=True)
class V41LayerWeights:
    """What the cache takes of a layer's weights. Norm weights bf16 or fp32."""

    kv_norm: Tensor
    """[512], of the window rows."""
    rope: Tensor
    """[positions, 64] fp32, cos and sin interleaved, of this layer's frequencies (SPEC 11.3)."""
    eps: float
    latent_norm: Tensor | None = None
    """[512], role FULL."""
    key_norm: Tensor | None = None
    """[128], role FULL."""


class V41Step:
    """The tokens of one forward, for all layers in order. T tokens of B requests, as `metadata` has them.

    `state` and `pools` are those of a `V41Layout`: rings and tails of slots, and one pool a layer, None where it
    owns no entries. Per layer: `append`, in a FULL layer then `append_keys`, in a layer that selects then `select`,
    at last `attend`.
    """

    def __init__(
        self,
        config: V41Config,
        schedule: Sequence[V41LayerSpec],
        state: StateStorage,
        pools: Sequence[V41PagedPool | None],
        metadata: StepMetadata,
    ) -> None:
        raise NotImplementedError

    def append(
        self, layer: int, weights: V41LayerWeights, kv: Tensor, compressor: Tensor | None = None
    ) -> Tensor | None:
        """Write the window rows of the step's tokens and, in a FULL layer, the entries that they complete.

        `kv` [T, 512] bf16 and `compressor` (FULL: ratio 1 [T, 512] bf16, ratio 2 [T, 1024] fp32 = [k | score]) are raw
        projections. The latents [T, 512] bf16 of a FULL layer, normalised and not rotated, in the rows of tokens that
        complete an entry, zeros in others: `append_keys` wants them times the indexer's matrix. None in other layers.

        ValueError for projections or weights that the layer's role needs and that are not there, or not of its shape.
        """
        raise NotImplementedError

    def append_keys(self, layer: int, weights: V41LayerWeights, keys: Tensor) -> None:
        """Write the index keys of the entries that the step completed; `keys` [T, 128] bf16, of a FULL layer's latents.
        ValueError in a layer of another role."""
        raise NotImplementedError

    def select(self, layer: int, weights: V41LayerWeights, q: Tensor, head_weights: Tensor) -> None:
        """Select the entries that this layer and the REUSE layers behind it read.

        `q` [T, Hi, 128] bf16 the raw index query before RoPE; `head_weights` [T, Hi] fp32 or bf16, with the factors
        128^-0.5 Hi^-0.5 or without. ValueError in a layer that does not select, and in one within candidates before the
        layer that keeps them has selected.
        """
        raise NotImplementedError

    def selected(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Rows [T, top k] int32 of the entry table of the layer's `kv_source`, -1 where there is none, and how many of
        them may count, [T] int32; None in a layer with the window alone. ValueError if the latest selection is not that
        of the layer's `index_source`."""
        raise NotImplementedError

    def attend(self, layer: int, weights: V41LayerWeights, q: Tensor, sink: Tensor, scale: float) -> Tensor:
        """[T, H, 512]: softmax over window and selected entries with the sink, the output rotated back. `q` [T, H, 512]
        rotated, not normalised; `sink` [H] fp32. After `append` and, in a layer that selects, `select`."""
        raise NotImplementedError
