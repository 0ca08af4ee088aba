"""CUDA implementations, in Triton and FlashMLA, of the ops `attend` and `index_topk_v41`.

Importing this module registers them and needs no GPU. The kernels are imported on the first call.
"""

from typing import Any

import torch
from torch import Tensor

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


def index_topk_v41(q: Tensor, *args: Any) -> None:
    from dsv4_sglang.attention import triton_index_v41

    triton_index_v41.index_topk_v41(q, *args)


for _op in (attend, index_topk_v41):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "CUDA", _op)
