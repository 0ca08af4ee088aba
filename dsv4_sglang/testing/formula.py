"""One attention layer of one request, from the formulas (SPEC 1.3, 2 to 4), in fp32 and without a cache.

Written to be obviously correct: one query at a time over entries of the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6


@dataclass
class FormulaInputs:
    """Projections of T tokens and the layer's weights, fp32. None if the kind of layer does not have them.

    Attributes:
        ratio: compression ratio, 0, 4 or 128.
        kv: [T, 512].
        kv_norm, entry_norm: [512].
        q: [T, H, 512], before RoPE.
        sink: [H].
        kv_score: CSA [T, 4 x 512] = [prev k | cur k | prev z | cur z], HCA [T, 2 x 512] = [k | z].
        ape: [ratio, 1024 or 512].
        index_kv_score: [T, 4 x 128].
        index_norm: [128].
        index_ape: [4, 256].
        index_q: [T, Hi, 128], before RoPE.
        index_weights: [T, Hi].
    """

    ratio: int
    kv: Tensor
    kv_norm: Tensor
    q: Tensor
    sink: Tensor
    kv_score: Tensor | None = None
    entry_norm: Tensor | None = None
    ape: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_norm: Tensor | None = None
    index_ape: Tensor | None = None
    index_q: Tensor | None = None
    index_weights: Tensor | None = None

    def to(self, device: torch.device | str) -> FormulaInputs:
        moved: dict[str, Any] = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in vars(self).items()}
        return FormulaInputs(**moved)


def frequencies(ratio: int) -> Tensor:
    """Return fp32 [32]: base 10000 for window layers, 160000 with YaRN (factor 16, original length 65536) for the
    others.
    """
    powers = torch.arange(32, dtype=torch.float32) / 32
    if ratio == 0:
        return 10000.0**-powers
    plain = 160000.0**-powers
    ramp = ((torch.arange(32) - 15) / 10).clamp(0, 1)
    return plain / 16 * ramp + plain * (1 - ramp)


def rope(x: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
    """Rotate the pairs of the last 64 dims of x [T, ..., D] by position times frequency."""
    angle = positions.float()[:, None] * frequencies(ratio)
    rotation = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
    pairs = torch.view_as_complex(x[..., -64:].reshape(*x.shape[:-1], 32, 2).contiguous())
    pairs = pairs * rotation.reshape(len(x), *[1] * (x.dim() - 2), 32)
    return torch.cat([x[..., :-64], torch.view_as_real(pairs).flatten(-2)], -1)


def _normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _entries(score: Tensor, ape: Tensor, norm: Tensor, ratio: int) -> Tensor:
    """Return the entries [T // ratio, D] of the main compressor or the indexer's: pooled, normalised and rotated."""
    dim = norm.shape[0]
    rows = []
    for i in range(len(score) // ratio):
        own = slice(ratio * i, ratio * (i + 1))
        if ratio == 128:
            k, z = score[own, :dim], score[own, dim:] + ape
        else:
            k, z = score[own, dim : 2 * dim], score[own, 3 * dim :] + ape[:, dim:]
            if i:
                before = slice(4 * (i - 1), 4 * i)
                k = torch.cat([score[before, :dim], k])
                z = torch.cat([score[before, 2 * dim : 3 * dim] + ape[:, :dim], z])
        rows.append((z.softmax(0) * k).sum(0))
    if not rows:
        return torch.zeros(0, dim)
    return rope(_normalised(torch.stack(rows), norm), torch.arange(len(rows)) * ratio, ratio)


def layer_output(x: FormulaInputs, topk: int, row: Callable[[Tensor], Tensor] = lambda rows: rows) -> Tensor:
    """Return the attention output of every token, fp32 [T, H, 512], after the inverse RoPE, before the output
    projection.

    Args:
        x: inputs of the layer.
        topk: entries that a token selects.
        row: rounding of finished entries [n, 512] when they are stored. Index keys are never rounded.
    """
    t = torch.arange(len(x.kv))
    window = row(rope(_normalised(x.kv, x.kv_norm), t, x.ratio))
    q = rope(x.q, t, x.ratio)
    entries = scores = None
    if x.ratio:
        assert x.kv_score is not None and x.ape is not None and x.entry_norm is not None
        entries = row(_entries(x.kv_score, x.ape, x.entry_norm, x.ratio))
    if x.ratio == 4:
        assert x.index_kv_score is not None and x.index_ape is not None and x.index_norm is not None
        assert x.index_q is not None and x.index_weights is not None
        keys = _entries(x.index_kv_score, x.index_ape, x.index_norm, 4)
        similar = torch.einsum("thd,sd->ths", rope(x.index_q, t, 4), keys).relu()
        scores = torch.einsum("ths,th->ts", similar, x.index_weights)
    out = torch.zeros_like(q)
    for i in range(len(t)):
        rows = window[max(0, i - 127) : i + 1]
        if entries is not None:
            visible = (i + 1) // x.ratio
            chosen = torch.arange(visible)
            if scores is not None and visible > topk:
                chosen = scores[i, :visible].topk(topk).indices
            rows = torch.cat([rows, entries[chosen]])
        logits = torch.cat([q[i] @ rows.T / math.sqrt(512), x.sink[:, None]], 1)
        out[i] = logits.softmax(1)[:, :-1] @ rows
    return rope(out, t, x.ratio, inverse=True)
