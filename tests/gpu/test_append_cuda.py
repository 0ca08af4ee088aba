"""`append` on CUDA against the reference: every byte of every table, for decode steps and prefill chunks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.kernel_cases import (
    DEVICE,
    FORMATS,
    KINDS,
    NO_DRAFTS,
    Layer,
    Step,
    bytes_like,
    check_step,
    compare_layers,
    ops,
    recorded,
)

from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.model.geometry import CSA_COMPRESSOR_STATES, CsaCompressorState, state_rows

pytestmark = pytest.mark.gpu

DRAFTED = [kind for kind in KINDS if kind != "hca-raw"]
PHASES = [*range(10), *range(124, 133), *range(250, 259), 1000]
CHUNKS = [1, 2, 3, 5, 127, 128, 129, 130, 300, 700]


def layer_and_step(kind, formats, requests, decode, free=6, seed=0, sizes=NO_DRAFTS, **options):
    dtype, rows, keys = formats
    used = [s for s, _, _ in requests if s >= 0]
    blocks = sum((length + count + 127) // 128 for _, length, count in requests)
    slots = max(used, default=0) + 1 + free
    layer = Layer(kind, dtype, rows, keys, slots=slots, blocks=blocks, seed=seed, sizes=sizes)
    return layer, Step.make(layer, requests, decode, seed=seed + 1, **options)


def decode_requests(phases, seed=0, each=1):
    """Return requests with `each` tokens at each phase, in random slots; every fifth is a padding request."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(phases), generator=g).tolist()
    requests = [(slot, length, each) for slot, length in zip(slots, phases)]
    for at in range(0, len(phases), 5):
        requests.insert(at, (-1, 0, each))
    return requests


def chunk_requests(batch, batches=6):
    """Return every `batches`-th pair of phase and chunk length. All batches together contain every pair."""
    pairs = [(length, count) for count in CHUNKS for length in PHASES]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(5)).tolist()
    mine = [pairs[i] for i in order[batch::batches]]
    return [(-1 if i % 17 == 11 else i, *pair) for i, pair in enumerate(mine)]


by_format = pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f[0]}-{f[1]}-{f[2]}")
by_kind = pytest.mark.parametrize("kind", KINDS)


@by_format
@by_kind
def test_decode(kind, formats):
    check_step(*layer_and_step(kind, formats, decode_requests(PHASES), True))


@by_kind
@pytest.mark.parametrize("batch", range(6))
def test_prefill(kind, batch):
    check_step(*layer_and_step(kind, FORMATS[0], chunk_requests(batch), False, seed=batch))


@by_format
@by_kind
def test_prefill_formats(kind, formats):
    check_step(*layer_and_step(kind, formats, chunk_requests(0, 20), False))


@by_kind
def test_one_request(kind):
    """No other request hides a wrong index. Tokens that complete windows, and chunks around the window's length."""
    for length in (0, 3, 7, 127, 131):
        check_step(*layer_and_step(kind, FORMATS[0], [(1, length, 1)], True, seed=length))
    for length, count in ((0, 1), (0, 4), (0, 128), (1, 127), (3, 126), (127, 2), (130, 1000), (1000, 24)):
        check_step(*layer_and_step(kind, FORMATS[0], [(2, length, count)], False, seed=length))


@pytest.mark.parametrize("ring_rows", [130, 300])
@by_kind
def test_rings_wider_than_the_window(kind, ring_rows):
    """Decode, and chunks shorter and longer than window and ring: older entries are copied to the workspace."""
    sizes = NO_DRAFTS._replace(ring=ring_rows)
    check_step(*layer_and_step(kind, FORMATS[0], decode_requests(PHASES), True, sizes=sizes))
    check_step(*layer_and_step(kind, FORMATS[0], chunk_requests(2, 12), False, sizes=sizes))
    for length, count in ((130, 1), (1000, 131), (140, 301)):
        check_step(*layer_and_step(kind, FORMATS[0], [(2, length, count)], False, sizes=sizes))


# Steps with several tokens per request, and slots with room for them.


@pytest.mark.parametrize(
    ("each", "formats"), [*((each, FORMATS[0]) for each in range(1, 10)), *((4, formats) for formats in FORMATS[1:])]
)
@pytest.mark.parametrize("kind", DRAFTED)
def test_verify(kind, each, formats):
    """At every phase, in slots of matching and larger size; with one token too."""
    for d in {max(each, 2), 9}:
        requests = decode_requests(PHASES, each=each)
        check_step(*layer_and_step(kind, formats, requests, True, sizes=state_rows(d), seed=each))


