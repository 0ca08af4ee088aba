"""Flags of SGLang (fields of its ServerArgs, by name) that a launch with this cache rejects, and why.

`DENIED` flags may only have their default. `LIMITS` are flags of which some values are served. Every other flag is
served as SGLang has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS


class Denied(NamedTuple):
    """Fields, separated by spaces, that may only have their default; `reason` ends the sentence "--flag is not
    supported: ".

    `ignored`: nothing here reads them. SGLang may set such a field itself, so only a flag that was given is rejected.
    A release of SGLang may lack a field.
    """

    reason: str
    fields: str
    ignored: bool = False


class Limit(NamedTuple):
    """A field of which `serves` says whether a value other than the default is served; `reason` ends the sentence
    "--flag value is not supported: ".

    `as_given`: SGLang may change the field itself to what is not served, so only a flag that was given is rejected.
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
    """Return True for a multiple of a block; 0 and -1 say "no limit"."""
    return tokens <= 0 or tokens % BLOCK == 0


STORAGES = ("file", "nixl", "mooncake")
"""Behind the host cache."""
_READ_BY = "this cache is read by its own backend"

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
    # On a CPU SGLang fills in the last two before it looks at the model.
    Limit("attention_backend", _one_of("dsv4_sglang", "intel_amx", "torch_native"), _READ_BY),
    Limit("prefill_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit("decode_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit("radix_cache_backend", _one_of("dsv4_sglang"), "snapshots hang on SGLang's unified radix tree"),
    Limit("schedule_policy", lambda policy: policy != "dfs-weight", "it walks SGLang's plain radix tree"),
    Limit(
        "kv_cache_dtype",
        _one_of("fp8_e4m3", "bfloat16", "bf16"),
        "rows are FP8 or bfloat16; give auto, fp8_e4m3 or bfloat16",
    ),
    Limit("dtype", _one_of("bfloat16", "float32", "float"), "the kernels take bfloat16, on a CPU float32, too"),
    Limit("device", _one_of("cuda", "cpu"), "the kernels are for CUDA, the formulas for a CPU"),
    Limit("model_impl", _one_of("sglang"), "layers come from SGLang's implementation of the model"),
    Limit(
        "quantization",
        _one_of("fp8"),
        "weights are taken as the checkpoint has them; quantising them at start has not been tested",
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
        "drafts are a chain, so that a request goes on from one of its lengths; give 1",
    ),
    Limit(
        "speculative_num_draft_tokens",
        lambda tokens: tokens <= MAX_DRAFT_TOKENS,
        f"rings and compressor states have room for {MAX_DRAFT_TOKENS} tokens of a request at once; give that or less",
    ),
    Limit(
        "speculative_dspark_block_size",
        lambda tokens: tokens < MAX_DRAFT_TOKENS,
        f"a block is verified with the token before it, and rings have room for {MAX_DRAFT_TOKENS} tokens of a request "
        f"at once; give {MAX_DRAFT_TOKENS - 1} or less",
    ),
    Limit("hicache_ratio", lambda ratio: ratio > 0, "the host has so many times what the device has; give more than 0"),
    Limit("hicache_size", lambda size: size >= 0, "it is a number of GB; give one, or 0 for --hicache-ratio"),
    Limit("hicache_io_backend", _one_of("kernel"), "copies are kernels of this package; give kernel"),
    Limit(
        "hicache_mem_layout",
        _one_of("page_first"),
        "a host block is one row of all layers; give page_first, which is the nearest to it",
    ),
    Limit(
        "hicache_storage_backend",
        _one_of(*STORAGES),
        "blocks and snapshots have not been stored there; give file, nixl or mooncake",
    ),
    Limit(
        "disaggregation_transfer_backend",
        _one_of("mooncake", "mooncake_tcp", "nixl"),
        "blocks and state slots have travelled by Mooncake and NIXL only; give mooncake, mooncake_tcp or nixl",
    ),
    Limit(
        "num_reserved_decode_tokens",
        lambda tokens: tokens >= BLOCK,
        f"a request takes a block of {BLOCK} tokens at a time, and is aborted if there is none while all others are on "
        f"their way; give {BLOCK} or more",
    ),
    Limit("moe_a2a_backend", _one_of("deepep"), "tokens go to experts by all-reduce or DeepEP; give none or deepep"),
    Limit(
        "load_format",
        _one_of("safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer"),
        "weights in this form have not been tested",
        as_given=True,
    ),
)

