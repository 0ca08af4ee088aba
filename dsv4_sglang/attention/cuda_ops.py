"""Registers the CUDA implementations of all ops; import it where there is a CUDA device.

The extension is built here on first use. It holds the writing and moving ops and the kernels of `index_topk`; `attend`
is FlashMLA and Triton, and what reads V4.1's tables is Triton.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4_sglang.attention import cuda_index, triton_attend, triton_attend_v41, triton_index_v41
from dsv4_sglang.attention.flashmla import FlashMLAReader, pad_heads
from dsv4_sglang.attention.readers import AttendInputs
from dsv4_sglang.ops import extension
from dsv4_sglang.ops.schemas import NAMESPACE


def attend(q: Tensor, *args: Any) -> Tensor:
    """FlashMLA where it takes the tensors, with a schedule for this call alone, else Triton."""
    inputs = AttendInputs.from_op(*args)
    if FlashMLAReader.supports(q.device, q.shape[1], q.dtype, inputs.row_format):
        return FlashMLAReader().attend(*pad_heads(q, inputs)).values.contiguous()
    return triton_attend.attend(q, inputs)


extension.load()
torch.library.impl(f"{NAMESPACE}::attend", "CUDA", attend)
torch.library.impl(f"{NAMESPACE}::index_topk", "CUDA", cuda_index.index_topk)
torch.library.impl(f"{NAMESPACE}::attend_v41", "CUDA", triton_attend_v41.attend_v41)
torch.library.impl(f"{NAMESPACE}::index_topk_v41", "CUDA", triton_index_v41.index_topk_v41)
