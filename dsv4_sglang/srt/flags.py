"""What becomes of every flag of SGLang (the fields of its ServerArgs, by name) in a launch with this cache.

Each field is in one group. A flag that is in none, as one of a newer SGLang, is refused when it is given. The fields
are those of all releases that are served: an older one lacks some, a newer one others.
"""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """Fields, separated by spaces, of which the same can be said."""

    reason: str
    fields: str


class Refused(NamedTuple):
    """Fields that may only have their default; `reason` ends the sentence "--flag is not supported: ".

    `ignored`: nothing here reads them. SGLang may set such a field itself, so they are refused as given only.
    """

    reason: str
    fields: str
    ignored: bool = False


SUPPORTED = (
    Group(
        "the model; `refusals.LIMITS` has the values that are not served",
        "model_path json_model_override_args context_length dtype quantization load_format model_impl device",
    ),
    Group(
        "size, formats and reader of the cache, with limits there too",
        "kv_cache_dtype page_size attention_backend decode_attention_backend prefill_attention_backend "
        "mem_fraction_static max_total_tokens max_running_requests disable_radix_cache radix_cache_backend "
        "mamba_radix_cache_strategy mamba_track_interval enable_cache_report",
    ),
    Group(
        "steps of the scheduler, with limits there too",
        "chunked_prefill_size max_prefill_tokens prefill_max_requests disable_overlap_schedule schedule_policy "
        "schedule_conservativeness retraction_policy enable_metrics enable_metrics_for_all_schedulers",
    ),
    Group(
        "processes that share a model, with limits there too; docs/parallel.md says what they do to the cache",
        "tp_size dp_size enable_dp_attention ep_size moe_a2a_backend",
    ),
    Group(
        "drafts of the model's own NextN layer or DSPARK head, with limits there too; docs/speculation.md",
        "speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
        "speculative_dspark_block_size speculative_draft_model_path speculative_draft_attention_backend",
    ),
    Group(
        "the host tier, with limits there too; docs/host_tier.md",
        "enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_io_backend "
        "hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy "
        "hicache_storage_backend_extra_config",
    ),
    Group(
        "prefill and decode on servers of their own, with limits there too; docs/disaggregation.md",
        "disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device "
        "num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval",
    ),
    Group(
        "memory that is given back while a server sleeps, with limits there too; docs/sleep.md",
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup",
    ),
    Group(
        "CUDA graphs of decode steps, with limits there too",
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
        "cuda_graph_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_prefill disable_prefill_cuda_graph "
        "disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding "
        "enable_profile_cuda_graph enable_cudagraph_gc",
    ),
)

