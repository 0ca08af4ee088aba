"""Random layers and steps for the CUDA ops, and a comparison of their output with the reference's bytes.

State is random bytes rather than the result of earlier steps. An op may only move it or combine it with the step's
inputs, and every byte that it must not touch is compared too.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVBuffer, KVFormat
from dsv4_sglang.model.geometry import StateRows, state_rows
from dsv4_sglang.ops import extension

DEVICE = torch.device("cuda")
POSITIONS = 4096
NO_DRAFTS = state_rows(0)
KINDS = {"swa": 0, "csa": 4, "hca-online": 128, "hca-raw": 128}
# (kv dtype, KV format, key format)
FORMATS = [
    (torch.bfloat16, "fp8", "mxfp4"),
    (torch.bfloat16, "fp8", "nvfp4"),
    (torch.float32, "fp32", "fp32"),
    (torch.bfloat16, "bf16", "mxfp4"),
    (torch.float32, "fp8", "nvfp4"),
]
# Largest share of quantised numbers that may differ by one code. In these a last-bit difference of a sum, an
# exponential or a norm decides the rounding. Plain copies and integers are compared exactly.
MAX_SHARE = 1e-4


def ops():
    """Return the ops with their CUDA implementations loaded."""
    extension.load()
    return torch.ops.dsv4_sglang


def recorded(call: Callable[[], Any], warm_up: bool = False) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record `call` into a CUDA graph. Return the graph and what `call` returned.

    With `warm_up` run it first on another stream, for kernels that are compiled or scheduled in their first call.
    """
    if warm_up:
        stream = torch.cuda.Stream()
        # Otherwise the call may read what its inputs' memory held before they were written.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def printed(capfd: Any) -> str:
    """Return what kernels printed into the buffer of C's stdout."""
    torch.cuda.synchronize()
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out


def bytes_like(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return arbitrary contents of a table: any bytes, or floats without NaN."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def strided_copy(t: Tensor, device: torch.device | str = DEVICE) -> Tensor:
    """Copy a tensor to the device, keeping the gaps between its rows."""
    copy = torch.zeros(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device=device)
    return copy.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)


def copied(tensors: dict[str, Tensor | None], device: torch.device | str) -> dict[str, Tensor | None]:
    """Return copies of the tensors on the device."""
    return {name: None if t is None else strided_copy(t, device) for name, t in tensors.items()}


