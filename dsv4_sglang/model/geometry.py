"""Constants of DeepSeek-V4's cache: ratios, window, block, rows of a compressor state (SPEC 1.1, 3.7, 6.1, 6.2).

`csrc/geometry.h` has the same for the device; `tests/formats/test_numeric.py` checks that both are equal.
"""

import math
from typing import NamedTuple

CSA_RATIO = 4
HCA_RATIO = 128
# Tokens in the sliding window of a query, itself included.
WINDOW = 128
# Tokens of a block: the smallest number that completes a window of both compressors.
BLOCK_TOKENS = math.lcm(CSA_RATIO, HCA_RATIO)

# Rows of each copy of a compressor state in the online form: maximum, sum, accumulator.
HCA_ONLINE_ROWS = 3
# Rows of a compressor state in the raw form: k of the open window, then z.
HCA_RAW_ROWS = 2 * HCA_RATIO


class CsaCompressorState(NamedTuple):
    """Row layout of a CSA compressor state: two rings of the open window (k, then z) and two rings of the overlapping
    stream, which the next window pools too. Token t is in row t mod `current` or t mod `previous` of its rings.
    """

    current: int
    previous: int

    @property
    def current_z(self) -> int:
        """First row of the open window's z, after its k."""
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
        """Maximum tokens per request that a decode step may write (see `state_rows`)."""
        return min(self.current - (CSA_RATIO - 1), self.previous - (2 * CSA_RATIO - 1))


# Supported layouts, identified by their number of rows. Rings have 2^n rows, because the device uses masks for
# remainders.
CSA_COMPRESSOR_STATES = tuple(
    CsaCompressorState(current, previous) for current, previous in ((4, 8), (8, 16), (16, 16))
)
MAX_DRAFT_TOKENS = CSA_COMPRESSOR_STATES[-1].draft_tokens


class StateRows(NamedTuple):
    """Rows of a request's state slot.

    Attributes:
        ring: entries of a window ring. Position t is at index t mod `ring`.
        csa: layout of a CSA compressor state.
        hca_state_copies: copies of an HCA state in the online form. The state of the first t tokens is copy t mod
            `hca_state_copies`.
    """

    ring: int
    csa: CsaCompressorState
    hca_state_copies: int


def state_rows(draft_tokens: int) -> StateRows:
    """Return the rows of a slot whose requests write d = `draft_tokens` tokens in a decode step.

    The next step may roll back all but the first of them: if this step begins at L, the next one begins at any of L + 1
    .. L + d. 0 and 1: nothing is rolled back.

    Writes are not undone, so everything that a request may still need must survive the writes of the step. The tokens
    of a step write in any order, so what they read of earlier tokens must survive too. Positions that share a row
    differ by a multiple of the ring size. The step writes L .. L + d - 1, and needs these older positions:

    - The first token sees L - 127 .. L - 1 in its window: 127 + d rows (made even, because FP8 entries start at
      multiples of 16 B).
    - It may complete a CSA window, and then pools the current stream's L - 3 .. L - 1: d + 3 rows.
    - It also pools the previous stream's L - 7 .. L - 4: d + 7 rows. Later tokens and later steps read no older ones.
    - Every token continues from the HCA state of L tokens and writes the state of its own length: d + 1 copies.

    Raises:
        ValueError: the number is not in 0 .. 9.
    """
    if not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"draft_tokens is {draft_tokens}; expected 0 to {MAX_DRAFT_TOKENS}, the tokens per request in a decode "
            "step (--speculative-num-draft-tokens)"
        )
    if draft_tokens <= 1:
        return StateRows(WINDOW, CSA_COMPRESSOR_STATES[0], 1)
    csa = next(
        compressor_state for compressor_state in CSA_COMPRESSOR_STATES if compressor_state.draft_tokens >= draft_tokens
    )
    return StateRows(WINDOW + draft_tokens + draft_tokens % 2, csa, draft_tokens + 1)
