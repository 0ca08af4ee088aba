"""The Triton attention kernels under Triton's interpreter, on the CPU."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import (
    BLOCK_SCALED,
    BLOCK_SCALED_FP32_BOUND,
    AttendCase,
    assert_attends,
    assert_quantised,
    attend_case,
    prefill_case,
    rope,
)

from dsv4_sglang.attention import (
    flashmla_scheduler,
    metadata,
    sparse_decode,
    sparse_prefill,
    triton_attend,
    triton_metadata,
    triton_output,
)
from dsv4_sglang.attention.base import AttendInputs
from dsv4_sglang.cache.step import v4_limits
from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.ops.reference import read
from dsv4_sglang.srt.models import triton_latent, triton_query

# The interpreter truncates bf16 where hardware rounds.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


# Most entries that a token reads: of V4, of V4.1, and of a draft model, whose layers read none.
LIMITS = (v4_limits(64), {2: 64, 1: 64}, {})


def attended(case: AttendCase, splits: int) -> torch.Tensor:
    return triton_attend.attend(*case.inputs(), splits=splits)


def check(splits: int, q_dtype: torch.dtype = torch.bfloat16, **shape) -> None:
    case = attend_case(q_dtype=q_dtype, **shape)
    block_scaled_fp32 = q_dtype == torch.float32 and case.kv_format == KVFormat.MXFP8
    bound = BLOCK_SCALED_FP32_BOUND if block_scaled_fp32 else BOUND[q_dtype]
    assert_attends(attended(case, splits), case, bound)


@pytest.mark.full
@pytest.mark.parametrize(
    ("formats", "q_dtype", "splits"),
    [
        ({"kv_format": KVFormat.FP8}, torch.bfloat16, 1),
        ({"kv_format": KVFormat.FP8}, torch.bfloat16, 3),
        ({"kv_format": KVFormat.FP8}, torch.float16, 3),
        ({"kv_format": KVFormat.FP8}, torch.float32, 1),
        ({"kv_format": KVFormat.BF16}, torch.bfloat16, 3),
        ({"kv_format": KVFormat.BF16}, torch.float16, 1),
        ({"kv_format": KVFormat.FP32}, torch.float32, 3),
        (BLOCK_SCALED, torch.bfloat16, 3),
        (BLOCK_SCALED, torch.float32, 1),
    ],
)
def test_attend(formats, q_dtype, splits):
    check(splits, q_dtype, tokens=9, heads=5, width=72, **formats)


@pytest.mark.full
@pytest.mark.parametrize("formats", [{}, BLOCK_SCALED], ids=["fp8", "block-scaled"])
@pytest.mark.parametrize(
    "splits, shape",
    [
        (1, {"tokens": 3, "heads": 20, "width": None}),
        (2, {"tokens": 3, "heads": 33, "width": 40, "per_block": None}),
        (1, {"tokens": 3, "heads": 8, "width": 40, "per_block": 6}),
        (15, {"tokens": 4, "heads": 4, "width": 16, "lens": [(3, 1), (0, 2), (0, 0), (128, 16)]}),
    ],
    ids=["no entries", "one block", "blocks of 6", "more splits than tiles"],
)
def test_attend_shapes(formats, splits, shape):
    check(splits, **formats, **shape)


@pytest.mark.parametrize("formats", [{}, BLOCK_SCALED], ids=["fp8", "block-scaled"])
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.full), 3])
def test_attend_to_lists_that_tokens_share(splits, formats):
    """The output equals, bit for bit, that with a copy of the list for each token."""
    case = attend_case(tokens=9, heads=5, width=72, shared=2, **formats)
    out = attended(case, splits)
    assert_attends(out, case, BOUND[torch.bfloat16])
    case.entry_indices, case.entry_owner = case.entry_indices[case.entry_owner], None
    assert torch.equal(out, attended(case, splits))


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last dimension has gaps."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def _shifted(table: torch.Tensor) -> torch.Tensor:
    """Return a copy of a buffer that is not aligned to 16 bytes."""
    storage = torch.zeros(table.numel() + 1, dtype=table.dtype)
    return storage[1:].view(table.shape).copy_(table)


def _spread(table: torch.Tensor) -> torch.Tensor:
    """Return a copy of a buffer whose blocks are not at multiples of 16 bytes."""
    blocks, size = table.shape[0], table[0].numel()
    return torch.zeros(blocks, size + 8, dtype=table.dtype)[:, :size].unflatten(1, table.shape[1:])


# Changes of tensors that the kernels must not read: name of the tensor, change, part of the message.
REJECTED = [
    ("q", lambda q: q[..., :256], "expected .*any, 512"),
    ("q", _beside, "without gaps from dimension 2"),
    ("q", lambda q: q.double(), "expected bfloat16 or float16 or float32"),
    ("sink", lambda sink: sink[:-1], "sink is float32 .4.*expected float32 .5."),
    ("window", lambda table: table.view(torch.int8), "window is int8 .*expected uint8"),
    ("window", lambda table: table[..., :512], "expected uint8 .any, any, 5[82]"),
    ("window", lambda table: table[:, ::2], "without gaps"),
    ("window", _shifted, "expected multiples of 16"),
    ("entries", _shifted, "entries begins at .*expected multiples of 16"),
    ("entries", _spread, "expected multiples of 16"),
    ("entries", lambda table: table.view(torch.bfloat16), "entries is bfloat16"),
    ("window_indices", lambda x: x.long(), "list of window is int64"),
    ("entry_indices", _beside, "list of entries is .*without gaps"),
    ("entry_lens", lambda x: x[:-1], "lengths of the list of entries is int32 .8.*expected int32 .9."),
    ("positions", lambda x: x.int(), "positions is int32"),
    ("rope", lambda x: x[:, :32], "rope is float32 .4096, 32."),
    ("entry_owner", lambda _: torch.zeros(9, dtype=torch.int64), "owner of the list of entries is int64"),
]


@pytest.mark.parametrize("formats", [{}, BLOCK_SCALED], ids=["fp8", "block-scaled"])
def test_attend_rejects_unsupported_tensors(formats):
    for name, change, message in REJECTED:
        case = attend_case(tokens=9, heads=5, width=72, **formats)
        setattr(case, name, change(getattr(case, name)))
        with pytest.raises(ValueError, match=message):
            attended(case, 1)


def test_an_fp8_buffer_is_not_read_as_bf16():
    case = attend_case(tokens=3, heads=5, width=72)
    case.kv_format = KVFormat.BF16
    with pytest.raises(
        ValueError, match=r"attend: window is uint8 \[3, 128, 584\] .* expected bfloat16 \[any, any, 512\]"
    ):
        attended(case, 1)


def test_formats_without_a_kernel_are_rejected():
    case = attend_case(tokens=3, heads=5, width=72, kv_format=KVFormat.FP8, entry_format=KVFormat.NVFP4)
    with pytest.raises(ValueError, match="entries are nvfp4 beside window entries in fp8; expected fp8"):
        attended(case, 1)


@pytest.mark.parametrize("op", [triton_output.inverse_rope, triton_output.inverse_rope_and_quantise])
def test_inverse_rope_rejects_unsupported_tensors(op):
    out, positions = torch.randn(3, 5, 512), torch.tensor([0, 7, 300])
    for arguments, message in [
        ((_beside(out), positions, rope()), "out is .*without gaps from dimension 1"),
        ((out.transpose(0, 1), positions, rope()), "out is .*without gaps from dimension 1"),
        ((out[..., :256], positions, rope()), "out is .*expected .*any, any, 512"),
        ((out, positions.int(), rope()), "positions is int32"),
        ((out, positions, rope().double()), "rope is float64"),
    ]:
        with pytest.raises(ValueError, match=f"{op.__name__}: {message}"):
            op(*arguments)


def test_norm_and_quantise_rejects_unsupported_tensors():
    for x, weight in [
        (torch.randn(2, 130), torch.rand(130)),
        (_beside(torch.randn(2, 128)), torch.rand(128)),
        (torch.randn(2, 128), torch.rand(127)),
    ]:
        with pytest.raises(ValueError, match="norm_and_quantise"):
            triton_latent.norm_and_quantise(x, weight, 1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("at", [3, 500], ids=["without RoPE", "with RoPE"])
@pytest.mark.parametrize("stored", list(KVFormat), ids=str)
def test_non_finite_entries_reach_their_tokens_only(stored, at, value):
    """One such number in an entry of any format reaches the output of the tokens that attend to the entry, and of no
    other token. FP4 alone saturates an infinity, which the norm before has made NaN."""
    if stored is KVFormat.NVFP4:
        value = float("nan")
    window = stored is not KVFormat.NVFP4
    formats = tuple(BLOCK_SCALED.values()) if stored in BLOCK_SCALED.values() else (stored, stored)
    tables = [torch.zeros(2, 64, kind.width, dtype=kind.dtype) for kind in formats]
    for table, kind in zip(tables, formats):
        KVBuffer(table, kind).write(torch.arange(128), torch.randn(128, 512))
    values = torch.randn(1, 512)
    values[0, at] = value
    KVBuffer(tables[0 if window else 1], stored).write(torch.tensor([7]), values)
    indices = torch.tensor([[3, 7], [3, 5]], dtype=torch.int32)
    lists = [(table, indices, torch.tensor([2, 2], dtype=torch.int32)) for table in tables]
    q, sink, positions = torch.randn(2, 5, 512).bfloat16(), torch.zeros(5), torch.tensor([0, 9])
    arguments = (sink, *lists[0], *lists[1], positions, rope(), 512**-0.5, formats[0].code, None, formats[1].code)
    for out in (triton_attend.attend(q, AttendInputs.from_op(*arguments)), read.attend(q, *arguments)):
        assert not out[0].isfinite().all(-1).any() and out[1].isfinite().all()


@pytest.mark.parametrize("behind", [0, 3])
def test_inverse_rope(behind):
    """Compare the inverse rotation with PyTorch, for all heads that a kernel wrote and for the first 5 of them."""
    written, positions = torch.randn(3, 5 + behind, 512), torch.tensor([0, 7, 300])
    table = attend_case(tokens=1, heads=1, width=None).rope
    out, rest = written[:, :5], written[:, 5:].clone()
    expected = read.rotate(out, positions, table, inverse=True)
    triton_output.inverse_rope(out, positions, table)
    assert torch.allclose(out, expected, atol=1e-6) and torch.equal(written[:, 5:], rest)


@pytest.mark.parametrize("heads, padded", [(5, 5), (6, 8)])
def test_query_rope(heads, padded):
    """Queries with RoPE equal PyTorch's. The heads after them stay."""
    q, positions = torch.randn(3, heads, 512).bfloat16(), torch.tensor([0, 7, 300])
    out = torch.full((3, padded, 512), -7.0).bfloat16()
    triton_query.query_rope(q, out[:, :heads], positions, rope())
    expected = read.rotate(q.float(), positions, rope())
    # The interpreter truncates bf16 where hardware rounds.
    assert torch.allclose(out[:, :heads].float(), expected, rtol=2**-7, atol=1e-6)
    assert torch.equal(out[:, :heads, :448], q[..., :448]) and (out[:, heads:] == -7).all()
    with pytest.raises(ValueError, match=r"query_rope: out is .*without gaps from dimension 1"):
        triton_query.query_rope(q, _beside(out[:, :heads]), positions, rope())


