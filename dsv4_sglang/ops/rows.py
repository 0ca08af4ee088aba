"""Row tables: where the 512 numbers of a window row or a compressed entry lie, and how they are quantised.

A table is one tensor `[num_blocks, rows_per_block, width]`; row r is row `r % rows_per_block` of block `r //
rows_per_block`. Its dtype says its format:

| dtype | width | bytes a row | content |
| --- | --- | --- | --- |
| uint8 | 584 | 584 | 448 e4m3, 64 bf16 a row; behind all rows of the block 8 equal ue8m0 exponent bytes a row |
| bfloat16 | 512 | 1024 | the row |
| float32 | 512 | 2048 | the row |

In a uint8 table only `stride(0)`, the bytes of a block, describes memory; the two inner dimensions are the shape that
FlashMLA takes. One scale an entry, a power of two: the same values as DeepSeek's seven scales a row up to subnormals
(SPEC 6.3), and readable by FlashMLA, which wants a byte per tile of 64.
"""

import torch
from torch import Tensor

ENTRY_DIM = 512
ROPE_DIM = 64
NOPE_DIM = ENTRY_DIM - ROPE_DIM
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM  # 576
SCALE_BYTES = 8
FP8_WIDTH = ROW_BYTES + SCALE_BYTES  # 584
FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4


def ceil_pow2_exponent(x: Tensor) -> Tensor:
    """Biased exponent e (int32) of the smallest power of two 2^(e-127) that is at least x; x fp32, positive, normal
    (SPEC 2.4)."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()


def exp2_of_biased(e: Tensor) -> Tensor:
    """2^(e-127) as fp32 for a biased exponent 1 <= e <= 254."""
    return (e.int() << 23).view(torch.float32)


def quantise_nope(x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 448] -> e4m3 bytes [N, 448] uint8 and the biased exponent of the multiplier [N] uint8 (SPEC 2.4, one scale
    an entry).

    The source of an FP8 row is always its bf16 rounding (SPEC 9, conflict 12).
    """
    x = x.bfloat16().float()
    amax = x.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
    e = ceil_pow2_exponent(amax * (1.0 / FP8_MAX))
    scaled = (x / exp2_of_biased(e).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), e.to(torch.uint8)


def strips(table: Tensor) -> tuple[Tensor, Tensor]:
    """Zero-copy views of a uint8 table: rows [blocks, rows_per_block, 576] and exponent bytes [blocks,
    rows_per_block, 8]."""
    blocks, rows_per_block, _ = table.shape
    stride = table.stride(0)
    data = table.as_strided((blocks, rows_per_block, ROW_BYTES), (stride, ROW_BYTES, 1))
    scales = table.as_strided(
        (blocks, rows_per_block, SCALE_BYTES),
        (stride, SCALE_BYTES, 1),
        table.storage_offset() + rows_per_block * ROW_BYTES,
    )
    return data, scales


def _split(table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.long()
    per_block = table.shape[1]
    return rows // per_block, rows % per_block


def write_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Quantise `values` [N, 512] fp32 into the rows `rows` [N] of `table`; rows must not repeat."""
    at = _split(table, rows)
    if table.dtype != torch.uint8:
        table[at] = values.to(table.dtype)
        return
    data, scales = strips(table)
    codes, exponents = quantise_nope(values[:, :NOPE_DIM])
    rope = values[:, NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
    data[at] = torch.cat([codes, rope], -1)
    scales[at] = exponents.unsqueeze(-1).expand(-1, SCALE_BYTES)


def read_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Dequantised rows, fp32 [*rows.shape, 512]."""
    at = _split(table, rows)
    if table.dtype != torch.uint8:
        return table[at].float()
    data, scales = strips(table)
    row = data[at]
    nope = row[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    rope = row[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope * exp2_of_biased(scales[at][..., :1]), rope], -1)


def copy_rows(src: Tensor, src_rows: Tensor, dst: Tensor, dst_rows: Tensor) -> None:
    """Copy rows between two tables of one format without requantising; the destination rows must not repeat."""
    src_at, dst_at = _split(src, src_rows), _split(dst, dst_rows)
    if src.dtype != torch.uint8:
        dst[dst_at] = src[src_at]
        return
    for s, d in zip(strips(src), strips(dst)):
        d[dst_at] = s[src_at]
