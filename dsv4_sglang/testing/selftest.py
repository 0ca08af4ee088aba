"""Comparison of the ops with `formula` on one layer of each kind, which `dsv4-sglang doctor` runs on the user's
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.attention import cuda_ops  # noqa: F401  (registers `attend` for CUDA)
from dsv4_sglang.attention.metadata import build_decode, build_prefill, gather_decode
from dsv4_sglang.attention.step_buffers import DecodeBuffers
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KeyFormat, KVFormat, make_kv_buffers
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.ops.rope import rope_table, rotate
from dsv4_sglang.testing.formula import EPS, FormulaInputs, frequencies, layer_output
from dsv4_sglang.testing.quantise import fp8_entries

HEADS = INDEX_HEADS = 64
PREFILL, TOKENS = 133, 140  # a chunk across a block boundary, then single tokens that complete a CSA window
BLOCKS = 4
SLOT = 1


@dataclass(frozen=True)
class Formats:
    """Formats of a comparison.

    Attributes:
        dtype: dtype of projections and queries.
        rows: KV format.
        keys: format of the index keys.
        stored: rounding of entries when they are stored.
        topk: entries that a token selects.
    """

    dtype: torch.dtype
    rows: KVFormat
    keys: KeyFormat
    stored: Callable[[Tensor], Tensor]
    topk: int

    @property
    def unwritten(self) -> float:
        """Fill value of KV buffers: NaN, also as e4m3 and exponent bytes, so that a read of unwritten memory is
        detected.
        """
        return 127 if self.rows is KVFormat.FP8 else float("nan")


# Exact formats can detect a wrong selection. The served formats select everything, because FP4 changes the order of
# scores.
EXACT = Formats(torch.float32, KVFormat.FP32, KeyFormat.FP32, lambda rows: rows, topk=16)
SERVED = Formats(torch.bfloat16, KVFormat.FP8, KeyFormat.MXFP4, fp8_entries, topk=512)


def random_inputs(ratio: int, seed: int = 0) -> FormulaInputs:
    """Return random projections and weights of one layer, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std + mean

    x = FormulaInputs(
        ratio=ratio,
        kv=normal(TOKENS, 512),
        kv_norm=normal(512, mean=1.0, std=0.1),
        q=normal(TOKENS, HEADS, 512),
        sink=normal(HEADS),
    )
    if ratio:
        streams = 2 if ratio == 4 else 1
        x.kv_score = normal(TOKENS, 2 * streams * 512)
        x.entry_norm = normal(512, mean=1.0, std=0.1)
        x.ape = normal(ratio, streams * 512, std=0.5)
    if ratio == 4:
        x.index_kv_score = normal(TOKENS, 4 * 128)
        x.index_norm = normal(128, mean=1.0, std=0.1)
        x.index_ape = normal(4, 256, std=0.5)
        x.index_q = normal(TOKENS, INDEX_HEADS, 128)
        x.index_weights = normal(TOKENS, INDEX_HEADS, std=128**-0.5 * INDEX_HEADS**-0.5)
    return x