@pytest.mark.parametrize("tokens, dim", [(1, 1024), (5, 1536), (4, 128)])
def test_norm_and_quantise(tokens, dim):
    """Compare the codes and scales of the latent with PyTorch.

    The rows are slices of wider rows, and 1536 channels are not a power of two.
    """
    wide, weight = torch.randn(tokens, dim + 64), torch.rand(dim)
    codes, scales = triton_latent.norm_and_quantise(wide[:, :dim], weight, 1e-6)
    assert scales.stride(1) % 4 == 0
    assert_quantised(codes, scales, torch.nn.functional.rms_norm(wide[:, :dim], (dim,), weight, 1e-6), 0.01)


def test_inverse_rope_and_quantise():
    """The codes and scales are those of `inverse_rope`'s output.

    The 10 heads do not fill the programs, and one group is all zero.
    """
    g = torch.Generator().manual_seed(0)
    out, positions = torch.randn(3, 10, 512, generator=g) * 3, torch.tensor([0, 7, 300])
    out[1, 2, 128:256], out[2, 3, 448] = 0, 1e4
    inverse_rotated = out.clone()
    triton_output.inverse_rope(inverse_rotated, positions, rope())
    codes, scales = triton_output.inverse_rope_and_quantise(out, positions, rope())
    assert_quantised(codes, scales, inverse_rotated, 1e-3)


