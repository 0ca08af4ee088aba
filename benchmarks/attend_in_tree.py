"""SGLang's attention on its own pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.append_in_tree import PAGE, WINDOW_PAGE, page_bytes
from benchmarks.attend_cases import DIM, MOST_ROWS, SCALE, Case, Tensors, random_lists


def in_tree_pages(case: Case, rows: int, device: torch.device) -> tuple[Tensor, int]:
    """Return one layer's compressed cache, uint8 [pages, bytes], and the entries per page.

    Args:
        case: the step.
        rows: entries of the cache.
        device: device of the cache.
    """
    per_page = PAGE // case.ratio
    return tables.random_pages(max(rows // per_page, 1), per_page, page_bytes(per_page), device), per_page


def in_tree_subject(case: Case, device: torch.device, layers: int) -> Callable[[], None]:
    """Return a function that runs the step of the subject "in-tree", including the inverse RoPE.

    Args:
        case: the step.
        device: device of the tensors.
        layers: number of layers.
    """
    from sglang.kernels.ops.attention.dsv4 import fused_rope_inplace

    shared = Tensors(case, device, layers)
    freqs = torch.view_as_complex(shared.rope.unflatten(1, (-1, 2)).contiguous())
    rows = min(MOST_ROWS, max(case.batch * case.context // case.ratio, 64) // 64 * 64)
    paged = [in_tree_pages(case, rows, device) for _ in range(layers)]
    attention = in_tree_prefill if case.chunk else in_tree_decode
    run = attention(case, shared, paged, rows, device, layers)

    def step() -> None:
        for out in run():
            fused_rope_inplace(out[..., -64:], None, freqs, positions=shared.positions, inverse=True)

    return step


def in_tree_decode(
    case: Case, shared: Tensors, paged: list[tuple[Tensor, int]], rows: int, device: torch.device, layers: int
) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields the outputs of a decode step of SGLang, layer by layer.

    Args:
        case: the step.
        shared: inputs of all subjects.
        paged: pages and entries per page of each layer (`in_tree_pages`).
        rows: entries of each layer.
        device: device of the tensors.
        layers: number of layers.
    """
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    pages = 2 * (case.batch + 1)
    window = [tables.random_pages(pages, WINDOW_PAGE, page_bytes(WINDOW_PAGE), device) for _ in range(layers)]
    width = 584
    window_views = [w[:, : WINDOW_PAGE * width].view(pages, WINDOW_PAGE, 1, width) for w in window]
    entry_views = [table[:, : n * width].view(table.shape[0], n, 1, width) for table, n in paged]
    positions = torch.arange(128, device=device, dtype=torch.int32)
    starts = torch.randint(0, pages // 2, (case.batch,), device=device, dtype=torch.int32) * 2 * WINDOW_PAGE
    window_indices = (starts[:, None] + positions + 60).unsqueeze(1)  # a window spans two pages
    window_lens = torch.full((case.batch,), 128, dtype=torch.int32, device=device)
    entry_indices = [rows_of.unsqueeze(1) for rows_of in random_lists(case, rows, device, layers)]
    entry_lens = case.lengths().int().to(device)

    def run() -> Iterator[Tensor]:
        schedule = get_mla_metadata()[0]  # SGLang's backend makes one per step and kind of layer
        for layer in range(layers):
            yield flash_mla_with_kvcache(
                q=shared.q[layer].unsqueeze(1),
                k_cache=window_views[layer],
                block_table=None,
                cache_seqlens=None,
                head_dim_v=DIM,
                tile_scheduler_metadata=schedule,
                softmax_scale=SCALE,
                is_fp8_kvcache=True,
                indices=window_indices,
                topk_length=window_lens,
                attn_sink=shared.sink,
                extra_k_cache=entry_views[layer],
                extra_indices_in_kvcache=entry_indices[layer],
                extra_topk_length=entry_lens,
            )[0].squeeze(1)

    return run


def in_tree_prefill(
    case: Case, shared: Tensors, paged: list[tuple[Tensor, int]], rows: int, device: torch.device, layers: int
) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields the outputs of a prefill step of SGLang, layer by layer.

    It does the work of `DeepseekV4AttnBackend._forward_prefill_sparse` for one request. The arguments are those of
    `in_tree_decode`.
    """
    from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_dsv4
    from sglang.kernels.ops.attention.dsv4.sparse_prefill_kernels import combine_topk_swa_indices
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_sparse_fwd

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    gathered = min(case.context, case.chunk + 127)
    pages = math.ceil(gathered / WINDOW_PAGE) + 1
    window = [tables.random_pages(pages, WINDOW_PAGE, page_bytes(WINDOW_PAGE), device) for _ in range(layers)]
    compressed = case.context // case.ratio
    entry_ids = torch.randperm(rows, device=device)[:compressed].int()
    window_ids = torch.arange(gathered, device=device, dtype=torch.int32)
    workspace = torch.empty(compressed + gathered, 1, DIM, dtype=torch.bfloat16, device=device)
    top_k = case.top_k if case.kind == "csa" else compressed
    chosen = random_lists(case, compressed, device, layers)

    width = math.ceil((top_k + 128) / 128) * 128
    lists = (
        torch.full((case.chunk, width), -1, dtype=torch.int32, device=device),
        torch.zeros(case.chunk, dtype=torch.int32, device=device),
    )
    query_start, lens, gather_lens = ints(0, case.chunk), ints(case.context), ints(gathered)
    positions = shared.positions.int()
    entries_at, window_at = ints(0), ints(compressed)

    def combine(picked: Tensor) -> None:
        combine_topk_swa_indices(
            topk_indices=picked,
            query_start_loc=query_start,
            query_pos=positions,
            seq_lens=lens,
            gather_lens=gather_lens,
            compressed_base=entries_at,
            swa_base=window_at,
            window_size=128,
            compress_ratio=case.ratio,
            topk=top_k,
            out_indices=lists[0],
            out_lens=lists[1],
        )

    combine(chosen[0])

    def run() -> Iterator[Tensor]:
        for layer, (table, per_page) in enumerate(paged):
            if case.kind == "csa":  # the lists of HCA layers are built once per chunk
                combine(chosen[layer])
            dequantize_k_cache_paged_dsv4(table, entry_ids, page_size=per_page, out=workspace[:compressed])
            dequantize_k_cache_paged_dsv4(window[layer], window_ids, page_size=WINDOW_PAGE, out=workspace[compressed:])
            yield flash_mla_sparse_fwd(
                q=shared.q[layer],
                kv=workspace,
                indices=lists[0].unsqueeze(1),
                sm_scale=SCALE,
                d_v=DIM,
                attn_sink=shared.sink,
                topk_length=lists[1],
            )[0]

    return run
