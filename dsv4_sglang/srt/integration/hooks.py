"""Table of all functions of SGLang that this package changes, with the reasons.

Nothing is applied without the opt-in. A server does not start if a target does not exist or has parameters that differ
from those of the hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

from dsv4_sglang.srt.attention import prefill_graphs, speculation
from dsv4_sglang.srt.cpu import grammar, without_gpu
from dsv4_sglang.srt.cpu.torch_layers import collapse_flat
from dsv4_sglang.srt.features import collectives, disaggregation, integrity, sleep
from dsv4_sglang.srt.host_cache import namespaces
from dsv4_sglang.srt.integration import compat, request_validation, tokenizer_workers
from dsv4_sglang.srt.integration.server_context import BACKEND, ServerContext
from dsv4_sglang.srt.integration.startup_check import build_or_reject
from dsv4_sglang.srt.prefix_cache import snapshot_schedule

SRT = "sglang.srt."


class Hook(NamedTuple):
    """A changed function of SGLang.

    Attributes:
        target: qualified name. Empty if the installed release needs no hook.
        function: the hook. It wraps the target if its first parameter is `original`, and replaces it otherwise.
        reason: why SGLang's function does not work with this cache.
    """

    target: str
    function: Callable[..., Any]
    reason: str

    @property
    def kind(self) -> HookType:
        """The kind of the hook in SGLang's registry."""
        first = next(iter(inspect.signature(self.function).parameters), None)
        return HookType.AROUND if first == "original" else HookType.REPLACE


# Hooks of the option `integrity_check`.
INTEGRITY_CHECK = (
    Hook(
        SRT + "managers.scheduler.Scheduler.get_internal_state",
        integrity.add_reports,
        "/server_info is the only request of SGLang that reaches all processes and returns their answers",
    ),
)


