"""The write path of this package: one `append` per layer, each layer with its own buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVFormat, make_kv_buffers
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops import extension
from dsv4_sglang.ops.rope import rope_table


def ops_for(device: torch.device) -> None:
    """Load the ops of the device. On CUDA the first call builds the extension."""
    if device.type == "cuda":
        extension.load()


@dataclass
class Inputs:
    """Projections of a step and parameters of one layer. Both subjects can be given the same instance."""

    ratio: int
    kv: Tensor
    kv_norm: Tensor
    kv_score: Tensor | None = None
    entry_norm: Tensor | None = None
    ape: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_norm: Tensor | None = None
    index_ape: Tensor | None = None


def random_inputs(ratio: int, tokens: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """Return random unit-variance projections and parameters of one layer.

    Args:
        ratio: compression ratio of the layer, 0 without compression.
        tokens: tokens of the step.
        device: device of the tensors.
        generator: source of the random numbers.

    Returns:
        The inputs: kv [tokens, 512] bf16, scores fp32 in the order of the model's weights (SPEC 3.1).
    """

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    inputs = Inputs(ratio, normal(tokens, 512, dtype=torch.bfloat16), 1 + 0.1 * normal(512, dtype=torch.bfloat16))
    if ratio:
        roles = 2 if ratio == CSA_RATIO else 1
        inputs.kv_score = normal(tokens, 2 * roles * 512)
        inputs.entry_norm, inputs.ape = 1 + 0.1 * normal(512), normal(ratio, roles * 512)
    if ratio == CSA_RATIO:
        inputs.index_kv_score = normal(tokens, 4 * 128)
        inputs.index_norm, inputs.index_ape = 1 + 0.1 * normal(128), normal(ratio, 2 * 128)
    return inputs


@dataclass
class _Layer:
    inputs: Inputs
    ring: Tensor
    compressor_state: Tensor | None
    entries: Tensor | None
    keys: Tensor | None


class Ours:
    """All layers of a model for `batch` requests of at most `context` tokens.

    With `chunk` 0 a step is a decode step of one token per request. Otherwise it is a prefill step that writes `chunk`
    tokens of every request from position 0.
    """

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
        generator = torch.Generator(device=device).manual_seed(7)
        self.config, self.batch, self.chunk, self.device = config, batch, chunk, device
        tokens = batch * max(chunk, 1)
        blocks_a_request = math.ceil(context / BLOCK)
        blocks = batch * blocks_a_request + 1
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(8)) + 1
        self.block_table = order.view(batch, blocks_a_request).to(device)
        self.slots = (torch.randperm(batch, generator=torch.Generator().manual_seed(9)) + 1).int().to(device)
        self.prefix_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1) * max(chunk, 1)
        self.query_start = starts.int().to(device)
        self.token_request = torch.arange(batch).repeat_interleave(max(chunk, 1)).int().to(device)
        self.out_loc = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.rope = {
            bool(ratio): rope_table(context, rope_frequencies(config, ratio, device)) for ratio in (0, CSA_RATIO)
        }
        self.window = None
        if chunk:
            self.window = make_kv_buffers(1, 1, tokens + BLOCK * batch, KVFormat.FP8, device)[0]
        self.layers = []
        for index in range(config.num_hidden_layers):
            ratio = config.ratio(index)
            given = inputs[index] if inputs else random_inputs(ratio, tokens, device, generator)
            self.layers.append(self._layer(ratio, given, blocks))
        self.set_lengths(torch.zeros(batch, dtype=torch.int64))

    def _layer(self, ratio: int, inputs: Inputs, blocks: int) -> _Layer:
        ring = make_kv_buffers(1, self.batch + 1, BLOCK, KVFormat.FP8, self.device)[0]
        layer = _Layer(inputs, ring, None, None, None)
        if ratio == CSA_RATIO:
            layer.compressor_state = torch.randn(self.batch + 1, 24, 640, device=self.device)
            layer.entries = make_kv_buffers(1, blocks, BLOCK // CSA_RATIO, KVFormat.FP8, self.device)[0]
            layer.keys = make_kv_buffers(1, blocks, BLOCK // CSA_RATIO, KeyFormat.MXFP4, self.device)[0]
        elif ratio == HCA_RATIO:
            layer.compressor_state = torch.rand(self.batch + 1, 3, 512, device=self.device) + 0.5
            layer.entries = make_kv_buffers(1, 1, blocks, KVFormat.FP8, self.device)[0]
        return layer

    @property
    def launches(self) -> int:
        return len(self.layers)

    def set_lengths(self, prefix_lens: Tensor) -> None:
        """Set the tokens of each request before the step, [batch] on the CPU. Tensors keep their addresses because the
        recorded graph reads them."""
        lens = prefix_lens.to(self.device)
        self.prefix_lens.copy_(lens)
        steps = torch.arange(max(self.chunk, 1), device=self.device)
        positions = (lens[:, None] + steps).flatten()
        owner = self.token_request.long()
        self.out_loc.copy_(self.block_table[owner, positions // BLOCK] * BLOCK + positions % BLOCK)

    def step(self) -> None:
        for layer in self.layers:
            inputs = layer.inputs
            torch.ops.dsv4_sglang.append(
                inputs.kv,
                inputs.kv_score,
                inputs.index_kv_score,
                inputs.kv_norm,
                inputs.entry_norm,
                inputs.index_norm,
                inputs.ape,
                inputs.index_ape,
                self.rope[bool(inputs.ratio)],
                self.config.rms_norm_eps,
                inputs.ratio,
                KVFormat.FP8.code,
                KeyFormat.MXFP4.code,
                self.slots,
                self.prefix_lens,
                self.query_start,
                self.token_request,
                self.out_loc,
                None,
                layer.ring,
                layer.compressor_state,
                layer.entries,
                layer.keys,
                self.window,
                None,
                None,
                None,
            )
