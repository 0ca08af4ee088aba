"""The hybrid cache: pools, state slots, and who owns them. Knows nothing of SGLang."""

from dsv4_sglang.cache.allocator import BlockAllocator
from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.cache.handle import ClassicalView, IndexerView, LayerCacheHandle, SwaView
from dsv4_sglang.cache.host_pool import HostBlockPool, HostCheckpointPool, HostSlotPool
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.manager import KVCacheManager
from dsv4_sglang.cache.offload import Offloaded
from dsv4_sglang.cache.paged_cache import PagedKVPool
from dsv4_sglang.cache.schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    HcaState,
    LayerCacheSchema,
    build_schema,
    compute_block_budget,
)
from dsv4_sglang.cache.state_cache import StateCachePool, StateStorage
from dsv4_sglang.cache.step import Step, StepMetadata
from dsv4_sglang.cache.v41_cache import V41Cache
from dsv4_sglang.cache.v41_step import V41LayerWeights, V41Step
from dsv4_sglang.formats import KeyFormat, RowFormat

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "BlockAllocator",
    "CacheLayout",
    "ClassicalView",
    "HcaState",
    "HostBlockPool",
    "HostCheckpointPool",
    "HostSlotPool",
    "IndexerView",
    "KVCacheManager",
    "KeyFormat",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerWeights",
    "Offloaded",
    "PagedKVPool",
    "RowFormat",
    "StateCachePool",
    "StateStorage",
    "Step",
    "StepMetadata",
    "SwaView",
    "V41Cache",
    "V41LayerWeights",
    "V41Step",
    "build_schema",
    "compute_block_budget",
]
