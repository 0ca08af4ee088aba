"""CUDA implementations, in Triton, FlashMLA and the extension, of the ops `attend` and `index_topk`.

Importing this module registers them and needs no GPU. The kernels are imported on the first call.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.ops import cuda_index
from dsv4_sglang.ops.schemas import NAMESPACE


def attend(q: Tensor, *args: Any) -> Tensor:
    """Run FlashMLA if it supports the tensors, with a schedule for this call alone, otherwise Triton."""
    from dsv4_sglang.attention import triton_attend
    from dsv4_sglang.attention.base import AttendInputs
    from dsv4_sglang.attention.flashmla import FlashMLAAttention, pad_heads

    inputs = AttendInputs.from_op(*args)
    if FlashMLAAttention.supports(q.device, q.shape[1], q.dtype, inputs.kv_format):
        return FlashMLAAttention().attend(*pad_heads(q, inputs)).values.contiguous()
    return triton_attend.attend(q, inputs)


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    token_request: Tensor,
    positions: Tensor,
    rope: Tensor,
    key_format: int,
    scores: Tensor,
    entry_indices: Tensor,
    ratio: int = CSA_RATIO,
    hadamard: bool = True,
    candidate_block: int = 0,
    kept: Tensor | None = None,
    within: Tensor | None = None,
) -> None:
    """Run the kernels of the extension at V4's ratio, Triton's for keys without the Hadamard transform."""
    inputs = q, weights, index_keys, block_table, token_request, positions, rope, key_format, scores, entry_indices
    if ratio == CSA_RATIO and hadamard and kept is None and within is None:
        cuda_index.index_topk(*inputs)
        return
    from dsv4_sglang.attention import triton_index

    triton_index.index_topk(*inputs, ratio, hadamard, candidate_block, kept, within)


for _op in (attend, index_topk):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "CUDA", _op)
