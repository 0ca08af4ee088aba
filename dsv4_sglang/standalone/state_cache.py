"""`StateCachePool`: the state of one layer, with a view of each part of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import HcaState, LayerCacheSchema
from dsv4_sglang.cache.state_cache import EMPTY, StateStorage, check_slot
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import fp8_views
from dsv4_sglang.model.geometry import HCA_ONLINE_ROWS, HCA_RATIO, WINDOW
from dsv4_sglang.model.layer_schedule import AttentionType

# Parts of a compressor state of raw tokens and of an online one. An HCA layer has the first two raw parts.
RAW_PARTS = ("tail_ka", "tail_za", "tail_kb", "tail_zb")
ONLINE_PARTS = ("tail_max", "tail_sum", "tail_acc")


class StateCachePool:
    """State of one layer with `max_requests` slots: a pool of its own, or views of layer `layer` of a shared storage.

    Tensors, as the ops take them: `ring` [slots, R, width] (R: `LayerCacheSchema.ring_rows`) and `compressor_state`
    (None for SWA; shape in `LayerCacheSchema.compressor_state_shape`). All others are views of them. Names end in `a`
    for the open window and in `b` for the overlapping stream, which the next window pools too; k and z are projections,
    z with the position bias added. Cc and Cp are the rings' rows of a CSA compressor state, n the copies of an HCA
    compressor state (`state_rows`): 4, 8 and 1 without drafts. tail_acc is not divided by tail_sum.

    | attribute | shape | layers |
    | --- | --- | --- |
    | swa_fp8, swa_rope | [slots, R, 448] uint8, [slots, R, 64] bf16 | FP8 entries |
    | swa_inv | [slots, R] float8_e8m0fnu, the multiplier that dequantises | FP8 entries |
    | swa_pos | [slots, R] int32, position of each ring entry, -1 for none | all |
    | swa_head | [slots] int32, ring index of the next position | all |
    | tail_ka, tail_za | [slots, Cc, 512] (row t % Cc), HCA [slots, 128, 512] (row t & 127) fp32 | CSA, HCA raw |
    | tail_kb, tail_zb | [slots, Cp, 512] fp32 (row t % Cp) | CSA |
    | index_tail_ka, _za, _kb, _zb | the same with 128 columns | CSA |
    | tail_max, tail_sum, tail_acc | [slots, 512], with drafts [slots, n, 512] (copy t % n) fp32 | HCA online |
    | tail_len | [slots] int32, tokens in the open window | CSA, HCA |

    Raises:
        ValueError: `storage` has another number of slots, or no position tables.
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        max_requests: int,
        device: torch.device | str | None = None,
        *,
        storage: StateStorage | None = None,
        layer: int = 0,
    ) -> None:
        if storage is None:
            storage = StateStorage(CacheLayout((schema,), resolve_device(device)), max_requests)
        if storage.num_slots != max_requests:
            raise ValueError(f"the storage has {storage.num_slots} slots; expected {max_requests}")
        if storage.swa_pos is None or storage.swa_head is None:
            raise ValueError("the storage has no position tables; construct it with positions=True")
        self.schema = schema
        self.max_requests = max_requests
        self.device = storage.device
        self.ring: Tensor = storage.ring(layer)
        self.compressor_state: Tensor | None = storage.compressor_state(layer)
        self.swa_pos: Tensor = storage.swa_pos[layer]
        self.swa_head: Tensor = storage.swa_head[layer]
        self.tail_len: Tensor | None = storage.compressor_state_lengths(layer)

        self.swa_fp8: Tensor | None = None
        self.swa_rope: Tensor | None = None
        self.swa_inv: Tensor | None = None
        if schema.kv_format is KVFormat.FP8:
            self.swa_fp8, self.swa_rope, self.swa_inv = fp8_views(self.ring)
        parts = _compressor_state_parts(schema, self.compressor_state)
        for name in (*RAW_PARTS, *(f"index_{name}" for name in RAW_PARTS), *ONLINE_PARTS):
            setattr(self, name, parts.get(name))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of a slot. The first dimension is the slot."""
        every = (self.ring, self.compressor_state, self.swa_pos, self.swa_head, self.tail_len)
        return [tensor for tensor in every if tensor is not None]

    def reset_slot(self, slot: int) -> None:
        """Empty a slot of this layer."""
        check_slot(slot, self.max_requests)
        for tensor in self.tensors:
            tensor[slot].fill_(EMPTY if tensor is self.swa_pos else 0)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy slot `src` of this layer to slot `dst`."""
        check_slot(src, self.max_requests)
        check_slot(dst, self.max_requests)
        for tensor in self.tensors:
            tensor[dst].copy_(tensor[src])

    def memory_bytes(self) -> int:
        """Return the bytes of this layer's slots, block padding included; exact also for a view of a shared storage."""
        return sum(self.max_requests * tensor.stride(0) * tensor.element_size() for tensor in self.tensors)


def _compressor_state_parts(schema: LayerCacheSchema, state: Tensor | None) -> dict[str, Tensor]:
    """Return views of a layer's compressor state by their names in `StateCachePool`."""
    if state is None:
        return {}
    if schema.attn is AttentionType.CSA:
        rows = schema.rows.csa
        sizes = (rows.current, rows.current, rows.previous, rows.previous)
        main, index = state.split((schema.entry_head_dim, schema.indexer_head_dim), dim=-1)
        parts = dict(zip(RAW_PARTS, main.split(sizes, dim=1)))
        return parts | {f"index_{name}": part for name, part in zip(RAW_PARTS, index.split(sizes, dim=1))}
    if schema.hca_state is HcaState.RAW:
        return dict(zip(RAW_PARTS, state.split(HCA_RATIO, dim=1)))
    return dict(zip(ONLINE_PARTS, state.unflatten(1, (-1, HCA_ONLINE_ROWS)).squeeze(1).unbind(-2)))


def resume_slot(storage: StateStorage, slot: int, length: int) -> None:
    """Set the position tables of an empty slot after its state was loaded from a snapshot.

    Args:
        storage: storage with position tables.
        slot: the slot. Its rings hold the window of `length` tokens.
        length: tokens of the snapshot, a multiple of 128.
    """
    assert storage.swa_pos is not None and storage.swa_head is not None
    rows = storage.swa_pos.shape[2]
    window = torch.arange(length - WINDOW, length, dtype=torch.int32, device=storage.device)
    storage.swa_pos[:, slot, window.long() % rows] = window
    storage.swa_head[:, slot] = length % rows
