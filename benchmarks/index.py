"""Choosing a decode step's CSA entries: FP4 keys scored and selected, against DeepGEMM's FP8 scores and SGLang's top-k.

    python -m benchmarks.index [--quick] [--out DIR]

From the raw index query of 64 heads to the rows that attention reads. Four layers with keys of their own in a CUDA
graph; times are a layer's. In-tree: query RoPE + Hadamard + FP8, deep_gemm.fp8_paged_mqa_logits over 132 B keys, top-k
v2; its schedules are metadata and computed before. Stages are timed alone as well. The floor is the keys' bytes at the
copy rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import report, tables, timing
from benchmarks.append_ours import ops_for
from dsv4_sglang.model.config import CSA_RATIO, DSV4Config
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.index_keys import MXFP4
from dsv4_sglang.ops.rope import rope_table

LAYERS, HEADS, DIM = 4, 64, 128
WEIGHT_SCALE = DIM**-0.5 * HEADS**-0.5
KEYS_A_BLOCK, KEYS_A_PAGE = 32, 64
KEY_BYTES = {"ours": 72, "in-tree": 132}
K = 1024
CASES = ((1, 16 * K), (1, 128 * K), (1, K * K), (16, 32 * K), (64, 16 * K), (16, 128 * K), (64, 128 * K), (256, 16 * K))
QUICK = ((1, 128 * K), (16, 128 * K), (64, 16 * K))
DRY = ((2, 4 * K),)
Stages = dict[str, Callable[[], object]]


class Tensors:
    """What both subjects share: queries [B, 64, 128] bf16 and head weights of each layer, positions, RoPE table."""

    def __init__(self, batch: int, context: int, device: torch.device, layers: int) -> None:
        generator = torch.Generator(device=device).manual_seed(4)
        self.q = [torch.randn(batch, HEADS, DIM, device=device, generator=generator).bfloat16() for _ in range(layers)]
        self.weights = [torch.randn(batch, HEADS, device=device, generator=generator) for _ in range(layers)]
        self.rope = rope_table(context, rope_frequencies(DSV4Config.flash(), CSA_RATIO, device))
        self.positions = torch.full((batch,), context - 1, dtype=torch.int64, device=device)
        self.keys = context // CSA_RATIO

    def table(self, batch: int, rows: int, device: torch.device) -> torch.Tensor:
        """[batch, pages] int32: every request its own pages of `rows` keys, in random order."""
        pages = self.keys // rows
        order = torch.randperm(batch * pages, device=device, generator=torch.Generator(device=device).manual_seed(2))
        return order.int().view(batch, pages)


def ours(batch: int, context: int, top_k: int, device: torch.device, layers: int) -> Stages:
    shared = Tensors(batch, context, device, layers)
    block_table = shared.table(batch, KEYS_A_BLOCK, device)
    keys = [tables.our_keys(block_table.numel(), device) for _ in range(layers)]
    owner = torch.arange(batch, dtype=torch.int32, device=device)
    scores = torch.empty(batch, block_table.shape[1] * KEYS_A_BLOCK, device=device)
    rows = torch.empty(batch, top_k, dtype=torch.int32, device=device)
    weights = [w * WEIGHT_SCALE for w in shared.weights]

    def step() -> None:
        for layer in range(layers):
            torch.ops.dsv4_sglang.index_topk(
                shared.q[layer],
                weights[layer],
                keys[layer],
                block_table,
                owner,
                shared.positions,
                shared.rope,
                MXFP4,
                scores,
                rows,
            )

    return {"all": step}


def our_stages(batch: int, context: int, top_k: int, device: torch.device, layers: int) -> Stages:
    """The three stages of our op for CUDA, by the functions that it consists of."""
    from dsv4_sglang.attention import cuda_index as kernels

    shared = Tensors(batch, context, device, layers)
    block_table = shared.table(batch, KEYS_A_BLOCK, device)
    keys = [tables.our_keys(block_table.numel(), device) for _ in range(layers)]
    owner = torch.arange(batch, dtype=torch.int32, device=device)
    scores = torch.empty(batch, block_table.shape[1] * KEYS_A_BLOCK, device=device)
    rows = torch.empty(batch, top_k, dtype=torch.int32, device=device)
    weights = [w * WEIGHT_SCALE for w in shared.weights]
    made = [kernels.prepare_query(q, shared.positions, shared.rope, True, MXFP4) for q in shared.q]

    def prepare() -> None:
        for q in shared.q:
            kernels.prepare_query(q, shared.positions, shared.rope, True, MXFP4)

    def score() -> None:
        for layer in range(layers):
            kernels.score(made[layer], weights[layer], keys[layer], block_table, owner, shared.positions, top_k, scores)

    def select() -> None:
        for _ in range(layers):
            kernels.select(scores, block_table, owner, shared.positions, rows)

    return {"query": prepare, "score": score, "select": select}


def in_tree(batch: int, context: int, top_k: int, device: torch.device, layers: int) -> Stages:
    import deep_gemm
    from sglang.kernels.ops.attention.dsv4 import plan_topk_v2, topk_transform_512_v2
    from sglang.kernels.ops.attention.dsv4.elementwise import fused_q_indexer_rope_hadamard_quant

    shared = Tensors(batch, context, device, layers)
    page_table = shared.table(batch, KEYS_A_PAGE, device)
    keys = [
        tables.in_tree_keys(page_table.numel(), device).view(-1, KEYS_A_PAGE, 1, KEY_BYTES["in-tree"])
        for _ in range(layers)
    ]
    freqs = torch.view_as_complex(shared.rope.unflatten(1, (-1, 2)).contiguous())
    weights = [w.bfloat16() for w in shared.weights]
    lens = torch.full((batch,), shared.keys, dtype=torch.int32, device=device)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens.unsqueeze(-1), KEYS_A_PAGE, deep_gemm.get_num_sms())
    plan = plan_topk_v2(lens)
    chosen = torch.full((batch, math.ceil(top_k / 64) * 64), -1, dtype=torch.int32, device=device)
    longest = page_table.shape[1] * KEYS_A_PAGE

    def query(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_q_indexer_rope_hadamard_quant(
            shared.q[layer], weights[layer], WEIGHT_SCALE, freqs, shared.positions
        )

    def score(layer: int, made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, head_weights = made
        return deep_gemm.fp8_paged_mqa_logits(
            q.unsqueeze(1),
            keys[layer],
            head_weights.squeeze(2),
            lens.unsqueeze(-1),
            page_table,
            schedule,
            longest,
            False,
        )

    def select(logits: torch.Tensor) -> None:
        topk_transform_512_v2(logits, lens, page_table, chosen, KEYS_A_PAGE, plan)

    made = [query(layer) for layer in range(layers)]
    logits = score(0, made[0])
    return {
        "all": lambda: [select(score(layer, query(layer))) for layer in range(layers)],
        "query": lambda: [query(layer) for layer in range(layers)],
        "score": lambda: [score(layer, made[layer]) for layer in range(layers)],
        "select": lambda: [select(logits) for _ in range(layers)],
    }


def measure(
    subject: str,
    build: Callable[..., Stages],
    batch: int,
    context: int,
    top_k: int,
    device: torch.device,
    facts: dict[str, float],
    samples: int,
) -> Iterator[dict[str, Any]]:
    layers = 2 if device.type == "cpu" else LAYERS
    moved = batch * (context // CSA_RATIO) * KEY_BYTES[subject]
    floor = timing.floor_us(moved, 1, facts.get("copy_gbs") or 1.0, facts.get("empty_launch_us", 0.0))
    for stage, step in build(batch, context, top_k, device, layers).items():
        recorded = timing.Recorded(step, device)
        time = recorded.time(samples, divide=layers)
        row = {"case": f"{batch} x {context // K}K, top {top_k}", "subject": subject, "stage": stage, "us": time.us}
        row |= {"cold us": recorded.time_cold(max(5, samples // 3), divide=layers).us}
        row |= {"low": time.low, "high": time.high, "floor us": floor, "GB/s": moved / time.us / 1e3}
        yield row


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "us" not in row:
            continue
        line = lines.setdefault(row["case"], {"case": row["case"]})
        stage = "" if row["stage"] == "all" else f" {row['stage']}"
        line[row["subject"] + stage] = row["us"]
        if row["subject"] == "ours" and not stage:
            line |= {"floor us": row["floor us"], "ours cold": row["cold us"]}
        elif not stage:
            line["in-tree cold"] = row["cold us"]
    for line in lines.values():
        if line.get("ours") and line.get("in-tree"):
            line["ours / in-tree"] = line["ours"] / line["in-tree"]
    return list(lines.values())


def main(argv: list[str] | None = None) -> int:
    args = report.parser(__doc__).parse_args(argv)
    device = torch.device("cpu" if args.dry_run else "cuda")
    samples = 10 if args.quick else 20
    result = report.Report("index", args, {"layers": LAYERS, "samples": samples})
    facts = result.data["facts"]
    if "copy_gbs" not in facts:
        result.part("ceilings", partial(timing.ceilings, device, result.fact), setup=True)
    result.part("load ours", partial(ops_for, device), setup=True)
    subjects: dict[str, tuple[str, Callable[..., Stages]]] = {"ours": ("ours", ours)}
    if not args.dry_run:
        subjects |= {"ours stages": ("ours", our_stages), "in-tree": ("in-tree", in_tree)}
    for top_k in (512,) if args.quick or args.dry_run else (512, 1024):
        for batch, context in DRY if args.dry_run else QUICK if args.quick else CASES:
            for label, (subject, build) in subjects.items():
                name = f"{batch}x{context // K}K/top{top_k}/{label}"
                work = partial(measure, subject, build, batch, context, top_k, device, facts, samples)
                result.part(name, work)
    stages = [f"{subject} {stage}" for subject in ("ours", "in-tree") for stage in ("query", "score", "select")]
    columns = ["case", "ours", "in-tree", "ours / in-tree", "ours cold", "in-tree cold", *stages, "floor us"]
    lines = compare(result.rows)
    result.table("index, us a layer", [c for c in columns if any(c in line for line in lines)], lines)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
