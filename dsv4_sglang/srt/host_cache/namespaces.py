"""Tenants of a storage: requests of another `extra_key`, which has their `cache_salt`, have pages of their own.

For SGLang before 0.5.23, which separates tenants in its tree only. The keys of pages form a chain, each the hash of the
one before and of a page's tokens; here it begins with a hash of the tenant, the same as SGLang's since 0.5.23. A
request without an `extra_key` has the keys that it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any


def hash_pages(
    original: Callable[..., Any], token_ids: Any, prior_hash: str | None = None, page_size: int | None = None
) -> Any:
    """AROUND `compat.HASH_PAGES`: the keys of the pages of `token_ids`, behind the page with the key `prior_hash`."""
    tenant = getattr(token_ids, "extra_key", None)
    if prior_hash is None and tenant is not None:
        prior_hash = _first(tenant)
    return original(token_ids, prior_hash, page_size)


def _first(tenant: str) -> str:
    """What a tenant's chain begins with. There is no `cache_salt` apart from the key: the last byte says so."""
    name = tenant.encode()
    return hashlib.sha256(
        b"sglang-cache-namespace-v1" + b"\x01" + len(name).to_bytes(8, "little") + name + b"\x00"
    ).hexdigest()


def look_up(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """AROUND `compat.LOOK_UP_PAGES`: what the storage has for a request is looked for behind what the tree has."""
    core = getattr(scheduler.tree_cache, "tree_core", None)
    if core is None:  # a server without a prefix cache
        original(scheduler, req)
        return
    core.tenant = req.extra_key
    try:
        original(scheduler, req)
    finally:
        core.tenant = None


def of_anchor(original: Callable[..., str | None], core: Any, node_id: int) -> str | None:
    """AROUND `compat.PREFETCH_NAMESPACE`: the tenant of the pages that are looked for behind a node."""
    found = original(core, node_id)
    return getattr(core, "tenant", None) if found is None else found
