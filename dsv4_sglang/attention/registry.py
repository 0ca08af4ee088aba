"""Choice between attention kernels.

| attention kernel | what runs | steps | window format |
| --- | --- | --- | --- |
| `sparse_prefill.SparsePrefillAttention` | FlashMLA's sparse bf16 kernel, on gathered entries | prefill | not fp32 |
| `sparse_decode.SparseDecodeAttention` | the same kernel, on decoded lists | decode | mxfp8 |
| `flashmla.FlashMLAAttention` | FlashMLA's FP8 decode kernel, on the KV buffers in place | any | fp8 |
| `PortableAttention` | the op `attend`: Triton on CUDA, `ops.reference.read` on a CPU | any | all |
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_sglang.attention import cuda_ops  # noqa: F401  registers `attend` for CUDA
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, LayerOutput
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO


class PortableAttention(AttentionKernel):
    """The op `attend`: any device, KV format, dtype, number of heads and step. It applies the inverse RoPE itself."""

    @classmethod
    def supports(cls, device: torch.device, heads: int, dtype: torch.dtype, kv_format: KVFormat) -> bool:
        return True

    def begin_step(self, step: StepMetadata, most_blocks: int | None) -> bool:
        return True

    def attend(self, q: Tensor, inputs: AttendInputs, *, output_is_rotated: bool = False) -> LayerOutput:
        return LayerOutput(torch.ops.dsv4_sglang.attend(q, *inputs.op_args()), rotated=False)


def make_kernels(
    device: torch.device,
    blocks: int,
    heads: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    entries_per_block: int = BLOCK_TOKENS // CSA_RATIO,
    top_k: int = 0,
) -> list[AttentionKernel]:
    """Return the attention kernels that support a model on `device`, fastest first. The last one takes any step.

    Args:
        device: device of the KV buffers.
        blocks: number of blocks of each KV buffer.
        heads: query heads of a layer.
        dtype: dtype of the queries.
        kv_format: format of window entries.
        entries_per_block: most entries of a block in a layer.
        top_k: entries that a token selects.
    """
    kernels: list[AttentionKernel] = []
    model = device, heads, dtype, kv_format
    if device.type == "cuda":
        from dsv4_sglang.attention.flashmla import FlashMLAAttention, padded_heads, scheduler_config
        from dsv4_sglang.attention.sparse_decode import SparseDecodeAttention
        from dsv4_sglang.attention.sparse_prefill import SparsePrefillAttention

        if SparsePrefillAttention.supports(*model):
            kernels.append(SparsePrefillAttention(blocks, entries_per_block))
        if SparseDecodeAttention.supports(*model):
            kernels.append(SparseDecodeAttention(top_k))
        if FlashMLAAttention.supports(*model):
            kernels.append(FlashMLAAttention(scheduler_config(device, padded_heads(heads))))
    return [*kernels, PortableAttention()]