class _Layer:
    """Cache tensors of one layer on a device. `step` runs one step of a server."""

    def __init__(self, x: FormulaInputs, formats: Formats, device: torch.device) -> None:
        self.x, self.formats, self.device = x.to(device), formats, device
        self.rope = rope_table(BLOCKS * 128, frequencies(x.ratio)).to(device)
        self.ring = self._rows(SLOT + 1, WINDOW)
        self.compressor_state = self.entries = self.keys = None
        if x.ratio == 4:
            self.compressor_state, self.entries = self._state(24, 640), self._rows(BLOCKS, 32)
            self.keys = make_kv_buffers(1, BLOCKS, 32, formats.keys, device)[0].fill_(formats.unwritten)
        elif x.ratio == 128:
            self.compressor_state, self.entries = self._state(3, 512), self._rows(1, BLOCKS)

    def _rows(self, blocks: int, rows: int) -> Tensor:
        return make_kv_buffers(1, blocks, rows, self.formats.rows, self.device)[0].fill_(self.formats.unwritten)

    def _state(self, rows: int, width: int) -> Tensor:
        return torch.full((SLOT + 1, rows, width), float("nan"), device=self.device)

    def step(self, step: StepMetadata, tokens: slice) -> Tensor:
        """Run append and attend for the request's tokens `tokens`. Returns [n, H, 512]."""
        x, dtype, rows_as, keys_as = self.x, self.formats.dtype, self.formats.rows.code, self.formats.keys.code
        window = None if step.is_decode else self._rows(1, step.window_size)

        def part(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return None if tensor is None else tensor[tokens].to(dtype).contiguous()

        torch.ops.dsv4_sglang.append(
            *(part(x.kv, dtype), part(x.kv_score), part(x.index_kv_score)),
            *(x.kv_norm, x.entry_norm, x.index_norm, x.ape, x.index_ape, self.rope, EPS),
            *(x.ratio, rows_as, keys_as),
            *(step.slots, step.prefix_lens, step.query_start, step.token_request, step.out_loc, step.track_slots),
            *(self.ring, self.compressor_state, self.entries, self.keys, window, None, None, None),
        )
        rows = lens = None
        if x.ratio == 128:
            rows, lens = step.hca_indices, step.hca_lens
        elif x.ratio == 4:
            n = step.positions.shape[0]
            rows = torch.empty(n, self.formats.topk, dtype=torch.int32, device=self.device)
            lens = step.csa_lens
            scores = torch.empty(n, BLOCKS * 32, device=self.device)
            index = (part(x.index_q, dtype), part(x.index_weights), self.keys)
            where = (step.block_table, step.token_request, step.positions, self.rope)
            torch.ops.dsv4_sglang.index_topk(*index, *where, keys_as, scores, rows)
        q = rotate(x.q[tokens], step.positions, self.rope).to(dtype)
        table = self.ring if window is None else window
        read = (table, step.window_indices, step.window_lens, self.entries, rows, lens)
        return torch.ops.dsv4_sglang.attend(q, x.sink, *read, step.positions, self.rope, 512**-0.5, rows_as)


def _steps(device: torch.device, topk: int) -> list[tuple[StepMetadata, slice]]:
    """Return one prefill step and the decode steps after it, for a request in noncontiguous blocks."""

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    blocks = torch.tensor([2, 1])
    slots_of_request = torch.cat([b * 128 + torch.arange(128) for b in blocks]).to(device)
    req_to_token = slots_of_request.to(torch.int32)[None]
    tables = {"req_to_token": req_to_token, "state_slot_of_request": ints([SLOT])}
    request = ints([0], torch.int64)
    prefill = build_prefill(
        req_pool_indices=request,
        prefix_lens=ints([0]),
        chunk_lens=ints([PREFILL]),
        positions=torch.arange(PREFILL, device=device),
        out_loc=slots_of_request[:PREFILL],
        track_slots=None,
        track_lens=None,
        top_k=topk,
        max_length=PREFILL,
        padding=0,
        **tables,
    )
    steps = [(prefill, slice(0, PREFILL))]
    for t in range(PREFILL, TOKENS):
        buffers, length = DecodeBuffers(1, 2, device), ints([t + 1])
        gather_decode(buffers, req_pool_indices=request, seq_lens=length, **tables)
        decode = build_decode(
            buffers,
            seq_lens=length,
            out_loc=slots_of_request[t : t + 1],
            track_mask=None,
            track_slots=None,
            top_k=topk,
        )
        steps.append((decode, slice(t, t + 1)))
    return steps


def layer_error(ratio: int, device: torch.device | str, formats: Formats = EXACT) -> float:
    """Return the relative L2 distance of the ops from the formulas for one layer, of the worst token.

    Expected values. EXACT: 1e-6 on a CPU, 1e-3 on a GPU that multiplies in tf32. SERVED: 1 to 2 percent, because values
    that differ after the rounding to bf16 can be rounded to different FP8 values.

    Args:
        ratio: compression ratio of the layer, 0, 4 or 128.
        device: device of the ops.
        formats: formats of the comparison.
    """
    device = resolve_device(device)
    inputs = random_inputs(ratio)
    layer = _Layer(inputs, formats, device)
    steps = _steps(device, formats.topk)
    found = torch.cat([layer.step(step, tokens) for step, tokens in steps]).float().cpu()
    expected = layer_output(inputs, formats.topk, formats.stored)
    return float(((found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max())
