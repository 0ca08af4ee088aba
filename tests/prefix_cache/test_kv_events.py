"""Tests of KV events on SGLang's tree: each block that a request can resume from is announced once, and no other.

In Dynamo's format, `{"format": "dynamo"}` in --kv-events-config, the hashes are those of SGLang's own recorder.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, without_a_server

from dsv4_sglang.srt.prefix_cache.events import difference

PROMPT = [1 + at // BLOCK for at in range(5 * BLOCK + 60)]


class Watched(HostCacheServer):
    """Server whose events a router receives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dynamo: bool = False) -> None:
        self.dynamo = dynamo
        without_a_server(monkeypatch)
        super().__init__(monkeypatch, seed=3)

    def events(self) -> list[Any]:
        """Return the events since the last call, after all copies."""
        self.settle()
        events = list(self.cache.take_events())
        self.mirror.apply(events)
        return events


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def single(events: list[Any], medium: str) -> list[tuple[int, int | None, list[int]]]:
    """Return (hash, hash before, tokens) of each block that is stored on a medium. SGLang joins consecutive blocks."""
    found = []
    for event in events:
        assert isinstance(event, BlockStored) and event.lora_id is None and event.block_size == BLOCK
        before = event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            if event.medium == medium:
                found.append((name, before, list(event.token_ids[i * BLOCK : (i + 1) * BLOCK])))
            before = name
    return found


@pytest.mark.parametrize(
    ("announced", "wanted", "touched", "stored", "removed"),
    [
        (set(), [], [], [], []),
        (set(), [9, 3, 5], [3, 5, 9], [9, 3, 5], []),
        ({3, 9}, [9, 3, 5], [3, 5, 9], [5], []),
        ({1, 7, 3, 9}, [], [9, 1, 7], [], [1, 7, 9]),
        ({1}, [2], [1, 2], [2], [1]),
        (set(), [], [4], [], []),
    ],
    ids=["nothing", "all stored", "one stored", "untouched stays", "both", "never announced"],
)
def test_difference(
    announced: set[int], wanted: list[int], touched: list[int], stored: list[int], removed: list[int]
) -> None:
    """Blocks are stored parents first, and only touched ones are removed. The arguments stay as they are."""
    before = set(announced)
    assert difference(announced, wanted, touched) == (stored, removed)
    assert announced == before


def test_a_prompt_is_announced(server: Watched) -> None:
    """Each full block is announced on the device and, once it is saved, on the host, with the block before it."""
    server.serve(PROMPT)
    events = server.events()
    for medium in ("GPU", "CPU_PINNED"):
        blocks = single(events, medium)
        assert [tokens for _, _, tokens in blocks] == [[1 + i] * BLOCK for i in range(5)]
        assert [before for _, before, _ in blocks] == [None, *(name for name, _, _ in blocks[:-1])]
    assert server.mirror.found(PROMPT) == 5 * BLOCK
    assert (
        len(set(server.mirror.blocks["GPU"])) == 5 and server.mirror.blocks["GPU"] == server.mirror.blocks["CPU_PINNED"]
    )
    server.serve(PROMPT)
    assert not server.events(), "nothing has changed"


@pytest.mark.parametrize("first", ["tenant", None])
def test_blocks_of_tenants_are_not_announced(server: Watched, first: str | None) -> None:
    """Requests of other tenants cannot hit them. Their own requests do."""
    second = None if first else "tenant"
    server.serve(PROMPT, first)
    assert bool(server.events()) == (first is None)
    server.serve(PROMPT, second)
    assert bool(server.events()) == (second is None)
    assert server.serve(PROMPT, "tenant") == 5 * BLOCK and server.serve(PROMPT, "another") == 0
    assert not server.events()
    assert server.mirror.found(PROMPT) == 5 * BLOCK and len(server.mirror.blocks["GPU"]) == 5


def test_blocks_after_the_last_snapshot_are_not_announced(server: Watched) -> None:
    """They are in memory, but no request can resume from them."""
    server.serve(PROMPT)
    server.events()
    cache = server.cache
    for node in [*server.component.slots.nodes.values()]:
        server.component._evict_snapshot(node)
    removed = server.events()
    assert server.mirror.found(PROMPT) == 5 * BLOCK, "the host has snapshots"
    assert not removed
    cache.reset()
    server.serve(PROMPT[: 2 * BLOCK + 10], "tenant")
    (cleared,) = server.events()
    assert isinstance(cleared, AllBlocksCleared) and server.mirror.found(PROMPT) == 0


def test_evicted_blocks_are_withdrawn(server: Watched) -> None:
    """A hundred prompts exceed both memories. What a router believes is what requests find."""
    server.serve(PROMPT)
    server.events()
    for i in range(100):
        server.serve([50 + i] * 300)
        server.events()
    assert server.mirror.removed
    for i in range(100):
        ids = [50 + i] * 300
        held = server.mirror.found(ids[:-1])
        assert server.serve(ids) == held
        server.events()
    server.check()


