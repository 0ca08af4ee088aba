"""DeepSeek-V4.1: config fields that the cache needs, rows of a compressor state (SPEC 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4_sglang.model.config import RELEASED, Fields, ModelConfig

V41_RATIOS = (0, 1, 2)
MODEL_TYPES = ("deepseek_v41", "deepseek_v41_text")


@dataclass(frozen=True)
class V41Config(ModelConfig):
    """A DeepSeek-V4.1 model. Fields as in config.json's `text_config`.

    `compress_ratios[i]` is the ratio of the entries that layer i attends to, 0 for none. The list may be longer than
    `num_hidden_layers`; the additional entries are DSPARK's stages. `kv_source_layer_ids` are the layers that write
    entries.

    Raises:
        ValueError: as in `ModelConfig`, or the source layers contradict the ratios or each other.
    """

    ratios = V41_RATIOS
    expected_ratios = (
        "0, 1 or 2, the ratios of published V4.1 models. For others the overlap and position bias of shared entries "
        "are not public"
    )
    draft_layers = "draft stages"

    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sources()
        self._check_candidates()

    def _check_sources(self) -> None:
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            layers = getattr(self, name)
            for layer in layers:
                if not 0 <= layer < self.num_hidden_layers:
                    raise ValueError(
                        f"config field {name!r} has layer {layer}; expected 0..{self.num_hidden_layers - 1}"
                    )
                if self.compress_ratios[layer] == 0:
                    raise ValueError(f"config field {name!r} has layer {layer}, whose compress ratio is 0")
            if list(layers) != sorted(set(layers)):
                raise ValueError(f"config field {name!r} is {list(layers)}; expected layers in ascending order")
        for layer in self.kv_source_layer_ids:
            if layer not in self.index_source_layer_ids:
                raise ValueError(
                    f"config field 'kv_source_layer_ids' has layer {layer}, which is not in 'index_source_layer_ids': "
                    "its entries would have no index keys"
                )
        source = None
        for layer in range(self.num_hidden_layers):
            source = layer if layer in self.kv_source_layer_ids else source
            ratio = self.compress_ratios[layer]
            if ratio == 0:
                continue
            if source is None:
                raise ValueError(
                    f"config field 'kv_source_layer_ids' is {list(self.kv_source_layer_ids)}: layer {layer} has ratio "
                    f"{ratio}, but neither it nor an earlier layer writes entries"
                )
            if self.compress_ratios[source] != ratio:
                raise ValueError(
                    f"config field 'compress_ratios[{layer}]' is {ratio}, but the entries before it are those of layer "
                    f"{source}, of ratio {self.compress_ratios[source]}"
                )

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer_id
        if source < 0:
            return
        if source not in self.index_source_layer_ids:
            raise ValueError(
                f"config field 'candidate_source_layer_id' is {source}; expected a layer of 'index_source_layer_ids' "
                f"{list(self.index_source_layer_ids)}, or -1 for none"
            )
        behind = [layer for layer in self.kv_source_layer_ids if layer > source]
        if behind:
            raise ValueError(
                f"config field 'candidate_source_layer_id' is {source}, but the later layer {behind[0]} writes entries "
                "of its own, to which these candidates do not apply"
            )
        for name in ("candidate_topk_blocks", "candidate_block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"config field {name!r} is {getattr(self, name)}; expected at least 1 with a source")

    @classmethod
    def flash(cls) -> V41Config:
        """Return DeepSeek-V4.1-Flash (SPEC 11.1)."""
        return cls(
            num_hidden_layers=40,
            hidden_size=5120,
            num_attention_heads=64,
            **RELEASED,
            q_lora_rank=1280,
            o_groups=8,
            index_n_heads=32,
            index_topk=512,
            rms_norm_eps=1e-20,
            compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
            kv_source_layer_ids=(2, 8, 14, 20),
            index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
            candidate_source_layer_id=20,
            candidate_topk_blocks=2048,
            candidate_block_size=8,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> V41Config:
        """Return the config from config.json as a dict, with the text fields under `text_config` or at the top.

        Raises:
            KeyError: a field is missing.
            TypeError: a field has a wrong type.
            ValueError: a field has a wrong value.
        """
        fields = Fields(config)
        model_type = fields.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"config field 'model_type' is {model_type!r}; expected one of {list(MODEL_TYPES)}")
        if fields.get("text_config") is not None:
            fields = fields.mapping("text_config")
        return cls(
            **fields.shared(),
            compress_ratios=fields.integers("compress_ratios"),
            kv_source_layer_ids=fields.integers("kv_source_layer_ids"),
            index_source_layer_ids=fields.integers("index_source_layer_ids"),
            candidate_source_layer_id=fields.layer("candidate_source_layer_id"),
            candidate_topk_blocks=fields.integer("candidate_topk_blocks"),
            candidate_block_size=fields.integer("candidate_block_size"),
        )


def pair_rows(draft_tokens: int) -> int:
    """Return the rows of a slot's compressor state at ratio 2.

    Decode steps write d = `draft_tokens` tokens per request, and the next step may roll back all but the first. Only a
    token at an even position waits for its partner; the one at position t is in row t / 2 mod `pair_rows`. A step at
    length L reads that of L - 1 (if L is odd) and writes those of L .. L + d - 1, in any order. The next step begins at
    any of L + 1 .. L + d and reads that of the position before. So it needs 1 + d / 2 rows, rounded down.

    Raises:
        ValueError: `draft_tokens` is negative.
    """
    if draft_tokens < 0:
        raise ValueError(f"draft_tokens is {draft_tokens}; expected 0 or more")
    return 1 + draft_tokens // 2 if draft_tokens > 1 else 1


def pair_draft_tokens(rows: int) -> int:
    """Return the maximum tokens per request that a decode step may write to a compressor state of `rows` rows."""
    return 1 if rows == 1 else 2 * rows - 1