def tokens_of(requests: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Return the tensors of a step's requests (state slot or -1, tokens before, tokens now).

    Returns:
        State slots and tokens before the step, int32 [B], first token of each request, int32 [B + 1], request and
        position of each token, int64 [T], and the number of blocks that each request needs.
    """
    slots, lengths, counts = (torch.tensor(c, dtype=torch.int32) for c in zip(*requests))
    start = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    request = torch.repeat_interleave(torch.arange(len(requests)), counts.long())
    positions = lengths[request].long() + torch.arange(len(request)) - start[request].long()
    return slots, lengths, start, request, positions, ((lengths + counts + 127) // 128).tolist()


@dataclass
class Layer:
    """Weights and tables of one layer, on the CPU. `on` copies them to a device."""

    kind: str
    dtype: torch.dtype = torch.bfloat16
    rows: str = "fp8"
    keys: str = "mxfp4"
    slots: int = 8
    blocks: int = 64
    seed: int = 0
    sizes: StateRows = NO_DRAFTS
    weights: dict[str, Tensor | None] = field(default_factory=dict)
    tables: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def ratio(self) -> int:
        return KINDS[self.kind]

    def __post_init__(self) -> None:
        if self.weights:
            return
        g = torch.Generator().manual_seed(self.seed)
        csa = self.ratio == 4
        angles = torch.outer(torch.arange(POSITIONS).float(), torch.rand(32, generator=g))
        self.weights = {
            "kv_norm": (1 + 0.2 * torch.randn(512, generator=g)).to(self.dtype),
            "entry_norm": (1 + 0.2 * torch.randn(512, generator=g)).to(self.dtype) if self.ratio else None,
            "index_norm": 1 + 0.2 * torch.randn(128, generator=g) if csa else None,
            "ape": {0: None, 4: torch.randn(4, 1024, generator=g), 128: torch.randn(128, 512, generator=g)}[self.ratio],
            "index_ape": torch.randn(4, 256, generator=g) if csa else None,
            "rope": torch.stack([angles.cos(), angles.sin()], -1).flatten(1),
        }
        width, row_dtype = KVFormat(self.rows).width, KVFormat(self.rows).dtype
        ring = bytes_like((self.slots, self.sizes.ring, width), row_dtype, g)
        entries = keys = compressor_state = None
        if csa:
            entries = bytes_like((self.blocks, 32, width), row_dtype, g)
            keys = bytes_like((self.blocks, 32, KeyFormat(self.keys).width), KeyFormat(self.keys).dtype, g)
            compressor_state = torch.randn(self.slots, self.sizes.csa.rows, 640, generator=g)
        elif self.ratio == 128:
            entries = bytes_like((1, self.blocks, width), row_dtype, g)
            rows = 3 * self.sizes.hca_state_copies if self.kind == "hca-online" else 256
            compressor_state = torch.randn(self.slots, rows, 512, generator=g)
            if self.kind == "hca-online":
                compressor_state[:, 1::3] = compressor_state[:, 1::3].abs() * 20 + 1
                compressor_state[:, 2::3] *= compressor_state[:, 1::3]
        self.tables = {
            "ring": ring,
            "compressor_state": compressor_state,
            "entries": entries,
            "index_keys": keys,
            "swa_pos": torch.randint(0, 999, (self.slots, self.sizes.ring), dtype=torch.int32, generator=g),
            "swa_head": torch.randint(0, 99, (self.slots,), dtype=torch.int32, generator=g),
            "tail_len": torch.randint(0, 99, (self.slots,), dtype=torch.int32, generator=g),
        }

    def on(self, device: torch.device | str) -> "Layer":
        return replace(self, weights=copied(self.weights, device), tables=copied(self.tables, device))


@dataclass
class Step:
    """Inputs of one append. A request is (state slot or -1, tokens before, tokens now); in a decode step all requests
    have the same number of tokens."""

    requests: list[tuple[int, int, int]]
    decode: bool
    batch: dict[str, Tensor]
    inputs: dict[str, Tensor | None]
    window: Tensor | None

    @classmethod
    def make(cls, layer: Layer, requests: list[tuple[int, int, int]], decode: bool, track: bool = True, seed: int = 1):
        """Return a step with random inputs. Every request has its own blocks.

        Args:
            layer: layer to which the step appends.
            requests: (state slot or -1, tokens before, tokens now) of each.
            decode: a decode step, else a prefill step.
            track: write snapshots to free slots (`_track`).
            seed: seed of the random numbers.
        """
        g = torch.Generator().manual_seed(seed)
        slots, lengths, start, request, positions, needed = tokens_of(requests)
        tokens = len(request)
        # Each request owns contiguous blocks; the requests are in random order.
        assert sum(needed) <= layer.blocks, f"the step needs {sum(needed)} blocks, the layer has {layer.blocks}"
        first, used = [0] * len(requests), 0
        for b in torch.randperm(len(requests), generator=g).tolist():
            first[b], used = used, used + needed[b]
        out_loc = torch.tensor(first)[request] * 128 + positions
        batch = {
            "slots": slots,
            "prefix_lens": lengths,
            "query_start": start,
            "token_request": request.int(),
            "out_loc": out_loc,
            "staging_slots": _track(layer, requests, request, positions) if track else None,
        }
        columns = {0: 0, 4: 2048, 128: 1024}[layer.ratio]
        # Columns of a wider, fused projection: the row stride is larger than the row.
        fused = torch.randn(tokens, 512 + 64, generator=g).to(layer.dtype)
        score = torch.randn(tokens, columns + 512, generator=g) * 2 if columns else None
        inputs = {
            "kv": fused[:, 64:],
            "kv_score": None if score is None else score[:, :columns],
            "index_kv_score": score[:, columns:] if layer.ratio == 4 else None,
        }
        stored = KVFormat(layer.rows)
        shape = (1, tokens + 128 * len(requests), stored.width)
        window = None if decode else bytes_like(shape, stored.dtype, g)
        return cls(requests, decode, batch, inputs, window)

    def on(self, device: torch.device | str) -> tuple[dict, dict, Tensor | None]:
        """Return batch, inputs and a copy of the window workspace on the device."""
        return copied(self.batch, device), copied(self.inputs, device), copied({"": self.window}, device)[""]

    def run(self, implementation, layer: Layer) -> Tensor | None:
        """Call `implementation.append` on a layer on any device. Return the window workspace."""
        batch, inputs, window = self.on(layer.tables["ring"].device)
        self.call(implementation, layer, batch, inputs, window)
        return window

    @staticmethod
    def call(implementation, layer: Layer, batch: dict, inputs: dict, window: Tensor | None) -> None:
        w, t = layer.weights, layer.tables
        implementation.append(
            inputs["kv"], inputs["kv_score"], inputs["index_kv_score"], w["kv_norm"], w["entry_norm"], w["index_norm"],
            w["ape"], w["index_ape"], w["rope"], 1e-6, layer.ratio, KVFormat(layer.rows).code,
            KeyFormat(layer.keys).code, batch["slots"], batch["prefix_lens"], batch["query_start"],
            batch["token_request"], batch["out_loc"], batch["staging_slots"],
            t["ring"], t["compressor_state"], t["entries"], t["index_keys"], window,
            t["swa_pos"], t["swa_head"], t["tail_len"],
        )  # fmt: skip


def _track(layer: Layer, requests: list[tuple[int, int, int]], request: Tensor, positions: Tensor) -> Tensor:
    """Choose snapshot slots per token: some requests save the entries of their last block of 128 to an unused slot."""
    taken = {slot for slot, _, _ in requests}
    free = [s for s in range(layer.slots) if s not in taken]
    track = torch.full((len(request),), -1, dtype=torch.int32)
    for b, (slot, length, count) in enumerate(requests):
        if slot >= 0 and free:
            block = (length + count - 1) // 128
            track[(request == b) & (positions // 128 == block)] = free.pop()
    return track


class Differences:
    """Counts quantised numbers that differ by one code. A larger difference is an error at once."""

    def __init__(self) -> None:
        self.numbers = self.apart = 0

    def codes(self, what: str, got: Tensor, expected: Tensor, largest: int = 1) -> None:
        """Compare integers that are in the order of the values they encode.

        Args:
            what: name for messages.
            got: result.
            expected: reference.
            largest: largest allowed difference.
        """
        distance = (got.int() - expected.int()).abs()
        wrong = (distance > largest).nonzero()
        assert not len(wrong), f"{what}: {len(wrong)} codes are more than {largest} apart, the first at {wrong[0]}"
        self.numbers += distance.numel()
        self.apart += int((distance != 0).sum())

    def exact(self, what: str, got: Tensor, expected: Tensor) -> None:
        self.close(what, got, expected, 0.0)

    def close(self, what: str, got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")

    def finish(self) -> None:
        # A few differences can occur by chance in any small sample.
        assert self.apart <= max(8, MAX_SHARE * self.numbers), f"{self.apart} of {self.numbers} codes differ by one"


def ordered(codes: Tensor, sign_bit: int) -> Tensor:
    """Return sign-magnitude codes as integers in the order of their values. Both zeros are 0."""
    magnitude = codes.int() & (sign_bit - 1)
    return torch.where(codes.int() & sign_bit != 0, -magnitude, magnitude)


def bf16_codes(t: Tensor) -> Tensor:
    return ordered(t.contiguous().view(torch.int16).int() & 0xFFFF, 0x8000)


def compare_rotated(d: Differences, what: str, got: Tensor, expected: Tensor) -> None:
    """Compare rotated channels [rows, 64] bf16 by pairs.

    A last-bit difference of an input changes a pair in proportion to its length. In a component that cancels, that can
    be many codes.
    """
    error = (got.float() - expected.float()).unflatten(-1, (-1, 2)).norm(dim=-1)
    length = expected.float().unflatten(-1, (-1, 2)).norm(dim=-1)
    d.exact(f"{what}: rotated pairs apart by more than their last bits", error > 2.0**-6 * length, error < 0)
    d.numbers += got.numel()
    d.apart += int((got != expected).sum())


def compare_rows(d: Differences, what: str, got: Tensor, expected: Tensor, before: Tensor) -> None:
    """Compare two KV buffers. Entries that the reference does not change, or copies, must be equal to the byte."""
    if got.dtype != torch.uint8:
        left = (expected == before).all(-1)
        d.exact(f"{what}: entries that must not change", got[left], expected[left])
        if got.dtype == torch.float32:
            d.close(what, got[~left], expected[~left])
        else:
            # One code before the norm can become two after it.
            d.codes(what, bf16_codes(got[~left][:, :448]), bf16_codes(expected[~left][:, :448]), 2)
            compare_rotated(d, what, got[~left][:, 448:], expected[~left][:, 448:])
        return
    (data, scales), (want, want_scales), (old, old_scales) = (
        KVBuffer(t, KVFormat.FP8).strips() for t in (got, expected, before)
    )
    # An entry quantised by the step has eight equal exponents. All others are random bytes from before.
    left = (want == old).all(-1) & (want_scales == old_scales).all(-1)
    new = ~left & (want_scales == want_scales[..., :1]).all(-1)
    d.exact(f"{what}: entries that must not change, or copies", data[~new], want[~new])
    d.exact(f"{what}: exponents that must not change, or copies", scales[~new], want_scales[~new])
    data, want, scales, want_scales = data[new], want[new], scales[new], want_scales[new]
    d.exact(f"{what}: the exponents of an entry", scales, scales[:, :1].expand_as(scales))
    d.codes(f"{what}: exponents", scales[:, 0], want_scales[:, 0])
    same = scales[:, 0] == want_scales[:, 0]
    d.codes(f"{what}: e4m3", ordered(data[same, :448], 0x80), ordered(want[same, :448], 0x80))
    compare_rotated(d, what, *(t[:, 448:].contiguous().view(torch.bfloat16) for t in (data, want)))


def compare_keys(d: Differences, got: Tensor, expected: Tensor) -> None:
    if got.dtype == torch.float32:
        d.close("index_keys", got, expected, 1e-4)
        return
    (data, scales), (want, want_scales) = (KVBuffer(t, KeyFormat.NVFP4).strips() for t in (got, expected))
    d.codes("index_keys: scales", scales, want_scales, 8)  # one power of two is 8 codes of e4m3
    same = (scales == want_scales).repeat_interleave(8, -1)
    for nibble, shift in (("low", 0), ("high", 4)):
        g, w = (ordered((t >> shift) & 0xF, 8) for t in (data, want))
        d.codes(f"index_keys: {nibble} e2m1", g[same], w[same])


def compare_layers(got: Layer, expected: Layer, before: Layer, step: Step) -> Differences:
    """Compare every table of a layer after a step. `before` is the layer before the step."""
    d = Differences()
    for name in ("ring", "entries"):
        if expected.tables[name] is not None:
            compare_rows(d, name, got.tables[name].cpu(), expected.tables[name], before.tables[name])
    if expected.tables["index_keys"] is not None:
        compare_keys(d, got.tables["index_keys"].cpu(), expected.tables["index_keys"])
    for name in ("swa_pos", "swa_head", "tail_len"):
        if expected.tables[name] is not None:
            d.exact(name, got.tables[name].cpu(), expected.tables[name])
    compressor_state = expected.tables["compressor_state"]
    if compressor_state is not None and got.kind == "hca-online":
        # At a multiple of 128 the state is empty and its bytes are undefined.
        written = torch.zeros(compressor_state.shape[:2], dtype=torch.bool)
        empty = torch.zeros_like(written)
        for slot, length, count in step.requests:
            for stop in range(length + 1 if step.decode else length + count, length + count + 1):
                if slot >= 0:
                    state_copy = 3 * (stop % got.sizes.hca_state_copies)
                    (written if stop % 128 else empty)[slot, state_copy : state_copy + 3] = True
        found, others = got.tables["compressor_state"].cpu(), ~written & ~empty
        d.close("compressor state (online)", found[written], compressor_state[written])
        d.exact("compressor state of other slots and lengths", found[others], compressor_state[others])
    elif compressor_state is not None:
        d.exact("compressor_state", got.tables["compressor_state"].cpu(), compressor_state)
    return d


def check_step(layer: Layer, step: Step) -> None:
    """Run a step on the GPU and by the reference, and compare."""
    expected, got = layer.on("cpu"), layer.on(DEVICE)
    window = step.run(torch.ops.dsv4_sglang, expected)
    got_window = step.run(ops(), got)
    d = compare_layers(got, expected, layer, step)
    if window is not None:
        compare_rows(d, "window", got_window.cpu(), window, step.window)
    d.finish()
