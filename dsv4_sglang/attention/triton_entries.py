"""Triton functions for KV entries: byte sizes, addresses, decoding of FP8 and FP4 codes, RoPE. `csrc/` has the same for
CUDA.

FP8 entries are decoded by integer arithmetic, which sm_80 supports as well. The bits of an e4m3 number, moved to the
exponent and mantissa of a bf16, represent that number times 2^-120.
"""

import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.formats import KVFormat, kv_entries, quantise

DIM = tl.constexpr(kv_entries.ENTRY_DIM)
NOPE = tl.constexpr(kv_entries.NOPE_DIM)
ROPE = tl.constexpr(kv_entries.ROPE_DIM)
ROW_BYTES = tl.constexpr(kv_entries.ROW_BYTES)
SCALE_BYTES = tl.constexpr(kv_entries.SCALE_BYTES)
FP8_MAX = tl.constexpr(quantise.FP8_MAX)
MXFP8_SCALES = tl.constexpr(KVFormat.MXFP8.scale_bytes)
MXFP8_GROUP = tl.constexpr(kv_entries.ENTRY_DIM // KVFormat.MXFP8.scale_bytes)
NVFP4_DATA = tl.constexpr(KVFormat.NVFP4.data_bytes)
NVFP4_SCALES = tl.constexpr(KVFormat.NVFP4.scale_bytes)
NVFP4_GROUP = tl.constexpr(kv_entries.ENTRY_DIM // KVFormat.NVFP4.scale_bytes)
# An entry is processed in four pieces whose widths are powers of two: three for the dims without RoPE (an FP8 entry
# changes its format after them), one for the dims with RoPE.
PIECE0 = tl.constexpr(kv_entries.ENTRY_DIM // 2)
PIECE1 = tl.constexpr(kv_entries.ENTRY_DIM // 4)
PIECE2 = tl.constexpr(kv_entries.NOPE_DIM - 3 * kv_entries.ENTRY_DIM // 4)
AT1, AT2 = PIECE0, tl.constexpr(PIECE0.value + PIECE1.value)  # offsets
SQRT_E4M3_FACTOR = tl.constexpr(2.0**60)  # square root of the factor 2^120 that decoded e4m3 bits are missing

# Decode four codes in one register to four bf16 in two registers. Move each code to the upper byte of a half, shift its
# exponent and mantissa right by four bits and keep its sign.
_DECODE = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 $0, a, 0x80008000, c, 0xEA;
    lop3.b32 $1, b, 0x80008000, d, 0xEA;
    }"""
)


@triton.jit
def e4m3_bits(code, DOT: tl.constexpr):
    """Convert uint8 e4m3 codes to their values times 2^-120, as bf16 or fp32 (which have the same exponents)."""
    if DOT == tl.bfloat16:  # noqa: SIM300
        value = tl.inline_asm_elementwise(_DECODE, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = code.to(tl.uint32)
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def e4m3(code):
    """Convert e4m3 bytes to fp32."""
    return e4m3_bits(code, tl.float32) * SQRT_E4M3_FACTOR * SQRT_E4M3_FACTOR


@triton.jit
def e2m1(code):
    """Convert 4-bit e2m1 codes to fp32."""
    magnitude = code & 7
    exponent = tl.maximum(magnitude >> 1, 1)
    mantissa = tl.where(magnitude < 2, magnitude, 2 + (magnitude & 1))
    halves = (mantissa << (exponent - 1)).to(tl.float32)
    return tl.where((code & 8) != 0, -0.5, 0.5) * halves


@triton.jit
def _e4m3_scale(code):
    """Convert bytes of e4m3 scales to fp32. Unlike `e4m3` it keeps NaN, the scale of values that were not finite."""
    return tl.where((code & 0x7F) == 0x7F, float("nan"), e4m3(code))


@triton.jit
def block_scaled_dims(
    block_at, inside, entries_per_block, is_entry, FIRST, WIDTH: tl.constexpr, FP4: tl.constexpr, DOT: tl.constexpr
):
    """Load dims FIRST .. FIRST + WIDTH - 1 of the MXFP8 or NVFP4 entries `inside` [N, 1] of the blocks at `block_at`
    [N, 1]."""
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    if FP4:
        codes = tl.load(block_at + inside * NVFP4_DATA + dim // 2, mask=is_entry, other=0).to(tl.int32)
        scale_at = block_at + entries_per_block * NVFP4_DATA + inside * NVFP4_SCALES + dim // NVFP4_GROUP
        scale = _e4m3_scale(tl.load(scale_at, mask=is_entry, other=0))
        value = e2m1((codes >> (dim % 2 * 4)) & 15) * scale
    else:
        codes = tl.load(block_at + inside * DIM + dim, mask=is_entry, other=0)
        scale_at = block_at + entries_per_block * DIM + inside * MXFP8_SCALES + dim // MXFP8_GROUP
        exponent = tl.load(scale_at, mask=is_entry, other=127).to(tl.int32)
        value = e4m3(codes) * exponent_to_scale(exponent)
    return value.to(DOT)


@triton.jit
def fp8_entry(block_at, inside, entries_per_block):
    """Return the addresses of entry `inside` of a block and of its exponent bytes, the latter as 32-bit words."""
    scale_at = block_at + (entries_per_block * ROW_BYTES + inside * SCALE_BYTES)
    return block_at + inside * ROW_BYTES, scale_at.to(tl.pointer_type(tl.int32))


@triton.jit
def rope_dims(entry_at):
    """Return the address of the bf16 dims with RoPE of an FP8 entry."""
    return (entry_at + NOPE).to(tl.pointer_type(tl.bfloat16))


@triton.jit
def exponent_to_scale(exponent):
    """Return the power of two with a biased exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_pieces(at, mask, DOT: tl.constexpr):
    """Load unquantised entries [N, 512] at the addresses `at` [N, 1] in four pieces."""
    d0, d1 = tl.arange(0, PIECE0)[None, :], tl.arange(0, PIECE1)[None, :]
    d2, d3 = tl.arange(0, PIECE2)[None, :], tl.arange(0, ROPE)[None, :]
    p0 = tl.load(at + d0, mask=mask, other=0.0).to(DOT)
    p1 = tl.load(at + AT1 + d1, mask=mask, other=0.0).to(DOT)
    p2 = tl.load(at + AT2 + d2, mask=mask, other=0.0).to(DOT)
    p3 = tl.load(at + NOPE + d3, mask=mask, other=0.0).to(DOT)
    return p0, p1, p2, p3


@triton.jit
def store_pieces(at, p0, p1, p2, p3, mask):
    """Store four pieces, as returned by `load_pieces`, in the dtype of the memory."""
    d0, d1 = tl.arange(0, PIECE0)[None, :], tl.arange(0, PIECE1)[None, :]
    d2, d3 = tl.arange(0, PIECE2)[None, :], tl.arange(0, ROPE)[None, :]
    dtype = at.dtype.element_ty
    tl.store(at + d0, p0.to(dtype), mask=mask)
    tl.store(at + AT1 + d1, p1.to(dtype), mask=mask)
    tl.store(at + AT2 + d2, p2.to(dtype), mask=mask)
    tl.store(at + NOPE + d3, p3.to(dtype), mask=mask)


@triton.jit
def angles(rope_ptr, position):
    """Return cos and sin [256] for all interleaved pairs of an entry. Pairs without RoPE have angle 0."""
    pair = tl.arange(0, DIM // 2) - NOPE // 2
    at = rope_ptr + position * ROPE + pair * 2
    cos = tl.load(at, mask=pair >= 0, other=1.0)
    sin = tl.load(at + 1, mask=pair >= 0, other=0.0)
    return cos, sin


@triton.jit
def inverse_rope_pairs(even, odd, cos, sin):
    """Rotate interleaved pairs back. The results are joined: the last dimension of the output is [2]."""
    return tl.join(even * cos + odd * sin, odd * cos - even * sin)


@triton.jit
def inverse_rope_dims(rope_part, cos, sin, BLOCK_H: tl.constexpr):
    """Rotate the dims with RoPE [BLOCK_H, 64] back; cos and sin are [32]."""
    even, odd = tl.split(tl.reshape(rope_part, [BLOCK_H, ROPE // 2, 2]))
    return tl.reshape(inverse_rope_pairs(even, odd, cos[None, :], sin[None, :]), [BLOCK_H, ROPE])


def table_stride(table: Tensor) -> int:
    """Return the block stride of a KV buffer in elements. 0 for a buffer of one block, whose size may be no valid
    stride.
    """
    return table.stride(0) if table.shape[0] > 1 else 0
