"""Table of all functions of SGLang that this package changes, with the reasons.

Nothing is applied without the opt-in, for which three hooks of `entry_point` check. A server does not start if a target
does not exist or has parameters that differ from those of the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4_sglang.srt.attention import collectives, prefill_graphs, speculation
from dsv4_sglang.srt.cpu import grammar, without_gpu
from dsv4_sglang.srt.cpu.torch_layers import collapse_flat
from dsv4_sglang.srt.features import control_requests, disaggregation, endpoints, hints, sleep, weight_groups
from dsv4_sglang.srt.features.integrity import report
from dsv4_sglang.srt.plugin import request_validation, start_progress, tokenizer_workers
from dsv4_sglang.srt.plugin.server_context import BACKEND, ServerContext
from dsv4_sglang.srt.plugin.sglang_contract import Hook
from dsv4_sglang.srt.plugin.startup_check import build_or_reject
from dsv4_sglang.srt.prefix_cache import snapshot_schedule
from dsv4_sglang.srt.sglang import targets, tree_core

SRT = "sglang.srt."
_UPDATER = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_PREFILL_GRAPHS = SRT + "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner."
_BREAKABLE_GRAPHS = SRT + "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend."
_DECODE_GRAPHS = SRT + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
# Hooks by reason: target -> function.
Table = dict[str, dict[str, Callable[..., Any]]]


def keep_backend(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """AROUND `attn_backend_wrapper`: return the backend without SGLang's dispatcher."""
    return full_attn_backend


def always_cache(self: Any, req: Any, result: Any, i: int) -> bool:
    """REPLACE `targets.MAY_CACHE_FINISHED`: insert every finished request into the prefix cache."""
    return True


def with_our_backend(original: Callable[..., Any], **arguments: Any) -> Any:
    """AROUND `targets.DSPARK_BACKEND`: give DSPARK's draft model the backend of this package."""
    return original(**{**arguments, "attention_backend_override": BACKEND})


