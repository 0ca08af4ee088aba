"""The write path of SGLang's own DeepSeek-V4, called as its model, compressor and pools call it.

Kernels of a layer:

- one for the window entry (norm, RoPE, quantise, store),
- for each compressor one that pools the window and one that normalises, rotates, quantises and stores the entry,
- in prefill one more for each compressor, which keeps the inputs of the window that is still open.

Decode thus launches 5 kernels on a CSA layer, 3 on an HCA layer and 1 on an SWA layer. Pages, rings of compressor
states and plans are those of SGLang's pools: pages of 256 tokens, window pages of 128 tokens, a ring of 8 rows per
window page for CSA, and a ring of 128 rows per request for HCA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.append_ours import Inputs, random_inputs
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table

PAGE, WINDOW_PAGE, CSA_RING = 256, 128, 8
ENTRY_BYTES, KEY_BYTES, ALIGNMENT = 584, 132, 576


def page_bytes(rows: int) -> int:
    """Return the bytes of a page of `rows` entries: FlashMLA's layout, padded to a multiple of 576."""
    return math.ceil(rows * ENTRY_BYTES / ALIGNMENT) * ALIGNMENT


def window_page_slots(positions: Tensor, pages: int) -> Tensor:
    """Return the slot of each position within the `pages` window pages of its request, int64."""
    return positions // WINDOW_PAGE % pages * WINDOW_PAGE + positions % WINDOW_PAGE


@dataclass
class _Layer:
    inputs: Inputs
    window: Tensor
    bias: Tensor | None = None
    index_bias: Tensor | None = None
    state: Tensor | None = None
    entries: Tensor | None = None
    index_state: Tensor | None = None
    keys: Tensor | None = None


