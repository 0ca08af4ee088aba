"""A step of DeepSeek-V4.1: cache writes, selection and attention of its layers, over pools that the caller owns.

Only layers of role FULL own entries and index keys; other layers read those of `V41LayerSpec.kv_source`. Only layers of
roles FULL and REINDEX select entries; a REUSE layer uses the latest selection. `V41Step` holds what layers share during
a step (SPEC 11.2, 11.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401  (defines torch.ops.dsv4_sglang)
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KeyFormat, KVFormat, make_kv_buffers
from dsv4_sglang.model.v41 import Csa2Role, V41Config, V41LayerSpec


@dataclass(frozen=True)
class V41LayerWeights:
    """The weights of a layer that the cache needs. Norm weights are bf16 or fp32.

    Attributes:
        kv_norm: [512], for window entries.
        rope: [positions, 64] fp32, cos and sin interleaved, with the frequencies of this layer (SPEC 11.3).
        eps: epsilon of the norms.
        latent_norm: [512], role FULL.
        key_norm: [128], role FULL.
    """

    kv_norm: Tensor
    rope: Tensor
    eps: float
    latent_norm: Tensor | None = None
    key_norm: Tensor | None = None


class V41Step:
    """The tokens of one forward pass, for all layers in order: T tokens of B requests.

    For each layer call `append`, in a FULL layer then `append_keys`, in a layer that selects then `select`, and finally
    `attend`. The order of calls and the inputs of each role are not checked.

    Args:
        config: configuration of the model.
        schedule: roles of the layers.
        state: rings and compressor states of the slots, with a `v41_layout`.
        pools: one pool per layer, None for layers without entries of their own.
        metadata: metadata of the step; its `csa_*` and `hca_*` are not used.
    """

    def __init__(
        self,
        config: V41Config,
        schedule: Sequence[V41LayerSpec],
        state: StateStorage,
        pools: Sequence[PagedKVPool | None],
        metadata: StepMetadata,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.state = state
        self.pools = pools
        self.metadata = metadata
        self._window: Tensor | None = None
        if not metadata.is_decode:
            device = metadata.slots.device
            self._window = make_kv_buffers(1, 1, metadata.window_size, KVFormat.MXFP8, device)[0]
        self._rows: Tensor | None = None
        self._candidates: Tensor | None = None
        self._lens: dict[int, Tensor] = {}

    def append(
        self, layer: int, weights: V41LayerWeights, kv: Tensor, compressor: Tensor | None = None
    ) -> Tensor | None:
        """Write the window entries of the step's tokens and, in a FULL layer, the entries that they complete.

        Args:
            layer: id of the layer.
            weights: weights of the layer.
            kv: [T, 512] bf16, raw projection.
            compressor: raw projection of a FULL layer: ratio 1 [T, 512] bf16, ratio 2 [T, 1024] fp32 = [k | score].

        Returns:
            In a FULL layer the latents [T, 512] bf16, normalised and not rotated, in the rows of tokens that complete
            an entry, zeros in other rows. `append_keys` takes them multiplied by the indexer's matrix. None in other
            layers.
        """
        spec, pool, step = self.schedule[layer], self.pools[layer], self.metadata
        ratio = spec.ratio if spec.role is Csa2Role.FULL else 0
        latents = torch.zeros(kv.shape, dtype=torch.bfloat16, device=kv.device) if ratio else None
        torch.ops.dsv4_sglang.append_v41(
            *(kv, compressor, weights.kv_norm, weights.latent_norm if ratio else None),
            *(weights.rope, weights.eps, ratio),
            *(step.slots, step.prefix_lens, step.query_start, step.token_request, step.out_loc, step.staging_slots),
            *(
                self.state.ring(layer),
                self.state.compressor_state(layer),
                pool.entries if pool else None,
                latents,
                self._window,
            ),
        )
        return latents

    def append_keys(self, layer: int, weights: V41LayerWeights, keys: Tensor) -> None:
        """Write the index keys of the entries that the step completed in a FULL layer.

        Args:
            layer: id of the layer.
            weights: weights of the layer.
            keys: [T, 128] bf16, the latents from `append`, multiplied by the indexer's matrix.
        """
        spec, step = self.schedule[layer], self.metadata
        index_keys = self._owner(spec).index_keys
        torch.ops.dsv4_sglang.append_v41_keys(
            *(keys, weights.key_norm, weights.rope, weights.eps, spec.ratio),
            *(step.slots, step.prefix_lens, step.query_start, step.token_request, step.out_loc, index_keys),
        )

    def select(self, layer: int, weights: V41LayerWeights, q: Tensor, head_weights: Tensor) -> None:
        """Select the entries that this layer and the following REUSE layers read.

        The layer that keeps candidates chooses them here. Layers that select within candidates must come after it.

        Args:
            layer: id of the layer.
            weights: weights of the layer.
            q: [T, Hi, 128] bf16, raw index query before RoPE.
            head_weights: [T, Hi] fp32 or bf16, with or without the factors 128^-0.5 Hi^-0.5.
        """
        spec, step = self.schedule[layer], self.metadata
        tokens, device = len(step.positions), q.device
        if spec.keeps_candidates:
            blocks = self.config.candidate_topk_blocks
            self._candidates = torch.empty(tokens, blocks, dtype=torch.int32, device=device)
        self._rows = torch.empty(tokens, self.config.index_topk, dtype=torch.int32, device=device)
        torch.ops.dsv4_sglang.index_topk(
            *(q, head_weights, self._owner(spec).index_keys),
            *(step.block_table, step.token_request, step.positions, weights.rope),
            *(KeyFormat.MXFP4.code, head_weights, self._rows, spec.ratio, False, self.config.candidate_block_size),
            self._candidates if spec.keeps_candidates else None,
            self._candidates if spec.within_candidates else None,
        )

    def selected(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the selected entries of the layer's `kv_source`; None in a layer with a window only.

        Returns:
            Entry indices int32 [T, top k], -1 for none, and int32 [T], the number of leading indices that may be valid.
        """
        spec = self.schedule[layer]
        if spec.role is Csa2Role.WINDOW:
            return None
        assert self._rows is not None, "a layer before this one selects"
        if spec.ratio not in self._lens:
            self._lens[spec.ratio] = self.metadata.entry_lens(spec.ratio, self.config.index_topk)
        return self._rows, self._lens[spec.ratio]

    def attend(self, layer: int, weights: V41LayerWeights, q: Tensor, sink: Tensor, scale: float) -> Tensor:
        """Compute attention over the window and the selected entries. Call after `append` and, in a layer that selects,
        `select`.

        Args:
            layer: id of the layer.
            weights: weights of the layer.
            q: [T, H, 512], rotated, not normalised.
            sink: [H] fp32.
            scale: factor of the logits.

        Returns:
            Output [T, H, 512] with the inverse RoPE applied.
        """
        spec, step = self.schedule[layer], self.metadata
        window = self.state.ring(layer) if self._window is None else self._window
        chosen = self.selected(layer)
        entries = (None, None, None) if chosen is None else (self._owner(spec).entries, *chosen)
        return torch.ops.dsv4_sglang.attend(
            *(q, sink, window, step.window_indices, step.window_lens, *entries),
            *(step.positions, weights.rope, scale, KVFormat.MXFP8.code, None, KVFormat.NVFP4.code),
        )

    def _owner(self, spec: V41LayerSpec) -> PagedKVPool:
        """Return the pool whose entries the layer reads."""
        pool = None if spec.kv_source is None else self.pools[spec.kv_source]
        assert pool is not None, f"layer {spec.layer_idx} reads entries of layer {spec.kv_source}, which has none"
        return pool
