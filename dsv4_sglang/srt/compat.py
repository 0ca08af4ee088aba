"""What this package knows about SGLang's insides: versions, and every name that SGLang keeps to itself.

A leading underscore says that a name may change without notice, so such names stand here only, behind functions that
say what they are for. `contracts` compares them with the SGLang that is installed before a server starts.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from importlib.metadata import version
from typing import Any, NamedTuple

from dsv4_sglang.model.config import DSV4Config

# Versions on which the server tests have passed. Other versions are tried and refused if `contracts` finds differences.
VALIDATED = ("0.5.17",)

# Private functions that hooks replace or wrap; `hooks` says why.
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
CHOOSE_STATE_SLOTS = _CONFIGURATOR + "_handle_max_mamba_cache"
SLOTS_OF_A_REQUEST = _CONFIGURATOR + "_calculate_mamba_ratio"
BUILD_REQUEST_POOL = _CONFIGURATOR + "_build_hybrid_req_pool"
BUILD_KV_POOL = _CONFIGURATOR + "_build_token_to_kv_pool"
TRACK_REQUEST = "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
_DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker."
CAPTURE_DRAFT_GRAPHS = _DRAFT_WORKER + "_capture_cuda_graphs"
DRAFT_EXTEND = _DRAFT_WORKER + "_draft_extend_for_decode"
RESOLVE_DSPARK = "sglang.srt.arg_groups.speculative_hook._handle_dspark"
VALIDATE_EXTRA_BUFFER = "sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer"


class Override(NamedTuple):
    """A private method of SGLang's class `base` that our class `ours` overrides."""

    base: str
    ours: str
    method: str
    reason: str


_IN_TREE, _MODEL = "sglang.srt.models.deepseek_v4.", "dsv4_sglang.srt.models.deepseek_v4."
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_TREE, _TIERED = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache", "dsv4_sglang.srt.host.cache.TieredCache"
OVERRIDES = (
    Override(
        _IN_TREE + "DeepseekV4DecoderLayer",
        _MODEL + "DecoderLayer",
        "_build_self_attn",
        "where SGLang's layer makes its attention, which is ours here",
    ),
    Override(
        _IN_TREE + "DeepseekV4DecoderLayer",
        _MODEL + "DecoderLayer",
        "_run_moe_ffn_dp_sync",
        "the experts of a layer; SGLang has them as GPU kernels only",
    ),
    Override(
        "sglang.srt.models.deepseek_v4_dspark.DSparkV4Stage",
        "dsv4_sglang.srt.models.deepseek_v4_dspark.Stage",
        "_build_self_attn",
        "the same of a stage of DSPARK's draft model",
    ),
    Override(
        _IN_TREE + "DeepseekV4ForCausalLM",
        _MODEL + "DeepseekV4ForCausalLM",
        "_prewarm_mhc_kernels",
        "compiles GPU kernels, of which there are none on a CPU",
    ),
    Override(
        "sglang.srt.mem_cache.unified_cache.components.MambaComponent",
        "dsv4_sglang.srt.prefix.component.CheckpointComponent",
        "_evict_device_next_node",
        "evicts checkpoints for want of live slots, which no checkpoint would give",
    ),
    Override(
        _TREE,
        _TIERED,
        "_execute_and_commit_kv_backup",
        "where SGLang copies a node to the host at each insertion; here checkpoints are saved, by what they are worth",
    ),
    Override(
        _TREE,
        _TIERED,
        "_evict_device_leaf",
        "with write_back it saves blocks that no checkpoint follows, which nobody could resume from",
    ),
    Override(
        _CONTROLLER,
        "dsv4_sglang.srt.host.transfers.TransferController",
        "_generate_storage_config",
        "all processes of a group hold the same bytes, of which one writes; SGLang knows that of its own pools only",
    ),
)


def sglang_version() -> str:
    return version("sglang")


def version_note() -> str:
    """One sentence for error messages."""
    return f"this is SGLang {sglang_version()}; validated: {', '.join(VALIDATED)}"