class InTree:
    """All layers of a model for `batch` requests of at most `context` tokens. See `append_ours.Ours` for `chunk`."""

    def __init__(
        self,
        config: DSV4Config,
        batch: int,
        context: int,
        device: torch.device,
        *,
        chunk: int = 0,
        inputs: list[Inputs] | None = None,
    ) -> None:
        from sglang.kernels.ops.attention.dsv4 import (
            compress_forward,
            compress_norm_rope_store,
            fused_k_norm_rope_flashmla,
        )

        self._pool, self._store_entry, self._store_row = (
            compress_forward,
            compress_norm_rope_store,
            fused_k_norm_rope_flashmla,
        )
        generator = torch.Generator(device=device).manual_seed(7)
        self.config, self.batch, self.chunk, self.device = config, batch, chunk, device
        tokens = batch * max(chunk, 1)
        pages = math.ceil(context / PAGE)
        self.context = pages * PAGE
        # Decode needs the page of the new token and the page before it, prefill all pages of the chunk.
        self.window_pages = math.ceil(context / WINDOW_PAGE) if chunk else 2
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(8)).view(batch, pages) + 1
        self.req_to_token = torch.zeros(batch + 1, self.context, dtype=torch.int32, device=device)
        slots = (order[:, :, None] * PAGE + torch.arange(PAGE)).view(batch, self.context)
        self.req_to_token[1:] = slots.int().to(device)
        self.requests = torch.arange(1, batch + 1, dtype=torch.int64, device=device)
        self.window_order = torch.randperm(batch, generator=torch.Generator().manual_seed(9)).to(device) + 1
        self.full_to_swa = torch.zeros((batch * pages + 1) * PAGE, dtype=torch.int64, device=device)
        positions = torch.arange(self.context, device=device)
        in_pages = window_page_slots(positions, self.window_pages)
        rows = self.window_order[:, None] * self.window_pages * WINDOW_PAGE + in_pages
        self.full_to_swa[self.req_to_token[1:].long().flatten()] = rows.flatten()
        self.positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.window_loc = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.entry_loc = {r: torch.zeros(tokens, dtype=torch.int64, device=device) for r in (CSA_RATIO, HCA_RATIO)}
        self.plans: dict[int, Any] = {}
        self.freqs = {}
        for ratio in (0, CSA_RATIO):
            table = rope_table(self.context, rope_frequencies(config, ratio, device))
            self.freqs[bool(ratio)] = torch.view_as_complex(table.unflatten(1, (-1, 2)).contiguous())
        self.layers = []
        for index in range(config.num_hidden_layers):
            given = inputs[index] if inputs else random_inputs(config.ratio(index), tokens, device, generator)
            self.layers.append(self._layer(given, batch * pages + 1))
        self.set_lengths(torch.zeros(batch, dtype=torch.int64))

    def _layer(self, inputs: Inputs, pages: int) -> _Layer:
        def raw(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.uint8, device=self.device)

        window_pages = (self.batch + 1) * self.window_pages
        layer = _Layer(inputs, raw(window_pages, page_bytes(WINDOW_PAGE)))
        if inputs.ratio == CSA_RATIO:
            rows = (window_pages * CSA_RING + CSA_RING + 4) // 4
            layer.state = torch.randn(rows, 4, 4 * 512, device=self.device)
            layer.index_state = torch.randn(rows, 4, 4 * 128, device=self.device)
            layer.entries, layer.keys = raw(pages, page_bytes(PAGE // 4)), raw(pages, PAGE // 4 * KEY_BYTES)
        elif inputs.ratio == HCA_RATIO:
            layer.state = torch.rand(self.batch + 2, HCA_RATIO, 2 * 512, device=self.device) + 0.5
            layer.entries = raw(pages, page_bytes(PAGE // HCA_RATIO))
        if inputs.ape is not None:
            layer.bias = bias_rows(inputs.ape, 512)
        if inputs.index_ape is not None:
            layer.index_bias = bias_rows(inputs.index_ape, 128)
        return layer

    @property
    def launches(self) -> int:
        prefill = 1 if self.chunk else 0
        kernels = {0: 1, CSA_RATIO: 5 + 2 * prefill, HCA_RATIO: 3 + prefill}
        return sum(kernels[layer.inputs.ratio] for layer in self.layers)

    def set_lengths(self, prefix_lens: Tensor) -> None:
        """Set the tokens of each request before the step, [batch] on the CPU. In decode, tensors keep their addresses
        because the recorded graph reads them."""
        steps = torch.arange(max(self.chunk, 1))
        positions = (prefix_lens[:, None] + steps).to(self.device)
        self.positions.copy_(positions.flatten())
        slots = self.req_to_token[self.requests[:, None], positions].long().flatten()
        self.window_loc.copy_(self.full_to_swa[slots])
        for ratio, loc in self.entry_loc.items():
            due = (positions.flatten() + 1) % ratio == 0
            loc.copy_(torch.where(due, slots // ratio, 0))
            plan = self._plan(ratio, prefix_lens)
            if ratio in self.plans and not self.chunk:
                self.plans[ratio].copy_(plan)
            else:
                self.plans[ratio] = plan

    def _plan(self, ratio: int, prefix_lens: Tensor) -> Any:
        from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan, CompressorPrefillPlan

        lens = prefix_lens + max(self.chunk, 1)
        where: dict[str, Any] = {
            "req_pool_indices": self.requests,
            "req_to_token": self.req_to_token,
            "compress_ratio": ratio,
            "full_to_state": self.full_to_swa,
            "swa_page_size": WINDOW_PAGE,
            "ring_size": CSA_RING if ratio == CSA_RATIO else HCA_RATIO,
        }
        if not self.chunk:
            return CompressorDecodePlan.generate(seq_lens=lens.to(self.device), **where)
        return CompressorPrefillPlan.generate(
            seq_lens=lens,
            extend_lens=torch.full_like(lens, self.chunk),
            num_q_tokens=self.batch * self.chunk,
            **where,
        )

    def step(self) -> None:
        for layer in self.layers:
            inputs = layer.inputs
            freqs = self.freqs[bool(inputs.ratio)]
            self._store_row(
                kv=inputs.kv,
                kv_weight=inputs.kv_norm,
                eps=self.config.rms_norm_eps,
                freqs_cis=freqs,
                positions=self.positions,
                out_loc=self.window_loc,
                kvcache=layer.window,
                page_size=WINDOW_PAGE,
            )
            if not inputs.ratio:
                continue
            self._compress(
                inputs.ratio, inputs.kv_score, layer.state, layer.bias, inputs.entry_norm, freqs, layer.entries
            )
            if inputs.index_kv_score is not None:
                self._compress(
                    inputs.ratio,
                    inputs.index_kv_score,
                    layer.index_state,
                    layer.index_bias,
                    inputs.index_norm,
                    freqs,
                    layer.keys,
                )

    def _compress(
        self, ratio: int, scores: Any, state: Any, bias: Any, norm: Tensor | None, freqs: Tensor, table: Any
    ) -> None:
        assert norm is not None
        plan, dim = self.plans[ratio], norm.shape[0]
        pooled = self._pool(
            kv_score_buffer=state,
            kv_score_input=scores,
            ape=bias,
            plan=plan,
            compress_ratio=ratio,
            head_dim=dim,
            is_online=False,
        )
        self._store_entry(
            pooled,
            plan,
            norm_weight=norm,
            norm_eps=self.config.rms_norm_eps,
            freq_cis=freqs,
            out_loc=self.entry_loc[ratio],
            kvcache=table,
            page_size=PAGE // ratio,
        )


def bias_rows(ape: Tensor, dim: int) -> Tensor:
    """Reorder a position bias for SGLang's kernels: [ratio, roles * dim] -> [roles * ratio, dim], previous role
    first."""
    return torch.cat(ape.split(dim, dim=1)).contiguous()
