"""Hooks for SGLang and PyTorch functions that need a GPU. They are applied only if the server runs on a CPU.

Hooks of `torch` functions change PyTorch for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def accept(*args: Any, **kwargs: Any) -> None:
    """REPLACE `targets.VALIDATE_EXTRA_BUFFER`: accept every configuration."""


def keep_kv_heads(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """REPLACE `adjust_config_with_unaligned_cpu_tp`: keep the number of KV heads."""
    return model_config


def ignore_stream(self: Any, *args: Any, **kwargs: Any) -> None:
    """REPLACE `torch.Tensor.record_stream`: do nothing."""


def device_module(original: Callable[..., Any], device: Any = None) -> Any:
    """AROUND `torch.get_device_module`: return that of the CPU if no device is given."""
    return original("cpu" if device is None else device)


def keep_pageable(self: Any, *args: Any, **kwargs: Any) -> Any:
    """REPLACE `torch.Tensor.pin_memory`: return the tensor unchanged."""
    return self


def make_pageable_tensor(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `torch.tensor`: do not pin the memory."""
    return original(*args, **{**kwargs, "pin_memory": False})
