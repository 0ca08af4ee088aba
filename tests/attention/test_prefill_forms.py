"""A recorded prefill step in its short and in its long form computes what an eager step computes, and the batch's
lengths choose the form."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from support.backend import make_runner
from support.prefill_forms import FormSteps, Setting

from dsv4_sglang.attention import sparse_prefill
from dsv4_sglang.cache import v4_specs
from dsv4_sglang.cache.layer_spec import LayerKVSpec, entry_limits
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.cache.step import prefill_window_size
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.attention import backend as backend_module
from dsv4_sglang.srt.attention import layer_ops, prefill_recorder, step_scratch
from dsv4_sglang.srt.attention.backend import HybridCacheBackend
from dsv4_sglang.srt.attention.layer_ops import make_scratch
from dsv4_sglang.srt.attention.prefill_graphs import MAX_RECORDED_REQUESTS, SIZES
from dsv4_sglang.srt.attention.prefill_recorder import SHORT_FORM_ENTRIES, SHORT_FORM_TOKENS, PrefillRecorder

BLOCK, SIZE = 128, 256
FLASH = v4_specs(DSV4Config.flash(), build_schedule(DSV4Config.flash()), kv_format="fp8", key_format="mxfp4")
V41 = v41_specs(V41Config.flash())


def make_steps(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    ratio: int,
    kv_format: str,
    context_blocks: int,
    blocks: int,
    selected: int = SIZE,
) -> list[FormSteps]:
    """Return two objects for steps of a layer, with graphs whose short form takes contexts of `context_blocks` blocks
    and `blocks` blocks in all, and has scratch for the scores of `selected` tokens."""
    monkeypatch.setattr(backend_module, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_dp_size=1))
    scratch = selected * 4 * context_blocks * BLOCK // 4
    for module in (layer_ops, prefill_recorder, step_scratch):
        monkeypatch.setattr(module, "RECORDED_SCRATCH_BYTES", scratch)
    monkeypatch.setattr(prefill_recorder, "SHORT_FORM_ENTRIES", 32 * blocks)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        monkeypatch.setattr(prefill_recorder, "LIST_ALIGNMENT", 1)
    setting = Setting(
        ratio=ratio,
        size=SIZE,
        context=4 * context_blocks * BLOCK,
        heads=64 if on_gpu else 2,
        index_heads=64 if on_gpu else 4,
        top_k=512 if on_gpu else 32,
        formats=(kv_format, "mxfp4") if on_gpu else ("fp32", "fp32"),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device=device,
    )
    return [FormSteps(setting, requests=3) for _ in range(2)]


def prefix_of(steps: FormSteps, prefixes: list[int], inputs: list[torch.Tensor]) -> None:
    if any(prefixes):
        steps.eager([0] * len(prefixes), [max(1, n) for n in prefixes], inputs)


def cases(n: int) -> list[tuple[list[int], list[int], bool]]:
    """Return batches: tokens of each request before the step and in the step, and True if the batch is within the
    limits, n blocks of a request and 3 n / 2 in all."""
    limit = n * BLOCK
    return [
        ([0], [200], True),
        ([limit - 200], [200], True),
        ([limit - 199], [200], False),
        ([limit - 1], [1], True),
        ([limit], [1], False),
        ([3 * limit], [SIZE], False),
        ([limit - 90, limit // 2 - 56], [90, 56], True),
        ([limit - 90, limit // 2 - 56], [90, 57], False),
        ([limit // 2 - 60, limit // 2 - 60, 1], [50, 60, 100], True),
    ]


@pytest.mark.parametrize("case", range(9))
@pytest.mark.parametrize("ratio, kv_format", [(0, "fp8"), (4, "fp8"), (128, "fp8"), (4, "bf16"), (128, "bf16")])
def test_forms_equal_eager_steps(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, ratio: int, kv_format: str, case: int
) -> None:
    """On a GPU the short form has the kernels of an eager step, and must return the same bits. For a single token eager
    steps have another kernel, as the long form has for FP8 entries."""
    on_gpu = device.type == "cuda"
    if not on_gpu and kv_format == "bf16":
        pytest.skip("one format on a CPU")
    n = 64 if on_gpu else 2
    eager, graph = make_steps(monkeypatch, device, ratio, kv_format, n, 3 * n // 2)
    prefixes, chunks, fits = cases(n)[case]
    graph.record()
    assert {key.attention_variant for key in graph.graphs.replays} == {None, "short"}
    kernel = type(graph.backend.layers.kernel).__name__  # of the short form, which is recorded last
    assert kernel == ("SparsePrefillAttention" if on_gpu else "PortableAttention")
    before = eager.random_inputs(sum(max(1, n) for n in prefixes))
    inputs = eager.random_inputs(sum(chunks))
    for steps in (eager, graph):
        prefix_of(steps, prefixes, before)
    expected, got = eager.eager(prefixes, chunks, inputs), graph.replay(prefixes, chunks, inputs)
    assert graph.is_short == fits
    step = graph.backend.metadata
    assert step is not None and step.block_table.shape[1] == (n if fits else max(4 * n, 64))
    assert all(map(torch.equal, eager.written(), graph.written()))
    if fits and on_gpu and sum(chunks) > 1:
        assert torch.equal(got, expected)
    size = expected.double().norm(dim=-1).clamp_min(1e-30)
    error = (got.double() - expected.double()).norm(dim=-1) / size
    assert expected.any() and error.max() < (1.2e-2 if on_gpu else 1e-5)


def test_a_short_form_selects_in_slices(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A step of more tokens than are selected at once has the limits and the result of one slice."""
    n = 64 if device.type == "cuda" else 2
    slice_tokens = 96
    monkeypatch.setattr(prefill_recorder, "SHORT_FORM_SELECTED", slice_tokens)
    eager, graph = make_steps(monkeypatch, device, 4, "fp8", n, 3 * n // 2, selected=slice_tokens)
    slices: list[int] = []
    scores = graph.backend.scratch.scores
    monkeypatch.setattr(
        graph.backend.scratch, "scores", lambda tokens, table: slices.append(tokens) or scores(tokens, table)
    )
    graph.record()
    assert slices[-1] == slice_tokens, "the short form is recorded last"
    inputs = eager.random_inputs(200)
    expected, got = eager.eager([0], [200], inputs), graph.replay([0], [200], inputs)
    assert graph.is_short and all(map(torch.equal, eager.written(), graph.written()))
    size = expected.double().norm(dim=-1).clamp_min(1e-30)
    assert ((got.double() - expected.double()).norm(dim=-1) / size).max() < (1.2e-2 if device.type == "cuda" else 1e-5)


def test_replays_of_both_forms_alternate(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Graphs of both forms share their buffers, also with eager steps of longer contexts between them."""
    n = 64 if device.type == "cuda" else 2
    eager, graph = make_steps(monkeypatch, device, 4, "fp8", n, 3 * n // 2)
    graph.record()
    limit, length = n * BLOCK, 0
    for turn, chunk in enumerate((limit - 200, 100, 100, 1, 200, limit, 130)):
        inputs = eager.random_inputs(chunk)
        expected = eager.eager([length], [chunk], inputs)
        if chunk > SIZE or turn % 3 == 0:
            got = graph.eager([length], [chunk], inputs)
        else:
            got = graph.replay([length], [chunk], inputs)
            assert graph.is_short == (length + chunk <= limit)
        length += chunk
        size = expected.double().norm(dim=-1).clamp_min(1e-30)
        assert ((got.double() - expected.double()).norm(dim=-1) / size).max() < 1.2e-2
    assert all(map(torch.equal, eager.written(), graph.written()))


def recorder(max_blocks: int, specs: Sequence[LayerKVSpec] = FLASH) -> PrefillRecorder:
    layers = SimpleNamespace(scratch=make_scratch(specs, "cpu", torch.float32, top_k=512))
    return PrefillRecorder(
        max_blocks, MAX_RECORDED_REQUESTS, range(0), entry_limits(specs, 512), layers, has_short_forms=True
    )


@pytest.mark.parametrize(("specs", "entries"), [(FLASH, 32), (V41, 128)], ids=["V4", "V4.1"])
def test_limits_of_the_default_sizes(specs: Sequence[LayerKVSpec], entries: int) -> None:
    """All scores of a short form fit in the scratch, and gathering pays. `entries`: of a block, in the layers that have
    the most."""
    found = recorder(8192, specs)
    assert [found.short_form(size) for size in SIZES if size < SHORT_FORM_TOKENS] == [None] * 7
    for size in (size for size in SIZES if size >= SHORT_FORM_TOKENS):
        form = found.short_form(size)
        assert form is not None
        assert form.context_blocks * BLOCK == 65536
        width = found.layers.scratch.score_width(form.context_blocks)
        assert width == 16384 and size * width * 4 <= step_scratch.RECORDED_SCRATCH_BYTES
        window = prefill_window_size(size, MAX_RECORDED_REQUESTS + 1)
        most = min(sparse_prefill.MAX_GATHERED, sparse_prefill.MAX_GATHERED_PER_TOKEN * size)
        assert window + entries * form.blocks <= most
        assert form.blocks * BLOCK == SHORT_FORM_ENTRIES * BLOCK // entries == 229376 * 32 // entries


@pytest.mark.parametrize(
    ("prefixes", "tokens", "replayed"),
    [
        ([0], 8192, True),
        ([65536 - 8192], 8192, True),
        ([65536 - 8191], 8192, False),
        ([50000, 50000, 50000, 50000], 8000, True),
        ([50000, 50000, 50000, 50000, 30000], 8000, False),
    ],
)
def test_large_graphs_are_replayed_in_their_short_form(prefixes: list[int], tokens: int, replayed: bool) -> None:
    found = recorder(8192)
    form = found.short_form(8192)
    assert form is not None and form.context_blocks * BLOCK == 65536, "its selection takes several slices"
    assert found.replays_large(8192, tokens, prefixes) == replayed
    # Whatever tokens each request has in the step, the form that is chosen at its replay is the short one.
    for alone in range(len(prefixes)) if replayed else ():
        chunks = [tokens - len(prefixes) + 1 if i == alone else 1 for i in range(len(prefixes))]
        step = SimpleNamespace(positions=torch.empty(8192), hca_indices=None)
        found.choose_form(step, prefixes, chunks)
        assert found.form == form
    found.has_short_forms = False
    assert found.replays_large(8192, tokens, prefixes), "ranks of DP attention agree"


def test_steps_without_short_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorder(0, FLASH[:1]).short_form(1024) is None, "a draft model has no entries"
    assert recorder(4).short_form(1024).context_blocks == 64, "a short context"
    monkeypatch.setattr(backend_module, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_dp_size=2))
    ranks = HybridCacheBackend(make_runner(4, heads=2)).recorder
    assert ranks.short_form(1024) is None, "ranks of DP attention"
