"""Storage of the hybrid cache: layouts, pools, step metadata and host pools. It does not depend on SGLang.

A server and `dsv4_sglang.standalone` are built on it and track the ownership of slots and blocks.
"""

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.cache.host_rows import HostBlockPool, HostSnapshotPool
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.schema import HcaState, LayerCacheSchema, build_schema, v4_specs
from dsv4_sglang.cache.state_cache import StateStorage

__all__ = [
    "CacheLayout",
    "HcaState",
    "HostBlockPool",
    "HostSnapshotPool",
    "LayerCacheSchema",
    "LayerWeights",
    "PagedKVPool",
    "StateStorage",
    "build_schema",
    "v4_specs",
]
