"""Tests of the simulation of two tiers: the gain from the host, its evictions, and the accounting of blocks and
slots."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.agent_trace import load, rounds
from benchmarks.prefix_simulation import BLOCK_BYTES, SNAPSHOT_BYTES
from benchmarks.prefix_tree import Node, PrefixTree
from benchmarks.tier_simulation import CopyingSimulation, SharedTree, TieredSimulation, grow, simulate
from benchmarks.tier_tree import TieredTree
from dsv4_sglang.srt.prefix_cache.policy import SnapshotRegistry


def test_the_host_adds_what_it_holds() -> None:
    """The working set is 160 conversations of 20,000 tokens. The device holds 1.0 M tokens, a third of it, minus
    running requests. All conversations hit if both tiers together hold them, or else the fraction that they hold."""
    hits = {ratio: simulate(rounds(160, 20_000, 4), ratio) for ratio in (0, 2, 4)}
    assert hits[0]["hit"] < 0.3 and hits[0]["from_host"] == 0
    assert hits[0]["hit"] + 0.2 < hits[2]["hit"] < 0.85
    assert hits[4]["hit"] > 0.99 and hits[4]["from_host"] > 0.7


def test_a_loop_that_grows_beyond_both_places_keeps_hitting() -> None:
    """The load grows from 12 to 40 conversations of 40 blocks, and the 1,000 blocks of both tiers hold about 22.
    Without ghost hits nothing would hit."""
    rows = list(grow(TieredSimulation(200, 4, 800, 100), [(12, 3), (40, 4)], 5_000))
    assert [row["conversations"] for row in rows] == [12] * 3 + [40] * 4
    assert all(row["hit"] > (0.95 if row["conversations"] == 12 else 0.4) for row in rows)


def test_the_host_need_not_have_what_the_device_has() -> None:
    """The host has twice the device's size. If it also copies the device's contents, it has no space for the last
    conversations."""
    turns = load(60, 5, tokens=(2_000, 20_000), generate=(8, 16))
    hits = [simulate(turns, 2, tokens=200_000, copies=copies)["hit"] for copies in (True, False)]
    assert hits[0] + 0.015 < hits[1], hits


def test_copies_first_finds_more_than_the_least_worth_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting copies of device contents first finds more than evicting the lowest value first."""
    turns = load(60, 5, tokens=(2_000, 20_000), generate=(8, 16))
    found = simulate(turns, 1, tokens=200_000)["hit"]
    monkeypatch.setattr(SnapshotRegistry, "host_value", lambda self, score: 1 / score)
    assert simulate(turns, 1, tokens=200_000)["hit"] + 0.01 < found


def test_one_memory_for_both_fits_the_load() -> None:
    """Conversations of 2,000 tokens need more snapshots than a twelfth of the bytes holds, so one memory shared by
    blocks and snapshots hits more. A policy that knows the next requests hits most."""
    turns = list(rounds(400, 2_000, 4))
    split, shared, knows = (
        simulate(turns, 3, 1 / 12, tokens=200_000, copies=True, shared=shared, ahead=ahead)["hit"]
        for shared, ahead in ((False, ()), (True, ()), (True, turns))
    )
    assert split + 0.1 < shared < knows


def check_device(tree: PrefixTree, nodes: list[Node], slots: list[int]) -> None:
    """Check that every block and slot is free or has exactly one owner."""
    assert not any(node.locks for node in nodes)
    blocks = [*tree.block_pool.free_ids(), *(block for node in nodes for block in node.blocks)]
    assert sorted(blocks) == list(range(1, tree.block_pool.size + 1))
    assert sorted([*tree.snapshot_pool.free_ids(), *slots]) == list(range(1, tree.snapshot_pool.size + 1))


def check(tree: TieredTree) -> None:
    """Check that each host block and row has one owner and that the registry agrees. The part of a path in a tier
    starts at the root, and on the host it ends at a snapshot."""
    nodes, registry = list(tree.nodes()), tree.registry
    check_device(tree, nodes, [tree.slot(node) for node in nodes if tree.slot(node)])
    blocks = [*tree.host_blocks.free_ids(), *(block for there in tree.on_host.values() for block in there)]
    assert sorted(blocks) == list(range(1, tree.host_blocks.size + 1))
    assert sorted([*tree.rows.free_ids(), *tree.row.values()]) == list(range(1, tree.rows.size + 1))
    assert {*tree.on_host, *tree.row} <= set(nodes)
    assert set(np.flatnonzero(registry.held)) == {node.snapshot for node in nodes if node.snapshot}
    for node in nodes:
        there = node in tree.on_host
        assert there or tree.on_device(node)
        assert node.parent is not None
        for place in (tree.on_device, tree.on_host.__contains__):
            assert node.parent is tree.root or not place(node) or place(node.parent)
        assert not there or node in tree.row or any(child in tree.on_host for child in node.children.values())
        if slot := tree.slot(node):
            assert bool(registry.copied[slot]) == (node in tree.row)
        else:
            assert (node in tree.row) == (node.snapshot > 0)
        if node in tree.row and not tree.slot(node):
            assert node.snapshot == registry.host_id(tree.row[node] - 1)


@pytest.mark.parametrize("host", [(200, 4), (1200, 36), (1200, 8), (300, 36)])
def test_both_places_have_one_owner(host: tuple[int, int]) -> None:
    """The check passes after branches, evictions and loads, in pools so small that some requests are not served."""
    simulation = TieredSimulation(400, 12, *host)
    for turn in load(40, 6, tokens=(2_000, 40_000), generate=(8, 64)):
        simulation.serve(turn)
    simulation.run(())
    assert simulation.loaded_tokens > 0
    check(simulation.tree)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 3])
def test_copies_have_one_owner(ratio: float, shared: bool) -> None:
    simulation = CopyingSimulation(400, 12, int(400 * ratio), int(12 * ratio), shared=shared)
    simulation.run(load(40, 6, tokens=(2_000, 40_000), generate=(8, 64)))
    assert simulation.loaded_tokens > 0
    for tree in (simulation.tree, simulation.host):
        nodes = list(tree.nodes())
        check_device(tree, nodes, [node.snapshot for node in nodes if node.snapshot])
    if isinstance(host := simulation.host, SharedTree):
        held = BLOCK_BYTES * sum(len(node.blocks) for node in host.nodes())
        held += SNAPSHOT_BYTES * sum(node.snapshot > 0 for node in host.nodes())
        assert 0.5 * host.size < held <= host.size
