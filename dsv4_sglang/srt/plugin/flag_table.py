"""Flags of SGLang (fields of its ServerArgs, by name) that this package rejects, with the reasons.

`DENIED` flags must have their default. Some values of `LIMITS` flags are served. All other flags work as in SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS

# The line of a rejection. The reasons below, and those of `flag_validation`, complete it.
REJECTION = "{flag} is not supported: {reason}"


class Denied(NamedTuple):
    """Fields that must have their default.

    `reason` completes `REJECTION`. `as_given`: this package does not read the fields. SGLang may set them itself, so
    they are rejected only if the user gave the flag. A release of SGLang may lack a field.
    """

    reason: str
    fields: tuple[str, ...]
    as_given: bool = False


class Limit(NamedTuple):
    """A field of which only some values besides the default are served, as decided by `serves`.

    `reason` completes `REJECTION`. `as_given`: SGLang may set an unserved value itself, so it is rejected only if the
    user gave the flag.
    """

    field: str
    serves: Callable[[Any], bool]
    reason: str
    as_given: bool = False


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def on_grid(tokens: int) -> bool:
    """Return True for a multiple of a block, and for 0 and -1, which mean "no limit"."""
    return tokens <= 0 or tokens % BLOCK == 0


# Storages of the host cache.
STORAGES = ("file", "shm", "nixl", "mooncake")
_OWN_BACKEND = "this cache has an attention backend of its own; leave it out"

LIMITS = (
    *(
        Limit(field, lambda number: number > 0, "give 1 or more, or leave it out")
        for field in ("tp_size", "dp_size", "max_running_requests", "max_total_tokens", "context_length")
    ),
    Limit("mem_fraction_static", lambda share: 0 < share < 1, "give a fraction between 0 and 1, or leave it out"),
    Limit("chunked_prefill_size", on_grid, f"snapshots are taken between chunks; give a multiple of {BLOCK}, or -1"),
    Limit(
        "mamba_track_interval",
        _one_of(BLOCK),
        f'snapshots are taken every {BLOCK} tokens; set the option "snapshot_interval" instead',
    ),
    Limit(
        "mamba_radix_cache_strategy",
        _one_of("extra_buffer"),
        "snapshots are stored in extra slots; give auto or extra_buffer",
    ),
    Limit("page_size", _one_of(BLOCK), f"a block has {BLOCK} tokens; leave it out"),
    # On a CPU SGLang sets the last two before it reads the model's config.
    Limit("attention_backend", _one_of("dsv4_sglang", "intel_amx", "torch_native"), _OWN_BACKEND),
    # SGLang sets the last one for the worker of DSPARK's draft model.
    *(
        Limit(field, _one_of("dsv4_sglang"), _OWN_BACKEND)
        for field in (
            "prefill_attention_backend",
            "decode_attention_backend",
            "speculative_draft_attention_backend",
        )
    ),
    Limit("radix_cache_backend", _one_of("dsv4_sglang"), "snapshots need SGLang's unified radix tree; leave it out"),
    Limit(
        "schedule_policy",
        lambda policy: policy != "dfs-weight",
        "dfs-weight needs SGLang's plain radix tree; give another policy",
    ),
    Limit(
        "kv_cache_dtype",
        _one_of("fp8_e4m3", "bfloat16", "bf16"),
        "KV entries are FP8 or bfloat16; give auto, fp8_e4m3 or bfloat16",
    ),
    Limit(
        "dtype",
        _one_of("bfloat16", "float32", "float"),
        "the kernels compute in bfloat16; give bfloat16, or float32 on a CPU",
    ),
    Limit("device", _one_of("cuda", "cpu"), "give cuda or cpu"),
    Limit("model_impl", _one_of("sglang"), "the layers are SGLang's; give auto or sglang"),
    Limit(
        "quantization",
        _one_of("fp8"),
        "quantising the weights at start has not been tested; leave it out",
        as_given=True,
    ),
    Limit(
        "speculative_algorithm",
        _one_of("EAGLE", "DSPARK"),
        "drafts come from the model's NextN layer or DSPARK head; give EAGLE or DSPARK",
    ),
    Limit("speculative_eagle_topk", _one_of(1), "drafts form a chain; give 1"),
    Limit(
        "speculative_num_steps",
        lambda steps: 0 < steps < MAX_DRAFT_TOKENS,
        f"state slots have room for 1 to {MAX_DRAFT_TOKENS - 1} drafts; give a number from 1 to {MAX_DRAFT_TOKENS - 1}",
    ),
    Limit(
        "speculative_num_draft_tokens",
        lambda tokens: tokens <= MAX_DRAFT_TOKENS,
        f"state slots have room for verify steps of {MAX_DRAFT_TOKENS} tokens; give {MAX_DRAFT_TOKENS} or less",
    ),
    Limit(
        "speculative_dspark_block_size",
        lambda tokens: tokens < MAX_DRAFT_TOKENS,
        f"state slots have room for verify steps of {MAX_DRAFT_TOKENS} tokens, one more than a block; "
        f"give {MAX_DRAFT_TOKENS - 1} or less",
    ),
    Limit("hicache_ratio", lambda ratio: ratio > 0, "give more than 0"),
    Limit("hicache_size", lambda size: size >= 0, "give a number of GB, or 0 for --hicache-ratio"),
    Limit("hicache_io_backend", _one_of("kernel"), "this package has its own copy kernels; give kernel"),
    Limit("hicache_mem_layout", _one_of("page_first"), "a host block holds all layers; give page_first"),
    Limit(
        "hicache_storage_backend",
        _one_of(*STORAGES),
        "other storages have not been tested; give file, shm, nixl or mooncake",
    ),
    Limit(
        "disaggregation_transfer_backend",
        _one_of("mooncake", "mooncake_tcp", "nixl"),
        "other backends have not been tested; give mooncake, mooncake_tcp or nixl",
    ),
    Limit(
        "num_reserved_decode_tokens",
        lambda tokens: tokens >= BLOCK,
        f"a request grows by blocks of {BLOCK} tokens; give {BLOCK} or more",
    ),
    Limit("moe_a2a_backend", _one_of("deepep"), "other backends have not been tested; give none or deepep"),
    Limit(
        "load_format",
        _one_of("safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer"),
        "this weight format has not been tested; give auto or safetensors",
        as_given=True,
    ),
)

_UNTESTED = "it has not been tested"

DENIED = (
    Denied("state slots have room for a fixed number of drafts", ("speculative_adaptive",)),
    Denied("the state slot of a request includes the state of its draft model", ("decoupled_spec_role",)),
    Denied(
        "it has not been tested with speculation",
        (
            "speculative_token_map",
            "speculative_use_block_verification",
            "speculative_enable_w4a4_mxfp4_megamoe",
            "enable_multi_layer_eagle",
        ),
    ),
    Denied("draft layers use the KV format of the model", ("speculative_draft_kv_cache_dtype",)),
    Denied(
        "a request arrives with its last state only, and prefix hits need snapshots",
        ("disaggregation_decode_enable_radix_cache",),
    ),
    Denied(
        "a prefill server waits until the decode server has room, and keeps its role",
        ("optimistic_prefill_attempts", "enable_pd_role_switch"),
    ),
    Denied("one process holds the pools of all layers", ("pp_size",)),
    Denied(
        "it has not been tested with DP attention",
        (
            "enable_dp_lm_head",
            "moe_dense_tp_size",
            "moe_dp_size",
            "dwdp_size",
            "enable_prefill_delayer",
            "enable_attn_tp_input_scattered",
            "disable_attn_tp_gather",
            "enable_layernorm_sp",
            "enable_megamoe_for_layernorm_sp",
            "enable_dense_mlp_attn_tp",
            "enable_shared_experts_attn_tp",
            "shared_experts_tp_size",
            "enable_cp_tp_group_sharing",
        ),
    ),
    Denied(_UNTESTED, ("enable_tp_lm_head_all_to_all",), as_given=True),
    Denied("give --dp-size with --enable-dp-attention", ("attn_dp_size",), as_given=True),
    Denied(
        "chunks and blocks belong to one process: no context parallelism",
        (
            "attn_cp_size",
            "enable_prefill_cp",
            "cp_strategy",
            "enable_dsa_cache_layer_split",
            "enable_cp_decode_attn_tp",
            "dcp_size",
            "enable_kv_cache_sharding",
        ),
    ),
    Denied(
        "moving, replicating or recording experts has not been tested",
        (
            "ep_num_redundant_experts",
            "ep_dispatch_algorithm",
            "init_expert_location",
            "enable_eplb",
            "expert_distribution_recorder_mode",
            "elastic_ep_backend",
            "enable_elastic_expert_backup",
            "enable_waterfill",
            "ep_join_mode",
            "enable_return_routed_experts",
            "kt_weight_path",
            "expert_balancedness_report_mode",
            "enable_paged_experts",
        ),
    ),
    Denied(
        "it stores one kind of KV entry for each token",
        ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
    ),
    Denied("the host cache has an eviction order of its own", ("hicache_host_memory_mode",)),
    Denied(
        "this cache has pools of its own",
        (
            "enable_hisparse",
            "disaggregation_decode_enable_offload_kvcache",
            "kv_canary",
            "enable_unified_memory",
            "enable_page_major_kv_layout",
        ),
    ),
    Denied(f"chunks must end at multiples of {BLOCK} tokens", ("enable_mixed_chunk", "enable_dynamic_chunking")),
    Denied(
        'this cache has an eviction policy of its own; limit snapshots with the option "max_snapshots"',
        ("mamba_max_states_per_path", "radix_eviction_policy", "radix_eviction_policy_config"),
    ),
    Denied(
        "the formats of the state are fixed",
        ("mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "int8_mamba_ckpt_size"),
    ),
    Denied(
        "all requests of a step share one metadata",
        ("enable_two_batch_overlap", "enable_single_batch_overlap", "enable_pdmux"),
    ),
    Denied(
        _UNTESTED,
        (
            "enable_streaming_session",
            "enable_session_radix_cache",
            "use_ray",
            "enable_nvidia_megakernel",
            "enable_amd_monokernel",
            "enable_w4a4_mxfp4_megamoe",
            "enable_return_aux_hidden_states",
            "aux_hidden_state_capture",
            "enable_lora",
            "lora_paths",
        ),
    ),
    Denied("the metadata of a step cannot be traced", ("enable_torch_compile",)),
    Denied(
        'state slots, window entries included, follow from --max-running-requests and the option "max_snapshots"',
        ("max_mamba_cache_size", "mamba_full_memory_ratio", "swa_full_tokens_ratio", "swa_prefix_tails"),
    ),
    Denied(
        "snapshots include window entries, so nothing is replayed",
        ("enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay"),
    ),
    Denied(
        "the projections of a layer are fused and cannot be moved",
        (
            "cpu_offload_gb",
            "offload_group_size",
            "weight_cache_mode",
            "startup_weight_load_mode",
            "checkpoint_engine_wait_weights_before_ready",
            "remote_instance_weight_loader_start_seed_via_transfer_engine",
        ),
    ),
    Denied(
        "only the model's own weight formats have been tested",
        ("modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
    ),
    Denied("compressor states cannot be rolled back that far", ("dllm_algorithm",)),
    Denied("each chunk needs the state of the one before it", ("prefill_only_disable_kv_cache",)),
    Denied("the model generates text", ("is_embedding", "encoder_only", "language_only", "language_model_only")),
    Denied("the attention backend has no such mask", ("enable_mis",)),
    Denied("the attention backend does not return the indexer's selection", ("enable_return_indexer_topk",)),
    Denied("it would drop the snapshots of an answer", ("strip_thinking_cache",)),
    Denied(
        "the results of the kernels depend on the batch",
        ("enable_deterministic_inference", "rl_on_policy_target"),
    ),
    Denied(
        "the attention kernels reduce their partial results",
        ("boundary_reduction", "speculative_boundary_reduction"),
        as_given=True,
    ),
    Denied("compressors need fp32 projections", ("enable_tf32_matmul",)),
    Denied("its requests bypass the validation of fields; give --grpc-port", ("smg_grpc_mode", "grpc_mode")),
    Denied(
        "the output of attention is not a plain tensor",
        ("debug_tensor_dump_output_folder", "forward_hooks", "msprobe_dump_config", "enable_layerwise_nvtx_marker"),
    ),
    Denied("a decode step is one CUDA graph, including its metadata", ("debug_cuda_graph",)),
    Denied('set the option "indexer_format" instead', ("enable_deepseek_v4_fp4_indexer",), as_given=True),
    Denied("KV entries contain their scales", ("quantization_param_path",), as_given=True),
    Denied(
        "this cache has kernels of its own",
        (
            "mamba_backend",
            "enable_mamba_cache_stochastic_rounding",
            "mamba_cache_philox_rounds",
            "linear_attn_backend",
            "linear_attn_decode_backend",
            "linear_attn_prefill_backend",
            "linear_attn_verify_backend",
            "enable_linear_replayssm",
            "linear_replayssm_cache_len",
            "enable_linear_replayssm_spec",
            "triton_attention_reduce_in_fp32",
            "triton_attention_num_kv_splits",
            "triton_attention_split_tile_size",
            "flashinfer_mla_disable_ragged",
            "enable_fused_qk_norm_rope",
            "dsa_prefill_backend",
            "dsa_decode_backend",
            "dsa_paged_mqa_logits_backend",
            "dsa_topk_backend",
            "dsa_triton_union",
            "enable_dsa_fused_indexer",
            "qsa_indexer_dtype",
            "speculative_dsa_topk_backend",
            "dsv4_attn_backend",
            "dsv4_prefill_backend",
            "prefill_kv_cache_dequant_dtype",
            "enable_lean_attention",
            "c128_page_size",
        ),
        as_given=True,
    ),
)
