"""The supported models: config class by `model_type` of a config.json."""

from __future__ import annotations

from dsv4_sglang.model.config import DSV4Config, ModelConfig
from dsv4_sglang.model.v41 import V41Config

CONFIGS: dict[str, type[ModelConfig]] = {
    "deepseek_v4": DSV4Config,
    "deepseek_v41": V41Config,
    "deepseek_v41_text": V41Config,
}
