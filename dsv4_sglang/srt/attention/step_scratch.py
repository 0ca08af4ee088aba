"""Scratch memory of an attention backend."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_sglang.formats import KVFormat, make_kv_buffers
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.geometry import BLOCK_TOKENS, CSA_RATIO

# Bytes of index scores that a prefill step computes at a time: in an eager step, and in a CUDA graph.
SCRATCH_BYTES = 256 << 20
RECORDED_SCRATCH_BYTES = 128 << 20


class StepScratch:
    """Scratch memory of the steps of a backend. All layers share it, since a layer reads only what it wrote in the same
    step.

    CUDA graphs contain addresses of what `reserve` and `reserve_window` allocate, so this is never freed. Steps that
    need more use tensors that grow.

    Args:
        device: device of the tensors.
        dtype: dtype of the queries.
        top_k: entries that a token selects. 0 for a model without such layers, which needs neither indices nor scores.
        window_format: KV format of the window workspace.
        candidate_blocks: candidate blocks of a token (`layer_spec.Candidates`), 0 without.
        scored_per_block: index scores that a block of the cache needs in scratch, 0 for a selection that allocates its
            own.
    """

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        top_k: int,
        window_format: KVFormat,
        *,
        candidate_blocks: int = 0,
        scored_per_block: int = BLOCK_TOKENS // CSA_RATIO,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.top_k, self.window_format = top_k, window_format
        self.candidate_blocks, self.scored_per_block = candidate_blocks, scored_per_block
        # True in a recorded prefill step, which must not use scratch that may be freed.
        self.recorded = False
        self._reserved: dict[str, list[Tensor]] = {}
        self._growing: dict[str, Tensor] = {}
        self._window: Tensor | None = None
        self._reserved_window: Tensor | None = None

    # Memory of recorded steps

    def reserve(self, tokens: int, padded_heads: int, scores: int) -> None:
        """Allocate the scratch of recorded steps, except for their window workspace.

        Args:
            tokens: maximum number of tokens of a step.
            padded_heads: heads of a query buffer with padding heads; 0 if the queries have none.
            scores: maximum number of index scores that are computed at once.
        """
        if padded_heads:
            self._reserve("query", tokens * padded_heads * ENTRY_DIM, self.dtype)
        if self.top_k:
            self._reserve("indices", tokens * self.top_k, torch.int32)
            self._reserve("candidates", tokens * self.candidate_blocks, torch.int32)
            self._reserve("scores", scores, torch.float32)

    def reserve_window(self, entries: int) -> None:
        """Allocate the window workspace of recorded prefill steps."""
        self.window(entries)
        self._reserved_window = self._window

    def _reserve(self, name: str, elements: int, dtype: torch.dtype) -> None:
        """Reserve scratch for graphs. Graphs that were recorded with a smaller tensor keep it."""
        reserved = self._reserved.setdefault(name, [])
        if not reserved or reserved[-1].numel() < elements:
            reserved.append(torch.zeros(elements, dtype=dtype, device=self.device))

    # Tensors of a step

    def padded_query(self, tokens: int, heads: int) -> Tensor:
        """Return a buffer [tokens, heads, 512] for queries with padding heads, which are zero and must stay so."""
        return self._buffer("query", tokens, heads * ENTRY_DIM, self.dtype).view(tokens, heads, ENTRY_DIM)

    def indices(self, tokens: int) -> Tensor:
        """Return a buffer int32 [tokens, top_k] for the selected entries."""
        return self._buffer("indices", tokens, self.top_k, torch.int32)

    def candidates(self, tokens: int) -> Tensor:
        """Return a buffer int32 [tokens, candidate_blocks] for the candidate blocks."""
        return self._buffer("candidates", tokens, self.candidate_blocks, torch.int32)

    def scores(self, tokens: int, block_table: Tensor) -> Tensor:
        """Return a buffer fp32 [tokens, score_width] for index scores."""
        return self._buffer("scores", tokens, self.score_width(block_table), torch.float32)

    def window(self, entries: int) -> Tensor:
        """Return a window workspace, a KV buffer of `entries` entries."""
        if self._reserved_window is not None and self._reserved_window.shape[1] >= entries:
            return self._reserved_window[:, :entries]
        if self._window is None or self._window.shape[1] < entries:
            self._window = make_kv_buffers(1, 1, entries, self.window_format, self.device)[0]
        return self._window[:, :entries]

    def free(self) -> None:
        """Free the scratch that grows on demand. The scratch of CUDA graphs stays."""
        self._window = None
        self._growing.clear()

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return scratch `[rows, columns]`: the scratch of recorded graphs, or one that grows.

        It is initialised with zeros. Each name is used with a single number of columns, since padding columns must stay
        zero.
        """
        needed = rows * columns
        for scratch in (*self._reserved.get(name, ()), None if self.recorded else self._growing.get(name)):
            if scratch is not None and scratch.numel() >= needed:
                return scratch[:needed].view(rows, columns)
        if self.recorded:
            raise RuntimeError(f"scratch {name} of a recorded step: {rows} x {columns} elements were not reserved")
        self._growing[name] = torch.zeros(needed, dtype=dtype, device=self.device)
        return self._growing[name].view(rows, columns)

    # Sizes

    def scored_at_once(self, tokens: int, block_table: Tensor, most_bytes: int) -> int:
        """Return the number of tokens of a prefill step whose index scores are computed at once.

        Args:
            tokens: tokens of the step.
            block_table: block table of the step.
            most_bytes: maximum size of the scores, unless a single token has more.
        """
        return min(tokens, max(1, most_bytes // max(1, 4 * self.score_width(block_table))))

    def score_width(self, block_table: Tensor) -> int:
        """Return the scores per token: one per entry of the longest context, or none if all entries are selected."""
        visible = block_table.shape[1] * self.scored_per_block
        return visible if visible > self.top_k else 0
