"""Default device of pools, and clearing of their memory."""

from __future__ import annotations

import torch

from dsv4_sglang.ops import extension


def clear_memory(tensor: torch.Tensor) -> None:
    """Zero the whole storage of which `tensor` is a view, padding included."""
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return `device` with its index. None means the current CUDA device if there is one, otherwise the CPU.

    For a CUDA device this loads the extension with the CUDA ops, which is built on first use.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda":
        extension.load()
    if resolved == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
