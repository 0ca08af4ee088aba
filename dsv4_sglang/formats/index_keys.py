"""Index keys: Hadamard rotation, FP4 quantisation, and the buffers that hold them (SPEC 2.5, 6.3).

A key buffer is `[blocks, n, width]` with n keys per block of 128 tokens: 32 in V4's CSA layers, 64 or 128 in V4.1. The
FP4 formats (uint8, width 72) use the NVFP4 container: a block holds n x 64 B of e2m1 pairs (element 2i in the low
nibble), then n x 8 B of e4m3 scales, one per 16 elements. There are two quantisers for it. MXFP4 is the trained format:
blocks of 32 elements with a power-of-two scale, its byte stored twice. NVFP4 has blocks of 16 elements. FP32, width
128, holds unquantised keys for exact tests.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dsv4_sglang.formats.buffers import StorageFormat
from dsv4_sglang.formats.quantise import dequantise_fp4, quantise_mxfp4, quantise_nvfp4

INDEX_DIM = 128
KEY_BYTES = INDEX_DIM // 2
KEY_SCALES = INDEX_DIM // 16


class KeyFormat(StorageFormat):
    """Storage of one 128-dim index key."""

    # The trained format in the NVFP4 container: 64 B of e2m1, blocks of 32, each power-of-two scale stored twice: 72 B.
    MXFP4 = "mxfp4", KEY_BYTES, KEY_SCALES
    # 64 B of e2m1 and 8 e4m3 scales, one per 16 elements: 72 B.
    NVFP4 = "nvfp4", KEY_BYTES, KEY_SCALES
    # 512 B, unquantised, for exact tests and CPU.
    FP32 = "fp32", 4 * INDEX_DIM, 0, torch.float32

    @property
    def is_fp4(self) -> bool:
        return self is not KeyFormat.FP32

    def quantise(self, values: Tensor) -> tuple[Tensor, ...]:
        """Quantise rotated keys [..., 128] to packed e2m1 uint8 [..., 64] and e4m3 scale bytes uint8 [..., 8]."""
        if self is KeyFormat.MXFP4:
            return quantise_mxfp4(values)
        return quantise_nvfp4(values) if self is KeyFormat.NVFP4 else super().quantise(values)

    def dequantise(self, data: Tensor, *scales: Tensor) -> Tensor:
        return dequantise_fp4(data, scales[0]) if scales else super().dequantise(data)


@functools.cache
def _hadamard_matrix(device: torch.device) -> Tensor:
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < INDEX_DIM:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / INDEX_DIM**0.5


def hadamard(x: Tensor) -> Tensor:
    """Return the Sylvester-ordered orthonormal Hadamard transform of the last dimension (128), in fp32 (SPEC 2.5)."""
    return x.float() @ _hadamard_matrix(x.device)
