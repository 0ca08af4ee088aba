"""Estimates of the memory that lies outside of `--mem-fraction-static`, in bytes of one GPU."""

from __future__ import annotations

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import MIB
from dsv4_sglang.srt.memory.sizing import GIB


def token_table_bytes(choice: Choice) -> int:
    """Return the size of SGLang's `req_to_token`: an int32 for each token of each request, and a row for none.

    SGLang allocates it after it has sized the pools, so it lies outside of `--mem-fraction-static`. Behind the context
    it has room for the tokens of two verify steps, up to the end of a block (`get_req_to_token_extra_context_len`).
    """
    extra = 2 * choice.draft_tokens + BLOCK - 1 if choice.draft_tokens else 4
    return (choice.running // choice.dp + 1) * (choice.served_context + extra) * 4


def graph_bytes(choice: Choice) -> int:
    """Return SGLang's estimate for CUDA graphs of decode (`reserve_for_graph_mb`): 2 MiB a request of the largest batch
    that is captured, more under DP attention."""
    captured = 512 if choice.tp >= 4 or choice.gpu.memory >= 160 * GIB else 256
    requests = min(choice.running // choice.dp, captured)
    of_dp = 0.0 if choice.dp == 1 else choice.dp * (4.5 if requests > 300 else 3)
    return int(requests * (2 + of_dp)) * MIB


def prefill_graph_bytes(choice: Choice) -> int:
    """Return an estimate for CUDA graphs of prefill steps of the default sizes: what they took on an H200 with
    benchmarks/configs/flashshape (docs/benchmarks/results.md), rounded up. Most of it are the queries and outputs of
    attention of the largest step, whose widths V4-Flash shares."""
    return GIB


def activation_bytes(choice: Choice) -> int:
    """Return SGLang's estimate for activations (`pre_capture_activation_reserve_mb`): 1.5 MiB a token of a chunk and
    some more, on large GPUs at least 10 GiB.

    The chunk is that of all ranks of DP attention together: the experts see the tokens of all.
    """
    mib = 512 + max(choice.chunk, 2048) * 3 // 2 + choice.tp * 128
    return max(mib, 10 * 1024 if choice.gpu.memory > 60 * GIB else 0) * MIB
