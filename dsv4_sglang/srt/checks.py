"""The start-up check: in the scheduler process, after everything is built and before it reports ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from dsv4_sglang.srt import compat, contracts
from dsv4_sglang.srt.launch_error import LaunchError


def build_or_reject(original: Callable[[Any], None], scheduler: Any) -> None:
    """AROUND `Scheduler.init_model_worker`, which loads the model and builds the pools: compare the private methods of
    SGLang that ours override before, and show why a launch is rejected.

    SGLang would log a traceback and have the launcher log more before it kills itself. Here the line is the last one.
    SGLang's subprocesses end with the launcher.
    """
    try:
        contracts.require(contracts.override_differences())
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
    from dsv4_sglang.srt.backend_v41 import backend_class
    from dsv4_sglang.srt.disaggregation import DecodeStateReqToTokenPool
    from dsv4_sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
    from dsv4_sglang.srt.pools import CacheKVPool, CompressedKVPool, StateReqToTokenPool, StateSlotPool

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
        *_checkpoint_classes(scheduler, requests),
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
        raise RuntimeError("dsv4_sglang refuses to serve: " + compat.version_note() + ".\n" + "\n".join(wrong))


def _draft_classes(scheduler: Any, tokens: object) -> list[tuple[str, object, type]]:
    """What speculation adds, where there is some."""
    from dsv4_sglang.srt.backend import HybridCacheBackend
    from dsv4_sglang.srt.models.deepseek_v4 import CachedAttention
    from dsv4_sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
    from dsv4_sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
    from dsv4_sglang.srt.speculation import DraftBackends

    if scheduler.draft_worker is None:
        return []
    worker = scheduler.draft_worker.draft_worker
    runner = worker.draft_runner
    if runner.token_to_kv_pool is not tokens:
        raise RuntimeError("dsv4_sglang refuses to serve: the draft model has a KV pool of its own")
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
    from dsv4_sglang.srt.prefix.cache import PrefixCache

    if server_args.disable_radix_cache:
        return compat.tree_without_prefix_cache()
    if not server_args.enable_hierarchical_cache:
        return PrefixCache
    from dsv4_sglang.srt.host.cache import TieredCache

    return TieredCache


def _checkpoint_classes(scheduler: Any, requests: Any) -> list[tuple[str, object, type]]:
    """What the prefix cache adds, where there is one."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from dsv4_sglang.srt.prefix.component import BlockComponent, CheckpointComponent, LeafOrder
    from dsv4_sglang.srt.prefix.slots import CheckpointSlots

    args = compat.flags(scheduler.server_args)
    if args.disable_radix_cache:
        return []
    tree = scheduler.tree_cache
    components = getattr(tree, "components", {})
    component: type = CheckpointComponent
    found: list[tuple[str, object, type]] = []
    if args.enable_hierarchical_cache:
        from dsv4_sglang.srt.host.component import TieredComponent
        from dsv4_sglang.srt.host.pools import HostBlocks, HostCheckpoints
        from dsv4_sglang.srt.host.transfers import TransferController

        component = TieredComponent
        found = [
            ("host blocks", getattr(tree, "full_kv_pool_host", None), HostBlocks),
            ("host checkpoints", getattr(tree, "mamba_pool_host", None), HostCheckpoints),
            ("controller of copies to the host", getattr(tree, "cache_controller", None), TransferController),
        ]
    return [
        ("checkpoint slots", getattr(requests, "mamba_ckpt_pool", None), CheckpointSlots),
        ("blocks of the tree", components.get(ComponentType.FULL), BlockComponent),
        ("checkpoints of the tree", components.get(ComponentType.MAMBA), component),
        ("order of eviction", getattr(getattr(tree, "tree_core", None), "eviction_strategy", None), LeafOrder),
        *found,
    ]