def test_a_branch_follows_its_trunk(server: Watched) -> None:
    """The blocks of a branch follow the last block that it shares, which is announced once."""
    server.serve(PROMPT)
    trunk = single(server.events(), "GPU")
    branch = PROMPT[: 2 * BLOCK] + [77] * (3 * BLOCK)
    server.serve(branch)
    blocks = single(server.events(), "GPU")
    assert blocks[0][1] == trunk[1][0] and [tokens for *_, tokens in blocks] == [[77] * BLOCK] * len(blocks)
    assert len(blocks) in (2, 3), "up to the last snapshot"
    assert server.mirror.found(branch) == (2 + len(blocks)) * BLOCK


def test_completed_host_copies_are_announced(server: Watched) -> None:
    request = server.start(PROMPT)["request"]
    server.finish(request)
    server.cache.check_hicache_events()
    assert server.cache.ongoing_write_through, "a copy is running"
    server.mirror.apply(server.cache.take_events())
    assert len(server.mirror.blocks["GPU"]) == 5 and not server.mirror.blocks["CPU_PINNED"]
    server.events()
    assert len(server.mirror.blocks["CPU_PINNED"]) == 5


# Dynamo's format


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch, dynamo=True)


def test_salted_blocks_are_announced_with_their_salt(dynamo: Watched) -> None:
    """Each salt has its own hashes. A router finds the prompt for requests with the salt only. Blocks with an
    `extra_key`, of which an event says nothing, are not announced."""
    assert dynamo.serve(PROMPT, salt="a") == 0
    stored = dynamo.events()
    assert {event.cache_salt for event in stored} == {"a"} and len(single(stored, "GPU")) == 5
    assert [dynamo.mirror.found(PROMPT, salt) for salt in ("a", "b", None)] == [5 * BLOCK, 0, 0]
    assert dynamo.serve(PROMPT, salt="b") == dynamo.serve(PROMPT) == 0
    assert {event.cache_salt for event in dynamo.events()} == {"b", None}
    assert [dynamo.mirror.found(PROMPT, salt) for salt in ("a", "b", None)] == [5 * BLOCK] * 3
    assert len(dynamo.mirror.blocks["GPU"]) == 3 * 5, "equal tokens have other hashes"
    for salt in (None, "a"):
        dynamo.serve(PROMPT, "key", salt)
        assert not dynamo.events()
    assert dynamo.serve(PROMPT, salt="a") == 5 * BLOCK


def test_salted_blocks_are_withdrawn(dynamo: Watched) -> None:
    """Prompts of three salts, with branches, exceed both memories. What a router believes is what requests find."""
    prompts = [(PROMPT[: 1 + i % 3 * BLOCK] + [50 + i] * 300, ("a", "b", None)[i % 2]) for i in range(100)]
    for ids, salt in [*prompts, *prompts[::-1]]:
        held = dynamo.mirror.found(ids[:-1], salt)
        # The first request of a branch finds less than the blocks that it shares.
        assert dynamo.serve(ids, salt=salt) <= held
        dynamo.events()
        assert dynamo.serve(ids, salt=salt) == dynamo.mirror.found(ids[:-1], salt)
        dynamo.events()
    assert dynamo.mirror.removed
    dynamo.check()


@pytest.mark.parametrize("salt", ["a", None])
def test_the_events_are_those_of_sglang(dynamo: Watched, salt: str | None) -> None:
    """For a path whose last node has a snapshot, SGLang's recorder gives the same events, before and after a split."""
    dynamo.serve(PROMPT[: 5 * BLOCK], salt=salt)
    dynamo.serve(PROMPT[: 2 * BLOCK] + [77] * (3 * BLOCK), salt=salt)
    announced = [event for event in dynamo.events() if event.medium == "GPU"]
    recorder, nodes = KVCacheEventRecorder(enabled=True, page_size=BLOCK, dynamo_format=True), []
    stack = [*dynamo.cache.tree_core.root_node.children.values()]
    while stack:
        nodes.append(node := stack.pop())
        stack.extend(node.children.values())
    for node in nodes:
        if node.component_data[0].value is not None:
            recorder.record_store(node)
    expected = recorder.take()
    ours = {name: (before, tuple(tokens)) for name, before, tokens in single(announced, "GPU")}
    theirs = {name: (before, tuple(tokens)) for name, before, tokens in single(expected, "GPU")}
    assert len(ours) >= 5 and ours.items() <= theirs.items()
    assert {event.cache_salt for event in announced} == {event.cache_salt for event in expected} == {salt}
