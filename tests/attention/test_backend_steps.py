"""Tests of the attention backend over a sequence of steps, with real pools and ops. The model has one window layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from support.backend import BLOCK, CONTEXT, make_runner
from torch import Tensor

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.ops.rope import rope_table
from dsv4_sglang.srt.attention import backend as backend_module
from dsv4_sglang.srt.attention.backend import HybridCacheBackend
from dsv4_sglang.srt.attention.layer_ops import LayerInputs
from dsv4_sglang.srt.attention.snapshot_writer import SnapshotWriter
from dsv4_sglang.srt.models import attention

HEADS = 2
REQUESTS, SNAPSHOTS, STAGING = 2, 4, 3
GRAPH_TOKENS = 256


class Steps:
    """A backend and SGLang's tables of two requests, with the calls of SGLang's runners. Request r has state slot r."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend_module, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_dp_size=1))
        runner = make_runner(0, heads=HEADS, requests=REQUESTS, staging=STAGING, snapshots=SNAPSHOTS)
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.backend, self.storage = HybridCacheBackend(runner), runner.req_to_token_pool.mamba_pool.storage
        self.rope = rope_table(CONTEXT, torch.ones(32))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, batch: SimpleNamespace, tokens: int) -> None:
        """Run the layer on random inputs, as the model's forward pass does."""

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.generator)

        self.backend.begin_recorded()
        inputs = LayerInputs(
            LayerWeights(kv_norm=torch.ones(512), rope=self.rope), torch.zeros(HEADS), lambda: None, False
        )
        layer = SimpleNamespace(layer_id=0, scaling=1.0)
        self.backend.forward(
            random(tokens, HEADS, 512), random(tokens, 1, 512), torch.empty(0), layer, batch, inputs=inputs
        )

    def prefill_batch(self, prefixes: list[int], chunks: list[int]) -> SimpleNamespace:
        requests = torch.arange(1, len(chunks) + 1)
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(prefixes, chunks)])
        owner = torch.repeat_interleave(requests, torch.tensor(chunks))
        return SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(chunks),
            positions=positions,
            out_cache_loc=self.req_to_token[owner, positions].long(),
            req_pool_indices=requests,
            extend_prefix_lens=torch.tensor(prefixes),
            extend_seq_lens=torch.tensor(chunks),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens_cpu=chunks,
        )

    def prefill(self, prefixes: list[int], chunks: list[int], plan: list[list[tuple[int, int]]], graph: bool) -> None:
        """Run a prefill step eagerly or as a replay of a graph.

        Args:
            prefixes: tokens of each request before the step.
            chunks: tokens of each request in the step.
            plan: of each request, length and slot of its snapshots.
            graph: replay a graph, which runs no Python of the backend.
        """
        batch = self.prefill_batch(prefixes, chunks)
        if graph:
            static = SimpleNamespace(
                positions=torch.zeros(GRAPH_TOKENS), out_cache_loc=torch.zeros(GRAPH_TOKENS).long()
            )
            metadata = self.backend.init_forward_metadata_for_breakable_cuda_graph_capture(static)
            self.forward(batch, GRAPH_TOKENS)
            metadata.out_loc[: len(batch.positions)].copy_(batch.out_cache_loc)
        self.backend.prefill_plan = plan
        if not graph:
            self.backend.init_forward_metadata(batch)
            self.forward(batch, len(batch.positions))
            return
        self.backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(metadata, batch)
        parts = (self.backend, self.backend.layers, self.backend.recorder, self.backend.scratch, self.backend.snapshots)
        before = [dict(vars(part)) for part in parts]
        self.forward(batch, GRAPH_TOKENS)
        for part, attributes in zip(parts, before):
            vars(part).update(attributes)

    def decode(self, lengths: list[int], snapshots: list[int]) -> None:
        """Run an eager decode step. `snapshots`: snapshot slot of each request, 0 for none."""
        requests, lens = torch.arange(1, len(lengths) + 1), torch.tensor(lengths)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lengths),
            seq_lens=lens + 1,
            req_pool_indices=requests,
            out_cache_loc=self.req_to_token[requests, lens].long(),
            mamba_track_mask=torch.tensor(snapshots) > 0,
            mamba_track_indices=torch.tensor(snapshots),
        )
        self.backend.init_forward_metadata(batch)
        self.forward(batch, len(lengths))

    def ring(self, slot: int) -> Tensor:
        return self.storage.ring(0)[slot].clone()

    def snapshot(self, slot: int) -> Tensor:
        return self.storage.snapshot_tables()[0][slot - 1].view(torch.float32).view(BLOCK, 512).clone()


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_prefill_snapshot_is_copied_once(monkeypatch: pytest.MonkeyPatch, graph: bool) -> None:
    """The second request's snapshot is freed after the step, as that of a duplicate prompt, and the decode step that
    follows stores the first request's state there."""
    steps = Steps(monkeypatch)
    steps.prefill([0, 0], [127, 129], [[], [(BLOCK, 3)]], graph)
    window = steps.ring(2)[1:]  # the last token of the prompt overwrote position 0
    assert window.any() and torch.equal(steps.snapshot(3)[1:], window)
    steps.decode([127, 129], [3, 0])
    assert torch.equal(steps.snapshot(3), steps.ring(1)), "another request's state"


def test_staging_slots_and_copies_follow_the_plan(device: torch.device) -> None:
    """On a GPU, staging does not wait for the device."""
    state = cast(StateStorage, SimpleNamespace(rings=torch.empty(0, device=device)))
    snapshots, plan = SnapshotWriter(state, range(5, 9), None), [[], [(BLOCK, 3), (2 * BLOCK, 1)], [(3 * BLOCK, 4)]]
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        staged = snapshots.stage(plan, requests=4)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert staged is not None and snapshots.staged is not None
    assert staged.staging_slots.tolist() == [[-1, -1], [5, 6], [7, -1], [-1, -1]]
    assert staged.lengths.tolist() == [[0, 0], [BLOCK, 2 * BLOCK], [3 * BLOCK, 0], [0, 0]]
    assert [part.tolist() for part in snapshots.staged] == [[5, 6, 7], [3, 1, 4]]
    assert snapshots.stage(None, requests=4) is None and snapshots.staged is None


def test_rope_tables_cover_drafts_of_ended_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(max_position_embeddings=CONTEXT)
    for drafts, positions in ((None, CONTEXT), (4, CONTEXT + 8)):
        monkeypatch.setattr(
            runtime_context, "get_spec", lambda drafts=drafts: SimpleNamespace(speculative_num_draft_tokens=drafts)
        )
        assert attention._with_room_for_drafts(config).max_position_embeddings == positions
