"""Bytes that the write path must move, derived from the formats (SPEC 2.1 to 3.7). Parameters count once per layer.

Reads and writes of a kernel beyond these do not count, so they lower its rate. An entry has 584 B (448 e4m3, 64 bf16,
8 exponents); the inputs of the compressors are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.loads import Load
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO

ROW, KV = 584, 512 * 2
CSA_SCORE, CSA_INDEX_SCORE, HCA_SCORE = 4 * 512 * 4, 4 * 128 * 4, 2 * 512 * 4
# k and z of one role (current or previous window) of a token, for the main compressor and the indexer.
CSA_STATE_ROW = 2 * (512 + 128) * 4
HCA_ONLINE = 3 * 512 * 4
ROW_PARAMETERS = 512 * 2
CSA_PARAMETERS = (4 * 1024 + 512 + 4 * 256 + 128) * 4
HCA_PARAMETERS = (128 * 512 + 512) * 4


@dataclass(frozen=True)
class Formats:
    """Differences between implementations: bytes of an index key, and the form of HCA's open window."""

    key: int
    hca_online: bool


OURS, IN_TREE = Formats(72, True), Formats(132, False)


def decode_bytes(config: DSV4Config, load: Load, formats: Formats) -> int:
    """Return the bytes of one decode step over all layers, one token per request.

    Args:
        config: config of the model.
        load: requests of the step.
        formats: formats of the implementation.
    """
    batch = load.prefix_lens.shape[0]
    total = 0
    for layer in range(config.num_hidden_layers):
        ratio = config.ratio(layer)
        total += batch * (KV + ROW) + ROW_PARAMETERS
        if ratio == CSA_RATIO:
            # Every token is stored twice, for its own window and for the next one. An entry pools 4 previous rows and
            # 3 current rows; the fourth current row is the step's own token.
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
    """Return the bytes of a prefill step over all layers: projections are read and entries written once.

    Args:
        config: config of the model.
        chunks: tokens of each request, which start at position 0.
        formats: formats of the implementation.
    """
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
