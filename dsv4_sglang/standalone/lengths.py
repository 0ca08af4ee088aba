"""`RequestLengths`: the number of tokens of each request in every layer, and the checks of appends against it."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS


class Problem(enum.IntEnum):
    """Reason why a request must not be written in a step. If there are several, the lowest number is reported."""

    IDS = 1
    NOT_CONSECUTIVE = 2
    NEGATIVE = 3
    SEVERAL_SLOTS = 4
    NO_SUCH_SLOT = 5
    SHARED_SLOT = 6
    NO_BLOCK = 7
    WRONG_POSITION = 8

    def describe(self, slot: int, position: int, slots: int) -> str:
        """Return an error message, empty for WRONG_POSITION, whose message comes from `RequestLengths.expected`.

        Args:
            slot: state slot of the request.
            position: position of the token.
            slots: number of state slots.
        """
        return {
            Problem.IDS: "request_ids: a request's tokens are not next to each other",
            Problem.NOT_CONSECUTIVE: "positions: a request's tokens are not consecutive",
            Problem.NEGATIVE: "positions: a position is negative",
            Problem.SEVERAL_SLOTS: "request_slots: a request's tokens have several slots",
            Problem.NO_SUCH_SLOT: f"request_slots: a slot is not in -1..{slots - 1}",
            Problem.SHARED_SLOT: f"request_slots: two requests are in state slot {slot}; a slot belongs to one request",
            Problem.NO_BLOCK: f"position {position} of state slot {slot}, or one of the step after it, has no block: "
            f"allocate_block({slot}) once for every {BLOCK_TOKENS} tokens before they are written",
            Problem.WRONG_POSITION: "",
        }[self]


# Bounds of a slot without a request. No position is within them.
FREE = (torch.iinfo(torch.int32).max, -1)


class Claim(NamedTuple):
    """Writes of the appends of one step, [layers, B] each.

    Attributes:
        slots: int32, state slot of each request, -1 for a request that the layer must not write.
        outside: bool, True if the step does not begin where the layer's tokens end.
        rows: int64, row of `RequestLengths.table` that the layer's append writes.
        values: int32 [layers, B, 2], the values of that row.
    """

    slots: Tensor
    outside: Tensor
    rows: Tensor
    values: Tensor


class RequestLengths:
    """Bounds of the position at which the next step of each request may begin, in each layer.

    An append that begins elsewhere would leave a gap or write tokens twice. Every append is compared with these bounds
    and then updates them. They are on the device, because replays of CUDA graphs update them too.

    `table` [layers, 2 slots + 1, 2] int32:

    - Row s: first and last position at which the next step of the request in slot s may begin. Both are the number of
      its tokens, unless the last step had draft tokens, which the next step may roll back.
    - Row slots + s: `Problem` and position of the last request in slot s that a step skipped, 0 for none.
    - The last row receives the writes of padding requests.

    Attributes:
        claimed_by: the step that was last compared with the bounds. Any other step must be compared again.
    """

    def __init__(self, layers: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.table: Tensor = torch.zeros((layers, 2 * slots + 1, 2), dtype=torch.int32, device=device)
        self.claimed_by: object = None
        for column, bound in enumerate(FREE):
            self.table[:, :slots, column] = bound

    def set(self, slot: int, first: int, last: int) -> None:
        """Set the positions at which the next step of a request may begin, in every layer.

        Args:
            slot: state slot of the request.
            first: first allowed position.
            last: last allowed position.
        """
        self.table[:, slot, 0] = first
        self.table[:, slot, 1] = last
        self.claimed_by = None

    def free(self, slot: int) -> None:
        self.set(slot, *FREE)

    def save(self, slot: int) -> Tensor:
        """Return a copy [layers, 2] of the bounds of a slot, without waiting for the device."""
        return self.table[:, slot].clone()

    def load(self, slot: int, saved: Tensor) -> None:
        self.table[:, slot] = saved
        self.claimed_by = None

    def read(self, slot: int) -> tuple[int, int]:
        """Return the bounds of a slot. Waits for the device.

        Raises:
            RuntimeError: the layers have different numbers of tokens, because the last step is incomplete.
        """
        bounds = self.table[:, slot].tolist()
        if any(bound != bounds[0] for bound in bounds):
            lengths = sorted({last for _, last in bounds})
            raise RuntimeError(
                f"the layers of state slot {slot} have {lengths[0]} to {lengths[-1]} tokens; append the last step to "
                "every layer first"
            )
        first, last = bounds[0]
        return first, last

    def claim(self, slots: Tensor, begins: Tensor, after: Tensor, problem: Tensor) -> Claim:
        """Compare a step with the bounds. Device work only.

        Args:
            slots: [B] int32, state slot of each request, -1 for padding requests.
            begins: [B] int32, position of its first token.
            after: [B, 2] int32, its bounds after the step.
            problem: [B] int32, another `Problem` of the request, 0 for none.
        """
        slot = slots.long().clamp(0, self.slots - 1)
        bounds = self.table.index_select(1, slot)
        outside = ((begins < bounds[..., 0]) | (begins > bounds[..., 1])) & (slots >= 0)
        problem = torch.where(problem > 0, problem, Problem.WRONG_POSITION * outside.int())
        skipped = problem > 0
        written = slots.expand_as(problem).masked_fill(skipped, -1)
        rows = torch.where(skipped, self.slots + slot, slot.masked_fill(slots < 0, 2 * self.slots))
        values = torch.where(skipped[..., None], torch.stack((problem, begins.expand_as(problem)), -1), after)
        return Claim(written, outside, rows, values)

    def commit(self, layer: int, claim: Claim) -> None:
        """Record what the layer has appended. Device work only."""
        self.table[layer].index_copy_(0, claim.rows[layer], claim.values[layer])

    def expected(self, layer: int, slot: int, position: int) -> str:
        """Return an error message for a step that begins at a wrong position.

        Args:
            layer: id of the layer.
            slot: state slot of the request.
            position: position at which the step begins.
        """
        first, last = self.table[layer, slot].tolist()
        if (first, last) == FREE:
            return f"state slot {slot} holds no request: admit_request() first"
        where = f"at {last}" if first == last else f"at one of {first}..{last}"
        return (
            f"positions: state slot {slot} has {last} tokens in layer {layer}, so its next step begins {where}, not at "
            f"{position}"
        )

    def raise_if_skipped(self) -> None:
        """Raise ValueError if a step has skipped a request since the last call. Waits for the device."""
        skipped = self.table[:, self.slots : 2 * self.slots]
        found = skipped[..., 0].nonzero().tolist()
        if not found:
            return
        layer, slot = found[0]
        number, position = skipped[layer, slot].tolist()
        problem = Problem(number)
        skipped.zero_()
        reason = problem.describe(slot, position, self.slots) or self.expected(layer, slot, position)
        raise ValueError(f"a step that was not read back skipped state slot {slot} at position {position}: {reason}")
