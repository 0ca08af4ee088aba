"""The interface of the attention kernels and what they read. `registry` chooses between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat

MOST_PADDED_HEADS = 128
"""Heads up to which an attention kernel pads (`AttentionKernel.query_heads`)."""


class EntryList(NamedTuple):
    """The entries of a KV buffer that T tokens read.

    `table` [blocks, entries per block, width]: the buffer. `indices` [T, K] int32: entries of each token, -1: none.
    `topk_length` [T] int32: token t reads the first `topk_length[t]` of its indices. The rest is undefined.
    """

    table: Tensor
    indices: Tensor
    topk_length: Tensor

    def of_tokens(self, part: slice) -> EntryList:
        return self._replace(indices=self.indices[part], topk_length=self.topk_length[part])


class AttendInputs(NamedTuple):
    """What the queries of a layer read (SPEC 2.2, 4.5): the arguments of the op `attend` besides the query.

    `sink` [H] fp32, of which the first `heads` count: a kernel may want more heads than there are, and then query and
    sink have what it wants (`AttentionKernel.query_heads`); `window` and `entries` (None: the layer has none) lists of
    rows of one format; `positions` [T] int64 and `rope` [positions, 64] fp32, by which the output is with the inverse
    RoPE applied; `scale` of the logits; `ratio` 0, 4 or 128, None in a call of the op, which does not say.
    """

    sink: Tensor
    heads: int
    window: EntryList
    entries: EntryList | None
    positions: Tensor
    rope: Tensor
    scale: float
    kv_format: KVFormat
    ratio: int | None = None

    @classmethod
    def from_op(cls, sink: Tensor, *args: Any) -> AttendInputs:
        """Of the op's arguments behind `q`."""
        *lists, positions, rope, scale, kv_format = args
        entries = None if any(x is None for x in lists[3:]) else EntryList(*lists[3:])
        return cls(
            sink, sink.shape[0], EntryList(*lists[:3]), entries, positions, rope, scale, KVFormat.from_code(kv_format)
        )

    def op_args(self) -> tuple[Any, ...]:
        """The op's arguments behind `q`."""
        entries = self.entries or (None, None, None)
        return self.sink, *self.window, *entries, self.positions, self.rope, self.scale, self.kv_format.code


class LayerOutput(NamedTuple):
    """Attention's output `[T, heads, 512]`, and whether its last 64 dims are still rotated.

    A token's heads lie in a row, tokens further apart where a kernel had more heads than count.
    """

    values: Tensor
    rotated: bool


class AttentionKernel(ABC):
    """Attention of a step, layer by layer, through one kernel."""

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, heads: int, dtype: torch.dtype, kv_format: KVFormat) -> bool:
        """Whether the kernel runs on this device and takes queries [T, heads, 512] of this dtype and such rows."""

    @abstractmethod
    def begin_step(self, step: StepMetadata, lengths: list[int] | None) -> bool:
        """Prepare for the layers of `step`; False: the step is better read by another attention kernel.

        `lengths`: tokens of each request after a prefill step; None in a decode step, where the host does not know
        them. A decode step that a CUDA graph records begins inside it.
        """

    def query_heads(self, heads: int) -> int:
        """Heads H that queries and sinks have for `attend`, of which the first `heads` count."""
        return heads

    def forget_scratch(self) -> None:
        """Give back memory that steps grow as they need it; no step is under way."""
        return

    @abstractmethod
    def attend(self, q: Tensor, inputs: AttendInputs, *, output_is_rotated: bool = False) -> LayerOutput:
        """`attend` for one layer of the step and queries `q` [T, H, 512], H as `query_heads` says; heads that do not
        count hold anything. `output_is_rotated`: the caller can apply the inverse RoPE to the output itself."""
