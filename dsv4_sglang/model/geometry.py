"""The numbers that DeepSeek-V4's cache is built on: ratios, window, block, rows of a compressor state (SPEC 1.1, 3.7,
6.1, 6.2).

`csrc/geometry.h` has the same for the device; `tests/test_numeric.py` holds both equal.
"""

import math
from typing import NamedTuple

CSA_RATIO = 4
HCA_RATIO = 128
WINDOW = 128
"""Tokens that a query sees through the sliding window, itself included."""
BLOCK_TOKENS = math.lcm(CSA_RATIO, HCA_RATIO)
"""Tokens a block stands for: the least number that closes a window of both compressors."""

HCA_ONLINE_ROWS = 3
"""Of a compressor state in the online form, for each of its state copies: maximum, sum, accumulator."""
HCA_RAW_ROWS = 2 * HCA_RATIO
"""Of a compressor state in the raw form: k of the open window, then z."""


class CsaCompressorState(NamedTuple):
    """Rows of a CSA compressor state: two rings of the open window, k and then z, and two of the stream that the next
    window pools too. Token t has row t mod `current` and row t mod `previous` of its rings."""

    current: int
    previous: int

    @property
    def current_z(self) -> int:
        """First row of the open window's z; its k come first of all."""
        return self.current

    @property
    def previous_k(self) -> int:
        return 2 * self.current

    @property
    def previous_z(self) -> int:
        return self.previous_k + self.previous

    @property
    def rows(self) -> int:
        return self.previous_z + self.previous

    @property
    def draft_tokens(self) -> int:
        """Tokens of a request that a decode step may write (see `state_rows`)."""
        return min(self.current - (CSA_RATIO - 1), self.previous - (2 * CSA_RATIO - 1))


CSA_COMPRESSOR_STATES = tuple(
    CsaCompressorState(current, previous) for current, previous in ((4, 8), (8, 16), (16, 16))
)
"""Those that there are, known by their rows. Rings of 2^n rows: the device takes remainders by masks."""
MAX_DRAFT_TOKENS = CSA_COMPRESSOR_STATES[-1].draft_tokens


class StateRows(NamedTuple):
    """Rows of a request's state slot."""

    ring: int
    """Of a window ring: position t in row t mod `ring`."""
    csa: CsaCompressorState
    hca_state_copies: int
    """States of an HCA window in the online form: that of the first t tokens in state copy t mod `hca_state_copies`."""


def state_rows(draft_tokens: int) -> StateRows:
    """Rows of a slot whose requests write d = `draft_tokens` tokens in a decode step, of which the next step may take
    back all but the first: it begins at any of L + 1 .. L + d if this one began at L. 0 and 1: nothing is taken back.

    Nothing is undone, so all that a request may still need must survive what the step writes; and the step's tokens
    write in any order, so what they themselves read of the time before it must survive too. Positions that share a row
    are a multiple of the ring apart. The step writes L .. L + d - 1, and of older ones

    - the first token sees L - 127 .. L - 1 through the window: 127 + d rows (an even number, for FP8 rows start at
      multiples of 16 B);
    - it may close a CSA window, and then pools the current stream's L - 3 .. L - 1: d + 3 rows;
    - and the previous stream's L - 7 .. L - 4: d + 7 rows. The tokens behind it, and steps that begin later, read no
      older ones;
    - every token goes on from the HCA state of L tokens, and writes that of its own length: d + 1 state copies.

    ValueError for a number that is not in 0 .. 9.
    """
    if not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"draft_tokens is {draft_tokens}; expected 0 to {MAX_DRAFT_TOKENS}, the tokens of a request that a decode "
            "step writes at once (--speculative-num-draft-tokens)"
        )
    if draft_tokens <= 1:
        return StateRows(WINDOW, CSA_COMPRESSOR_STATES[0], 1)
    csa = next(
        compressor_state for compressor_state in CSA_COMPRESSOR_STATES if compressor_state.draft_tokens >= draft_tokens
    )
    return StateRows(WINDOW + draft_tokens + draft_tokens % 2, csa, draft_tokens + 1)
