"""Models that can be planned for: a config.json, and the storage format of the matrices."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dsv4_sglang.model.config import LAYER_COUNTS, DSV4Config, Fields, ModelConfig
from dsv4_sglang.model.supported import CONFIGS as CONFIG_CLASSES

# One config.json per released model, with its sizes.
CONFIGS = Path(__file__).parent / "configs"
RELEASED = {"flash": "DeepSeek-V4-Flash", "pro": "DeepSeek-V4-Pro"}
# Owner of the released models on the hub.
OWNER = "deepseek-ai"
# Tokens of a verify step with EAGLE 3/1/4.
EAGLE_TOKENS = 4


class Format(enum.Enum):
    """Storage format of a matrix."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3 with an fp32 scale per 128 x 128 tile
    FP4 = "fp4"  # e2m1 with a one-byte scale per 32 values; experts only


class DSparkHead(NamedTuple):
    """A draft head of `stages` layers that drafts `block` tokens at once."""

    stages: int
    block: int


@dataclass(frozen=True)
class Model:
    """A model: its name, the value of `--model-path`, and the text of its config.json."""

    name: str
    path: str
    text: str

    @classmethod
    def of(cls, given: str) -> Model:
        """Return the model that the option --model names: a released model, a config.json or its folder.

        Raises:
            ValueError: there is no such file, or it is not the config of a supported model.
        """
        hub_names = {f"{OWNER}/{name}": name for name in RELEASED.values()}
        if name := RELEASED.get(given) or hub_names.get(given):
            return cls(name, f"{OWNER}/{name}", (CONFIGS / f"{name}.json").read_text())
        path = Path(given)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            expected = f"flash, pro, {' or '.join(hub_names)}, or a config.json or its folder"
            raise ValueError(f"--model {given!r} is no file; expected {expected}")
        try:
            return cls.from_file(path)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error.args[0]}") from None

    @classmethod
    def from_file(cls, path: Path) -> Model:
        """Read a config.json.

        Raises:
            KeyError, TypeError, ValueError: The config is not one of a supported model.
        """
        text = path.read_text()
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError(f"{path} holds {type(values).__name__}; expected an object")
        model = cls(path.parent.resolve().name, str(path.parent), text)
        fields = model.fields
        if model.quantised and (method := fields.mapping("quantization_config").get("quant_method")) != "fp8":
            raise ValueError(f"config field 'quantization_config.quant_method' is {method!r}; expected 'fp8'")
        _ = model.config  # raises the errors of its fields
        for name in LAYER_COUNTS:
            fields.integer(name)
        for name, part in (("engram_layer_ids", "Engram layers"), ("vision_config", "images")):
            if fields.get(name):
                raise ValueError(f"config field {name!r}: a server rejects DeepSeek-V4.1 with {part}")
        return model

    @cached_property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.text)
        return values

    @cached_property
    def fields(self) -> Fields:
        """The fields of the text model, which a config.json of V4.1 has under `text_config`."""
        return Fields({**self.values, **(self.values.get("text_config") or {})})

    @cached_property
    def config(self) -> ModelConfig:
        return CONFIG_CLASSES.get(str(self.values.get("model_type")), DSV4Config).from_hf(self.values)

    @property
    def quantised(self) -> bool:
        """Return True if matrices are FP8 and experts FP4 or FP8, False if everything is bf16."""
        return self.fields.get("quantization_config") is not None

    @property
    def experts(self) -> Format:
        """The format of the routed experts in the released models, or bf16 if the model is not quantised."""
        return Format.FP4 if self.quantised else Format.BF16

    @property
    def dspark(self) -> DSparkHead | None:
        """The DSPARK head, which a model has instead of a NextN layer. None without one."""
        fields = self.fields
        if not fields.get("dspark_target_layer_ids"):
            return None
        return DSparkHead(len(fields.integers("dspark_target_layer_ids")), fields.integer("dspark_block_size"))

    @property
    def draft_tokens(self) -> int:
        """Tokens of a verify step with default flags; 0: the model cannot draft. A server rejects drafts of V4.1."""
        if not isinstance(self.config, DSV4Config):
            return 0
        if self.dspark:
            return self.dspark.block + 1
        return EAGLE_TOKENS if self.config.num_nextn_predict_layers else 0
