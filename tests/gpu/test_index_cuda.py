"""`index_topk` on CUDA against the CPU op, and its parts."""

from dataclasses import replace

import pytest
import torch
from support.attention_cases import IndexCase, assert_selects, index_case
from support.kernel_cases import ops, recorded
from support.prepared_queries import of_halves, of_image, uses_images

from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.ops import cuda_index
from dsv4_sglang.ops.reference import read

pytestmark = pytest.mark.gpu


def decode(*visible: int) -> list[tuple[int, int]]:
    """Return requests of one token each that see the given numbers of entries."""
    return [(4 * n + 1, 4 * n + 2) for n in visible]


def prepared_query(q: torch.Tensor, case: IndexCase, key_format: KeyFormat) -> torch.Tensor:
    """Return the queries as the GPU prepares them, in the order of their channels, fp32 on the CPU."""
    ones = torch.ones(q.shape[:2], device="cuda")
    prepared, gains = cuda_index.prepare_query(q.cuda(), ones, case.positions.cuda(), case.rope.cuda(), key_format)
    prepared, gains = prepared.cpu(), gains.cpu()
    images = key_format.is_fp4 and q.shape[1] == 64 and uses_images()
    if images and key_format is KeyFormat.MXFP4:
        numbers = prepared.flatten(1).view(torch.float8_e4m3fn)[:, : 64 * 128].float()
        return of_image(numbers.view(-1, 1, 64, 8, 4, 4)) * gains.unsqueeze(-1)
    assert (gains == 1).all()
    return (of_halves(prepared, images) if key_format.is_fp4 else prepared).float()


def check(case: IndexCase, exact: bool, **options) -> None:
    args = case.args("cuda", **options)
    cuda_index.index_topk(*args)
    assert_selects(args[-1], case, exact, prepared_query(case.q, case, case.key_format))


@pytest.mark.parametrize("heads", [64, 32, 4, 20])
@pytest.mark.parametrize("top", [512, 1024, 16])
def test_decode(heads, top):
    check(
        index_case(lens=decode(0, 1, top - 1, top, top + 1, top + 127, top + 128, 2 * top + 33), heads=heads, top=top),
        True,
    )


@pytest.mark.parametrize("heads", [64, 8])
def test_prefill(heads):
    """Chunks of several requests, so that groups of tokens contain the end of one and the start of another."""
    lens = [(0, 37), (2000, 2121), (60, 61), (4095, 4099), (70, 75)]
    check(index_case(lens=lens, heads=heads, top=16), True)
    check(index_case(lens=lens, heads=heads, top=512), True, slices=50)


def test_long_prefill():
    """More keys than a block processes at once, tokens that see few of them, requests that end within a group."""
    check(index_case(lens=[(3000, 3150), (0, 70), (12000, 12040), (6, 7)], heads=64, top=100), True)


def test_long_decode():
    """More scores than one program selects from, and a scratch wider than the visible part, as in a captured graph."""
    case = index_case(lens=decode(40000, 17000, 100, 16385, 16384), heads=64, top=512)
    check(case, True)
    check(case, True, width=262144)


@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4])
@pytest.mark.parametrize("each", [2, 3, 4, 5, 8, 15, 16])
def test_verify_steps(each, key_format):
    """Tokens that share the keys of their request, some of which see no entry or one entry more than the others.

    The kernel shares keys only with enough requests, so two requests are tested too.
    """
    lens = [(n, n + each) for n in (3000, 8190, 130, 60, 2047, 60 * 4, 12001) for n in (n, n + 1, n + 2)]
    check(index_case(lens=lens[-2:], heads=64, top=60, key_format=key_format), key_format is KeyFormat.MXFP4)
    check(index_case(lens=lens, heads=64, top=60, key_format=key_format), key_format is KeyFormat.MXFP4)


def test_a_few_tokens_of_each():
    """Different numbers of tokens per request, so that a group that shares keys is not always a whole request."""
    lens = [(3000, 3003), (900, 901), (2043, 2054), (7, 9), (1500, 1504)]
    check(index_case(lens=lens * 4, heads=64, top=16), True)
    check(index_case(lens=[(5000 + 40 * i, 5004 + 40 * i) for i in range(256)], heads=64, top=512), True)


