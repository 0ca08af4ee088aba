"""The supported release of SGLang, and SGLang's private names.

Names with a leading underscore may change without notice. They are used in this module only, in functions with a
stated purpose. To support the next release, see docs/design/adding_a_release.md. Before a server starts,
`sglang_contract` compares the installed SGLang with what hooks and overrides rely on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.v41 import MODEL_TYPES as V41_MODEL_TYPES
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.launch.error import LaunchError

# The supported release. Another one starts with a warning if `sglang_contract` finds no difference, and is rejected
# otherwise.
RELEASE = "0.5.23"


def sglang_version() -> str:
    return version("sglang")


def is_supported() -> bool:
    """Return True if the installed release is the supported one."""
    return sglang_version() == RELEASE


def version_note() -> str:
    """Return a sentence about the installed release for error messages."""
    return f"this is SGLang {sglang_version()}; supported: {RELEASE}"


@contextmanager
def rejecting_other_releases() -> Iterator[None]:
    """Raise LaunchError, one line, for any exception inside if the installed release is not supported."""
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:
        if is_supported():
            raise
        raise LaunchError(f"this package does not fit the installed release: {version_note()}; {error!r}") from error


# Functions that hooks replace or wrap. `hooks` has the reasons.
_ARGS = "sglang.srt.arg_groups."
FLAGS_RESOLVED = _ARGS + "validation_hook.check_server_args"
VALIDATE_EXTRA_BUFFER = _ARGS + "mamba_hook.validate_mamba_extra_buffer"
RESOLVE_DSPARK = _ARGS + "speculative_hook._handle_dspark"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
CHOOSE_STATE_SLOTS = _CONFIGURATOR + "_handle_max_mamba_cache"
SLOTS_OF_A_REQUEST = _CONFIGURATOR + "_calculate_mamba_ratio"
CONFIGURE_POOLS = _CONFIGURATOR + "configure"
BUILD_REQUEST_POOL = _CONFIGURATOR + "_build_hybrid_req_pool"
BUILD_DECODE_REQUEST_POOL = _CONFIGURATOR + "_build_hybrid_mamba_decode_req_pool"
BUILD_KV_POOL = _CONFIGURATOR + "_build_token_to_kv_pool"
TRACK_REQUEST = "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
MAY_CACHE_FINISHED = _RESULTS + "_mamba_can_cache_finished_req"
_DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker."
CAPTURE_DRAFT_GRAPHS = _DRAFT_WORKER + "_capture_cuda_graphs"
DRAFT_EXTEND = _DRAFT_WORKER + "_draft_extend_for_decode"
_DSPARK = "sglang.srt.speculative.dspark_components."
DSPARK_BACKEND = _DSPARK + "dspark_worker_v2.build_draft_tp_worker"
WRITE_CONTEXT = _DSPARK + "dspark_kv_inject.TargetHiddenKvInjector._inject"
LOGITS_OF_RANKS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
SEND_TO_SCHEDULER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"
# Field of ServerArgs: True if the user gave --swa-full-tokens-ratio. SGLang derives its window pool from it.
RATIO_IS_GIVEN = "_swa_full_tokens_ratio_explicitly_set"


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
        # SGLang's layer without a GPU. The layer on a GPU does not have it.
        _IN_TREE + "DeepseekV4PlatformDecoderLayer",
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
    """Return the default of each field of SGLang's ServerArgs. It is None for the model path, which has no default."""
    from sglang.srt.server_args import ServerArgs

    fields: Iterable[Any] = msgspec.structs.fields(ServerArgs)
    missing = msgspec.NODEFAULT
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
    """Return the flags as far as SGLang has resolved them. ServerArgs keep the given values."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def set_flags(server_args: Any, **values: Any) -> None:
    """Set flags while SGLang resolves them."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "dsv4_sglang", **values)


def given_graph_settings(server_args: Any) -> set[tuple[str, str]]:
    """Return the (phase, setting) pairs of CUDA graphs that were set by flags."""
    return set(server_args._cuda_graph_config_locked)


def note_given_graph_setting(server_args: Any, phase: str, setting: str) -> None:
    """Mark a setting of CUDA graphs as set by a flag. SGLang's later steps may change those that are not marked."""
    server_args._cuda_graph_config_locked.add((phase, setting))


def flags_are_resolved(server_args: Any) -> bool:
    """Return True if SGLang has derived all values from the given flags."""
    return bool(getattr(server_args, "_resolution_finished", False))


