"""Attention through the op `attend`, which runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_sglang.attention import cuda_ops  # noqa: F401  registers `attend` for CUDA
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, LayerOutput
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat


class PortableAttention(AttentionKernel):
    """The op `attend`: any device, KV format, dtype, number of heads and step. It applies the inverse RoPE itself."""

    @classmethod
    def supports(cls, device: torch.device, heads: int, dtype: torch.dtype, kv_format: KVFormat) -> bool:
        return True

    def begin_step(self, step: StepMetadata, lengths: list[int] | None) -> bool:
        return True

    def attend(self, q: Tensor, inputs: AttendInputs, *, output_is_rotated: bool = False) -> LayerOutput:
        return LayerOutput(torch.ops.dsv4_sglang.attend(q, *inputs.op_args()), rotated=False)
