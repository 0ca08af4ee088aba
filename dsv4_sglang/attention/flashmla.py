"""`attend` through FlashMLA's sparse FP8 decode kernel, for sm_90 and sm_100 (SPEC 2.2, 4.5).

FlashMLA reads this package's FP8 tables as they are: the window table as its cache with the window list, the entry
table as its extra cache with the entry list, each list with a length a token, the sink once. It returns the still
rotated output; a small kernel here derotates its last 64 dims in place.

What FlashMLA wants: 64 or 128 heads (padded here), bf16 queries, int32 lists whose width is a multiple of 64 (padded
here, which costs a copy: give such widths), block strides of a multiple of 16 B, on sm_100 of 576 B. A list may hold
anything behind its length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4_sglang.attention.triton_attend import derotate
from dsv4_sglang.formats import RowFormat
from dsv4_sglang.formats.rows import ENTRY_DIM

LIST_ALIGNMENT = 64
# FlashMLA keeps 2 KiB of partial results a token and head, in fp32; a longer prefill goes in slices of this many heads.
_HEADS_AT_ONCE = 131072


@functools.cache
def installed() -> bool:
    try:
        from sgl_kernel import flash_mla
    except ImportError:
        return False
    return flash_mla._flashmla_import_error is None


@functools.cache
def has_kernel(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] in (9, 10)


def supported(q: Tensor, row_format: RowFormat) -> bool:
    """Whether FlashMLA takes these queries [T, H, 512] and rows of this format on this device."""
    return (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and q.shape[1] <= 128
        and row_format is RowFormat.FP8
        and has_kernel(q.device.index)
        and installed()
    )


def _aligned(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, -rows.shape[1] % LIST_ALIGNMENT), value=-1)


class FlashMLAReader:
    """Attention of one step, layer by layer; layers of one kind share FlashMLA's schedule.

    FlashMLA cuts the lists of all tokens into equal shares with a kernel of its own, before the first layer of a kind.
    The schedule depends on the lengths alone, so `begin_step` must be called before each step, and once more right
    before a CUDA graph is captured: the kernel is then in the graph and runs at every replay, on the lengths of that
    replay. A kind is known by its length tensors: pass the same tensors to all its layers, unchanged within the step.
    """

    def __init__(self) -> None:
        self._schedules: dict[tuple, Any] = {}
        self._lists: dict[tuple[int, int], Tensor] = {}
        self._alive: list[Tensor | None] = []

    def begin_step(self) -> None:
        """Forget the schedules of the last step."""
        self._schedules.clear()
        self._lists.clear()
        self._alive.clear()

    def _schedule(self, key: tuple, lens: tuple[Tensor | None, ...]) -> Any:
        from sgl_kernel.flash_mla import FlashMLASchedMeta

        if key not in self._schedules:
            self._schedules[key] = FlashMLASchedMeta()
            self._alive.extend(lens)  # while they live, no other tensor has their address
        return self._schedules[key]

    def _list(self, rows: Tensor, same_all_step: bool) -> Tensor:
        """`rows` with an aligned width; lists that do not change from layer to layer are padded once a step."""
        if rows.shape[1] % LIST_ALIGNMENT == 0:
            return rows
        if not same_all_step:
            return _aligned(rows)
        key = rows.data_ptr(), rows.shape[1]
        if key not in self._lists:
            self._lists[key] = _aligned(rows)
            self._alive.append(rows)
        return self._lists[key]

    def attend(
        self,
        q: Tensor,
        sink: Tensor,
        window: Tensor,
        window_rows: Tensor,
        window_lens: Tensor,
        entries: Tensor | None,
        entry_rows: Tensor | None,
        entry_lens: Tensor | None,
        positions: Tensor,
        rope: Tensor,
        scale: float,
        row_format: int,
        entry_rows_change: bool = True,
        leave_rotated: bool = False,
    ) -> Tensor:
        """The op `attend` for one layer of the step.

        `entry_rows_change`: whether `entry_rows` differs from layer to layer of the kind (CSA) or not (HCA);
        `leave_rotated`: the caller derotates the output.
        """
        from sgl_kernel.flash_mla import flash_mla_with_kvcache

        tokens, heads, _ = q.shape
        if tokens == 0:
            return torch.empty_like(q)
        padded = 64 if heads <= 64 else 128
        if padded != heads:
            q, sink = F.pad(q, (0, 0, 0, padded - heads)), F.pad(sink, (0, padded - heads))
        window_rows = self._list(window_rows, True)
        if entries is None or entry_rows is None or entry_lens is None:
            entries = entry_rows = entry_lens = None
        else:
            entry_rows = self._list(entry_rows, not entry_rows_change)
        at_once = _HEADS_AT_ONCE // padded
        outs = []
        for begin in range(0, tokens, at_once):
            part = slice(begin, begin + at_once)
            lens = window_lens[part], None if entry_lens is None else entry_lens[part]
            key = (
                *(None if x is None else (x.data_ptr(), x.shape[0]) for x in lens),
                padded,
                window.shape[1],
                window_rows.shape[1],
                None if entries is None or entry_rows is None else (entries.shape[1], entry_rows.shape[1]),
            )
            out, _ = flash_mla_with_kvcache(
                q=q[part].unsqueeze(1),
                k_cache=window.unsqueeze(2),
                block_table=None,
                cache_seqlens=None,
                head_dim_v=ENTRY_DIM,
                tile_scheduler_metadata=self._schedule(key, lens),
                softmax_scale=scale,
                is_fp8_kvcache=True,
                indices=window_rows[part].unsqueeze(1),
                topk_length=lens[0],
                attn_sink=sink,
                extra_k_cache=None if entries is None else entries.unsqueeze(2),
                extra_indices_in_kvcache=None if entry_rows is None else entry_rows[part].unsqueeze(1),
                extra_topk_length=lens[1],
            )
            outs.append(out.squeeze(1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if padded != heads:
            out = out[:, :heads].contiguous()
        if not leave_rotated:
            derotate(out, positions, rope)
        return out
