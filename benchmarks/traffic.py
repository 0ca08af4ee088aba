"""Bytes that the write path must move, from the formats alone (SPEC 2.1 to 3.7); parameters count once a layer.

A read or write that a kernel does beyond these is its loss, not counted here. Rows of one entry are 584 B (448 e4m3,
64 bf16, 8 exponents), the inputs of the compressors fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.loads import Load
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO

ROW, KV = 584, 512 * 2
CSA_SCORE, CSA_INDEX_SCORE, HCA_SCORE = 4 * 512 * 4, 4 * 128 * 4, 2 * 512 * 4
CSA_STATE_ROW = 2 * (512 + 128) * 4
"""k and z of one role (current or previous window) of a token, main compressor and indexer."""
HCA_ONLINE = 3 * 512 * 4
ROW_PARAMETERS = 512 * 2
CSA_PARAMETERS = (4 * 1024 + 512 + 4 * 256 + 128) * 4
HCA_PARAMETERS = (128 * 512 + 512) * 4


@dataclass(frozen=True)
class Formats:
    """What differs between two implementations: bytes of an index key, and how HCA keeps its open window."""

    key: int
    hca_online: bool


OURS_ONLINE, OURS_RAW = Formats(72, True), Formats(72, False)
IN_TREE, IN_TREE_ONLINE = Formats(132, False), Formats(132, True)


def decode_bytes(config: DSV4Config, load: Load, formats: Formats) -> int:
    """One step over all layers, one token a request."""
    batch = load.prefix_lens.shape[0]
    total = 0
    for layer in range(config.num_hidden_layers):
        ratio = config.ratio(layer)
        total += batch * (KV + ROW) + ROW_PARAMETERS
        if ratio == CSA_RATIO:
            # Every token is kept twice, as a row of its own window and of the next one; an entry pools 4 previous rows
            # and the 3 current ones that are not the step's.
            total += batch * (CSA_SCORE + CSA_INDEX_SCORE + 2 * CSA_STATE_ROW) + CSA_PARAMETERS
            total += load.csa_due * (7 * CSA_STATE_ROW + ROW + formats.key)
        elif ratio == HCA_RATIO:
            total += batch * HCA_SCORE + load.hca_due * ROW + HCA_PARAMETERS
            if formats.hca_online:
                total += batch * 2 * HCA_ONLINE
            else:
                total += batch * HCA_SCORE + load.hca_due * (HCA_RATIO - 1) * HCA_SCORE
    return total


def prefill_bytes(config: DSV4Config, chunks: list[int], formats: Formats) -> int:
    """Chunks of new requests over all layers, all projections read once and all rows and entries written once."""
    tokens = sum(chunks)
    total = 0
    for layer in range(config.num_hidden_layers):
        ratio = config.ratio(layer)
        total += tokens * (KV + ROW) + ROW_PARAMETERS
        if ratio == CSA_RATIO:
            total += tokens * (CSA_SCORE + CSA_INDEX_SCORE) + tokens // CSA_RATIO * (ROW + formats.key) + CSA_PARAMETERS
        elif ratio == HCA_RATIO:
            total += tokens * HCA_SCORE + tokens // HCA_RATIO * ROW + HCA_PARAMETERS
    return total
