"""SGLang's releases and private names, and everything that depends on them.

Names with a leading underscore may change without notice. They are used in this module only, in functions with a
stated purpose. Differences between the supported releases are here too, one function or constant per difference. To add
a release, see docs/design/adding_a_release.md. Before a server starts, `sglang_contract` compares the installed SGLang
with what hooks and overrides rely on.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
from packaging.version import Version

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.v41 import MODEL_TYPES as V41_MODEL_TYPES
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.integration.launch_error import LaunchError

# Supported releases, and what was tested with each. Another release starts with a warning if `sglang_contract` finds no
# difference, and is rejected otherwise.
VALIDATED = {
    "0.5.17": "validated on GPU and CPU: the whole suite",
    "0.5.23": "validated on CPU by `make test-newest`, on one H200 by the GPU tests",
}


def sglang_version() -> str:
    return version("sglang")


# True for SGLang 0.5.23 and later, False for 0.5.17. Each difference below has these two cases.
IS_0_5_23 = Version(sglang_version()) >= Version("0.5.23")


def validation() -> str | None:
    """Return what has been validated with the installed release, or None."""
    return VALIDATED.get(sglang_version())


def version_note() -> str:
    """Return a sentence about the installed release for error messages."""
    return f"this is SGLang {sglang_version()}; validated: {', '.join(VALIDATED)}"


@contextmanager
def rejecting_other_releases() -> Iterator[None]:
    """Raise LaunchError, one line, for any exception inside if the installed release is not validated."""
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:
        if validation():
            raise
        raise LaunchError(f"this package does not fit the installed release: {version_note()}; {error!r}") from error


# Functions that hooks replace or wrap; `hooks` has the reasons. Empty if a release lacks the function or needs no hook.
_ARGS = "sglang.srt.arg_groups."
FLAGS_RESOLVED = _ARGS + ("validation_hook.check_server_args" if IS_0_5_23 else "overrides.materialize_declarations")
# Since 0.5.23 the spec that `activate` registers allows it.
ALLOW_EXTRA_BUFFER = "" if IS_0_5_23 else _ARGS + "overrides.supports_mamba_cache_extra_buffer"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
CHOOSE_STATE_SLOTS = _CONFIGURATOR + "_handle_max_mamba_cache"
SLOTS_OF_A_REQUEST = _CONFIGURATOR + "_calculate_mamba_ratio"
# Since 0.5.23 it rejects an FP8 KV cache on a CPU without AMX.
CONFIGURE_POOLS = _CONFIGURATOR + "configure" if IS_0_5_23 else ""
BUILD_REQUEST_POOL = _CONFIGURATOR + "_build_hybrid_req_pool"
BUILD_KV_POOL = _CONFIGURATOR + "_build_token_to_kv_pool"
TRACK_REQUEST = "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
MAY_CACHE_FINISHED = _RESULTS + "_mamba_can_cache_finished_req" if IS_0_5_23 else ""
_DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker."
CAPTURE_DRAFT_GRAPHS = _DRAFT_WORKER + "_capture_cuda_graphs"
DRAFT_EXTEND = _DRAFT_WORKER + "_draft_extend_for_decode"
LOGITS_OF_RANKS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
# On a GPU. Since 0.5.23 SGLang's layer sums the output of attention in the exchange of tokens.
SERVES_DP_ATTENTION = not IS_0_5_23
# Since 0.5.23 a prefill server copies block indices to pinned memory, after a CUDA event.
KV_SENDER = "sglang.srt.disaggregation.common.conn.CommonKVSender.__init__" if IS_0_5_23 else ""
BUILD_DECODE_REQUEST_POOL = _CONFIGURATOR + "_build_hybrid_mamba_decode_req_pool"
# Since 0.5.23 weights may be written between two calls, without SGLang's update functions, and are converted in the
# second.
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
END_WEIGHT_UPDATE = _WEIGHTS + "end_weight_update" if IS_0_5_23 else ""
# Since 0.5.23 a cancelled fetch from a storage keeps its host rows until its thread has stopped.
FREES_ROWS_IN_USE = not IS_0_5_23
# Since 0.5.23 SGLang hashes the tenant along with the tokens, and looks up pages by that hash.
_HASHES_TOKENS_ONLY = not IS_0_5_23
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore."
HASH_PAGES = "sglang.srt.mem_cache.utils.get_hash_str" if _HASHES_TOKENS_ONLY else ""
LOOK_UP_PAGES = "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache" if _HASHES_TOKENS_ONLY else ""
PREFETCH_NAMESPACE = _CORE + "prefetch_anchor_info" if _HASHES_TOKENS_ONLY else ""
# Field of ServerArgs: True if the user gave --swa-full-tokens-ratio. SGLang derives its window pool from it.
RATIO_IS_GIVEN = "_swa_full_tokens_ratio_explicitly_set" if IS_0_5_23 else ""
# Since 0.5.23 SGLang has the model.
SERVES_V41 = IS_0_5_23
MODEL_TYPES = ("deepseek_v4", "deepseek_v41") if SERVES_V41 else ("deepseek_v4",)
COLLAPSE_STREAMS = "sglang.kernels.ops.layernorm.mhc.mhc_combine" if SERVES_V41 else ""
# Called by the host cache and by transfers between servers. Later releases include a draft model's pool only in host
# pools that SGLang builds.
DRAFT_KV_POOL = "" if IS_0_5_23 else "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool"
# Since 0.5.23 it checks first whether memory can be pinned.
ALLOCATE_GRAMMAR_MASK = "" if IS_0_5_23 else "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask"
RESOLVE_DSPARK = "sglang.srt.arg_groups.speculative_hook._handle_dspark"
_DSPARK = "sglang.srt.speculative.dspark_components."
DSPARK_BACKEND = (
    _DSPARK + "dspark_worker_v2.build_draft_tp_worker"
    if IS_0_5_23
    else "sglang.srt.speculative.draft_worker_common.draft_server_args_overrides"
)
_INJECTOR = _DSPARK + "dspark_kv_inject.TargetHiddenKvInjector."
WRITE_CONTEXT = _INJECTOR + ("_inject" if IS_0_5_23 else "inject_target_hidden")
VALIDATE_EXTRA_BUFFER = (
    _ARGS + "mamba_hook.validate_mamba_extra_buffer"
    if IS_0_5_23
    else "sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer"
)
# Since 0.5.23 it returns a tensor for each request.
LOGPROBS_OF_TOKENS = "" if IS_0_5_23 else "sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw"
SEND_TO_SCHEDULER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"


class Override(NamedTuple):
    """A private method of SGLang's class `base` that this package's class `ours` overrides."""

    base: str
    ours: str
    method: str
    reason: str


def _overridden(base: str, ours: str, **reasons: str) -> Iterator[Override]:
    """Yield the methods of a class that are overridden, each with its reason."""
    return (Override(base, ours, method, reason) for method, reason in reasons.items())


_IN_TREE, _MODELS = "sglang.srt.models.deepseek_v4.", "dsv4_sglang.srt.models."
OVERRIDES = (
    *_overridden(
        _IN_TREE + "DeepseekV4DecoderLayer",
        _MODELS + "layers.DecoderLayer",
        _build_self_attn="SGLang's layer builds its attention here, which this package replaces",
    ),
    *_overridden(
        # Since 0.5.23 no layer has it on a GPU.
        _IN_TREE + ("DeepseekV4PlatformDecoderLayer" if IS_0_5_23 else "DeepseekV4DecoderLayer"),
        _MODELS + "layers.DecoderLayer",
        _run_moe_ffn_dp_sync="SGLang has GPU kernels only for the experts of a layer",
    ),
    *_overridden(
        "sglang.srt.models.deepseek_v4_dspark.DSparkV4Stage",
        _MODELS + "deepseek_v4_dspark.Stage",
        _build_self_attn="the same applies to a stage of DSPARK's draft model",
    ),
    *_overridden(
        _IN_TREE + "DeepseekV4ForCausalLM",
        _MODELS + "deepseek_v4.DeepseekV4ForCausalLM",
        _prewarm_mhc_kernels="it compiles GPU kernels, which do not exist on a CPU",
    ),
    *_overridden(
        "sglang.srt.mem_cache.unified_cache.components.FullComponent",
        "dsv4_sglang.srt.prefix_cache.component.BlockComponent",
        _evict_device_start="it sorts all leaves of the tree for each eviction; here they are kept in order",
        _evict_device_next_node="it takes the next leaf from that list",
        _evict_device_end="it frees that list",
    ),
    *_overridden(
        "sglang.srt.mem_cache.unified_cache.components.MambaComponent",
        "dsv4_sglang.srt.prefix_cache.component.SnapshotComponent",
        _evict_device_next_node="it evicts snapshots if live slots are short, which frees no live slot",
    ),
    *_overridden(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
        "dsv4_sglang.srt.host_cache.cache.HostPrefixCache",
        _execute_and_commit_kv_backup="SGLang saves every inserted node; here the most valuable snapshots are first",
        _evict_device_leaf="with write_back it saves blocks after the last snapshot, from which no request can resume",
    ),
    *_overridden(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController",
        "dsv4_sglang.srt.host_cache.transfers.TransferController",
        _generate_storage_config="one process writes what all of a group hold; SGLang assumes that for its own pools",
        _page_backup="each save would log a warning while the folder of a storage is missing",
    ),
    *_overridden(
        "sglang.srt.mem_cache.storage.file.lru_file_evictor.LRUFileEvictor",
        "dsv4_sglang.srt.host_cache.storage.FolderEvictor",
        _scan_existing_files="it counts the pages of one name, but the limit applies to the whole folder",
    ),
)


def model_config(hf_config: Any) -> DSV4Config | V41Config:
    """Return the model's config from SGLang's config object, which has the RoPE fields in the form of its
    transformers."""
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    theta, scaling = get_rope_config(hf_config)
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "rope_parameters"}
    model = V41Config if fields["model_type"] in V41_MODEL_TYPES else DSV4Config
    return model.from_hf({**fields, "rope_theta": theta, "rope_scaling": scaling})


def config_class(model_type: str = "deepseek_v4") -> Any:
    """Return SGLang's class for the config.json of a model. V4 and V4.1 have the same architecture."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    return _CONFIG_REGISTRY[model_type]


