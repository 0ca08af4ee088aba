"""`RequestTable`: blocks and lengths of the running requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS

# Entry of a block table where a request has no block.
NO_BLOCK = -1
# Length of a slot without a request. No step begins there.
NO_REQUEST = -1
# Position that no step has skipped.
NOT_SKIPPED = torch.iinfo(torch.int32).min


class RequestTable:
    """The blocks of each state slot's request, and how many of its tokens each layer has.

    An append that begins elsewhere than at this length would leave a gap or write tokens twice. Lengths are on the
    device, because replays of CUDA graphs advance them too.

    Attributes:
        block_tables: [slots, blocks] int32 on the device, block ids of each slot's request, then -1.
    """

    def __init__(self, layers: int, slots: int, blocks: int, device: torch.device) -> None:
        self.slots = slots
        self.block_tables: Tensor = torch.full((slots, blocks), NO_BLOCK, dtype=torch.int32, device=device)
        # The last column takes the writes of requests that a step skips.
        self._lengths: Tensor = torch.full((layers, slots + 1), NO_REQUEST, dtype=torch.int32, device=device)
        # Position at which a step skipped the request of a slot. The last two elements are for slots that do not exist,
        # and for the writes of requests that are not skipped.
        self._skipped: Tensor = torch.full((slots + 2,), NOT_SKIPPED, dtype=torch.int32, device=device)
        self._owned: dict[int, list[int]] = {}

    def admit(self, slot: int) -> None:
        self._owned[slot] = []
        self._lengths[:, slot] = 0

    def release(self, slot: int) -> None:
        del self._owned[slot]
        self._lengths[:, slot] = NO_REQUEST

    def blocks_of(self, slot: int) -> list[int]:
        """Return the block ids of a request in the order of its tokens.

        Raises:
            ValueError: no request holds the slot.
        """
        if slot not in self._owned:
            raise ValueError(
                f"state slot {slot} holds none of the concurrent requests: expected a slot from admit_request that has "
                "not been released"
            )
        return list(self._owned[slot])

    def add_block(self, slot: int, block: int) -> None:
        blocks = self._owned[slot]
        self.block_tables[slot, len(blocks)] = block  # a fill, which does not wait for the device
        blocks.append(block)

    def clear(self, slot: int) -> None:
        """Remove the blocks of a request, which then has no tokens."""
        self.block_tables[slot].fill_(NO_BLOCK)
        self.admit(slot)

    def length_of(self, slot: int) -> int:
        """Return the number of tokens of a request. Waits for the device.

        Raises:
            RuntimeError: the layers have different numbers of tokens, because the last step is incomplete.
        """
        lengths = sorted(set(self._lengths[:, slot].tolist()))
        if len(lengths) > 1:
            raise RuntimeError(
                f"the layers of state slot {slot} have {lengths[0]} to {lengths[-1]} tokens; append the last step to "
                "every layer first"
            )
        return int(lengths[0])

    def check(self, layer: int, slots: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> None:
        """Raise ValueError if a layer must not append a step. Waits for the device.

        Args:
            layer: id of the layer.
            slots: state slot of each request, -1 for padding requests.
            begins: its tokens before the step.
            ends: its tokens after the step.
        """
        lengths = self._lengths[layer].tolist()
        for slot, begin, end in zip(slots, begins, ends):
            if slot < 0:
                continue
            if lengths[slot] == NO_REQUEST:
                raise ValueError(f"state slot {slot} holds no request: admit_request() first")
            if end > BLOCK_TOKENS * len(self._owned[slot]):
                raise ValueError(
                    f"position {end - 1} of state slot {slot} has no block: allocate_block({slot}) once for every "
                    f"{BLOCK_TOKENS} tokens before they are written"
                )
            if begin != lengths[slot]:
                raise ValueError(
                    f"positions: state slot {slot} has {lengths[slot]} tokens in layer {layer}, so its next step "
                    f"begins at {lengths[slot]}, not at {begin}"
                )

    def skip(self, layer: int, given: Tensor, begins: Tensor, slots: Tensor) -> Tensor:
        """Return the slots [B] int32 that a layer may append to, -1 for the others. Note those that are not padding.

        Device work only.

        Args:
            layer: id of the layer.
            given: [B] int32, state slot of each request, -1 for padding requests.
            begins: [B] int32, tokens of each request before the step.
            slots: [B] int32, `given` without the requests that no layer may append to.
        """
        lengths = self._lengths[layer].index_select(0, slots.long().masked_fill(slots < 0, self.slots))
        valid = (slots >= 0) & (begins == lengths)
        written = slots.masked_fill(~valid, -1)
        noted = given.long().masked_fill((given < 0) | (given >= self.slots), self.slots)
        noted = noted.masked_fill(valid | (given == -1), self.slots + 1)
        # In a CUDA graph `append` starts while the launch before it still runs. This one writes nothing that it reads.
        self._skipped.index_copy_(0, noted, begins)
        return written

    def advance(self, layer: int, slots: Tensor, ends: Tensor) -> None:
        """Record that a layer has the tokens of a step. Device work only.

        Args:
            layer: id of the layer.
            slots: [B] int32, the slots that the layer has appended to, -1 for none.
            ends: [B] int32, tokens of each request after the step.
        """
        self._lengths[layer].index_copy_(0, slots.long().masked_fill(slots < 0, self.slots), ends)

    def raise_if_skipped(self) -> None:
        """Raise ValueError if a step has skipped a request since the last call. Waits for the device."""
        positions = self._skipped[: self.slots + 1].tolist()
        self._skipped.fill_(NOT_SKIPPED)
        for slot, position in enumerate(positions):
            if position != NOT_SKIPPED:
                where = f"state slot {slot}" if slot < self.slots else f"a slot that is not in -1..{self.slots - 1}"
                raise ValueError(
                    f"a step that was not read back skipped {where} at position {position}: its tokens do not end "
                    "there, it has no block for the position, or it was in the step twice"
                )
