"""Tensors at fixed addresses from which CUDA graphs read the metadata of a step. Letters as in `cache.step`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import HCA_RATIO, WINDOW
from dsv4_sglang.ops.schemas import NAMESPACE

gather_tables = getattr(torch.ops, NAMESPACE).gather_tables

# Index lists have widths that are multiples of this, as the attention kernels on a GPU require.
LIST_ALIGNMENT = 64


def align(width: int) -> int:
    """Return the smallest width of an index list that is at least `width`."""
    return -(-width // LIST_ALIGNMENT) * LIST_ALIGNMENT


class KernelLens(NamedTuple):
    """Entry lens of a step in the form that the kernels of `triton_metadata` take: of ratios A and B.

    Attributes:
        tensors: int32 [T] of each ratio.
        top_k: most entries that a token reads of a ratio that is limited.
        constants: the ratios, 0 for none; which are limited; and True if each token lists the blocks of its request.
    """

    tensors: tuple[Tensor, Tensor]
    top_k: int
    constants: dict[str, int | bool]

    @classmethod
    def of(cls, limits: Mapping[int, int | None], entry_lens: dict[int, Tensor], unused: Tensor) -> KernelLens:
        """Return the lens of a step.

        Args:
            limits: most entries that a token reads, by their ratio.
            entry_lens: int32 [T] of each ratio.
            unused: any tensor, for a ratio that there is not.

        Raises:
            ValueError: layers read entries of more ratios, or with more limits, than the kernels have arguments for.
        """
        if len(limits) > 2:
            raise ValueError(f"layers read entries of the ratios {list(limits)}; expected at most two")
        if len(top_k := {limit for limit in limits.values() if limit is not None}) > 1:
            raise ValueError(f"layers read at most {sorted(top_k)} entries; expected one limit")
        a, b = [*limits, 0, 0][:2]
        constants = {
            "RATIO_A": a,
            "RATIO_B": b,
            "LISTS_BLOCKS": HCA_RATIO in limits,
            "LIMITED_A": limits.get(a) is not None,
            "LIMITED_B": limits.get(b) is not None,
        }
        return cls((entry_lens.get(a, unused), entry_lens.get(b, unused)), max(top_k, default=0), constants)


class DecodeBuffers:
    """Tensors of a decode step at fixed addresses.

    Speculation verifies several tokens per request (docs/guides/speculation.md).

    Args:
        max_requests: largest number of requests.
        max_blocks: blocks of the longest context; 0 for layers without compressed entries, which read no block table.
        device: device of the tensors.
        ring_rows: entries of a window ring.
        tokens_per_request: tokens of each request in a step.
        sees_block: each token attends to the 128 tokens before the step and to all tokens of the step, as in a block
            that is drafted at once (DSPARK). Otherwise it attends to the 128 tokens that end with itself.
        limits: most entries that a token reads, by their ratio (`layer_spec.entry_limits`).
    """

    def __init__(
        self,
        max_requests: int,
        max_blocks: int,
        device: torch.device | str,
        ring_rows: int = WINDOW,
        tokens_per_request: int = 1,
        sees_block: bool = False,
        *,
        limits: Mapping[int, int | None],
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        tokens = max_requests * tokens_per_request
        self.ring_rows, self.tokens_per_request, self.sees_block = ring_rows, tokens_per_request, sees_block
        self.window_len = WINDOW + tokens_per_request if sees_block else WINDOW
        self.state_slots = ints(max_requests)  # state slot of each request, 0 for padding requests
        self.slots, self.prefix_lens = ints(max_requests), ints(max_requests)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.window_indices, self.window_lens = ints(tokens, align(self.window_len)), ints(tokens)
        self.limits, self.entry_lens = limits, {ratio: ints(tokens) for ratio in limits}
        self.kernel_lens = KernelLens.of(limits, self.entry_lens, unused=self.window_lens)
        self.block_table = ints(max_requests, align(max_blocks))
        # With one token per request, its HCA entries are the blocks of the request.
        lists_blocks = tokens_per_request > 1 and HCA_RATIO in limits
        self.hca_indices = ints(tokens, align(max_blocks)) if lists_blocks else self.block_table
        self.copy_src, self.copy_dst = ints(max_requests), ints(max_requests)
        # Constant, because each request has the same number of tokens.
        self.query_start = tokens_per_request * torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self.token_request = torch.arange(tokens, dtype=torch.int32, device=device) // tokens_per_request


class PrefillBuffers:
    """Tensors of a recorded prefill step at fixed addresses: up to `tokens` tokens of up to `requests` requests.

    A recorded step has one more request, the last one: the padding request, which has no state slot and owns the
    padding tokens after the batch. The kernels of the graph read the inputs (`state_slots` to `snapshot_lens`).
    `metadata.build_recorded` derives everything else from them inside the graph. Shapes do not depend on the batch.

    Args:
        tokens: tokens of the largest recorded step.
        requests: largest number of requests in a recorded step.
        max_blocks: blocks of the longest context; 0 for layers without compressed entries.
        staging_slots: state slots that hold the snapshots of a step until its end.
        device: device of the tensors.
        limits: as in `DecodeBuffers`.
    """

    def __init__(
        self,
        tokens: int,
        requests: int,
        max_blocks: int,
        staging_slots: range,
        device: torch.device | str,
        *,
        limits: Mapping[int, int | None],
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = requests + 1
        self.tokens, self.requests = tokens, requests
        # A request of n new tokens crosses at most n / 128 + 1 multiples of 128.
        self.most_snapshots = tokens // BLOCK + 1
        staging_slots = staging_slots[: tokens // BLOCK + requests]
        # Copies at the end of the step: staging slots, and the snapshot slot of each, below 1 for none.
        self.copy_src = torch.tensor(staging_slots, dtype=torch.int32, device=device)
        self.copy_dst = ints(len(staging_slots))
        # Inputs. `state_slots`: state slot of each request, 0 for none.
        self.inputs = ints(3, rows)
        self.state_slots, self.prefix_lens, self.chunk_lens = self.inputs
        # Snapshot slot to which the state slot of each request is copied after the step, 0 for none.
        self.rolling_dst = ints(rows)
        self.block_table = ints(rows, align(max_blocks))
        self.staging_slots, self.snapshot_lens = ints(rows, self.most_snapshots), ints(rows, self.most_snapshots)
        # Derived inside the graph.
        self.slots, self.query_start = ints(rows), ints(rows + 1)
        self.token_request, self.token_staging_slots = ints(tokens), ints(tokens)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.window_indices, self.window_lens = ints(tokens, WINDOW), ints(tokens)
        self.limits, self.entry_lens = limits, {ratio: ints(tokens) for ratio in limits}
        self.kernel_lens = KernelLens.of(limits, self.entry_lens, unused=self.window_lens)
        self.hca_indices = ints(tokens, align(max_blocks) if HCA_RATIO in limits else 0)

    def clear(self) -> None:
        """Make all tokens padding tokens, with no snapshot due."""
        self.inputs.zero_()
        self.staging_slots.fill_(-1)
        self.copy_dst.zero_()
        self.rolling_dst.zero_()

    def fill(
        self,
        *,
        req_pool_indices: Tensor,
        prefix_lens: Tensor,
        chunk_lens: Tensor,
        req_to_token: Tensor,
        state_slot_of_request: Tensor,
        staging_slots: Tensor | None,
        snapshot_lens: Tensor | None,
        copy_dst: Tensor | None,
        rolling_dst: Tensor | None,
    ) -> None:
        """Write the inputs of one batch before its graph is replayed.

        The scheduler updates its tables for the next batch as soon as a graph is launched, so the graph reads copies.

        Args:
            req_pool_indices, prefix_lens, chunk_lens: as in `metadata.build_prefill`.
            req_to_token, state_slot_of_request: as in `metadata.build_prefill`.
            staging_slots, snapshot_lens: as in `metadata.build_prefill`. The first of `copy_src` are used, in order.
            copy_dst: int32 [n], snapshot slots to which the first n of `copy_src` are copied at the end of the step;
                None without snapshots.
            rolling_dst: int32 [B], snapshot slots to which the state slots of the requests are copied at the end of the
                step, 0 for none; None without such copies.
        """
        n = req_pool_indices.shape[0]
        self.clear()
        self.prefix_lens[:n].copy_(prefix_lens)
        self.chunk_lens[:n].copy_(chunk_lens)
        gather_tables(
            req_pool_indices,
            prefix_lens + chunk_lens,
            state_slot_of_request,
            req_to_token,
            self.state_slots[:n],
            self.block_table[:n],
        )
        if staging_slots is not None and snapshot_lens is not None and copy_dst is not None:
            self.staging_slots[:n, : staging_slots.shape[1]].copy_(staging_slots)
            self.snapshot_lens[:n, : snapshot_lens.shape[1]].copy_(snapshot_lens)
            self.copy_dst[: len(copy_dst)].copy_(copy_dst)
        if rolling_dst is not None:
            self.rolling_dst[:n].copy_(rolling_dst)