def applied_hooks() -> set[str]:
    """Return the targets that SGLang has hooked. It only logs a hook that fails."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry._patched


def flag_defaults() -> dict[str, Any]:
    """Return the default of each field of SGLang's ServerArgs. It is None for the model path, which has no default.

    ServerArgs is a dataclass in 0.5.17 and a msgspec structure in 0.5.23.
    """
    from sglang.srt.server_args import ServerArgs

    fields: Iterable[Any] = msgspec.structs.fields(ServerArgs) if IS_0_5_23 else dataclasses.fields(ServerArgs)
    missing = msgspec.NODEFAULT if IS_0_5_23 else dataclasses.MISSING
    defaults: dict[str, Any] = {}
    for field in fields:
        if field.name.startswith("_"):  # SGLang's own notes
            continue
        if field.default_factory is not missing:
            defaults[field.name] = field.default_factory()
        else:
            defaults[field.name] = None if field.default is missing else field.default
    return defaults


def flags(server_args: Any) -> Any:
    """Return the flags as far as SGLang has resolved them. Since 0.5.23 ServerArgs keep the given values, and the
    resolved ones are stored separately."""
    if not IS_0_5_23:
        return server_args
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def set_flags(server_args: Any, **values: Any) -> None:
    """Set flags while SGLang resolves them. Since 0.5.23 they are declared instead of assigned."""
    if IS_0_5_23:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "dsv4_sglang", **values)
        return
    for name, value in values.items():
        setattr(server_args, name, value)


def given_graph_settings(server_args: Any) -> set[tuple[str, str]]:
    """Return the (phase, setting) pairs of CUDA graphs that were set by flags."""
    return set(server_args._cuda_graph_config_locked)


def note_given_graph_setting(server_args: Any, phase: str, setting: str) -> None:
    """Mark a setting of CUDA graphs as set by a flag. SGLang 0.5.17 drops graphs that it chose itself if less than 4 GB
    of GPU memory are free, which is much more than the graphs of this cache take."""
    server_args._cuda_graph_config_locked.add((phase, setting))


def flags_are_resolved(server_args: Any) -> bool:
    """Return True if SGLang has derived all values from the given flags."""
    name = "_resolution_finished" if IS_0_5_23 else "_declarations_materialized"
    return bool(getattr(server_args, name, False))


def is_paused(scheduler: Any) -> bool:
    """Return True if the scheduler processes control requests only."""
    return bool(scheduler._engine_paused)


def set_paused(scheduler: Any, paused: bool) -> None:
    """Pause or continue the scheduler."""
    scheduler._engine_paused = paused


def with_dspark_backend(backend: str) -> Callable[..., Any]:
    """AROUND `DSPARK_BACKEND`: return a hook that gives DSPARK's draft model the attention backend `backend`."""

    def build(original: Callable[..., Any], **arguments: Any) -> Any:
        return original(**{**arguments, "attention_backend_override": backend})

    def flags(original: Callable[..., Any], target_model_config: Any, draft_backend: str) -> Any:
        return original(target_model_config, backend)

    return build if IS_0_5_23 else flags


