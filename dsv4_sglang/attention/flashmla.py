"""`attend` through FlashMLA on sm_90 and sm_100 (SPEC 2.2, 4.5): common base of its kernels, and the FP8 decode kernel.

FlashMLA takes bf16 queries of 64 or 128 heads and returns an output that is still rotated. A small kernel here applies
the inverse RoPE to its last 64 dims in place. If a process has fewer heads, the caller allocates queries with the
padded number of heads (`query_heads`), and the output is a view of what the kernel writes. So padding copies neither
queries nor outputs.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4_sglang.attention import flashmla_scheduler
from dsv4_sglang.attention.base import MOST_PADDED_HEADS, AttendInputs, AttentionKernel, EntryList, LayerOutput
from dsv4_sglang.attention.flashmla_scheduler import BLOCK_ENTRIES
from dsv4_sglang.attention.step_buffers import align
from dsv4_sglang.attention.triton_output import inverse_rope
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat, make_kv_buffers
from dsv4_sglang.formats.kv_entries import ENTRY_DIM

logger = logging.getLogger(__name__)

# Numbers of heads that FlashMLA's kernels are compiled for.
HEAD_COUNTS = (64, MOST_PADDED_HEADS)
# FlashMLA stores partial results in fp32, 2 KiB for each token and head. Longer steps are processed in slices of this
# many (token, head) pairs, whose outputs are joined, so partial results take at most 128 MiB. A verify step of 256
# requests with 3 drafts is one slice.
_HEADS_AT_ONCE = 65536


@functools.cache
def installed() -> bool:
    """Return True if the package `sgl-flash-mla`, on which SGLang depends, has the kernels of V4's format."""
    try:
        import flash_mla
    except (ImportError, OSError):  # OSError: the library does not load on this machine
        return False
    return flash_mla.has_legacy()


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return True if FlashMLA has kernels for the compute capability of `device` (sm_90 or sm_100)."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def padded_heads(heads: int) -> int:
    """Return the smallest number of heads that a kernel takes, at least `heads`, which are at most 128."""
    return next(count for count in HEAD_COUNTS if count >= heads)


def pad_heads(q: Tensor, inputs: AttendInputs) -> tuple[Tensor, AttendInputs]:
    """Return `q` [T, H, 512] and `inputs` with H padded to a number that a kernel takes. This copies `q`."""
    more = padded_heads(q.shape[1]) - q.shape[1]
    return (F.pad(q, (0, 0, 0, more)), inputs._replace(sink=F.pad(inputs.sink, (0, more)))) if more else (q, inputs)


class FlashMLAKernel(AttentionKernel):
    """Base class of the attention kernels that call FlashMLA."""

    kv_formats: ClassVar[tuple[KVFormat, ...]]

    @classmethod
    def supports(cls, device: torch.device, heads: int, dtype: torch.dtype, kv_format: KVFormat) -> bool:
        takes = dtype == torch.bfloat16 and heads <= HEAD_COUNTS[-1] and kv_format in cls.kv_formats
        return takes and device.type == "cuda" and has_kernel(device) and installed()

    def query_heads(self, heads: int) -> int:
        return padded_heads(heads)

    def attend(self, q: Tensor, inputs: AttendInputs, *, output_is_rotated: bool = False) -> LayerOutput:
        if q.shape[0] == 0:
            return LayerOutput(torch.empty_like(q)[:, : inputs.heads], output_is_rotated)
        out = self._rotated(q, inputs)[:, : inputs.heads]
        if not output_is_rotated:
            inverse_rope(out, inputs.positions, inputs.rope)
        return LayerOutput(out, output_is_rotated)

    @abstractmethod
    def _rotated(self, q: Tensor, inputs: AttendInputs) -> Tensor:
        """Return the output [T, H, 512] of all heads of `q`, still rotated."""


def _aligned(listed: EntryList) -> EntryList:
    """Pad the list to a width that the kernel takes. This copies it in each layer, so metadata uses such widths."""
    width = listed.indices.shape[1]
    more = align(width) - width
    return listed._replace(indices=F.pad(listed.indices, (0, more), value=-1)) if more else listed


class SchedulerConfig(NamedTuple):
    """Parameters of the FP8 kernel's work distribution.

    Attributes:
        num_sm_parts: number of thread blocks that share the work.
        fixed_overhead: fixed cost of a token, in blocks of 64 entries.
    """

    num_sm_parts: int
    fixed_overhead: int


