"""Benchmark the selection of CSA entries: our FP4 scores and top-k against DeepGEMM's FP8 scores and SGLang's top-k.

    python -m benchmarks.index [--quick] [--out DIR]

Both sides start from the raw index query of 64 heads and end with the entry indices that attention reads. A CUDA graph
holds four layers, each with its own keys; times are per layer. In-tree runs these kernels:

- query RoPE + Hadamard + FP8 quantisation,
- decode: deep_gemm.fp8_paged_mqa_logits over 132-byte keys, each token separately,
- prefill: a gather of the keys, then deep_gemm.fp8_mqa_logits,
- top-k v2.

Its schedules are step metadata and are computed before the timing. The stages are also timed alone. The floor is the
larger of the bytes of the keys / copy rate and the products / FP8 rate, taken as twice the bf16 rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks import command_line, report, tables, timing
from benchmarks.append_ours import ops_for
from dsv4_sglang.attention import cuda_ops  # noqa: F401  (registers `index_topk` for CUDA)
from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table

LAYERS, HEADS, DIM = 4, 64, 128
WEIGHT_SCALE = DIM**-0.5 * HEADS**-0.5
KEYS_A_BLOCK, KEYS_A_PAGE = 32, 64
KEY_BYTES = {"ours": 72, "in-tree": 132}
FP8_FLOPS = 2 * 790e12
K = 1024
Stages = dict[str, Callable[[], object]]


class Load(NamedTuple):
    """Requests of `context` tokens each, including the last `chunk` tokens, which belong to the step. With `shared` all
    have the same tokens, so that their keys are read from the L2 cache."""

    requests: int
    context: int
    chunk: int = 1
    shared: bool = False

    def __str__(self) -> str:
        chunk = f", chunk of {self.chunk}" if self.chunk > 1 else ""
        return f"{self.requests} x {self.context // K}K{chunk}" + ", shared" * self.shared

    @property
    def keys(self) -> int:
        return self.context // CSA_RATIO

    @property
    def is_prefill(self) -> bool:
        return self.chunk > 8

    @property
    def tokens(self) -> int:
        return self.requests * self.chunk

    def floor_us(self, key_bytes: int, facts: dict[str, float]) -> float:
        copied = (1 if self.shared else self.requests) * self.keys * key_bytes
        scores = self.tokens * (self.keys - self.chunk / CSA_RATIO / 2)
        return max(
            timing.floor_us(copied, 1, facts.get("copy_gbs") or 1.0, facts.get("empty_launch_us", 0.0)),
            scores * HEADS * DIM * 2 / FP8_FLOPS * 1e6,
        )


DECODE = ((1, 16), (1, 128), (1, 256), (1, 512), (1, K), (16, 32), (64, 16), (16, 128), (64, 128), (256, 16), (16, K))
# Four tokens per request, three of them drafts.
VERIFY = ((1, 128), (16, 32), (64, 32), (16, 128))
CASES = (
    *(Load(n, thousands * K) for n, thousands in DECODE),
    Load(16, K * K, shared=True),
    *(Load(n, thousands * K, 4) for n, thousands in VERIFY),
    *(Load(1, thousands * K, 8 * K) for thousands in (64, 256, 512, K)),
)
QUICK = (Load(1, 128 * K), Load(16, 128 * K), Load(64, 16 * K), Load(1, 128 * K, 4), Load(1, 64 * K, 8 * K))
DRY = (Load(2, 4 * K), Load(2, 4 * K, shared=True), Load(1, 4 * K, 64))


class Tensors:
    """Inputs that both subjects share: queries [T, 64, 128] bf16 and head weights per layer, positions, RoPE table."""

    def __init__(self, load: Load, device: torch.device, layers: int) -> None:
        generator = torch.Generator(device=device).manual_seed(4)
        size = load.tokens, HEADS
        self.q = [torch.randn(*size, DIM, device=device, generator=generator).bfloat16() for _ in range(layers)]
        self.weights = [torch.randn(size, device=device, generator=generator) for _ in range(layers)]
        self.rope = rope_table(load.context, rope_frequencies(DSV4Config.flash(), CSA_RATIO, device))
        self.positions = torch.arange(load.context - load.chunk, load.context, device=device).repeat(load.requests)


def page_table(load: Load, rows: int, device: torch.device) -> torch.Tensor:
    """Return random pages for each request, or those of the first one for all.

    Args:
        load: requests of the step.
        rows: keys per page.
        device: device of the table.

    Returns:
        int32 [requests, pages].
    """
    pages = load.requests * load.keys // rows
    order = torch.randperm(pages, device=device, generator=torch.Generator(device=device).manual_seed(2))
    table = order.int().view(load.requests, -1)
    return table[:1].expand_as(table).contiguous() if load.shared else table


class Ours(Tensors):
    """Inputs of `index_topk` and its scratch: scores of the tokens that are handled at a time."""

    def __init__(self, load: Load, top_k: int, device: torch.device, layers: int) -> None:
        from dsv4_sglang.srt.attention.step_scratch import SCRATCH_BYTES

        super().__init__(load, device, layers)
        self.block_table = page_table(load, KEYS_A_BLOCK, device)
        self.key_tables = [tables.our_keys(self.block_table.numel(), device) for _ in range(layers)]
        self.owner = torch.arange(load.requests, dtype=torch.int32, device=device).repeat_interleave(load.chunk)
        at_once = load.tokens if not load.is_prefill else min(load.tokens, SCRATCH_BYTES // (4 * load.keys))
        self.slices = [slice(begin, begin + at_once) for begin in range(0, load.tokens, at_once)]
        self.scores = torch.empty(at_once, load.keys, device=device)
        self.rows = torch.empty(load.tokens, top_k, dtype=torch.int32, device=device)
        self.weights = [w * WEIGHT_SCALE for w in self.weights]


def ours(load: Load, top_k: int, device: torch.device, layers: int) -> Stages:
    """Return our op as a single stage, "all".

    Args:
        load: requests of the step.
        top_k: entries that each token selects.
        device: device of the tensors.
        layers: number of layers.
    """
    t = Ours(load, top_k, device, layers)

    def step() -> None:
        for layer in range(layers):
            torch.ops.dsv4_sglang.index_topk(
                t.q[layer],
                t.weights[layer],
                t.key_tables[layer],
                t.block_table,
                t.owner,
                t.positions,
                t.rope,
                KeyFormat.MXFP4.code,
                t.scores,
                t.rows,
            )

    return {"all": step}


def our_stages(load: Load, top_k: int, device: torch.device, layers: int) -> Stages:
    """Return the three stages of our CUDA op, each by the function that implements it, and two in a row, which overlap.

    Arguments as for `ours`.
    """
    from dsv4_sglang.ops.cuda_index import prepare_query

    op, key_format = torch.ops.dsv4_sglang, KeyFormat.MXFP4
    t = Ours(load, top_k, device, layers)

    def query(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return prepare_query(t.q[layer], t.weights[layer], t.positions, t.rope, key_format)

    made = [query(layer) for layer in range(layers)]

    def score(layer: int, prepared: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, weights = prepared
        for part in t.slices:
            where = t.block_table, t.owner[part], t.positions[part]
            op.index_score(q[part], weights[part], t.key_tables[layer], *where, key_format.code, top_k, t.scores)

    def select() -> None:
        for part in t.slices:
            op.index_select(t.scores, t.block_table, t.owner[part], t.positions[part], t.rows[part])

    return {
        "query": lambda: [query(layer) for layer in range(layers)],
        "score": lambda: [score(layer, made[layer]) for layer in range(layers)],
        "select": lambda: [select() for _ in range(layers)],
        "query + score": lambda: [score(layer, query(layer)) for layer in range(layers)],
        "score + select": lambda: [(score(layer, made[layer]), select()) for layer in range(layers)],
    }


def in_tree(load: Load, top_k: int, device: torch.device, layers: int) -> Stages:
    """Return SGLang's work as a whole ("all") and by stages. Arguments as for `ours`."""
    import deep_gemm
    from sglang.kernels.ops.attention.dsv4 import (
        fused_q_indexer_rope_hadamard_quant,
        plan_topk_v2,
        topk_transform_paged_v2,
    )
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import GetKAndS

    shared = Tensors(load, device, layers)
    pages = page_table(load, KEYS_A_PAGE, device)
    token_pages = pages.repeat_interleave(load.chunk, 0)
    caches = [tables.in_tree_keys(pages.numel(), device) for _ in range(layers)]
    freqs = torch.view_as_complex(shared.rope.unflatten(1, (-1, 2)).contiguous())
    weights = [w.bfloat16() for w in shared.weights]
    lens = ((shared.positions + 1) // CSA_RATIO).int()
    plan = plan_topk_v2(lens)
    chosen = torch.full((load.tokens, math.ceil(top_k / 64) * 64), -1, dtype=torch.int32, device=device)

    def query(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, head_weights = fused_q_indexer_rope_hadamard_quant(
            shared.q[layer], weights[layer], WEIGHT_SCALE, freqs, shared.positions
        )
        return q, head_weights.squeeze(2)

    schedule = (
        deep_gemm.get_paged_mqa_logits_metadata(lens.unsqueeze(-1), KEYS_A_PAGE, deep_gemm.get_num_sms())
        if not load.is_prefill
        else None
    )
    start, last = torch.zeros_like(lens), lens[-1:]
    pool = SimpleNamespace(index_page_size=KEYS_A_PAGE, index_head_dim=DIM, quant_block_size=DIM)

    def score(layer: int, made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, head_weights = made
        if not load.is_prefill:
            cache = caches[layer].view(-1, KEYS_A_PAGE, 1, KEY_BYTES["in-tree"])
            ends = lens.unsqueeze(-1)
            return deep_gemm.fp8_paged_mqa_logits(
                q.unsqueeze(1), cache, head_weights, ends, token_pages, schedule, load.keys, False
            )
        keys, scales = GetKAndS.execute(
            pool,
            caches[layer],
            page_indices=pages,
            seq_len_tensor=last,
            seq_len_sum=load.keys,
            max_seq_len=load.keys,
        )
        dense = keys.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1)
        return deep_gemm.fp8_mqa_logits(q, dense, head_weights, start, lens, clean_logits=False, max_seqlen_k=load.keys)

    def select(logits: torch.Tensor) -> None:
        topk_transform_paged_v2(logits, lens, token_pages, chosen, KEYS_A_PAGE, plan)

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
    load: Load,
    top_k: int,
    device: torch.device,
    facts: dict[str, float],
    samples: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row with the times of each stage.

    Args:
        subject: "ours" or "in-tree".
        build: makes the stages.
        load: requests of the step.
        top_k: entries that each token selects.
        device: device of the tensors.
        facts: ceilings of the device.
        samples: number of samples.
    """
    layers = 2 if device.type == "cpu" else LAYERS
    moved = load.requests * load.keys * KEY_BYTES[subject]
    floor = load.floor_us(KEY_BYTES[subject], facts)
    for stage, step in build(load, top_k, device, layers).items():
        time = timing.Recorded(step, device).time(samples, divide=layers)
        row = {"case": f"{load}, top {top_k}", "subject": subject, "stage": stage, "us": time.us}
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
            line["floor us"] = row["floor us"]
    for line in lines.values():
        if line.get("ours") and line.get("in-tree"):
            line["ours / in-tree"] = line["ours"] / line["in-tree"]
    return list(lines.values())


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
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
        for load in DRY if args.dry_run else QUICK if args.quick else CASES:
            for label, (subject, build) in subjects.items():
                work = partial(measure, subject, build, load, top_k, device, facts, samples)
                result.part(f"{load}/top{top_k}/{label}", work)
    stages = [f"{subject} {stage}" for subject in ("ours", "in-tree") for stage in ("query", "score", "select")]
    stages += ["ours query + score", "ours score + select"]
    columns = ["case", "ours", "in-tree", "ours / in-tree", *stages, "floor us"]
    lines = compare(result.rows)
    result.table("index, us per layer", [c for c in columns if any(c in line for line in lines)], lines)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
