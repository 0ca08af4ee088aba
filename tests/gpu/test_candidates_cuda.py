"""`attend` of block-scaled entries and `index_topk` with candidates on CUDA against the reference, and in CUDA graphs.

tests/cache/test_v41_cache.py compares the reference with a dense computation, on the GPU too.
"""

from dataclasses import replace

import pytest
import torch
from support import index_steps
from support.attention_cases import BLOCK_SCALED, BLOCK_SCALED_FP32_BOUND, assert_attends, attend_case
from support.candidate_cases import CandidateCase, candidate_case, long_case
from support.kernel_cases import ops, recorded
from support.prepared_queries import of_halves, uses_images

from dsv4_sglang.attention import triton_attend
from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.ops import cuda_index
from dsv4_sglang.ops.reference import read

pytestmark = pytest.mark.gpu

BOUND = {torch.bfloat16: 6e-3, torch.float32: BLOCK_SCALED_FP32_BOUND}


@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, width", [(64, 512), (128, 72), (16, None), (5, 40)])
def test_attend(heads, width, q_dtype, splits):
    case = attend_case(tokens=11, heads=heads, width=width, q_dtype=q_dtype, per_block=128, **BLOCK_SCALED)
    out = triton_attend.attend(*case.inputs("cuda"), splits=splits)
    assert_attends(out, case, BOUND[q_dtype])


