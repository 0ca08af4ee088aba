"""`attend` of block-scaled entries and `index_topk` with candidates on CUDA against the reference, and in CUDA graphs.

tests/cache/test_v41_cache.py compares the reference with a dense computation, on the GPU too.
"""

import pytest
import torch
from support.attention_cases import BLOCK_SCALED, assert_attends, attend_case
from support.candidate_cases import candidate_case
from support.kernel_cases import ops, recorded

import dsv4_sglang.attention.cuda_ops  # noqa: F401  registers the ops
from dsv4_sglang.attention import triton_attend, triton_index

pytestmark = pytest.mark.gpu

# fp32: logits are up to 125, sums of 512 products. Partial sums of about half of that round by 2^-25 of themselves, 512
# roundings add up to sqrt(512) of one: 4e-5, and a weight is off by as much. The reference is 1.2e-5 from fp64.
BOUND = {torch.bfloat16: 6e-3, torch.float32: 6e-5}


@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, width", [(64, 512), (128, 72), (16, None), (5, 40)])
def test_attend(heads, width, q_dtype, splits):
    case = attend_case(tokens=11, heads=heads, width=width, q_dtype=q_dtype, per_block=128, **BLOCK_SCALED)
    out = triton_attend.attend(*case.inputs("cuda"), splits=splits)
    assert_attends(out, case, BOUND[q_dtype])


@pytest.mark.parametrize("equal", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("ratio, heads, top, size, most", [(1, 32, 512, 8, 100), (2, 32, 64, 8, 3), (2, 5, 16, 3, 90)])
def test_selection(ratio, heads, top, size, most, equal, monkeypatch):
    case = candidate_case(lens=[(1977, 2100), (0, 3), (1299, 1300)], ratio=ratio, top=top, heads=heads, equal=equal)
    monkeypatch.setattr(triton_index, "MAX_SCORES", 100_000)
    case.check(ops().index_topk, size, most, "cuda")


def test_in_a_graph():
    """Both ops, captured once and replayed with different contents of their tensors."""
    one, two = (attend_case(tokens=6, heads=64, width=72, seed=seed, **BLOCK_SCALED) for seed in (0, 1))
    case, other = (candidate_case(lens=[(300, 306)], ratio=1, top=24, seed=seed) for seed in (0, 1))
    args = one.args("cuda")
    rows, kept = (torch.zeros(6, n, dtype=torch.int32, device="cuda") for n in (24, 5))
    inputs = case.args(8, rows)

    def run() -> torch.Tensor:
        ops().index_topk(*inputs, kept, None)
        ops().index_topk(*inputs, None, kept)
        return ops().attend(*args)

    graph, out = recorded(run, warm_up=True)
    for tensor, now in zip(args, two.args("cuda")):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(now)
    for tensor, now in zip(inputs[:7], other.args(8, rows)):
        tensor.copy_(now)
    graph.replay()
    assert_attends(out, two, BOUND[torch.bfloat16])
    expected = other.candidates(5)
    other.select(8, kept=expected)
    assert torch.equal(kept.cpu(), expected)
    assert torch.equal(rows.cpu(), other.select(8, within=expected))