def linear_bf16_fp32() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return SGLang's GEMM of bf16 inputs with an fp32 result."""
    if IS_0_5_23:
        from sglang.kernels.ops.gemm.bf16_fp32 import linear_bf16_fp32 as gemm
    else:
        from sglang.kernels.ops.attention.dsv4 import linear_bf16_fp32 as gemm
    return gemm


def takes_quantised_input(linear: Any) -> bool:
    """Return True if a linear layer accepts FP8 codes with fp32 scales (one per row and 128 channels) as input.

    SGLang supports that for block-quantised FP8 weights in DeepGEMM if scales are not packed.
    """
    method = linear.quant_method
    if not getattr(method, "block_quant", False) or method.use_marlin or method.use_mxfp8:
        return False
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback

    rows, columns = linear.weight.shape
    return (
        method.w8a8_block_fp8_linear is deepgemm_w8a8_block_fp8_linear_with_fallback
        and not deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
        and list(method.weight_block_size) == [128, 128]
        and rows % 64 == 0
        and columns % 128 == 0
    )


def track_entry(taken: bool) -> Any:
    """Return the result of `TRACK_REQUEST` for a request. Its slot and length are not used."""
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    return _MambaRadixCacheV2TrackEntry(taken, 0, 0)


def held(req: Any) -> Any:
    """Return the object with what a request holds of the pools: the request in 0.5.17, a record of its own in
    0.5.23."""
    return req.kv if IS_0_5_23 else req


