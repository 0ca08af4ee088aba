"""Slots of requests of a cache without a server: `SlotStorage` for all layers, `StateCachePool` for one."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import HcaState, LayerCacheSchema
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import fp8_views
from dsv4_sglang.model.geometry import HCA_ONLINE_ROWS, HCA_RATIO, WINDOW
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.standalone.allocator import ids_on

# `swa_pos` of a ring entry that holds no token.
EMPTY = -1

# Parts of a compressor state of raw tokens and of an online one. An HCA layer has the first two raw parts.
RAW_PARTS = ("tail_ka", "tail_za", "tail_kb", "tail_zb")
ONLINE_PARTS = ("tail_max", "tail_sum", "tail_acc")


class SlotStorage(StateStorage):
    """`StateStorage` with the positions that each slot holds, for inspection.

    They follow from the lengths of the requests, so a server does not store them.

    Attributes:
        swa_pos: [layers, slots, R] int32, position of each ring entry, -1 for none.
        swa_head: [layers, slots] int32, ring index of the next position.
        tail_len: [layers, slots] int32, tokens in the open window.
    """

    def __init__(self, layout: CacheLayout[LayerCacheSchema], num_slots: int, snapshots: int = 0) -> None:
        super().__init__(layout, num_slots, snapshots)
        shape = len(layout.schemas), num_slots
        self.swa_pos = torch.full((*shape, layout.ring_rows), EMPTY, dtype=torch.int32, device=self.device)
        self.swa_head = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.tail_len = torch.zeros(shape, dtype=torch.int32, device=self.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the slots. The second dimension is the slot."""
        return [*super().tensors, self.swa_pos, self.swa_head, self.tail_len]

    def reset_slot(self, slot: int) -> None:
        """Empty a slot in all layers. Raise ValueError for a slot that does not exist."""
        self._check(slot)
        for tensor in self.tensors:
            tensor[:, slot].fill_(EMPTY if tensor is self.swa_pos else 0)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy slot `src` to slot `dst` in all layers, as for a fork of a request (SPEC 6.6). Raise ValueError for a
        slot that does not exist."""
        self._check(src)
        self._check(dst)
        torch.ops.dsv4_sglang.copy_state(ids_on(self.device, [src]), ids_on(self.device, [dst]), self.tensors)

    def resume_slot(self, slot: int, length: int) -> None:
        """Set the positions of an empty slot after its state was loaded from a snapshot.

        Args:
            slot: the slot. Its rings hold the window of `length` tokens.
            length: tokens of the snapshot, a multiple of 128.

        Raises:
            ValueError: the slot does not exist.
        """
        self._check(slot)
        rows = self.layout.ring_rows
        window = torch.arange(length - WINDOW, length, dtype=torch.int32, device=self.device)
        self.swa_pos[:, slot, window.long() % rows] = window
        self.swa_head[:, slot] = length % rows

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} does not exist; expected 0..{self.num_slots - 1}")


class StateCachePool:
    """State of layer `layer`: views of a `SlotStorage`.

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
    """

    def __init__(self, storage: SlotStorage, layer: int) -> None:
        schema = storage.layout.schemas[layer]
        self.schema = schema
        self.ring: Tensor = storage.ring(layer)
        self.compressor_state: Tensor | None = storage.compressor_state(layer)
        self.swa_pos: Tensor = storage.swa_pos[layer]
        self.swa_head: Tensor = storage.swa_head[layer]
        self.tail_len: Tensor | None = storage.tail_len[layer] if schema.ratio else None

        self.swa_fp8: Tensor | None = None
        self.swa_rope: Tensor | None = None
        self.swa_inv: Tensor | None = None
        if schema.kv_format is KVFormat.FP8:
            self.swa_fp8, self.swa_rope, self.swa_inv = fp8_views(self.ring)
        parts = _compressor_state_parts(schema, self.compressor_state)
        for name in (*RAW_PARTS, *(f"index_{name}" for name in RAW_PARTS), *ONLINE_PARTS):
            setattr(self, name, parts.get(name))


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
