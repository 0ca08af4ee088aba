"""Models that can be planned for: a config.json, and the storage format of the matrices."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dsv4_sglang.model.config import LAYER_COUNTS, DSV4Config, Fields
from dsv4_sglang.planner.stored_weights import expert_dtype

# One config.json per released model, with its sizes.
CONFIGS = Path(__file__).parent / "configs"


class Format(enum.Enum):
    """Storage format of a matrix."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3 with an fp32 scale per 128 x 128 tile
    FP4 = "fp4"  # e2m1 with a one-byte scale per 32 values; experts only


# By the dtype of the routed experts in a safetensors header. SGLang loads packed FP4 as bytes.
EXPERT_FORMATS = {
    **dict.fromkeys(("I8", "U8", "F4"), Format.FP4),
    "F8_E4M3": Format.FP8,
    "BF16": Format.BF16,
}


class DSparkHead(NamedTuple):
    """A draft head of `stages` layers that drafts `block` tokens at once."""

    stages: int
    block: int


@dataclass(frozen=True)
class Model:
    """A model: its name, the value of `--model-path`, and the text of its config.json.

    `stored_experts` is the format of the routed experts in the checkpoint, or None without a checkpoint.
    """

    name: str
    path: str
    text: str
    stored_experts: Format | None = None

    @classmethod
    def flash(cls) -> Model:
        """Return DeepSeek-V4-Flash as released: 284 B parameters."""
        return cls._released("DeepSeek-V4-Flash")

    @classmethod
    def pro(cls) -> Model:
        """Return DeepSeek-V4-Pro as released: 1.6 T parameters."""
        return cls._released("DeepSeek-V4-Pro")

    @classmethod
    def _released(cls, name: str) -> Model:
        return cls(name, f"deepseek-ai/{name}", (CONFIGS / f"{name}.json").read_text())

    @classmethod
    def from_file(cls, path: Path) -> Model:
        """Read a config.json and, if the folder has weights, the format of the routed experts.

        Raises:
            KeyError, TypeError, ValueError: The config is not one of a DeepSeek-V4 model, or the format of the experts
                is unknown.
        """
        text = path.read_text()
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError(f"{path} holds {type(values).__name__}; expected an object")
        model = cls(path.parent.resolve().name, str(path.parent), text, _stored_experts(path.parent))
        fields = Fields(values)
        if model.quantised and (method := fields.mapping("quantization_config").get("quant_method")) != "fp8":
            raise ValueError(f"config field 'quantization_config.quant_method' is {method!r}; expected 'fp8'")
        DSV4Config.from_hf(values)
        for name in LAYER_COUNTS:
            fields.integer(name)
        return model

    @cached_property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.text)
        return values

    @cached_property
    def config(self) -> DSV4Config:
        return DSV4Config.from_hf(self.values)

    @property
    def quantised(self) -> bool:
        """Return True if matrices are FP8 and experts FP4 or FP8, False if everything is bf16."""
        return self.values.get("quantization_config") is not None

    @property
    def experts(self) -> Format:
        """The format of the routed experts: that of the checkpoint, or without one that of the released models."""
        if self.stored_experts is not None:
            return self.stored_experts
        return Format.FP4 if self.quantised else Format.BF16

    @property
    def expert_width(self) -> int:
        return int(self.values["moe_intermediate_size"])

    @property
    def dspark(self) -> DSparkHead | None:
        """The DSPARK head, which a checkpoint has instead of a NextN layer. None without one."""
        fields = Fields(self.values)
        if not fields.get("dspark_target_layer_ids"):
            return None
        return DSparkHead(len(fields.integers("dspark_target_layer_ids")), fields.integer("dspark_block_size"))


def _stored_experts(folder: Path) -> Format | None:
    if (dtype := expert_dtype(folder)) is None:
        return None
    if dtype not in EXPERT_FORMATS:
        raise ValueError(
            f"the routed experts in {folder} are {dtype}; expected one of {', '.join(EXPERT_FORMATS)} (give --experts)"
        )
    return EXPERT_FORMATS[dtype]