@pytest.mark.parametrize("equal", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("slices", [None, 50])
@pytest.mark.parametrize(
    "ratio, heads, top, most", [(1, 32, 512, 100), (1, 32, 64, 100), (2, 32, 64, 3), (2, 5, 16, 90), (1, 32, 1, 3)]
)
def test_selection(ratio, heads, top, most, slices, equal):
    """Chunks of several requests: short lists of all blocks, and more blocks than are listed."""
    case = candidate_case(lens=[(1977, 2100), (0, 3), (1299, 1300)], ratio=ratio, top=top, heads=heads, equal=equal)
    case.check(ops().index_topk, 8, most, "cuda", slices)


@pytest.mark.parametrize("tokens", [1, 4, 300], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_selection_of_the_release(ratio, tokens):
    """512 entries and 2,048 candidate blocks of contexts with more blocks."""
    lens = [(20_000 * ratio - tokens, 20_000 * ratio), (9000 - tokens, 9000), (700 - tokens, 700)]
    case = candidate_case(lens=lens[: 1 if tokens == 300 else 3], ratio=ratio, top=512)
    case.check(ops().index_topk, 8, 2048, "cuda")


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_million_positions(ratio):
    positions = [(1 << 20) - 1, 700_003, 511, 0]
    case = long_case(context=1 << 20, positions=positions, ratio=ratio, top=512)
    case.check(ops().index_topk, 8, 2048, "cuda")


@pytest.mark.parametrize("heads", [32, 24])
def test_query_of_any_scale(heads):
    """Without the Hadamard transform, scales of a head may be 2^31 apart, and outside the range of fp16."""
    g = torch.Generator().manual_seed(1)
    exponents = torch.randint(-15, 16, (50, heads, 4, 1), generator=g) + torch.randint(
        -60, 60, (50, heads, 1, 1), generator=g
    )
    q = torch.randn(50, heads, 4, 32, generator=g) * 2.0**exponents
    q = q.flatten(2).bfloat16()
    q[3] = 0
    case = candidate_case(lens=[(0, 50)], ratio=1, top=16)
    inputs = (x.cuda() for x in (q, torch.ones(50, heads), case.positions, case.rope))
    out, gains = cuda_index.prepare_query(*inputs, KeyFormat.MXFP4, hadamard=False)
    got = of_halves(out.cpu(), heads == 32 and uses_images()).double() * gains.cpu().double()[..., None]
    expected = read.index_query(q, case.positions, case.rope, KeyFormat.MXFP4, hadamard=False).double()
    assert torch.equal(got, expected)


# Tokens per request so that chunks of 32 tokens contain several requests, tokens without a neighbour of their request,
# and tokens with nothing to score. Contexts end inside a candidate block and at its end.
MIXED = [(3001, 3078), (897, 914), (0, 41), (1290, 1291), (1023, 1026), (2047, 2049), (127, 152)]
FEW_BLOCKS = 4  # selected


def block_scores(case: CandidateCase, newest: bool, at_once: int | None = None) -> torch.Tensor:
    """Return the best score of each block [T, blocks] as the GPU computes it for `at_once` tokens at a time. Scores
    that are not written are NaN."""
    q, weights, keys, table, owners, positions, angles = (x.cuda() for x in list(vars(case).values())[:7])
    query, weights = cuda_index.prepare_query(q, weights, positions, angles, KeyFormat.MXFP4, hadamard=False)
    columns = table.shape[1] * keys.shape[1] // 8
    scores = torch.full((len(q), columns + 3), float("nan"), device="cuda")[:, :columns]
    for part in torch.arange(len(q)).split(at_once or len(q)):
        part = slice(int(part[0]), int(part[-1]) + 1)
        cache = keys, table, owners[part], positions[part]
        ops().index_score_blocks(query[part], weights[part], *cache, case.ratio, FEW_BLOCKS, newest, scores[part])
    return scores.cpu()


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("heads", [32, 7])
@pytest.mark.parametrize("ratio", [1, 2])
def test_block_scores(ratio, heads, newest):
    case = candidate_case(lens=MIXED, ratio=ratio, top=16, heads=heads)
    got = block_scores(case, newest)
    expected = torch.full_like(got, float("nan"))
    for t, visible in enumerate(case.visible.tolist()):
        blocks = -(-visible // 8)
        if blocks > FEW_BLOCKS:
            padded = torch.full((8 * blocks,), float("-inf"), dtype=torch.float64)
            padded[:visible] = case.scores(t)
            expected[t, :blocks] = padded.view(-1, 8).amax(1)
            if newest:
                expected[t, blocks - 1] = float("inf")
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ratio", [1, 2])
def test_block_scores_do_not_depend_on_the_step(ratio):
    """Bit for bit: a prefill, the same again, one of fewer tokens, and steps of a few tokens."""
    case = candidate_case(lens=MIXED, ratio=ratio, top=16)
    case = replace(case, weights=torch.randn(case.weights.shape, generator=torch.Generator().manual_seed(5)))
    bits = block_scores(case, True).view(torch.int32)
    assert len(bits) >= 16 * len(MIXED), "counts as a prefill"
    for at_once in (None, 16 * len(MIXED) + 1, 7):
        assert torch.equal(block_scores(case, True, at_once).view(torch.int32), bits)


def scores_with_corners(width: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(width)
    scores = torch.randn(6, width, generator=g)
    scores[1] = torch.randint(-3, 3, (width,), generator=g)
    scores[2] = 0.0
    scores[3] = (scores[3] - 3).relu()
    scores[4, width // 2] = float("inf")
    scores[5] = torch.linspace(-1e30, 1e30, width)
    return scores


@pytest.mark.parametrize("width, top", [(40, 8), (4097, 100), (16384, 2048), (16385, 512), (132_096, 2048)])
@pytest.mark.parametrize("copies", [1, 60], ids=["few", "many"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_select_blocks(ratio, width, top, copies):
    """Few and many tokens use different kernels; long and short lists use different algorithms."""
    entries = 8 * torch.tensor([width, width, width - 1, width, width, top]) - torch.tensor([0, 3, 7, 5, 1, 0])
    scores, positions = (
        x.repeat(copies, *[1] * (x.dim() - 1)) for x in (scores_with_corners(width), entries * ratio - 1)
    )
    expected, got = torch.zeros(6, top).int(), torch.full((6 * copies, top), -7, dtype=torch.int32, device="cuda")
    index_steps.index_select_blocks(scores, positions[:6], ratio, expected)
    ops().index_select_blocks(scores.cuda(), positions.cuda(), ratio, got)
    assert torch.equal(got.cpu(), expected.repeat(copies, 1))


@pytest.mark.parametrize("listed, top", [(5, 8), (513, 100), (512, 512), (1024, 512), (2048, 512), (2500, 512)])
@pytest.mark.parametrize("copies", [1, 60], ids=["few", "many"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_select_listed(ratio, listed, top, copies):
    """Lists with and without the newest block, which may be a partial one, and shorter lists."""
    g = torch.Generator().manual_seed(listed)
    blocks = torch.tensor([3 * listed, 3 * listed, listed, listed // 2, 3 * listed - 1, 3 * listed])
    positions = (8 * blocks - torch.tensor([0, 3, 7, 5, 1, 6])) * ratio - 1
    lists = torch.full((6, listed), -1, dtype=torch.int32)
    for t, count in enumerate(blocks.tolist()):
        chosen = torch.randperm(count, generator=g)[:listed].sort().values
        if t in (1, 5):
            chosen[-1] = count - 1
        lists[t, : len(chosen)] = chosen.int()
    table = torch.randperm(2 * listed, generator=g).int().view(2, -1)
    inputs = scores_with_corners(8 * listed), torch.tensor([0, 1, 1, 0, 0, 1]).int(), positions, lists
    scores, owners, positions, lists = (x.repeat(copies, *[1] * (x.dim() - 1)) for x in inputs)
    expected, got = torch.zeros(6, top).int(), torch.full((6 * copies, top), -7, dtype=torch.int32, device="cuda")
    index_steps.index_select_listed(scores, table, owners[:6], positions[:6], ratio, lists[:6], expected)
    moved = (x.cuda() for x in (scores, table, owners, positions))
    ops().index_select_listed(*moved, ratio, lists.cuda(), got)
    assert torch.equal(got.cpu(), expected.repeat(copies, 1))


def test_in_a_graph():
    """Both ops, captured once and replayed with different contents of their tensors."""
    one, two = (attend_case(tokens=6, heads=64, width=72, seed=seed, **BLOCK_SCALED) for seed in (0, 1))
    case, other = (candidate_case(lens=[(300, 306)], ratio=1, top=24, seed=seed) for seed in (0, 1))
    args = one.args("cuda")
    rows, kept = (torch.zeros(6, n, dtype=torch.int32, device="cuda") for n in (24, 5))
    inputs = case.args(8, rows, kept)

    def run() -> torch.Tensor:
        ops().index_topk(*inputs, kept, None)
        ops().index_topk(*inputs, None, kept)
        return ops().attend(*args)

    graph, out = recorded(run, warm_up=True)
    for tensor, now in zip(args, two.args("cuda")):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(now)
    for tensor, now in zip(inputs[:7], other.args(8, rows, kept)):
        tensor.copy_(now)
    graph.replay()
    assert_attends(out, two, BOUND[torch.bfloat16])
    expected = other.candidates(5)
    other.select(8, kept=expected)
    assert torch.equal(kept.cpu(), expected)
    assert torch.equal(rows.cpu(), other.select(8, within=expected))
