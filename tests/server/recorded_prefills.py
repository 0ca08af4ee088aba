"""SGLang plugin that runs short prefill steps of a CPU server like GPU graphs, but without graph capture.

Each step makes the calls of SGLang's runner of breakable graphs: the backend's capture once per size, the preparation
of the replay, and the model's forward pass on inputs padded to the size. As on a GPU, steps with too many tokens or
requests run eagerly. SIZES are the graph sizes. STEPS names a file that receives one line per step: size, tokens and
requests.

While the file named by FAULT_FILE contains one of FAULTS, that fault is injected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faulty_cache import _fault

STEPS = "DSV4_SGLANG_TEST_RECORDED_STEPS"
SIZES = "DSV4_SGLANG_TEST_RECORDED_SIZES"
FAULTS = ("padding tokens write", "the lengths of the step before")
BACKEND, MODEL = "dsv4_sglang.srt.attention.backend.HybridCacheBackend.", "dsv4_sglang.srt.models.deepseek_v4.Model."


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in (
        (BACKEND + "init_forward_metadata_out_graph", _init_metadata),
        (MODEL + "forward", _forward),
        ("dsv4_sglang.attention.step_buffers.PrefillBuffers.fill", _fill),
    ):
        HookRegistry.register(target, function, HookType.AROUND)


def _sizes() -> list[int]:
    return [int(size) for size in os.environ[SIZES].split(",")]


def _size(batch: Any) -> int | None:
    """Return the graph size with which a step is replayed; None if it runs eagerly."""
    from dsv4_sglang.srt.attention.prefill_graphs import MAX_RECORDED_REQUESTS

    mode = batch.forward_mode
    if mode.is_idle() or not mode.is_extend_without_speculative() or batch.batch_size > MAX_RECORDED_REQUESTS:
        return None
    return next((size for size in _sizes() if size >= batch.positions.shape[0]), None)


def _init_metadata(original: Callable[..., None], backend: Any, batch: Any, *rest: Any, **named: Any) -> None:
    if backend.is_draft or _size(batch) is None:
        original(backend, batch, *rest, **named)


def _forward(original: Callable[..., Any], model: Any, ids: Any, positions: Any, batch: Any, *rest: Any) -> Any:
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from torch.nn.functional import pad

    size, tokens, backend = _size(batch), positions.shape[0], get_attn_backend()
    if size is None:
        return original(model, ids, positions, batch, *rest)
    with Path(os.environ[STEPS]).open("a") as file:
        file.write(f"{size} {tokens} {batch.batch_size}\n")
    ids, positions, out_loc = (pad(x, (0, size - tokens)) for x in (ids, positions, batch.out_cache_loc))
    graphs = vars(model).setdefault("test_graphs", {})
    for captured in [size] if graphs else [_sizes()[-1], size]:  # the largest size is captured first
        static = positions.new_zeros(captured), out_loc.new_zeros(captured)
        dummy = SimpleNamespace(positions=static[0], out_cache_loc=static[1])
        graphs.setdefault(captured, backend.init_forward_metadata_for_breakable_cuda_graph_capture(dummy))
    graphs[size].out_loc.copy_(out_loc)
    backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(graphs[size], batch)
    hidden = original(model, ids, positions, batch, *rest)
    return _first(hidden, tokens)


def _first(hidden: Any, tokens: int) -> Any:
    """Slice the first `tokens` rows of a tensor, or of all tensors in nested tuples and lists."""
    if isinstance(hidden, tuple | list):
        return type(hidden)(_first(part, tokens) for part in hidden)
    return hidden[:tokens]


def _fill(original: Callable[..., None], buffers: Any, **batch: Any) -> None:
    before = buffers.prefix_lens.clone()
    original(buffers, **batch)
    if _fault() == FAULTS[0]:
        buffers.state_slots[-1] = buffers.state_slots[0]
    if _fault() == FAULTS[1]:
        buffers.prefix_lens.copy_(before)
