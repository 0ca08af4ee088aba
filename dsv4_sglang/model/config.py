"""`DSV4Config`: the fields of a DeepSeek-V4 config.json that the cache and attention depend on (SPEC 1.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO, WINDOW

# Values for which the storage is built, in V4 and V4.1. Other values mean a different model (SPEC, scope).
FIXED = {
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": WINDOW,
    "index_head_dim": 128,
}
# Other counts of both models.
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_topk",
    "max_position_embeddings",
)
# Counts that SGLang's layers need, in addition to those of `ModelConfig`.
LAYER_COUNTS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "vocab_size",
    "hc_mult",
)
_LAYER_TYPE_RATIO = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}


@dataclass(frozen=True)
class Yarn:
    """YaRN parameters of the RoPE tables of compressed layers (SPEC 1.3). The attention factor is always 1."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The fields that V4 and V4.1 share. They have the names of config.json.

    Sizes count elements, lengths count tokens. `ratios` are the compression ratios that the model may have,
    `expected_ratios` and `draft_layers` are parts of error messages.

    Raises:
        ValueError: a field differs from `FIXED`, a count is below 1, there are fewer ratios than layers, or a ratio is
            not one of the model's.
    """

    ratios: ClassVar[tuple[int, ...]]
    expected_ratios: ClassVar[str]
    draft_layers: ClassVar[str]

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    max_position_embeddings: int
    rms_norm_eps: float
    compress_ratios: tuple[int, ...]

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the config from config.json as a dict, or from `to_dict()` of SGLang's config.

        Raises:
            KeyError: a field is missing.
            TypeError: a field has a wrong type.
            ValueError: a field has a wrong value.
        """

    def __post_init__(self) -> None:
        for name, wanted in FIXED.items():
            if getattr(self, name) != wanted:
                raise ValueError(f"config field {name!r} is {getattr(self, name)!r}; this cache stores only {wanted}")
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "index_n_heads", "index_topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"config field {name!r} is {getattr(self, name)!r}; expected at least 1")
        if len(self.compress_ratios) < self.num_hidden_layers:
            raise ValueError(
                f"config field 'compress_ratios' has {len(self.compress_ratios)} entries; expected at least "
                f"num_hidden_layers = {self.num_hidden_layers}"
            )
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio not in self.ratios:
                raise ValueError(
                    f"config field 'compress_ratios[{layer}]' is {ratio!r}; expected {self.expected_ratios}"
                )
            if layer >= self.num_hidden_layers and ratio != 0:
                raise ValueError(
                    f"config field 'compress_ratios[{layer}]' is {ratio}; layers from num_hidden_layers = "
                    f"{self.num_hidden_layers} on are {self.draft_layers}, whose ratio is 0"
                )


