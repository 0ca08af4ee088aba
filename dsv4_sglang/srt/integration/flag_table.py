"""Flags of SGLang (fields of its ServerArgs, by name) that this package rejects, with the reasons.

`DENIED` flags must have their default. Some values of `LIMITS` flags are served. All other flags work as in SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS


class Denied(NamedTuple):
    """Fields, separated by spaces, that must have their default.

    `reason` ends the sentence "--flag is not supported: ". `ignored`: this package does not read the fields. SGLang may
    set such a field itself, so it is rejected only if the user gave the flag. A release of SGLang may lack a field.
    """

    reason: str
    fields: str
    ignored: bool = False


class Limit(NamedTuple):
    """A field of which only some values besides the default are served, as decided by `serves`.

    `reason` ends the sentence "--flag value is not supported: ". `as_given`: SGLang may set an unserved value itself,
    so it is rejected only if the user gave the flag.
    """

    field: str
    serves: Callable[[Any], bool]
    reason: str
    as_given: bool = False


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def _positive(number: float) -> bool:
    return number > 0


def on_grid(tokens: int) -> bool:
    """Return True for a multiple of a block, and for 0 and -1, which mean "no limit"."""
    return tokens <= 0 or tokens % BLOCK == 0


# Storages behind the host cache.
STORAGES = ("file", "nixl", "mooncake")
_READ_BY = "this cache has an attention backend of its own"

LIMITS = (
    Limit("tp_size", _positive, "it is a number of processes; give 1 or more"),
    Limit("dp_size", _positive, "it is a number of attention ranks; give 1 or more"),
    Limit("max_running_requests", _positive, "it is a number of requests; give 1 or more, or leave it out"),
    Limit("max_total_tokens", _positive, "it is a number of tokens; give 1 or more, or leave it out"),
    Limit("context_length", _positive, "it is a number of tokens; give 1 or more, or leave it out"),
    Limit(
        "mem_fraction_static",
        lambda fraction: 0 < fraction < 1,
        "it is the fraction of GPU memory for weights and cache; give one between 0 and 1, or leave it out",
    ),
    Limit(
        "chunked_prefill_size",
        on_grid,
        f"chunks end at multiples of {BLOCK} tokens, where snapshots are taken; give one, or -1",
    ),
    Limit(
        "mamba_track_interval",
        _one_of(BLOCK),
        f"a decoding request takes a snapshot every {BLOCK} tokens and keeps those at multiples of the option "
        '"snapshot_interval"; set that one instead',
    ),
    Limit(
        "mamba_radix_cache_strategy",
        _one_of("extra_buffer"),
        "snapshots are taken into extra slots; give auto or extra_buffer",
    ),
    Limit("page_size", _one_of(BLOCK), f"a block of this cache has {BLOCK} tokens"),
    # On a CPU SGLang sets the last two before it reads the model's config.
    Limit("attention_backend", _one_of("dsv4_sglang", "intel_amx", "torch_native"), _READ_BY),
    Limit("prefill_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit("decode_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit("radix_cache_backend", _one_of("dsv4_sglang"), "snapshots need SGLang's unified radix tree"),
    Limit("schedule_policy", lambda policy: policy != "dfs-weight", "it needs SGLang's plain radix tree"),
    Limit(
        "kv_cache_dtype",
        _one_of("fp8_e4m3", "bfloat16", "bf16"),
        "KV entries are FP8 or bfloat16; give auto, fp8_e4m3 or bfloat16",
    ),
    Limit("dtype", _one_of("bfloat16", "float32", "float"), "kernels support bfloat16, and on a CPU also float32"),
    Limit("device", _one_of("cuda", "cpu"), "there are implementations for CUDA and CPU only"),
    Limit("model_impl", _one_of("sglang"), "layers come from SGLang's implementation of the model"),
    Limit(
        "quantization",
        _one_of("fp8"),
        "weights are used as they are stored; quantising them at start has not been tested",
        as_given=True,
    ),
    Limit(
        "speculative_algorithm",
        _one_of("EAGLE", "NEXTN", "DSPARK"),
        "drafts come from the model's own NextN layer or DSPARK head; give EAGLE or DSPARK",
    ),
    # SGLang sets it for the worker of DSPARK's draft model.
    Limit("speculative_draft_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit(
        "speculative_eagle_topk",
        _one_of(1),
        "drafts must form a chain; give 1",
    ),
    Limit(
        "speculative_num_draft_tokens",
        lambda tokens: tokens <= MAX_DRAFT_TOKENS,
        f"window rings and compressor states have room for {MAX_DRAFT_TOKENS} tokens of a request at once; give that "
        "or less",
    ),
    Limit(
        "speculative_dspark_block_size",
        lambda tokens: tokens < MAX_DRAFT_TOKENS,
        f"a block is verified with the token before it, and window rings have room for {MAX_DRAFT_TOKENS} tokens of a "
        f"request at once; give {MAX_DRAFT_TOKENS - 1} or less",
    ),
    Limit("hicache_ratio", lambda ratio: ratio > 0, "it is host memory divided by device memory; give more than 0"),
    Limit("hicache_size", lambda size: size >= 0, "it is a number of GB; give one, or 0 to use --hicache-ratio"),
    Limit("hicache_io_backend", _one_of("kernel"), "copies use kernels of this package; give kernel"),
    Limit(
        "hicache_mem_layout",
        _one_of("page_first"),
        "a host row holds all layers of a block; give page_first, the closest layout",
    ),
    Limit(
        "hicache_storage_backend",
        _one_of(*STORAGES),
        "other storages have not been tested; give file, nixl or mooncake",
    ),
    Limit(
        "disaggregation_transfer_backend",
        _one_of("mooncake", "mooncake_tcp", "nixl"),
        "only Mooncake and NIXL have been tested; give mooncake, mooncake_tcp or nixl",
    ),
    Limit(
        "num_reserved_decode_tokens",
        lambda tokens: tokens >= BLOCK,
        f"a request allocates a block of {BLOCK} tokens at a time, and is aborted if none is free while all other "
        f"requests are arriving; give {BLOCK} or more",
    ),
    Limit("moe_a2a_backend", _one_of("deepep"), "tokens reach experts by all-reduce or DeepEP; give none or deepep"),
    Limit(
        "load_format",
        _one_of("safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer"),
        "weights in this form have not been tested",
        as_given=True,
    ),
)

DENIED = (
    Denied("window rings and compressor states have room for a fixed number of drafts", "speculative_adaptive"),
    Denied("the draft model has one layer", "enable_multi_layer_eagle"),
    Denied("the draft model's entries are part of the state of their request", "decoupled_spec_role"),
    Denied(
        "with speculation it has not been tested",
        "speculative_token_map speculative_skip_dp_mlp_sync speculative_use_block_verification "
        "speculative_enable_w4a4_mxfp4_megamoe",
    ),
    Denied("entries of a draft layer have the format of the other layers", "speculative_draft_kv_cache_dtype"),
    Denied(
        "a request arrives with the state at its end only, and the prefix cache needs snapshots at block boundaries",
        "disaggregation_decode_enable_radix_cache",
    ),
    Denied(
        "a prefill server only prefills, and only when a decode server has room for the request",
        "optimistic_prefill_attempts enable_pd_role_switch",
    ),
    Denied("pools are sized for all layers in one process", "pp_size"),
    Denied(
        "with DP attention it has not been tested",
        "enable_dp_lm_head moe_dense_tp_size moe_dp_size dwdp_size enable_prefill_delayer "
        "enable_attn_tp_input_scattered disable_attn_tp_gather enable_layernorm_sp enable_megamoe_for_layernorm_sp "
        "enable_dense_mlp_attn_tp enable_shared_experts_attn_tp shared_experts_tp_size enable_cp_tp_group_sharing",
    ),
    Denied("it has not been tested", "enable_tp_lm_head_all_to_all", ignored=True),
    Denied("give --dp-size with --enable-dp-attention", "attn_dp_size", ignored=True),
    Denied(
        "the entries of a chunk must be in one process: no context parallelism",
        "attn_cp_size enable_prefill_cp cp_strategy enable_dsa_cache_layer_split enable_dsa_prefill_context_parallel "
        "enable_prefill_context_parallel enable_cp_decode_attn_tp",
    ),
    Denied("a block belongs to one process: no context parallelism", "dcp_size enable_kv_cache_sharding"),
    Denied(
        "moving, duplicating or recording experts has not been tested; --ep-size decides where they are",
        "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb "
        "expert_distribution_recorder_mode enable_expert_distribution_metrics elastic_ep_backend "
        "enable_elastic_expert_backup enable_waterfill ep_join_mode elastic_ep_rejoin enable_return_routed_experts "
        "kt_weight_path expert_balancedness_report_mode enable_paged_experts",
    ),
    Denied(
        "it stores entries of one kind per token, and this cache has several",
        "enable_lmcache enable_flexkv enable_unified_cache_external_linker",
    ),
    Denied("the host keeps its copy of data that is loaded to the device", "hicache_host_memory_mode"),
    Denied(
        "it moves entries of SGLang's own pool",
        "enable_hisparse disaggregation_decode_enable_offload_kvcache",
    ),
    Denied("it reads entries of SGLang's own pools", "kv_canary"),
    Denied(
        "it reports blocks only, but a cached prefix also needs a snapshot",
        "kv_events_config",
    ),
    Denied("chunks would not end at block boundaries, and snapshots would be wrong", "enable_mixed_chunk"),
    Denied("chunks would not end at block boundaries", "enable_dynamic_chunking"),
    Denied(
        'snapshots are evicted by recompute cost; limit their number with the option "max_snapshots"',
        "mamba_max_states_per_path radix_eviction_policy radix_eviction_policy_config",
    ),
    Denied(
        'snapshots are stored without quantisation; set their number with the option "max_snapshots"',
        "enable_int8_mamba_checkpoint int8_mamba_ckpt_size",
    ),
    Denied("compressor states are fp32, and window entries have the format of the other entries", "mamba_ssm_dtype"),
    Denied("a step has a single set of metadata", "enable_two_batch_overlap enable_single_batch_overlap"),
    Denied("prefill and decode share one set of metadata", "enable_pdmux"),
    Denied("it replaces the memory pools", "enable_unified_memory enable_page_major_kv_layout"),
    Denied(
        "it has not been tested",
        "enable_streaming_session enable_session_radix_cache use_ray enable_nvidia_megakernel enable_amd_monokernel "
        "enable_w4a4_mxfp4_megamoe enable_return_aux_hidden_states aux_hidden_state_capture",
    ),
    Denied("adapters have not been tested", "enable_lora lora_paths"),
    Denied("the step's metadata is not traceable", "enable_torch_compile"),
    Denied(
        'the number of state slots follows from --max-running-requests and the option "max_snapshots"',
        "max_mamba_cache_size mamba_full_memory_ratio",
    ),
    Denied(
        "window entries are part of the state of requests and snapshots, and their number follows from these",
        "swa_full_tokens_ratio swa_prefix_tails",
    ),
    Denied(
        "the window entries of a snapshot are stored, so they are not recomputed",
        "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay",
    ),
    Denied(
        "the fused projections of a layer cannot be moved separately",
        "cpu_offload_gb offload_group_size torchao_config weight_cache_mode startup_weight_load_mode "
        "checkpoint_engine_wait_weights_before_ready remote_instance_weight_loader_start_seed_via_transfer_engine",
    ),
    Denied(
        "weights other than those of the checkpoint have not been tested",
        "modelopt_quant quantize_and_serve rl_quant_profile",
    ),
    Denied("it rewrites tokens that the compressor states already contain", "dllm_algorithm"),
    Denied("every chunk needs the state of the chunk before it", "prefill_only_disable_kv_cache"),
    Denied("the model generates tokens, not embeddings", "is_embedding"),
    Denied("it needs an attention mask that this cache's backend does not support", "enable_mis"),
    Denied("this cache's backend does not return the indexer's selection", "enable_return_indexer_topk"),
    Denied(
        "it truncates a request after its prompt, which would lose the snapshots of the answer; it has not been tested",
        "strip_thinking_cache",
    ),
    Denied(
        "results of this cache's kernels depend on the batch",
        "enable_deterministic_inference rl_on_policy_target",
    ),
    Denied(
        "attention sums its parts itself",
        "boundary_reduction speculative_boundary_reduction",
        ignored=True,
    ),
    Denied("the compressors need their projections in full fp32", "enable_tf32_matmul"),
    Denied("its requests bypass the validation of their fields; give --grpc-port", "smg_grpc_mode grpc_mode"),
    Denied("this is a single model for text", "encoder_only language_only language_model_only"),
    Denied(
        "the output of a layer's attention is not a tensor that a module hook can read",
        "debug_tensor_dump_output_folder forward_hooks msprobe_dump_config enable_layerwise_nvtx_marker",
    ),
    Denied("a decode step is one graph, including its metadata", "debug_cuda_graph"),
    Denied(
        'choose the format of index keys with the option "indexer_format"',
        "enable_deepseek_v4_fp4_indexer",
        ignored=True,
    ),
    Denied("entries contain their own scales", "quantization_param_path", ignored=True),
    Denied(
        "this cache has kernels of its own",
        "mamba_backend enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds linear_attn_backend "
        "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm "
        "linear_replayssm_cache_len enable_linear_replayssm_spec triton_attention_reduce_in_fp32 "
        "triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged "
        "enable_fused_qk_norm_rope dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend "
        "dsa_topk_backend dsa_triton_union enable_dsa_fused_indexer qsa_indexer_dtype speculative_dsa_topk_backend "
        "dsv4_attn_backend dsv4_prefill_backend prefill_kv_cache_dequant_dtype enable_lean_attention c128_page_size",
        ignored=True,
    ),
)
