"""Prefill steps that run as CUDA graphs (docs/guides/serving.md, "Prefill graphs").

A short prefill step is one graph from the embedding to the last norm, recorded by SGLang's runner for breakable graphs.
The graph has no breaks: metadata, append, selection, attention and snapshots are device work of fixed shapes
(`attention.step_buffers.PrefillBuffers`). SGLang disables these graphs for DeepSeek-V4, because its indexer allocates
scratch for the whole context during recording. Here scratch is allocated once and shared with decode steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsv4_sglang.srt.sglang.flags import current_flags, given_graph_settings, note_given_graph_setting, set_flags
from dsv4_sglang.srt.sglang.graphs import attention_backend

PHASE, BACKEND = "prefill", "breakable"
# Token counts of the recorded steps, unless --cuda-graph-bs-prefill sets others. SGLang replays a graph for a step of
# at least half its tokens, so sizes may at most double. The time of a large step is proportional to its size, so large
# sizes fit frequent steps. A hit computes its new tokens and up to 127 tokens after its snapshot: 1,088 is for 1,000
# new tokens, 1,664 and 1,920 are for seven and eight hits of 200. At V4-Flash's widths a first start compiles 30 s for
# each size (docs/guides/first_start.md). A graph takes 10 MB (benchmarks/configs/flashshape).
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 384, 640, 1088, 1664, 1920)
# Requests of a recorded step. Each costs 128 entries of the window workspace and a row of block ids.
MAX_RECORDED_REQUESTS = 32


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
        longest = graphs.prefill.max_bs if (PHASE, "max_bs") in given else min(SIZES[-1], graphs.prefill.max_bs)
        graphs.prefill.bs = sorted({*(size for size in SIZES if size < longest), longest})
    graphs.prefill.max_bs = max(graphs.prefill.bs)
    set_flags(server_args, cuda_graph_config=graphs)
    note_given_graph_setting(server_args, PHASE, "backend")


def steps_without_graph(server_args: Any) -> list[tuple[int, int]]:
    """Return the ranges of tokens below the largest graph, both ends included, whose prefill steps run eagerly.

    A graph serves steps of at least half its tokens.
    """
    graphs = current_flags(server_args).cuda_graph_config
    if graphs is None or graphs.prefill.backend != BACKEND:
        return []
    ranges, served = [], 0
    for size in sorted(graphs.prefill.bs or ()):
        least = (size + 1) // 2
        if least > served + 1:
            ranges.append((served + 1, least - 1))
        served = size
    return ranges


def largest_graph() -> int | None:
    """Return the tokens of the largest recorded prefill step, None without prefill graphs."""
    from sglang.srt.runtime_context import get_exec

    graphs = get_exec().graph.cuda_graph_config
    if graphs is None or graphs.prefill.backend != BACKEND or not graphs.prefill.bs:
        return None
    return max(graphs.prefill.bs)


def add_within_graph(original: Callable[..., Any], adder: Any, req: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND `PrefillAdder.add_one_req`, which adds a waiting request to the next prefill step: leave a short prompt
    for the step after it if the step would exceed the largest graph.

    Two recorded steps take less time than an eager step of as many tokens, until the tokens of an eager step take
    longer than its launches. A prompt with more new tokens than the largest graph is added as without this hook: its
    step runs eagerly anyway, and short prompts fill the rest of it.
    """
    largest = largest_graph()
    if largest is not None and adder.can_run_list:
        taken = sum(added.extend_len for added in adder.can_run_list)
        new = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        is_full = taken + new > largest or len(adder.can_run_list) >= MAX_RECORDED_REQUESTS
        if max(taken, new) <= largest and is_full:
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
    return original(adder, req, *arguments, **named)


def fits(original: Callable[..., bool], runner: Any, *, batch_size: int, **step: Any) -> bool:
    """AROUND `PrefillCudaGraphRunner.can_replay_locally`: also require that the batch has at most MAX_RECORDED_REQUESTS
    requests."""
    return batch_size <= MAX_RECORDED_REQUESTS and original(runner, batch_size=batch_size, **step)


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
