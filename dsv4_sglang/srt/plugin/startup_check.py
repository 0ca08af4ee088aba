"""Start-up check in the scheduler process, after everything is built and before it reports ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

from dsv4_sglang.srt.features import disaggregation
from dsv4_sglang.srt.launch.error import ending_with_the_reason
from dsv4_sglang.srt.plugin import sglang_contract, start_progress
from dsv4_sglang.srt.plugin.overrides import OVERRIDES
from dsv4_sglang.srt.sglang import release
from dsv4_sglang.srt.sglang.flags import current_flags


@ending_with_the_reason()
def build_or_reject(original: Callable[[Any], None], scheduler: Any) -> None:
    """AROUND `Scheduler.init_model_worker`, which loads the model, builds the pools and records graphs.

    First check that the private methods that this package overrides still exist. One process logs the progress.
    """
    from sglang.srt.runtime_context import get_parallel

    sglang_contract.require(sglang_contract.override_differences(OVERRIDES))
    with start_progress.logged() if get_parallel().tp_rank == 0 else nullcontext():
        original(scheduler)


def check_started(scheduler: Any) -> None:
    """Raise RuntimeError, which stops the server, unless pools, tree, backend and model are of this package.

    A release of SGLang may have the function that a hook replaces, and no longer call it.
    """
    wrong = [
        f"  {what} is {type(item).__module__}.{type(item).__qualname__}, not {wanted.__qualname__}"
        for what, item, wanted in chain(_pools(scheduler), _prefix_cache(scheduler), _model(scheduler))
        if type(item) is not wanted
    ]
    if wrong:
        raise RuntimeError("dsv4_sglang cannot serve: " + release.version_note() + ".\n" + "\n".join(wrong))
    _require_single_transfers(scheduler)


def _require_single_transfers(scheduler: Any) -> None:
    """Raise RuntimeError if a server of disaggregated serving would transfer a buffer more than once."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        if (queue := getattr(scheduler, name, None)) is not None:
            disaggregation.require_distinct_buffers(queue.kv_manager.kv_args)


# Description, object and expected class.
Expected = Iterator[tuple[str, object, type]]


def _pools(scheduler: Any) -> Expected:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    from dsv4_sglang.srt.memory.pools import CacheKVPool, StateReqToTokenPool, StateSlotPool

    runner = scheduler.tp_worker.model_runner
    decodes_only = scheduler.disaggregation_mode is DisaggregationMode.DECODE
    requests = runner.req_to_token_pool
    yield "request pool", requests, disaggregation.DecodeStateReqToTokenPool if decodes_only else StateReqToTokenPool
    yield "state pool", getattr(requests, "mamba_pool", None), StateSlotPool
    yield "KV pool", runner.token_to_kv_pool, CacheKVPool


def _prefix_cache(scheduler: Any) -> Expected:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from dsv4_sglang.srt.host_cache.cache import HostPrefixCache
    from dsv4_sglang.srt.host_cache.component import HostSnapshotComponent
    from dsv4_sglang.srt.prefix_cache.block_component import BlockComponent
    from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
    from dsv4_sglang.srt.prefix_cache.component import SnapshotComponent

    args, tree = current_flags(scheduler.server_args), scheduler.tree_cache
    if args.disable_radix_cache:
        return
    components, host = getattr(tree, "components", {}), args.enable_hierarchical_cache
    yield "prefix cache", tree, HostPrefixCache if host else PrefixCache
    yield "blocks of the tree", components.get(ComponentType.FULL), BlockComponent
    yield (
        "snapshots of the tree",
        components.get(ComponentType.MAMBA),
        HostSnapshotComponent if host else SnapshotComponent,
    )


def _model(scheduler: Any) -> Expected:
    """Yield the expected classes of the model and, with speculation, of its draft model."""
    from dsv4_sglang.srt.attention.backend import HybridCacheBackend
    from dsv4_sglang.srt.models.attention import CachedAttention
    from dsv4_sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    served = scheduler.tp_worker.model_runner
    config = served.model_config.hf_config
    yield "attention backend", served.attn_backend, HybridCacheBackend
    yield "model", served.model, DeepseekV4ForCausalLM
    for i, layer in enumerate(served.model.model.layers):
        yield f"attention of layer {i}", layer.self_attn, DeepseekV4ForCausalLM.layer_class(config).attention
    if scheduler.draft_worker is None:
        return
    runner = scheduler.draft_worker.draft_worker.draft_runner
    if runner.token_to_kv_pool is not served.token_to_kv_pool:
        raise RuntimeError("dsv4_sglang cannot serve: the draft model has a KV pool of its own")
    yield "attention backend of the draft model", runner.attn_backend, HybridCacheBackend
    if scheduler.spec_algorithm.is_dspark():
        for i, stage in enumerate(getattr(runner.model, "stages", ())):
            yield f"attention of stage {i}", stage.self_attn, CachedAttention
    else:
        yield "attention of the draft model", runner.model.model.decoder.self_attn, CachedAttention