DENIED = (
    Denied("rings and compressor states have room for one number of drafts", "speculative_adaptive"),
    Denied("the draft model is one layer", "enable_multi_layer_eagle"),
    Denied("the draft model's rows are state of the request that it drafts for", "decoupled_spec_role"),
    Denied(
        "with speculation it has not been tested",
        "speculative_token_map speculative_skip_dp_mlp_sync speculative_use_block_verification "
        "speculative_enable_w4a4_mxfp4_megamoe",
    ),
    Denied("rows of a draft layer have the format of the others", "speculative_draft_kv_cache_dtype"),
    Denied(
        "a request arrives with the state at its end, and the tree would need snapshots at ends of blocks",
        "disaggregation_decode_enable_radix_cache",
    ),
    Denied(
        "prompts are prefilled when a decode server has room for them, by a server that does nothing else",
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
        "a chunk's rows must lie in one process: no context parallelism",
        "attn_cp_size enable_prefill_cp cp_strategy enable_dsa_cache_layer_split enable_dsa_prefill_context_parallel "
        "enable_prefill_context_parallel enable_cp_decode_attn_tp",
    ),
    Denied("a block belongs to one process: no context parallelism", "dcp_size enable_kv_cache_sharding"),
    Denied(
        "experts lie where --ep-size puts them: moving, doubling or recording them has not been tested",
        "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb "
        "expert_distribution_recorder_mode enable_expert_distribution_metrics elastic_ep_backend "
        "enable_elastic_expert_backup enable_waterfill ep_join_mode elastic_ep_rejoin enable_return_routed_experts "
        "kt_weight_path expert_balancedness_report_mode enable_paged_experts",
    ),
    Denied(
        "it stores rows of one kind a token, which this cache has not",
        "enable_lmcache enable_flexkv enable_unified_cache_external_linker",
    ),
    Denied("the host keeps what it has a copy of", "hicache_host_memory_mode"),
    Denied(
        "it moves rows of SGLang's own pool",
        "enable_hisparse disaggregation_decode_enable_offload_kvcache",
    ),
    Denied("it reads rows of SGLang's own pools", "kv_canary"),
    Denied(
        "it tells of blocks alone, and a prefix is served from blocks and a snapshot",
        "kv_events_config",
    ),
    Denied("it moves chunks off the grid of blocks and would store wrong snapshots", "enable_mixed_chunk"),
    Denied("it moves chunks off the grid of blocks", "enable_dynamic_chunking"),
    Denied(
        'snapshots are evicted by what they are worth; cap their number with the option "max_snapshots"',
        "mamba_max_states_per_path radix_eviction_policy radix_eviction_policy_config",
    ),
    Denied(
        'snapshots keep the bytes of the state; set their number with the option "max_snapshots"',
        "enable_int8_mamba_checkpoint int8_mamba_ckpt_size",
    ),
    Denied("compressor states are fp32 and window rows have the format of the entries", "mamba_ssm_dtype"),
    Denied("one step has one metadata", "enable_two_batch_overlap enable_single_batch_overlap"),
    Denied("prefill and decode share one metadata", "enable_pdmux"),
    Denied("it replaces the pools", "enable_unified_memory enable_page_major_kv_layout"),
    Denied(
        "it has not been tested",
        "enable_streaming_session enable_session_radix_cache use_ray enable_nvidia_megakernel enable_amd_monokernel "
        "enable_w4a4_mxfp4_megamoe enable_return_aux_hidden_states aux_hidden_state_capture",
    ),
    Denied("adapters have not been tested", "enable_lora lora_paths"),
    Denied("the step's metadata is not traceable", "enable_torch_compile"),
    Denied(
        'state slots follow from --max-running-requests and the option "max_snapshots"',
        "max_mamba_cache_size mamba_full_memory_ratio",
    ),
    Denied(
        "window rows are state of a request, of which there are as many as requests and snapshots",
        "swa_full_tokens_ratio swa_prefix_tails",
    ),
    Denied(
        "window rows of a snapshot are stored, and nothing is computed again",
        "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay",
    ),
    Denied(
        "projections of a layer lie side by side and cannot move apart",
        "cpu_offload_gb offload_group_size torchao_config weight_cache_mode startup_weight_load_mode "
        "checkpoint_engine_wait_weights_before_ready remote_instance_weight_loader_start_seed_via_transfer_engine",
    ),
    Denied(
        "other weights than those of the checkpoint have not been tested",
        "modelopt_quant quantize_and_serve rl_quant_profile",
    ),
    Denied("it rewrites tokens that the compressor states have already taken up", "dllm_algorithm"),
    Denied("every chunk reads the state that the one before it left", "prefill_only_disable_kv_cache"),
    Denied("the model serves tokens, not embeddings", "is_embedding"),
    Denied("it scores items by an attention mask that this cache's backend has not", "enable_mis"),
    Denied("this cache's backend does not hand out what its indexer selects", "enable_return_indexer_topk"),
    Denied(
        "it cuts a request behind its prompt, where the snapshots of its answer hang; it has not been tested",
        "strip_thinking_cache",
    ),
    Denied(
        "sums of this cache's kernels depend on the batch",
        "enable_deterministic_inference rl_on_policy_target",
    ),
    Denied(
        "attention adds up its parts itself",
        "boundary_reduction speculative_boundary_reduction",
        ignored=True,
    ),
    Denied("the compressors want their projections in full fp32", "enable_tf32_matmul"),
    Denied("its requests pass by the validation of their fields; give --grpc-port", "smg_grpc_mode grpc_mode"),
    Denied("there is one model here, for text", "encoder_only language_only language_model_only"),
    Denied(
        "what a layer's attention returns is not a tensor that a module hook could read",
        "debug_tensor_dump_output_folder forward_hooks msprobe_dump_config enable_layerwise_nvtx_marker",
    ),
    Denied("a decode step, metadata included, is one graph", "debug_cuda_graph"),
    Denied('choose the keys with the option "indexer_format"', "enable_deepseek_v4_fp4_indexer", ignored=True),
    Denied("rows carry their own scales", "quantization_param_path", ignored=True),
    Denied(
        "this cache is written and read by kernels of its own",
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
