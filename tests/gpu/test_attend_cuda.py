"""`attend` on CUDA, through FlashMLA and in Triton, against the CPU op."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_cases import (
    BLOCK_SCALED,
    AttendCase,
    assert_attends,
    assert_quantised,
    attend_case,
    prefill_case,
    rope,
)
from support.kernel_cases import recorded

from dsv4_sglang.attention import flashmla, triton_attend, triton_output
from dsv4_sglang.attention.base import AttendInputs, AttentionKernel
from dsv4_sglang.attention.flashmla import FlashMLAAttention
from dsv4_sglang.attention.sparse_decode import SparseDecodeAttention
from dsv4_sglang.attention.sparse_prefill import SparsePrefillAttention
from dsv4_sglang.formats import KVFormat

pytestmark = pytest.mark.gpu
STEP = prefill_case(ratio=0, kv_format=KVFormat.FP8, heads=64)[0]
BOUND = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 2e-5}


def needs(kernel: type[AttentionKernel], case: AttendCase) -> None:
    if not kernel.supports(torch.device("cuda"), case.q.shape[1], case.q.dtype, case.kv_format):
        pytest.skip("FlashMLA does not run here")


def run(case: AttendCase, kernel: str) -> torch.Tensor:
    q, inputs = case.inputs("cuda")
    if kernel == "triton":
        return triton_attend.attend(q, inputs)
    needs(FlashMLAAttention, case)
    return FlashMLAAttention().attend(*flashmla.pad_heads(q, inputs)).values


CORNERS = itertools.product((1, 9, 40), (64, 128, 16, 72), (None, 64, 512, 1024, 200))
LENS = [[(0, 0)], [(1, 0)], [(128, 0)], [(128, 512)], [(127, 511)], [(0, 1)], [(64, 64), (0, 0), (128, 512)]]
# Arguments of `attend_case`; by default 9 tokens of 64 heads.
CASES: list[dict[str, Any]] = [
    *({"tokens": tokens, "heads": heads, "width": width, "seed": tokens} for tokens, heads, width in CORNERS),
    *({"width": 320, "per_block": rows, "seed": 2} for rows in (2, 32, 62, 64, 576, None)),
    *({"tokens": 6, "width": 512, "lens": lens, "seed": 3} for lens in LENS),
    {"tokens": 700, "width": 64, "seed": 4},
    # Tokens of a prefill step that share the list of their request.
    {"tokens": 700, "width": 320, "shared": 3, "seed": 4},
    # HCA at a million tokens: few tokens, thousands of entries.
    {"tokens": 2, "width": 8192, "lens": [(128, 8192), (128, 5000)], "per_block": None, "seed": 5},
    # Rings of requests with speculation: 128 entries plus those that may be rolled back.
    *(
        {"tokens": 40, "width": width, "ring_rows": rows, "seed": 10}
        for rows, width in itertools.product((130, 132, 134, 136, 138, 300), (None, 512))
    ),
]


@pytest.mark.parametrize("kernel", ["flashmla", "triton"])
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_attend(kernel, fields):
    case = attend_case(**{"tokens": 9, "heads": 64, **fields})
    assert_attends(run(case, kernel), case, BOUND[torch.bfloat16])


@pytest.mark.parametrize("heads", [64, 5])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_format", [KVFormat.FP8, KVFormat.BF16, KVFormat.FP32])
def test_triton_formats(kv_format, q_dtype, heads):
    for width in (None, 100):
        case = attend_case(tokens=12, heads=heads, width=width, kv_format=kv_format, q_dtype=q_dtype, seed=6)
        assert_attends(run(case, "triton"), case, BOUND[q_dtype])


@pytest.mark.parametrize("splits", [1, 2, 5, 20])
def test_triton_splits(splits):
    case = attend_case(tokens=9, heads=64, width=700, seed=7)
    out = triton_attend.attend(*case.inputs("cuda"), splits=splits)
    assert_attends(out, case, BOUND[torch.bfloat16])
    assert torch.equal(out, triton_attend.attend(*case.inputs("cuda"), splits=splits)), "two runs differ"


@pytest.mark.parametrize("kv_format", [KVFormat.FP8, KVFormat.BF16])
@pytest.mark.parametrize("width", [None, 512])
def test_strided_queries_and_tables(width, kv_format):
    """Queries that are a slice of a larger projection, and tables that are one layer of a tensor of all layers. The op
    runs FlashMLA for FP8, if it is installed, and Triton for bf16."""
    case = attend_case(tokens=9, heads=64, width=width, kv_format=kv_format, seed=8)
    args = list(case.args("cuda"))
    wide = torch.full((9, 80, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 8:72] = args[0]
    layers = torch.stack([torch.empty_like(args[2]), args[2]])
    args[0], args[2] = wide[:, 8:72], layers[1]
    assert_attends(triton_attend.attend(args[0], AttendInputs.from_op(*args[1:])), case, BOUND[torch.bfloat16])
    assert_attends(torch.ops.dsv4_sglang.attend(*args), case, BOUND[torch.bfloat16])


def test_flashmla_slices_of_a_long_prefill(monkeypatch):
    case = attend_case(tokens=100, heads=64, width=128, seed=9)
    monkeypatch.setattr(flashmla, "_HEADS_AT_ONCE", 64 * 17)
    assert_attends(run(case, "flashmla"), case, BOUND[torch.bfloat16])


@pytest.mark.parametrize(
    ("formats", "ratio"),
    [
        *(({"kv_format": kv_format}, ratio) for kv_format in (KVFormat.FP8, KVFormat.BF16) for ratio in (0, 4, 128)),
        *((BLOCK_SCALED, ratio) for ratio in (0, 1, 2)),
    ],
)
@pytest.mark.parametrize("heads", [64, 128, 16])
def test_sparse_prefill(formats, ratio, heads):
    step, blocks, case = prefill_case(ratio=ratio, heads=heads, **formats)
    needs(SparsePrefillAttention, case)
    q, inputs = case.inputs("cuda")
    step = dataclasses.replace(step, **{k: v.cuda() for k, v in vars(step).items() if isinstance(v, torch.Tensor)})
    kernel = SparsePrefillAttention(8, 128)
    assert kernel.begin_step(step, blocks)
    for _ in range(2):
        assert_attends(kernel.attend(*flashmla.pad_heads(q, inputs)).values, case, BOUND[torch.bfloat16])


@pytest.mark.parametrize("tokens, heads, width", [(1, 64, 512), (77, 128, 512), (40, 16, 512)])
def test_sparse_decode(tokens, heads, width):
    """A layer that selects, one with a window only, and one that reuses the selection, recorded in a CUDA graph."""
    case = attend_case(tokens=tokens, heads=heads, width=width, per_block=128, **BLOCK_SCALED)
    needs(SparseDecodeAttention, case)
    q, inputs = flashmla.pad_heads(*case.inputs("cuda"))
    step = SimpleNamespace(window_indices=inputs.window.indices, positions=inputs.positions, is_decode=True)
    kernel = SparseDecodeAttention(width)

    def layers() -> list[torch.Tensor]:
        assert kernel.begin_step(step, None)
        selects, alone = inputs._replace(selects=True), inputs._replace(entries=None)
        return [kernel.attend(q, each).values for each in (selects, alone, inputs)]

    graph, outs = recorded(layers, warm_up=True)
    for out in outs:
        out.fill_(float("nan"))
    graph.replay()
    alone = dataclasses.replace(case, entries=None, entry_indices=None, entry_lens=None)
    for out, of in zip(outs, (case, alone, case)):
        assert_attends(out, of, BOUND[torch.bfloat16])


@pytest.mark.parametrize("of", [0, 128])
@pytest.mark.parametrize("tokens, heads", [(1, 64), (300, 64), (5, 128), (40, 16)])
def test_inverse_rope_and_quantise(tokens, heads, of):
    """The codes must be those of SGLang's quantisation after a separate inverse RoPE, except for the rounding of ties.

    The kernel takes all heads of the attention output, or the first of `of` heads.
    """
    g = torch.Generator().manual_seed(tokens)
    written = torch.randn(tokens, max(heads, of), 512, generator=g).bfloat16().cuda()
    out = written[:, :heads]
    positions, table = torch.randint(0, 4096, (tokens,), generator=g).cuda(), rope().cuda()
    codes, scales = triton_output.inverse_rope_and_quantise(out, positions, table)
    whole = written.clone()
    inverse_rotated = whole[:, :heads]
    triton_output.inverse_rope(inverse_rotated, positions, table)
    alone = out.contiguous()
    triton_output.inverse_rope(alone, positions, table)
    assert torch.equal(inverse_rotated, alone) and torch.equal(whole[:, heads:], written[:, heads:])
    assert codes.is_contiguous() and scales.is_contiguous()
    assert_quantised(codes, scales, inverse_rotated, 1e-3)


@pytest.mark.parametrize("heads", [64, 128])
def test_attention_through_our_schedules(heads):
    """`scheduler_config` compares them with FlashMLA's, number for number."""
    needs(FlashMLAAttention, attend_case(tokens=1, heads=heads, width=None))
    config = flashmla.scheduler_config(torch.device("cuda"), heads)
    assert config is not None, "the installed FlashMLA schedules its work differently from flashmla_scheduler"
    lens = [(128, 8192), (3, 1)]
    steps = (1, None, None), (2, 512, None), (131, 512, [(128, 512)]), (1024, 64, None), (4, 8192, lens)
    for tokens, width, of in steps:
        case = attend_case(tokens=tokens, heads=heads, width=width, lens=of, per_block=None)
        assert_attends(FlashMLAAttention(config).attend(*case.inputs("cuda")).values, case, BOUND[torch.bfloat16])