@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("kind", DRAFTED)
def test_prefill_of_slots_for_drafts(kind, d):
    """With snapshots at the ends of the chunks."""
    check_step(*layer_and_step(kind, FORMATS[0], chunk_requests(3), False, sizes=state_rows(d)))


@pytest.mark.parametrize("decode", [True, False])
@by_kind
def test_optional_tensors_left_out(kind, decode):
    layer, step = layer_and_step(kind, FORMATS[0], [(1, 6, 1), (0, 127, 1), (2, 1, 1)], decode, track=False)
    layer.tables |= dict.fromkeys(("swa_pos", "swa_head", "tail_len"))
    check_step(layer, step)


@pytest.mark.parametrize("decode", [True, False])
@by_kind
def test_twice_gives_the_same_bytes(kind, decode):
    requests = decode_requests(PHASES) if decode else chunk_requests(1, 12)
    layer, step = layer_and_step(kind, FORMATS[0], requests, decode)
    runs = []
    for _ in range(3):
        got = layer.on(DEVICE)
        runs.append((step.run(ops(), got), got))
    for window, got in runs[1:]:
        assert window is None or torch.equal(window, runs[0][0])
        for name, table in got.tables.items():
            assert table is None or torch.equal(table, runs[0][1].tables[name]), name


@pytest.mark.parametrize("kind", ["swa", "csa"])
def test_decode_equals_prefill_of_one_token(kind):
    """Bit for bit: the order of pooling does not depend on how the tokens arrive."""
    requests = [r for r in decode_requests(PHASES) if r[0] >= 0]
    layer, step = layer_and_step(kind, FORMATS[0], requests, True)
    window = bytes_like((1, 129 * len(requests), 584), torch.uint8, torch.Generator().manual_seed(0))
    chunks = Step(requests, False, step.batch, step.inputs, window)
    one, other = layer.on(DEVICE), layer.on(DEVICE)
    step.run(ops(), one), chunks.run(ops(), other)
    for name, table in one.tables.items():
        assert table is None or torch.equal(table, other.tables[name]), name


def test_chunks_of_any_length_give_the_same_bytes():
    """One CSA request in one chunk and in many chunks."""
    plan = [1, 2, 3, 5, 127, 128, 129, 130, 1, 1, 173]
    layer, step = layer_and_step("csa", FORMATS[0], [(0, 0, sum(plan))], False, track=False)
    one, other = layer.on(DEVICE), layer.on(DEVICE)
    step.run(ops(), one)
    done = 0
    for count in plan:
        part = Step.make(layer, [(0, done, count)], False, track=False)
        part.inputs = {n: None if t is None else t[done : done + count] for n, t in step.inputs.items()}
        part.batch["out_loc"] = step.batch["out_loc"][done : done + count]
        part.run(ops(), other)
        done += count
    for name in ("entries", "index_keys", "ring", "compressor_state"):
        assert torch.equal(one.tables[name], other.tables[name]), name


@pytest.mark.parametrize(("kind", "each"), [*((kind, 1) for kind in KINDS), *((kind, 4) for kind in DRAFTED)])
def test_graph_replay_with_other_inputs(kind, each):
    requests = [(slot, length, each) for slot, length in ((3, 0), (0, 3), (1, 126), (5, 127), (2, 131))]
    others = [(slot, length, each) for slot, length in ((4, 7), (-1, 0), (2, 255), (0, 383), (-1, 0))]
    layer = Layer(kind, slots=9, blocks=64, sizes=state_rows(each))
    first, second = Step.make(layer, requests, True), Step.make(layer, others, True, seed=9)
    got = layer.on(DEVICE)
    batch, inputs, _ = first.on(DEVICE)
    graph, _ = recorded(lambda: Step.call(torch.ops.dsv4_sglang, got, batch, inputs, None))
    for step in (first, second):
        start = layer.on(DEVICE)
        for name, table in got.tables.items():
            if table is not None:
                table.copy_(start.tables[name])
        for group, values in ((batch, step.batch), (inputs, step.inputs)):
            for name, tensor in group.items():
                if tensor is not None:
                    tensor.copy_(values[name])
        graph.replay()
        expected = layer.on("cpu")
        step.run(torch.ops.dsv4_sglang, expected)
        compare_layers(got, expected, layer, step).finish()


