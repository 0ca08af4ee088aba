"""Index keys: Hadamard rotation, FP4 quantisation, and the tables that hold them (SPEC 2.5, 6.3).

A key table is `[blocks, 32, width]`. dtype uint8, width 72 is the NVFP4 container: a block holds 32 x 64 B of e2m1
pairs (element 2i in the low nibble), then 32 x 8 B of e4m3 scales, one per 16 elements. Two quantisers write it:
`MXFP4`, the trained format (blocks of 32, one power of two, its byte written twice), and `NVFP4` (blocks of 16).
dtype float32, width 128 holds unquantised keys for exact tests.
"""

import functools

import torch
from torch import Tensor

from dsv4_sglang.ops.rows import ceil_pow2_exponent, exp2_of_biased

INDEX_DIM = 128
KEYS_PER_BLOCK = 32
KEY_BYTES = INDEX_DIM // 2
KEY_SCALES = INDEX_DIM // 16
FP4_WIDTH = KEY_BYTES + KEY_SCALES  # 72
MXFP4, NVFP4 = 0, 1
FP4_MAX = 6.0
E4M3_MIN = 2.0**-9  # the smallest positive e4m3
# Powers of two that an e4m3 scale can hold, as biased fp32 exponents: 2^-9 .. 2^8.
_MIN_EXPONENT, _MAX_EXPONENT = 127 - 9, 127 + 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def _hadamard_matrix(device: torch.device) -> Tensor:
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < INDEX_DIM:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / INDEX_DIM**0.5


def hadamard(x: Tensor) -> Tensor:
    """Sylvester-ordered orthonormal Hadamard transform of the last dimension (128), in fp32 (SPEC 2.5)."""
    return x.float() @ _hadamard_matrix(x.device)


def e2m1_codes(x: Tensor) -> Tensor:
    """fp32 -> 4-bit e2m1 codes (sign in bit 3), round to nearest even, saturating at 6."""
    a = x.abs().clamp_max(FP4_MAX)
    grid = torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))
    code = torch.where(grid < 2, grid * 2, torch.where(grid < 4, grid + 2, grid / 2 + 4)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def quantise_keys(y: Tensor, index_format: int) -> tuple[Tensor, Tensor]:
    """[N, 128] rotated keys -> packed e2m1 [N, 64] uint8 and e4m3 scale bytes [N, 8] uint8."""
    y = y.bfloat16().float()
    if index_format == MXFP4:
        amax = y.unflatten(-1, (-1, 32)).abs().amax(-1).clamp_min(FP4_MAX * 2.0**-126)
        e = ceil_pow2_exponent(amax * (1.0 / FP4_MAX)).clamp(_MIN_EXPONENT, _MAX_EXPONENT)
        scale = exp2_of_biased(e).repeat_interleave(2, -1)
    elif index_format == NVFP4:
        amax = y.unflatten(-1, (-1, 16)).abs().amax(-1)
        scale = (amax * (1.0 / FP4_MAX)).clamp(E4M3_MIN, 448.0).to(torch.float8_e4m3fn).float()
    else:
        raise ValueError(f"index_format is {index_format}; expected {MXFP4} (mxfp4) or {NVFP4} (nvfp4)")
    codes = e2m1_codes((y.unflatten(-1, (-1, 16)) / scale.unsqueeze(-1)).flatten(-2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.to(torch.float8_e4m3fn).view(torch.uint8)


def dequantise_keys(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantise_keys`: fp32 [N, 128]."""
    values = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    scale = scales.contiguous().view(torch.float8_e4m3fn).float()
    return (values[codes.long()].unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)


def strips(table: Tensor) -> tuple[Tensor, Tensor]:
    """Zero-copy views of a uint8 key table: e2m1 pairs [blocks, 32, 64] and scale bytes [blocks, 32, 8]."""
    blocks, keys, _ = table.shape
    stride = table.stride(0)
    data = table.as_strided((blocks, keys, KEY_BYTES), (stride, KEY_BYTES, 1))
    scales = table.as_strided(
        (blocks, keys, KEY_SCALES), (stride, KEY_SCALES, 1), table.storage_offset() + keys * KEY_BYTES
    )
    return data, scales


def write_keys(table: Tensor, rows: Tensor, y: Tensor, index_format: int) -> None:
    """Quantise rotated keys `y` [N, 128] into the rows `rows` [N] of `table`; rows must not repeat."""
    rows = rows.long()
    at = rows // table.shape[1], rows % table.shape[1]
    if table.dtype != torch.uint8:
        table[at] = y.to(table.dtype)
        return
    for strip, value in zip(strips(table), quantise_keys(y, index_format)):
        strip[at] = value


def read_keys(table: Tensor, rows: Tensor) -> Tensor:
    """Dequantised keys, fp32 [*rows.shape, 128]."""
    rows = rows.long()
    at = rows // table.shape[1], rows % table.shape[1]
    if table.dtype != torch.uint8:
        return table[at].float()
    data, scales = strips(table)
    return dequantise_keys(data[at], scales[at])
