"""Estimates of the memory outside of `--mem-fraction-static`, in bytes of one GPU."""

from __future__ import annotations

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import MIB
from dsv4_sglang.srt.memory.sizing import GIB


def token_table_bytes(choice: Choice) -> int:
    """Return the size of SGLang's `req_to_token`: one int32 per token per request, and one row without a request.

    SGLang allocates it after sizing the pools, so it is outside of `--mem-fraction-static`. A row has room for the
    context and 4 tokens. With speculation it has room for the context, the tokens of two verify steps, and the rest of
    their block (`get_req_to_token_extra_context_len`).
    """
    extra = 2 * choice.draft_tokens + BLOCK - 1 if choice.draft_tokens else 4
    return (choice.running // choice.dp + 1) * (choice.served_context + extra) * 4


def graph_bytes(choice: Choice) -> int:
    """Return SGLang's estimate for CUDA graphs of decode (`reserve_for_graph_mb`): 2 MiB per request of the largest
    captured batch, more under DP attention."""
    captured = 512 if choice.tp >= 4 or choice.gpu.memory >= 160 * GIB else 256
    requests = min(choice.running // choice.dp, captured)
    of_dp = 0.0 if choice.dp == 1 else choice.dp * (4.5 if requests > 300 else 3)
    return int(requests * (2 + of_dp)) * MIB


def prefill_graph_bytes(choice: Choice) -> int:
    """Return an estimate for CUDA graphs of prefill steps of the default sizes.

    It is the rounded measurement on an H200 with benchmarks/configs/flashshape (docs/benchmarks/results.md). Most of it
    holds attention queries and outputs of the largest step, whose widths are the same in V4-Flash.
    """
    return GIB


def activation_bytes(choice: Choice) -> int:
    """Return SGLang's estimate for activations (`pre_capture_activation_reserve_mb`).

    It is 1.5 MiB per token of a chunk (at least 2,048 tokens), 128 MiB per process and 512 MiB. On GPUs above 60 GiB it
    is at least 10 GiB. The chunk includes all ranks of DP attention, because the experts process the tokens of all.
    """
    mib = 512 + max(choice.chunk, 2048) * 3 // 2 + choice.tp * 128
    return max(mib, 10 * 1024 if choice.gpu.memory > 60 * GIB else 0) * MIB
