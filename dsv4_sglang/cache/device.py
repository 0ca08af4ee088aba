"""Where pools live when the caller does not say, and how their memory is cleared."""

from __future__ import annotations

import importlib

import torch


def clear_memory(tensor: torch.Tensor) -> None:
    """Zero all of the memory that `tensor` is a view of, padding included."""
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()


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
