"""What the cache needs to know of a DeepSeek-V4 model: its widths and which layer is of which kind."""

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.layer_schedule import AttentionType, FFNType, LayerSpec, RouterMode, build_schedule

__all__ = ["AttentionType", "DSV4Config", "FFNType", "LayerSpec", "RouterMode", "build_schedule"]