WITHOUT_EFFECT = (
    Group(
        "tokenizer",
        "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num "
        "skip_tokenizer_init enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode",
    ),
    Group(
        "where weights come from and how they are read",
        "trust_remote_code revision model_loader_extra_config model_config_parser download_dir model_checksum "
        "delete_ckpt_after_loading decrypted_config_file weight_loader_disable_mmap "
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
        "custom_weight_loader weight_version ple_offload_embedding ple_offload_backend ple_offload_dir",
    ),
    Group(
        "order and number of requests, and which rank of DP attention they go to",
        "load_balance_method "
        "max_queued_requests enable_priority_scheduling disable_priority_preemption default_priority_value "
        "abort_on_priority_when_disabled schedule_low_priority_values_first priority_scheduling_preemption_threshold "
        "scheduler_recv_interval num_continuous_decode_steps min_free_slots_delay allow_auto_truncate "
        "prefill_decode_interval prefill_decode_interval_min_bs",
    ),
    Group(
        "processes, devices and how they talk",
        "nccl_port dist_timeout dist_init_addr nnodes node_rank enable_p2p_check base_gpu_id gpu_id_step random_seed "
        "watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler numa_node gc_threshold "
        "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem "
        "enable_dp_attention_local_control_broadcast deepep_mode deepep_dispatcher_output_dtype deepep_config "
        "enable_scattered_sconv pre_warm_nccl enable_quant_communications enable_flashinfer_allreduce_fusion "
        "enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend "
        "enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill "
        "disable_aiter_allreduce_fusion_in_decode mlx_enable_sampling",
    ),
    Group(
        "HTTP and what is built on it",
        "host port fastapi_root_path grpc_port sidecar sidecar_args skip_server_warmup warmups "
        "enable_http2 ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key "
        "admin_api_key served_model_name chat_template hf_chat_template_name completion_template file_storage_path "
        "reasoning_parser default_chat_template_kwargs enable_strict_thinking tool_call_parser tool_server "
        "asr_max_buffer_seconds asr_max_concurrent_sessions stream_interval batch_notify_size "
        "stream_response_default_include_usage incremental_streaming_output engine_info_bootstrap_port "
        "http2_max_concurrent_streams http2_initial_connection_window_size enable_http_worker_reuseport "
        "grpc_worker_threads grpc_response_timeout_secs gated_launch_port trust_request_chat_template "
        "enable_response_store return_input_ids return_output_ids",
    ),
    Group(
        "sampling and grammars, behind the logits",
        "sampling_defaults preferred_sampling_params sampling_backend grammar_backend "
        "constrained_json_whitespace_pattern constrained_json_max_whitespace_cnt sampling_mask_max_tokens "
        "enable_watermark watermark_config watermark_context_window watermark_default_enabled watermark_enforce_all "
        "watermark_key watermark_key_b watermark_max_probability watermark_mixing_probability "
        "constrained_json_disable_any_whitespace disable_outlines_disk_cache "
        "enable_custom_logit_processor enable_fp32_lm_head enable_return_hidden_states return_hidden_states_mode",
    ),
    Group(
        "logs, metrics and traces",
        "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
        "uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost smg_http_sidecar_port "
        "enable_mfu_metrics load_snapshot_publish_interval tokenizer_metrics_custom_labels_header "
        "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets "
        "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging enable_forward_pass_metrics "
        "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint "
        "export_metrics_to_file export_metrics_to_file_dir stat_loggers load_publish_endpoint otlp_service_name",
    ),
    Group(
        "weights and experts of the draft model, and which drafts are accepted",
        "speculative_draft_model_revision speculative_draft_load_format speculative_draft_model_quantization "
        "speculative_moe_runner_backend speculative_moe_a2a_backend speculative_accept_threshold_single "
        "speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_attention_mode",
    ),
    Group(
        "kernels of SGLang's linear layers and experts",
        "fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune "
        "flashinfer_autotune_skip_ops enable_fused_moe_sum_all_reduce moe_runner_backend "
        "flashinfer_mxfp4_moe_precision disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
        "enforce_shared_experts_fusion",
    ),
    Group(
        "pictures and sounds, which this model does not take",
        "enable_multimodal mm_attention_backend enable_precise_embedding_interpolation "
        "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config "
        "mm_processor_worker_num mm_io_worker_num limit_mm_data_per_request enable_mm_global_cache "
        "disable_fast_image_processor mm_feature_transport keep_mm_feature_on_device encoder_transfer_backend "
        "encoder_urls encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder "
        "allowed_media_domains media_url_max_file_size_mb image_processor_backend mm_global_cache_backend "
        "mm_preprocess_cache_size_mb trust_mm_content_hashes",
    ),
    Group(
        "they turn off what is not there",
        "disable_hybrid_swa_memory disable_chunked_prefix_cache",
    ),
    Group(
        "derived by SGLang, not given",
        "uses_mamba_radix_cache dsa_prefill_cp_mode prefill_cp_mode",
    ),
    Group(
        "read only with a flag that is refused",
        # CUDA graphs of prefill steps
        "cuda_graph_tc_compiler cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context "
        # other speculation
        "speculative_dflash_block_size speculative_draft_window_size "
        "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_adaptive_config decoupled_spec_bind_endpoint "
        "decoupled_spec_connect_endpoints decoupled_spec_rank spec_trace_dir speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth "
        "speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_draft_sink_size speculative_domino_candidate_pool_size "
        "speculative_ngram_external_corpus_max_tokens decrypted_draft_config_file "
        # prefill and decode side by side
        "pdmux_config_path sm_group_num disaggregation_decode_retraction_backup "
        "disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold "
        "disaggregation_enable_kv_checksum "
        # parallelism
        "pp_max_micro_batch_size pp_async_batch_depth dcp_comm_backend dcp_replicate_q_proj "
        "prefill_delayer_max_delay_passes "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms "
        "tbo_token_distribution_threshold "
        # experts
        "fuseep_mode deepep_v2_mode flashinfer_a2a_dispatch_type paged_experts_num_resident eplb_algorithm "
        "eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold "
        "expert_distribution_recorder_buffer_size mooncake_ib_device ep_join_rank_offset elastic_ep_initial_size "
        "max_ep_size elastic_ep_scale_timeout kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts "
        "kt_max_deferred_experts_per_token "
        # host memory and other machines
        "lmcache_config_file flexkv_config_file unified_cache_external_linker_backend "
        "unified_cache_external_linker_config enable_linker_mla_dedup hicache_host_memory_fraction "
        "hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval "
        "hisparse_config offload_num_in_group offload_prefetch_step offload_mode "
        "weight_cache_socket weight_cache_timeout remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
        "modelexpress_config "
        # the rest
        "uno_lora_path return_aux_hidden_state_layer_ids "
        "max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend "
        "max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
        "lora_drain_wait_threshold enable_lora_overlap_loading dllm_algorithm_config dllm_fdfo "
        "enable_torch_compile_debug_mode torch_compile_max_bs kv_canary_real_data kv_canary_sweep_interval "
        "debug_tensor_dump_layers debug_tensor_dump_input_file modelopt_checkpoint_restore_path "
        "modelopt_checkpoint_save_path modelopt_export_path",
    ),
)