@pytest.mark.parametrize(
    ("tracks", "ring_rows", "each", "before", "sees_block"),
    [
        (False, 128, 1, -1, False),
        (True, 136, 1, 2, False),
        (False, 132, 4, 0, False),
        (False, 134, 5, 0, True),
        (False, 136, 7, 0, True),
    ],
)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_decode_metadata(tracks, ring_rows, each, before, sees_block, limits):
    """Every output of the launch equals PyTorch's, for requests with few and many visible entries and for padding."""
    owned = torch.tensor([6, 7, 2, 0, 5, 0])
    seq_lens = torch.tensor([1, 128, 129, 1, 1000, 1])
    mask, to = (torch.tensor([True, True, False, True, True, True]), torch.arange(20, 26)) if tracks else (None, None)

    def tensors(buffers: metadata.DecodeBuffers) -> dict[str, torch.Tensor]:
        named = {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}
        return named | {f"lens of ratio {ratio}": lens for ratio, lens in buffers.entry_lens.items()}

    def make() -> metadata.DecodeBuffers:
        buffers = metadata.DecodeBuffers(8, 9, "cpu", ring_rows, each, sees_block, limits=limits)
        for name, tensor in tensors(buffers).items():
            if name not in ("query_start", "token_request"):
                tensor.fill_(-9)
        buffers.state_slots[:6] = owned
        return buffers

    expected, got = make(), make()
    metadata._fill_decode(expected, seq_lens, before, mask, to)
    triton_metadata.build(got, seq_lens, before, mask, to)
    for (name, tensor), other in zip(tensors(expected).items(), tensors(got).values()):
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("tokens", [400, pytest.param(257, marks=pytest.mark.full)])
@pytest.mark.parametrize("chunks", [[257], [1, 130, 60, 66], []])
@pytest.mark.parametrize(
    "limits", [LIMITS[0], *(pytest.param(limits, marks=pytest.mark.full) for limits in LIMITS[1:])], ids=str
)
def test_prefill_metadata(chunks, tokens, limits):
    """Every output of the launch equals PyTorch's.

    The cases have prefixes of any length, snapshots, requests without a slot, and padding.
    """

    def make() -> metadata.PrefillBuffers:
        buffers = metadata.PrefillBuffers(512, 6, 9, range(20, 30), "cpu", limits=limits)
        for name in ("slots", "query_start", "token_request", "token_staging_slots", "positions", "window_indices"):
            getattr(buffers, name).fill_(-9)
        n = len(chunks)
        buffers.chunk_lens[:n] = torch.tensor(chunks, dtype=torch.int32)
        buffers.prefix_lens[:n] = torch.tensor([600, 127, 0, 3][:n], dtype=torch.int32)
        buffers.state_slots[:n] = torch.tensor([4, 2, 0, 7][:n], dtype=torch.int32)
        buffers.block_table.copy_(torch.arange(buffers.block_table.numel()).view_as(buffers.block_table))
        buffers.staging_slots.fill_(-1)
        buffers.staging_slots[0, :2], buffers.snapshot_lens[0, :2] = torch.tensor([20, 21]), torch.tensor([640, 768])
        return buffers

    expected, got = make(), make()
    metadata._derive(expected, tokens, torch.zeros(tokens, dtype=torch.int64))
    triton_metadata.build_prefill(got, tokens)
    for name, tensor in vars(expected).items():
        if isinstance(tensor, torch.Tensor) and name != "hca_indices":
            assert torch.equal(tensor, getattr(got, name)), name
    for ratio in limits:
        assert torch.equal(expected.entry_lens[ratio], got.entry_lens[ratio]), ratio
    for token in range(tokens if 128 in limits else 0):
        seen = int(expected.entry_lens[128][token])
        assert torch.equal(got.hca_indices[token, :seen], expected.hca_indices[token, :seen])