@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4])
def test_scores_do_not_depend_on_the_step(key_format):
    """Bit for bit: a verify step and steps of one token."""
    lens = [(3000, 3004), (8189, 8193), (5000, 5004), *((900 + i, 904 + i) for i in range(13))]
    case = index_case(lens=lens, heads=64, top=8, key_format=key_format, weights="random")
    args = case.args("cuda")
    cuda_index.index_topk(*args)
    for tokens in (list(range(k, len(case.positions), 4)) for k in range(4)):
        one = replace(
            case,
            q=case.q[tokens],
            weights=case.weights[tokens],
            token_request=case.token_request[tokens],
            positions=case.positions[tokens],
        )
        other = one.args("cuda")
        cuda_index.index_topk(*other)
        for row, token in enumerate(tokens):
            n = int(case.visible[token])
            assert torch.equal(other[-2][row, :n], args[-2][token, :n])


@pytest.mark.parametrize("weights, repeat", [("negative", 0), ("exact", 5), ("negative", 1), ("exact", 600)])
def test_ties_and_signs(weights, repeat):
    case = index_case(lens=decode(3000, 513, 700), heads=16, top=512, weights=weights, repeat_keys=repeat)
    check(case, True)
    check(index_case(lens=[(2000, 2040)], heads=16, top=64, weights=weights, repeat_keys=repeat), True)


@pytest.mark.parametrize("lens", [decode(700, 64, 65), [(300, 340), (9, 12)]], ids=["decode", "prefill"])
def test_fp32_keys(lens):
    check(
        index_case(lens=lens, heads=8, top=64, q_dtype=torch.float32, key_format=KeyFormat.FP32, weights="random"),
        False,
    )


def test_nothing_to_score():
    case = index_case(lens=[*decode(0, 7, 512), (20, 60)], heads=64, top=512)
    args = list(case.args("cuda"))
    args[-2] = torch.empty(0, device="cuda")
    cuda_index.index_topk(*args)
    assert_selects(args[-1], case, True)