REFUSED = (
    Refused("rings and tails have room for one number of drafts", "speculative_adaptive"),
    Refused("the draft model is one layer", "enable_multi_layer_eagle"),
    Refused("the draft model's rows are state of the request that it drafts for", "decoupled_spec_role"),
    Refused(
        "with speculation it has not been tested",
        "speculative_token_map speculative_skip_dp_mlp_sync speculative_use_block_verification "
        "speculative_enable_w4a4_mxfp4_megamoe",
    ),
    Refused("rows of a draft layer have the format of the others", "speculative_draft_kv_cache_dtype"),
    Refused(
        "a request arrives with the state at its end, and the tree would need checkpoints at ends of blocks",
        "disaggregation_decode_enable_radix_cache",
    ),
    Refused(
        "prompts are prefilled when a decode server has room for them, by a server that does nothing else",
        "optimistic_prefill_attempts enable_pd_role_switch",
    ),
    Refused("pools are sized for all layers in one process", "pp_size"),
    Refused(
        "with DP attention it has not been tested",
        "enable_dp_lm_head moe_dense_tp_size moe_dp_size dwdp_size enable_prefill_delayer "
        "enable_attn_tp_input_scattered disable_attn_tp_gather enable_layernorm_sp enable_megamoe_for_layernorm_sp "
        "enable_dense_mlp_attn_tp enable_shared_experts_attn_tp shared_experts_tp_size enable_cp_tp_group_sharing",
    ),
    Refused("it has not been tested", "enable_tp_lm_head_all_to_all", ignored=True),
    Refused("give --dp-size with --enable-dp-attention", "attn_dp_size", ignored=True),
    Refused(
        "a chunk's rows must lie in one process: no context parallelism",
        "attn_cp_size enable_prefill_cp cp_strategy enable_dsa_cache_layer_split enable_dsa_prefill_context_parallel "
        "enable_prefill_context_parallel enable_cp_decode_attn_tp",
    ),
    Refused("a block belongs to one process: no context parallelism", "dcp_size enable_kv_cache_sharding"),
    Refused(
        "experts lie where --ep-size puts them: moving, doubling or recording them has not been tested",
        "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb "
        "expert_distribution_recorder_mode enable_expert_distribution_metrics elastic_ep_backend "
        "enable_elastic_expert_backup enable_waterfill ep_join_mode elastic_ep_rejoin enable_return_routed_experts "
        "kt_weight_path expert_balancedness_report_mode enable_paged_experts",
    ),
    Refused(
        "it stores rows of one kind a token, which this cache has not",
        "enable_lmcache enable_flexkv enable_unified_cache_external_linker",
    ),
    Refused("the host keeps what it has a copy of", "hicache_host_memory_mode"),
    Refused(
        "it moves rows of SGLang's own pool",
        "enable_hisparse disaggregation_decode_enable_offload_kvcache",
    ),
    Refused("it reads rows of SGLang's own pools", "kv_canary"),
    Refused(
        "it tells of blocks alone, and a prefix is served from blocks and a checkpoint",
        "kv_events_config",
    ),
    Refused("it moves chunks off the grid of blocks and would store wrong checkpoints", "enable_mixed_chunk"),
    Refused("it moves chunks off the grid of blocks", "enable_dynamic_chunking"),
    Refused(
        'checkpoints are evicted by what they are worth; cap their number with the option "max_checkpoints"',
        "mamba_max_states_per_path radix_eviction_policy radix_eviction_policy_config",
    ),
    Refused(
        'checkpoints keep the bytes of the state; set their number with the option "max_checkpoints"',
        "enable_int8_mamba_checkpoint int8_mamba_ckpt_size",
    ),
    Refused("compressor tails are fp32 and window rows have the format of the entries", "mamba_ssm_dtype"),
    Refused("one step has one metadata", "enable_two_batch_overlap enable_single_batch_overlap"),
    Refused("prefill and decode share one metadata", "enable_pdmux"),
    Refused("it replaces the pools", "enable_unified_memory enable_page_major_kv_layout"),
    Refused(
        "it has not been tested",
        "enable_streaming_session enable_session_radix_cache use_ray enable_nvidia_megakernel enable_amd_monokernel "
        "enable_w4a4_mxfp4_megamoe enable_return_aux_hidden_states aux_hidden_state_capture",
    ),
    Refused("adapters have not been tested", "enable_lora lora_paths"),
    Refused("the step's metadata is not traceable", "enable_torch_compile"),
    Refused(
        'state slots follow from --max-running-requests and the option "max_checkpoints"',
        "max_mamba_cache_size mamba_full_memory_ratio",
    ),
    Refused(
        "window rows are state of a request, of which there are as many as requests and checkpoints",
        "swa_full_tokens_ratio swa_prefix_tails",
    ),
    Refused(
        "window rows of a checkpoint are stored, and nothing is computed again",
        "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay",
    ),
    Refused(
        "projections of a layer lie side by side and cannot move apart",
        "cpu_offload_gb offload_group_size torchao_config weight_cache_mode startup_weight_load_mode "
        "checkpoint_engine_wait_weights_before_ready remote_instance_weight_loader_start_seed_via_transfer_engine",
    ),
    Refused(
        "other weights than those of the checkpoint have not been tested",
        "modelopt_quant quantize_and_serve rl_quant_profile",
    ),
    Refused("it rewrites tokens that the tails have already taken up", "dllm_algorithm"),
    Refused("every chunk reads the state that the one before it left", "prefill_only_disable_kv_cache"),
    Refused("the model serves tokens, not embeddings", "is_embedding"),
    Refused("it scores items by an attention mask that this cache's backend has not", "enable_mis"),
    Refused("this cache's backend does not hand out what its indexer selects", "enable_return_indexer_topk"),
    Refused(
        "it cuts a request behind its prompt, where the checkpoints of its answer hang; it has not been tested",
        "strip_thinking_cache",
    ),
    Refused(
        "sums of this cache's kernels depend on the batch",
        "enable_deterministic_inference rl_on_policy_target",
    ),
    Refused(
        "attention adds up its parts itself",
        "boundary_reduction speculative_boundary_reduction",
        ignored=True,
    ),
    Refused("the compressors want their projections in full fp32", "enable_tf32_matmul"),
    Refused("its requests pass by the validation of their fields; give --grpc-port", "smg_grpc_mode grpc_mode"),
    Refused("there is one model here, for text", "encoder_only language_only language_model_only"),
    Refused(
        "what a layer's attention returns is not a tensor that a module hook could read",
        "debug_tensor_dump_output_folder forward_hooks msprobe_dump_config enable_layerwise_nvtx_marker",
    ),
    Refused("a decode step, metadata included, is one graph", "debug_cuda_graph"),
    Refused('choose the keys with the option "indexer_format"', "enable_deepseek_v4_fp4_indexer", ignored=True),
    Refused("rows carry their own scales", "quantization_param_path", ignored=True),
    Refused(
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


def known() -> list[str]:
    """The fields of all groups."""
    groups: tuple[Group | Refused, ...] = (*SUPPORTED, *WITHOUT_EFFECT, *REFUSED)
    return [name for group in groups for name in group.fields.split()]
