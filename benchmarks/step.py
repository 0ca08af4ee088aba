"""Benchmark the metadata of a decode step, on the host and on the device, ours against SGLang's.

    python -m benchmarks.step [--quick] [--out DIR]

- "in graph us": time of the kernels in the step's CUDA graph that build the metadata of all layers.
- "outside host us": host time of the calls that prepare a replay, without waiting for the device.
- "eager host us": host time of a build without a graph.

Ours records `build_decode` and calls `gather_decode` before the replay. SGLang copies its raw metadata outside the
graph and builds page tables, index lists, plans and schedules inside. FlashMLA's schedules (one kernel per kind of
layer) are not included on either side. "context" is the longest request that the server allows.
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
CSA_RING = 8


def requests_of(batch: int, context: int, page: int, device: torch.device) -> SimpleNamespace:
    """Return the inputs of a decode step as SGLang passes them, with requests of random lengths up to 8K.

    Args:
        batch: number of requests.
        context: longest request that the server allows.
        page: tokens per page.
        device: device of the tensors.
    """
    generator = torch.Generator().manual_seed(batch)
    lens = torch.randint(1000, min(8 * K, context), (batch,), generator=generator)
    table = torch.zeros(batch + 1, context, dtype=torch.int32, device=device)
    live = min(8 * K, context)
    pages = live // page
    order = torch.randperm(batch * pages, generator=generator).view(batch, pages) + 1
    slots = (order[:, :, None] * page + torch.arange(page)).view(batch, live)
    table[1:, :live] = slots.int().to(device)
    at = (lens - 1).to(device)
    indices = torch.arange(1, batch + 1, dtype=torch.int64, device=device)
    return SimpleNamespace(
        req_pool_indices=indices,
        seq_lens=lens.to(device),
        positions=at,
        out_cache_loc=table[indices, at].long(),
        req_to_token=table,
        slots=(batch * pages + 1) * page,
    )


class Ours:
    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        self.batch = requests_of(batch, context, BLOCK, device)
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


class InTree:
    """SGLang's backend with stubs of the pools that it queries, without its model runner."""

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        from sglang.srt.layers.attention import deepseek_v4_backend as module
        from sglang.srt.layers.attention.dsv4.online_c128_mtp import OnlineC128MTPController
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        b = self.batch = requests_of(batch, context, 256, device)
        b.batch_size, b.forward_mode = batch, ForwardMode.DECODE
        b.seq_lens_sum, b.seq_lens_cpu = int(b.seq_lens.sum()), b.seq_lens.cpu()
        to_window = torch.arange(b.slots, dtype=torch.int64, device=device)
        pool = SimpleNamespace(
            full_to_swa_index_mapping=to_window,
            swa_page_size=128,
            get_ring_size=lambda compress_ratio: CSA_RING if compress_ratio == 4 else 128,
            translate_loc_from_full_to_swa=lambda loc: to_window[loc],
        )
        self.backend = object.__new__(module.DeepseekV4AttnBackend)
        for name, value in {
            "req_to_token": b.req_to_token,
            "token_to_kv_pool": pool,
            "device": device,
            "page_size": 256,
            "swa_page_size": 128,
            "cuda_int32_kwargs": {"device": device, "dtype": torch.int32},
            "c4_topk": TOP_K,
            "enable_deepseek_v4_fp4_indexer": False,
            "MAX_SEQ_LEN_FOR_CAPTURE": context,
            "mtp_enabled": False,
            "topk": 0,
            "speculative_num_steps": 0,
            "is_dspark_draft": False,
            "is_draft_runner": False,
            "speculative_num_draft_tokens": None,
            "max_context_len": context,
            "needs_cpu_seq_lens": False,
            "hisparse_coordinator": None,
            "builds_verify_metadata_early": False,
            "_early_verify_metadata_ids": set(),
        }.items():
            setattr(self.backend, name, value)
        self.backend.online_c128_mtp = OnlineC128MTPController(self.backend)
        self.backend.cuda_graph_metadata_of_bucket_and_bs = {bucket: {} for bucket in module._GraphBucket}
        self.raw_type = module.DSV4RawDecodeMetadata
        self.outside()
        self.raw = self.backend.forward_metadata

    def in_graph(self) -> None:
        self.backend.forward_metadata = self.raw
        self.backend.init_forward_metadata_in_graph(self.batch)

    def outside(self) -> None:
        self.backend.init_forward_metadata_out_graph(self.batch)


def measure(kind: Any, subject: str, batch: int, context: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row with the times of one kind of metadata.

    Args:
        kind: `Ours` or `InTree`.
        subject: name of the kind.
        batch: number of requests.
        context: longest request that the server allows.
        device: device of the metadata.
    """
    step = kind(batch, context, device)
    in_graph = timing.Recorded(step.in_graph, device).time(20)
    host = timing.host_time(step.outside, samples=30)
    build = timing.host_time(step.in_graph, samples=10 if device.type == "cuda" else 1, inner=3)
    yield {
        "batch": batch,
        "context": f"{context // K}K",
        "subject": subject,
        "in graph us": in_graph.us,
        "outside host us": host.us,
        "eager host us": build.us,
    }


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    device = resolve_device("cpu" if args.dry_run else "cuda")
    result = report.Report("step", args)
    kinds = {"ours": Ours} if args.dry_run else {"ours": Ours, "in-tree": InTree}
    contexts = (4 * K,) if args.dry_run else (K * K,) if args.quick else (K * K, 64 * K)
    for context in contexts:
        for batch in (2,) if args.dry_run else (1, 64, 256) if args.quick else (1, 16, 64, 256):
            for subject, kind in kinds.items():
                name = f"{context // K}K/{batch}/{subject}"
                result.part(name, partial(measure, kind, subject, batch, context, device))
    columns = ["batch", "context", "subject", "in graph us", "outside host us", "eager host us"]
    result.table("metadata of a decode step", columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
