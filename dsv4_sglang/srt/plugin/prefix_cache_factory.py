"""Factory of a server's prefix cache, with or without a host cache."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.mem_cache.registry import default_radix_cache_factory
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from dsv4_sglang.srt.prefix_cache.block_component import BlockComponent
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.component import SnapshotComponent
from dsv4_sglang.srt.prefix_cache.events import PrefixEvents
from dsv4_sglang.srt.prefix_cache.tenants import NO_LIMIT


def build_prefix_cache(ctx: Any, interval: int, tenant_percent: int = NO_LIMIT) -> Any:
    """Build the prefix cache of a server; factory for `register_radix_cache_backend`.

    Args:
        ctx: SGLang's build context.
        interval: the option `snapshot_interval`, in tokens.
        tenant_percent: the option `tenant_percent`.
    """
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    slots = ctx.params.req_to_token_pool.mamba_ckpt_pool
    slots.tenant_percent, slots.tokens = tenant_percent, ctx.params.token_to_kv_pool_allocator.size
    ctx.params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
    if ctx.enable_hierarchical_cache:
        from dsv4_sglang.srt.host_cache.cache import build_host_prefix_cache

        cache: PrefixCache = build_host_prefix_cache(ctx, interval)
    else:
        ctx.params.component_registry_override = {
            ComponentType.FULL: BlockComponent,
            ComponentType.MAMBA: partial(SnapshotComponent, interval=interval),
        }
        cache = PrefixCache(ctx.params)
    if ctx.params.enable_kv_cache_events:
        cache.events = PrefixEvents(ctx.params.dynamo_kv_event_format)
        cache.tree_core.kv_events = cache.events
    return cache
