"""Walks of SGLang's tree whose time does not grow with the square of a conversation's length."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from dsv4_sglang.srt.sglang.tree import length_of, path_to_root

NAME = "dsv4_sglang"


class TreeCore(UnifiedTreeCore):
    """SGLang's tree core, whose walks begin at a node that the request is known to reach.

    SGLang's begin at the root. An insertion compares the tokens of every node on the path, and copies the rest of the
    path after each: in a conversation of 200 turns that takes 60 ms, in which no request gets a token. It also counts a
    hit of each node, which matters only where the host saves nodes after some hits; here `HostSaves` decides what is
    saved. A cache-aware `--schedule-policy` looks up every waiting request before each prefill step.
    """

    # The paths to insert go through this node (`inserting_below`), and those to look up go to its parent
    # (`matching_from`).
    _inserts_below: UnifiedTreeNode | None = None
    _matches_from: UnifiedTreeNode | None = None

    @contextmanager
    def inserting_below(self, node: int) -> Iterator[None]:
        """Context manager: all paths that are inserted inside go through the node of this id, which is locked."""
        known = self.node_by_id(node)
        self._inserts_below = known if known is not self.root_node else None
        try:
            yield
        finally:
            self._inserts_below = None

    @contextmanager
    def matching_from(self, node: int | None) -> Iterator[None]:
        """Context manager: a lookup inside is of a path that went to the node of this id (`last_visited_node_id` of an
        earlier lookup; None if there was none). The node may have been split or removed since then."""
        self._matches_from = self._node_arena.get(node)
        try:
            yield
        finally:
            self._matches_from = None

    def _advance_insert(self) -> Any:
        state, known = self._ongoing_insert_walk_state, self._inserts_below
        begins = known is not None and state.node is self.root_node
        # The walk frees blocks after `prev_prefix_len` that the tree has already.
        if begins and (length := length_of(known)) <= min(state.params.prev_prefix_len, len(state.key)):
            state.node, state.total_prefix_length = known, length
            state.key, state.value = state.key[length:], state.value[length:]
        return super()._advance_insert()

    def _match_prefix_helper(self, key: RadixKey, params: MatchPrefixParams) -> MatchResult:
        path, ends = self._known_path(key)
        action, parts, length = None, False, len(key)
        while not parts and (end := ends[-1]) < length:
            children = path[-1].children
            # Most nodes have one child, whose tokens are compared below. Those of the root differ in their namespaces.
            alone = len(children) == 1 and len(path) > 1
            node = next(iter(children.values())) if alone else children.get(key.child_key_at(end, self.page_size))
            common = 0 if node is None or _lost(node) else node.key.match_at(key, end, page_size=self.page_size)
            if not common:
                break
            parts = common < len(node.key)
            if parts:
                node, action = self._split_node(node.key, node, common)
            path.append(node)
            ends.append(end + common)
        on_device = self._resumable(path, params, on_device=True)
        best = self._resumable(path, params, on_device=False) if self.enable_hicache else on_device
        # Of the blocks on the device, what follows needs only the length.
        blocks = [range(ends[on_device])]
        return self._match_post_processor(
            params,
            blocks,
            path[best],
            path[on_device],
            len(blocks),
            ends[-1],
            action,
            last_visited_node_id=path[-1].id if len(path) > 1 else None,
            device_validators=self._create_match_validators(params, match_device_only=True),
        )

    def _known_path(self, key: RadixKey) -> tuple[list[UnifiedTreeNode], list[int]]:
        """Return the nodes from the root to the parent of the node to match from, and the length of the path at the end
        of each. The node itself is compared with the key again. Return the root alone if a walk must begin there."""
        if self._matches_from is not None:
            path = [self.root_node, *list(path_to_root(self._matches_from.parent))[::-1]]
            ends = list(accumulate(len(node.key) for node in path))
            if ends[-1] <= len(key) and not any(map(_lost, path)):
                return path, ends
        return [self.root_node], [0]

    def _resumable(self, path: list[UnifiedTreeNode], params: MatchPrefixParams, *, on_device: bool) -> int:
        """Return the index of the last node at which a request can resume: the root, or one with blocks and a snapshot,
        both on the device or, without `on_device`, on the host."""
        valid = self._create_match_validators(params, match_device_only=on_device)
        return next((at for at in range(len(path) - 1, 0, -1) if all(check(path[at]) for check in valid)), 0)


def _lost(node: UnifiedTreeNode) -> bool:
    """Return whether neither the device nor the host has the blocks of a node. SGLang's lookup ends there."""
    blocks = node.component_data[BASE_COMPONENT_TYPE]
    return blocks.value is None and blocks.host_value is None


register_tree_core_backend(NAME, TreeCore)


def child_key_at(self: RadixKey, offset: int, page_size: int = 1) -> Hashable:
    """REPLACE `RadixKey.child_key_at`, which returns what identifies a child of a node: bytes, which are compared at
    once, instead of a tuple of all tokens of a block."""
    if offset < 0 or offset + page_size > len(self):
        raise IndexError(f"tokens {offset} to {offset + page_size} of a key of {len(self)}")
    # A bigram consists of a token and the next one.
    tokens = self.token_ids[offset : offset + page_size + self.is_bigram].tobytes()
    if self.cache_salt is not None:
        return (self.extra_key, self.cache_salt), tokens
    return tokens if self.extra_key is None else (self.extra_key, tokens)


def match_at(self: RadixKey, other: RadixKey, offset: int, page_size: int = 1) -> int:
    """REPLACE `RadixKey.match_at`, which returns the length that `self` has in common with `other` from `offset` on:
    compare all tokens at once, instead of parts of doubling lengths."""
    self._check_compatible(other)
    if self.is_bigram != other.is_bigram:
        raise ValueError("a key of bigrams is compared with a key of tokens")
    if offset < 0 or offset > len(other):
        raise IndexError(f"token {offset} of a key of {len(other)}")
    common = min(self._raw_len(), other._raw_len() - offset)
    mine, theirs = self.token_ids, other.token_ids[offset : offset + common]
    if common < len(mine):
        mine = mine[:common]
    if mine != theirs:
        common = int(np.argmax(np.asarray(mine) != np.asarray(theirs)))
    if self.is_bigram:
        common = max(0, common - 1)
    return common // page_size * page_size
