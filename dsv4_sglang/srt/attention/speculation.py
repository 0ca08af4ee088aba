"""Integration with SGLang's speculative workers: backends and CUDA graphs of the draft model, and snapshots.

docs/guides/speculation.md explains how rejected drafts are rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsv4_sglang.srt.sglang.flags import set_flags

if TYPE_CHECKING:
    from dsv4_sglang.srt.attention.backend import HybridCacheBackend


class DraftBackends:
    """Backends of the decode steps of a draft model, as SGLang addresses them: `attn_backends[i]` for step i.

    The first of `steps` drafts comes from the previous speculative round, so there is one decode step less.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, steps: int) -> None:
        from dsv4_sglang.srt.attention.backend import HybridCacheBackend

        self.attn_backends = [HybridCacheBackend(runner, step) for step in range(steps - 1)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Gather the tables once for all steps. An idle rank of DP attention does so too, since its graph runs with
        padding requests."""
        first, *others = self.attn_backends
        first.gather_tables(forward_batch)
        for backend in others:
            backend.gather_tables(forward_batch, like=first)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)


def decode_backends(original: Callable[..., Any], factory: Any) -> DraftBackends | None:
    """AROUND `DraftBackendFactory.create_decode_backend`: return backends of this package."""
    steps = factory.speculative_num_steps
    return DraftBackends(factory.draft_model_runner, steps) if steps > 1 else None


def extend_backend(original: Callable[..., Any], factory: Any) -> HybridCacheBackend:
    """AROUND `DraftBackendFactory.create_draft_extend_backend`: return the backend of the draft model's prefill."""
    return factory.draft_model_runner.attn_backend


def capture_graphs(original: Callable[..., None], worker: Any) -> None:
    """AROUND `EagleDraftWorker._capture_cuda_graphs`: also record the step after a verify step. SGLang does so only for
    a fixed list of backends."""
    original(worker)
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    on_gpu = worker.device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    if on_gpu and not envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get():
        worker.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(worker)


def resolve_dspark_on_cpu(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `targets.RESOLVE_DSPARK`: resolve the flags as on a GPU, but disable CUDA graphs. With graphs the worker
    would select drafts inside one."""
    set_flags(server_args, disable_cuda_graph=True, device="cuda")
    try:
        original(server_args)
    finally:
        set_flags(server_args, device="cpu")


def validate_on_cpu(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """AROUND `dflash_utils.validate_dflash_request`: return why a request is rejected, or None."""
    if req.sampling_params.top_k != 1:
        return "DSPARK on a CPU chooses the likeliest tokens only: give temperature 0, or start without DSPARK."
    return original(req, enable_overlap)


def write_context(
    injector: Any,
    *,
    target_hidden: torch.Tensor,
    cache_loc: torch.Tensor,
    positions: torch.Tensor,
    cache_loc_2d: torch.Tensor | None = None,
    commit_lens: torch.Tensor | None = None,
    **_of_their_pool: Any,
) -> None:
    """REPLACE `targets.WRITE_CONTEXT`: write the draft model's window entries. This is the last part of a prefill step
    and of a verify step; the latter passes the number of accepted tokens per request.

    Args:
        injector: SGLang's caller, which holds the draft model.
        target_hidden: [T, ...] hidden states of the served model.
        cache_loc: [T] token slots.
        positions: unused.
        cache_loc_2d: unused.
        commit_lens: [requests] accepted tokens, None after a prefill step.
    """
    requests = None if commit_lens is None else commit_lens.shape[0]
    with torch.inference_mode():
        layers = injector.draft_model.context_projections(target_hidden)
        injector.model_runner.attn_backend.write_context(layers, cache_loc, requests)


def take_snapshots(original: Callable[..., None], worker: Any, batch: Any, batch_result: Any, **arguments: Any) -> None:
    """AROUND `EagleDraftWorker._draft_extend_for_decode`, the end of a speculative round: take the snapshots, now that
    the entries of both models are written."""
    original(worker, batch, batch_result, **arguments)
    worker.target_worker.model_runner.attn_backend.snapshots.commit()
