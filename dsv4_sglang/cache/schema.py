"""Storage of a layer of DeepSeek-V4: `LayerKVSpec` of window, CSA and HCA layers (SPEC 5, 6.1, 6.2)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from dsv4_sglang.cache.layer_spec import LayerKVSpec
from dsv4_sglang.formats import V4_KV_FORMATS, KeyFormat, KVFormat
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_ONLINE_ROWS, HCA_RAW_ROWS, WINDOW, StateRows, state_rows
from dsv4_sglang.model.layer_schedule import AttentionType, LayerSpec

_Option = TypeVar("_Option", bound=enum.Enum)


class HcaState(enum.Enum):
    """Form in which an HCA layer keeps its unfinished window."""

    # Every (k, z) row of the window, 512 KiB per layer. Not for speculation: rejected tokens of the next window would
    # overwrite rows of the current one.
    RAW = "raw"
    # Running (max, sum, accumulator), 6 KiB per layer, one copy for each length that the next step can start from (SPEC
    # 3.7).
    ONLINE = "online"


@dataclass(frozen=True)
class LayerCacheSchema(LayerKVSpec):
    """The storage of one layer of V4."""

    attn: AttentionType
    entry_head_dim: int
    rope_dim: int
    # Dims of an index key, 0 without an indexer.
    indexer_head_dim: int
    kv_format: KVFormat
    key_format: KeyFormat
    hca_state: HcaState
    # Maximum tokens per request in a verify step (1 + drafts). All but the first may be rejected and rolled back by the
    # next step. 0 or 1 means no speculation. Rings and compressor states grow with it (`state_rows`).
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        if self.attn is AttentionType.HCA and self.rows.hca_state_copies > 1 and self.hca_state is HcaState.RAW:
            raise ValueError(
                f"hca_state is 'raw' with draft_tokens {self.draft_tokens}: rejected drafts would stay in the open "
                "window; expected 'online', which keeps a copy of the state for each length"
            )

    @property
    def kind(self) -> AttentionType:
        return self.attn

    @property
    def rows(self) -> StateRows:
        """Number of rows of a slot's ring and compressor states."""
        return state_rows(self.draft_tokens)

    @property
    def swa_window_size(self) -> int:
        """Tokens of the sliding window. A ring has more entries with drafts (`ring_rows`)."""
        return WINDOW

    @property
    def ring_rows(self) -> int:
        return self.rows.ring

    @property
    def ring_format(self) -> KVFormat:
        return self.kv_format

    @property
    def entry_format(self) -> KVFormat:
        return self.kv_format

    @property
    def ratio(self) -> int:
        return self.attn.ratio

    @property
    def tail_buffer_size(self) -> int:
        """Maximum tokens of a window that no entry holds yet, 0 for SWA.

        A CSA compressor state has more rows (`compressor_state_shape`), because the next window pools this one too.
        """
        return max(self.ratio - 1, 0)

    @property
    def has_indexer(self) -> bool:
        return self.attn is AttentionType.CSA

    @property
    def is_flat(self) -> bool:
        """Return True for HCA, which has one entry per block, because FlashMLA's entries start at multiples of 16 B."""
        return self.attn is AttentionType.HCA

    @property
    def compressor_state_shape(self) -> tuple[int, int] | None:
        """Rows and fp32 columns of a slot's compressor state, None for SWA.

        CSA: rings of current k, current z, previous k and previous z (4, 4, 8 and 8 rows without drafts), main
        compressor and indexer side by side. HCA: 128 k and 128 z (raw), or max, sum and accumulator of each copy of the
        state (online).
        """
        if self.attn is AttentionType.CSA:
            return self.rows.csa.rows, self.entry_head_dim + self.indexer_head_dim
        if self.attn is AttentionType.HCA:
            online = HCA_ONLINE_ROWS * self.rows.hca_state_copies
            return (HCA_RAW_ROWS if self.hca_state is HcaState.RAW else online), self.entry_head_dim
        return None

    @property
    def kept_units(self) -> tuple[int, ...]:
        """Return the units of a CSA compressor state that are alive at a multiple of 128: the last unit of the previous
        stream's k and the last of its z, because their rings divide 128."""
        if self.attn is not AttentionType.CSA:
            return ()
        rings = self.rows.csa
        return rings.previous_z // CSA_RATIO - 1, rings.rows // CSA_RATIO - 1


class SchemaOptions(TypedDict, total=False):
    """Options of `build_schema`."""

    kv_format: KVFormat | str
    key_format: KeyFormat | str
    hca_state: HcaState | str
    draft_tokens: int


def build_schema(
    config: DSV4Config,
    layer_spec: LayerSpec,
    *,
    kv_format: KVFormat | str = KVFormat.FP8,
    key_format: KeyFormat | str = KeyFormat.MXFP4,
    hca_state: HcaState | str = HcaState.RAW,
    draft_tokens: int = 0,
) -> LayerCacheSchema:
    """Return the schema of one layer.

    Args:
        config: configuration of the model.
        layer_spec: kind of the layer.
        kv_format: KV format, also by name ("fp8").
        key_format: format of index keys, also by name ("mxfp4").
        hca_state: form of the HCA compressor state, also by name ("raw", "online").
        draft_tokens: see `LayerCacheSchema`.

    Raises:
        ValueError: unknown format, or number of draft tokens that is not supported.
    """
    has_indexer = layer_spec.attn is AttentionType.CSA
    return LayerCacheSchema(
        attn=layer_spec.attn,
        entry_head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        indexer_head_dim=config.index_head_dim if has_indexer else 0,
        kv_format=_option(V4_KV_FORMATS, "kv_format", kv_format),
        key_format=_option(tuple(KeyFormat), "key_format", key_format),
        hca_state=_option(tuple(HcaState), "hca_state", hca_state),
        draft_tokens=draft_tokens,
    )


def _option(options: Sequence[_Option], name: str, value: _Option | str) -> _Option:
    for option in options:
        if value in (option, option.value):
            return option
    names = ", ".join(repr(option.value) for option in options)
    raise ValueError(f"{name} is {value!r}; expected one of {names}")
