"""Choice between attention kernels.

| attention kernel | what runs | steps | KV formats |
| --- | --- | --- | --- |
| `sparse_prefill.SparsePrefillAttention` | FlashMLA's sparse bf16 kernel, on gathered entries | prefill | fp8, bf16 |
| `flashmla.FlashMLAAttention` | FlashMLA's FP8 decode kernel, on the KV buffers in place | any | fp8 |
| `portable.PortableAttention` | the op `attend`: Triton on CUDA, `ops.reference.read` on a CPU | any | all |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4_sglang.attention.base import AttentionKernel
from dsv4_sglang.attention.portable import PortableAttention
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat


def make_kernels(
    device: torch.device, blocks: int, heads: int, dtype: torch.dtype, kv_format: KVFormat
) -> list[AttentionKernel]:
    """Return the attention kernels that support a model on `device`, fastest first. The last one takes any step.

    Args:
        device: device of the KV buffers.
        blocks: number of blocks of each KV buffer.
        heads: query heads of a layer.
        dtype: dtype of the queries.
        kv_format: format of the KV entries.
    """
    kernels: list[AttentionKernel] = []
    model = device, heads, dtype, kv_format
    if device.type == "cuda":
        from dsv4_sglang.attention.flashmla import FlashMLAAttention, padded_heads, scheduler_config
        from dsv4_sglang.attention.sparse_prefill import SparsePrefillAttention

        if SparsePrefillAttention.supports(*model):
            kernels.append(SparsePrefillAttention(blocks))
        if FlashMLAAttention.supports(*model):
            kernels.append(FlashMLAAttention(scheduler_config(device, padded_heads(heads))))
    return [*kernels, PortableAttention()]


def begin_step(kernels: Sequence[AttentionKernel], step: StepMetadata, lengths: list[int] | None) -> AttentionKernel:
    """Return the first of `kernels` that takes the step, prepared for its layers.

    Args:
        kernels: attention kernels in order of preference.
        step, lengths: as in `AttentionKernel.begin_step`.
    """
    return next(kernel for kernel in kernels if kernel.begin_step(step, lengths))
