"""Which prefill steps run as a CUDA graph (docs/guides/serving.md, "Prefill graphs").

A short prefill step is one graph from the embedding to the last norm, recorded by SGLang's runner for breakable graphs.
Nothing in it breaks: metadata, append, selection, attention and snapshots are device work of fixed shapes
(`attention.step_buffers.PrefillBuffers`). SGLang switches these graphs off for DeepSeek-V4 because its indexer
allocates scratch for the whole context while it records; here scratch is allocated once and shared with decode steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from dsv4_sglang.srt.integration import compat

PHASE, BACKEND = "prefill", "breakable"
# SGLang replays a graph for at most twice as many tokens as a step has, so small sizes may double. A large step takes
# as long as its size says, so large sizes are close to each other. A graph takes 10 MB (benchmarks/configs/flashshape).
SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048)
"""Tokens of the steps that are recorded, unless --cuda-graph-bs-prefill names others."""
MOST_REQUESTS = 32
"""Requests of a recorded step. Each costs 128 entries of the window workspace and a row of block ids."""


def switch_on(server_args: Any) -> None:
    """Choose breakable graphs and their sizes, unless flags say otherwise. Called while SGLang resolves its flags.

    A decode server of disaggregated serving runs no prefill steps.
    """
    args, given = compat.flags(server_args), compat.given_graph_settings(server_args)
    if args.device != "cuda" or args.disaggregation_mode == "decode" or args.cuda_graph_config is None:
        return
    graphs = copy.deepcopy(args.cuda_graph_config)
    if (PHASE, "backend") not in given:
        graphs.prefill.backend = BACKEND
    if (PHASE, "bs") not in given:
        longest = graphs.prefill.max_bs if (PHASE, "max_bs") in given else min(SIZES[-1], graphs.prefill.max_bs)
        graphs.prefill.bs = sorted({*(size for size in SIZES if size < longest), longest})
    graphs.prefill.max_bs = max(graphs.prefill.bs)
    compat.set_flags(server_args, cuda_graph_config=graphs)
    compat.note_given_graph_setting(server_args, PHASE, "backend")


def fits(original: Callable[..., bool], runner: Any, *, batch_size: int, **step: Any) -> bool:
    """AROUND `PrefillCudaGraphRunner.can_replay_locally`: a recorded step has room for a fixed number of requests."""
    return batch_size <= MOST_REQUESTS and original(runner, batch_size=batch_size, **step)
