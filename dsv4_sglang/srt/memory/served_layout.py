"""Cache layout of a server. For V4, SGLang's flags and this package's options select the formats."""

from __future__ import annotations

import torch

from dsv4_sglang.cache.layer_spec import LayerKVSpec
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import v4_specs
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.model.config import DSV4Config, ModelConfig
from dsv4_sglang.model.layer_schedule import build_schedule
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options


def served_layout(
    config: ModelConfig,
    kv_cache_dtype: torch.dtype,
    options: Options,
    device: str | torch.device,
    sm100: bool | None = None,
    *,
    draft_tokens: int = 0,
    draft_layers: int = 0,
) -> CacheLayout:
    """Return the layout of a model. V4.1 has the formats of its training only.

    Args:
        config: configuration of the model.
        kv_cache_dtype: resolved --kv-cache-dtype, the KV format of V4 unless the option `entry_format` selects fp32.
        options: options of this package, with the formats of V4.
        device: device of the cache.
        sm100: as in `CacheLayout`, to describe the layout of a GPU that is not present.
        draft_tokens: tokens of a request in a verify step, 0 without speculation.
        draft_layers: layers of the draft model: 1 for NextN, the stages of DSPARK. They follow the layers of the model
            and have window rings only.

    Raises:
        LaunchError: the dtype is not supported.
    """
    specs: tuple[LayerKVSpec, ...]
    if isinstance(config, V41Config):
        specs = v41_specs(config, draft_layers, draft_tokens)
    else:
        assert isinstance(config, DSV4Config), f"no layers of {type(config).__name__}"
        specs = v4_specs(
            config,
            build_schedule(config, draft_layers),
            kv_format=_kv_format(kv_cache_dtype, options),
            key_format=options.indexer_format,
            hca_state="online",
            draft_tokens=draft_tokens,
        )
    return CacheLayout(specs, torch.device(device), sm100, draft_layers)


def _kv_format(kv_cache_dtype: torch.dtype, options: Options) -> KVFormat:
    """Return the KV format of V4."""
    if options.entry_format == "fp32":
        return KVFormat.FP32
    if kv_cache_dtype == torch.float8_e4m3fn:
        return KVFormat.FP8
    if kv_cache_dtype == torch.bfloat16:
        return KVFormat.BF16
    raise LaunchError(f"KV cache dtype is {kv_cache_dtype}; --kv-cache-dtype takes auto, fp8_e4m3 or bfloat16")
