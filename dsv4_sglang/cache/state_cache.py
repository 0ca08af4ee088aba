"""The half of the cache that does not grow: window rings and compressor tails, one state slot a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.schema import LayerCacheSchema
from dsv4_sglang.formats import RowTable, make_row_tables
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType

EMPTY = -1
"""`swa_pos` of a ring row that holds no token."""


class StateStorage:
    """The state of all layers in a few tensors, each `[layers of that kind, slots, ...]`.

    - `rings` [layers, slots, 128, width]: window rows, position t in row t & 127
    - `tails`: fp32, by kind: CSA [layers, slots, 24, 640]; HCA [layers, slots, 256, 512] raw, [.., .., 3, 512] online
    - `swa_pos` [layers, slots, 128], `swa_head` [layers, slots], `tail_len` [layers, slots] int32

    What of a slot is alive follows from its request's length alone (SPEC 3.7), so nothing must be cleared for a new
    owner; `reset_slot` clears it all the same, so that a slot reads as empty.
    """

    def __init__(
        self, schemas: Sequence[LayerCacheSchema], num_slots: int, device: torch.device | str | None = None
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"{num_slots} state slots; expected at least 1")
        if not schemas:
            raise ValueError("no layers: a state needs at least one schema")
        formats = {schema.row_format for schema in schemas}
        if len(formats) > 1:
            raise ValueError(f"window rings of several formats {sorted(f.value for f in formats)}; expected one")
        self.schemas = list(schemas)
        self.num_slots = num_slots
        self.device = resolve_device(device)
        layers, window = len(schemas), schemas[0].swa_window_size

        self.rings: Tensor = make_row_tables(layers, num_slots, window, schemas[0].row_format, self.device)
        self.swa_pos: Tensor = torch.full((layers, num_slots, window), EMPTY, dtype=torch.int32, device=self.device)
        self.swa_head: Tensor = torch.zeros((layers, num_slots), dtype=torch.int32, device=self.device)
        compressed = [schema for schema in schemas if schema.ratio]
        self.tail_len: Tensor = torch.zeros((len(compressed), num_slots), dtype=torch.int32, device=self.device)
        self.tails: dict[AttentionType, Tensor] = {}
        for kind in (AttentionType.CSA, AttentionType.HCA):
            shapes = {schema.tail_shape for schema in schemas if schema.attn is kind}
            if len(shapes) > 1:
                raise ValueError(f"{kind.name} tails of several shapes {shapes}; expected one")
            for shape in shapes:
                assert shape is not None
                count = sum(schema.attn is kind for schema in schemas)
                self.tails[kind] = torch.zeros((count, num_slots, *shape), dtype=torch.float32, device=self.device)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor, slot dimension second: what a slot copy moves. Layer kinds that do not exist have none."""
        bookkeeping = [self.swa_pos, self.swa_head] + ([self.tail_len] if self.tail_len.shape[0] else [])
        return [self.rings, *self.tails.values(), *bookkeeping]

    def layer(self, index: int) -> LayerState:
        """The tensors of layer `index` (its place in `schemas`), as views."""
        kind = self.schemas[index].attn
        before = self.schemas[:index]
        compressed = kind in self.tails
        return LayerState(
            ring=self.rings[index],
            tail=self.tails[kind][sum(s.attn is kind for s in before)] if compressed else None,
            swa_pos=self.swa_pos[index],
            swa_head=self.swa_head[index],
            tail_len=self.tail_len[sum(s.ratio > 0 for s in before)] if compressed else None,
        )

    def reset_slot(self, slot: int) -> None:
        """Empty a slot in all layers."""
        _check_slot(slot, self.num_slots)
        for tensor in self.tensors:
            tensor[:, slot].fill_(EMPTY if tensor is self.swa_pos else 0)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy slot `src` to slot `dst` in all layers: what a fork of a request needs (SPEC 6.6)."""
        _check_slot(src, self.num_slots)
        _check_slot(dst, self.num_slots)
        if src == dst:
            return
        pair = torch.tensor([[src], [dst]], dtype=torch.int32).to(self.device)
        torch.ops.dsv4_sglang.copy_state(pair[0], pair[1], self.tensors)

    def memory_bytes(self) -> int:
        """Bytes of the allocations, block padding included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


@dataclass(frozen=True)
class LayerState:
    """One layer's part of a `StateStorage`, slot dimension first."""

    ring: Tensor
    tail: Tensor | None
    swa_pos: Tensor
    swa_head: Tensor
    tail_len: Tensor | None


