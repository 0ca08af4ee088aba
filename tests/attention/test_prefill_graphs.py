"""Tests of prefill in CUDA graphs: a graph derives the same metadata as an eager step for any batch."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt import runtime_context

from dsv4_sglang.attention.metadata import build_prefill, build_recorded, recorded_step
from dsv4_sglang.attention.step_buffers import PrefillBuffers
from dsv4_sglang.cache.step import StepMetadata, v4_limits
from dsv4_sglang.srt.attention.prefill_graphs import SIZES, fits, least_tokens, recorded_sizes

BLOCK, MAX_BLOCKS, TOKENS, REQUESTS, TOP_K = 128, 9, 640, 5, 64
STAGING = range(20, 40)
PER_TOKEN = ("token_request", "positions", "window_indices", "window_lens")
LIMITS = v4_limits(TOP_K)
PER_TOKEN += ("staging_slots", "out_loc")


class Batch:
    """Prefill batch in SGLang's tables: request i has `prefixes[i]` cached tokens and `chunks[i]` new ones."""

    def __init__(self, prefixes: list[int], chunks: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        n = len(prefixes)
        pages = 1 + torch.randperm(n * MAX_BLOCKS, generator=generator).view(n, MAX_BLOCKS)
        self.req_to_token = torch.zeros(n + 1, MAX_BLOCKS * BLOCK, dtype=torch.int32)
        self.req_to_token[1:] = (pages[:, :, None] * BLOCK + torch.arange(BLOCK)).view(n, -1)
        self.state_slot = torch.zeros(n + 1, dtype=torch.int32)
        self.state_slot[1:] = 1 + torch.randperm(n, generator=generator)
        self.requests = 1 + torch.randperm(n, generator=generator)
        self.prefix_lens, self.chunk_lens = torch.tensor(prefixes), torch.tensor(chunks)
        self.lengths = [a + b for a, b in zip(prefixes, chunks)]
        self.positions = torch.cat([torch.arange(a, a + b) for a, b in zip(prefixes, chunks)])
        owner = torch.repeat_interleave(self.requests, self.chunk_lens)
        self.out_loc = self.req_to_token[owner, self.positions].long()
        # Each request takes a snapshot at every multiple of 128 that it passes, in the order of the requests.
        due = [[at for at in range(BLOCK, end + 1, BLOCK) if at > a] for a, end in zip(prefixes, self.lengths)]
        self.due = sum(map(len, due))
        most = max(1, *map(len, due)) if n > 1 else max(1, len(due[0]))
        self.snapshot_lens = torch.tensor([at + [0] * (most - len(at)) for at in due])
        staged = iter(STAGING)
        slots = [[next(staged) for _ in at] + [-1] * (most - len(at)) for at in due]
        self.staging_slots = torch.tensor(slots, dtype=torch.int32)
        self.snapshots = torch.tensor(STAGING[: self.due], dtype=torch.int32) + 100

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {
            "req_pool_indices": self.requests,
            "prefix_lens": self.prefix_lens,
            "chunk_lens": self.chunk_lens,
            "req_to_token": self.req_to_token,
            "state_slot_of_request": self.state_slot,
            "staging_slots": self.staging_slots,
            "snapshot_lens": self.snapshot_lens,
        }

    def eager(self) -> StepMetadata:
        at = {"positions": self.positions, "out_loc": self.out_loc}
        return build_prefill(**self.inputs, **at, limits=LIMITS, max_length=max(self.lengths))

    def recorded(self, buffers: PrefillBuffers, tokens: int) -> StepMetadata:
        # The state slot of each request, but the first one, is copied too.
        self.rolling = torch.arange(len(self.requests), dtype=torch.int32) + 200
        self.rolling[0] = 0
        buffers.fill(**self.inputs, copy_dst=self.snapshots if self.due else None, rolling_dst=self.rolling)
        out_loc = torch.nn.functional.pad(self.out_loc, (0, tokens - len(self.out_loc)))
        build_recorded(buffers, tokens, out_loc)
        return recorded_step(buffers, tokens, out_loc)


def batches() -> st.SearchStrategy[Batch]:
    def request(draw_chunk: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, MAX_BLOCKS * BLOCK - draw_chunk), st.just(draw_chunk))

    chunks = st.lists(st.integers(1, TOKENS // REQUESTS), min_size=1, max_size=REQUESTS)
    requests = chunks.flatmap(lambda found: st.tuples(*map(request, found)))
    return st.builds(
        lambda found, seed: Batch([a for a, _ in found], [b for _, b in found], seed), requests, st.integers(0, 99)
    )


def check(step: StepMetadata, expected: StepMetadata, batch: Batch, buffers: PrefillBuffers) -> None:
    """Check that the tokens of the batch have the eager step's metadata, and that padding tokens see and write
    nothing."""
    n, requests, tokens = len(batch.out_loc), len(batch.requests), len(step.positions)
    alone = step.first_tokens(batch.out_loc)
    assert alone.window_size == n + BLOCK * (REQUESTS + 1)
    for name in PER_TOKEN:
        assert torch.equal(getattr(alone, name), getattr(expected, name)), name
    for ratio in LIMITS:
        assert torch.equal(alone.entry_lens[ratio], expected.entry_lens[ratio]), ratio
    for name in ("slots", "prefix_lens", "query_start"):
        assert torch.equal(getattr(step, name)[:requests], getattr(expected, name)[:requests]), name
    for token in range(n):
        seen = int(step.entry_lens[BLOCK][token])
        assert torch.equal(step.hca_indices[token, :seen], expected.block_table[expected.token_request[token], :seen])
    for request, length in enumerate(batch.lengths):
        blocks = -(-length // BLOCK)
        assert torch.equal(step.block_table[request, :blocks], expected.block_table[request, :blocks])
    assert step.query_start[requests:-1].eq(n).all() and step.query_start[-1] == tokens
    assert step.slots[requests:].eq(-1).all() and step.token_request[n:].eq(REQUESTS).all()
    for lens in (step.window_lens, *step.entry_lens.values()):
        assert lens[n:].eq(0).all()
    assert step.staging_slots is not None and step.staging_slots[n:].eq(-1).all()
    moved = {slot: slot + 100 for slot in STAGING[: batch.due]}
    snapshots = dict(zip(buffers.copy_src.tolist(), buffers.copy_dst.tolist()))
    assert {slot: to for slot, to in snapshots.items() if to > 0} == moved
    assert torch.equal(step.copy_src, step.slots)
    assert step.copy_dst[:requests].tolist() == batch.rolling.tolist() and step.copy_dst[requests:].eq(0).all()


@settings(deadline=None)
@given(st.lists(batches(), min_size=1, max_size=3), st.data())
def test_recorded_metadata_equals_eager(found, data):
    """Batches that reuse the same buffers do not affect each other."""
    buffers = PrefillBuffers(TOKENS, REQUESTS, MAX_BLOCKS, STAGING, "cpu", limits=LIMITS)
    for batch in found:
        tokens = data.draw(st.integers(len(batch.out_loc), TOKENS))
        check(batch.recorded(buffers, tokens), batch.eager(), batch, buffers)


def test_every_short_step_has_a_graph() -> None:
    """SGLang replays a graph for a step of at least half its tokens."""
    assert SIZES[0] == 2 and all(larger <= 2 * size for size, larger in pairwise(SIZES))


def record_sizes(monkeypatch: pytest.MonkeyPatch, sizes: list[int] | None, backend: str = "breakable") -> None:
    config = SimpleNamespace(prefill=SimpleNamespace(backend=backend, bs=sizes))
    graph = SimpleNamespace(cuda_graph_config=config)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=graph))


@pytest.mark.parametrize(
    "backend, sizes, found", [("breakable", [4, 64, 8], [4, 8, 64]), ("breakable", None, []), ("disabled", [4], [])]
)
def test_recorded_sizes(
    monkeypatch: pytest.MonkeyPatch, backend: str, sizes: list[int] | None, found: list[int]
) -> None:
    record_sizes(monkeypatch, sizes, backend)
    assert recorded_sizes() == found


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize(
    ("tokens", "replayed", "asked"),
    [
        (None, True, None),
        (2, True, None),
        (1920, True, None),
        (1921, False, None),
        (6143, False, None),
        (6144, True, 8192),
        (8192, True, 8192),
    ],
)
def test_a_large_graph_is_replayed_with_little_padding(
    monkeypatch: pytest.MonkeyPatch, tokens: int | None, replayed: bool, asked: int | None, answer: bool
) -> None:
    """The recorder is asked for graphs of more than SIZES[-1] tokens only, and its answer counts."""
    record_sizes(monkeypatch, [*SIZES, 8192])
    assert least_tokens(SIZES[-1]) == SIZES[-1] // 2 and least_tokens(8192) == 6144
    seen: list[tuple[int, int, list[int]]] = []
    recorder = SimpleNamespace(requests=2, replays_large=lambda *step: seen.append(step) or answer)
    runner = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=SimpleNamespace(recorder=recorder)))
    step = {"batch_size": 2, "num_tokens": tokens, "prefix_lens": [3, 500]}
    assert fits(lambda _, **named: named == step, runner, **step) == (replayed and (asked is None or answer))
    assert seen == ([] if asked is None else [(asked, tokens, [3, 500])])
    assert not fits(lambda *_, **__: False, runner, **step), "SGLang's own limits stay"
    assert not fits(lambda *_, **__: True, runner, **step | {"batch_size": 3}), "requests without a row"
