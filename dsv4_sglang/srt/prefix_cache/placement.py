"""Lengths of a request at which snapshots are taken."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.resume_points import ResumePoint


class Due(NamedTuple):
    """A snapshot to take at `length` tokens, where `point` is in its turn.

    `needed`: a known use exists (the end of a prompt, or a branch point). Other snapshots serve possible later
    branches, and are taken only if a slot is free or can be taken from a less valuable snapshot.
    """

    length: int
    needed: bool
    point: ResumePoint


def due_in_prefill(begin: int, end: int, *, prompt: int, interval: int, branch: int) -> list[Due]:
    """Return the snapshots of a prefill step over the tokens [begin, end) of a request, ascending by length.

    Snapshots are due at:

    - the end of the prompt, aligned down to a block, in whichever chunk it is;
    - one block earlier if the prompt ends on a block: the same prompt again has to recompute at least one token;
    - the branch point;
    - every multiple of `interval`.

    A snapshot needs the 128 tokens before it in the same step.

    Args:
        begin: first token of the step.
        end: end of the step.
        prompt: tokens of the prompt.
        interval: distance of regular snapshots in tokens, a multiple of 128.
        branch: the branch point, the number of tokens of the path that another request has left in the cache; 0 for
            none. No effect at `begin` or before.
    """
    least = -(-begin // BLOCK) * BLOCK + BLOCK
    regular = range(-(-least // interval) * interval, end + 1, interval)
    lengths = {length: Due(length, False, ResumePoint.WITHIN) for length in regular}
    for needed, point in (branch, ResumePoint.WITHIN), (prompt - 1, ResumePoint.PROMPT), (prompt, ResumePoint.PROMPT):
        length = needed // BLOCK * BLOCK
        lengths[length] = Due(length, True, point)
    return sorted(due for due in lengths.values() if least <= due.length <= end)


def is_kept(length: int, interval: int) -> bool:
    """Return True if a rolling snapshot at `length` is kept when the next one is taken, False if that replaces it."""
    return length % interval == 0
