"""`Step`: the tokens of one forward pass, for a program that manages slots and blocks itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsv4_sglang.cache.step import StepMetadata, v4_limits
from dsv4_sglang.model.geometry import BLOCK_TOKENS, WINDOW
from dsv4_sglang.standalone.allocator import ids_on
from dsv4_sglang.standalone.request_table import RequestTable


@dataclass(frozen=True)
class _Requests:
    """The B requests of a step that was read back.

    Attributes:
        slots: state slot of each request, -1 for padding requests.
        first: its first token in the step.
        begins: its tokens before the step.
        ends: its tokens after the step.
    """

    slots: list[int]
    first: list[int]
    begins: list[int]
    ends: list[int]

    @property
    def counts(self) -> list[int]:
        return [end - begin for begin, end in zip(self.begins, self.ends)]


class Step:
    """The tokens of one forward pass: T tokens of B requests. Tokens of a request are contiguous and in order.

    The constructor only stores the tensors. `metadata` is derived on first use, so layers that share a step share that
    work.

    A step waits for the device to read the tensors back: once for all layers to divide the tokens into requests, and
    once in the append of each layer to compare positions with the tokens that the layer has. It raises ValueError for a
    step that must not be written.

    A `decode` step has one token of each request, and nothing is read back. The same holds for a step whose metadata is
    derived while a CUDA graph is captured. Replays read the given tensors, which keep their addresses. A step that is
    not read back cannot raise: it skips requests that must not be written, like padding, and
    `KVCacheManager.raise_if_skipped` raises for them. Use a step in one capture only.

    Args:
        request_slots: [T] int32 or int64, state slot of each token's request, -1 for padding tokens.
        positions: [T] int32 or int64, position of each token in its request.
        request_ids: [T] int, distinct numbers for the requests of the step.
        requests: blocks and lengths of the running requests.
        decode: see above.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device.
    """

    def __init__(
        self,
        request_slots: Tensor,
        positions: Tensor,
        request_ids: Tensor,
        requests: RequestTable,
        *,
        decode: bool = False,
    ) -> None:
        device = requests.block_tables.device
        for name, tensor in (("request_slots", request_slots), ("positions", positions), ("request_ids", request_ids)):
            if tensor.dim() != 1 or tensor.shape != request_slots.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; expected one value per token, [{request_slots.numel()}]"
                )
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} is {tensor.dtype}; expected torch.int32 or torch.int64")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}; the cache is on {device}")
        self.request_slots = request_slots
        self.positions = positions
        self.request_ids = request_ids
        self.requests = requests
        self._decode = decode

    @property
    def is_decode(self) -> bool:
        """True for one token of each request. Attention then reads the rings, otherwise the workspace of `append`."""
        return self.metadata.is_decode

    @cached_property
    def _read(self) -> _Requests | None:
        """The requests of the step, None if it is not read back."""
        on_gpu = self.positions.device.type == "cuda"
        if self._decode or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return None
        tensors = self.request_slots, self.positions, self.request_ids
        slots, positions, ids = torch.stack([tensor.long() for tensor in tensors]).tolist()
        first = [t for t, request in enumerate(ids) if t == 0 or request != ids[t - 1]]
        stops = [*first[1:], len(ids)] if ids else []
        for begin, stop in zip(first, stops):
            if slots[begin:stop] != [slots[begin]] * (stop - begin):
                raise ValueError("request_slots: a request's tokens have several slots")
            if positions[begin:stop] != list(range(positions[begin], positions[begin] + stop - begin)):
                raise ValueError("positions: a request's tokens are not consecutive")
        found = _Requests(
            [slots[t] for t in first], first, [positions[t] for t in first], [positions[t - 1] + 1 for t in stops]
        )
        self._check(found, [ids[t] for t in first])
        return found

    def _check(self, found: _Requests, ids: list[int]) -> None:
        """Raise ValueError unless requests are apart in ids and slots, and slots and positions exist."""
        if len(set(ids)) < len(ids):
            raise ValueError("request_ids: a request's tokens are not next to each other")
        taken: set[int] = set()
        for slot, begin in zip(found.slots, found.begins):
            if not -1 <= slot < self.requests.slots:
                raise ValueError(f"request_slots: slot {slot} is not in -1..{self.requests.slots - 1}")
            if slot in taken:
                raise ValueError(f"request_slots: two requests are in state slot {slot}; a slot belongs to one request")
            if begin < 0:
                raise ValueError("positions: a position is negative")
            if slot >= 0:
                taken.add(slot)

    @cached_property
    def metadata(self) -> StepMetadata:
        """Metadata for the layers."""
        read, device, tokens = self._read, self.positions.device, len(self.positions)
        if read is None:
            query_start = torch.arange(tokens + 1, dtype=torch.int32, device=device)
            owner = query_start[:-1]
            is_decode = True
        else:
            query_start = ids_on(device, [*read.first, tokens])
            owner = ids_on(device, [b for b, count in enumerate(read.counts) for _ in range(count)])
            is_decode = all(count == 1 for count in read.counts)
        first = query_start[:-1].long()
        slots, at = self.request_slots[first].int(), self.positions.long()
        tables = self.requests.block_tables
        # A padding request gets the blocks of some slot, which are never read.
        block_table = tables[slots.long().clamp(0, len(tables) - 1)]
        out_loc = self._out_loc(block_table[owner.long()], at)
        if read is None:
            twice = (slots[:, None] == slots).tril(-1).any(1)
            slots = slots.masked_fill((slots >= len(tables)) | (out_loc < 0) | twice, -1)
            # The ops read the RoPE table at any position.
            at = at.masked_fill(slots < 0, 0)
        return StepMetadata.build(
            slots=slots,
            prefix_lens=at[first].int(),
            query_start=query_start,
            token_request=owner,
            positions=at,
            out_loc=out_loc,
            block_table=block_table,
            limits=v4_limits(),
            decode_ring_rows=WINDOW if is_decode else None,
        )

    @staticmethod
    def _out_loc(blocks: Tensor, at: Tensor) -> Tensor:
        """Return [T] int64, block id * 128 + position mod 128; negative if `blocks` [T, blocks] has no block for the
        position.
        """
        index = at // BLOCK_TOKENS
        block = blocks.gather(1, index.clamp(0, blocks.shape[1] - 1)[:, None]).squeeze(1).long()
        block = block.masked_fill((index < 0) | (index >= blocks.shape[1]), -1)
        return block * BLOCK_TOKENS + at % BLOCK_TOKENS

    def begin_append(self, layer: int) -> StepMetadata:
        """Return the metadata for the append of a layer, without the requests that the layer must skip.

        Raises:
            ValueError: the step was read back and must not be written. Nothing has changed.
        """
        step, read = self.metadata, self._read
        if read is not None:
            self.requests.check(layer, read.slots, read.begins, read.ends)
            return step
        given = self.request_slots.int(), self.positions.int()
        return replace(step, slots=self.requests.skip(layer, *given, step.slots))

    def end_append(self, layer: int, slots: Tensor) -> None:
        """Record that a layer has the step's tokens of `slots` [B] int32, those of `begin_append`."""
        ends = self.metadata.prefix_lens + self.metadata.query_start.diff()
        self.requests.advance(layer, slots, ends)
