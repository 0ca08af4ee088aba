"""Interface of the attention kernels and its input and output types. `registry` chooses between the kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat

# Largest number of heads that an attention kernel pads to (`AttentionKernel.query_heads`).
MOST_PADDED_HEADS = 128


class EntryList(NamedTuple):
    """The entries of a KV buffer that each of T tokens attends to.

    Attributes:
        table: KV buffer [blocks, entries per block, width].
        indices: int32 [T, K], indices of entries in `table`, -1 for none.
        topk_length: int32 [T]. Token t attends to the first `topk_length[t]` of its indices; the rest is undefined.
        owner: int32 [T]. Tokens of a request share a list: that of token t is row `owner[t]` of `indices`, which then
            is [B, K]. None if each token has its own.
    """

    table: Tensor
    indices: Tensor
    topk_length: Tensor
    owner: Tensor | None = None

    def of_tokens(self, part: slice) -> EntryList:
        """Return the lists of the tokens in `part`, one for each."""
        indices = self.indices[part] if self.owner is None else self.indices[self.owner[part]]
        return EntryList(self.table, indices, self.topk_length[part])


class AttendInputs(NamedTuple):
    """Arguments of the op `attend` besides the query, for one layer (SPEC 2.2, 4.5).

    Attributes:
        sink: fp32 [H], attention sinks. Only the first `heads` are real; the rest is padding for kernels that need more
            heads (`AttentionKernel.query_heads`).
        heads: number of real heads.
        window: entries of the sliding window.
        entries: compressed entries; None if the layer has none.
        positions: int64 [T], positions of the query tokens, for the inverse RoPE of the output.
        rope: fp32 [positions, 64], RoPE table.
        scale: factor of the logits.
        kv_format: KV format of `window`.
        entry_format: KV format of `entries`.
        ratio: compression ratio 0, 4 or 128, for `sparse_prefill`. The op does not pass it.
    """

    sink: Tensor
    heads: int
    window: EntryList
    entries: EntryList | None
    positions: Tensor
    rope: Tensor
    scale: float
    kv_format: KVFormat
    entry_format: KVFormat
    ratio: int = 0

    @classmethod
    def from_op(cls, sink: Tensor, *args: Any) -> AttendInputs:
        """Return the inputs from the op's arguments after `q`."""
        lists, (positions, rope, scale, window_code, *more) = args[:6], args[6:]
        owner, entry_code = more[0] if more else None, more[1] if len(more) > 1 else None
        entries = None if any(x is None for x in lists[3:]) else EntryList(lists[3], lists[4], lists[5], owner)
        kv_format = KVFormat.from_code(window_code)
        entry_format = kv_format if entry_code is None else KVFormat.from_code(entry_code)
        window = EntryList(*lists[:3])
        return cls(sink, sink.shape[0], window, entries, positions, rope, scale, kv_format, entry_format)

    def op_args(self) -> tuple[Any, ...]:
        """Return the op's arguments after `q`."""
        *entries, owner = self.entries or (None, None, None, None)
        read = self.positions, self.rope, self.scale, self.kv_format.code
        return self.sink, *self.window[:3], *entries, *read, owner, self.entry_format.code


class LayerOutput(NamedTuple):
    """Attention output of one layer.

    Attributes:
        values: [T, heads, 512]. The heads of a token are contiguous. The token stride is larger than heads * 512 if the
            kernel computed padding heads.
        rotated: True if the last 64 dims still need the inverse RoPE.
    """

    values: Tensor
    rotated: bool


class AttentionKernel(ABC):
    """Attention of a step, layer by layer, through one kernel."""

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, heads: int, dtype: torch.dtype, kv_format: KVFormat) -> bool:
        """Return True if the kernel supports a model.

        Args:
            device: device of the KV buffers.
            heads: query heads of a layer.
            dtype: dtype of the queries [T, heads, 512].
            kv_format: format of window entries.
        """

    @abstractmethod
    def begin_step(self, step: StepMetadata, most_blocks: int | None) -> bool:
        """Prepare for the layers of a step. A step that a CUDA graph records calls this inside the recording.

        Args:
            step: metadata of the step.
            most_blocks: upper bound of the number of blocks of all requests after a prefill step; None in a step whose
                lengths are on the device only.

        Returns:
            False if another attention kernel should take this step.
        """

    def query_heads(self, heads: int) -> int:
        """Return the number of heads H of queries and sinks that `attend` needs. Only the first `heads` are real."""
        return heads

    def reserve(self, window_size: int, blocks: int, device: torch.device) -> None:
        """Allocate the scratch of recorded prefill steps, whose addresses CUDA graphs contain. It is never freed.

        Args:
            window_size: entries of the largest window workspace.
            blocks: largest `most_blocks` of these steps.
            device: device of the KV buffers.
        """
        return

    def free_scratch(self) -> None:
        """Free scratch memory that grows with the largest step. No step may be running."""
        return

    @abstractmethod
    def attend(self, q: Tensor, inputs: AttendInputs, *, output_is_rotated: bool = False) -> LayerOutput:
        """Compute attention of one layer of the step.

        Args:
            q: queries [T, H, 512], with H as returned by `query_heads`. Padding heads have undefined contents.
            inputs: the other arguments of `attend`.
            output_is_rotated: the caller can apply the inverse RoPE itself, so the kernel may return a rotated output.

        Returns:
            The output of the first `inputs.heads` heads, in the dtype of `q`.
        """
