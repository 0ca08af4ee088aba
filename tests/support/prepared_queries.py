"""Index queries as the GPU prepares them (csrc/index/layout.h), in the order of their channels."""

import torch
from torch import Tensor


def uses_images() -> bool:
    """Return True if this GPU stores the queries of 64 heads, or 32 heads without the Hadamard transform, as images."""
    return torch.cuda.get_device_capability()[0] == 9


def of_image(image: Tensor) -> Tensor:
    """Reorder an image [T, part, head, piece ^ head % 8, c, word] to [T, head, (c, part, piece, word)]."""
    head, piece = torch.arange(image.shape[2])[:, None], torch.arange(8)
    return image[:, :, head, piece ^ head % 8].permute(0, 2, 4, 1, 3, 5).flatten(2)


def of_halves(prepared: Tensor, image: bool) -> Tensor:
    """Reorder fp16 queries [T, heads, 128], which are an image or in places, to the order of their channels."""
    if image:
        prepared = of_image(prepared.reshape(-1, 2, prepared.shape[1], 8, 4, 2))
    return prepared.unflatten(-1, (-1, 4, 2)).transpose(-1, -2).flatten(-3)
