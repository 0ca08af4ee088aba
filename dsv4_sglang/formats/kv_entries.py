"""KV formats: byte layout and quantisation of the 512 numbers of a window entry or a compressed entry (SPEC 6.3, 11.4).

| format | dtype | width | bytes per entry | content |
| --- | --- | --- | --- | --- |
| FP8 | uint8 | 584 | 584 | 448 e4m3, 64 bf16; after all entries of the block 8 equal ue8m0 exponents each |
| BF16 | bfloat16 | 512 | 1024 | the entry |
| FP32 | float32 | 512 | 2048 | the entry |
| MXFP8 | uint8 | 528 | 528 | 512 e4m3; after all entries of the block 16 ue8m0 scales each, one per 32 |
| NVFP4 | uint8 | 288 | 288 | 256 B of e2m1 pairs; after all entries of the block 32 e4m3 scales each, one per 16 |

The first three are those of DeepSeek-V4. MXFP8 and NVFP4 are those in which DeepSeek-V4.1 was trained: all dims of its
window entries and of its compressed entries, RoPE dims included. Element 2i of a pair is in the low nibble.

In an FP8 buffer only `stride(0)`, the bytes of a block, describes memory. The two inner dimensions are the shape that
FlashMLA takes. An entry has one scale, a power of two. The values equal those with DeepSeek's seven scales per entry,
except for subnormals (SPEC 6.3). FlashMLA needs one exponent byte per tile of 64, hence the copies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4_sglang.formats.buffers import KVBuffer, StorageFormat
from dsv4_sglang.formats.quantise import dequantise_fp4, e4m3_values, exp2_of_biased, quantise_e4m3, quantise_nvfp4

ENTRY_DIM = 512
ROPE_DIM = 64
NOPE_DIM = ENTRY_DIM - ROPE_DIM
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM  # 576
SCALE_BYTES = 8

# FlashMLA needs entries that start at multiples of 16 B. With 584 B per entry that holds only for an even number of
# entries per block. On sm_100 the block stride must be a multiple of 576 B, the size of an entry without its scales.
_BLOCK_ALIGNMENT = 16
_SM100_BLOCK_ALIGNMENT = ROW_BYTES


class KVFormat(StorageFormat):
    """Storage format of a 512-dim KV entry (window entry or compressed entry)."""

    # 448 e4m3, 64 bf16 and 8 equal ue8m0 exponent bytes: 584 B.
    FP8 = "fp8", ROW_BYTES, SCALE_BYTES
    # 1024 B, unquantised.
    BF16 = "bf16", 2 * ENTRY_DIM, 0, torch.bfloat16
    # 2048 B, unquantised, for exact tests and CPU.
    FP32 = "fp32", 4 * ENTRY_DIM, 0, torch.float32

    # 512 e4m3 and 16 ue8m0 scales: 528 B.
    MXFP8 = "mxfp8", ENTRY_DIM, ENTRY_DIM // 32
    # 512 e2m1 and 32 e4m3 scales: 288 B.
    NVFP4 = "nvfp4", ENTRY_DIM // 2, ENTRY_DIM // 16

    def quantise(self, values: Tensor) -> tuple[Tensor, ...]:
        if self is KVFormat.NVFP4:
            return quantise_nvfp4(values)
        if self is KVFormat.MXFP8:
            codes, exponents = quantise_e4m3(values.unflatten(-1, (-1, 32)))
            return codes.flatten(-2), exponents
        if self is KVFormat.FP8:
            codes, exponent = quantise_e4m3(values[:, :NOPE_DIM])
            rope = values[:, NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
            return torch.cat([codes, rope], -1), exponent.unsqueeze(-1).expand(-1, SCALE_BYTES)
        return super().quantise(values)

    def dequantise(self, data: Tensor, *scales: Tensor) -> Tensor:
        if self is KVFormat.NVFP4:
            return dequantise_fp4(data, scales[0])
        if self is KVFormat.MXFP8:
            values = e4m3_values(data).unflatten(-1, (-1, 32))
            return (values * exp2_of_biased(scales[0]).unsqueeze(-1)).flatten(-2)
        if self is KVFormat.FP8:
            rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
            return torch.cat([e4m3_values(data[..., :NOPE_DIM]) * exp2_of_biased(scales[0][..., :1]), rope], -1)
        return super().dequantise(data)


# Formats of DeepSeek-V4, of which a server chooses one for window entries and compressed entries.
V4_KV_FORMATS = KVFormat.FP8, KVFormat.BF16, KVFormat.FP32


def block_stride_bytes(
    entries_per_block: int, kv_format: StorageFormat, device: torch.device, sm100: bool | None = None
) -> int:
    """Return the bytes from one block of a KV buffer to the next.

    Args:
        entries_per_block: entries of a block.
        kv_format: format of entries or index keys.
        device: device of the buffer.
        sm100: overrides the device, to compute sizes for the GPU of another machine.
    """
    size = entries_per_block * kv_format.row_bytes
    if kv_format is not KVFormat.FP8:
        return size
    if sm100 is None:
        sm100 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    alignment = _SM100_BLOCK_ALIGNMENT if sm100 else _BLOCK_ALIGNMENT
    return math.ceil(size / alignment) * alignment


def make_kv_buffers(
    tables: int, blocks: int, entries_per_block: int, kv_format: StorageFormat, device: torch.device
) -> Tensor:
    """Allocate zeroed buffers in one allocation.

    Args:
        tables: number of buffers.
        blocks: blocks per buffer.
        entries_per_block: entries per block.
        kv_format: format of entries or index keys.
        device: device of the buffers; on sm_100 FP8 blocks have more padding.

    Returns:
        [tables, blocks, entries_per_block, width].
    """
    stride = block_stride_bytes(entries_per_block, kv_format, device) // kv_format.dtype.itemsize
    storage = torch.zeros(tables * blocks * stride, dtype=kv_format.dtype, device=device)
    width = kv_format.width
    return storage.as_strided((tables, blocks, entries_per_block, width), (blocks * stride, stride, width, 1))


def fp8_views(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the parts of an FP8 KV buffer `[blocks, entries, 584]`.

    Returns:
        Dims without RoPE, e4m3 bits uint8 [blocks, entries, 448]; dims with RoPE, bf16 [blocks, entries, 64]; the
        multiplier that dequantises, a power of two (SPEC 6.3), float8_e8m0fnu [blocks, entries].
    """
    data, exponents = KVBuffer(table, KVFormat.FP8).strips()
    rope = data[..., NOPE_DIM:].view(torch.bfloat16)
    return data[..., :NOPE_DIM], rope, exponents[..., 0].view(torch.float8_e8m0fnu)
