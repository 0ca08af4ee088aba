"""Host cache of a server: SGLang's HiCache with this package's pools, copy order and eviction policy.

See docs/guides/host_cache.md.
"""
