"""Benchmark attention over window entries and compressed entries: our kernels, FlashMLA alone, SGLang's path.

    python -m benchmarks.attend [--quick] [--out DIR]

A CUDA graph holds all layers of one kind (CSA or HCA) of a decode step, or four layers of a prefill step. Each layer
has its own KV buffers and queries with random values. Times are per layer, so a layer bears its share of the work that
is done once a step. Subjects:

- "flashmla": FlashMLA alone on our buffers, in decode only, with a schedule computed in advance.
- "ours": our attention kernel through FlashMLA, with its schedule once a step and the inverse RoPE of the output. In
  prefill it also expands the entries to bf16 and builds the index lists.
- "ours rotated": the same without the inverse RoPE. Served layers with an FP8 output projection use this, because the
  quantisation of the output applies the inverse RoPE.
- "ours triton": the portable kernel.
- "in-tree": FlashMLA on SGLang's pages with its schedule and its inverse RoPE kernel. Prefill is its dequantisation to
  a bf16 workspace and FlashMLA's sparse prefill kernel.

Index lists that all layers of a prefill step share are built before the timing, on both sides. The floor is the larger
of bytes / copy rate and products / measured bf16 rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command_line, report, tables, timing
from benchmarks.append_in_tree import PAGE, WINDOW_PAGE, page_bytes
from benchmarks.append_ours import ops_for
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, EntryList
from dsv4_sglang.attention.registry import PortableAttention
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table

PREFILL_LAYERS = 4
DIM, BLOCK = 512, 128
SCALE = DIM**-0.5
# Entries of a KV buffer. Longer contexts in large batches share entries, which random accesses do not notice.
MOST_ROWS = 1 << 21
SUBJECTS = ("flashmla", "ours", "ours rotated", "ours triton", "in-tree")


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` requests of `context` tokens that decode one token each, or one request with `chunk` new tokens."""

    model: str
    heads: int
    top_k: int
    kind: str
    batch: int
    context: int
    chunk: int = 0

    @property
    def tokens(self) -> int:
        return self.chunk or self.batch

    @property
    def layers(self) -> int:
        """Number of layers that are measured together."""
        if self.chunk:
            return PREFILL_LAYERS
        config = DSV4Config.flash() if self.model == "flash" else DSV4Config.pro()
        return sum(config.ratio(layer) == self.ratio for layer in range(config.num_hidden_layers))

    @property
    def ratio(self) -> int:
        return CSA_RATIO if self.kind == "csa" else BLOCK

    @property
    def name(self) -> str:
        work = f"prefill {self.chunk}" if self.chunk else f"decode x {self.batch}"
        return f"{self.model}/{self.kind}/{self.context // 1024}K/{work}"

    def lengths(self) -> Tensor:
        """Return the compressed entries that each token attends to, [tokens]."""
        last = (
            torch.arange(self.context - self.chunk, self.context)
            if self.chunk
            else torch.full((self.batch,), self.context - 1)
        )
        seen = (last + 1) // self.ratio
        return seen.clamp(max=self.top_k) if self.kind == "csa" else seen

    @property
    def width(self) -> int:
        """Columns of the list of compressed entries, a multiple of 64."""
        most = self.top_k if self.kind == "csa" else self.context // self.ratio
        return math.ceil(max(most, 1) / 64) * 64

    def rows_read(self) -> int:
        window = (torch.arange(self.context - self.tokens, self.context) + 1).clamp(max=128) if self.chunk else None
        return int(self.lengths().sum()) + (int(window.sum()) if window is not None else 128 * self.batch)

    def bytes_moved(self) -> int:
        """Return the bytes of one layer. Decode reads the entries of each token separately; the tokens of a prefill
        chunk share theirs, so each distinct entry counts once."""
        io = 2 * self.tokens * self.heads * DIM * 2
        if not self.chunk:
            return self.rows_read() * (tables.ROW + tables.SCALES) + io
        return (self.chunk + 127 + self.context // self.ratio) * (tables.ROW + tables.SCALES) + io

    def products(self) -> int:
        """Return the floating-point operations of q k and p v."""
        return 4 * DIM * self.heads * self.rows_read()


@dataclasses.dataclass
class Lists:
    """Entry indices [tokens, width] int32 and their lengths [tokens] int32, of windows and of compressed entries."""

    window: Tensor
    window_lens: Tensor
    entries: list[Tensor]
    entry_lens: Tensor


def random_lists(case: Case, rows: int, device: torch.device, layers: int) -> list[Tensor]:
    """Return ascending random entry indices: a different selection for each CSA layer, one for all HCA layers.

    Args:
        case: the step.
        rows: entries of the KV buffer.
        device: device of the lists.
        layers: number of lists.

    Returns:
        For each layer [tokens, width] int32.
    """
    generator = torch.Generator(device=device).manual_seed(5)
    shape = (case.tokens, case.width)

    def draw() -> Tensor:
        return torch.randint(0, rows, shape, device=device, generator=generator, dtype=torch.int32).sort(1).values

    return [draw() for _ in range(layers)] if case.kind == "csa" else [draw()] * layers


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


class Tensors:
    """Queries, sink, positions and RoPE table that all subjects share."""

    def __init__(self, case: Case, device: torch.device, layers: int) -> None:
        generator = torch.Generator(device=device).manual_seed(6)
        shape = (case.tokens, case.heads, DIM)
        self.q = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(layers)]
        self.sink = torch.randn(case.heads, device=device, generator=generator)
        config = DSV4Config.flash()
        last = case.context
        self.rope = rope_table(last, rope_frequencies(config, case.ratio, device))
        first = last - case.chunk if case.chunk else last - 1
        self.positions = (
            torch.arange(first, last, device=device) if case.chunk else torch.full((case.batch,), first, device=device)
        )


