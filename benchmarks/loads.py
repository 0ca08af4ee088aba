"""Prefix lengths of a decode step's requests, which decide how many requests complete a window of 4 or 128 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO


@dataclass(frozen=True)
class Load:
    """`prefix_lens`: int64 [B] on the CPU, tokens of each request before the step. `weight`: share in a mean."""

    prefix_lens: Tensor
    weight: float = 1.0

    @property
    def csa_due(self) -> int:
        """Number of requests that write a CSA entry in the step."""
        return int(((self.prefix_lens + 1) % CSA_RATIO == 0).sum())

    @property
    def hca_due(self) -> int:
        return int(((self.prefix_lens + 1) % HCA_RATIO == 0).sum())


def _blocks(batch: int, context: int, generator: torch.Generator) -> Tensor:
    """Return the tokens in whole windows of 128 before the step, drawn from half to all of `context`, [batch]."""
    most = context // HCA_RATIO - 1
    return torch.randint(most // 2, most, (batch,), generator=generator) * HCA_RATIO


def lockstep(batch: int, context: int, phase: int, seed: int = 0) -> Load:
    """Return a load whose requests are all at the same position of their window of 128 tokens.

    Args:
        batch: number of requests.
        context: largest length of a request.
        phase: position within the window.
        seed: seed of the lengths.
    """
    return Load(_blocks(batch, context, torch.Generator().manual_seed(seed)) + phase)


def no_entry(batch: int, context: int) -> Load:
    return lockstep(batch, context, 1)


def csa_entry(batch: int, context: int) -> Load:
    return lockstep(batch, context, 67)


def both_entries(batch: int, context: int) -> Load:
    return lockstep(batch, context, 127)


def steady(batch: int, context: int) -> list[Load]:
    """Return loads of requests at random phases: a quarter of them write a CSA entry, 1 in 128 an HCA entry.

    Fewer than four requests get the three kinds of step in these shares. Larger batches are drawn several times.
    """
    if batch < CSA_RATIO:
        shares = (1 - 1 / CSA_RATIO, 1 / CSA_RATIO - 1 / HCA_RATIO, 1 / HCA_RATIO)
        kinds = (no_entry, csa_entry, both_entries)
        return [Load(kind(batch, context).prefix_lens, share) for kind, share in zip(kinds, shares)]
    loads = []
    for seed in range(4 if batch >= 128 else 8):
        generator = torch.Generator().manual_seed(1000 + seed)
        phases = torch.randint(0, HCA_RATIO, (batch,), generator=generator)
        loads.append(Load(_blocks(batch, context, generator) + phases))
    return loads