# Hooks of the option `integrity_check`.
INTEGRITY_CHECK: Table = {
    "/server_info is the only request of SGLang that reaches all processes and returns their answers": {
        SRT + "managers.scheduler.Scheduler.get_internal_state": report.add_reports
    },
}
# Hooks of every server that need nothing of its context.
ALWAYS: Table = {
    "one backend serves all layers, but SGLang would wrap it in its dispatcher for linear-attention layers": {
        SRT + "model_executor.model_runner_components.attention_backend_setup.attn_backend_wrapper": keep_backend
    },
    "a prefill step takes several snapshots of a request, SGLang's only one": {
        SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend": snapshot_schedule.prepare_for_extend
    },
    "the backend needs the scheduler's plan of the snapshots of a prefill step": {
        SRT + "model_executor.forward_batch_info.ForwardBatch.init_new": snapshot_schedule.pass_plan_to_backend
    },
    "a recorded prefill step has a fixed maximum number of requests; larger batches run eagerly": {
        _PREFILL_GRAPHS + "can_replay_locally": prefill_graphs.fits
    },
    "a recorded step costs what its longest context costs, so large prefill steps are recorded for short ones too": {
        _BREAKABLE_GRAPHS + "capture_one": prefill_graphs.record_forms,
        _BREAKABLE_GRAPHS + "replay": prefill_graphs.replay_form,
    },
    "short prompts beyond the largest prefill graph wait for the next step; SGLang's would run eagerly": {
        SRT + "managers.schedule_policy.PrefillAdder.add_one_req": prefill_graphs.add_within_graph
    },
    "the log of a long start says how many graphs are recorded": {
        _PREFILL_GRAPHS + "capture_one_shape": start_progress.note_graph,
        _DECODE_GRAPHS + "capture_one_shape": start_progress.note_graph,
    },
    "snapshots are taken at other lengths than in SGLang, into slots of the snapshot pool": {
        targets.TRACK_REQUEST: snapshot_schedule.plan_request
    },
    "a decoding request keeps one rolling snapshot instead of two alternating slots": {
        SRT + "managers.schedule_batch.set_mamba_track_indices_from_reqs": snapshot_schedule.plan_decode
    },
    "a decoding rank of DP attention joins the recorded prefill step of another one; SGLang's would run both eagerly": {
        targets.PREFILL_GRAPH_VOTE: snapshot_schedule.may_join_prefill,
        SRT + "managers.schedule_batch.ScheduleBatch.convert_decode_to_extend": snapshot_schedule.join_prefill,
    },
    "a verify step needs slots for the rolling snapshots that it may pass, and cannot allocate them itself": {
        SRT + "speculative.spec_utils.spec_prepare_for_decode": snapshot_schedule.plan_verify
    },
    "the draft model's steps use the window rings of this cache; SGLang supports a fixed list of backends": {
        SRT + "speculative.draft_utils.DraftBackendFactory.create_decode_backend": speculation.decode_backends,
        SRT + "speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend": speculation.extend_backend,
    },
    "SGLang records that step in a CUDA graph for its own backends only": {
        targets.CAPTURE_DRAFT_GRAPHS: speculation.capture_graphs
    },
    "snapshots of a verify step are complete after the draft model has processed the accepted tokens": {
        targets.DRAFT_EXTEND: speculation.take_snapshots
    },
    "DSPARK's stages use the window rings of this cache; SGLang would select the backend of its own pool": {
        targets.DSPARK_BACKEND: with_our_backend
    },
    "the context of DSPARK's stages is stored in the window rings, and completes the snapshots of a step": {
        targets.WRITE_CONTEXT: speculation.write_context
    },
    "first tokens are sent before their prompts are cached; SGLang caches all prompts of a step first": {
        targets.PREFILL_RESULT: snapshot_schedule.send_before_caching
    },
    "a finished request is inserted up to its last snapshot; SGLang would insert a state with all drafts": {
        targets.MAY_CACHE_FINISHED: always_cache
    },
    "keys are tuples of integers and are compared in parts, so a lookup in 200 turns takes twice as long": {
        SRT + "mem_cache.radix_cache.RadixKey.child_key_at": tree_core.child_key_at,
        SRT + "mem_cache.radix_cache.RadixKey.match_at": tree_core.match_at,
    },
    "a finished save frees memory for waiting requests; SGLang lets them wait until a running one ends": {
        SRT + "managers.scheduler.Scheduler.get_new_batch_prefill": snapshot_schedule.note_running_batch
    },
    "a retraction that frees memory must be distinguished from a retraction of all requests": {
        SRT + "managers.schedule_batch.ScheduleBatch.release_req": snapshot_schedule.retract_for_memory
    },
    "a retracted request resumes from its last snapshot if that is still cached; SGLang recomputes its answer": {
        SRT + "managers.schedule_batch.release_kv_cache": snapshot_schedule.keep_on_retraction
    },
    "SGLang accepts sampling parameters of any type, and some types crash one of its processes": {
        SRT + "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments": request_validation.check_fields
    },
    "requests with fields of disaggregated servers, or with ids of SGLang's health checks, would never be answered": {
        SRT + "managers.tokenizer_manager.TokenizerManager.generate_request": request_validation.check_origin
    },
    "a message that the scheduler cannot decode, or a value out of bounds such as a token id, crashes it": {
        targets.SEND_TO_SCHEDULER: request_validation.check_message
    },
    "the scheduler ends the server if a control request raises an exception; here the exception is its answer": {
        SRT + "managers.scheduler.Scheduler.init_request_dispatcher": control_requests.guard_control_requests,
        SRT + "managers.tokenizer_manager.TokenizerManager.init_communicators": control_requests.receive_errors,
        SRT + "managers.communicator.FanOutCommunicator.__call__": control_requests.raise_errors,
    },
    "routers look prompts up and prefetch them; this call is the first one that has the tokenizer manager": {
        SRT + "parser.template_manager.TemplateManager.initialize_templates": endpoints.add_endpoints
    },
    "a request whose pin exceeds the limit is rejected before it begins, and only a scheduler knows what is pinned": {
        SRT + "managers.scheduler.Scheduler.handle_generate_request": hints.reject_pin
    },
    "a group whose processes do not join would occupy the scheduler for up to 30 minutes": {
        SRT + "utils.common.init_custom_process_group": weight_groups.bound_group
    },
    "SGLang aborts all requests whose ids begin with the given id, such as job-10 with job-1": {
        SRT + "managers.scheduler.Scheduler.abort_request": control_requests.abort_one
    },
    "the workers of --tokenizer-worker-num accept requests but do not load SGLang's plugins": {
        SRT + "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer": tokenizer_workers.share_plugins
    },
    "uvicorn would ignore SIGQUIT, with which a failing scheduler ends the server": {
        "uvicorn.supervisors.multiprocess.Multiprocess.__init__": tokenizer_workers.keep_quit_handler
    },
    "SGLang clears its input, for example token ids, in all but one process of an attention rank": {
        SRT + "layers.dp_attention.dp_gather_replicate": collectives.gather_from_copy
    },
    "a draft model's prefill has one row per request, but SGLang exchanges one per requested log-probability": {
        targets.LOGITS_OF_RANKS: collectives.logits_of_ranks
    },
    "a server that does not fit into memory ends with one line instead of SGLang's traceback": {
        SRT + "managers.scheduler.Scheduler.init_model_worker": build_or_reject
    },
    "the host cache keeps the released data, and requests wait; SGLang would end a server that is not idle": {
        _UPDATER + "release_memory_occupation": sleep.release_memory
    },
    "after wake-up the memory of the pools has undefined contents, so it is initialised again": {
        _UPDATER + "resume_memory_occupation": sleep.resume_memory
    },
    "a step would crash the server while its memory is released": {
        SRT + "managers.scheduler.Scheduler.continue_generation": sleep.keep_paused
    },
    "results of the old weights must not be served; SGLang keeps stored pages, and flushes only on request": {
        **{
            _UPDATER + f"update_weights_from_{way}": sleep.update_weights
            for way in ("disk", "distributed", "tensor", "ipc")
        },
        _UPDATER + "end_weight_update": sleep.end_update,
    },
    "an entry is key and value at once; SGLang would take half of the buffers as keys and the others as values": {
        SRT + "disaggregation.utils.is_mla_backend": disaggregation.is_mla
    },
    "a draft model has no blocks of its own; SGLang would transfer those of the model twice, and NIXL rejects that": {
        targets.BUFFERS_TO_SEND: disaggregation.without_draft_pool,
        targets.BUFFERS_TO_RECEIVE: disaggregation.without_draft_pool,
    },
    "if the caches differ, only the affected requests must fail, not the decode server": {
        SRT + "disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info": disaggregation.reject_other_caches
    },
    "the process that detects a rejected request may not be the one that answers it": {
        SRT + "disaggregation.common.conn.CommonKVReceiver.__init__": disaggregation.record_failure_reason
    },
    "a decode server copies the state of retracted requests to the host, but a running step changes it": {
        SRT + "managers.scheduler.Scheduler.update_running_batch": disaggregation.finish_step_before_retraction
    },
}


