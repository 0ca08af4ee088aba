"""The two pools that SGLang's scheduler owns: state slots of requests, and paged blocks of compressed entries.

SGLang treats the second as a KV cache that is addressed by token slot, with pages of 128 tokens. It sees the state
slots as Mamba2 states, which its hybrid-model code allocates, copies and frees:

| SGLang's Mamba2 states | here |
| --- | --- |
| cache parameters | `StateParams`: the layout, and the numbers of staging slots and snapshots |
| `mamba_cache_per_req`, for equal layers | overridden with `CacheLayout.slot_bytes`: layers differ |
| `conv`: tensors [layers, slots, ...] | the tensors of `StateStorage`: window rings, and compressor states by kind |
| `temporal` | empty |
| slots 1..size of running requests | the same |
| slots after them, unknown to SGLang | staging: the snapshots of a prefill step until its last layer has run |
| `mamba_ckpt_pool` | `SnapshotSlots` |
| ping-pong track buffer | zeros, which a prefill step reads and `snapshot_schedule` discards |
| dimensions that ranks divide | none: every rank has the whole state, so a transfer does not divide buffers |

Slot 0 and page 0 are SGLang's dummies and never belong to a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.configs.mamba_utils import BaseLinearStateParams, Mamba2StateDType
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import GB, HybridLinearKVPool, HybridReqToTokenPool, KVCache, MambaPool
from sglang.srt.platforms import current_platform
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch import Tensor

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.paged_cache import make_paged_pools
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots
from dsv4_sglang.srt.sglang.pools import fill_state_pool

# Of each buffer of a transfer: addresses, lengths in bytes, and bytes per item.
BufferInfos = tuple[list[int], list[int], list[int]]


def released_while_asleep(enable_memory_saver: bool) -> AbstractContextManager[None]:
    """Return a context manager for allocations that are released while the server sleeps (`--enable-memory-saver`).

    On wake-up the tensors are mapped again at the same addresses with undefined contents (`srt/features/sleep.py`).
    """
    adapter = TorchMemorySaverAdapter.create(enable=enable_memory_saver)
    return adapter.region(GPU_MEMORY_TYPE_KV_CACHE)


def buffer_infos(tables: Iterable[Tensor]) -> BufferInfos:
    """Return the transfer description of tables with one block or slot per row.

    The padding of a row counts as part of the item, so that consecutive rows can be copied at once.
    """
    found = [(table.data_ptr(), table.stride(0) * table.itemsize, table.shape[0]) for table in tables]
    return [at for at, _, _ in found], [size * rows for _, size, rows in found], [size for _, size, _ in found]


@dataclass(kw_only=True, frozen=True)
class StateShape:
    """Shapes of one slot of one layer."""

    conv: list[tuple[int, ...]]
    temporal: tuple[int, ...] = (0,)


@dataclass(kw_only=True, frozen=True)
class StateParams(BaseLinearStateParams):
    """Cache parameters, which SGLang passes to the pool."""

    shape: StateShape
    cache_layout: CacheLayout
    staging: int
    snapshots: int

    @classmethod
    def of(cls, layout: CacheLayout, staging: int = 0, snapshots: int = 0) -> StateParams:
        """Build the parameters.

        Args:
            layout: layout of the cache.
            staging: slots for the snapshots of a prefill step.
            snapshots: snapshot slots.
        """
        return cls(
            staging=staging,
            snapshots=snapshots,
            layers=list(range(len(layout.schemas))),
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
            shape=StateShape(conv=[part.shape[2:] for part in layout.state_parts(1)]),
            cache_layout=layout,
        )

    @property
    def mamba_cache_per_req(self) -> int:
        return self.cache_layout.slot_bytes


class StateSlotPool(MambaPool):
    """`StateStorage` with the interface of SGLang's Mamba pool."""

    def __init__(
        self,
        *,
        size: int,
        cache_params: StateParams,
        mamba_layer_ids: list[int],
        device: str,
        enable_memory_saver: bool = False,
        **ignored: Any,
    ) -> None:
        self.size, self.device = size, device
        self.mamba_layer_ids = list(mamba_layer_ids)
        self.num_mamba_layers = len(self.mamba_layer_ids)
        fill_state_pool(self)

        self.staging = cache_params.staging
        slots = size + 1 + self.staging
        with released_while_asleep(enable_memory_saver):
            self.storage = StateStorage(cache_params.cache_layout, slots, cache_params.snapshots)
        self.mamba_cache = self.State(
            conv=self.storage.tensors,
            temporal=torch.zeros((self.num_mamba_layers, slots, 0), device=device),
        )
        self.bytes = self.storage.memory_bytes()
        self.mem_usage = self.bytes / GB

    def reset(self) -> None:
        """Restore the initial content, whatever the memory holds."""
        self.storage.reset()

    def clear_slots(self, indices: Tensor) -> None:
        """Do nothing. In a request without tokens, all old entries of a slot are invisible (SPEC 3.8, 6.2)."""

    def get_kv_size_bytes(self) -> int:
        return self.bytes

    def _tables(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (layer, [slots, ...]) for every tensor of which a slot consists."""
        yield from enumerate(self.storage.rings)
        for kind, compressor_states in self.storage.compressor_states.items():
            yield from zip(self.storage.layout.layers(kind), compressor_states)

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Return the buffers of a slot for a transfer to another server."""
        return buffer_infos(table for _, table in self._tables())

    def get_state_layer_ids(self) -> list[int]:
        """Return the layer of each of these buffers."""
        return [layer for layer, _ in self._tables()]

    def _whole(self) -> list[Any]:
        """Return no divided dimensions."""
        return []

    get_state_dim_per_tensor = _whole
    get_state_slice_outer_counts = _whole
    get_state_conv_shard_groups = _whole

    def get_cpu_copy(self, indices: Tensor) -> list[Tensor]:
        """Return host copies of slot `indices` [] of each tensor of the storage, [layers, ...]. On a CPU they are
        copies as well, where SGLang's pool returns views."""
        current_platform.synchronize()
        return [tensor[:, indices].to("cpu", copy=True) for tensor in self.storage.tensors]

    def load_cpu_copy(self, mamba_cache_cpu: list[Tensor], indices: Tensor) -> None:
        """Copy a slot back from the host, to the slot `indices` [] that the request has now."""
        for tensor, copy in zip(self.storage.tensors, mamba_cache_cpu, strict=True):
            tensor[:, indices] = copy.to(tensor.device)
        current_platform.synchronize()


class StateReqToTokenPool(HybridReqToTokenPool):
    """Token tables of requests, their state slots, and the snapshots of the prefix cache."""

    mamba_pool_cls = StateSlotPool

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(
            (self.req_to_token.shape[0], 2), dtype=torch.int64, device=arguments["device"]
        )
        params: StateParams = arguments["cache_params"]
        if params.snapshots:
            self.mamba_ckpt_pool = SnapshotSlots(
                params.snapshots, arguments["device"], params.cache_layout.snapshot_bytes
            )

    def register_layer_transfer_counter(self, layer_transfer_counter: Any) -> None:
        """Set the counter of the host cache, which signals the arrival of each layer of a load."""
        super().register_layer_transfer_counter(layer_transfer_counter)
        self.mamba_ckpt_pool.layer_transfer_counter = layer_transfer_counter


class CompressedKVPool(KVCache):
    """Paged pool of compressed entries and index keys of the layers that have some.

    Steps write to it with the append ops only. Loads from a host and transfers from another server copy whole blocks.
    A V4 layer has 32 (CSA) or 1 (HCA) entries per block of 128 tokens; V4.1 has 64 or 128 in a few layers. The entry of
    ratio r for token slot s is entry s // r of the layer's KV buffer.
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layout: CacheLayout,
        device: str,
        enable_memory_saver: bool = False,
    ) -> None:
        """Allocate the pool.

        Args:
            size: tokens, a multiple of 128.
            page_size: must be 128.
            dtype: SGLang's KV cache dtype, which does not affect the layout.
            layout: layout of the cache.
            device: device of the pool.
            enable_memory_saver: release the memory while the server sleeps.

        Raises:
            ValueError: `page_size` is not 128.
        """
        if page_size != BLOCK:
            raise ValueError(f"page size is {page_size}; the blocks of this cache have {BLOCK} tokens")
        self.compressed_layers = sorted(layer for kind in layout.kinds for layer in layout.layers(kind))
        super().__init__(size, page_size, dtype, len(self.compressed_layers), device, enable_memory_saver)
        self.layout = layout
        self.blocks = size // BLOCK + 1
        with released_while_asleep(enable_memory_saver):
            self.pools = make_paged_pools(layout, dict.fromkeys(layout.kinds, self.blocks))
        self.bytes = sum(pool.memory_bytes() for pool in self.pools if pool is not None)

    def reset(self) -> None:
        """Restore the initial content, whatever the memory holds."""
        for pool in self.pools:
            if pool is not None:
                pool.reset()

    def entries(self, layer: int) -> Tensor | None:
        """Return the KV buffer of a layer's entries, or None for a layer without a compressor."""
        pool = self.pools[layer]
        return None if pool is None else pool.entries

    def keys(self, layer: int) -> Tensor | None:
        """Return the index keys of a layer, or None. CSA layers have keys; in V4.1, layers with their own entries."""
        pool = self.pools[layer]
        return None if pool is None else pool.index_keys

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return (bytes of keys, bytes of values). An entry is key and value at once, and counts as key."""
        return self.bytes, 0

    def layer_views(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (layer, [blocks, n]) for every view of which a block consists (`PagedKVPool.block_views`)."""
        for layer, pool in enumerate(self.pools):
            for view in pool.block_views() if pool is not None else []:
                yield layer, view

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Return the buffers of a block for a transfer to another server."""
        return buffer_infos(view for _, view in self.layer_views())

    def get_cpu_copy(self, indices: Tensor, mamba_indices: Tensor | None = None, **_request: Any) -> list[Tensor]:
        """Return host copies of a request's blocks, each [blocks, n].

        Args:
            indices: [tokens] token slots of the request, from its first token on.
            mamba_indices: unused.
        """
        blocks = indices[::BLOCK] // BLOCK
        current_platform.synchronize()
        return [view[blocks].cpu() for _, view in self.layer_views()]

    def load_cpu_copy(
        self, kv_cache_cpu: list[Tensor], indices: Tensor, mamba_indices: Tensor | None = None, **_request: Any
    ) -> None:
        """Copy blocks back from the host, to the blocks of `indices` that the request has now."""
        blocks = indices[::BLOCK] // BLOCK
        for (_, view), copy in zip(self.layer_views(), kv_cache_cpu, strict=True):
            view[blocks] = copy.to(view.device)
        current_platform.synchronize()

    def _by_layer(self, layer_id: int) -> NoReturn:
        raise NotImplementedError(
            "compressed entries have no key and value buffer of a layer; read them with entries() and keys()"
        )

    get_key_buffer = _by_layer
    get_value_buffer = _by_layer
    get_kv_buffer = _by_layer

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("compressed entries are written by torch.ops.dsv4_sglang.append only")


class CacheKVPool(HybridLinearKVPool):
    """Both pools, as the class by which SGLang recognises a hybrid model. `mem_usage` is the sum of both."""

    def __init__(self, compressed: CompressedKVPool, state: StateSlotPool) -> None:
        super().__init__(
            size=compressed.size,
            dtype=compressed.dtype,
            page_size=compressed.page_size,
            head_num=1,
            head_dim=ENTRY_DIM,
            full_attention_layer_ids=compressed.compressed_layers,
            device=compressed.device,
            mamba_pool=state,
            full_kv_pool=compressed,
        )
        self.mem_usage = compressed.bytes / GB + state.mem_usage

    def get_kv_layer_ids(self) -> list[int]:
        """Return the layer of each of the blocks' buffers."""
        return [layer for layer, _ in self.full_kv_pool.layer_views()]

    @property
    def is_loading(self) -> bool:
        """True if the current step waits for a load from the host cache."""
        return self.layer_transfer_counter is not None and self.layer_transfer_counter.consumer_index >= 0

    def wait_for_layer(self, layer: int) -> None:
        """Let the current stream wait until a layer is loaded from the host cache, if there is one."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer)
