"""Estimates of the memory that lies outside of `--mem-fraction-static`, in bytes of one GPU."""

from __future__ import annotations

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import MIB
from dsv4_sglang.srt.sizing import GIB


def token_table_bytes(choice: Choice) -> int:
    """SGLang's `req_to_token`: an int32 for every token that each request may have, and a row for none. It is built
    behind the division of memory, so it lies in what `--mem-fraction-static` leaves. Behind the context there is room
    for the tokens of two verify steps, up to the end of a block (`get_req_to_token_extra_context_len`)."""
    extra = 2 * choice.draft_tokens + BLOCK - 1 if choice.draft_tokens else 4
    return (choice.running // choice.dp + 1) * (choice.served_context + extra) * 4


def graph_bytes(choice: Choice) -> int:
    """What SGLang 0.5.17 reckons with (`ServerArgs.reserve_for_graph_mb`): 2 MiB a request of the largest batch that is
    recorded, more under DP attention."""
    recorded = 512 if choice.tp >= 4 or choice.gpu.memory >= 160 * GIB else 256
    requests = min(choice.running // choice.dp, recorded)
    of_dp = 0.0 if choice.dp == 1 else choice.dp * (4.5 if requests > 300 else 3)
    return int(requests * (2 + of_dp)) * MIB


def prefill_graph_bytes(choice: Choice) -> int:
    """Return the memory of CUDA graphs of prefill steps: an upper bound, seen with benchmarks/configs/flashshape."""
    return int(0.4 * GIB)


def activation_bytes(choice: Choice) -> int:
    """What SGLang 0.5.17 reckons with (`ServerArgs.pre_capture_activation_reserve_mb`): 1.5 MiB a token of a chunk and
    some more, on large GPUs at least 10 GiB."""
    mib = 512 + max(choice.chunk, 2048) * 3 // 2 + choice.tp * 128
    return max(mib, 10 * 1024 if choice.gpu.memory > 60 * GIB else 0) * MIB
