"""Tenants of a storage: requests with different `extra_key` (which contains `cache_salt`) use different pages.

Only for SGLang before 0.5.23, which separates tenants in its tree but not in a storage. Page keys form a chain: each is
the hash of the previous key and the tokens of the page. For a tenant the chain starts with a hash of its name, the same
as in SGLang 0.5.23 and later. Requests without an `extra_key` keep their keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any


def hash_pages(
    original: Callable[..., Any], token_ids: Any, prior_hash: str | None = None, page_size: int | None = None
) -> Any:
    """AROUND `compat.HASH_PAGES`: return the keys of the pages of `token_ids`.

    Args:
        original: the function of SGLang.
        token_ids: tokens, with the tenant as attribute `extra_key`.
        prior_hash: key of the page before them, None at the start.
        page_size: tokens of a page.
    """
    tenant = getattr(token_ids, "extra_key", None)
    if prior_hash is None and tenant is not None:
        prior_hash = _first(tenant)
    return original(token_ids, prior_hash, page_size)


def _first(tenant: str) -> str:
    """Return the start of a tenant's chain. The last byte states that there is no `cache_salt` besides the key."""
    name = tenant.encode()
    return hashlib.sha256(
        b"sglang-cache-namespace-v1" + b"\x01" + len(name).to_bytes(8, "little") + name + b"\x00"
    ).hexdigest()


def look_up(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """AROUND `compat.LOOK_UP_PAGES`: set the tenant while SGLang looks up a request's pages in the storage."""
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
    """AROUND `compat.PREFETCH_NAMESPACE`: return the tenant of the pages that are looked up after a node."""
    found = original(core, node_id)
    return getattr(core, "tenant", None) if found is None else found