def _of_context(context: ServerContext) -> Table:
    """Return the hooks of every server that decide by its options, layout and slots."""
    return {
        "the cache needs pages of 128 tokens and its own backend; other flags are rejected before loading": {
            SRT + "arg_groups.overrides.collect_model_override_declarations": context.declarations
        },
        "flags that SGLang derives from others are checked after it has resolved them": {
            targets.FLAGS_RESOLVED: context.resolved
        },
        "window entries are part of the state of a request, not pages of a second pool": {
            SRT + "configs.model_config.is_hybrid_swa_model": context.is_hybrid_swa
        },
        "memory is first given to state slots of running requests and to snapshots, not divided by a fixed ratio": {
            targets.CHOOSE_STATE_SLOTS: context.state_slots
        },
        "the limit of running requests is given, and the slots were chosen for it": {
            targets.SLOTS_OF_A_REQUEST: context.slots_of_request
        },
        "the pool size depends on the bytes of a block, and must hold a request of the context length": {
            SRT + "model_executor.pool_configurator.create_memory_pool_configurator": context.pool_configurator
        },
        "requests use the state slots of this cache, including those that arrive at a decode server": {
            targets.BUILD_REQUEST_POOL: context.request_pool,
            targets.BUILD_DECODE_REQUEST_POOL: context.request_pool,
        },
        "token slots are addresses in the blocks of this cache": {targets.BUILD_KV_POOL: context.kv_pool},
        "last call before a scheduler reports ready: check what was built, and watch loads from the host cache": {
            SRT + "managers.scheduler.Scheduler.get_init_info": context.started
        },
        "both servers must have the same cache layout; SGLang compares --kv-cache-dtype only": {
            SRT + "disaggregation.common.conn.CommonKVManager.__init__": context.name_cache
        },
    }


