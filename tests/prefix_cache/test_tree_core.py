"""Keys of tree nodes compare as SGLang's. Insertions below a known node give the tree that SGLang's walk gives, and
lookups from one find what SGLang's finds (`BlockOwner._check_match`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from support.prefix_tree import TreeServer, without_a_server

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.sglang import tree_core
from dsv4_sglang.srt.sglang.tree import evict_from_device

TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 1), max_size=24)
NAME_SPACES = st.sampled_from([(None, None), ("a", None), ("a", "b"), (None, "b")])


@st.composite
def keys(draw: st.DrawFn, begin: list[int], space: tuple[str | None, str | None], bigram: bool) -> RadixKey:
    ids = [*begin, *draw(TOKENS)]
    limit = draw(st.none() | st.integers(0, len(ids) + 1))
    return RadixKey(array("q", ids), space[0], bigram, limit=limit, cache_salt=space[1])


@given(st.data(), NAME_SPACES, st.booleans(), st.integers(1, 4))
def test_keys_compare_as_sglangs(
    data: st.DataObject, space: tuple[str | None, str | None], bigram: bool, page_size: int
) -> None:
    common, before = data.draw(TOKENS), data.draw(TOKENS)
    mine = data.draw(keys(common, space, bigram))
    theirs = data.draw(keys(before + common, space, bigram))
    offset = data.draw(st.integers(0, max(0, len(theirs))))
    assert tree_core.match_at(mine, theirs, offset, page_size) == mine.match_at(theirs, offset, page_size)
    if offset + page_size <= len(theirs) and page_size <= len(mine):
        ours = tree_core.child_key_at(mine, 0, page_size), tree_core.child_key_at(theirs, offset, page_size)
        of_sglang = mine.child_key_at(0, page_size), theirs.child_key_at(offset, page_size)
        assert (ours[0] == ours[1]) == (of_sglang[0] == of_sglang[1])
        assert ours[0] != ours[1] or hash(ours[0]) == hash(ours[1])


def test_bad_arguments_are_rejected_as_sglangs() -> None:
    key, other = RadixKey(array("q", [1, 2]), None), RadixKey(array("q", [1, 2]), "space")
    for ours, theirs in ((tree_core.match_at, RadixKey.match_at), (tree_core.child_key_at, RadixKey.child_key_at)):
        for at in (-1, 3):
            arguments: tuple[Any, ...] = (key, key, at) if ours is tree_core.match_at else (key, at)
            for function in (ours, theirs):
                with pytest.raises(IndexError):
                    function(*arguments)
    bigrams = RadixKey(array("q", [1, 2]), None, is_bigram=True)
    for wrong in (other, bigrams):
        for match in (tree_core.match_at, RadixKey.match_at):
            with pytest.raises(ValueError):
                match(key, wrong, 0)


def shape(node: Any) -> Any:
    """Return the tree below a node: tokens, blocks, and whether it has a snapshot."""
    blocks = None if node.parent is None else node.component_data[0].value.tolist()
    tokens = node.key.token_ids.tolist()
    snapshot = any(data.value is not None for data in node.component_data[1:])
    return tokens, blocks, snapshot, sorted((shape(child) for child in node.children.values()), key=str)


def put(cache: Any, blocks: int, since: int) -> int:
    """Insert a path of so many blocks with a snapshot. The tree has the first `since`. Return the id of its node."""
    fresh = cache.token_to_kv_pool_allocator.alloc((blocks - since) * BLOCK)
    value = torch.cat([torch.zeros(since * BLOCK, dtype=torch.int64), fresh])
    slots = component_of(cache).slots
    slots.registry.tick()
    key, snapshot = RadixKey(array("q", range(blocks * BLOCK)), None), slots.node_value(slots.take())
    inserted = InsertParams(key=key, value=value, mamba_value=snapshot, prev_prefix_len=since * BLOCK)
    return int(cache.insert(inserted).last_device_node)


@contextmanager
def counted_comparisons() -> Iterator[list[Any]]:
    """Context manager: yield a list with one entry per comparison of a node with a key."""
    compared: list[Any] = []
    match_at = RadixKey.match_at
    with patch.object(RadixKey, "match_at", lambda *given, **named: compared.append(0) or match_at(*given, **named)):
        yield compared


@pytest.mark.parametrize(("known", "since"), [(0, 0), (1, 1), (2, 2), (4, 4), (1, 3), (3, 1)])
@pytest.mark.parametrize("end", [3, 5, 8])
def test_an_insertion_below_a_known_node_gives_the_same_tree(
    monkeypatch: pytest.MonkeyPatch, known: int, since: int, end: int
) -> None:
    """A path of four nodes of one block each is extended, or its beginning is inserted again. Nodes up to the known one
    are not compared, unless the request has blocks of its own before it. These are freed."""
    without_a_server(monkeypatch)
    trees, comparisons = [], []
    for below in (False, True):
        cache = TreeServer(32, 16).cache
        nodes = [cache.root_node.id, *(put(cache, blocks, blocks - 1) for blocks in range(1, 5))]
        below_known = cache.tree_core.inserting_below(nodes[known]) if below else nullcontext()
        with below_known, counted_comparisons() as compared:
            put(cache, end, min(since, end))
        comparisons.append(len(compared))
        trees.append((shape(cache.tree_core.root_node), cache.token_to_kv_pool_allocator.available_size()))
    assert trees[0] == trees[1]
    on_path = min(4, end)
    assert comparisons == [on_path, on_path - known if known <= min(since, end) else on_path]


def test_a_lookup_begins_where_the_last_one_of_its_request_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_server(monkeypatch)
    cache, waiting = TreeServer(32, 16).cache, SimpleNamespace(session=None)
    component = component_of(cache)

    def look_up(blocks: int = 8, of: Any = waiting, end: int = 0) -> tuple[int, int]:
        """Look up a prompt. Return the blocks that it finds, and the number of nodes that were compared with it."""
        key = RadixKey(array("q", [*range(blocks * BLOCK), *[-1] * end]), None)
        with counted_comparisons() as compared:
            found = cache.match_prefix(MatchPrefixParams(key=key, req=of))
        return found.device_prefix_len // BLOCK, len(compared)

    assert look_up() == (0, 0)
    nodes = [put(cache, blocks, blocks - 1) for blocks in range(1, 4)]
    assert [look_up(), look_up()] == [(3, 3), (3, 1)]
    nodes.append(put(cache, 6, 3))
    assert look_up() == (6, 2), "the end and what followed it"
    assert look_up(4, None, end=BLOCK) == (3, 4), "another prompt splits the last node"
    assert look_up() == (6, 1)
    evict_from_device(component, cache.tree_core.node_by_id(nodes[-1]))
    assert look_up() == (3, 1), "blocks without a snapshot"
    assert look_up(2) == (2, 2), "a shorter prompt, from the root"
    assert [look_up(), look_up()] == [(3, 4), (3, 1)]
    cache.evict_for_alloc(EvictParams(num_tokens=3 * BLOCK))
    assert [look_up(), look_up()] == [(3, 3), (3, 1)], "the end is gone"
    # SGLang's lookup ends at a node whose blocks neither the device nor the host has.
    lost = cache.tree_core.node_by_id(nodes[1]).component_data[ComponentType.FULL]
    lost.value, kept = None, lost.value
    assert [look_up(), look_up(of=None)] == [(1, 1), (1, 1)]
    lost.value = kept
    assert look_up() == (3, 3)
    cache.reset()
    assert look_up() == (0, 0)