def name_of(req: Any) -> Any:
    """Return the key of a request in prefetches of the tree: its id, since 0.5.23 with the number of the attempt."""
    return req.cache_request_handle if IS_0_5_23 else req.rid


def lock_of(req: Any) -> tuple[Any, Any]:
    """Return the tree node that a request locks, and its lock, or (None, None). Since 0.5.23 both are in one record."""
    if IS_0_5_23:
        return (None, None) if req.lock is None else (req.lock.node, req.lock.receipt)
    return req.last_node, req


def leaves_out(lock: Any, component: Any, node_id: int) -> bool:
    """Return True if the lock of a path does not include what a component has on this node."""
    if IS_0_5_23:
        return component in lock.skipped_lock_components
    return node_id in lock.skip_lock_node_ids.get(component, ())


def free_blocks(allocator: Any) -> list[int]:
    """Return the free blocks, including those that the allocator has not sorted yet."""
    if IS_0_5_23:
        return allocator.get_all_free_pages().tolist()
    return [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]


def prefix_len(req: Any) -> int:
    """Return the number of tokens of a request that the tree had."""
    return req.prefix_len if IS_0_5_23 else len(req.prefix_indices)


def extend_end(req: Any) -> int:
    """Return the number of tokens of a request after its next prefill step."""
    return req.extend_end if IS_0_5_23 else req.extend_range.end


