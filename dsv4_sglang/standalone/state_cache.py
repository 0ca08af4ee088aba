"""`StateCachePool`: window rings and compressor states of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import HcaState, LayerCacheSchema
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import fp8_views
from dsv4_sglang.model.geometry import HCA_ONLINE_ROWS, HCA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.standalone.allocator import ids_on

# `swa_pos` of a ring entry that holds no token.
EMPTY = -1

# Parts of a compressor state of raw tokens and of an online one. An HCA layer has the first two raw parts.
RAW_PARTS = ("tail_ka", "tail_za", "tail_kb", "tail_zb")
ONLINE_PARTS = ("tail_max", "tail_sum", "tail_acc")


class StateCachePool:
    """State of one layer: `max_requests` slots in a `StateStorage`, as a server has one for all layers.

    Tensors, as the ops take them: `ring` [slots, R, width] (R: `LayerCacheSchema.ring_rows`) and `compressor_state`
    (None for SWA; shape in `LayerCacheSchema.compressor_state_shape`). The split tensors below are views of them. A
    "tail" is what SGLang and the paper call compressor state. Names end in `a` for the open window and in `b` for the
    overlapping stream, which the next window pools too, as in the paper; transformers has a and b the other way round.
    k and z are projections, z with the position bias added. Cc and Cp are the rings' rows of a CSA compressor state, n
    the copies of an HCA compressor state (`state_rows`): 4, 8 and 1 without drafts. tail_acc is not divided by
    tail_sum.

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

    The rows that are alive follow from the length of a slot's request. `swa_pos`, `swa_head` and `tail_len` follow from
    it too: they are written for inspection, and a server does not have them.

    Raises:
        ValueError: `max_requests` is below 1.
    """

    def __init__(self, schema: LayerCacheSchema, max_requests: int, device: torch.device | str | None = None) -> None:
        self.schema, self.max_requests, self.device = schema, max_requests, resolve_device(device)
        self._storage = StateStorage(CacheLayout((schema,), self.device), max_requests)
        self.ring: Tensor = self._storage.ring(0)
        self.compressor_state: Tensor | None = self._storage.compressor_state(0)

        def positions(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((max_requests, *shape), fill, dtype=torch.int32, device=self.device)

        self.swa_pos = positions(schema.ring_rows, fill=EMPTY)
        self.swa_head = positions()
        self.tail_len: Tensor | None = positions() if schema.ratio else None

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
        """All tensors of the slots. The first dimension is the slot."""
        every = (self.ring, self.compressor_state, self.swa_pos, self.swa_head, self.tail_len)
        return [tensor for tensor in every if tensor is not None]

    def reset_slot(self, slot: int) -> None:
        """Empty a slot. Raise ValueError for a slot that does not exist."""
        self._check(slot)
        for tensor in self.tensors:
            tensor[slot].fill_(EMPTY if tensor is self.swa_pos else 0)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy slot `src` to slot `dst`, as for a second request with the same tokens (SPEC 6.6). Raise ValueError for
        a slot that does not exist."""
        self._check(src)
        self._check(dst)
        pair = ids_on(self.device, [src]), ids_on(self.device, [dst])
        torch.ops.dsv4_sglang.copy_state(*pair, [tensor[None] for tensor in self.tensors])

    def memory_bytes(self) -> int:
        """Return the bytes of rings and compressor states, block padding included, without positions."""
        return self._storage.memory_bytes()

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.max_requests:
            raise ValueError(f"slot {slot} does not exist; expected 0..{self.max_requests - 1}")


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
