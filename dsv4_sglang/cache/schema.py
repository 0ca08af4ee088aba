"""The layers of DeepSeek-V4 as `LayerKVSpec`: window, CSA and HCA layers (SPEC 5, 6.1, 6.2)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, TypeVar

from dsv4_sglang.cache.layer_spec import LayerKVSpec, Selection
from dsv4_sglang.formats import V4_KV_FORMATS, KeyFormat, KVFormat
from dsv4_sglang.formats.index_keys import INDEX_DIM
from dsv4_sglang.formats.kv_entries import ENTRY_DIM, ROPE_DIM
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_ONLINE_ROWS, HCA_RAW_ROWS, WINDOW, StateRows, state_rows
from dsv4_sglang.model.layer_schedule import AttentionType, LayerSpec

if TYPE_CHECKING:
    from typing import Unpack

_Option = TypeVar("_Option", bound=enum.Enum)
_SELECTIONS = {
    AttentionType.SWA: Selection.NONE,
    AttentionType.CSA: Selection.TOP_K,
    AttentionType.HCA: Selection.ALL,
}


class HcaState(enum.Enum):
    """Form in which an HCA layer keeps its unfinished window."""

    # Every (k, z) row of the window, 512 KiB per layer. Not for speculation: rejected tokens of the next window would
    # overwrite rows of the current one.
    RAW = "raw"
    # Running (max, sum, accumulator), 6 KiB per layer, one copy for each length that the next step can start from (SPEC
    # 3.7).
    ONLINE = "online"


@dataclass(frozen=True, kw_only=True)
class LayerCacheSchema(LayerKVSpec):
    """A layer of V4. Rings and compressor states grow with `draft_tokens` (`state_rows`)."""

    hca_state: HcaState

    @property
    def attn(self) -> AttentionType:
        return self.kind

    @property
    def kv_format(self) -> KVFormat:
        """The format of window entries and compressed entries."""
        return self.ring_format

    @property
    def entry_head_dim(self) -> int:
        return ENTRY_DIM

    @property
    def rope_dim(self) -> int:
        return ROPE_DIM

    @property
    def indexer_head_dim(self) -> int:
        """Dims of an index key, 0 without an indexer."""
        return INDEX_DIM if self.has_indexer else 0

    @property
    def rows(self) -> StateRows:
        """Number of rows of a slot's ring and compressor states."""
        return state_rows(self.draft_tokens)

    @property
    def swa_window_size(self) -> int:
        """Tokens of the sliding window. A ring has more entries with drafts (`ring_rows`)."""
        return WINDOW

    @property
    def tail_buffer_size(self) -> int:
        """Maximum tokens of a window that no entry holds yet, 0 for SWA.

        A CSA compressor state has more rows (`compressor_state_shape`), because the next window pools this one too.
        """
        return max(self.ratio - 1, 0)


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
    kind, rows = layer_spec.attn, state_rows(draft_tokens)
    state = _option(tuple(HcaState), "hca_state", hca_state)
    if kind is AttentionType.HCA and rows.hca_state_copies > 1 and state is HcaState.RAW:
        raise ValueError(
            f"hca_state is 'raw' with draft_tokens {draft_tokens}: rejected drafts would stay in the open window; "
            "expected 'online', which keeps a copy of the state for each length"
        )
    stored = _option(V4_KV_FORMATS, "kv_format", kv_format)
    is_csa = kind is AttentionType.CSA
    return LayerCacheSchema(
        kind=kind,
        ring_rows=rows.ring,
        ring_format=stored,
        entry_format=stored,
        key_format=_option(tuple(KeyFormat), "key_format", key_format),
        has_indexer=is_csa,
        compressor_state_shape=_compressor_state_shape(kind, rows, state),
        # What is alive at a multiple of 128: the last unit of the previous stream's k and the last of its z, because
        # their rings divide 128.
        kept_units=(rows.csa.previous_z // CSA_RATIO - 1, rows.csa.rows // CSA_RATIO - 1) if is_csa else (),
        draft_tokens=draft_tokens,
        selection=_SELECTIONS[kind],
        hca_state=state,
    )


def v4_specs(
    config: DSV4Config, schedule: Sequence[LayerSpec], **options: Unpack[SchemaOptions]
) -> tuple[LayerCacheSchema, ...]:
    """Return the layers of a model in order.

    Args:
        config: configuration of the model.
        schedule: kinds of the layers.
        options: as in `build_schema`.

    Raises:
        ValueError: as in `build_schema`.
    """
    return tuple(build_schema(config, layer_spec, **options) for layer_spec in schedule)


def _compressor_state_shape(kind: AttentionType, rows: StateRows, hca_state: HcaState) -> tuple[int, int] | None:
    """Return rows and fp32 columns of a slot's compressor state, None for SWA.

    CSA: rings of current k, current z, previous k and previous z (4, 4, 8 and 8 rows without drafts), main compressor
    and indexer side by side. HCA: 128 k and 128 z (raw), or max, sum and accumulator of each copy of the state
    (online).
    """
    if kind is AttentionType.CSA:
        return rows.csa.rows, ENTRY_DIM + INDEX_DIM
    if kind is AttentionType.HCA:
        online = HCA_ONLINE_ROWS * rows.hca_state_copies
        return (HCA_RAW_ROWS if hca_state is HcaState.RAW else online), ENTRY_DIM
    return None


def _option(options: Sequence[_Option], name: str, value: _Option | str) -> _Option:
    for option in options:
        if value in (option, option.value):
            return option
    names = ", ".join(repr(option.value) for option in options)
    raise ValueError(f"{name} is {value!r}; expected one of {names}")