@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4])
def test_query(key_format):
    """Hadamard sums have a different order than the reference, so values at a rounding border may fall to either
    side."""
    g = torch.Generator().manual_seed(1)
    q = (torch.randn(50, 64, 128, generator=g) * 10 ** torch.empty(50, 64, 1).uniform_(-5, 3, generator=g)).bfloat16()
    q[3] = 0
    case = index_case(lens=[(0, 50)], heads=64, top=16)
    got = prepared_query(q, case, key_format)
    expected = read.index_query(q, case.positions, case.rope, key_format)
    differs = got != expected
    assert differs.float().mean() < 2e-3, f"{int(differs.sum())} of {differs.numel()} differ"
    assert ((got - expected).abs() <= 0.5 * expected.abs() + 0.5 * expected.abs().amax(-1, keepdim=True) / 6).all()


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4])
def test_query_in_each_form(key_format, q_dtype):
    """The image of 64 heads has the same numbers, bit for bit, as other numbers of heads, which are not images. These
    include parts of a warp's heads."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(33, 64, 128, generator=g) * 2.0 ** torch.randint(-8, 9, (33, 64, 1), generator=g)
    q[1] = torch.eye(128)[:64] * torch.linspace(-300, 300, 64)[:, None]  # magnitudes of a block are equal
    q[2, ::2] = 0.0
    q[3, 1::2] = -0.0
    case = index_case(lens=[(0, 33)], heads=64, top=16)
    expected = prepared_query(q.to(q_dtype), case, key_format)
    assert len(expected.unique()) > 50
    for heads in (63, 21, 4, 1):
        got = torch.cat([prepared_query(x, case, key_format) for x in q.to(q_dtype).split(heads, 1)], 1)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("lens", [decode(3000, 600, 129), [(900, 950), (40, 44)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
def test_scores(lens, key_format, q_dtype):
    case = index_case(lens=lens, heads=64, top=8, key_format=key_format, q_dtype=q_dtype, weights="random")
    args = case.args("cuda")
    cuda_index.index_topk(*args)
    got, query = args[-2].cpu().double(), prepared_query(case.q, case, case.key_format)
    for t in range(len(case.positions)):
        n = int(case.visible[t])
        expected = case.scores(t, query)
        error = (got[t, :n] - expected).abs() / expected.abs().max()
        assert error.max() < 1e-5, f"token {t}, visible {n}: error {error.max():.3g} at entry {int(error.argmax())}"
        assert got[t, n:].isnan().all(), f"token {t}: wrote after the {n} visible entries"


@pytest.mark.parametrize(
    "width, top",
    [
        (40, 8),
        (4097, 1),
        (8190, 512),
        (8192, 1024),
        (12001, 1024),
        (16384, 512),
        (16385, 512),
        (20001, 2048),
        (40000, 2048),
        (60000, 512),
        (65536, 1024),
        (131072, 512),
        (200001, 512),
        (262144, 1024),
        (300000, 1024),
    ],
)
@pytest.mark.parametrize(
    "copies, at_once",
    [(1, 1), (1, 15), (4, 60), (17, 255), (40, 600)],
    ids=["one", "few", "cluster of two", "two per SM", "many"],
)
def test_select(width, top, copies, at_once):
    """Other numbers of tokens use other kernels; long and short lists use different algorithms."""
    g = torch.Generator().manual_seed(width)
    scores = torch.randn(15, width, generator=g)
    scores[1] = torch.randint(-3, 3, (width,), generator=g)
    scores[2] = 0.0
    scores[3] = torch.where(torch.rand(width, generator=g) < 0.5, 0.0, -0.0)
    scores[4] = -scores[4].abs() * 1e-30
    scores[5] = torch.linspace(-1e30, 1e30, width)
    # More close but unequal scores than a bin should hold, and more equal scores than are compared in pairs.
    scores[6] = 1 + 2e-7 * torch.randint(0, 1000, (width,), generator=g)
    scores[6, : width // 8] = 1e20
    scores[8] *= 2e38  # infinite scores, and a range that overflows
    scores[9] = (scores[9] - 3).relu()  # fewer scores than are selected differ from the smallest
    scores[10] = (4 * scores[10]).exp()  # a few scores are far above the others
    scores[11] = scores[11].sort(descending=True).values
    scores[12] = scores[12].round(decimals=2)  # ties at the last selected score
    # Too few or too many scores reach a threshold from every eighth run of 128.
    in_sample = torch.arange(width) // 128 % 8 == 0
    scores[13, in_sample] += 10
    scores[14, ~in_sample] += 10
    visible = torch.tensor(
        [width, width, width, width, width, width - 1, width // 2, top, width, width, width, width - 3, *[width] * 3]
    )
    cases = len(visible)
    table = torch.arange(-(-width // 32)).int().expand(cases, -1).contiguous()
    rows = torch.full((cases * copies, top), -7, dtype=torch.int32, device="cuda")
    owners, positions = torch.arange(cases).int().repeat(copies), (visible * 4 + 2).repeat(copies)
    scores_of_all, table, owners, positions = (t.cuda() for t in (scores.repeat(copies, 1), table, owners, positions))
    for part in (slice(i, i + at_once) for i in range(0, len(rows), at_once)):
        ops().index_select(scores_of_all[part], table, owners[part], positions[part], rows[part])
    rows = rows.cpu()
    assert torch.equal(rows, rows[:cases].repeat(copies, 1)), "equal tokens have different rows"
    for t, n in enumerate(visible.tolist()):
        expected = torch.sort(scores[t, :n], descending=True, stable=True).indices[:top].sort().values
        assert torch.equal(rows[t, : len(expected)].long(), expected), f"token {t}, visible {n}"
        assert (rows[t, len(expected) :] == -1).all()


def test_cuda_graph_with_other_lengths():
    """Captured for a context of 8192 tokens, replayed on others, with padding requests at position 0."""
    heads, top, requests = 64, 64, 5
    visible = [(2000, 64, 65, 0, 1), (3, 900, 64, 1999, 700), (1024, 1025, 2047, 128, 0)]
    cases = [index_case(lens=decode(*v), heads=heads, top=top, seed=i) for i, v in enumerate(visible)]
    blocks = max(c.index_keys.shape[0] for c in cases)
    static = {
        "q": torch.zeros(requests, heads, 128, dtype=torch.bfloat16, device="cuda"),
        "weights": torch.zeros(requests, heads, device="cuda"),
        "index_keys": torch.full((blocks, 32, 72), 0x7F, dtype=torch.uint8, device="cuda"),
        "block_table": torch.zeros(requests, 66, dtype=torch.int32, device="cuda"),
        "token_request": torch.arange(requests, dtype=torch.int32, device="cuda"),
        "positions": torch.zeros(requests, dtype=torch.int64, device="cuda"),
    }
    scores = torch.empty(requests, 66 * 32, device="cuda")
    rows = torch.empty(requests, top, dtype=torch.int32, device="cuda")
    table = cases[0].rope.new_zeros(8200, 64)
    table[:] = index_case(lens=[(8199, 8200)], heads=1, top=1).rope
    table = table.cuda()

    def call() -> None:
        cuda_index.index_topk(*static.values(), table, KeyFormat.MXFP4.code, scores, rows)

    graph, _ = recorded(call, warm_up=True)
    for case in (*cases, cases[0]):
        for name, to in static.items():
            value = getattr(case, name)
            to[tuple(slice(n) for n in value.shape)].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert_selects(rows, case, True, prepared_query(case.q, case, case.key_format))
        first = rows.clone()
        graph.replay()
        assert torch.equal(first, rows), "two replays differ"
