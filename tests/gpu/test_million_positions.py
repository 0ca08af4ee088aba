"""Selection and attention at the end of a context of a million tokens, against the reference on sampled queries."""

import dataclasses

import pytest
import torch
from support.attention_cases import (
    AttendCase,
    IndexCase,
    assert_attends,
    assert_selects,
    index_case,
    kv_buffer,
    rope,
)
from torch import Tensor

from dsv4_sglang.attention import triton_attend
from dsv4_sglang.attention.flashmla import FlashMLAAttention
from dsv4_sglang.attention.metadata import build_prefill
from dsv4_sglang.attention.sparse_prefill import SparsePrefillAttention
from dsv4_sglang.cache.step import StepMetadata, v4_limits
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM, make_kv_buffers
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import HCA_RATIO
from dsv4_sglang.ops import cuda_index

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
END, HEADS, TOP, BOUND = 1 << 20, 64, 512, 6e-3
# Tokens of the prefill step. With fewer, the sparse kernel does not gather the entries of a million tokens.
CHUNK = 2048
# The first and last tokens of the step, and tokens around the ends of entries and blocks.
SAMPLED = torch.tensor([0, 1, 3, 126, 127, 128, 1029, CHUNK - 2, CHUNK - 1])


def sample_index(case: IndexCase, at: Tensor) -> IndexCase:
    """Return the case with the tokens `at` only."""
    names = ("q", "weights", "token_request", "positions")
    return dataclasses.replace(case, **{name: getattr(case, name)[at] for name in names})


def select(case: IndexCase, slices: int | None = None) -> Tensor:
    args = case.args(CUDA, slices=slices)
    cuda_index.index_topk(*args)
    return args[-1].cpu()


@pytest.mark.parametrize("top", [512, 1024])
def test_selection_of_a_decode_step(top: int) -> None:
    """Requests of a million, half a million and few tokens. Scores are exact, so the rows are the reference's."""
    case = index_case(lens=[(END - 1, END), (END // 2, END // 2 + 1), (5000, 5001)], heads=HEADS, top=top)
    assert_selects(select(case), case, True)


def test_selection_among_equal_scores() -> None:
    """There are 262,144 keys with 40 different values. Among equal scores the lowest indices are selected."""
    case = index_case(lens=[(END - 3, END)], heads=HEADS, top=TOP, repeat_keys=40)
    assert_selects(select(case), case, True)


def test_selection_of_a_prefill_step() -> None:
    case = index_case(lens=[(END - CHUNK, END)], heads=HEADS, top=TOP)
    got = select(case, slices=1024)
    assert_selects(got[SAMPLED], sample_index(case, SAMPLED), True)


def prefill_case(ratio: int, end: int = END, chunk: int = CHUNK) -> tuple[StepMetadata, AttendCase]:
    """Return the last `chunk` tokens of a request of `end` tokens, and one layer's `attend`.

    The request's blocks are in random order. Each token of a CSA layer selects TOP random entries. Tokens of an HCA
    layer attend to all entries.
    """
    g = torch.Generator().manual_seed(ratio)
    blocks, positions = end // BLOCK, torch.arange(end - chunk, end)
    pages = torch.randperm(blocks, generator=g).int()
    step = build_prefill(
        req_pool_indices=torch.tensor([1]),
        prefix_lens=torch.tensor([end - chunk]),
        chunk_lens=torch.tensor([chunk]),
        positions=positions,
        out_loc=torch.zeros(chunk, dtype=torch.int64),
        req_to_token=torch.stack([torch.zeros(end), (pages[:, None] * BLOCK + torch.arange(BLOCK)).flatten()]).int(),
        state_slot_of_request=torch.arange(2),
        staging_slots=None,
        snapshot_lens=None,
        limits=v4_limits(TOP),
        max_length=end,
    )
    per_block = BLOCK // ratio
    if ratio == HCA_RATIO:
        entry_indices, entry_lens, entry_owner = step.hca_list()
    else:
        entry_lens, entry_owner = step.entry_lens[ratio], None
        entry = torch.randint(0, (end - chunk) // ratio, (chunk, TOP), generator=g)
        entry_indices = (pages[entry // per_block] * per_block + entry % per_block).int()
    case = AttendCase(
        q=torch.randn(chunk, HEADS, ENTRY_DIM, generator=g).bfloat16(),
        sink=torch.randn(HEADS, generator=g),
        window=kv_buffer(1, step.window_size, KVFormat.FP8, torch.arange(step.window_size), 1.0, g),
        window_indices=step.window_indices,
        window_lens=step.window_lens,
        entries=kv_buffer(blocks, per_block, KVFormat.FP8, torch.arange(blocks * per_block), 3.0, g),
        entry_indices=entry_indices,
        entry_lens=entry_lens,
        positions=positions,
        rope=rope(end),
        entry_owner=entry_owner,
        ratio=ratio,
    )
    return step, case


def sample(case: AttendCase, at: Tensor) -> AttendCase:
    """Return the case with the tokens `at` only."""
    names = ["q", "window_indices", "window_lens", "entry_lens", "positions"]
    names += ["entry_indices"] if case.entry_owner is None else ["entry_owner"]
    return dataclasses.replace(case, **{name: getattr(case, name)[at] for name in names})


@pytest.mark.parametrize("ratio", [4, HCA_RATIO])
def test_attention_of_a_prefill_step(ratio: int) -> None:
    if not SparsePrefillAttention.supports(CUDA, HEADS, torch.bfloat16, KVFormat.FP8):
        pytest.skip("FlashMLA does not run here")
    step, case = prefill_case(ratio)
    step = dataclasses.replace(step, **{k: v.to(CUDA) for k, v in vars(step).items() if isinstance(v, Tensor)})
    kernel = SparsePrefillAttention(END // BLOCK)
    assert kernel.begin_step(step, END // BLOCK)
    got = kernel.attend(*case.inputs(CUDA)).values
    assert_attends(got[SAMPLED.to(CUDA)], sample(case, SAMPLED), BOUND)


@pytest.mark.parametrize("kernel", ["flashmla", "triton"])
@pytest.mark.parametrize("ratio", [4, HCA_RATIO])
def test_attention_of_decode_kernels(ratio: int, kernel: str) -> None:
    """Decode steps and small prefill steps read the KV buffers in place."""
    if kernel == "flashmla" and not FlashMLAAttention.supports(CUDA, HEADS, torch.bfloat16, KVFormat.FP8):
        pytest.skip("FlashMLA does not run here")
    case = sample(prefill_case(ratio)[1], SAMPLED)
    q, inputs = case.inputs(CUDA)
    assert inputs.entries is not None
    # FlashMLA needs the strides of a cache, which are aligned.
    blocks, per_block, _ = inputs.entries.table.shape
    table = make_kv_buffers(1, blocks, per_block, KVFormat.FP8, CUDA)[0].copy_(inputs.entries.table)
    inputs = inputs._replace(entries=inputs.entries._replace(table=table))
    got = triton_attend.attend(q, inputs) if kernel == "triton" else FlashMLAAttention().attend(q, inputs).values
    assert_attends(got, case, BOUND)
