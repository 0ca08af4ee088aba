"""Prefill steps that run as CUDA graphs (docs/guides/serving.md, "Prefill graphs").

A short prefill step is one graph from the embedding to the last norm, recorded by SGLang's runner for breakable graphs.
The graph has no breaks: metadata, append, selection, attention and snapshots are device work of fixed shapes
(`attention.step_buffers.PrefillBuffers`). SGLang disables these graphs for DeepSeek-V4, because its indexer allocates
scratch for the whole context during recording. Here scratch is allocated once and shared with decode steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dsv4_sglang.srt.sglang.flags import current_flags, given_graph_settings, note_given_graph_setting, set_flags
from dsv4_sglang.srt.sglang.graphs import attention_backend, backend_of_runner

PHASE, BACKEND = "prefill", "breakable"
# Token counts of the recorded steps, unless --cuda-graph-bs-prefill sets others. SGLang replays a graph for a step of
# at least half its tokens, so sizes may at most double. The time of a large step is proportional to its size, so large
# sizes fit frequent steps. A hit computes its new tokens and up to 127 tokens after its snapshot: 1,088 is for 1,000
# new tokens, 1,664 and 1,920 are for seven and eight hits of 200. At V4-Flash's widths a first start compiles 30 s for
# each size (docs/guides/first_start.md). A graph takes 10 MB (benchmarks/configs/flashshape).
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 384, 640, 1088, 1664, 1920)
# A chunk of at most this many tokens is recorded too. With DP attention each rank has its part of a chunk.
LARGEST_CHUNK = 2048
# Requests of a recorded step. Each costs 128 entries of the window workspace and a row of block ids.
MAX_RECORDED_REQUESTS = 32
# The same with DP attention, where the requests of a decoding rank join the prefill steps of other ranks. Every layer
# launches thread blocks for all of them.
MAX_JOINED_REQUESTS = 128


def switch_on(server_args: Any) -> None:
    """Select breakable graphs and their sizes, unless flags say otherwise. Called while SGLang resolves its flags.

    A decode server of a disaggregated deployment runs no prefill steps. SGLang does not record breakable graphs with
    --enable-memory-saver, because it cannot release their memory.
    """
    args, given = current_flags(server_args), given_graph_settings(server_args)
    if args.device != "cuda" or args.disaggregation_mode == "decode" or args.cuda_graph_config is None:
        return
    if args.enable_memory_saver:
        return
    graphs = copy.deepcopy(args.cuda_graph_config)
    if (PHASE, "backend") not in given:
        graphs.prefill.backend = BACKEND
    if (PHASE, "bs") not in given:
        longest = graphs.prefill.max_bs
        if (PHASE, "max_bs") not in given:
            # SGLang divides the chunk among the ranks later, and would replace sizes beyond a part by its own.
            chunk = (args.chunked_prefill_size or 0) // args.attn_dp_size
            longest = min(longest, chunk if 0 < chunk <= LARGEST_CHUNK else SIZES[-1])
        graphs.prefill.bs = sorted({*(size for size in SIZES if size < longest), longest})
    graphs.prefill.max_bs = max(graphs.prefill.bs)
    set_flags(server_args, cuda_graph_config=graphs)
    note_given_graph_setting(server_args, PHASE, "backend")


def least_tokens(size: int) -> int:
    """Return the tokens of the smallest step for which the graph of a size is replayed.

    SGLang wants half the size. The graph of a large step takes time for each of its tokens, so one with much padding
    would take longer than an eager step.
    """
    return -(-size // 2) if size <= SIZES[-1] else -(-3 * size // 4)


def steps_without_graph(server_args: Any) -> list[tuple[int, int]]:
    """Return the ranges of tokens up to SIZES[-1], both ends included, whose prefill steps run eagerly although there
    is a larger graph."""
    ranges, served = [], 0
    for size in _sizes(current_flags(server_args).cuda_graph_config):
        last = min(least_tokens(size) - 1, SIZES[-1])
        if last > served:
            ranges.append((served + 1, last))
        served = size
    return ranges


def _sizes(graphs: Any) -> list[int]:
    """Return the sizes of prefill graphs in SGLang's `CudaGraphConfig`, the smallest one first."""
    recorded = graphs is not None and graphs.prefill.backend == BACKEND
    return sorted(graphs.prefill.bs or ()) if recorded else []


def recorded_sizes() -> list[int]:
    """Return the tokens of the recorded prefill steps of this server, the smallest first."""
    from sglang.srt.runtime_context import get_exec

    return _sizes(get_exec().graph.cuda_graph_config)


def add_within_graph(original: Callable[..., Any], adder: Any, req: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND `PrefillAdder.add_one_req`, which adds a waiting request to the next prefill step: leave a short prompt
    for the step after it if the step would exceed the largest graph of up to SIZES[-1] tokens.

    Two recorded steps take less time than an eager step of as many tokens, until the tokens of an eager step take
    longer than its launches. The first of two steps also answers sooner than one large graph. A prompt with more new
    tokens is added as without this hook, and short prompts fill the rest of its step.
    """
    largest = max((size for size in recorded_sizes() if size <= SIZES[-1]), default=None)
    if largest is not None and adder.can_run_list:
        taken = sum(added.extend_len for added in adder.can_run_list)
        new = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        is_full = taken + new > largest or len(adder.can_run_list) >= MAX_RECORDED_REQUESTS
        if max(taken, new) <= largest and is_full:
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
    return original(adder, req, *arguments, **named)


def fits(
    original: Callable[..., bool],
    runner: Any,
    *,
    batch_size: int,
    num_tokens: int | None,
    prefix_lens: Sequence[int] | None,
    **step: Any,
) -> bool:
    """AROUND `PrefillCudaGraphRunner.can_replay_locally`: also require that the graph has room for the requests of the
    batch, and that the graph of a large step takes less time than an eager step."""
    recorder = backend_of_runner(runner).recorder
    step |= {"batch_size": batch_size, "num_tokens": num_tokens, "prefix_lens": prefix_lens}
    if batch_size > recorder.requests or not original(runner, **step):
        return False
    size = next((size for size in recorded_sizes() if num_tokens is not None and size >= num_tokens), 0)
    if num_tokens is None or size <= SIZES[-1]:
        return True
    return num_tokens >= least_tokens(size) and recorder.replays_large(
        size, num_tokens, prefix_lens or [0] * batch_size
    )


def record_forms(
    original: Callable[..., None], graphs: Any, shape_key: Any, forward_fn: Callable[[], Any], *rest: Any, **named: Any
) -> None:
    """AROUND `BreakableCudaGraphBackend.capture_one`, which records a step: also record the short form of a large one
    (`PrefillRecorder`)."""
    original(graphs, shape_key, forward_fn, *rest, **named)
    backend = attention_backend(graphs)
    form = backend.recorder.short_form(shape_key.size)
    if form is not None:
        backend.metadata = backend.recorder.take_form(backend.metadata, form)
        original(graphs, short_key(shape_key), forward_fn, *rest, **named)


def replay_form(
    original: Callable[..., Any], graphs: Any, shape_key: Any, static_forward_batch: Any, **named: Any
) -> Any:
    """AROUND `BreakableCudaGraphBackend.replay`: replay the form that the backend has chosen for the batch."""
    is_short = attention_backend(graphs).recorder.form is not None
    return original(graphs, short_key(shape_key) if is_short else shape_key, static_forward_batch, **named)


def short_key(shape_key: Any) -> Any:
    """Return SGLang's key of the short form of a recorded step."""
    return replace(shape_key, attention_variant="short")