@pytest.fixture
def sparse_attention(monkeypatch):
    """FlashMLA's sparse kernel in PyTorch."""

    def sparse(q, table, lists, lens, sink, scale, holes=False):
        assert lists.shape[1] % 128 == 0 and table.dtype == torch.bfloat16
        column = torch.arange(lists.shape[1])
        listed = column < lens[:, None]
        assert ((lists >= 0) <= listed).all() and (holes or listed.sum() == (lists >= 0).sum()), "-1 after the length"
        assert (lists < table.shape[0]).all()
        still = torch.zeros(len(q), dtype=torch.int64)
        return read.attend(
            q, sink, table[None], lists, lens, None, None, None, still, rope(), scale, KVFormat.BF16.code
        )

    for module, attention in ((sparse_prefill, sparse), (sparse_decode, partial(sparse, holes=True))):
        monkeypatch.setattr(module, "sparse_attention", attention)
        # Interpreting a program takes the same time for any size, so programs are larger than on a GPU.
        monkeypatch.setattr(module, "_ENTRIES_PER_PROGRAM", 128)


@pytest.mark.full
@pytest.mark.parametrize(
    ("formats", "ratio"),
    [
        *(({"kv_format": kv_format}, ratio) for kv_format in (KVFormat.FP8, KVFormat.BF16) for ratio in (0, 4, 128)),
        *((BLOCK_SCALED, ratio) for ratio in (0, 1, 2)),
    ],
)
@pytest.mark.parametrize("more_blocks", [0, 3])
@pytest.mark.parametrize("at_once", [None, 7])
@pytest.mark.usefixtures("sparse_attention")
def test_sparse_prefill(formats, ratio, at_once, more_blocks, monkeypatch):
    """The whole attention kernel equals the reference, with the sparse kernel implemented in PyTorch. `at_once`: tokens
    whose entries are listed at a time; None for all. `more_blocks`: excess of the bound over the step's blocks, as in a
    CUDA graph."""
    if at_once:
        monkeypatch.setattr(sparse_prefill, "MAX_LISTED", at_once * 256)
    step, blocks, case = prefill_case(ratio=ratio, heads=64, **formats)
    kernel = sparse_prefill.SparsePrefillAttention(8, 128)
    if more_blocks:
        kernel.reserve(step.window_size, blocks + more_blocks, torch.device("cpu"))
        kernel._reserved.table.fill_(float("nan"))
    assert kernel.begin_step(step, blocks + more_blocks)
    for _ in range(2):
        assert_attends(kernel.attend(*case.inputs()).values, case, BOUND[torch.bfloat16])
    gathered = kernel._gathered
    assert (gathered is kernel._reserved) == bool(more_blocks) and gathered.block_count.tolist() == [blocks]
    written = gathered.table[: step.window_size].float()
    assert torch.equal(written, KVBuffer(case.window, case.kv_format).read(torch.arange(step.window_size)))