@dataclass(frozen=True)
class DSV4Config(ModelConfig):
    """A DeepSeek-V4 model.

    `compress_ratios[i]` is the ratio of layer i (0 SWA, 4 CSA, 128 HCA). The list may be longer than
    `num_hidden_layers` (the additional entries are MTP blocks) but not shorter. `ratio()` takes any layer.
    """

    ratios = (0, CSA_RATIO, HCA_RATIO)
    expected_ratios = "0 (SWA), 4 (CSA) or 128 (HCA)"
    draft_layers = "MTP blocks"

    num_nextn_predict_layers: int
    num_hash_layers: int

    def ratio(self, layer_idx: int) -> int:
        """Return the compression ratio of a layer. MTP blocks have 0, with or without an entry in `compress_ratios`
        (SPEC 4.6).

        Raises:
            IndexError: the model has no such layer.
        """
        layers = self.num_hidden_layers + self.num_nextn_predict_layers
        if not 0 <= layer_idx < layers:
            raise IndexError(f"layer {layer_idx} is not in 0..{layers - 1} (MTP blocks included)")
        return self.compress_ratios[layer_idx] if layer_idx < self.num_hidden_layers else 0

    @classmethod
    def flash(cls) -> DSV4Config:
        """Return DeepSeek-V4-Flash: SWA, SWA, then alternately CSA and HCA (SPEC 1.2)."""
        ratios = (0, 0) + (CSA_RATIO, HCA_RATIO) * 20 + (CSA_RATIO, 0)
        return cls(
            num_hidden_layers=43,
            hidden_size=4096,
            num_attention_heads=64,
            q_lora_rank=1024,
            o_groups=8,
            index_topk=512,
            compress_ratios=ratios,
            **_COMMON,
        )

    @classmethod
    def pro(cls) -> DSV4Config:
        """Return DeepSeek-V4-Pro: HCA, HCA, then alternately CSA and HCA (SPEC 1.2)."""
        ratios = (HCA_RATIO, HCA_RATIO) + (CSA_RATIO, HCA_RATIO) * 29 + (CSA_RATIO, 0)
        return cls(
            num_hidden_layers=61,
            hidden_size=7168,
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            index_topk=1024,
            compress_ratios=ratios,
            **_COMMON,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DSV4Config:
        """Return the config from config.json as a dict, or from `to_dict()` of a Hugging Face config (transformers' or
        SGLang's).

        Raises:
            KeyError: a field is missing.
            TypeError: a field has a wrong type.
            ValueError: a field has a wrong value.
        """
        fields = Fields(config)
        model_type = fields.get("model_type")
        if model_type in ("deepseek_v41", "deepseek_v41_text"):
            raise ValueError(
                f"config field 'model_type' is {model_type!r}: this is DeepSeek-V4.1, which has a different cache "
                "(V41Config; docs/design/cache_mathematics.md, 11)"
            )
        if model_type not in (None, "deepseek_v4"):
            raise ValueError(f"config field 'model_type' is {model_type!r}; expected 'deepseek_v4'")
        return cls(
            **fields.shared(),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers"),
            num_hash_layers=fields.hash_layers(),
            compress_ratios=fields.ratios(),
        )


# Fields that the released models of V4 and V4.1 have in common.
RELEASED: dict[str, Any] = {
    **FIXED,
    "o_lora_rank": 1024,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "yarn": Yarn(factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0),
    "max_position_embeddings": 1048576,
}
_COMMON: dict[str, Any] = {
    **RELEASED,
    "index_n_heads": 64,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
}


class Fields:
    """Typed access to the fields of a dict. `path` is the name of the dict in error messages."""

    def __init__(self, source: Mapping[str, Any], path: str = "") -> None:
        self.source, self.path = source, path

    def get(self, *names: str) -> Any:
        """Return the first of `names` that is present and not None, else None."""
        return next((value for name in names if (value := self.source.get(name)) is not None), None)

    def need(self, *names: str, kind: type | tuple[type, ...] = object, expected: str = "") -> Any:
        """Return the first of `names` that is present.

        Args:
            names: names of the field. The first one is used in error messages.
            kind: expected types.
            expected: their name in the error message.

        Raises:
            KeyError: the field is missing.
            TypeError: its value has another type.
        """
        value = self.get(*names)
        if value is None:
            raise KeyError(f"config field {self.path + names[0]!r} is missing")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"config field {self.path + names[0]!r} is {value!r}; expected {expected}")
        return value

    def integer(self, *names: str) -> int:
        value: int = self.need(*names, kind=int, expected="an integer")
        if value < 0:
            raise ValueError(f"config field {self.path + names[0]!r} is {value}; expected a count")
        return value

    def number(self, name: str) -> float:
        value = self.need(name, kind=(int, float), expected="a number")
        if not value > 0:
            raise ValueError(f"config field {self.path + name!r} is {value}; expected a positive number")
        return float(value)

    def mapping(self, name: str) -> Fields:
        return Fields(self.need(name, kind=Mapping, expected="a mapping"), f"{self.path}{name}.")

    def sequence(self, name: str) -> Sequence[Any]:
        value: Sequence[Any] = self.need(name, kind=(list, tuple), expected="a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = tuple(self.sequence(name))
        for i, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"config field '{self.path}{name}[{i}]' is {value!r}; expected an integer")
        return values

    def layer(self, name: str) -> int:
        """Return the number of a layer, -1 for none."""
        return -1 if self.get(name) == -1 else self.integer(name)

    def shared(self) -> dict[str, Any]:
        """Return the fields of `ModelConfig` but for `compress_ratios`."""
        rope_theta, compress_rope_theta, yarn = self._rope()
        return {
            **{name: self.integer(name) for name in (*_COUNTS, *FIXED) if name != "sliding_window"},
            "sliding_window": self.integer("sliding_window", "window_size"),
            "rms_norm_eps": self.number("rms_norm_eps"),
            "rope_theta": rope_theta,
            "compress_rope_theta": compress_rope_theta,
            "yarn": yarn,
        }

    def _rope(self) -> tuple[float, float, Yarn]:
        """Return the bases of uncompressed and compressed layers, and YaRN. transformers nests them under
        `rope_parameters`.
        """
        nested = self.get("rope_parameters")
        if isinstance(nested, Mapping) and "compress" in nested:
            parameters = self.mapping("rope_parameters")
            compressed = parameters.mapping("compress")
            return parameters.mapping("main").number("rope_theta"), compressed.number("rope_theta"), compressed.yarn()
        scaling = self.mapping("rope_scaling" if nested is None else "rope_parameters")
        return self.number("rope_theta"), self.number("compress_rope_theta"), scaling.yarn()

    def yarn(self) -> Yarn:
        kind = self.need("rope_type", "type")
        if kind != "yarn":
            raise ValueError(f"config field {self.path + 'rope_type'!r} is {kind!r}; expected 'yarn'")
        return Yarn(
            factor=self.number("factor"),
            original_max_position_embeddings=self.integer("original_max_position_embeddings"),
            beta_fast=self.number("beta_fast"),
            beta_slow=self.number("beta_slow"),
        )

    def ratios(self) -> tuple[int, ...]:
        """Return `compress_ratios`, which transformers rewrites as `layer_types` (without the MTP entry)."""
        if self.get("compress_ratios") is None and self.get("layer_types") is not None:
            return tuple(self._layer_type_ratio(i, kind) for i, kind in enumerate(self.sequence("layer_types")))
        return self.integers("compress_ratios")

    def hash_layers(self) -> int:
        """Return `num_hash_layers`, which transformers rewrites as `mlp_layer_types`."""
        if self.get("num_hash_layers") is None and self.get("mlp_layer_types") is not None:
            return list(self.sequence("mlp_layer_types")).count("hash_moe")
        return self.integer("num_hash_layers")

    def _layer_type_ratio(self, layer: int, kind: Any) -> int:
        if kind not in _LAYER_TYPE_RATIO:
            raise ValueError(
                f"config field 'layer_types[{layer}]' is {kind!r}; expected one of {list(_LAYER_TYPE_RATIO)}"
            )
        ratio = _LAYER_TYPE_RATIO[kind]
        rates = self.get("compress_rates") or {}
        if rates.get(kind, ratio) != ratio:
            raise ValueError(f"config field 'compress_rates.{kind}' is {rates[kind]!r}; expected {ratio}")
        return ratio
