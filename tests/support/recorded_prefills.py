"""Short prefill steps of a CPU server executed like GPU graphs, but without graph capture, for server_plugin.py.

Each step makes the calls of SGLang's runner of breakable graphs: the backend's capture once per size, the preparation
of the replay, and the model's forward pass on inputs padded to the size. As on a GPU, steps with too many tokens or
requests run eagerly. Graphs of at least SHORT_FORM_TOKENS tokens have a short form. The plugin's file `sizes` has the
graph sizes. The file `steps` receives one line per step: size, tokens, requests and rolling snapshots.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from support.server_plugin import folder

# Fewer than on a GPU.
SHORT_FORM_TOKENS = 100


@functools.cache
def _sizes() -> list[int]:
    """Return the sizes of the graphs, and make graphs of fewer tokens have a short form."""
    from dsv4_sglang.srt.attention import prefill_recorder

    prefill_recorder.SHORT_FORM_TOKENS = SHORT_FORM_TOKENS
    return json.loads((folder() / "sizes").read_text())


def _graph_size(tokens: int, requests: int) -> int | None:
    """Return the size of the smallest graph that has room for a step, None if there is none."""
    from dsv4_sglang.srt.attention.prefill_graphs import MAX_RECORDED_REQUESTS

    return next((size for size in _sizes() if size >= tokens and requests <= MAX_RECORDED_REQUESTS), None)


def _size(batch: Any) -> int | None:
    """Return the graph size with which a step is replayed; None if it runs eagerly."""
    mode = batch.forward_mode
    if mode.is_idle() or not mode.is_extend_without_speculative():
        return None
    # Ranks of DP attention run one graph together, or none does.
    if batch.global_num_tokens_cpu is not None and not (
        batch.can_run_dp_prefill_cuda_graph and batch.dp_padding_mode.is_max_len()
    ):
        return None
    return _graph_size(batch.positions.shape[0], batch.batch_size)


def _init_metadata(original: Callable[..., None], backend: Any, batch: Any, *rest: Any, **named: Any) -> None:
    if backend.is_draft or _size(batch) is None:
        original(backend, batch, *rest, **named)


def _forward(original: Callable[..., Any], model: Any, ids: Any, positions: Any, batch: Any, *rest: Any) -> Any:
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from torch.nn.functional import pad
    from torch.utils._pytree import tree_map

    size, tokens, backend = _size(batch), positions.shape[0], get_attn_backend()
    if size is None:
        return original(model, ids, positions, batch, *rest)
    with (folder() / "steps").open("a") as file:
        rolling = sum(map(bool, backend.rolling_plan or []))
        file.write(f"{size} {sum(batch.extend_seq_lens_cpu)} {batch.batch_size} {rolling}\n")
    ids, positions, out_loc = (pad(x, (0, size - tokens)) for x in (ids, positions, batch.out_cache_loc))
    graphs = vars(model).setdefault("test_graphs", {})
    for captured in [size] if graphs else [_sizes()[-1], size]:  # the largest size is captured first
        static = positions.new_zeros(captured), out_loc.new_zeros(captured)
        dummy = SimpleNamespace(positions=static[0], out_cache_loc=static[1])
        graphs.setdefault(captured, backend.init_forward_metadata_for_breakable_cuda_graph_capture(dummy))
    graphs[size].out_loc.copy_(out_loc)
    backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(graphs[size], batch)
    parts = (backend, backend.layers, backend.recorder, backend.scratch, backend.snapshots)
    before = [dict(vars(part)) for part in parts]
    out = original(model, ids, positions, batch, *rest)
    for part, attributes in zip(parts, before):  # a replay runs no Python of the backend
        vars(part).update(attributes)
    return tree_map(lambda rows: rows[:tokens], out)


class _Runner:
    """Stands for SGLang's runner, whose class the vote of a decoding rank requires."""

    _backend_vote_prefill_cuda_graph = max_context_size = max_seq_len = None
    enable_lora = False

    def can_replay_locally(self, *, batch_size: int, num_tokens: int, **_: Any) -> bool:
        return _graph_size(num_tokens, batch_size) is not None


def _vote(original: Callable[..., bool], vote: Callable[..., bool], **arguments: Any) -> bool:
    from sglang.srt.managers.scheduler_components import dp_attn
    from sglang.srt.runtime_context import get_exec

    from dsv4_sglang.srt.sglang.models import replaced

    get_exec().graph.cuda_graph_config.prefill.bs = _sizes()  # SGLang pads the steps of all ranks to one size
    arguments |= {"prefill_graph_runner": _Runner(), "coordinated_prefill": True, "breakable_prefill": True}
    with replaced(dp_attn, PrefillCudaGraphRunner=_Runner):
        return original(vote, **arguments)


HOOKS: dict[str, Callable[..., Any]] = {
    "dsv4_sglang.srt.attention.backend.HybridCacheBackend.init_forward_metadata_out_graph": _init_metadata,
    "dsv4_sglang.srt.models.deepseek_v4.Model.forward": _forward,
    "dsv4_sglang.srt.prefix_cache.snapshot_schedule.may_join_prefill": _vote,
}