@pytest.mark.usefixtures("sparse_attention")
def test_entries_of_a_buffer_are_gathered_once_a_step():
    """Layers that attend to the same entries gather their windows only, and those that select list anew. The next step
    gathers the entries again."""
    step, blocks, case = prefill_case(ratio=1, heads=64, **BLOCK_SCALED)
    kernel = sparse_prefill.SparsePrefillAttention(8, 128)
    assert kernel.begin_step(step, blocks)
    q, inputs = case.inputs()
    kernel.attend(q, inputs._replace(selects=True))
    second = replace(case, window=prefill_case(ratio=2, heads=64, **BLOCK_SCALED)[2].window)
    read_once = replace(second, entries=case.entries.clone())
    case.entries.fill_(0xFF)
    assert_attends(kernel.attend(*second.inputs()).values, read_once, BOUND[torch.bfloat16])
    # Another selection: the first entry of each list, as often as the list is long.
    second.entry_indices = read_once.entry_indices = case.entry_indices[:, :1].repeat(1, case.entry_indices.shape[1])
    q, inputs = second.inputs()
    out = kernel.attend(q, inputs._replace(selects=True)).values
    assert_attends(out, read_once, BOUND[torch.bfloat16])
    assert kernel.begin_step(step, blocks)
    assert kernel.attend(q, inputs).values.isnan().any()


