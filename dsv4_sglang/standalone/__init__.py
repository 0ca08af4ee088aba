"""The hybrid cache for programs without SGLang. `KVCacheManager` owns slots and blocks; handles write and read layers.

A server does not import this package: there SGLang's scheduler owns slots and blocks (`srt.memory.pools`). Both are
built on the storage in `dsv4_sglang.cache`.
"""

from dsv4_sglang.attention import cuda_ops  # noqa: F401  (registers the ops that read the cache for CUDA)
from dsv4_sglang.standalone.allocator import BlockAllocator
from dsv4_sglang.standalone.handle import ClassicalView, IndexerView, LayerCacheHandle, SwaView
from dsv4_sglang.standalone.manager import KVCacheManager
from dsv4_sglang.standalone.paged_cache import PagedKVPool
from dsv4_sglang.standalone.schema import LayerCacheSchema, build_schema, compute_block_budget
from dsv4_sglang.standalone.state_cache import StateCachePool
from dsv4_sglang.standalone.step import Step

__all__ = [
    "BlockAllocator",
    "ClassicalView",
    "IndexerView",
    "KVCacheManager",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "PagedKVPool",
    "StateCachePool",
    "Step",
    "SwaView",
    "build_schema",
    "compute_block_budget",
]