class StateCachePool:
    """The state of one layer, `max_requests` slots: by itself, or a view of a storage that all layers share.

    Tables, as the ops take them: `ring` [slots, 128, width] and `tail` (None for SWA; shape in
    `LayerCacheSchema.tail_shape`). Everything below is a view of them. Names end in `a` for the window that is open and
    in `b` for the stream that the next window pools too; k and z are projections, z with the position bias added.

    | attribute | shape | who has it |
    | --- | --- | --- |
    | swa_fp8, swa_rope | [slots, 128, 448] uint8, [slots, 128, 64] bf16 | FP8 rows |
    | swa_inv | [slots, 128] float8_e8m0fnu, the multiplier that dequantises | FP8 rows |
    | swa_pos | [slots, 128] int32, position of each ring row, -1: none | all |
    | swa_head | [slots] int32, ring row of the next position | all |
    | tail_ka, tail_za | [slots, 4, 512] (row t & 3), HCA [slots, 128, 512] (row t & 127) fp32 | CSA, HCA raw |
    | tail_kb, tail_zb | [slots, 8, 512] fp32 (row t & 7) | CSA |
    | index_tail_ka, _za, _kb, _zb | the same with 128 columns | CSA |
    | tail_max, tail_sum, tail_acc | [slots, 512] fp32, accumulator not divided by the sum | HCA online |
    | tail_len | [slots] int32, tokens in the open window | CSA, HCA |
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        max_requests: int,
        device: torch.device | str | None = None,
        *,
        state: LayerState | None = None,
    ) -> None:
        self.schema = schema
        self.max_requests = max_requests
        # Without a given state the pool owns one, of a single layer.
        self._state = state if state is not None else StateStorage([schema], max_requests, device).layer(0)
        if self._state.ring.shape[0] != max_requests:
            raise ValueError(f"the state given has {self._state.ring.shape[0]} slots; expected {max_requests}")
        self.device = self._state.ring.device
        self.ring: Tensor = self._state.ring
        self.tail: Tensor | None = self._state.tail
        self.swa_pos: Tensor = self._state.swa_pos
        self.swa_head: Tensor = self._state.swa_head
        self.tail_len: Tensor | None = self._state.tail_len

        views = RowTable(self.ring, schema.row_format).views()
        self.swa_fp8: Tensor | None = views.fp8 if views else None
        self.swa_rope: Tensor | None = views.rope if views else None
        self.swa_inv: Tensor | None = views.inv_scale if views else None
        self._split_tail()

    def _split_tail(self) -> None:
        names = ("tail_ka", "tail_za", "tail_kb", "tail_zb")
        parts: dict[str, Tensor] = {}
        if self.tail is not None and self.schema.attn is AttentionType.CSA:
            sizes = (CSA_RATIO, CSA_RATIO, 2 * CSA_RATIO, 2 * CSA_RATIO)
            main, index = self.tail.split((self.schema.entry_head_dim, self.schema.indexer_head_dim), dim=-1)
            parts.update(zip(names, main.split(sizes, dim=1)))
            parts.update((f"index_{name}", part) for name, part in zip(names, index.split(sizes, dim=1)))
        elif self.tail is not None and self.tail.shape[1] == 2 * HCA_RATIO:
            parts.update(zip(names, self.tail.split(HCA_RATIO, dim=1)))
        elif self.tail is not None:
            parts.update(zip(("tail_max", "tail_sum", "tail_acc"), self.tail.unbind(1)))
        self.tail_ka, self.tail_za, self.tail_kb, self.tail_zb = (parts.get(name) for name in names)
        self.index_tail_ka, self.index_tail_za = parts.get("index_tail_ka"), parts.get("index_tail_za")
        self.index_tail_kb, self.index_tail_zb = parts.get("index_tail_kb"), parts.get("index_tail_zb")
        self.tail_max, self.tail_sum = parts.get("tail_max"), parts.get("tail_sum")
        self.tail_acc = parts.get("tail_acc")

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a slot consists of, slot dimension first."""
        every = (self.ring, self.tail, self.swa_pos, self.swa_head, self.tail_len)
        return [tensor for tensor in every if tensor is not None]

    def reset_slot(self, slot: int) -> None:
        """Empty a slot of this layer."""
        _check_slot(slot, self.max_requests)
        for tensor in self.tensors:
            tensor[slot].fill_(EMPTY if tensor is self.swa_pos else 0)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy slot `src` of this layer to slot `dst`."""
        _check_slot(src, self.max_requests)
        _check_slot(dst, self.max_requests)
        for tensor in self.tensors:
            tensor[dst].copy_(tensor[src])

    def memory_bytes(self) -> int:
        """Bytes of this layer's slots, block padding included; exact for a view of a shared storage too."""
        return sum(self.max_requests * tensor.stride(0) * tensor.element_size() for tensor in self.tensors)


def _check_slot(slot: int, num_slots: int) -> None:
    if not 0 <= slot < num_slots:
        raise IndexError(f"state slot {slot} is not in 0..{num_slots - 1}")
