"""The two pools that SGLang's scheduler owns: state slots of requests, and paged blocks of compressed entries.

SGLang sees the first as its recurrent-state pool (slots allocated, copied and freed by its hybrid-model machinery) and
the second as a KV cache addressed by slot index with pages of 128 tokens. Slot 0 and page 0 are SGLang's dummies: no
request ever owns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.configs.mamba_utils import BaseLinearStateParams, Mamba2StateDType
from sglang.srt.mem_cache.memory_pool import GB, HybridLinearKVPool, HybridReqToTokenPool, KVCache, MambaPool
from torch import Tensor

from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS as BLOCK
from dsv4_sglang.formats import make_row_tables
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.srt.layout import CacheLayout
from dsv4_sglang.srt.prefix.slots import CheckpointSlots

SLOT_UNITS = 6
"""Units of four rows in a slot's CSA tail: current k, current z, previous k (two), previous z (two)."""
KEPT_UNITS = (3, 5)
"""Those alive at a multiple of 128: the second half of the previous windows' rings, positions t & 7 = 4..7."""


@dataclass(kw_only=True, frozen=True)
class StateShape:
    """SGLang's description of a state; only `conv` says something here."""

    conv: list[tuple[int, ...]]
    temporal: tuple[int, ...] = (0,)


@dataclass(kw_only=True, frozen=True)
class StateParams(BaseLinearStateParams):
    """How SGLang hands the layout to the pool. `mamba_cache_per_req` of the base assumes equal layers, which these are
    not.
    """

    shape: StateShape
    cache_layout: CacheLayout
    staging: int
    checkpoints: int

    @classmethod
    def of(cls, layout: CacheLayout, staging: int = 0, checkpoints: int = 0) -> StateParams:
        return cls(
            staging=staging,
            checkpoints=checkpoints,
            layers=list(range(len(layout.schemas))),
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
            shape=StateShape(conv=[part.shape[2:] for part in layout.state_parts(1)]),
            cache_layout=layout,
        )

    @property
    def mamba_cache_per_req(self) -> int:
        return self.cache_layout.slot_bytes


class StateSlotPool(MambaPool):
    """Window rings and compressor tails of all layers: live slots of requests, and compact checkpoints.

    - `rings` [layers, slots, 128, width]: window rows, position t in row t & 127
    - `tails`: fp32, one tensor a kind of compressor, [layers of the kind, slots, ...]

    Slots 1..size are those of requests; the `staging` slots behind them take the checkpoints of a prefill step until
    its end, when `store` moves them to checkpoints 1..`checkpoints`. Of a state at a multiple of 128 a checkpoint
    keeps what is alive (SPEC 6.6), and one allocation holds the rings of both, another the CSA tails of both, in
    units of four rows: six a slot, two a checkpoint. So a copy between them is a copy of slots.

    The live part also lies in `mamba_cache.conv`, slot dimension second, so that what SGLang inherits (transfer
    descriptions, copies) walks it. What of a slot is alive follows from its request's length alone (SPEC 3.7).
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

        self.staging, self.checkpoints = cache_params.staging, cache_params.checkpoints
        self.live_slots = slots = size + 1 + self.staging
        layers, window = len(layout.schemas), layout.schemas[0].swa_window_size
        self._all_rings = make_row_tables(
            layers, slots + self.checkpoints, window, layout.row_format, torch.device(device)
        )
        self.rings = self._all_rings[:, :slots]
        self._tail_units: Tensor | None = None
        self.tails: dict[AttentionType, Tensor] = {}
        self._tail_of_layer: dict[int, Tensor] = {}
        for kind in (AttentionType.CSA, AttentionType.HCA):
            members = layout.layers(kind)
            shape = layout.schemas[members[0]].tail_shape if members else None
            if shape is None:
                continue
            if kind is AttentionType.CSA:
                units = (len(members), slots * SLOT_UNITS + self.checkpoints * len(KEPT_UNITS), CSA_RATIO, shape[1])
                self._tail_units = torch.zeros(units, dtype=torch.float32, device=device)
                live = self._tail_units[:, : slots * SLOT_UNITS]
                # Units of slot 0 and of checkpoint 0, which does not exist.
                self._live_units = torch.tensor(KEPT_UNITS, dtype=torch.int32, device=device)
                before = slots * SLOT_UNITS - len(KEPT_UNITS)
                self._kept_units = torch.arange(before, before + len(KEPT_UNITS), dtype=torch.int32, device=device)
                self.tails[kind] = live.unflatten(1, (slots, SLOT_UNITS)).flatten(2, 3)
            else:
                self.tails[kind] = torch.zeros((len(members), slots, *shape), dtype=torch.float32, device=device)
            self._tail_of_layer.update(zip(members, self.tails[kind]))
        self.mamba_cache = self.State(
            conv=[self.rings, *self.tails.values()],
            temporal=torch.zeros((self.num_mamba_layers, slots, 0), device=device),
        )
        parts = [*layout.state_parts(slots), *layout.checkpoint_parts(self.checkpoints)]
        self.bytes = sum(part.bytes for part in parts)
        self.mem_usage = self.bytes / GB

    def ring(self, layer: int) -> Tensor:
        """[slots, 128, width] row table of a layer's windows."""
        return self.rings[layer]

    def tail(self, layer: int) -> Tensor | None:
        """[slots, ...] compressor state of a layer, None without a compressor."""
        return self._tail_of_layer.get(layer)

    def clear_slots(self, indices: Tensor) -> None:
        """Nothing: with no tokens in the request every old row of a slot is invisible (SPEC 3.8, 6.2)."""

    def store(self, slots: Tensor, checkpoints: Tensor) -> None:
        """Copy live or staging slots to checkpoints, both [n] int32, -1 skips. Their lengths are multiples of 128."""
        self._copy(slots, checkpoints, to_checkpoints=True)

    def load(self, checkpoints: Tensor, slots: Tensor) -> None:
        """Copy checkpoints to the live slots of the requests that resume from them."""
        self._copy(slots, checkpoints, to_checkpoints=False)

    def _copy(self, slots: Tensor, checkpoints: Tensor, *, to_checkpoints: bool) -> None:
        # Few and small launches: a decode step makes them all even when nothing is due. `copy_state` skips a pair with
        # a negative slot, which -1 gives for the units of a slot too.
        none = checkpoints < 1
        self._move(self._all_rings, slots, (checkpoints + (self.live_slots - 1)).masked_fill(none, -1), to_checkpoints)
        if self._tail_units is not None:
            live = torch.add(self._live_units, slots[:, None], alpha=SLOT_UNITS)
            kept = torch.add(self._kept_units, checkpoints[:, None], alpha=len(KEPT_UNITS))
            kept = kept.masked_fill(none[:, None], -1)
            self._move(self._tail_units, live.flatten(), kept.flatten(), to_checkpoints)

    @staticmethod
    def _move(tensor: Tensor, live: Tensor, checkpoint: Tensor, to_checkpoints: bool) -> None:
        source, target = (live, checkpoint) if to_checkpoints else (checkpoint, live)
        torch.ops.dsv4_sglang.copy_state(source, target, [tensor])

    def get_kv_size_bytes(self) -> int:
        return self.bytes