def _known_config(device: torch.device, heads: int) -> SchedulerConfig:
    """Return FlashMLA's own parameters, by architecture and number of heads (64 or 128)."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.cuda.get_device_capability(device)[0] == 9:
        return SchedulerConfig(processors * HEAD_COUNTS[0] // heads, 5)
    return SchedulerConfig(processors, 5) if heads == HEAD_COUNTS[0] else SchedulerConfig(processors // 2, 3)


@functools.cache
def scheduler_config(device: torch.device, heads: int) -> SchedulerConfig | None:
    """Return the parameters of `flashmla_scheduler` for `heads` query heads (64 or 128) on `device`.

    Return None and log a warning if the installed FlashMLA makes different schedules; FlashMLA then computes them
    itself. The check runs FlashMLA and synchronises, so call this before anything is timed or recorded.
    """
    found = _known_config(device, heads)
    table = make_kv_buffers(1, 1, BLOCK_ENTRIES, KVFormat.FP8, device)[0]
    sink, nowhere = torch.zeros(heads, device=device), torch.zeros(1, device=device)
    # Fewer tokens than parts, about as many, and more, all in one slice (`_HEADS_AT_ONCE`). Empty lists, and lists that
    # are split over many parts.
    for tokens in (1, 4, 60, 500):
        at = torch.arange(tokens, dtype=torch.int32, device=device)
        window = EntryList(table, at.new_zeros(tokens, 128), 37 * at % 129)
        lens = torch.where(at % 3 == 0, 2048 - at, at % 70)
        for entries in (None, EntryList(table, at.new_zeros(tokens, 2048), lens)):
            kernel = FlashMLAAttention()
            q = torch.zeros(tokens, heads, ENTRY_DIM, dtype=torch.bfloat16, device=device)
            inputs = AttendInputs(sink, heads, window, entries, nowhere, nowhere, 1.0, KVFormat.FP8, KVFormat.FP8)
            kernel.attend(q, inputs, output_is_rotated=True)
            theirs = kernel._schedule(heads, window, entries)
            ours = flashmla_scheduler.build(window.topk_length, entries and entries.topk_length, *found)
            if not same_schedules(ours, (theirs.tile_scheduler_metadata, theirs.num_splits)):
                logger.warning(
                    "The installed FlashMLA does not schedule work as expected for %d heads on %s (%s), so it makes "
                    "its schedules itself. This takes about 25 us for each step and kind of layer. The sgl-flash-mla "
                    "version that this release of SGLang requires does not have this problem",
                    heads, torch.cuda.get_device_name(device), found,
                )  # fmt: skip
                return None
    return found


def same_schedules(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Return True if two schedules (parts, splits) are equal, except for the undefined contents of parts without
    work.
    """
    (parts, splits), (other_parts, other_splits) = one, other
    if parts.shape != other_parts.shape or not torch.equal(splits, other_splits):
        return False
    used = parts[:, 0] < splits.shape[0] - 1
    return torch.equal(parts[:, 0], other_parts[:, 0]) and torch.equal(parts[used, 1:7], other_parts[used, 1:7])


class FlashMLAAttention(FlashMLAKernel):
    """The sparse FP8 decode kernel. It reads this package's FP8 KV buffers in place.

    The window buffer is FlashMLA's cache with the window list, the entry buffer is its extra cache with the entry list.
    Block strides must be multiples of 16 B, on sm_100 of 576 B (`formats.kv_entries.block_stride_bytes`).

    A schedule divides the lists of all tokens evenly among the thread blocks. It is computed before the first layer of
    each kind, by `flashmla_scheduler` or, without `scheduler_config`, by a kernel of FlashMLA; all layers of one kind
    use it. The schedule depends on the lengths, so call `begin_step` before each step and again before the layers that
    a CUDA graph records. The scheduling kernel is then part of the graph and uses the lengths of each replay. Layers
    are of one kind if they pass the same length tensors: pass the same tensors to all of them and do not modify them
    within the step.
    """

    kv_formats = (KVFormat.FP8,)

    def __init__(self, scheduler_config: SchedulerConfig | None = None) -> None:
        self._scheduler_config = scheduler_config
        self._schedules: dict[tuple, Any] = {}
        self._alive: list[Tensor] = []

    def begin_step(self, step: StepMetadata, most_blocks: int | None) -> bool:
        """Drop the schedules of the previous step."""
        self._schedules.clear()
        self._alive.clear()
        return True

    def _schedule(self, heads: int, window: EntryList, entries: EntryList | None) -> Any:
        from flash_mla.flash_mla_interface import FlashMLASchedMeta

        lists = window, entries
        key = heads, *(x and (x.topk_length.data_ptr(), x.table.shape[1], *x.indices.shape) for x in lists)
        if key not in self._schedules:
            made: tuple[Tensor, ...] = ()
            if self._scheduler_config is not None:
                found = window.topk_length, entries and entries.topk_length
                made = flashmla_scheduler.build(*found, *self._scheduler_config)
            self._schedules[key] = FlashMLASchedMeta(False, None, *made)
            self._alive.extend(x.topk_length for x in lists if x)  # keeps their addresses unique
        return self._schedules[key]

    def _rotated(self, q: Tensor, inputs: AttendInputs) -> Tensor:
        from flash_mla import flash_mla_with_kvcache

        tokens, heads, _ = q.shape
        whole_window, whole_entries = _aligned(inputs.window), inputs.entries and _aligned(inputs.entries)
        at_once = _HEADS_AT_ONCE // heads
        outs = []
        for begin in range(0, tokens, at_once):
            part = slice(begin, begin + at_once)
            window, entries = whole_window.of_tokens(part), whole_entries and whole_entries.of_tokens(part)
            out, _ = flash_mla_with_kvcache(
                q=q[part].unsqueeze(1),
                k_cache=window.table.unsqueeze(2),
                block_table=None,
                cache_seqlens=None,
                head_dim_v=ENTRY_DIM,
                tile_scheduler_metadata=self._schedule(heads, window, entries),
                softmax_scale=inputs.scale,
                is_fp8_kvcache=True,
                indices=window.indices.unsqueeze(1),
                topk_length=window.topk_length,
                attn_sink=inputs.sink,
                extra_k_cache=entries.table.unsqueeze(2) if entries else None,
                extra_indices_in_kvcache=entries.indices.unsqueeze(1) if entries else None,
                extra_topk_length=entries.topk_length if entries else None,
                use_legacy=True,
            )
            outs.append(out.squeeze(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
