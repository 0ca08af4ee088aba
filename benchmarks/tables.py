"""Random but valid cache contents: KV entries in FlashMLA's layout and index keys, for the page sizes of both sides."""

from __future__ import annotations

import torch
from torch import Tensor

NOPE, ROW, SCALES = 448, 576, 8
# Scale 2^-8: values of about unit size.
EXPONENT = 119
# Clears one bit, without which an e4m3 code is never NaN.
NO_NAN = 0xF7


def random_pages(pages: int, rows: int, page_bytes: int, device: torch.device) -> Tensor:
    """Return random pages of KV entries.

    Args:
        pages: number of pages.
        rows: entries per page.
        page_bytes: bytes per page.
        device: device of the pages.

    Returns:
        uint8 [pages, page_bytes]: rows x (448 e4m3 | 64 bf16), then rows x 8 exponents, then padding.
    """
    table = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=device)
    data = table[:, : rows * ROW].unflatten(1, (rows, ROW))
    data[..., :NOPE] &= NO_NAN
    # Two random bytes are a bf16 value. This high byte limits it to 0.5 .. 2.
    data[..., NOPE + 1 :: 2] = 0x3F
    table[:, rows * ROW : rows * (ROW + SCALES)] = EXPONENT
    return table


def our_rows(blocks: int, rows: int, device: torch.device) -> Tensor:
    """Return a KV buffer of this package with random entries.

    Args:
        blocks: number of blocks.
        rows: entries per block.
        device: device of the buffer.

    Returns:
        uint8 [blocks, rows, 584].
    """
    size = rows * (ROW + SCALES)
    return random_pages(blocks, rows, size, device).as_strided((blocks, rows, ROW + SCALES), (size, ROW + SCALES, 1))


def our_keys(blocks: int, device: torch.device) -> Tensor:
    """Return our index keys, uint8 [blocks, 32, 72]: 32 x 64 B of e2m1, then 32 x 8 B of e4m3 scales around 1."""
    table = torch.randint(0, 256, (blocks, 32 * 72), dtype=torch.uint8, device=device)
    table[:, 32 * 64 :] = 0x38
    return table.view(blocks, 32, 72)


def in_tree_keys(pages: int, device: torch.device) -> Tensor:
    """Return SGLang's FP8 index keys, uint8 [pages, 64 * 132]: 64 x 128 e4m3, then 64 fp32 scales."""
    table = torch.randint(0, 256, (pages, 64 * 132), dtype=torch.uint8, device=device) & NO_NAN
    table[:, 64 * 128 :].view(torch.float32).fill_(2.0**-8)
    return table
