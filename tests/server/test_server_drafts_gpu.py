"""Window rings of the draft model on a GPU: after a prefix hit the draft model must compute what it computes cold.

Tokens are right whatever is drafted, and the acceptance length of these models hardly depends on the rings. The tests
therefore compare what the draft model computed (`recorded_drafts`) in the first step after each prompt: the streams of
EAGLE's NextN layer, or the logits of DSPARK's head. The reference is a cold step of the same server, because both use
bf16 compute. test_server_speculation.py and test_server_dspark.py compare with PyTorch in fp32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.recorded_drafts import recorded
from support.server import DRAFTS, Server, greedy, prompt
from support.server_plugin import broken
from torch import Tensor

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.gpu, pytest.mark.usefixtures("plugin")]

# Twelve prompts take 144 blocks; the device has 64. After a hit the last 12 tokens of each prompt are computed.
LENGTH, CACHED, COUNT = 1420, 1408, 12
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--context-length", "7936", "--enable-metrics")
FLAGS += ("--cuda-graph-max-bs-decode", "16", "--max-running-requests", "16", "--max-total-tokens", "8192")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "8")
SERVERS = {"EAGLE": DRAFTS, "DSPARK": ("--speculative-algorithm", "DSPARK")}
MODEL = {"seed": 1}
RECORDS = ("drafts",)


def drafts(
    server: Server, plugin: Path, prompts: Sequence[list[int]], visit: str, cached: int
) -> list[tuple[int, Tensor]]:
    """Send each prompt; return the first token of each answer and the draft model's output for it."""
    for i, ids in enumerate(prompts):
        answer = server.post("/generate", greedy(ids, 4, rid=f"{visit} {i}"))
        assert answer["meta_info"]["cached_tokens"] == cached
    first = {block.rid: block for block in recorded(plugin) if block.length == LENGTH}
    blocks = [first[f"{visit} {i}"] for i in range(len(prompts))]
    return [(block.tokens[0], block.logits if block.streams is None else block.streams) for block in blocks]


def distance(ours: Sequence[tuple[int, Tensor]], theirs: Sequence[tuple[int, Tensor]]) -> float:
    """Return the mean difference over the prompts with the same first token; different ones are near ties."""
    same = [(a - b).abs().mean() for (one, a), (other, b) in zip(ours, theirs) if one == other]
    assert len(same) > len(ours) / 2
    return float(sum(same) / len(same))


def test_hits_restore_the_draft_models_rings(server: Server, plugin: Path, name: str) -> None:
    """Drafts after hits on device and host are as in cold steps; without the ring the distance is several times as
    large."""
    prompts = [prompt(LENGTH, seed=300 + i) for i in range(COUNT)]
    server.flush()
    cold = drafts(server, plugin, prompts, f"{name} cold", 0)
    warm = drafts(server, plugin, prompts, f"{name} warm", CACHED)
    with broken(plugin, "snapshots without the draft model's ring"):
        wrong = drafts(server, plugin, prompts, f"{name} without", CACHED)
    from_host = server.metrics()["hit_tokens_host"]
    apart = [distance(found, cold) for found in (warm, wrong)]
    print(f"{apart[0]:.5f} right, {apart[1]:.5f} without a ring, {from_host:.0f} tokens from the host")
    assert from_host >= 4 * CACHED, "too few tokens came from the host"
    assert apart[1] > 3 * apart[0], apart