def our_subject(case: Case, subject: str, device: torch.device, layers: int) -> Callable[[], None]:
    """Return a function that runs the step of one subject.

    Args:
        case: the step.
        subject: one of SUBJECTS except "in-tree".
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
        track_slots=None,
        track_lens=None,
        top_k=case.top_k,
        max_length=case.context,
    )
    kernel = SparsePrefillAttention(blocks)
    if not kernel.begin_step(step, [case.context]):
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
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

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
            )

    return step


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
    from sglang.kernels.ops.attention.dsv4.elementwise import fused_rope_inplace

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
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

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
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd
    from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged
    from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import combine_topk_swa_indices

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
    entries_at, window_at = ints(0), ints(compressed)

    def combine(picked: Tensor) -> None:
        combine_topk_swa_indices(
            topk_indices=picked,
            query_start_loc=query_start,
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
            dequantize_k_cache_paged(table, entry_ids, page_size=per_page, out=workspace[:compressed])
            dequantize_k_cache_paged(window[layer], window_ids, page_size=WINDOW_PAGE, out=workspace[compressed:])
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


def cases(args: argparse.Namespace) -> list[Case]:
    flash, pro = ("flash", 64, 512), ("pro", 128, 1024)
    if args.dry_run:
        return [Case("flash", 4, 64, kind, 2, 1024) for kind in ("csa", "hca")] + [
            Case("flash", 4, 64, "csa", 1, 512, chunk=40)
        ]
    K = 1024
    found = []
    for model in [flash] if args.quick else [flash, pro]:
        for batch in (1, 64, 256) if args.quick else (1, 16, 64, 128, 256):
            found.append(Case(*model, "csa", batch, 128 * K))
        for context in (128 * K,) if args.quick else (4 * K, K * K):
            found += [Case(*model, "csa", batch, context) for batch in ((16,) if args.quick else (1, 64, 256))]
        for context in (128 * K,) if args.quick else (4 * K, 16 * K, 128 * K, K * K):
            found += [Case(*model, "hca", batch, context) for batch in ((64,) if args.quick else (1, 16, 64, 256))]
        for context in (8 * K,) if args.quick else (8 * K, 128 * K):
            found += [Case(*model, kind, 1, context, chunk=8 * K) for kind in ("csa", "hca")]
    return list(dict.fromkeys(found))


def measure(case: Case, subject: str, device: torch.device, facts: dict[str, float], samples: int) -> Iterator[Any]:
    """Yield a row with the times of one case.

    Args:
        case: the step.
        subject: one of SUBJECTS.
        device: device of the tensors.
        facts: ceilings of the device.
        samples: number of samples.
    """
    layers = 2 if device.type == "cpu" else case.layers
    step = in_tree_subject(case, device, layers) if subject == "in-tree" else our_subject(case, subject, device, layers)
    time = timing.Recorded(step, device).time(samples, divide=layers)
    floor = max(
        timing.floor_us(case.bytes_moved(), 1, facts.get("copy_gbs") or 1.0, facts.get("empty_launch_us", 0.0)),
        case.products() / (facts.get("bf16_tflops") or 1.0) / 1e6,
    )
    row = {
        "case": case.name,
        "subject": subject,
        "layers": layers,
        "us": time.us,
        "low": time.low,
        "high": time.high,
    }
    yield row | {
        "TFLOP/s": case.products() / time.us / 1e6,
        "GB/s": case.bytes_moved() / time.us / 1e3,
        "floor us": floor,
        "x floor": time.us / floor,
    }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "us" in row:
            line = lines.setdefault(row["case"], {"case": row["case"], "floor us": row["floor us"]})
            line[row["subject"]] = row["us"]
    for line in lines.values():
        base = line.get("flashmla")
        for subject in SUBJECTS[1:]:
            if base and line.get(subject):
                line[f"{subject} / flashmla"] = line[subject] / base
    return list(lines.values())


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    device = torch.device("cpu" if args.dry_run else "cuda")
    samples = 10 if args.quick else 20
    result = report.Report("attend", args, {"samples": samples})
    facts = result.data["facts"]
    if "copy_gbs" not in facts:
        result.part("ceilings", partial(timing.ceilings, device, result.fact), setup=True)
    result.part("load ours", partial(ops_for, device), setup=True)
    subjects = ("ours",) if args.dry_run else SUBJECTS
    for case in cases(args):
        for subject in subjects[1:] if case.chunk and not args.dry_run else subjects:
            result.part(f"{case.name}/{subject}", partial(measure, case, subject, device, facts, samples))
    ratios = [f"{subject} / flashmla" for subject in SUBJECTS[1:]]
    columns = ["case", *subjects, *(ratios if len(subjects) > 1 else []), "floor us"]
    result.table("attend, us per layer", columns, compare(result.rows))
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
