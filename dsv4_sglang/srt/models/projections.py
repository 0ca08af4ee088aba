"""Projections of a layer's input, and the modules that hold their parameters, with the names that SGLang's loader
expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.kernels.ops.gemm.bf16_fp32 import linear_bf16_fp32
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.utils import add_prefix
from torch import Tensor, nn
from torch.nn import functional as F

from dsv4_sglang.model.geometry import CSA_RATIO

# The normalised latent `[T, q_lora_rank]` from which both queries are projected, or its FP8 codes and scales.
Latent = Tensor | tuple[Tensor, Tensor]


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight.T with an fp32 result: `[T, in]`, `[out, in]` to `[T, out]`."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return linear_bf16_fp32(x, weight)
    return F.linear(x.float(), weight.float())


def linear(name: str, prefix: str, width: int, out: int, quant_config: Any = None) -> ReplicatedLinear:
    """Return SGLang's layer `[T, width]` to `[T, out]`, whose weight its loader finds as `name` in module `prefix`."""
    return ReplicatedLinear(width, out, bias=False, quant_config=quant_config, prefix=add_prefix(name, prefix))


class ProjectedInput(NamedTuple):
    """Projections of a layer's input besides those of query and window entry, None where the layer has none.

    Attributes:
        kv_score, index_kv_score: as in `cache.append.Projections`.
        index_weights: fp32 [T, index heads], weights of the heads of the indexer.
    """

    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_weights: Tensor | None = None


class FusedProjections:
    """Projections of one x with fp32 results, whose weights are one matrix, so that one GEMM computes them all.

    Args:
        linears: layers that hold the weights [out, in].
    """

    def __init__(self, linears: Sequence[ReplicatedLinear]) -> None:
        self.linears = linears
        self.widths: list[int] = []
        self.weight: Tensor | None = None

    def fuse(self) -> None:
        """Concatenate the weights. The parameters of the layers become views.

        Called after each loading of weights. Only the first call moves the parameters. Later loads write through them
        into the same memory, whose addresses CUDA graphs contain.
        """
        if self.weight is not None or not self.linears:
            return
        self.widths = [linear.weight.shape[0] for linear in self.linears]
        self.weight = torch.cat([linear.weight.data for linear in self.linears])
        for linear, part in zip(self.linears, self.weight.split(self.widths)):
            linear.weight.data = part

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return the projections [T, out] of x [T, in]."""
        self.fuse()
        return [] if self.weight is None else list(linear_fp32(x, self.weight).split(self.widths, dim=-1))


class CompressorWeights(nn.Module):
    """Parameters of a compressor, with the names that SGLang's loader expects. `ape` keeps the stored layout."""

    def __init__(self, config: Any, ratio: int, dim: int, prefix: str) -> None:
        super().__init__()
        # Ratio 4 has two overlapping streams (SPEC 3.1), each with keys and scores.
        streams = 2 if ratio == CSA_RATIO else 1
        self.ape = nn.Parameter(torch.empty(ratio, streams * dim, dtype=torch.float32), requires_grad=False)
        self.wkv_gate = linear("wkv_gate", prefix, config.hidden_size, 2 * streams * dim)
        self.norm = RMSNorm(dim, eps=config.rms_norm_eps, weight_dtype=torch.float32)
        # SGLang's kernels use another layout of `ape`. This flag tells its loader that there is nothing to convert.
        self.ape_converted = True


class IndexerWeights(nn.Module):
    """Parameters of a CSA layer's indexer and its projections."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = linear("wq_b", prefix, config.q_lora_rank, self.heads * self.dim, quant_config)
        self.weights_proj = linear("weights_proj", prefix, config.hidden_size, self.heads)
        self.compressor = CompressorWeights(config, CSA_RATIO, self.dim, add_prefix("compressor", prefix))

    def forward(self, latent: Latent) -> Tensor:
        """Return raw index queries `[T, heads, 128]`."""
        query, _ = self.wq_b(latent)
        return query.view(-1, self.heads, self.dim)
