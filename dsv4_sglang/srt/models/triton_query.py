"""RoPE of V4.1's attention queries in one launch (SPEC 11.4): they have no norm per head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4_sglang.attention.tensor_checks import FLOATS, TensorChecker
from dsv4_sglang.attention.triton_entries import DIM, angles, inverse_rope_pairs
from dsv4_sglang.formats.kv_entries import ENTRY_DIM

_HEADS_PER_PROGRAM = 4


@triton.jit
def _rope_kernel(q_ptr, out_ptr, positions_ptr, rope_ptr, heads, q_stride, out_stride, BLOCK_H: tl.constexpr):
    """Grid (tokens, groups of BLOCK_H heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (head < heads)[:, None]
    at = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    x = tl.load(q_ptr + token * q_stride + at, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, DIM // 2, 2]))
    cos, sin = angles(rope_ptr, tl.load(positions_ptr + token))
    x = tl.reshape(inverse_rope_pairs(even, odd, cos[None, :], -sin[None, :]), [BLOCK_H, DIM])
    tl.store(out_ptr + token * out_stride + at, x.to(out_ptr.dtype.element_ty), mask=mask)


def query_rope(q: Tensor, out: Tensor, positions: Tensor, rope: Tensor) -> None:
    """Write queries with RoPE on their last 64 dims to `out`.

    Args:
        q: [T, H, 512]. The heads of a token are contiguous.
        out: [T, H, 512], likewise.
        positions: int64 [T], positions of the tokens.
        rope: fp32 [positions, 64], RoPE table.

    Raises:
        ValueError: a tensor has another dtype, shape, stride or device than the kernel reads.
    """
    check = TensorChecker("query_rope", q.device)
    check.tensor("q", q, FLOATS, (None, None, ENTRY_DIM), dense_from=1)
    tokens, heads, _ = q.shape
    check.tensor("out", out, FLOATS, (tokens, heads, ENTRY_DIM), dense_from=1)
    check.rotation(tokens, positions, rope)
    _rope_kernel[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        *(q, out, positions, rope, heads, q.stride(0), out.stride(0)), BLOCK_H=_HEADS_PER_PROGRAM, num_warps=4
    )
