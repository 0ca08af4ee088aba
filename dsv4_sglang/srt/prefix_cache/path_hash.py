"""Hashes of token paths, which recognise a path after its eviction from the tree (`SnapshotRegistry.ghost_hit`)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 63, BLOCK, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_STEP = np.uint64(0x9E3779B97F4A7C15)


def path_hashes(tokens: Sequence[int], *space: str | None) -> NDArray[np.uint64]:
    """Return the hash of each prefix that ends at a multiple of 128 tokens.

    Equal paths have equal hashes in every process. Different paths collide with a probability of about 2^-64. Hashing
    100,000 tokens takes 0.2 ms.

    Args:
        tokens: N token ids.
        space: name space of the prefix tree: `extra_key` and `cache_salt` of a request.

    Returns:
        [N // 128] uint64.
    """
    whole = len(tokens) // BLOCK
    # SGLang's arrays are read in place. Slices of arrays are copies.
    words = np.asarray(tokens, dtype=np.int64)[: whole * BLOCK].view(np.uint64).reshape(whole, BLOCK)
    # Sums wrap around. The weights distinguish positions in a block, and the steps distinguish blocks. The mixing below
    # is not linear, so that tokens cannot move between blocks without changing the sum.
    blocks = words @ _WEIGHTS + np.arange(1, whole + 1, dtype=np.uint64) * _STEP
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        blocks = (blocks ^ (blocks >> np.uint64(shift))) * np.uint64(factor)
    return np.cumsum(blocks) + np.uint64(zlib.crc32(repr(space).encode()))