def is_paused(scheduler: Any) -> bool:
    """Return True if the scheduler processes control requests only."""
    return bool(scheduler._engine_paused)


def set_paused(scheduler: Any, paused: bool) -> None:
    """Pause or continue the scheduler."""
    scheduler._engine_paused = paused


def wrap_dispatcher(scheduler: Any, wrapper: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Call `wrapper(dispatch, request)` for each request that a scheduler receives. `dispatch(request)` is SGLang's."""
    dispatch = scheduler._request_dispatcher
    scheduler._request_dispatcher = lambda request: wrapper(dispatch, request)


def add_result_handler(manager: Any, kind: type, handler: Callable[[Any], None]) -> None:
    """Call `handler` for each message of the class `kind` that a tokenizer manager receives from a scheduler."""
    from sglang.utils import TypeBasedDispatcher

    manager._result_dispatcher += TypeBasedDispatcher([(kind, handler)])


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

    The check looks for nodes on device and host in a list that contains them only after their load. Nodes whose load is
    running are added for the check.
    """
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    known = cache.tree_core.full_host_duplicates
    before = dict(known)
    for loading in cache.ongoing_load_back.values():
        node = cache.tree_core.node_by_id(loading.node_id)
        while node is not cache.tree_core.root_node:
            known.setdefault(node.id, node)
            node = node.parent
    try:
        UnifiedRadixCache.sanity_check(cache)  # `PrefixCache.sanity_check` skips most calls
    finally:
        known.clear()
        known.update(before)


def fill_state_pool(pool: Any) -> None:
    """Set the attributes of a state pool that SGLang's constructor would set and its request pool reads."""
    pool.debug_memory_pool = False
    pool.enable_linear_replayssm = pool.enable_linear_replayssm_spec = pool.replayssm_spec_fold = False
    pool.replayssm_is_kda = False
    pool.replayssm_write_pos = pool.replayssm_cache_base = pool.replayssm_is_flush = None
    pool.enable_custom_mem_pool, pool.custom_mem_pool = False, None
    pool.conv_shard_groups, pool.conv_slice_axis = None, 0
    pool.replayssm_spec_write_pos = None
    pool._slot_state_siblings = []


def note_track_positions(batch: Any) -> None:
    """Set the snapshot position of each request, which the processing of a decode step reads. There is one here."""
    batch.mamba_track_buffer_indices = [0] * len(batch.reqs)


@contextmanager
def _freed_after(cache: Any) -> Iterator[tuple[Any, ...]]:
    """Context manager: yield the arguments in which functions of the tree collect what they free and follow-up
    actions. Free and act at the end."""
    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    actions: list[Any] = []
    yield device, host, actions
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


def start_backup(cache: Any, node_id: int, device_blocks: Any, transfers: Any) -> Any:
    """Start to copy a node to the host. Return the host indices of its blocks, or None without room for all of it."""
    return cache._execute_kv_backup(node_id, device_blocks, transfers, [])


def note_backup(cache: Any, node_id: int, lock: Any) -> None:
    """Record a running copy of a node. `lock` is released when it ends."""
    cache._track_write_through_node(node_id, lock, publish_node_ids=[node_id])


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


def bound_folder(storage: Any, evictor: Callable[..., Any], config: Any) -> None:
    """Give a file storage an evictor for its whole folder, if it has a size limit and this process writes."""
    if not (storage._evictor.enabled and config.is_storage_writer):
        return
    cache = storage.metadata_cache
    storage._evictor = evictor(
        storage.file_path,
        tp_rank=config.tp_rank,
        extra_config=config.extra_config,
        on_evict=None if cache is None else cache.remove,
        owned_suffixes=("",),  # the empty suffix matches every name
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


def evictor_of(storage: Any) -> Any:
    """Return SGLang's evictor of a file storage, which counts its files and bounds their size."""
    return storage._evictor


def resolve_flags(server_args: Any) -> Any:
    """Derive all values from the given flags, and return them."""
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
    ranks = runtime_context.SpawnRanks(world_rank=0)
    context = runtime_context.create_context(server_args, role="scheduler", ranks=ranks)
    with (
        runtime_context.use_context(context),
        runtime_context.get_parallel().override(tp_group=group, pp_group=alone),
        runtime_context.get_flags().dp.override(enabled=dp > 1),
    ):
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
