"""`append` with several tokens per request in a decode step, some of which later steps roll back.

No later step sees a rejected token. The state of a request has the same bytes as without drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from itertools import product

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layer import Layer, make_attention, make_step
from torch import Tensor

from dsv4_sglang.cache.append import Projections
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVBuffer
from dsv4_sglang.model.geometry import CsaCompressorState, StateRows, state_rows
from dsv4_sglang.ops import extension
from dsv4_sglang.ops.reference import append as reference
from dsv4_sglang.ops.reference import chunks

FORMATS = [("fp8", "mxfp4", torch.bfloat16), ("bf16", "nvfp4", torch.bfloat16), ("fp32", "fp32", torch.float32)]
TABLES = {0: [3, 1, 6, 4, 8], 1: [0, 5, 2, 7, 9]}  # block tables of the requests in slots 0 and 1
SNAPSHOT = 2
POSITIONS = 5 * 128
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

# The projections of rejected tokens.
REJECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "other": lambda x: -x.roll(1, 0),
    "huge": lambda x: x * 1e30,
    "nan": lambda x: torch.full_like(x, float("nan")),
}


@functools.cache
def attention(ratio: int, device: str) -> torch.nn.Module:
    with torch.device("cpu"):
        return make_attention(ratio).to(device)


def make_layer(ratio: int, formats: tuple[str, str, torch.dtype], sizes: StateRows) -> Layer:
    rows, keys, dtype = formats
    return Layer(
        attention(ratio, str(torch.get_default_device())),
        ratio,
        rows,
        keys,
        "online",
        sizes,
        slots=3,
        blocks=10,
        dtype=dtype,
    )


def strips(tensor: Tensor, table: KVBuffer) -> Tensor:
    """Return a KV buffer as [blocks, rows, bytes]."""
    parts = [part.contiguous().view(torch.uint8) for part in table._replace(data=tensor).strips()]
    return torch.cat(parts, -1)


@functools.cache
def projections(ratio: int, dtype: torch.dtype, device: str) -> Projections:
    """Return the projections of every token of both requests, [2, positions, columns]."""
    generator = torch.Generator().manual_seed(ratio)

    def random(columns: int, dtype: torch.dtype) -> Tensor | None:
        if not columns:
            return None
        return torch.randn(2, POSITIONS, columns, generator=generator, device="cpu").to(device, dtype)

    return Projections(
        random(512, dtype),
        random({0: 0, 4: 2048, 128: 1024}[ratio], torch.float32),
        random({0: 0, 4: 512, 128: 0}[ratio], torch.float32),
    )


class Requests:
    """Two requests in one layer. Each appends slices of its projections. `lengths` counts the accepted tokens."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.lengths = layer, [0, 0]
        self.inputs = projections(layer.ratio, layer.dtype, str(torch.get_default_device()))

    def take(self, request: int, count: int, kept: int, rejected: str) -> list[Tensor | None]:
        """Return the projections of the request's next `count` tokens. All after the first `kept` are rejected ones."""
        begin = self.lengths[request]
        taken = [None if values is None else values[request, begin : begin + count].clone() for values in self.inputs]
        for part in taken:
            if part is not None and kept < count:
                part[kept:] = REJECTED[rejected](part[kept:])
        return taken

    def step(self, counts: list[int], kept: list[int], decode: bool, rejected: str = "other") -> None:
        """Append `counts` tokens of the requests (0: not in the step) and accept `kept` of them."""
        who = [r for r in (0, 1) if counts[r]]
        step = make_step(
            [(r, self.lengths[r], counts[r]) for r in who], TABLES, self.layer.sizes.ring if decode else None
        )
        parts = zip(*(self.take(r, counts[r], kept[r], rejected) for r in who))
        inputs = Projections(*(None if part[0] is None else torch.cat(part) for part in parts))
        window = None
        if not decode:
            window = torch.zeros(1, step.window_size, self.layer.kv_format.width, dtype=self.layer.kv_format.dtype)
            step.staging_slots = self.tracked(who[0], counts[who[0]], step)
        self.layer.append(step, inputs, window)
        for r in who:
            self.lengths[r] += kept[r]

    def tracked(self, request: int, count: int, step: StepMetadata) -> Tensor:
        """Return SNAPSHOT for tokens of the last whole block of the step's first request, -1 for other tokens."""
        end = (self.lengths[request] + count) // 128 * 128
        mine = (step.token_request == 0) & (step.positions >= end - 128) & (step.positions < end)
        return torch.where(mine, SNAPSHOT, -1).int()

    # The live state, as bytes.

    def ring(self, slot: int, first: int, stop: int) -> Tensor:
        rows = strips(self.layer.ring, KVBuffer(self.layer.ring, self.layer.kv_format))
        return rows[slot, torch.arange(first, stop) % self.layer.sizes.ring]

    def compressor_state(self, slot: int, length: int) -> dict[str, Tensor]:
        """Return the compressor state from which a request of `length` tokens continues."""
        layer = self.layer
        if layer.ratio == 128:
            state_copy = 3 * (length % layer.sizes.hca_state_copies)
            return {"state": layer.compressor_state[slot, state_copy : state_copy + 3]} if length % 128 else {}
        if layer.ratio == 0:
            return {}
        rings, opened = layer.sizes.csa, length // 4 * 4
        current, previous = torch.arange(opened, length), torch.arange(max(0, opened - 4), length)
        compressor_state = layer.compressor_state[slot]
        return {
            "current k": compressor_state[current % rings.current],
            "current z": compressor_state[rings.current_z + current % rings.current],
            "previous k": compressor_state[rings.previous_k + previous % rings.previous],
            "previous z": compressor_state[rings.previous_z + previous % rings.previous],
        }

    def entries(self, request: int) -> list[Tensor]:
        """Return the entries and keys of closed windows."""
        layer = self.layer
        if not layer.ratio:
            return []
        positions = torch.arange(0, self.lengths[request] // layer.ratio * layer.ratio, layer.ratio)
        rows = (torch.tensor(TABLES[request])[positions // 128] * 128 + positions % 128) // layer.ratio
        found = [strips(layer.entries, KVBuffer(layer.entries, layer.kv_format)).flatten(0, 1)[rows]]
        if layer.ratio == 4:
            keys = strips(layer.index_keys, KVBuffer(layer.index_keys, layer.key_format))
            found.append(keys.flatten(0, 1)[rows])
        return found


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape and torch.equal(got.view(torch.uint8), want.view(torch.uint8)), what


class Compared:
    """Requests with drafts and the same requests without. The latter decode a token per step in the smallest rings."""

    def __init__(self, ratio: int, formats: tuple[str, str, torch.dtype], sizes: StateRows) -> None:
        self.drafting = Requests(make_layer(ratio, formats, sizes))
        self.plain = Requests(make_layer(ratio, formats, state_rows(0)))
        self.rows: list[Tensor] = [self.drafting.ring(0, 0, 0)] * 2  # all window entries of each request so far

    def chunks(self, counts: list[int]) -> None:
        for requests in (self.drafting, self.plain):
            requests.step(counts, counts, decode=False)
        for r in (0, 1):
            self.keep_rows(r, min(counts[r], 128), counts[r])
        self.check()
        for r in (0, 1):
            end = self.plain.lengths[r] // 128 * 128
            if counts[r] and (r == 0 or not counts[0]):
                first = max(end - 128, self.plain.lengths[r] - counts[r])
                if first < end:
                    got, want = (x.ring(SNAPSHOT, first, end) for x in (self.drafting, self.plain))
                    assert_same(got, want, f"window rows of the snapshot, {first} to {end}")
                    if first == end - 128:
                        # A snapshot holds the live state at a multiple of 128 and nothing else.
                        self.check_compressor_state(SNAPSHOT, end)

    def verify(self, counts: list[int], kept: list[int], rejected: str) -> None:
        before = list(self.plain.lengths)
        self.drafting.step(counts, kept, decode=True, rejected=rejected)
        for i in range(max(kept)):
            one = [int(i < kept[r]) for r in (0, 1)]
            self.plain.step(one, one, decode=True)
            for r in (0, 1):
                self.keep_rows(r, one[r], one[r])
        # The window that the attention kernels of the step read.
        for r in (0, 1):
            if counts[r]:
                first = max(0, before[r] - 127)
                got = self.drafting.ring(r, first, before[r] + kept[r])
                assert_same(got, self.rows[r][first : before[r] + kept[r]], f"window of the step at {before[r]}")
        self.check()

    def keep_rows(self, request: int, last: int, count: int) -> None:
        """Keep the last entries from the plain ring.

        Zeros replace the entries that it never held and that no step reads.
        """
        length = self.plain.lengths[request]
        hidden = self.rows[request].new_zeros(count - last, self.rows[request].shape[1])
        self.rows[request] = torch.cat([self.rows[request], hidden, self.plain.ring(request, length - last, length)])

    def check(self) -> None:
        assert self.drafting.lengths == self.plain.lengths
        for r in (0, 1):
            length = self.plain.lengths[r]
            first = max(0, length - 127)
            got, want = (x.ring(r, first, length) for x in (self.drafting, self.plain))
            assert_same(got, want, f"window rows {first} to {length} of request {r}")
            self.check_compressor_state(r, length)
            for got, want in zip(self.drafting.entries(r), self.plain.entries(r)):
                assert_same(got, want, f"entries or keys of request {r} at {length}")

    def check_compressor_state(self, slot: int, length: int) -> None:
        got, want = (x.compressor_state(slot, length) for x in (self.drafting, self.plain))
        for name in want:
            assert_same(got[name], want[name], f"{name} of slot {slot} at {length}")


# Lengths before the first verify step: around multiples of 4 and 128, and before a window is full.
LENGTHS = st.one_of(st.integers(0, 12), st.integers(120, 136), st.integers(250, 262))


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """Create all tensors of a test on its `device`, which selects the implementation of the op."""

    @functools.wraps(test)
    def run(device: str, *args: object, **kwargs: object) -> None:
        if device == "cuda":
            extension.load()
        with torch.device(device):
            test(device, *args, **kwargs)

    return run


@DEVICES
@hypothesis.settings(max_examples=40)
@given(data=st.data())
@on_device
def test_requests_continue_from_any_verified_token(device: str, data: st.DataObject) -> None:
    ratio, formats = data.draw(st.sampled_from([0, 4, 128])), data.draw(st.sampled_from(FORMATS))
    d = data.draw(st.integers(1, 9), label="draft tokens")
    both = Compared(ratio, formats, state_rows(d))
    start = [data.draw(LENGTHS), data.draw(LENGTHS)]
    if any(start):
        both.chunks(start)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        if data.draw(st.integers(0, 4)) == 0:
            counts = [data.draw(st.sampled_from([0, 1, 2, 5, 7, 130])) for _ in (0, 1)]
            if any(counts):
                both.chunks(counts)
            continue
        count = data.draw(st.integers(1, d), label="tokens of a request")
        counts = [count, count if data.draw(st.booleans()) else 0]
        kept = [data.draw(st.integers(1, n)) if n else 0 for n in counts]
        both.verify(counts, kept, data.draw(st.sampled_from(list(REJECTED))))


@pytest.mark.full
@DEVICES
@pytest.mark.parametrize("d", range(1, 10))
@pytest.mark.parametrize("ratio", [0, 4, 128])
@on_device
def test_every_number_of_tokens_and_every_format(device: str, ratio: int, d: int) -> None:
    """Steps cross the end of a block with different numbers of accepted tokens. Then chunks take snapshots.

    Formats alternate with d. The examples above cover at most half of the combinations.
    """
    both = Compared(ratio, FORMATS[d % 3], state_rows(d))
    both.chunks([117, 125])
    for i in range(9):
        both.verify([d, d], [1 + i % d, 1 + 3 * i % d], list(REJECTED)[i % 3])
    both.chunks([130, 3])
    both.verify([d, d], [1, d], "nan")
    both.chunks([0, 260])
    both.verify([d, d], [d, 1], "huge")


# The smallest sizes, and one less for each.


def least_rows(d: int) -> StateRows:
    """Return the sizes that `state_rows` derives before it rounds them up."""
    return StateRows(127 + d, CsaCompressorState(d + 3, d + 7), d + 1)


def survives(ratio: int, sizes: StateRows, d: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if slots of `sizes` are large enough for steps of d tokens from every phase of a CSA window."""
    monkeypatch.setattr(reference, "CSA_COMPRESSOR_STATES", (state_rows(0).csa, sizes.csa))
    monkeypatch.setattr(chunks, "check_rows", lambda *arguments: None)
    try:
        for length, kept in product(range(140, 144), {1, 2, d}):
            both = Compared(ratio, FORMATS[2], sizes)
            both.chunks([length, 0])
            both.verify([d, 0], [kept, 0], "other")
            both.verify([d, 0], [d, 0], "other")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("d", [2, *(pytest.param(d, marks=pytest.mark.full) for d in (5, 9))])
@pytest.mark.parametrize(("ratio", "name"), [(0, "ring"), (4, "current"), (4, "previous"), (128, "hca_state_copies")])
def test_one_row_less_is_not_enough(ratio: int, name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = least_rows(d)
    assert survives(ratio, sizes, d, monkeypatch)
    part = sizes.csa if ratio == 4 else sizes
    less = part._replace(**{name: getattr(part, name) - 1})
    assert not survives(ratio, sizes._replace(csa=less) if ratio == 4 else less, d, monkeypatch)


@pytest.mark.parametrize(
    ("ratio", "sizes", "message"),
    [
        (0, {"ring": 128}, r"3 tokens of each request without `window`, but ring has 128 rows per slot, for at most 1"),
        (
            4,
            {"csa": CsaCompressorState(4, 8)},
            r"compressor_state has 24 rows per slot, for at most 1. Construct the cache with draft_tokens 3",
        ),
        (128, {"hca_state_copies": 3}, r"compressor_state has 9 rows per slot, for at most 2"),
        (
            4,
            {"csa": CsaCompressorState(4, 16)},
            r"compressor_state has 40 rows per slot; for ratio 4 expected one of \[24, 48, 64\]",
        ),
    ],
)
def test_slots_that_are_too_small_are_rejected(ratio: int, sizes: dict[str, object], message: str) -> None:
    requests = Requests(make_layer(ratio, FORMATS[2], state_rows(3)._replace(**sizes)))
    before = {name: None if t is None else t.clone() for name, t in vars(requests.layer).items() if name == "ring"}
    with pytest.raises(ValueError, match=message):
        requests.step([3, 3], [1, 1], decode=True)
    assert torch.equal(before["ring"].view(torch.int32), requests.layer.ring.view(torch.int32))


def test_raw_hca_state_rejects_drafts() -> None:
    layer = dataclasses.replace(make_layer(128, FORMATS[2], state_rows(3)), hca_state="raw")
    with pytest.raises(ValueError, match="compressor_state has 256 rows per slot, for at most 1"):
        Requests(layer).step([2, 2], [1, 1], decode=True)


def test_requests_with_different_numbers_of_tokens_are_chunks() -> None:
    with pytest.raises(ValueError, match="3 tokens for 2 requests without `window`; expected the same number for each"):
        Requests(make_layer(0, FORMATS[2], state_rows(3))).step([2, 1], [1, 1], decode=True)
