"""Tests of the metadata of a step against its definitions, token by token (SPEC 4.3, 4.4)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_sglang.attention.metadata import build_decode, build_prefill, gather_decode
from dsv4_sglang.attention.step_buffers import DecodeBuffers
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.step import StepMetadata, v4_limits

BLOCK = 128
MAX_LENGTH = 1024
TOP_K = 64
LIMITS = v4_limits(TOP_K)


class Tables:
    """Tables of SGLang: requests in rows 1.. of req_to_token, each with its own pages, and state slots in any order."""

    def __init__(self, requests: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        per_request = MAX_LENGTH // BLOCK
        pages = 1 + torch.randperm(requests * per_request, generator=generator).view(requests, per_request)
        slots = (pages[:, :, None] * BLOCK + torch.arange(BLOCK)).view(requests, MAX_LENGTH)
        self.req_to_token = torch.zeros(requests + 1, MAX_LENGTH + 4, dtype=torch.int32)
        self.req_to_token[1:, :MAX_LENGTH] = slots
        self.state_slot = torch.zeros(requests + 1, dtype=torch.int32)
        self.state_slot[1:] = 1 + torch.randperm(requests, generator=generator)
        self.pages = pages
        self.req_to_token, self.state_slot = self.req_to_token.to(device), self.state_slot.to(device)


def check_blocks_and_entries(step: StepMetadata, token: int, request: int, t: int, tables: Tables) -> None:
    blocks = t // BLOCK + 1
    assert step.block_table[request, :blocks].tolist() == tables.pages[request, :blocks].tolist()
    assert step.entry_lens[4][token] == min((t + 1) // 4, TOP_K)
    assert step.entry_lens[BLOCK][token] == (t + 1) // BLOCK
    indices, _, owner = step.hca_list()
    listed = indices[token if owner is None else owner[token], : (t + 1) // BLOCK]
    assert listed.tolist() == tables.pages[request, : (t + 1) // BLOCK].tolist()
    assert step.out_loc[token] % BLOCK == t % BLOCK
    assert step.block_table.shape[1] % 64 == 0


def snapshot(buffers: DecodeBuffers, tables: Tables, requests: torch.Tensor, seq_lens: torch.Tensor) -> None:
    gather_decode(
        buffers,
        req_pool_indices=requests,
        seq_lens=seq_lens,
        req_to_token=tables.req_to_token,
        state_slot_of_request=tables.state_slot,
    )


def build(buffers: DecodeBuffers, requests: torch.Tensor, lens: torch.Tensor, out_loc: torch.Tensor) -> StepMetadata:
    """Build a decode step of one token per request, where snapshots are due at multiples of 256."""
    return build_decode(
        buffers,
        seq_lens=lens + 1,
        out_loc=out_loc,
        snapshot_mask=(lens + 1) % 256 == 0,
        snapshot_slots=100 + requests,
    )


def step_inputs(tables: Tables, lengths: list[int], padding: int, each: int) -> tuple[torch.Tensor, ...]:
    """Return requests, their lengths before the step, and the pool slots of `each` tokens per request. Padding
    follows."""
    requests = torch.tensor([*range(1, len(lengths) + 1), *[0] * padding])
    lens = torch.tensor(lengths + [0] * padding)
    return requests, lens, tables.req_to_token[requests[:, None], lens[:, None] + torch.arange(each)].flatten().long()


def check_decode(
    step: StepMetadata,
    tables: Tables,
    lengths: list[int],
    padding: int,
    ring_rows: int = 128,
    each: int = 1,
) -> None:
    """Check a step of `each` tokens per request. With one token, snapshots are due at multiples of 256."""
    assert step.is_decode and (step.copy_src is None) == (each > 1)
    assert step.query_start.tolist() == [each * b for b in range(len(lengths) + padding + 1)]
    for b, length in enumerate(lengths):
        slot = int(tables.state_slot[b + 1])
        assert (step.slots[b], step.prefix_lens[b]) == (slot, length)
        for token, t in enumerate(range(length, length + each), b * each):
            seen = min(t + 1, 128)
            assert (step.token_request[token], step.positions[token], step.window_lens[token]) == (b, t, seen)
            wanted = [slot * ring_rows + p % ring_rows for p in range(max(0, t - 127), t + 1)]
            assert step.window_indices[token, :seen].tolist() == wanted
            check_blocks_and_entries(step, token, b, t, tables)
        if each == 1:
            due = (length + 1) % 256 == 0
            assert (step.copy_src[b], step.copy_dst[b]) == ((slot, 101 + b) if due else (-1, -1))
    for b in range(len(lengths), len(lengths) + padding):
        tokens = slice(b * each, (b + 1) * each)
        assert step.slots[b] == -1 and (step.copy_src is None or step.copy_src[b] == -1)
        assert not any(lens[tokens].any() for lens in (step.window_lens, *step.entry_lens.values()))


LENGTHS = st.lists(st.integers(0, MAX_LENGTH - 1), min_size=1, max_size=6)


@given(lengths=LENGTHS, padding=st.integers(0, 3), ring_rows=st.sampled_from([128, 136]))
@settings(max_examples=60)
def test_decode(lengths: list[int], padding: int, ring_rows: int) -> None:
    tables = Tables(len(lengths), torch.device("cpu"))
    buffers = DecodeBuffers(len(lengths) + padding + 1, MAX_LENGTH // BLOCK, "cpu", ring_rows, limits=LIMITS)
    for at in (lengths[::-1], lengths):  # Nothing of an earlier step remains.
        requests, lens, out_loc = step_inputs(tables, at, padding, 1)
        snapshot(buffers, tables, requests, lens + 1)
        check_decode(build(buffers, requests, lens, out_loc), tables, at, padding, ring_rows)


def test_gather_keeps_ids_behind_a_length() -> None:
    """Ids behind a length and unused rows stay unchanged. Cases: padding, a length that fills the table, and one that
    ends with a block."""
    tables = Tables(3, torch.device("cpu"))
    buffers = DecodeBuffers(6, MAX_LENGTH // BLOCK, "cpu", limits=LIMITS)
    buffers.state_slots.fill_(-9)
    buffers.block_table.fill_(-9)
    requests, lens = torch.tensor([3, 1, 0, 2]), torch.tensor([1, BLOCK, 1, MAX_LENGTH])
    snapshot(buffers, tables, requests, lens)
    assert buffers.state_slots.tolist() == [*tables.state_slot[requests].tolist(), -9, -9]
    for row, (request, length) in enumerate(zip(requests.tolist(), lens.tolist())):
        blocks = -(-length // BLOCK)
        expected = tables.pages[request - 1, :blocks].tolist() if request else [0]
        assert buffers.block_table[row, :blocks].tolist() == expected
        assert (buffers.block_table[row, blocks:] == -9).all()
    assert (buffers.block_table[4:] == -9).all()


@given(lengths=LENGTHS, padding=st.integers(0, 2), each=st.integers(2, 8), before=st.sampled_from([0, -8]))
@settings(max_examples=60)
def test_several_tokens_a_request(lengths: list[int], padding: int, each: int, before: int) -> None:
    """A step that verifies drafts equals the decode steps of its positions, token by token."""
    n, ring_rows = len(lengths), 136
    lengths = [min(length, MAX_LENGTH - each) for length in lengths]
    tables = Tables(n, torch.device("cpu"))
    buffers = DecodeBuffers(n + padding + 1, MAX_LENGTH // BLOCK, "cpu", ring_rows, each, limits=LIMITS)
    requests, lens, out_loc = step_inputs(tables, lengths, padding, each)
    snapshot(buffers, tables, requests, lens + each)
    step = build_decode(
        buffers,
        seq_lens=lens - before,
        out_loc=out_loc,
        snapshot_mask=None,
        snapshot_slots=None,
        length_offset=before,
    )
    check_decode(step, tables, lengths, padding, ring_rows, each)


@given(lengths=LENGTHS, padding=st.integers(0, 2), each=st.integers(1, 8))
@settings(max_examples=60)
def test_block_of_drafts(lengths: list[int], padding: int, each: int) -> None:
    """Every token of a block sees the 128 tokens before it and the whole block, in the order of SGLang's list of
    pages."""
    from sglang.kernels.ops.speculative.dspark import dspark_attn_metadata as sglang

    n, ring_rows = len(lengths), 128 + each + 1
    lengths = [min(length, MAX_LENGTH - each) for length in lengths]
    tables = Tables(n, torch.device("cpu"))
    buffers = DecodeBuffers(n + padding + 1, 0, "cpu", ring_rows, each, sees_block=True, limits={})
    requests, lens, out_loc = step_inputs(tables, lengths, padding, each)
    snapshot(buffers, tables, requests, lens + each)
    step = build_decode(
        buffers, seq_lens=lens, out_loc=out_loc, snapshot_mask=None, snapshot_slots=None, length_offset=0
    )
    gather = sglang.compute_dspark_window_gather(
        seq_lens_casual=(lens[:, None] + 1 + torch.arange(each)).flatten(),
        req_pool_indices_repeated=requests.repeat_interleave(each),
        block_size=each,
        swa_window=128,
    )
    # Position ids replace the page slots, so the list contains positions.
    pages, page_lens = sglang.build_dspark_swa_page_indices(
        req_to_token=torch.arange(MAX_LENGTH + 128).expand(n + 1, -1),
        full_to_swa_mapping=torch.arange(MAX_LENGTH + 128),
        req_pool_indices_per_request=gather.req_pool_indices_per_request,
        offsets=gather.offsets,
        invalid=gather.invalid,
        out_loc=(lens[:, None] + torch.arange(each)).flatten(),
        context_lens=gather.context_lens,
        block_size=each,
        swa_window=128,
        page_index_aligned_size=64,
    )
    assert step.window_indices.shape == pages.shape
    for token in range(n * each):
        slot, count = int(tables.state_slot[token // each + 1]), int(page_lens[token])
        assert step.positions[token] == lengths[token // each] + token % each
        assert step.window_lens[token] == count
        wanted = slot * ring_rows + pages[token, :count] % ring_rows
        assert step.window_indices[token, :count].tolist() == wanted.tolist()
        assert len(set(wanted.tolist())) == count
    assert not step.window_lens[n * each :].any() and (step.slots[n:] == -1).all()


@pytest.mark.gpu
def test_decode_recorded_in_a_cuda_graph() -> None:
    """The graph is recorded once and replayed on other values of its static inputs, while the scheduler's tables
    already change."""
    device = resolve_device("cuda")
    tables = Tables(4, device)
    buffers = DecodeBuffers(6, MAX_LENGTH // BLOCK, device, limits=LIMITS)
    lens = torch.zeros(6, dtype=torch.int64, device=device)
    requests = torch.zeros(6, dtype=torch.int64, device=device)
    out_loc = torch.zeros(6, dtype=torch.int64, device=device)
    build(buffers, requests, lens, out_loc)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step = build(buffers, requests, lens, out_loc)
    for lengths in ([1000, 700, 255, 511], [3, 255], [127]):
        n = len(lengths)
        lens.zero_()[:n] = torch.tensor(lengths, device=device)
        requests.zero_()[:n] = torch.arange(1, n + 1, device=device)
        out_loc.copy_(tables.req_to_token[requests, lens])
        snapshot(buffers, tables, requests, lens + 1)
        saved = tables.state_slot.clone(), tables.req_to_token.clone()
        tables.state_slot.fill_(99)
        tables.req_to_token.fill_(99 * BLOCK)
        graph.replay()
        tables.state_slot.copy_(saved[0])
        tables.req_to_token.copy_(saved[1])
        check_decode(step, tables, lengths, 6 - n)


CHUNKS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 400)), min_size=1, max_size=4)


@given(chunks=CHUNKS, padding=st.sampled_from([0, 1, 3, 130]))
@settings(max_examples=40)
def test_prefill(chunks: list[tuple[int, int]], padding: int) -> None:
    n = len(chunks)
    tables = Tables(n, torch.device("cpu"))
    prefix, count = (torch.tensor(x) for x in zip(*chunks))
    real = torch.cat([torch.arange(p, p + c) for p, c in chunks])
    positions = torch.cat([real, real.new_zeros(padding)])
    owner = torch.repeat_interleave(torch.arange(n), count)
    # Snapshots are due at every other multiple of 128 whose block is in the chunk, at most two per request.
    due = [[e for e in range(256, p + c + 1, 256) if e - 128 >= p][:2] for p, c in chunks]
    snapshot_lens = torch.tensor([[*ends, 0, 0][:2] for ends in due])
    staging_slots = torch.where(snapshot_lens > 0, 200 + torch.arange(2 * n).view(n, 2), -1)
    step = build_prefill(
        req_pool_indices=torch.arange(1, n + 1),
        prefix_lens=prefix,
        chunk_lens=count,
        positions=positions,
        out_loc=torch.cat([tables.req_to_token[owner + 1, real].long(), positions.new_zeros(padding)]),
        req_to_token=tables.req_to_token,
        state_slot_of_request=tables.state_slot,
        staging_slots=staging_slots,
        snapshot_lens=snapshot_lens,
        limits=LIMITS,
        max_length=int((prefix + count).max()),
        padding=padding,
    )
    more = 1 if padding else 0
    assert not step.is_decode and step.hca_indices is None
    assert step.window_size == len(positions) + 128 * (n + more)
    assert step.slots.tolist() == tables.state_slot[1:].tolist() + [-1] * more
    assert step.prefix_lens.tolist() == prefix.tolist() + [0] * more
    assert step.staging_slots is not None
    start = step.query_start.tolist()
    assert start[-1] == len(positions)
    for seen in (step.window_lens, *step.entry_lens.values()):
        assert (seen[len(real) :] == 0).all(), "a padding token sees entries"
    assert (step.staging_slots[len(real) :] == -1).all() and (step.token_request[len(real) :] == n).all()
    for i, t in enumerate(real.tolist()):
        b = int(step.token_request[i])
        assert b == owner[i] and start[b] <= i < start[b + 1]
        seen = min(t + 1, 128)
        assert step.window_lens[i] == seen
        base = start[b] + 128 * b + 128 - chunks[b][0]
        assert step.window_indices[i, :seen].tolist() == [base + p for p in range(t - seen + 1, t + 1)]
        check_blocks_and_entries(step, i, b, t, tables)
        held = [200 + 2 * b + k for k, end in enumerate(due[b]) if end - 128 <= t < end]
        assert step.staging_slots[i] == (held[0] if held else -1)


def test_prefill_metadata_does_not_grow_with_context() -> None:
    """No tensor of the step has a column per block of the longest request for each token."""
    tokens, length = 1000, 1 << 20
    prefix, chunk = torch.tensor([0, length - 1]), torch.tensor([tokens - 1, 1])
    positions = torch.cat([torch.arange(tokens - 1), torch.tensor([length - 1])])
    req_to_token = torch.arange(length, dtype=torch.int32).expand(3, -1)
    step = build_prefill(
        req_pool_indices=torch.tensor([1, 2]),
        prefix_lens=prefix,
        chunk_lens=chunk,
        positions=positions,
        out_loc=positions,
        req_to_token=req_to_token,
        state_slot_of_request=torch.arange(3),
        staging_slots=None,
        snapshot_lens=None,
        limits=LIMITS,
        max_length=length,
    )
    shapes = {name: tuple(x.shape) for name, x in vars(step).items() if isinstance(x, torch.Tensor)}
    assert shapes.pop("window_indices") == (tokens, BLOCK) and shapes.pop("block_table") == (2, length // BLOCK)
    assert max(map(len, shapes.values())) == 1, shapes
    indices, lens, owner = step.hca_list()
    assert owner is not None and lens[[127, -1]].tolist() == [1, length // BLOCK]
    assert torch.equal(indices[owner[-1], : length // BLOCK], torch.arange(length // BLOCK))
