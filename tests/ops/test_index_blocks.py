"""The selection in two levels of a CUDA device (`ops.cuda_index.index_topk_of_blocks`), with PyTorch in place of its
kernels. tests/gpu/test_candidates_cuda.py tests the kernels."""

import pytest
import torch
from support import index_steps
from support.candidate_cases import candidate_case, long_case

from dsv4_sglang.attention import cuda_ops
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.ops import cuda_index
from dsv4_sglang.planner.reserves import prefill_graph_bytes
from dsv4_sglang.srt.attention.layer_ops import make_scratch
from dsv4_sglang.srt.attention.prefill_graphs import SIZES
from dsv4_sglang.srt.attention.step_scratch import RECORDED_SCRATCH_BYTES, StepScratch

MILLION = 1 << 20


@pytest.fixture(autouse=True)
def _steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_index, "_OPS", index_steps)


@pytest.mark.parametrize("equal", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("slices, first", [(None, 77), (3, 77), (None, 45)], ids=["", "slices", "many"])
@pytest.mark.parametrize(
    "ratio, heads, top, most", [(1, 32, 24, 9), (1, 32, 24, 30), (2, 32, 64, 3), (2, 5, 16, 90), (1, 32, 1, 3)]
)
def test_selection(ratio, heads, top, most, slices, first, equal):
    """Entries and candidates equal the reference's, with fewer and more candidate blocks than selected entries."""
    case = candidate_case(lens=[(first, 82), (0, 3), (299, 300)], ratio=ratio, top=top, heads=heads, equal=equal)
    assert (len(case.positions) >= cuda_index.MANY_TOKENS) == (first == 45)
    case.check(cuda_ops.index_topk, 8, most, slices=slices)


def test_the_newest_block_takes_no_place_of_the_best(monkeypatch):
    """It is a candidate, whatever its scores. The entries of the best blocks are still selected."""
    case = candidate_case(lens=[(400, 420)], ratio=1, top=8)
    case.check(cuda_ops.index_topk, 8, 8)


def test_forms_without_a_kernel_are_rejected():
    case = candidate_case(lens=[(77, 82)], ratio=2, top=16)
    with pytest.raises(ValueError, match="candidate blocks of 4 entries; expected 8 on a CUDA device"):
        case.select(4, kept=case.candidates(3), op=cuda_ops.index_topk)
    case.ratio = 4
    with pytest.raises(ValueError, match="keys of ratio 4 in mxfp4 without the Hadamard transform; expected ratio 1"):
        case.select(8, op=cuda_ops.index_topk)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_million_positions(ratio):
    """The selection of sampled tokens of a context of 2^20 equals the reference's, with the scratch of a step."""
    case = long_case(context=MILLION, positions=[MILLION - 1, 700_003], ratio=ratio, top=512)
    if ratio == 1:
        case.check(cuda_ops.index_topk, 8, 2048)
    else:
        assert torch.equal(case.select(8), case.select(8, op=cuda_ops.index_topk))


def scratch_of_release() -> StepScratch:
    config = V41Config.flash()
    return make_scratch(v41_specs(config), "meta", torch.bfloat16, config.index_topk)


def test_scratch_of_long_contexts():
    """A token has a score for each 8 entries of the context, and at least for all entries of its candidate blocks. A
    recorded prefill step takes a part of what the planner reserves for its graphs."""
    scratch, million = scratch_of_release(), MILLION // 128
    assert scratch.score_width(million) == MILLION // 8
    for blocks in (2, 8, 128, 313):
        assert scratch.score_width(blocks) == (0 if blocks <= 4 else min(blocks * 128, 8 * 2048))
    scratch.reserve(SIZES[-1], 0, min(SIZES[-1] * scratch.score_width(million), RECORDED_SCRATCH_BYTES // 4))
    taken = {name: sum(x.numel() * x.element_size() for x in of) for name, of in scratch._reserved.items()}
    assert taken["scores"] <= RECORDED_SCRATCH_BYTES
    assert taken["candidates"] == SIZES[-1] * 2048 * 4
    assert sum(taken.values()) < prefill_graph_bytes(None) / 4
