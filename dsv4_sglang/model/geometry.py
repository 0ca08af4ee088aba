"""The numbers that DeepSeek-V4's cache is built on: ratios, window, block, rows of a tail (SPEC 1.1, 3.7, 6.1, 6.2).

`csrc/geometry.h` has the same for the device; `tests/test_numeric.py` holds both equal.
"""

import math

CSA_RATIO = 4
HCA_RATIO = 128
WINDOW = 128
"""Tokens that a query sees through the sliding window, itself included."""
BLOCK_TOKENS = math.lcm(CSA_RATIO, HCA_RATIO)
"""Tokens a block stands for: the least number that closes a window of both compressors."""

CSA_CURRENT_ROWS = CSA_RATIO
"""Rows of the open window, token t in row t % 4."""
CSA_PREVIOUS_ROWS = 2 * CSA_RATIO
"""Rows of the stream that the next window pools too: up to 4 of the last complete window and 3 of the open one."""
# First rows of the parts of a CSA tail; the open window's k come first.
CSA_CURRENT_Z = CSA_CURRENT_ROWS
CSA_PREVIOUS_K = 2 * CSA_CURRENT_ROWS
CSA_PREVIOUS_Z = CSA_PREVIOUS_K + CSA_PREVIOUS_ROWS
CSA_TAIL_ROWS = CSA_PREVIOUS_Z + CSA_PREVIOUS_ROWS
HCA_ONLINE_ROWS = 3
"""Of a tail in the online form: maximum, sum, accumulator."""
HCA_RAW_ROWS = 2 * HCA_RATIO
"""Of a tail in the raw form: k of the open window, then z."""
