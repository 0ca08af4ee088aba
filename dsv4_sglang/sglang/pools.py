"""The two pools that SGLang's scheduler owns: state slots of requests, and paged blocks of compressed entries.

SGLang sees the first as its recurrent-state pool (slots allocated, copied and freed by its hybrid-model machinery) and the
second as a KV cache addressed by slot index with pages of 128 tokens. Slot 0 and page 0 are SGLang's dummies: no request
ever owns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.configs.mamba_utils import BaseLinearStateParams, Mamba2StateDType
from sglang.srt.mem_cache.memory_pool import GB, HybridLinearKVPool, HybridReqToTokenPool, KVCache, MambaPool
from torch import Tensor

from dsv4_sglang.sglang.layout import CacheLayout, tensor_bytes
from dsv4_sglang.sglang.options import BLOCK


@dataclass(kw_only=True, frozen=True)
class StateShape:
    """SGLang's description of a state; only `conv` says something here."""

    conv: list[tuple[int, ...]]
    temporal: tuple[int, ...] = (0,)


@dataclass(kw_only=True, frozen=True)
class StateParams(BaseLinearStateParams):
    """How SGLang hands the layout to the pool. `mamba_cache_per_req` of the base assumes equal layers, which these are not."""

    shape: StateShape
    cache_layout: CacheLayout

    @classmethod
    def of(cls, layout: CacheLayout) -> StateParams:
        shapes = layout.state_shapes(1)
        return cls(
            layers=list(layout.window_layers),
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
            shape=StateShape(conv=[shape[2:] for shape, _ in shapes.values()]),
            cache_layout=layout,
        )

    @property
    def mamba_cache_per_req(self) -> int:
        return self.cache_layout.slot_bytes


class StateSlotPool(MambaPool):
    """Window rings and compressor tails of all layers, one slot a request or checkpoint.

    The tensors lie in `mamba_cache.conv`, slot dimension second, so that what SGLang inherits (transfer descriptions, copies)
    walks them. Tensors differ in their number of layers and in dtype.
    """

    def __init__(
        self, *, size: int, cache_params: StateParams, mamba_layer_ids: list[int], device: str, **ignored: Any
    ) -> None:
        layout = cache_params.cache_layout
        self.layout = layout
        self.size, self.device = size, device
        self.mamba_layer_ids = list(mamba_layer_ids)
        self.num_mamba_layers = len(self.mamba_layer_ids)
        self.debug_memory_pool = False
        self.enable_linear_replayssm = self.enable_linear_replayssm_spec = self.replayssm_spec_fold = False
        self.replayssm_is_kda = False
        self.replayssm_write_pos = self.replayssm_cache_base = self.replayssm_is_flush = None
        self.enable_custom_mem_pool, self.custom_mem_pool = False, None
        self.conv_shard_groups, self.conv_slice_axis = None, 0
        tensors = [
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in layout.state_shapes(size + 1).values()
        ]
        self.rings, self.csa_tails, self.hca_tails = tensors
        self.mamba_cache = self.State(
            conv=tensors, temporal=torch.zeros((self.num_mamba_layers, size + 1, 0), device=device)
        )
        self.mem_usage = self.mamba_cache.mem_usage_bytes() / GB
        self._csa = {layer: i for i, layer in enumerate(layout.csa_layers)}
        self._hca = {layer: i for i, layer in enumerate(layout.hca_layers)}

    def ring(self, layer: int) -> Tensor:
        """[slots, 128, width] row table of a layer's windows."""
        return self.rings[layer]

    def tail(self, layer: int) -> Tensor | None:
        """Compressor state of a layer, None without a compressor."""
        if layer in self._csa:
            return self.csa_tails[self._csa[layer]]
        return self.hca_tails[self._hca[layer]] if layer in self._hca else None

    def clear_slots(self, indices: Tensor) -> None:
        """Nothing: with no tokens in the request every old row of a slot is invisible (SPEC 3.8, 6.2)."""

    def copy_from(self, src_indices: Tensor, dst_indices: Tensor) -> None:
        """Whole slots: a checkpoint into the live slot of the request that resumes from it."""
        self.copy_checkpoints(src_indices.to(torch.int32), dst_indices.to(torch.int32))

    def copy_checkpoints(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots `src` to `dst` ([n] int32, -1 skips) at a length that is a multiple of 128.

        HCA tails are empty there, whatever their bytes say, and stay behind.
        """
        torch.ops.dsv4_sglang.copy_state(src, dst, [self.rings, self.csa_tails])


class StateReqToTokenPool(HybridReqToTokenPool):
    """Requests' token tables, and the state slots that requests hold."""

    mamba_pool_cls = StateSlotPool


class CompressedKVPool(KVCache):
    """Compressed entries and indexer keys: 32 + 1 entries a block of 128 slots, written by the append op only.

    Slot index s of a token: its CSA entry is row s // 4 of the layer's table, its HCA entry row s // 128.
    """

    def __init__(self, *, size: int, page_size: int, dtype: torch.dtype, layout: CacheLayout, device: str) -> None:
        if page_size != BLOCK:
            raise ValueError(f"page size is {page_size}; the blocks of this cache have {BLOCK} tokens")
        super().__init__(size, page_size, dtype, len(layout.csa_layers) + len(layout.hca_layers), device, False)
        self.layout = layout
        self.blocks = size // BLOCK + 1
        shapes = layout.block_shapes(self.blocks)
        self.csa_entries, self.index_keys, self.hca_entries = (
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes.values()
        )
        self.bytes = sum(tensor_bytes(*spec) for spec in shapes.values())
        self._csa = {layer: i for i, layer in enumerate(layout.csa_layers)}
        self._hca = {layer: i for i, layer in enumerate(layout.hca_layers)}

    def entries(self, layer: int) -> Tensor | None:
        """Row table of a layer's entries, None without a compressor."""
        if layer in self._csa:
            return self.csa_entries[self._csa[layer]]
        return self.hca_entries[self._hca[layer]] if layer in self._hca else None

    def keys(self, layer: int) -> Tensor | None:
        """Indexer keys of a CSA layer."""
        return self.index_keys[self._csa[layer]] if layer in self._csa else None

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """One vector is key and value: all bytes count as keys."""
        return self.bytes, 0

    def _by_layer(self, layer_id: int) -> NoReturn:
        raise NotImplementedError(
            "compressed entries have no key and value buffer of a layer; read them with entries() and keys()"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = _by_layer

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("compressed entries are written by torch.ops.dsv4_sglang.append only")


class CacheKVPool(HybridLinearKVPool):
    """Both pools under the class by which SGLang recognises a hybrid model; its size in memory counts both."""

    def __init__(self, compressed: CompressedKVPool, state: StateSlotPool, head_dim: int) -> None:
        layout = compressed.layout
        super().__init__(
            size=compressed.size,
            dtype=compressed.dtype,
            page_size=compressed.page_size,
            head_num=1,
            head_dim=head_dim,
            full_attention_layer_ids=[i for i, ratio in enumerate(layout.ratios) if ratio],
            device=compressed.device,
            mamba_pool=state,
            full_kv_pool=compressed,
        )
        self.mem_usage = compressed.bytes / GB + state.mem_usage
