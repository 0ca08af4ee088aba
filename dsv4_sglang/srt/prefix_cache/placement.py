"""At which lengths of a request a snapshot is taken."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK


class Due(NamedTuple):
    """A snapshot to take at `length` tokens. `needed`: some request will come for it (the end of a prompt, a
    branch); the others lie in wait for a branch and are taken only instead of something worth less."""

    length: int
    needed: bool


def due_in_prefill(begin: int, end: int, *, prompt: int, interval: int, branch: int) -> list[Due]:
    """What a prefill step over the tokens [begin, end) of a request takes, ascending.

    Due are the end of the prompt of `prompt` tokens, aligned down: in whichever chunk that is. If the prompt ends on a
    block, also a block before: the same prompt again computes at least one token, and resumes there. `branch`, how
    far blocks of the path are cached, because another request went on from there (at `begin` or before: nothing).
    Every multiple of `interval`. A snapshot needs the 128 tokens before it in the step.
    """
    least = -(-begin // BLOCK) * BLOCK + BLOCK
    lengths = {length: Due(length, False) for length in range(-(-least // interval) * interval, end + 1, interval)}
    for needed in (prompt, prompt - 1, branch):
        length = needed // BLOCK * BLOCK
        lengths[length] = Due(length, True)
    return sorted(due for due in lengths.values() if least <= due.length <= end)


def is_kept(length: int, interval: int) -> bool:
    """Whether a snapshot taken in decode stays when the next one is there."""
    return length % interval == 0