@pytest.mark.usefixtures("sparse_attention")
def test_sparse_decode():
    """The whole attention kernel equals the reference. A layer that reuses the selection decodes its window only, and a
    layer with a window only does not disturb it."""
    case = attend_case(tokens=9, heads=64, width=72, per_block=64, **BLOCK_SCALED)
    kernel = sparse_decode.SparseDecodeAttention(72)
    step = SimpleNamespace(window_indices=case.window_indices, positions=case.positions, is_decode=True)
    assert kernel.begin_step(step, None)
    q, inputs = case.inputs()
    assert_attends(kernel.attend(q, inputs._replace(selects=True)).values, case, BOUND[torch.bfloat16])
    alone = attend_case(tokens=9, heads=64, width=None, seed=1, **BLOCK_SCALED)
    alone.window_indices, alone.window_lens = case.window_indices, case.window_lens
    alone.window = case.window
    assert_attends(kernel.attend(*alone.inputs()).values, alone, BOUND[torch.bfloat16])
    second = torch.zeros_like(case.window)
    KVBuffer(second, KVFormat.MXFP8).write(torch.arange(3 * 128), torch.randn(3 * 128, 512))
    read_once = replace(case, entries=case.entries.clone(), window=second)
    case.entries.fill_(0xFF)
    again = inputs._replace(window=inputs.window._replace(table=second))
    assert_attends(kernel.attend(q, again).values, read_once, BOUND[torch.bfloat16])
    assert kernel.attend(q, inputs._replace(selects=True)).values.isnan().any()


@pytest.mark.full
@pytest.mark.parametrize("parts, overhead", [(132, 5), (7, 3)])
@pytest.mark.parametrize("tokens", [1, 4, 40, 1024])
def test_schedule(tokens, parts, overhead):
    """The parts read every block of every token once and in order, and each stays within FlashMLA's budget.

    A server compares the schedule with FlashMLA's own when it starts (`flashmla.scheduler_config`).
    """
    g = torch.Generator().manual_seed(tokens * parts)

    def some(high: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, (tokens,), generator=g, dtype=torch.int32)

    for window, entries in (
        (some(129), None),
        (some(129, 128), some(513, 512)),
        (some(129), some(2) * some(8192)),
        (some(1), some(1)),
    ):
        metadata, splits = (x.tolist() for x in flashmla_scheduler.build(window, entries, parts, overhead))
        blocks = ((window.clamp(min=1) + 63) // 64 + (0 if entries is None else (entries + 63) // 64)).tolist()
        budget = -(-(sum(blocks) + tokens * overhead) // parts) + overhead
        read, split = [], [0] * tokens
        for begin, end, first, stop, split_of_first, first_shared, last_shared, _ in metadata:
            if begin == tokens:
                continue  # a part without work
            assert split_of_first == split[begin]
            assert [first_shared, last_shared] == [splits[t + 1] - splits[t] > 1 for t in (begin, end)]
            bounds = [(first if t == begin else 0, stop if t == end else blocks[t]) for t in range(begin, end + 1)]
            assert sum(high - low + overhead for low, high in bounds) <= budget
            for t, (low, high) in enumerate(bounds, begin):
                read += [(t, block) for block in range(low, high)]
                split[t] += 1
        assert read == [(t, block) for t in range(tokens) for block in range(blocks[t])]
        assert splits == [sum(split[:t]) for t in range(tokens + 1)]
