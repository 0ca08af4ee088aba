"""The host cache of a server: SGLang's HiCache with this cache's pools, its order of copies and its eviction.

See docs/guides/host_cache.md.
"""
