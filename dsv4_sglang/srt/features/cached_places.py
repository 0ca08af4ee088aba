"""Which tokens of a prompt are cached, and where, without any effect on the tree (`POST /dsv4/lookup`)."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS
from dsv4_sglang.srt.prefix_cache.events import has_snapshot

# Most blocks that one lookup searches for in a storage. A file storage reads the status of two files for each.
STORED_BLOCKS = 1024


class Places(NamedTuple):
    """The tokens of a prompt that a request would not compute, by the place that has them."""

    device: int
    host: int
    files: int


def find(cache: Any, tokens: array[int], extra_key: str | None, cache_salt: str | None, files: bool) -> Places:
    """Return the tokens that a request with this prompt would hit if it were admitted now.

    This is SGLang's match of a request without its effects: no node is split, and no time of use changes. A request
    resumes at the end of a node that has a snapshot. The cost is that of comparing the prompt with one path.

    Args:
        cache: prefix cache of a scheduler.
        tokens: the prompt. Its last token is always computed.
        extra_key, cache_salt: name space of the request.
        files: search the storage of the host cache, too, for up to STORED_BLOCKS blocks.
    """
    core = cache.tree_core
    key, _ = RadixKey(tokens, extra_key, limit=len(tokens) - 1, cache_salt=cache_salt).maybe_to_bigram_view(
        core.is_eagle
    )
    key = key.page_aligned(BLOCK)
    path, end, on_device = _match(core, key)
    hit = sum(len(node.key) for node in path[:end])
    # Blocks below the deepest snapshot of the device are loaded from the host, if the host has them.
    rows = [node.component_data[ComponentType.FULL].host_value for node in path[on_device:end]]
    host = sum(len(row) for row in rows if row is not None)
    stored = 0
    if files and cache.enable_storage:
        stored = _in_storage(cache, path[end - 1] if end else core.root_node, key[hit:])
    return Places(hit - host, host, stored)


def _match(core: Any, key: RadixKey) -> tuple[list[Any], int, int]:
    """Return the nodes that a key contains, the number of them up to the last snapshot, and the number up to the last
    snapshot on the device."""
    path: list[Any] = []
    node, length, end, on_device = core.root_node, 0, 0, 0
    while length < len(key):
        node = node.children.get(key.child_key_at(length, BLOCK))
        if node is None or (node.evicted and not node.backuped):
            break
        if node.key.match_at(key, length, page_size=BLOCK) < len(node.key):
            break
        path.append(node)
        length += len(node.key)
        if has_snapshot(node):
            end = len(path)
            if not node.evicted and node.component_data[ComponentType.MAMBA].value is not None:
                on_device = end
    return path, end, on_device


def _in_storage(cache: Any, node: Any, rest: RadixKey) -> int:
    """Return the tokens of the rest of a key, after the node, that a request would fetch from the storage."""
    rest = rest[: STORED_BLOCKS * BLOCK]
    known = node is cache.tree_core.root_node or node.backuped
    if not known or not len(rest) or len(rest) < cache.prefetch_threshold:
        return 0
    hashes = get_storage_hash_str(rest, node.get_last_hash_value(), page_size=BLOCK)
    assert isinstance(hashes, list)
    snapshot = PoolTransfer(name=SNAPSHOTS, keys=["any"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    pages = cache.cache_controller.storage_backend.batch_exists_v2(hashes, [snapshot]).kv_hit_pages
    return int(pages) * BLOCK if pages * BLOCK >= cache.prefetch_threshold else 0