def _without_gpu(context: ServerContext) -> Table:
    """Return the hooks of a server on a CPU."""
    return {
        "SGLang requires a GPU here, because its own models of this kind have GPU kernels only": {
            targets.VALIDATE_EXTRA_BUFFER: without_gpu.accept
        },
        "SGLang rejects an FP8 KV cache without AMX, which only its own kernels need": {
            targets.CONFIGURE_POOLS: context.pools_on_cpu
        },
        "SGLang replicates KV heads until every process has one; here all processes share a single head": {
            SRT + "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp": without_gpu.keep_kv_heads
        },
        "SGLang requires a GPU here, although it has PyTorch code for DSPARK": {
            targets.RESOLVE_DSPARK: speculation.resolve_dspark_on_cpu
        },
        "SGLang verifies sampled drafts with GPU kernels only, and the server would crash": {
            SRT + "speculative.dflash_utils.validate_dflash_request": speculation.validate_on_cpu
        },
        "DSPARK's worker records CUDA streams, which do not exist on a CPU": {
            "torch.Tensor.record_stream": without_gpu.ignore_stream
        },
        "V4.1 collapses its residual streams with it after the last layer; SGLang has a GPU kernel only": {
            "sglang.kernels.ops.layernorm.mhc.mhc_combine": collapse_flat
        },
        "SGLang pins host memory, for example in ScheduleBatch.prepare_for_decode, which needs a GPU": {
            "torch.Tensor.pin_memory": without_gpu.keep_pageable,
            "torch.tensor": without_gpu.make_pageable_tensor,
            SRT + "disaggregation.common.conn.CommonKVSender.__init__": disaggregation.allow_pageable_indices,
        },
        "SGLang has GPU kernels only, and the server would crash": {
            SRT + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": grammar.apply_mask_of_grammar
        },
        "the same applies to the mask of a model that is thinking, which has no grammar": {
            SRT + "constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask": grammar.apply_mask
        },
        "without an argument SGLang expects the model's device, but a CUDA build of torch returns CUDA": {
            "torch.get_device_module": without_gpu.device_module
        },
        "DP attention gathers tokens and their ids with it, and SGLang's version needs a GPU": {
            SRT + "distributed.parallel_state.inplace_all_reduce": collectives.sum_token_ids,
            SRT + "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor": collectives.all_gather,
            SRT + "distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor": collectives.reduce_scatter,
        },
    }


def rows(*tables: Table) -> tuple[Hook, ...]:
    """Return the hooks of tables."""
    return tuple(
        Hook(target, function, reason)
        for table in tables
        for reason, hooks in table.items()
        for target, function in hooks.items()
    )


def hooks_of(context: ServerContext, on_cpu: bool) -> tuple[Hook, ...]:
    """Return the hooks of a server."""
    return rows(
        _of_context(context),
        ALWAYS,
        INTEGRITY_CHECK if context.options.integrity_check else {},
        _without_gpu(context) if on_cpu else {},
    )
