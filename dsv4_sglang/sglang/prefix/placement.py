"""At which lengths of a request a checkpoint is taken."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_sglang.sglang.options import BLOCK


class Due(NamedTuple):
    """A checkpoint to take at `length` tokens. `needed`: some request will come for it (the end of a prompt, a
    branch); the others lie in wait for a branch and are taken only instead of something worth less."""

    length: int
    needed: bool


def due_in_prefill(begin: int, end: int, *, last: bool, interval: int, branch: int) -> list[Due]:
    """What a prefill step over the tokens [begin, end) of a request takes, ascending.

    `last`: the prompt ends with this step, so its end, aligned down, is due. `branch`: how far blocks of the path are
    cached; another request went on from there, so it is due too (at `begin` or before: nothing is). Every multiple of
    `interval` is due. A checkpoint needs the 128 tokens before it in the step.
    """
    least = -(-begin // BLOCK) * BLOCK + BLOCK
    lengths = {length: Due(length, False) for length in range(-(-least // interval) * interval, end + 1, interval)}
    if last:
        lengths[end // BLOCK * BLOCK] = Due(end // BLOCK * BLOCK, True)
    lengths[branch // BLOCK * BLOCK] = Due(branch // BLOCK * BLOCK, True)
    return sorted(due for due in lengths.values() if least <= due.length <= end)


def is_kept(length: int, interval: int) -> bool:
    """Whether a checkpoint taken in decode stays when the next one is there."""
    return length % interval == 0