def keep_backend(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """AROUND `attn_backend_wrapper`: return the backend without SGLang's dispatcher."""
    return full_attn_backend


def always_cache(self: Any, req: Any, result: Any, i: int) -> bool:
    """REPLACE `compat.MAY_CACHE_FINISHED`: insert every finished request into the prefix cache."""
    return True


def hooks_of(context: ServerContext, on_cpu: bool) -> tuple[Hook, ...]:
    """Return the hooks of a server."""
    table = (
        Hook(
            SRT + "arg_groups.overrides.collect_model_override_declarations",
            context.declarations,
            "the cache needs pages of 128 tokens and its own backend; other flags are rejected before loading",
        ),
        Hook(
            compat.FLAGS_RESOLVED,
            context.resolved,
            "flags that SGLang derives from others are checked after it has resolved them",
        ),
        Hook(
            compat.ALLOW_EXTRA_BUFFER,
            context.extra_buffer,
            "snapshots are taken into extra slots, which SGLang allows for a fixed list of architectures only",
        ),
        Hook(
            SRT + "configs.model_config.is_hybrid_swa_model",
            context.is_hybrid_swa,
            "window entries are part of the state of a request, not pages of a second pool",
        ),
        Hook(
            SRT + "model_executor.model_runner_components.attention_backend_setup.attn_backend_wrapper",
            keep_backend,
            "one backend serves all layers, but SGLang would wrap it in its dispatcher for linear-attention layers",
        ),
        Hook(
            compat.CHOOSE_STATE_SLOTS,
            context.state_slots,
            "memory is first given to state slots of running requests and to snapshots, not divided by a fixed ratio",
        ),
        Hook(
            compat.SLOTS_OF_A_REQUEST,
            context.slots_of_request,
            "the limit of running requests is given, and the slots were chosen for it",
        ),
        Hook(
            SRT + "model_executor.pool_configurator.create_memory_pool_configurator",
            context.pool_configurator,
            "the pool size depends on the bytes of a block, and must hold a request of the context length",
        ),
        Hook(
            compat.BUILD_REQUEST_POOL,
            context.request_pool,
            "requests use the state slots of this cache",
        ),
        Hook(
            compat.BUILD_KV_POOL,
            context.kv_pool,
            "token slots are addresses in the blocks of this cache",
        ),
        Hook(
            SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend",
            snapshot_schedule.prepare_for_extend,
            "a prefill step takes several snapshots of a request, SGLang's only one",
        ),
        Hook(
            SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
            snapshot_schedule.pass_plan_to_backend,
            "the backend needs the scheduler's plan of the snapshots of a prefill step",
        ),
        Hook(
            SRT + "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_replay_locally",
            prefill_graphs.fits,
            "a recorded prefill step has a fixed maximum number of requests; larger batches run eagerly",
        ),
        Hook(
            compat.TRACK_REQUEST,
            snapshot_schedule.plan_request,
            "snapshots are taken at other lengths than in SGLang, into slots of the snapshot pool",
        ),
        Hook(
            SRT + "managers.schedule_batch.set_mamba_track_indices_from_reqs",
            snapshot_schedule.plan_decode,
            "a decoding request keeps one rolling snapshot instead of two alternating slots",
        ),
        Hook(
            SRT + "speculative.spec_utils.spec_prepare_for_decode",
            snapshot_schedule.plan_verify,
            "a verify step needs slots for the rolling snapshots that it may pass, and cannot allocate them itself",
        ),
        Hook(
            SRT + "speculative.draft_utils.DraftBackendFactory.create_decode_backend",
            speculation.decode_backends,
            "the draft model's steps use the window rings of this cache; SGLang supports a fixed list of backends",
        ),
        Hook(
            SRT + "speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
            speculation.extend_backend,
            "the same applies to the draft model's step after a verify step",
        ),
        Hook(
            compat.CAPTURE_DRAFT_GRAPHS,
            speculation.capture_graphs,
            "SGLang records that step in a CUDA graph for its own backends only",
        ),
        Hook(
            compat.DRAFT_EXTEND,
            speculation.take_snapshots,
            "snapshots of a verify step are complete after the draft model has processed the accepted tokens",
        ),
        Hook(
            compat.DRAFT_KV_POOL,
            speculation.no_draft_pool,
            "the state slot contains the draft model's state; SGLang would save or send the shared pool twice",
        ),
        Hook(
            compat.DSPARK_BACKEND,
            compat.with_dspark_backend(BACKEND),
            "DSPARK's stages use the window rings of this cache; SGLang would select the backend of its own pool",
        ),
        Hook(
            compat.WRITE_CONTEXT,
            speculation.write_context,
            "the context of DSPARK's stages is stored in the window rings, and completes the snapshots of a step",
        ),
        Hook(
            compat.MAY_CACHE_FINISHED,
            always_cache,
            "a finished request is inserted up to its last snapshot; SGLang would insert a state with all drafts",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.get_new_batch_prefill",
            snapshot_schedule.recheck_queue,
            "memory becomes free when a save to the host ends, and a chunked prompt already has its slot; SGLang would "
            "let the next request wait until another one ends",
        ),
        Hook(
            SRT + "managers.schedule_batch.ScheduleBatch.release_req",
            snapshot_schedule.retract_for_memory,
            "a retraction that frees memory must be told from one of all requests",
        ),
        Hook(
            SRT + "managers.schedule_batch.release_kv_cache",
            snapshot_schedule.keep_on_retraction,
            "a retracted request resumes from its last snapshot if that is still cached; SGLang recomputes its answer",
        ),
        Hook(
            SRT + "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
            request_validation.check_fields,
            "SGLang accepts sampling parameters of any type, and some types crash one of its processes",
        ),
        Hook(
            compat.SEND_TO_SCHEDULER,
            request_validation.check_message,
            "a message that the scheduler cannot decode, or a value out of bounds such as a token id, crashes it",
        ),
        Hook(
            compat.LOGPROBS_OF_TOKENS,
            compat.tensors_of_logprobs,
            "the server crashes if a request with token_ids_logprob is decoded together with one without",
        ),
        Hook(
            SRT + "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer",
            tokenizer_workers.share_plugins,
            "the workers of --tokenizer-worker-num accept requests but do not load SGLang's plugins",
        ),
        Hook(
            "uvicorn.supervisors.multiprocess.Multiprocess.__init__",
            tokenizer_workers.keep_quit_handler,
            "uvicorn would ignore SIGQUIT, with which a failing scheduler ends the server",
        ),
        *sleep_hooks(),
        *namespace_hooks(),
        Hook(
            SRT + "layers.dp_attention.dp_gather_partial",
            collectives.gather_replicated,
            "the output of attention is already summed over an attention rank; SGLang would sum it again",
        ),
        Hook(
            SRT + "layers.dp_attention.dp_gather_replicate",
            collectives.gather_from_copy,
            "SGLang clears its input, for example token ids, in all but one process of an attention rank",
        ),
        Hook(
            compat.LOGITS_OF_RANKS,
            collectives.logits_of_ranks,
            "a draft model's prefill has one row per request, but SGLang exchanges one per requested log-probability",
        ),
        *(INTEGRITY_CHECK if context.options.integrity_check else ()),
        *disaggregation_hooks(context),
        Hook(
            SRT + "managers.scheduler.Scheduler.init_model_worker",
            build_or_reject,
            "a server that does not fit into memory ends with one line instead of SGLang's traceback",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.get_init_info",
            context.started,
            "last call before a scheduler reports ready: check the classes of pools, tree, backend and model, and "
            "start the watchdog of loads from the host cache",
        ),
        *(cpu_hooks(context) if on_cpu else ()),
    )
    return tuple(hook for hook in table if hook.target)


def sleep_hooks() -> tuple[Hook, ...]:
    """Return the hooks of sleep, wake-up and weight updates."""
    updater = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    return (
        Hook(
            updater + "release_memory_occupation",
            sleep.release_memory,
            "the host cache keeps the released data, and requests wait; SGLang would end a server that is not idle",
        ),
        Hook(
            updater + "resume_memory_occupation",
            sleep.resume_memory,
            "after wake-up the memory of the pools has undefined contents, so it is initialised again",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.continue_generation",
            sleep.keep_paused,
            "a step would crash the server while its memory is released",
        ),
        *(
            Hook(
                updater + f"update_weights_from_{way}",
                sleep.update_weights,
                "results of the old weights must not be served; SGLang keeps stored pages, and flushes only on request",
            )
            for way in ("disk", "distributed", "tensor", "ipc")
        ),
        Hook(
            compat.END_WEIGHT_UPDATE,
            sleep.end_update,
            "the same applies to weights that were updated without SGLang, and to steps during the update",
        ),
    )


def namespace_hooks() -> tuple[Hook, ...]:
    """Return the hooks that separate the tenants of a storage."""
    return (
        Hook(
            compat.HASH_PAGES,
            namespaces.hash_pages,
            "keys of stored pages are hashes of tokens only, so tenants would share pages",
        ),
        Hook(
            compat.LOOK_UP_PAGES,
            namespaces.look_up,
            "a lookup needs the tenant; SGLang takes it from the parent node, and the root has none",
        ),
        Hook(
            compat.PREFETCH_NAMESPACE,
            namespaces.of_anchor,
            "SGLang asks for the tenant here",
        ),
    )


def disaggregation_hooks(context: ServerContext) -> tuple[Hook, ...]:
    """Return the hooks of disaggregated prefill and decode servers."""
    return (
        Hook(
            compat.BUILD_DECODE_REQUEST_POOL,
            context.request_pool,
            "requests on a decode server use the state slots of this cache, including arriving requests",
        ),
        Hook(
            SRT + "disaggregation.utils.is_mla_backend",
            disaggregation.is_mla,
            "an entry is key and value at once; SGLang would take half of the buffers as keys and the others as values",
        ),
        Hook(
            SRT + "disaggregation.common.conn.CommonKVManager.__init__",
            context.name_cache,
            "both servers must have the same cache layout; SGLang compares --kv-cache-dtype only",
        ),
        Hook(
            SRT + "disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
            disaggregation.reject_other_caches,
            "if the caches differ, only the affected requests must fail, not the decode server",
        ),
        Hook(
            SRT + "disaggregation.common.conn.CommonKVReceiver.__init__",
            disaggregation.record_failure_reason,
            "the process that detects a rejected request may not be the one that answers it",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.update_running_batch",
            disaggregation.finish_step_before_retraction,
            "a decode server copies the state of retracted requests to the host, but a running step changes it",
        ),
    )


def cpu_hooks(context: ServerContext) -> tuple[Hook, ...]:
    """Return the hooks of a server on a CPU."""
    return (
        Hook(
            compat.VALIDATE_EXTRA_BUFFER,
            without_gpu.accept,
            "SGLang requires a GPU here, because its own models of this kind have GPU kernels only",
        ),
        Hook(
            compat.CONFIGURE_POOLS,
            context.pools_on_cpu,
            "SGLang rejects an FP8 KV cache without AMX, which only its own kernels need",
        ),
        Hook(
            SRT + "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
            without_gpu.keep_kv_heads,
            "SGLang replicates KV heads until every process has one; here all processes share a single head",
        ),
        Hook(
            compat.RESOLVE_DSPARK,
            speculation.resolve_dspark_on_cpu,
            "SGLang requires a GPU here, although it has PyTorch code for DSPARK",
        ),
        Hook(
            SRT + "speculative.dflash_utils.validate_dflash_request",
            speculation.validate_on_cpu,
            "SGLang verifies sampled drafts with GPU kernels only, and the server would crash",
        ),
        Hook(
            "torch.Tensor.record_stream",
            without_gpu.ignore_stream,
            "DSPARK's worker records CUDA streams, which do not exist on a CPU",
        ),
        Hook(
            compat.COLLAPSE_STREAMS,
            collapse_flat,
            "V4.1 collapses its residual streams with it after the last layer; SGLang has a GPU kernel only",
        ),
        Hook(
            compat.ALLOCATE_GRAMMAR_MASK,
            grammar.allocate_mask,
            "SGLang pins host memory here, which needs a GPU",
        ),
        Hook(
            SRT + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
            grammar.apply_mask_of_grammar,
            "SGLang has GPU kernels only, and the server would crash",
        ),
        Hook(
            SRT + "constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
            grammar.apply_mask,
            "the same applies to the mask of a model that is thinking, which has no grammar",
        ),
        Hook(
            "torch.get_device_module",
            without_gpu.device_module,
            "without an argument SGLang expects the model's device, but a CUDA build of torch returns CUDA",
        ),
        Hook(
            "torch.Tensor.pin_memory",
            without_gpu.keep_pageable,
            "ScheduleBatch.prepare_for_decode pins host memory, which needs a GPU",
        ),
        Hook(
            "torch.tensor",
            without_gpu.make_pageable_tensor,
            "ForwardBatch.prepare_mlp_sync_batch of DP attention pins host memory, which needs a GPU",
        ),
        Hook(
            SRT + "distributed.parallel_state.inplace_all_reduce",
            collectives.sum_token_ids,
            "DP attention gathers token ids with it, and SGLang's version needs a GPU",
        ),
        Hook(
            SRT + "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            collectives.all_gather,
            "DP attention gathers tokens with it, and SGLang's version needs a GPU",
        ),
        Hook(
            SRT + "distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor",
            collectives.reduce_scatter,
            "DP attention with several processes per rank gathers tokens with it, and SGLang's version needs a GPU",
        ),
        Hook(
            compat.KV_SENDER,
            disaggregation.allow_pageable_indices,
            "SGLang copies block indices to pinned memory, which needs a GPU",
        ),
    )
