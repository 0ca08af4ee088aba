"""The start-up check: in the scheduler process, after everything is built and before it reports ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from dsv4_sglang.srt.integration import compat, sglang_contract
from dsv4_sglang.srt.integration.launch_error import LaunchError


def build_or_reject(original: Callable[[Any], None], scheduler: Any) -> None:
    """AROUND `Scheduler.init_model_worker`, which loads the model and builds the pools: compare the private methods of
    SGLang that ours override before, and show why a launch is rejected.

    SGLang would log a traceback and have the launcher log more before it kills itself. Here the line is the last one.
    SGLang's subprocesses end with the launcher.
    """
    try:
        sglang_contract.require(sglang_contract.override_differences())
        original(scheduler)
    except LaunchError as error:
        if (launcher := multiprocessing.parent_process()) is None or launcher.pid is None:
            raise
        error.show()
        os.kill(launcher.pid, signal.SIGKILL)
        raise SystemExit(1) from None


def check_started(scheduler: Any) -> None:
    """Raise, which stops the server, unless pools, allocator, tree, backend and model are the classes that belong here.

    SGLang logs a failing plugin or hook and serves on with its own pools: this is what makes that loud.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
    from dsv4_sglang.srt.attention.backend_v41 import backend_class
    from dsv4_sglang.srt.features.disaggregation import DecodeStateReqToTokenPool
    from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool, StateReqToTokenPool, StateSlotPool
    from dsv4_sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    runner = scheduler.tp_worker.model_runner
    requests, tokens = runner.req_to_token_pool, runner.token_to_kv_pool
    tree = _tree_class(compat.flags(scheduler.server_args))
    layer_class = DeepseekV4ForCausalLM.layer_class(runner.model_config.hf_config)
    decodes_only = scheduler.disaggregation_mode is DisaggregationMode.DECODE
    found: list[tuple[str, object, type]] = [
        ("request pool", requests, DecodeStateReqToTokenPool if decodes_only else StateReqToTokenPool),
        ("state pool", getattr(requests, "mamba_pool", None), StateSlotPool),
        ("KV pool", tokens, CacheKVPool),
        ("paged pool", getattr(tokens, "full_kv_pool", None), CompressedKVPool),
        ("allocator", runner.token_to_kv_pool_allocator, PagedTokenToKVPoolAllocator),
        ("prefix cache", scheduler.tree_cache, tree),
        *_snapshot_classes(scheduler, requests),
        ("attention backend", runner.attn_backend, backend_class(runner.model_config.hf_config)),
        ("model", runner.model, DeepseekV4ForCausalLM),
        *[
            (f"attention of layer {i}", layer.self_attn, layer_class.attention)
            for i, layer in enumerate(runner.model.model.layers)
        ],
        *_draft_classes(scheduler, tokens),
    ]
    wrong = [
        f"  {what} is {type(item).__module__}.{type(item).__qualname__}, not {wanted.__qualname__}"
        for what, item, wanted in found
        if type(item) is not wanted
    ]
    if scheduler.page_size != BLOCK:
        wrong.append(f"  the page size is {scheduler.page_size}, not {BLOCK}")
    if wrong:
        raise RuntimeError("dsv4_sglang rejects to serve: " + compat.version_note() + ".\n" + "\n".join(wrong))


def _draft_classes(scheduler: Any, tokens: object) -> list[tuple[str, object, type]]:
    """What speculation adds, where there is some."""
    from dsv4_sglang.srt.attention.backend import HybridCacheBackend
    from dsv4_sglang.srt.attention.speculation import DraftBackends
    from dsv4_sglang.srt.models.deepseek_v4 import CachedAttention
    from dsv4_sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
    from dsv4_sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    if scheduler.draft_worker is None:
        return []
    worker = scheduler.draft_worker.draft_worker
    runner = worker.draft_runner
    if runner.token_to_kv_pool is not tokens:
        raise RuntimeError("dsv4_sglang rejects to serve: the draft model has a KV pool of its own")
    backend: tuple[str, object, type] = "attention backend of the draft model", runner.attn_backend, HybridCacheBackend
    if scheduler.spec_algorithm.is_dspark():
        stages = getattr(runner.model, "stages", ())
        return [
            ("draft model", runner.model, DeepseekV4ForCausalLMDSpark),
            *[(f"attention of stage {i}", stage.self_attn, CachedAttention) for i, stage in enumerate(stages)],
            backend,
        ]
    steps = worker.draft_attn_backend
    return [
        ("draft model", runner.model, DeepseekV4ForCausalLMNextN),
        ("attention of the draft model", getattr(runner.model.model.decoder, "self_attn", None), CachedAttention),
        backend,
        *([] if steps is None else [("attention backends of its steps", steps, DraftBackends)]),
    ]


def _tree_class(server_args: Any) -> type:
    from dsv4_sglang.srt.prefix_cache.cache import PrefixCache

    if server_args.disable_radix_cache:
        return compat.tree_without_prefix_cache()
    if not server_args.enable_hierarchical_cache:
        return PrefixCache
    from dsv4_sglang.srt.host_cache.cache import HostPrefixCache

    return HostPrefixCache


def _snapshot_classes(scheduler: Any, requests: Any) -> list[tuple[str, object, type]]:
    """What the prefix cache adds, where there is one."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from dsv4_sglang.srt.prefix_cache.component import BlockComponent, LeafOrder, SnapshotComponent
    from dsv4_sglang.srt.prefix_cache.slots import SnapshotSlots

    args = compat.flags(scheduler.server_args)
    if args.disable_radix_cache:
        return []
    tree = scheduler.tree_cache
    components = getattr(tree, "components", {})
    component: type = SnapshotComponent
    found: list[tuple[str, object, type]] = []
    if args.enable_hierarchical_cache:
        from dsv4_sglang.srt.host_cache.component import HostSnapshotComponent
        from dsv4_sglang.srt.host_cache.pools import HostBlocks, HostSnapshots
        from dsv4_sglang.srt.host_cache.transfers import TransferController

        component = HostSnapshotComponent
        found = [
            ("host blocks", getattr(tree, "full_kv_pool_host", None), HostBlocks),
            ("host snapshots", getattr(tree, "mamba_pool_host", None), HostSnapshots),
            ("controller of copies to the host", getattr(tree, "cache_controller", None), TransferController),
        ]
    return [
        ("snapshot slots", getattr(requests, "mamba_ckpt_pool", None), SnapshotSlots),
        ("blocks of the tree", components.get(ComponentType.FULL), BlockComponent),
        ("snapshots of the tree", components.get(ComponentType.MAMBA), component),
        ("order of eviction", getattr(getattr(tree, "tree_core", None), "eviction_strategy", None), LeafOrder),
        *found,
    ]
