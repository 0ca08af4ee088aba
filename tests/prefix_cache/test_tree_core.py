"""Keys of tree nodes compare as SGLang's, and insertions below a known node give the tree that SGLang's walk gives."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from support.prefix_tree import TreeServer, without_a_server

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.sglang import tree_core

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


@pytest.mark.parametrize(("known", "since"), [(0, 0), (1, 1), (2, 2), (4, 4), (1, 3), (3, 1)])
@pytest.mark.parametrize("end", [3, 5, 8])
def test_an_insertion_below_a_known_node_gives_the_same_tree(
    monkeypatch: pytest.MonkeyPatch, known: int, since: int, end: int
) -> None:
    """A path of four nodes of one block each is extended, or its beginning is inserted again. Nodes up to the known one
    are not compared, unless the request has blocks of its own before it. These are freed."""
    without_a_server(monkeypatch)
    compared: list[Any] = []
    match_at = RadixKey.match_at
    monkeypatch.setattr(RadixKey, "match_at", lambda *given, **named: compared.append(0) or match_at(*given, **named))
    trees, comparisons = [], []
    for below in (False, True):
        cache = TreeServer(32, 16).cache
        nodes = [cache.root_node.id, *(put(cache, blocks, blocks - 1) for blocks in range(1, 5))]
        compared.clear()
        with cache.tree_core.inserting_below(nodes[known]) if below else nullcontext():
            put(cache, end, min(since, end))
        comparisons.append(len(compared))
        trees.append((shape(cache.tree_core.root_node), cache.token_to_kv_pool_allocator.available_size()))
    assert trees[0] == trees[1]
    on_path = min(4, end)
    assert comparisons == [on_path, on_path - known if known <= min(since, end) else on_path]