def model_config(hf_config: Any) -> DSV4Config:
    """The model's config from SGLang's config object, which holds the RoPE fields in the form of its transformers."""
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    theta, scaling = get_rope_config(hf_config)
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "rope_parameters"}
    return DSV4Config.from_hf({**fields, "rope_theta": theta, "rope_scaling": scaling})


def config_class() -> Any:
    """The class that SGLang parses the config.json of this architecture with."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    return _CONFIG_REGISTRY["deepseek_v4"]


def applied_hooks() -> set[str]:
    """Targets that SGLang has hooked. It only logs a hook that fails."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry._patched


def flag_defaults() -> dict[str, Any]:
    """Every field of SGLang's ServerArgs and its default; None for the one that has none, the model's path."""
    from sglang.srt.server_args import ServerArgs

    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(ServerArgs):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        else:
            defaults[field.name] = None if field.default is dataclasses.MISSING else field.default
    return defaults


def flags_are_resolved(server_args: Any) -> bool:
    """Whether SGLang has filled in everything that follows from the flags as given."""
    return bool(getattr(server_args, "_declarations_materialized", False))


def takes_quantised_input(linear: Any) -> bool:
    """Whether a linear layer takes a pair of FP8 codes and fp32 scales, one a row and 128 channels, for its input.

    SGLang has that for FP8 weights in blocks that DeepGEMM multiplies, where scales are not packed.
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
    """What `TRACK_REQUEST` returns for a request; its one index and length say nothing here."""
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    return _MambaRadixCacheV2TrackEntry(track_mask=taken, track_index=0, track_seqlen=0)


def evict_from_device(component: Any, node: Any) -> None:
    """Take what `component` has on a node of the tree off the device; the node's other components stay."""
    from sglang.srt.mem_cache.unified_cache.components.tree_component import EvictLayer

    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    component.tree_core._evict_component_and_detach_lru(node, component, device, host, target=EvictLayer.DEVICE)
    component.cache._free_values(device, host)


def evict_from_host(cache: Any, node: Any) -> int:
    """Take all that the host has of a node that the device has, too; the number of tokens whose blocks are free."""
    from sglang.srt.mem_cache.unified_cache.components.tree_component import EvictLayer

    core = cache.tree_core
    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    for component in cache.components.values():
        core._evict_component_and_detach_lru(node, component, device, host, target=EvictLayer.HOST)
    core._update_evictable_leaf_sets(node)
    cache._free_values(device, host)
    return len(node.key)


def evict_checkpoint_from_host(component: Any, node: Any, tracker: Any, device_frees: Any, host_frees: Any) -> None:
    """Within SGLang's drive for room on the host: take the node's checkpoint; where the path ends, its blocks, too.

    Nothing happens while a copy to the host or to a storage is under way.
    """
    from sglang.srt.mem_cache.unified_cache.components.tree_component import EvictLayer

    core = component.tree_core
    if node in core.evictable_host_leaves:
        core._evict_host_leaf(node, tracker, device_frees, host_frees)
    elif not node.component_data[component.component_type].host_lock_ref and node.write_through_pending_id is None:
        core._evict_component_and_detach_lru(
            node, component, device_frees, host_frees, target=EvictLayer.HOST, tracker=tracker
        )
        core._update_evictable_leaf_sets(node)


def start_backup(cache: Any, node_id: int, device_blocks: Any, transfers: Any) -> Any:
    """Begin to copy a node to the host: the host indices of its blocks, or None without room for all of it."""
    return cache._execute_kv_backup(node_id, device_blocks, transfers, [])


def note_backup(cache: Any, node_id: int, lock: Any) -> None:
    """The node's copy is under way; `lock` is let go when it is done."""
    cache._track_write_through_node(node_id, lock)


def forget_files(storage: Any) -> None:
    """SGLang's account of the files of a storage, after they are gone."""
    storage._evictor.clear()
