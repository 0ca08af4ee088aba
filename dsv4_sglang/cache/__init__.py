"""Storage of the hybrid cache: layouts, pools, step metadata and host pools. It does not depend on SGLang.

A server and `dsv4_sglang.standalone` are built on it and track the ownership of slots and blocks.
"""

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.cache.host_pool import HostBlockPool, HostSnapshotPool
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.schema import (
    HcaState,
    LayerCacheSchema,
    build_schema,
    compute_block_budget,
)
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.cache.v41_step import V41LayerWeights, V41Step
from dsv4_sglang.formats import KeyFormat, KVFormat

__all__ = [
    "CacheLayout",
    "HcaState",
    "HostBlockPool",
    "HostSnapshotPool",
    "KVFormat",
    "KeyFormat",
    "LayerCacheSchema",
    "LayerWeights",
    "PagedKVPool",
    "StateStorage",
    "StepMetadata",
    "V41LayerWeights",
    "V41Step",
    "build_schema",
    "compute_block_budget",
]