class StateReqToTokenPool(HybridReqToTokenPool):
    """Requests' token tables, the state slots that requests hold, and the checkpoints of the prefix cache."""

    mamba_pool_cls = StateSlotPool

    def __init__(self, **arguments: Any) -> None:
        # SGLang would give every request two more slots to take checkpoints into.
        super().__init__(**{**arguments, "enable_mamba_extra_buffer": False})
        params: StateParams = arguments["cache_params"]
        if params.checkpoints:
            self.mamba_ckpt_pool = CheckpointSlots(
                params.checkpoints, arguments["device"], params.cache_layout.checkpoint_bytes
            )


class CompressedKVPool(KVCache):
    """Compressed entries and index keys: 32 + 1 entries a block of 128 slots, written by the append op only.

    Slot index s of a token: its CSA entry is row s // 4 of the layer's table, its HCA entry row s // 128.
    """

    def __init__(self, *, size: int, page_size: int, dtype: torch.dtype, layout: CacheLayout, device: str) -> None:
        if page_size != BLOCK:
            raise ValueError(f"page size is {page_size}; the blocks of this cache have {BLOCK} tokens")
        compressed = {layer: schema for layer, schema in enumerate(layout.schemas) if schema.ratio}
        super().__init__(size, page_size, dtype, len(compressed), device, False)
        self.layout = layout
        self.blocks = size // BLOCK + 1
        self.pools = {layer: PagedKVPool(schema, self.blocks, device) for layer, schema in compressed.items()}
        self.bytes = sum(part.bytes for part in layout.block_parts(self.blocks))

    def entries(self, layer: int) -> Tensor | None:
        """Row table of a layer's entries, None without a compressor."""
        return self.pools[layer].entries if layer in self.pools else None

    def keys(self, layer: int) -> Tensor | None:
        """Index keys of a CSA layer."""
        return self.pools[layer].index_keys if layer in self.pools else None

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

    def __init__(self, compressed: CompressedKVPool, state: StateSlotPool) -> None:
        super().__init__(
            size=compressed.size,
            dtype=compressed.dtype,
            page_size=compressed.page_size,
            head_num=1,
            head_dim=compressed.layout.schemas[0].entry_head_dim,
            full_attention_layer_ids=list(compressed.pools),
            device=compressed.device,
            mamba_pool=state,
            full_kv_pool=compressed,
        )
        self.mem_usage = compressed.bytes / GB + state.mem_usage
