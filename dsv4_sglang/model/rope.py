"""RoPE frequencies of a layer (SPEC 1.3). The table itself is `dsv4_sglang.ops.rope.rope_table`."""

import math

import torch
from torch import Tensor

from dsv4_sglang.model.config import ModelConfig


def rope_frequencies(config: ModelConfig, ratio: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the RoPE frequencies of a layer, fp32 [qk_rope_head_dim / 2].

    Ratio 0: base `rope_theta`, no scaling. Otherwise base `compress_rope_theta` with YaRN. Dims that rotate more than
    `beta_fast` times within the original context keep their frequency. Frequencies of dims that rotate less than
    `beta_slow` times are divided by `factor`, and those in between are interpolated. The order of operations is that of
    the released model, so results are equal bit by bit.

    Args:
        config: configuration of the model.
        ratio: compression ratio of the layer.
        device: device of the result.
    """
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if ratio else config.rope_theta
    frequencies = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if ratio:
        yarn = config.yarn

        def dim_of(turns: float) -> float:
            """Return the pair index whose frequency makes `turns` rotations within the original context."""
            return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dim_of(yarn.beta_fast)), 0)
        high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        keep = 1 - ramp
        frequencies = frequencies / yarn.factor * (1 - keep) + frequencies * keep
    return frequencies.to(device)
