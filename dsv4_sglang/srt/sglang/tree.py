"""SGLang's radix tree: its nodes, its check, and evictions of parts of a node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def nodes_of(core: Any) -> int:
    """Return the number of nodes of a tree, with its root."""
    return len(core._node_arena)


def path_to_root(node: Any) -> Iterator[Any]:
    """Yield the nodes from this one up to the child of the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def length_of(node: Any) -> int:
    """Return the length of the path that ends at a node, in units of its keys: tokens or bigrams."""
    return sum(len(part.key) for part in path_to_root(node))


def check_tree(cache: Any) -> None:
    """Run the check of the tree that an idle scheduler of SGLang runs. It raises AssertionError.

    The check looks for nodes on device and host in a list that contains them only after their load. Nodes whose load is
    running are added for the check.
    """
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    known = cache.tree_core.full_host_duplicates
    before = dict(known)
    for loading in cache.ongoing_load_back.values():
        for node in path_to_root(cache.tree_core.node_by_id(loading.node_id)):
            known.setdefault(node.id, node)
    try:
        UnifiedRadixCache.sanity_check(cache)  # `PrefixCache.sanity_check` skips most calls
    finally:
        known.clear()
        known.update(before)


@contextmanager
def _freed_after(cache: Any) -> Iterator[tuple[Any, ...]]:
    """Context manager: yield the arguments in which functions of the tree collect what they free and follow-up
    actions. Free and act at the end."""
    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    actions: list[Any] = []
    yield device, host, actions
    cache._free_values(device, host)
    cache._apply_cache_actions(actions)


def evict_from_device(component: Any, node: Any) -> None:
    """Evict what `component` has on a tree node from the device. Other components of the node stay."""
    from sglang.srt.mem_cache.unified_cache.components import EvictLayer

    with _freed_after(component.cache) as freed:
        component.tree_core._evict_component_and_detach_lru(node, component, *freed, target=EvictLayer.DEVICE)


def evict_from_host(cache: Any, node: Any, components: Iterable[Any]) -> None:
    """Evict what components have on a tree node from the host. If only the host has the node and it is a leaf, remove
    the node."""
    from sglang.srt.mem_cache.unified_cache.components import EvictLayer

    core = cache.tree_core
    with _freed_after(cache) as freed:
        if node in core.evictable_host_leaves:
            core._evict_host_leaf(node, defaultdict(int), *freed)
        else:
            for component in components:
                core._evict_component_and_detach_lru(node, component, *freed, target=EvictLayer.HOST)
            core._update_evictable_leaf_sets(node)


@contextmanager
def saving_on_eviction(core: Any, needed: bool) -> Iterator[None]:
    """Context manager: inside, the tree saves a node to the host when it evicts the node from the device, if `needed`.
    Outside it always does."""
    core.is_write_back = needed
    try:
        yield
    finally:
        core.is_write_back = True
