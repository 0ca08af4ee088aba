"""V4.1's Triton attention kernels under Triton's interpreter, on the CPU."""

import pytest
import torch
from attention_cases import assert_attends
from v41_attention_cases import v41_attend_case, v41_index_case

from dsv4_sglang.attention import triton_attend_v41, triton_index_v41

# The interpreter truncates bf16 where hardware rounds.
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
def test_attend(q_dtype, splits):
    case = v41_attend_case(tokens=9, heads=5, width=72, q_dtype=q_dtype)
    assert_attends(triton_attend_v41.attend_v41(*case.v41_args(), splits=splits), case, BOUND[q_dtype])


@pytest.mark.parametrize("heads, width, per_block", [(20, None, 64), (33, 40, 128), (8, 40, 6)])
def test_attend_shapes(heads, width, per_block):
    case = v41_attend_case(tokens=3, heads=heads, width=width, per_block=per_block, seed=1)
    for splits in (1, 2):
        assert_attends(triton_attend_v41.attend_v41(*case.v41_args(), splits=splits), case, BOUND[torch.bfloat16])


def test_more_splits_than_tiles():
    case = v41_attend_case(tokens=4, heads=4, width=16, lens=[(3, 1), (0, 2), (0, 0), (128, 16)])
    assert_attends(triton_attend_v41.attend_v41(*case.v41_args(), splits=15), case, BOUND[torch.bfloat16])


@pytest.mark.parametrize("equal", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("ratio, heads, top, size, most", [(1, 32, 24, 8, 9), (2, 32, 64, 8, 3), (2, 5, 16, 3, 90)])
def test_selection(ratio, heads, top, size, most, equal, monkeypatch):
    """Entries and candidates equal the reference's, in slices of two tokens."""
    case = v41_index_case(lens=[(77, 82), (0, 3), (299, 300)], ratio=ratio, top=top, heads=heads, equal=equal)
    monkeypatch.setattr(triton_index_v41, "MAX_SCORES", 1000)
    expected, got = case.candidates(most), case.candidates(most)
    op = triton_index_v41.index_topk_v41
    assert torch.equal(case.select(size), case.select(size, op=op))
    assert torch.equal(case.select(size, kept=expected), case.select(size, kept=got, op=op))
    assert torch.equal(expected, got)
    assert torch.equal(case.select(size, within=expected), case.select(size, within=got, op=op))
