"""Benchmark the selection and the attention of DeepSeek-V4.1's layers on our cache. There is no peer.

    python -m benchmarks.v41 [--quick] [--out DIR]

Selection: the op `index_topk` of a layer with 32 heads that selects 512 entries, of ratio 2 or 1, the latter with 2,048
candidate blocks that it chooses or selects within. Attention: 64 heads on 128 window entries and 512 selected ones, for
each attention kernel that takes the step, in a layer that selects and in one that reuses the selection. A CUDA graph
holds four layers, each with tensors of its own. Times are per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command_line, report, timing
from benchmarks.append_ours import ops_for
from benchmarks.index import Load
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel, EntryList
from dsv4_sglang.attention.metadata import build_prefill
from dsv4_sglang.attention.registry import make_kernels
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KeyFormat, KVFormat, make_kv_buffers
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.ops.cuda_index import CANDIDATE_ENTRIES, CANDIDATE_HEADS, listed_blocks, score_columns
from dsv4_sglang.srt.attention.step_scratch import SCRATCH_BYTES

LAYERS, HEADS, TOP_K, CANDIDATES, DIM, K = 4, 64, 512, 2048, 512, 1024
LIMITS = {2: TOP_K, 1: TOP_K}


DECODE = [Load(n, thousands * K) for n, thousands in ((1, 16), (1, 128), (1, K), (16, 32), (64, 16), (256, 16))]
PREFILL = [Load(1, 8 * K, 8 * K), Load(1, 64 * K, 8 * K), Load(1, 64 * K, K), Load(1, 20 * K, 200)]
QUICK = [Load(1, 128 * K), Load(64, 16 * K), Load(1, 64 * K, 8 * K)]
DRY = [Load(2, K), Load(1, K, 64)]


def step_of(load: Load, device: torch.device) -> StepMetadata:
    """Return the metadata of a step as a prefill step builds it, with random blocks for each request."""
    order = torch.randperm(load.requests * load.context // BLOCK, dtype=torch.int32, device=device).view(
        load.requests, -1
    )
    requests = torch.arange(load.requests, device=device)
    positions = torch.arange(load.context - load.chunk, load.context, device=device).repeat(load.requests)
    return build_prefill(
        req_pool_indices=requests,
        prefix_lens=torch.full_like(requests, load.context - load.chunk),
        chunk_lens=torch.full_like(requests, load.chunk),
        positions=positions,
        out_loc=torch.zeros_like(positions),
        req_to_token=(order[..., None] * BLOCK + torch.arange(BLOCK, device=device, dtype=torch.int32)).flatten(1),
        state_slot_of_request=requests + 1,
        staging_slots=None,
        snapshot_lens=None,
        limits=LIMITS,
        max_length=load.context,
    )


def random_table(blocks: int, entries: int, width: int, device: torch.device) -> Tensor:
    """Return a buffer whose bytes are finite numbers in all formats."""
    return torch.randint(0, 120, (blocks, entries, width), dtype=torch.uint8, device=device)


def selection(load: Load, ratio: int, role: str, device: torch.device, layers: int) -> Callable[[], None]:
    """Return a function that selects in each layer.

    Args:
        load: requests of the step.
        ratio: tokens per entry.
        role: "full", "full with candidates" or "reindex".
        device: device of the tensors.
        layers: number of layers.
    """
    step, per_block = step_of(load, device), BLOCK // ratio
    keys = [
        random_table(load.requests * load.context // BLOCK, per_block, KeyFormat.MXFP4.width, device)
        for _ in range(layers)
    ]
    q = torch.randn(load.tokens, CANDIDATE_HEADS, 128, device=device).bfloat16()
    weights = torch.randn(load.tokens, CANDIDATE_HEADS, device=device)
    rope = torch.ones(load.context, 64, device=device)
    candidates = 0 if role == "full" else CANDIDATES
    columns = score_columns(step.block_table.shape[1] * per_block, TOP_K, listed_blocks(TOP_K, candidates))
    at_once = min(load.tokens, max(1, SCRATCH_BYTES // max(1, 4 * columns)))
    scores = torch.empty(at_once, columns, device=device)
    rows = torch.empty(load.tokens, TOP_K, dtype=torch.int32, device=device)
    blocks = torch.arange(CANDIDATES, dtype=torch.int32, device=device).repeat(load.tokens, 1)
    blocks[:, load.context // ratio // CANDIDATE_ENTRIES :] = -1
    kept, within = (blocks if role == name else None for name in ("full with candidates", "reindex"))

    def run() -> None:
        for table in keys:
            torch.ops.dsv4_sglang.index_topk(
                *(q, weights, table, step.block_table, step.token_request, step.positions, rope, KeyFormat.MXFP4.code),
                *(scores, rows, ratio, False, CANDIDATE_ENTRIES, kept, within),
            )

    return run


class Attention:
    """Inputs of the attention of a step in each layer."""

    def __init__(self, load: Load, ratio: int, device: torch.device, layers: int) -> None:
        self.step, per_block, self.load = step_of(load, device), BLOCK // ratio, load
        if load.chunk == 1:
            self.step.window_size = 0
        slots = self.step.window_size or load.requests * WINDOW
        blocks = load.requests * load.context // BLOCK
        self.blocks, self.per_block = blocks, per_block
        entry = torch.rand(load.tokens, load.context // ratio, device=device).topk(min(TOP_K, load.context // ratio))
        entry_list = entry.indices.int().sort(1).values
        of_request = self.step.block_table[self.step.token_request.long()]
        listed = of_request.gather(1, entry_list.long() // per_block) * per_block + entry_list % per_block
        indices = torch.full((load.tokens, TOP_K), -1, dtype=torch.int32, device=device)
        indices[:, : listed.shape[1]] = listed
        window = self.step.window_indices % slots
        self.q = torch.randn(load.tokens, HEADS, DIM, device=device).bfloat16()
        self.inputs = [
            AttendInputs(
                sink=torch.zeros(HEADS, device=device),
                heads=HEADS,
                window=EntryList(self._table(1, slots, KVFormat.MXFP8), window, self.step.window_lens),
                entries=EntryList(self._table(blocks, per_block, KVFormat.NVFP4), indices, self.step.entry_lens[ratio]),
                positions=self.step.positions,
                rope=torch.ones(load.context, 64, device=device),
                scale=DIM**-0.5,
                kv_format=KVFormat.MXFP8,
                entry_format=KVFormat.NVFP4,
                ratio=ratio,
            )
            for _ in range(layers)
        ]

    def _table(self, blocks: int, entries: int, stored: KVFormat) -> Tensor:
        table = make_kv_buffers(1, blocks, entries, stored, self.step.positions.device)[0]
        return table.copy_(random_table(*table.shape, table.device))

    def kernels(self) -> Iterator[AttentionKernel]:
        """Yield the attention kernels that take the step, each after its beginning."""
        kernels = make_kernels(self.q.device, self.blocks, HEADS, self.q.dtype, KVFormat.MXFP8, self.per_block, TOP_K)
        most_blocks = None if self.load.chunk == 1 else self.blocks
        return (kernel for kernel in kernels if kernel.begin_step(self.step, most_blocks))

    def run(self, kernel: AttentionKernel, selects: bool) -> None:
        for inputs in self.inputs:
            entries = inputs.entries if selects else self.inputs[0].entries
            kernel.attend(self.q, inputs._replace(entries=entries, selects=selects), output_is_rotated=True)


def rows_of_selection(load: Load, device: torch.device, layers: int, samples: int) -> Iterator[dict[str, Any]]:
    for ratio, role in ((2, "full"), (1, "full with candidates"), (1, "reindex")):
        recorded = timing.Recorded(selection(load, ratio, role, device, layers), device)
        yield {"case": str(load), "kind": f"ratio {ratio}, {role}", "us": recorded.time(samples, divide=layers).us}


def rows_of_attention(load: Load, device: torch.device, layers: int, samples: int) -> Iterator[dict[str, Any]]:
    made = Attention(load, 1, device, layers)
    for kernel in made.kernels():
        for selects in (True, False):
            recorded = timing.Recorded(partial(made.run, kernel, selects), device)
            kind = f"{type(kernel).__name__}, {'selects' if selects else 'reuses'}"
            yield {"case": str(load), "kind": kind, "us": recorded.time(samples, divide=layers).us}


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    device = torch.device("cpu" if args.dry_run else "cuda")
    layers, samples = (2 if args.dry_run else LAYERS), (10 if args.quick else 20)
    result = report.Report("v41", args, {"layers": layers, "samples": samples})
    result.part("load ours", partial(ops_for, device), setup=True)
    for load in DRY if args.dry_run else QUICK if args.quick else DECODE + PREFILL:
        for name, rows in (("selection", rows_of_selection), ("attention", rows_of_attention)):
            result.part(f"{name}/{load}", partial(rows, load, device, layers, samples))
    result.table("V4.1, us per layer", ["case", "kind", "us"], result.rows)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
