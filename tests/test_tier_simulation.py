"""The simulation of two tiers: what the host adds, and that nothing is lost on the way."""

from __future__ import annotations

import pytest

from benchmarks.agent_trace import load, rounds
from benchmarks.prefix_simulation import BLOCK_BYTES, CHECKPOINT_BYTES
from benchmarks.tier_simulation import SharedTree, TieredSimulation, simulate


def test_the_host_adds_what_it_holds() -> None:
    """160 conversations of 20,000 tokens, of which a device of 1.0 M tokens holds a third less those that run: all are
    found that both hold, or the share of them."""
    hits = {ratio: simulate(rounds(160, 20_000, 4), ratio) for ratio in (0, 2, 4)}
    assert hits[0]["hit"] < 0.3 and hits[0]["from_host"] == 0
    assert hits[0]["hit"] + 0.2 < hits[2]["hit"] < 0.65
    assert hits[4]["hit"] > 0.98 and hits[4]["from_host"] > 0.7


def test_one_memory_for_both_fits_the_load() -> None:
    """Conversations of 2,000 tokens want more checkpoints than a twelfth of the bytes holds; who knows what comes next
    loses nothing where a third more would hold all."""
    turns = list(rounds(400, 2_000, 4))
    split, shared, knows = (
        simulate(turns, 3, tokens=200_000, shared=shared, ahead=ahead)["hit"]
        for shared, ahead in ((False, ()), (True, ()), (True, turns))
    )
    assert split + 0.1 < shared < knows


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 3])
def test_blocks_and_slots_have_one_owner(ratio: float, shared: bool) -> None:
    """After branches, evictions and loads, in pools so small that some requests are not served."""
    simulation = TieredSimulation(400, 12, ratio, shared=shared)
    simulation.run(load(40, 6, tokens=(2_000, 40_000), generate=(8, 64)))
    assert simulation.loaded_tokens > 0
    assert simulation.host is not None
    for tree in (simulation.tree, simulation.host):
        nodes = list(tree.nodes())
        assert not any(node.locks for node in nodes)
        blocks = sorted([*tree.block_pool.free_ids(), *(block for node in nodes for block in node.blocks)])
        slots = sorted([*tree.checkpoint_pool.free_ids(), *(node.checkpoint for node in nodes if node.checkpoint)])
        assert blocks == list(range(1, tree.block_pool.size + 1))
        assert slots == list(range(1, tree.checkpoint_pool.size + 1))
    if isinstance(host := simulation.host, SharedTree):
        held = BLOCK_BYTES * sum(len(node.blocks) for node in host.nodes())
        held += CHECKPOINT_BYTES * sum(node.checkpoint > 0 for node in host.nodes())
        assert 0.5 * host.size < held <= host.size
