"""The parts of a DeepSeek-V4 model's configuration that the cache needs: widths and the kind of each layer."""

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.layer_schedule import AttentionType, FFNType, LayerSpec, RouterMode, build_schedule

__all__ = ["AttentionType", "DSV4Config", "FFNType", "LayerSpec", "RouterMode", "build_schedule"]
