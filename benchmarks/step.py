"""Benchmark the metadata of a decode step, on the host and on the device, ours against SGLang's.

    python -m benchmarks.step [--quick] [--out DIR]

- "in graph": number and time of the kernels in the step's CUDA graph that build the metadata of all layers.
- "host": microseconds of the calls that prepare a replay, without waiting for the device, and the kernels they launch.

Ours records `build_decode` and calls `gather_decode` before the replay. SGLang copies its raw metadata outside the
graph and builds page tables, index lists, plans and schedules inside. FlashMLA's schedules (one kernel per kind of
layer) are not included on either side. "context" is the longest request that the server allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import report, timing
from dsv4_sglang.attention.metadata import build_decode, gather_decode
from dsv4_sglang.attention.step_buffers import DecodeBuffers
from dsv4_sglang.cache.device import resolve_device
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
        self.buffers = DecodeBuffers(batch, context // BLOCK, device)
        self.state_slot = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.mask = self.batch.seq_lens % 256 == 0
        self.track = torch.arange(batch, dtype=torch.int64, device=device) + batch

    def in_graph(self) -> None:
        b = self.batch
        self.made = build_decode(
            self.buffers,
            seq_lens=b.seq_lens,
            out_loc=b.out_cache_loc,
            track_mask=self.mask,
            track_slots=self.track,
            top_k=TOP_K,
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
        from sglang.kernels.ops.attention.dsv4.online_c128_mtp import OnlineC128MTPController
        from sglang.srt.layers.attention import deepseek_v4_backend as module
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
        self.made = self.backend.forward_metadata

    def outside(self) -> None:
        self.backend.init_forward_metadata_out_graph(self.batch)


def graph_nodes(function: Callable[[], object]) -> int | None:
    """Return the number of kernels and copies in a graph of `function`, or None without the CUDA bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        function()
    status, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    if int(status) != 0:
        raise RuntimeError(f"cudaGraphGetNodes: {status}")
    return int(count)


def kernels_launched(function: Callable[[], object]) -> int | None:
    """Return the number of device activities of one call by the profiler, or None if it sees none."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    count = sum(event.count for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
    return count or None


def synchronisations(function: Callable[[], object]) -> int:
    """Return how often one call waits for the device."""
    function()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The mode itself warns once per process that it is a prototype.
    texts = [str(warning.message) for warning in seen]
    return sum("synchroniz" in text and "prototype" not in text for text in texts)


def attempted(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `function`, or None if it fails, so that the times are kept."""
    try:
        return function(*args)
    except Exception as error:
        print(f"{function.__name__}: {type(error).__name__}: {error}")
        return None


def measure(kind: Any, subject: str, batch: int, context: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row with times and counts of one kind of metadata.

    Args:
        kind: `Ours` or `InTree`.
        subject: name of the kind.
        batch: number of requests.
        context: longest request that the server allows.
        device: device of the metadata.
    """
    step = kind(batch, context, device)
    cuda = device.type == "cuda"
    recorded = timing.Recorded(step.in_graph, device)
    in_graph = recorded.time(20)
    host = timing.host_time(step.outside, samples=30)
    build = timing.host_time(step.in_graph, samples=10 if cuda else 1, inner=3)
    nodes = attempted(graph_nodes, step.in_graph) if cuda else None
    if cuda and nodes is None:
        nodes = attempted(kernels_launched, step.in_graph)
    yield {
        "batch": batch,
        "context": f"{context // K}K",
        "subject": subject,
        "in graph us": in_graph.us,
        "in graph kernels": nodes,
        "outside host us": host.us,
        "outside kernels": (attempted(kernels_launched, step.outside) or 0) if cuda else None,
        "eager host us": build.us,
        "host waits": (
            sum(attempted(synchronisations, function) or 0 for function in (step.outside, step.in_graph))
            if cuda
            else None
        ),
        "KB of lists": list_bytes(step.made) / 1e3,
    }


def list_bytes(metadata: Any) -> int:
    """Return the bytes of the distinct tensors in a step's metadata."""
    seen: dict[int, int] = {}

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            seen[value.data_ptr()] = max(seen.get(value.data_ptr(), 0), value.numel() * value.element_size())
        elif isinstance(value, tuple):
            for item in value:
                walk(item, depth + 1)
        elif depth < 3 and hasattr(value, "__dict__"):
            for item in vars(value).values():
                walk(item, depth + 1)

    walk(metadata, 0)
    return sum(seen.values())


def main(argv: list[str] | None = None) -> int:
    args = report.parser(__doc__).parse_args(argv)
    device = resolve_device("cpu" if args.dry_run else "cuda")
    result = report.Report("step", args)
    kinds = {"ours": Ours} if args.dry_run else {"ours": Ours, "in-tree": InTree}
    contexts = (4 * K,) if args.dry_run else (K * K,) if args.quick else (K * K, 64 * K)
    for context in contexts:
        for batch in (2,) if args.dry_run else (1, 64, 256) if args.quick else (1, 16, 64, 256):
            for subject, kind in kinds.items():
                name = f"{context // K}K/{batch}/{subject}"
                result.part(name, partial(measure, kind, subject, batch, context, device))
    measured = ["in graph us", "in graph kernels", "outside host us", "outside kernels", "eager host us", "host waits"]
    result.table("metadata of a decode step", ["batch", "context", "subject", *measured])
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
