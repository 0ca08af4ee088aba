"""`PagedKVPool` of `cache.paged_cache`, which servers use too."""

from dsv4_sglang.cache.paged_cache import PagedKVPool

__all__ = ["PagedKVPool"]
