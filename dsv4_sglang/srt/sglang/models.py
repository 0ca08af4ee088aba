"""SGLang's model code: configs, layers, and classes that a constructor looks up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4_sglang.model.config import ModelConfig
from dsv4_sglang.model.supported import CONFIGS


def config_class(model_type: str = "deepseek_v4") -> Any:
    """Return SGLang's class for the config.json of a model. V4 and V4.1 have the same architecture."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    return _CONFIG_REGISTRY[model_type]


def model_config(hf_config: Any) -> ModelConfig:
    """Return the model's config from SGLang's config object, which has the RoPE fields in the form of its
    transformers."""
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    theta, scaling = get_rope_config(hf_config)
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "rope_parameters"}
    return CONFIGS[fields["model_type"]].from_hf({**fields, "rope_theta": theta, "rope_scaling": scaling})


def takes_quantised_input(linear: Any) -> bool:
    """Return True if a linear layer accepts FP8 codes with fp32 scales (one per row and 128 channels) as input.

    SGLang supports that for block-quantised FP8 weights in DeepGEMM if scales are not packed.
    """
    method = linear.quant_method
    if not getattr(method, "block_quant", False) or method.use_marlin or method.use_mxfp8:
        return False
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback

    rows, columns = linear.weight.shape
    return (
        method.w8a8_block_fp8_linear is deepgemm_w8a8_block_fp8_linear_with_fallback
        and not deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
        and list(method.weight_block_size) == [128, 128]
        and rows % 64 == 0
        and columns % 128 == 0
    )


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Context manager: replace names of a module, such as classes that a constructor looks up."""
    saved = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(saved)