def committed_len(req: Any) -> int:
    """Return the number of tokens of a request that are final in the cache."""
    return held(req).kv_committed_len


def seconds_since_created(req: Any) -> float:
    """Return the seconds since the HTTP server received a request, or since the scheduler did if that is unknown."""
    times = req.time_stats
    return time.perf_counter() - (times.created_time or times.scheduler_recv_time)


def disaggregated_requests(scheduler: Any) -> list[Any]:
    """Return requests that are in no batch and no queue: those to be aborted, and those between two servers."""
    found = [] if scheduler._pending_chunked_abort_req is None else [scheduler._pending_chunked_abort_req]
    mode = scheduler.disaggregation_mode.value
    if mode == "prefill":
        found += [*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.disagg_prefill_inflight_queue]
    if mode == "decode":
        arriving = [*scheduler.disagg_decode_prealloc_queue.queue, *scheduler.disagg_decode_transfer_queue.queue]
        found += [entry.req for entry in arriving] + scheduler.disagg_decode_prealloc_queue.retracted_queue
    return found


def idle_differences(scheduler: Any) -> list[str]:
    """Return the findings of SGLang's check of an idle server: pools whose parts do not add up to their size."""
    leaks, lines = scheduler.invariant_checker._check_all_pools(scheduler.pool_stats_observer.get_pool_stats())
    return lines if leaks else []


def check_tree(cache: Any) -> None:
    """Run the check of the tree that an idle scheduler of SGLang runs. It raises AssertionError.

    The check assumes that no copy is running. Since 0.5.23 it looks for nodes on device and host in a list that
    contains them only after their load. Before, it looks for snapshots on the host in a list from which a running copy
    removes them. These nodes are added for the check.
    """
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    on_host = cache.tree_core.host_lru_lists[ComponentType.MAMBA]
    locked = []
    for node in () if IS_0_5_23 else cache.tree_core._collect_all_nodes():
        data = node.component_data[ComponentType.MAMBA]
        if data.host_lock_ref and data.value is None and data.host_value is not None and not on_host.in_list(node):
            locked.append(node)
    known = cache.tree_core.full_host_duplicates if IS_0_5_23 else {}
    before = dict(known)
    for loading in cache.ongoing_load_back.values() if IS_0_5_23 else ():
        node = cache.tree_core.node_by_id(loading.node_id)
        while node is not cache.tree_core.root_node:
            known.setdefault(node.id, node)
            node = node.parent
    for node in locked:
        on_host.insert_mru(node)
    try:
        UnifiedRadixCache.sanity_check(cache)  # `PrefixCache.sanity_check` skips most calls
    finally:
        for node in locked:
            on_host.remove_node(node)
        known.clear()
        known.update(before)


