"""This package's attention, and FlashMLA alone, on this package's KV buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.attend_cases import BLOCK, DIM, MOST_ROWS, SCALE, Case, Tensors, random_lists
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, EntryList
from dsv4_sglang.attention.registry import PortableAttention
from dsv4_sglang.formats import KVFormat


@dataclasses.dataclass
class Lists:
    """Entry indices [tokens, width] int32 and their lengths [tokens] int32, of windows and of compressed entries."""

    window: Tensor
    window_lens: Tensor
    entries: list[Tensor]
    entry_lens: Tensor


def our_lists(case: Case, rows: int, device: torch.device, layers: int) -> Lists:
    """Return lists like those of the step metadata.

    Args:
        case: the step.
        rows: entries of the KV buffer.
        device: device of the lists.
        layers: number of layers.

    Returns:
        The lists. Window indices refer to the window ring (decode) or to the workspace (prefill).
    """
    positions = torch.arange(128, device=device, dtype=torch.int32)
    if case.chunk:
        start = case.context - case.chunk
        t = torch.arange(start, case.context, device=device, dtype=torch.int32)
        window = (128 + (t - 127).clamp_min(0) - start)[:, None] + positions
        lens = (t + 1).clamp(max=128)
    else:
        slots = torch.randperm(case.batch, device=device, dtype=torch.int32) + 1
        window = slots[:, None] * 128 + positions
        lens = torch.full((case.batch,), 128, dtype=torch.int32, device=device)
    return Lists(window, lens, random_lists(case, rows, device, layers), case.lengths().int().to(device))


def our_subject(case: Case, subject: str, device: torch.device, layers: int) -> Callable[[], None]:
    """Return a function that runs the step of one subject.

    Args:
        case: the step.
        subject: one of `attend.SUBJECTS` except "in-tree".
        device: device of the tensors; the CPU runs the portable kernel.
        layers: number of layers.
    """
    shared = Tensors(case, device, layers)
    if case.chunk:
        window = [tables.our_rows(1, case.chunk + 128, device)] * layers  # all layers share one workspace
    else:
        window = [tables.our_rows(case.batch + 1, BLOCK, device) for _ in range(layers)]
    rows = min(MOST_ROWS, max(case.batch * case.context // case.ratio, 64) // 32 * 32)
    shape = (rows // 32, 32) if case.kind == "csa" else (1, rows)
    entries = [tables.our_rows(*shape, device) for _ in range(layers)]
    lists = our_lists(case, rows, device, layers)

    read = [
        AttendInputs(
            sink=shared.sink,
            heads=case.heads,
            window=EntryList(window[layer], lists.window, lists.window_lens),
            entries=EntryList(entries[layer], lists.entries[layer], lists.entry_lens),
            positions=shared.positions,
            rope=shared.rope,
            scale=SCALE,
            kv_format=KVFormat.FP8,
            entry_format=KVFormat.FP8,
            ratio=case.ratio,
        )
        for layer in range(layers)
    ]

    def each(attend: Callable[[Tensor, AttendInputs], Any]) -> None:
        for q, inputs in zip(shared.q, read):
            attend(q, inputs)

    if device.type == "cpu":
        return partial(each, PortableAttention().attend)
    if subject == "ours triton":
        from dsv4_sglang.attention import triton_attend

        return partial(each, triton_attend.attend)
    rotated = subject == "ours rotated"
    if subject == "flashmla":
        return direct(shared.q, shared.sink, window, lists, entries)
    if case.chunk:
        return partial(each, partial(prefill_kernel(case, rows, device).attend, output_is_rotated=rotated))

    from dsv4_sglang.attention.flashmla import FlashMLAAttention

    # A new instance has no schedules, like the kernel at the beginning of a step.
    return lambda: each(partial(FlashMLAAttention().attend, output_is_rotated=rotated))


def prefill_kernel(case: Case, rows: int, device: torch.device) -> AttentionKernel:
    """Return our prefill attention kernel for a step of one request.

    Args:
        case: the step.
        rows: entries of the KV buffer, all of which belong to the request's blocks.
        device: device of the tensors.
    """
    from dsv4_sglang.attention.metadata import build_prefill
    from dsv4_sglang.attention.sparse_prefill import SparsePrefillAttention
    from dsv4_sglang.cache.step import v4_limits

    blocks = rows * case.ratio // BLOCK
    order = torch.randperm(blocks, device=device, dtype=torch.int32)
    positions = torch.arange(case.context - case.chunk, case.context, device=device)
    request = torch.zeros(1, dtype=torch.int64, device=device)
    step = build_prefill(
        req_pool_indices=request,
        prefix_lens=request + case.context - case.chunk,
        chunk_lens=request + case.chunk,
        positions=positions,
        out_loc=torch.zeros_like(positions),
        req_to_token=(order[:, None] * BLOCK + torch.arange(BLOCK, device=device, dtype=torch.int32)).view(1, -1),
        state_slot_of_request=request + 1,
        staging_slots=None,
        snapshot_lens=None,
        limits=v4_limits(case.top_k),
        max_length=case.context,
    )
    kernel = SparsePrefillAttention(blocks)
    if not kernel.begin_step(step, -(-case.context // BLOCK)):
        raise RuntimeError(f"{case.name}: expected a step that the prefill attention kernel takes")
    return kernel


def direct(
    q: list[Tensor], sink: Tensor, window: list[Tensor], lists: Lists, entries: list[Tensor]
) -> Callable[[], None]:
    """Return a function that runs FlashMLA's decode kernel alone, with a schedule made once.

    Args:
        q: queries [tokens, heads, 512] of each layer.
        sink: fp32 [heads].
        window: window ring of each layer.
        lists: lists of the step.
        entries: KV buffer of each layer.
    """
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    schedule = get_mla_metadata()[0]

    def step() -> None:
        for layer, query in enumerate(q):
            flash_mla_with_kvcache(
                q=query.unsqueeze(1),
                k_cache=window[layer].unsqueeze(2),
                block_table=None,
                cache_seqlens=None,
                head_dim_v=DIM,
                tile_scheduler_metadata=schedule,
                softmax_scale=SCALE,
                is_fp8_kvcache=True,
                indices=lists.window.unsqueeze(1),
                topk_length=lists.window_lens,
                attn_sink=sink,
                extra_k_cache=entries[layer].unsqueeze(2),
                extra_indices_in_kvcache=lists.entries[layer].unsqueeze(1),
                extra_topk_length=lists.entry_lens,
                use_legacy=True,
            )

    return step