def test_another_flashmla_makes_its_own_schedules(monkeypatch, caplog):
    """If it divides its work differently, which is detected at server start."""
    device, heads = torch.device("cuda"), 64
    needs(FlashMLAAttention, attend_case(tokens=1, heads=heads, width=None))
    known = flashmla._known_config(device, heads)
    other = known._replace(fixed_overhead=known.fixed_overhead + 1)
    monkeypatch.setattr(flashmla, "_known_config", lambda *_: other)
    assert flashmla.scheduler_config.__wrapped__(device, heads) is None
    assert "it makes its schedules itself" in caplog.text


def step_cases(seed: int, tokens: int = 9) -> list[AttendCase]:
    """Return two CSA layers, one HCA layer and one layer without entries."""
    g = torch.Generator().manual_seed(seed)
    corner = [(0, 0), (128, 512), (128, 0), (1, 0), (128, 512)]
    lens = [
        *corner,
        *((int(torch.randint(1, 129, (), generator=g)), int(torch.randint(0, 513, (), generator=g))) for _ in range(4)),
    ]
    lens = [lens[i] for i in torch.randperm(len(lens), generator=g)]
    csa = [attend_case(tokens=tokens, heads=64, width=512, lens=lens, seed=seed + i) for i in range(2)]
    hca = attend_case(
        tokens=tokens, heads=64, width=200, lens=[(a, b // 4) for a, b in lens], per_block=None, seed=seed + 2
    )
    swa = attend_case(tokens=tokens, heads=64, width=None, lens=lens, seed=seed + 3)
    return [*csa, hca, swa]


@pytest.mark.parametrize("kind", ["flashmla", "triton"])
def test_cuda_graph_with_other_lengths(kind):
    """Captured with one step's lengths, replayed with others. FlashMLA's schedule is rebuilt at each replay."""
    cases = step_cases(100)
    layers = [list(case.args("cuda")) for case in cases]
    for args in layers[1:]:  # layers of a kind share their lengths, as they do in serving
        args[4] = layers[0][4]
    layers[1][7] = layers[0][7]
    kernel = None
    if kind == "flashmla":
        needs(FlashMLAAttention, cases[0])
        kernel = FlashMLAAttention(flashmla.scheduler_config(torch.device("cuda"), 64))

    def step() -> list[torch.Tensor]:
        inputs = [(args[0], AttendInputs.from_op(*args[1:])) for args in layers]
        if kernel is None:
            return [triton_attend.attend(*layer) for layer in inputs]
        # The schedules depend only on the lengths of the lists, so the metadata of any step will do.
        kernel.begin_step(STEP, None)
        return [kernel.attend(*layer).values for layer in inputs]

    graph, outputs = recorded(step, warm_up=True)
    if kernel is not None:
        assert len(kernel._schedules) == 3, f"{len(kernel._schedules)} schedules for CSA, HCA and SWA"
    for seed in (200, 300, 100):
        cases = step_cases(seed)
        for args, case in zip(layers, cases):
            for to, value in zip(args, vars(case).values()):
                if isinstance(to, torch.Tensor):
                    to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        for out, case in zip(outputs, cases, strict=True):
            assert_attends(out, case, BOUND[torch.bfloat16])