def tensors_of_logprobs(
    original: Callable[..., Any],
    logprobs: torch.Tensor,
    token_ids_logprobs_list: Any,
    stage: Any,
    extend_logprob_pruned_lens_cpu: Any = None,
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """AROUND `LOGPROBS_OF_TOKENS`: return an empty tensor, not a list, for a request that asked for no token."""
    values, indices = original(logprobs, token_ids_logprobs_list, stage, extend_logprob_pruned_lens_cpu, no_copy_to_cpu)
    if no_copy_to_cpu:
        values = [value if torch.is_tensor(value) else logprobs.new_empty(0) for value in values]
    return values, indices


def fill_state_pool(pool: Any) -> None:
    """Set the attributes of a state pool that SGLang's constructor would set and its request pool reads."""
    pool.debug_memory_pool = False
    pool.enable_linear_replayssm = pool.enable_linear_replayssm_spec = pool.replayssm_spec_fold = False
    pool.replayssm_is_kda = False
    pool.replayssm_write_pos = pool.replayssm_cache_base = pool.replayssm_is_flush = None
    pool.enable_custom_mem_pool, pool.custom_mem_pool = False, None
    pool.conv_shard_groups, pool.conv_slice_axis = None, 0
    if IS_0_5_23:
        pool.replayssm_spec_write_pos = None
        pool._slot_state_siblings = []


def fill_request_pool(pool: Any, device: Any) -> None:
    """Set what a prefill step reads of the request pool since 0.5.23: the slots of track positions. `snapshot_schedule`
    discards the result."""
    if IS_0_5_23:
        pool.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(
            (pool.req_to_token.shape[0], 2), dtype=torch.int64, device=device
        )


def note_track_positions(batch: Any) -> None:
    """Set the snapshot position of each request, which the processing of a decode step reads. There is one here."""
    batch.mamba_track_buffer_indices = [0] * len(batch.reqs)


def inserted_before(length: int) -> dict[str, Any]:
    """Return arguments of `InsertParams`: the request has inserted this many tokens before, which do not count as a
    hit."""
    return {"inserted_len": length} if IS_0_5_23 else {"chunked": True}


def event_queue(block: int) -> Any:
    """Return a queue of KV events (`add`, `take`). Since 0.5.23 it joins the events of consecutive blocks."""
    if not IS_0_5_23:
        events: deque[Any] = deque()
        return SimpleNamespace(add=events.append, take=lambda: [events.popleft() for _ in range(len(events))])
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    recorder = KVCacheEventRecorder(enabled=True, page_size=block)
    return SimpleNamespace(add=recorder.enqueue, take=recorder.take)


def record_events(core: Any, recorder: Any) -> None:
    """Make a tree report its blocks to `recorder` instead of SGLang's recorder. Raise AttributeError if the tree
    records events in a different way."""
    calls = {"kv_events": recorder}
    if not IS_0_5_23:
        calls = {
            "_record_store_event": recorder.record_store,
            "_record_remove_event": recorder.record_remove,
            "_record_all_cleared_event": recorder.record_all_cleared,
            "take_events": recorder.take,
        }
    for name, call in calls.items():
        getattr(core, name)
        setattr(core, name, call)


def is_public(key: Any) -> bool:
    """Return True if requests without `extra_key` and `cache_salt` find the blocks of this key of the tree."""
    return key.extra_key is None and getattr(key, "cache_salt", None) is None


def release_retracted(
    original: Callable[..., None], req: Any, tree_cache: Any, keep: bool, *arguments: Any, **named: Any
) -> None:
    """Call `release_kv_cache`, which frees what a retracted request holds.

    With `keep`, first insert its tokens up to the last snapshot into the tree. Since 0.5.23 the function cannot do that
    for a request that continues.
    """
    if not IS_0_5_23:
        is_insert = arguments[0] if arguments else named.get("is_insert", True)
        original(req, tree_cache, is_insert=is_insert or keep)
        return
    if keep and req.kv.holds_kv:
        req.refresh_fill_ids()
        tree_cache.checkpoint(req, up_to=req.owned_kv_len())
    original(req, tree_cache, *arguments, **named)


def evicted_layers(*arguments: Any, **named: Any) -> Any:
    """Return the argument `target` of `evict_component`. Since 0.5.23 another argument precedes it."""
    from sglang.srt.mem_cache.unified_cache.components import EvictLayer

    return named.get("target", next((a for a in arguments if isinstance(a, EvictLayer)), EvictLayer.DEVICE))


@contextmanager
def _freed_after(cache: Any) -> Iterator[tuple[Any, ...]]:
    """Context manager: yield the arguments in which functions of the tree collect what they free. It is freed at the
    end. Since 0.5.23 they also collect follow-up actions."""
    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    actions: list[Any] = []
    yield (device, host, actions) if IS_0_5_23 else (device, host)
    cache._free_values(device, host)
    cache._apply_cache_actions(actions)


def nodes_of(core: Any) -> int:
    """Return the number of nodes of a tree, with its root."""
    return len(core._node_arena)


def evict_from_device(component: Any, node: Any) -> None:
    """Evict what `component` has on a tree node from the device. Other components of the node stay."""
    from sglang.srt.mem_cache.unified_cache.components import EvictLayer

    with _freed_after(component.cache) as freed:
        component.tree_core._evict_component_and_detach_lru(node, component, *freed, target=EvictLayer.DEVICE)


def evict_from_host(cache: Any, node: Any, components: Iterable[Any]) -> None:
    """Evict what components have on a tree node from the host. If only the host has the node and it is a leaf, remove
    the node."""
    from sglang.srt.mem_cache.unified_cache.components import EvictLayer

    core = cache.tree_core
    with _freed_after(cache) as freed:
        if node in core.evictable_host_leaves:
            core._evict_host_leaf(node, defaultdict(int), *freed)
        else:
            for component in components:
                core._evict_component_and_detach_lru(node, component, *freed, target=EvictLayer.HOST)
            core._update_evictable_leaf_sets(node)


def host_pool_group(entries: list[Any]) -> Any:
    """Return SGLang's group of host pools."""
    if IS_0_5_23:
        from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
    else:
        from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup
    return HostPoolGroup(entries)


def start_backup(cache: Any, node_id: int, device_blocks: Any, transfers: Any) -> Any:
    """Start to copy a node to the host. Return the host indices of its blocks, or None without room for all of it."""
    return cache._execute_kv_backup(node_id, device_blocks, transfers, [])


def note_backup(cache: Any, node_id: int, lock: Any) -> None:
    """Record a running copy of a node. `lock` is released when it ends."""
    covered = {"publish_node_ids": [node_id]} if IS_0_5_23 else {}
    cache._track_write_through_node(node_id, lock, **covered)


def transfer_layers(layers: int) -> dict[str, int]:
    """Return the argument of host pools and of the copy controller: the layers for whose loads steps wait."""
    return {"transfer_layer_id_max" if IS_0_5_23 else "transfer_layer_num": layers}


def stack_of_pools(layers: int, **parts: Any) -> Any:
    """Return the parts of the host cache in the form that SGLang expects."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackBuildResult

    # Since 0.5.23 SGLang compares them with the declarations of the device pool.
    return StackBuildResult(**parts, **({"pool_declarations": ()} if IS_0_5_23 else transfer_layers(layers)))


def copy_streams(controller: Any) -> tuple[Any, Any]:
    """Return the streams of copies to the host and from the host."""
    if IS_0_5_23:
        engine = controller.l2_transfer_engine
        return engine.device_to_host_stream, engine.host_to_device_stream
    return controller.write_stream, controller.load_stream


def blocks_of(storage: Any) -> Any:
    """Return the host pool of blocks of a storage. Before 0.5.23 the storage has the group of all pools."""
    if IS_0_5_23:
        return storage.mem_pool_host
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return storage.mem_pool_host.get_pool(PoolName.KV)


def nixl_names(storage: Any, pool: Any, keys: Sequence[str]) -> list[str]:
    """Return the names of a host pool's pages in a NIXL storage. A page is one buffer."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    if pool == PoolName.KV:
        return list(storage._get_key_list_from_meta(keys))
    return list(storage._get_hybrid_component_keys(keys, pool, 1))


def mooncake_names(storage: Any, pool: Any, keys: Sequence[str]) -> list[str]:
    """Return the names of a host pool's pages in a Mooncake store. A page is one buffer."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    part = "k" if pool == PoolName.KV else pool
    return storage._tag_keys([f"{key}_{storage.mla_suffix}_{part}" for key in keys])


def folder_in_config(config: Any) -> str | None:
    """Return the folder of a file storage from `--hicache-storage-backend-extra-config`, which is read since 0.5.23."""
    return (config.extra_config or {}).get("file_storage_path") if IS_0_5_23 else None


def bound_folder(storage: Any, evictor: Callable[..., Any], config: Any) -> None:
    """Give a file storage an evictor for its whole folder, if it has a size limit and this process writes."""
    writes = config.is_storage_writer if IS_0_5_23 else config.tp_rank == 0
    if not (storage._evictor.enabled and writes):
        return
    # The empty suffix matches every name.
    owned = {"owned_suffixes": ("",)} if IS_0_5_23 else {"config_suffix": "", "is_mla_model": True}
    cache = storage.metadata_cache
    storage._evictor = evictor(
        storage.file_path,
        tp_rank=config.tp_rank,
        extra_config=config.extra_config,
        on_evict=None if cache is None else cache.remove,
        **owned,
    )


def lock_of_files(evictor: Any) -> Any:
    """Return the lock of an evictor's list of files."""
    return evictor._lock


def set_files(evictor: Any, sizes: dict[str, int]) -> None:
    """Replace an evictor's list of files. Files that are being written stay in it.

    Args:
        evictor: SGLang's evictor.
        sizes: bytes by name, first to be evicted first.
    """
    for name in evictor._pending_writes:
        sizes[name] = sizes.pop(name, evictor._lru[name])
    evictor._lru.clear()
    evictor._lru.update(sizes)
    evictor._total_bytes = sum(sizes.values())


def forget_files(storage: Any) -> None:
    """Clear SGLang's list of the files of a storage, after the files were removed."""
    storage._evictor.clear()


def resolve_flags(server_args: Any) -> Any:
    """Derive all values from the given flags, and return them. Before 0.5.23 the constructor does that."""
    if IS_0_5_23:
        server_args.resolve_once()
    return flags(server_args)


@contextmanager
def published(server_args: Any, tp: int = 1, dp: int = 1) -> Iterator[None]:
    """Context manager: let SGLang's constructors and configurators run as in the first process of a server with these
    flags.

    No process group is created: constructors only read sizes and ranks. Flags that were published before are restored.

    Args:
        server_args: SGLang's ServerArgs.
        tp: number of processes.
        dp: ranks of DP attention.
    """
    from sglang.srt import runtime_context

    group = SimpleNamespace(world_size=tp, rank_in_group=0, cpu_group=None)
    alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    with ExitStack() as stack:
        if IS_0_5_23:
            ranks = runtime_context.SpawnRanks(world_rank=0)
            context = runtime_context.create_context(server_args, role="scheduler", ranks=ranks)
            stack.enter_context(runtime_context.use_context(context))
            stack.enter_context(runtime_context.get_parallel().override(tp_group=group, pp_group=alone))
        else:
            from sglang.srt.distributed import parallel_state

            stack.enter_context(runtime_context.get_context().preserve_config())
            runtime_context.get_context().set_server_args(server_args)
            stack.enter_context(replaced(parallel_state, _TP=group, _PP=alone))
            sizes = {"world": tp, "tp": tp, "attn_tp": tp // dp, "moe_tp": tp, "attn_dp": dp}
            sizes |= dict.fromkeys(("pp", "moe_ep", "moe_dp", "attn_cp", "dcp"), 1)
            seen = {f"{name}_{what}": n for name, size in sizes.items() for what, n in (("size", size), ("rank", 0))}
            stack.enter_context(runtime_context.get_parallel().override(**seen))
        stack.enter_context(runtime_context.get_flags().dp.override(enabled=dp > 1))
        yield


@contextmanager
def fp8_output_projection(enabled: bool) -> Iterator[None]:
    """Context manager: choose whether SGLang's model builds the first output projection in FP8. SGLang reads the
    environment variable at import."""
    from sglang.srt.models import deepseek_v4

    with replaced(deepseek_v4, _FP8_WO_A_GEMM=enabled):
        yield


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Context manager: replace names of a module, such as classes that a constructor looks up."""
    saved = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(saved)
