"""Private functions of SGLang that hooks replace or wrap. `plugin.hooks` has the reasons."""

from __future__ import annotations

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
_DISAGGREGATION = "sglang.srt.disaggregation."
BUFFERS_TO_SEND = _DISAGGREGATION + "prefill.PrefillBootstrapQueue._init_kv_manager"
BUFFERS_TO_RECEIVE = _DISAGGREGATION + "decode.DecodePreallocQueue._init_kv_manager"
LOGITS_OF_RANKS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
SEND_TO_SCHEDULER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"


def applied_hooks() -> set[str]:
    """Return the targets that SGLang has hooked. It only logs a hook that fails."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry._patched
