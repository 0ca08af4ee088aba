"""The layers of DeepSeek-V4.1 as `LayerKVSpec` (SPEC 11.2, 11.5).

Only some layers write entries and index keys; later layers attend to the latest ones (`kv_source`). Only some select
entries, with queries of their own; the layers after them reuse the latest selection. From one layer on, selections stay
within the candidate blocks that this layer chose.
"""

from __future__ import annotations

from dsv4_sglang.cache.layer_spec import Candidates, LayerKVSpec, Selection
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.model.v41 import V41Config, pair_rows


def v41_specs(config: V41Config, draft_layers: int = 0, draft_tokens: int = 0) -> tuple[LayerKVSpec, ...]:
    """Return the layers of the model in order, followed by `draft_layers` DSPARK stages, which have a window only.

    Snapshots keep nothing of a compressor state: at a multiple of 128 every pair is complete.

    Args:
        config: configuration of the model.
        draft_layers: number of DSPARK's stages.
        draft_tokens: as in `LayerKVSpec`.
    """
    specs, source = [], None
    for layer, ratio in enumerate(config.compress_ratios[: config.num_hidden_layers] + (0,) * draft_layers):
        writes = layer in config.kv_source_layer_ids
        source = layer if writes else source
        kind = AttentionType(ratio) if writes else AttentionType.SWA
        specs.append(
            LayerKVSpec(
                kind=kind,
                ring_rows=WINDOW + (draft_tokens if draft_tokens > 1 else 0),
                ring_format=KVFormat.MXFP8,
                entry_format=KVFormat.NVFP4,
                key_format=KeyFormat.MXFP4,
                has_indexer=writes,
                # A row is k, then the score.
                compressor_state_shape=(
                    (pair_rows(draft_tokens), 2 * ENTRY_DIM) if kind is AttentionType.PAIR else None
                ),
                draft_tokens=draft_tokens,
                kv_source=source if ratio and not writes else None,
                selection=_selection(config, layer, ratio),
                hadamard=False,
                candidates=_candidates(config, layer),
            )
        )
    return tuple(specs)


def _selection(config: V41Config, layer: int, ratio: int) -> Selection:
    if ratio == 0:
        return Selection.NONE
    return Selection.TOP_K if layer in config.index_source_layer_ids else Selection.REUSE


def _candidates(config: V41Config, layer: int) -> Candidates | None:
    chooser = config.candidate_source_layer_id
    if layer not in config.index_source_layer_ids or not 0 <= chooser <= layer:
        return None
    return Candidates(config.candidate_topk_blocks, config.candidate_block_size, chooses=layer == chooser)
