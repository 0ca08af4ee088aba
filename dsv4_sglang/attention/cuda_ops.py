"""CUDA implementations, in Triton, FlashMLA and the extension, of the ops `attend` and `index_topk`.

Importing this module registers them and needs no GPU. Triton's kernels are imported on the first call.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat
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
    """Run the kernels of the extension.

    Raises:
        ValueError: they do not have this form of keys or these candidate blocks.
    """
    inputs = q, weights, index_keys, block_table, token_request, positions, rope
    has_blocks = kept is not None or within is not None
    if ratio == CSA_RATIO and hadamard and not has_blocks:
        cuda_index.index_topk(*inputs, key_format, scores, entry_indices)
        return
    form = f"{KeyFormat.from_code(key_format).value} {'with' if hadamard else 'without'} the Hadamard transform"
    if ratio not in (1, 2) or hadamard or key_format != KeyFormat.MXFP4.code:
        raise ValueError(
            f"index_topk: keys of ratio {ratio} in {form}; expected ratio 1 or 2 in mxfp4 without it, or ratio 4 with "
            "it and without candidates"
        )
    if has_blocks and candidate_block != cuda_index.CANDIDATE_ENTRIES:
        raise ValueError(
            f"index_topk: candidate blocks of {candidate_block} entries; expected {cuda_index.CANDIDATE_ENTRIES} on a "
            "CUDA device"
        )
    cuda_index.index_topk_of_blocks(*inputs, scores, entry_indices, ratio, kept, within)


for _op in (attend, index_topk):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "CUDA", _op)
