"""Where pools live when the caller does not say."""

from __future__ import annotations

import importlib

import torch


def resolve_device(device: torch.device | str | None) -> torch.device:
    """`device` with its index, or the current CUDA device where there is one, else the CPU.

    A CUDA device gets the CUDA ops, whose extension is built on first use.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda":
        importlib.import_module("dsv4_sglang.attention.cuda_ops")
    if resolved == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