@by_kind
def test_steps_one_behind_another_in_a_graph(kind):
    """Each launch may start before the previous one ends, and reads the compressor state that it wrote."""
    layer = Layer(kind, slots=5, blocks=16)
    steps = [Step.make(layer, [(0, i, 1), (3, 120 + i, 1)], True, track=False, seed=i) for i in range(16)]
    got, expected = layer.on(DEVICE), layer.on("cpu")
    on_device = [step.on(DEVICE) for step in steps]
    graph, _ = recorded(lambda: [Step.call(torch.ops.dsv4_sglang, got, *inputs) for inputs in on_device])
    graph.replay()
    for step in steps:
        step.run(torch.ops.dsv4_sglang, expected)
    compare_layers(got, expected, layer, steps[-1]).finish()


@pytest.mark.parametrize("tokens", [1, 33])
def test_more_blocks_than_the_gpu_holds(tokens):
    """A batch of 300 requests, with lengths beyond every table size used in other tests."""
    requests = [(slot, (37 * slot) % 300, tokens) for slot in range(300)]
    for kind in KINDS:
        check_step(*layer_and_step(kind, FORMATS[0], requests, tokens == 1, track=False))


BAD = {
    "kv": (lambda t: t.double(), "kv is Double"),
    "ring": (lambda t: t[:, :-1], r"ring is Byte \[\d+, 127, 584\]"),
    "entries": (lambda t: t[..., :-8], "entries is Byte"),
    "index_keys": (lambda t: None, "index_keys is missing"),
    "rope": (lambda t: t.cpu(), "rope is Float .* on cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_tensor(name):
    layer, step = layer_and_step("csa", FORMATS[0], [(0, 3, 1), (1, 0, 1)], True)
    layer = layer.on(DEVICE)
    batch, inputs, _ = step.on(DEVICE)
    change, message = BAD[name]
    for group in (layer.weights, layer.tables, batch, inputs):
        if name in group:
            group[name] = change(group[name])
    with pytest.raises(RuntimeError, match="append: " + message):
        Step.call(ops(), layer, batch, inputs, None)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("swa", {"ring": 128}, "3 tokens of each request without `window`, but ring supports at most 1"),
        (
            "csa",
            {"csa": CSA_COMPRESSOR_STATES[0]},
            "3 tokens .* but compressor_state supports at most 1. Construct .* draft_tokens 3",
        ),
        ("hca-online", {"hca_state_copies": 3}, "3 tokens .* but compressor_state supports at most 2"),
        ("hca-raw", {}, "3 tokens .* but compressor_state supports at most 1"),
        ("csa", {"csa": CsaCompressorState(4, 16)}, "expected 24, 48 or 64 rows per slot for ratio 4"),
    ],
)
def test_slots_that_are_too_small_are_rejected(kind, sizes, message):
    sizes = state_rows(3)._replace(**sizes)
    layer, step = layer_and_step(kind, FORMATS[0], [(0, 3, 3), (1, 0, 3)], True, sizes=sizes)
    with pytest.raises(RuntimeError, match="append: .*" + message):
        step.run(ops(), layer.on(DEVICE))


def test_requests_with_different_numbers_of_tokens_are_chunks():
    layer, step = layer_and_step("swa", FORMATS[0], [(0, 3, 2), (1, 0, 1)], True, sizes=state_rows(3))
    with pytest.raises(RuntimeError, match="3 tokens for 2 requests without `window`; expected the same number"):
        step.run(ops(), layer.on(DEVICE))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("decode", [True, False])
def test_non_finite_input_reaches_its_entry_only(decode, formats, value):
    """One such number in a token's projection makes its window entry unreadable, and no other."""
    layer, step = layer_and_step("swa", formats, [(1, 131, 1), (2, 3, 1)], decode, track=False)
    step.inputs["kv"][0, 7] = value
    at = torch.tensor([128 + 131 % 128, 2 * 128 + 3])
    for implementation, device in ((torch.ops.dsv4_sglang, "cpu"), (ops(), DEVICE)):
        one = layer.on(device)
        step.run(implementation, one)
        read = KVBuffer(one.tables["ring"].cpu(), KVFormat(layer.rows)).read(at)
        assert read.isfinite().all(-1).tolist() == [False, True], device


@pytest.mark.sanitize
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_sanitizer(tool):
    """Run the reduced set of sanitized.py under compute-sanitizer (from COMPUTE_SANITIZER or PATH)."""
    sanitizer = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not installed")
    program = Path(__file__).with_name("sanitized.py")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
