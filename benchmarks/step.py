"""Benchmark the metadata of a decode step, on the host and on the device. There is no peer: SGLang builds its metadata
within a server only.

    python -m benchmarks.step [--quick] [--out DIR]

- "in graph us": time of the kernels in the step's CUDA graph that build the metadata of all layers.
- "outside host us": host time of the calls that prepare a replay, without waiting for the device.
- "eager host us": host time of a build without a graph.

A graph records `build_decode`, and `gather_decode` is called before its replay. FlashMLA's schedules (one kernel per
kind of layer) are not included. "context" is the longest request that the server allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import command_line, report, timing
from dsv4_sglang.attention.metadata import build_decode, gather_decode
from dsv4_sglang.attention.step_buffers import DecodeBuffers
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.step import v4_limits
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

K = 1024
TOP_K = 512


def requests_of(batch: int, context: int, device: torch.device) -> SimpleNamespace:
    """Return the inputs of a decode step as SGLang passes them, with requests of random lengths up to 8K.

    Args:
        batch: number of requests.
        context: longest request that the server allows.
        device: device of the tensors.
    """
    generator = torch.Generator().manual_seed(batch)
    lens = torch.randint(1000, min(8 * K, context), (batch,), generator=generator)
    table = torch.zeros(batch + 1, context, dtype=torch.int32, device=device)
    live = min(8 * K, context)
    blocks = live // BLOCK
    order = torch.randperm(batch * blocks, generator=generator).view(batch, blocks) + 1
    slots = (order[:, :, None] * BLOCK + torch.arange(BLOCK)).view(batch, live)
    table[1:, :live] = slots.int().to(device)
    at = (lens - 1).to(device)
    indices = torch.arange(1, batch + 1, dtype=torch.int64, device=device)
    return SimpleNamespace(
        req_pool_indices=indices,
        seq_lens=lens.to(device),
        out_cache_loc=table[indices, at].long(),
        req_to_token=table,
    )


class Step:
    """A decode step of a server's backend."""

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        self.batch = requests_of(batch, context, device)
        self.buffers = DecodeBuffers(batch, context // BLOCK, device, limits=v4_limits(TOP_K))
        self.state_slot = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.mask = self.batch.seq_lens % 256 == 0
        self.track = torch.arange(batch, dtype=torch.int64, device=device) + batch

    def in_graph(self) -> None:
        b = self.batch
        build_decode(
            self.buffers,
            seq_lens=b.seq_lens,
            out_loc=b.out_cache_loc,
            snapshot_mask=self.mask,
            snapshot_slots=self.track,
        )

    def outside(self) -> None:
        b = self.batch
        gather_decode(
            self.buffers,
            req_pool_indices=b.req_pool_indices,
            seq_lens=b.seq_lens,
            req_to_token=b.req_to_token,
            state_slot_of_request=self.state_slot,
        )


def measure(batch: int, context: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row with the times of the metadata.

    Args:
        batch: number of requests.
        context: longest request that the server allows.
        device: device of the metadata.
    """
    step = Step(batch, context, device)
    in_graph = timing.Recorded(step.in_graph, device).time(20)
    host = timing.host_time(step.outside, samples=30)
    build = timing.host_time(step.in_graph, samples=10 if device.type == "cuda" else 1, inner=3)
    yield {
        "batch": batch,
        "context": f"{context // K}K",
        "subject": "ours",
        "in graph us": in_graph.us,
        "outside host us": host.us,
        "eager host us": build.us,
    }


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    device = resolve_device("cpu" if args.dry_run else "cuda")
    result = report.Report("step", args)
    contexts = (4 * K,) if args.dry_run else (K * K,) if args.quick else (K * K, 64 * K)
    for context in contexts:
        for batch in (2,) if args.dry_run else (1, 64, 256) if args.quick else (1, 16, 64, 256):
            result.part(f"{context // K}K/{batch}", partial(measure, batch, context, device))
    columns = ["batch", "context", "in graph us", "outside host us", "eager host us"]
    result.table("metadata of a decode step", columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
