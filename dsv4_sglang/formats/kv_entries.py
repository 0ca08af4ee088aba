"""KV formats: byte layout and quantisation of the 512 numbers of a window entry or a compressed entry.

| format | dtype | width | bytes per entry | content |
| --- | --- | --- | --- | --- |
| FP8 | uint8 | 584 | 584 | 448 e4m3, 64 bf16; after all entries of the block 8 equal ue8m0 exponents each |
| BF16 | bfloat16 | 512 | 1024 | the entry |
| FP32 | float32 | 512 | 2048 | the entry |

In an FP8 buffer only `stride(0)`, the bytes of a block, describes memory. The two inner dimensions are the shape that
FlashMLA takes. An entry has one scale, a power of two. The values equal those with DeepSeek's seven scales per entry,
except for subnormals (SPEC 6.3). FlashMLA needs one exponent byte per tile of 64, hence the copies.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from dsv4_sglang.formats.buffers import KVBuffer, StorageFormat

ENTRY_DIM = 512
ROPE_DIM = 64
NOPE_DIM = ENTRY_DIM - ROPE_DIM
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM  # 576
SCALE_BYTES = 8
FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4

# FlashMLA needs entries that start at multiples of 16 B. With 584 B per entry that holds only for an even number of
# entries per block. On sm_100 the block stride must be a multiple of 576 B, the size of an entry without its scales.
_BLOCK_ALIGNMENT = 16
_SM100_BLOCK_ALIGNMENT = ROW_BYTES


class KVFormat(StorageFormat):
    """Storage format of a 512-dim KV entry (window, CSA or HCA entry)."""

    # 448 e4m3, 64 bf16 and 8 equal ue8m0 exponent bytes: 584 B.
    FP8 = "fp8", ROW_BYTES, SCALE_BYTES
    # 1024 B, unquantised.
    BF16 = "bf16", 2 * ENTRY_DIM, 0, torch.bfloat16
    # 2048 B, unquantised, for exact tests and CPU.
    FP32 = "fp32", 4 * ENTRY_DIM, 0, torch.float32

    def quantise(self, values: Tensor) -> tuple[Tensor, ...]:
        if self is not KVFormat.FP8:
            return super().quantise(values)
        codes, exponent = quantise_e4m3(values[:, :NOPE_DIM])
        rope = values[:, NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
        return torch.cat([codes, rope], -1), exponent.unsqueeze(-1).expand(-1, SCALE_BYTES)

    def dequantise(self, data: Tensor, *scales: Tensor) -> Tensor:
        if self is not KVFormat.FP8:
            return super().dequantise(data)
        rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
        return torch.cat([e4m3_values(data[..., :NOPE_DIM]) * exp2_of_biased(scales[0][..., :1]), rope], -1)


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


def ceil_pow2_exponent(x: Tensor) -> Tensor:
    """Return the biased exponent e (int32) of the smallest power of two 2^(e-127) that is at least x.

    x is fp32, positive and normal (SPEC 2.4). For an infinite x and for NaN e is 255, the NaN of ue8m0, so that what is
    scaled by it reads as NaN.
    """
    bits = x.float().contiguous().view(torch.int32)
    return (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()).clamp_max(255)


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def e4m3_values(codes: Tensor) -> Tensor:
    """Convert e4m3 bytes (uint8) to fp32 of the same shape.

    A table lookup, which takes a quarter of the time of PyTorch's conversion on a CPU.
    """
    return _e4m3_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def exp2_of_biased(e: Tensor) -> Tensor:
    """Return 2^(e-127) as fp32 for a biased exponent 1 <= e <= 254, infinity for 255."""
    return (e.int() << 23).view(torch.float32)


def quantise_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise vectors that have one scale each, a power of two.

    The source of an FP8 entry is always its bf16 rounding (SPEC 2.4).

    Args:
        x: [..., n].

    Returns:
        e4m3 bytes uint8 [..., n] and the biased exponents of the multipliers uint8 [...].
    """
    x = x.bfloat16().float()
    e = ceil_pow2_exponent(x.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR) * (1.0 / FP8_MAX))
    scaled = (x / exp2_of_biased(e).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), e.to(torch.uint8)
