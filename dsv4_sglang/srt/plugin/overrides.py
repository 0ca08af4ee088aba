"""Table of all private methods of SGLang that classes of this package override, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_sglang.srt.plugin.sglang_contract import Override


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
        "dsv4_sglang.srt.prefix_cache.block_component.BlockComponent",
        _evict_device_start="it sorts all leaves of the tree for each eviction; here they are kept in order",
        _evict_device_next_node="it takes the next leaf from that list",
        _evict_device_end="it frees that list",
    ),
    *_overridden(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore",
        "dsv4_sglang.srt.sglang.tree_core.TreeCore",
        _advance_insert="it walks from the root; here the walk begins at the node that the request holds",
        _match_prefix_helper="it walks from the root, too; here at the node where the request's last lookup ended",
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
