"""Every place where SGLang is changed, in one table, with the reason.

Nothing here is applied before a launch has opted in. A target that does not exist, or takes other parameters than the
function here, stops the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

from dsv4_sglang.srt.attention import prefill_graphs, speculation
from dsv4_sglang.srt.cpu import grammar
from dsv4_sglang.srt.cpu.torch_layers import collapse_flat
from dsv4_sglang.srt.features import collectives, disaggregation, integrity, sleep
from dsv4_sglang.srt.host_cache import namespaces
from dsv4_sglang.srt.integration import compat, request_validation, tokenizer_workers
from dsv4_sglang.srt.integration.server_context import BACKEND, Launch
from dsv4_sglang.srt.integration.startup_check import build_or_reject
from dsv4_sglang.srt.prefix_cache import snapshot_schedule

SRT = "sglang.srt."


class Hook(NamedTuple):
    """`target` is empty where the release of SGLang needs no hook."""

    target: str
    kind: HookType
    function: Callable[..., Any]
    reason: str
    cpu_only: bool = False


INTEGRITY_CHECK = (
    Hook(
        SRT + "managers.scheduler.Scheduler.get_internal_state",
        HookType.AROUND,
        integrity.answer,
        "the one request of SGLang that reaches all processes and answers with what they say: /server_info",
    ),
)
"""The part of the table for the option `integrity_check`."""


def hooks_of(launch: Launch, on_cpu: bool) -> tuple[Hook, ...]:
    """The table for one launch."""
    table = (
        Hook(
            SRT + "arg_groups.overrides.collect_model_override_declarations",
            HookType.AROUND,
            launch.declarations,
            "blocks of 128 tokens and our backend instead of 256 and SGLang's; reject flags before anything is loaded",
        ),
        Hook(
            compat.FLAGS_RESOLVED,
            HookType.AROUND,
            launch.resolved,
            "reject what follows from the flags, too, once SGLang has resolved them",
        ),
        Hook(
            compat.ALLOW_EXTRA_BUFFER,
            HookType.AROUND,
            launch.extra_buffer,
            "snapshots are taken into extra slots; SGLang allows that for a fixed list of architectures",
        ),
        Hook(
            SRT + "configs.model_config.is_hybrid_swa_model",
            HookType.AROUND,
            launch.is_hybrid_swa,
            "window rows are state of the request, not pages of a second pool",
        ),
        Hook(
            SRT + "model_executor.model_runner_components.attention_backend_setup.attn_backend_wrapper",
            HookType.AROUND,
            lambda original, runner, full_attn_backend: full_attn_backend,
            "one backend serves all layers; SGLang would wrap it in its dispatcher for linear-attention layers",
        ),
        Hook(
            compat.CHOOSE_STATE_SLOTS,
            HookType.AROUND,
            launch.state_slots,
            "state slots for the running requests and snapshots first, not a fixed share of memory",
        ),
        Hook(
            compat.SLOTS_OF_A_REQUEST,
            HookType.AROUND,
            launch.slots_of_request,
            "the cap on running requests follows from the slots chosen above",
        ),
        Hook(
            SRT + "model_executor.pool_configurator.create_memory_pool_configurator",
            HookType.AROUND,
            launch.pool_configurator,
            "bytes of a block of this cache; an error if one request of the context length does not fit",
        ),
        Hook(compat.BUILD_REQUEST_POOL, HookType.AROUND, launch.request_pool, "our state slots behind requests"),
        Hook(compat.BUILD_KV_POOL, HookType.AROUND, launch.kv_pool, "our blocks behind slot indices"),
        Hook(
            SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend",
            HookType.AROUND,
            snapshot_schedule.prepare_for_extend,
            "a prefill step takes several snapshots of a request; SGLang knows one",
        ),
        Hook(
            SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
            HookType.AROUND,
            snapshot_schedule.hand_over,
            "which snapshots a prefill step takes goes from the scheduler's batch to the backend",
        ),
        Hook(
            SRT + "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_replay_locally",
            HookType.AROUND,
            prefill_graphs.fits,
            "a recorded prefill step has room for a fixed number of requests; larger batches run eagerly",
        ),
        Hook(
            compat.TRACK_REQUEST,
            HookType.REPLACE,
            snapshot_schedule.plan_request,
            "where snapshots are taken, and that they go to slots of the snapshot pool",
        ),
        Hook(
            SRT + "managers.schedule_batch.set_mamba_track_indices_from_reqs",
            HookType.REPLACE,
            snapshot_schedule.plan_decode,
            "decoding requests keep one rolling snapshot instead of two slots that alternate",
        ),
        Hook(
            SRT + "speculative.spec_utils.spec_prepare_for_decode",
            HookType.AROUND,
            snapshot_schedule.plan_verify,
            "slots of the rolling snapshots that a verify step may pass; the step itself must not change pools",
        ),
        Hook(
            SRT + "speculative.draft_utils.DraftBackendFactory.create_decode_backend",
            HookType.AROUND,
            speculation.decode_backends,
            "the draft model's steps read our rings; SGLang knows a fixed list of backends",
        ),
        Hook(
            SRT + "speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
            HookType.AROUND,
            speculation.extend_backend,
            "the same of its step behind a verify step",
        ),
        Hook(
            compat.CAPTURE_DRAFT_GRAPHS,
            HookType.AROUND,
            speculation.capture_graphs,
            "that step in a CUDA graph, which SGLang records for its own backends only",
        ),
        Hook(
            compat.DRAFT_EXTEND,
            HookType.AROUND,
            speculation.take_snapshots,
            "a verify step's snapshots are complete when the draft model has read what was accepted",
        ),
        Hook(
            compat.DRAFT_KV_POOL,
            HookType.REPLACE,
            speculation.no_draft_pool,
            "what a draft model keeps of a request lies in its slot; SGLang would hold or send the pool of both twice",
        ),
        Hook(
            compat.DSPARK_BACKEND,
            HookType.AROUND,
            compat.with_dspark_backend(BACKEND),
            "DSPARK's stages read our rings; SGLang gives its worker the backend of its own pool",
        ),
        Hook(
            compat.WRITE_CONTEXT,
            HookType.REPLACE,
            speculation.write_context,
            "the context that DSPARK's stages read is rows of our rings; with it a step's snapshots are complete",
        ),
        Hook(
            compat.MAY_CACHE_FINISHED,
            HookType.REPLACE,
            lambda self, req, result, i: True,
            "a finished request is inserted up to its last snapshot; SGLang would insert a state of all its drafts",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.get_new_batch_prefill",
            HookType.AROUND,
            snapshot_schedule.look_again,
            "what is being saved to the host is room a moment later, and a prompt in chunks has its slot; SGLang lets "
            "the next request wait until another ends",
        ),
        Hook(
            SRT + "managers.schedule_batch.ScheduleBatch.release_req",
            HookType.AROUND,
            snapshot_schedule.retract_for_memory,
            "tells a retraction for memory from one of all requests",
        ),
        Hook(
            SRT + "managers.schedule_batch.release_kv_cache",
            HookType.AROUND,
            snapshot_schedule.keep_on_retraction,
            "a retracted request resumes from its last snapshot if memory allows; SGLang drops what it generated",
        ),
        Hook(
            SRT + "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
            HookType.AROUND,
            request_validation.check_fields,
            "SGLang takes sampling parameters of any type, and ends in one of its processes for some",
        ),
        Hook(
            compat.SEND_TO_SCHEDULER,
            HookType.AROUND,
            request_validation.check_message,
            "the scheduler ends for a message that it cannot decode and for values out of bounds, such as token ids",
        ),
        Hook(
            compat.LOGPROBS_OF_TOKENS,
            HookType.AROUND,
            compat.tensors_of_logprobs,
            "the server ends when a request with token_ids_logprob decodes beside one without",
        ),
        Hook(
            SRT + "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer",
            HookType.AROUND,
            tokenizer_workers.share_plugins,
            "with --tokenizer-worker-num requests come in processes that do not load SGLang's plugins",
        ),
        Hook(
            "uvicorn.supervisors.multiprocess.Multiprocess.__init__",
            HookType.AROUND,
            tokenizer_workers.keep_quit_handler,
            "it takes the signal by which a scheduler that fails ends the server, and ignores it",
        ),
        *sleep_hooks(),
        *namespace_hooks(),
        Hook(
            SRT + "layers.dp_attention.dp_gather_partial",
            HookType.REPLACE,
            collectives.gather_equal,
            "a process has whole sums of attention; SGLang adds up those of an attention rank's processes once more",
        ),
        Hook(
            SRT + "layers.dp_attention.dp_gather_replicate",
            HookType.AROUND,
            collectives.gather_a_copy,
            "it clears what it gathers from, as token ids, in all but one process of an attention rank",
        ),
        Hook(
            compat.LOGITS_OF_RANKS,
            HookType.AROUND,
            collectives.logits_of_ranks,
            "a draft model's prefill exchanges as many rows as the prompt has log p asked for, and has one a request",
        ),
        *(INTEGRITY_CHECK if launch.options.integrity_check else ()),
        *disaggregation_hooks(launch),
        Hook(
            SRT + "managers.scheduler.Scheduler.init_model_worker",
            HookType.AROUND,
            build_or_reject,
            "a launch that does not fit into memory ends with one line, not with SGLang's traceback",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.get_init_info",
            HookType.BEFORE,
            launch.started,
            "the last moment before a scheduler reports ready: pools, tree, backend and model must be ours; behind it "
            "loads of a host cache are watched",
        ),
        Hook(
            compat.VALIDATE_EXTRA_BUFFER,
            HookType.REPLACE,
            lambda *args, **kwargs: None,
            "it asks for a GPU because SGLang's own models of this kind have no other kernels",
            cpu_only=True,
        ),
        Hook(
            compat.CONFIGURE_POOLS,
            HookType.AROUND,
            launch.pools_on_cpu,
            "it rejects FP8 rows without AMX, which SGLang's own kernels need",
            cpu_only=True,
        ),
        Hook(
            SRT + "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
            HookType.REPLACE,
            lambda model_config, load_config, tp_size: model_config,
            "it multiplies KV heads until every process has one of its own; here all share the one",
            cpu_only=True,
        ),
        Hook(
            compat.RESOLVE_DSPARK,
            HookType.AROUND,
            speculation.resolve_dspark_on_cpu,
            "it asks for a GPU, although SGLang has what DSPARK runs in PyTorch, too",
            cpu_only=True,
        ),
        Hook(
            SRT + "speculative.dflash_utils.validate_dflash_request",
            HookType.AROUND,
            speculation.validate_on_cpu,
            "SGLang accepts drafts by sampling with GPU kernels only, and the server would end",
            cpu_only=True,
        ),
        Hook(
            "torch.Tensor.record_stream",
            HookType.REPLACE,
            lambda self, *args, **kwargs: None,
            "DSPARK's worker tells the allocator of streams, of which there are none",
            cpu_only=True,
        ),
        Hook(
            compat.COLLAPSE_STREAMS,
            HookType.REPLACE,
            collapse_flat,
            "V4.1's streams come together in it behind the last layer; SGLang has it as a GPU kernel only",
            cpu_only=True,
        ),
        Hook(
            compat.ALLOCATE_GRAMMAR_MASK,
            HookType.REPLACE,
            grammar.allocate_mask,
            "it pins host memory, which needs a GPU",
            cpu_only=True,
        ),
        Hook(
            SRT + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
            HookType.REPLACE,
            grammar.apply_mask_of_grammar,
            "it has kernels for GPUs only, and the server would end",
            cpu_only=True,
        ),
        Hook(
            SRT + "constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
            HookType.REPLACE,
            grammar.apply_mask,
            "the same of a mask without a grammar, while a model thinks",
            cpu_only=True,
        ),
        Hook(
            "torch.get_device_module",
            HookType.AROUND,
            lambda original, device=None: original("cpu" if device is None else device),
            "without a device SGLang means that of the model; a CUDA build of torch means CUDA, GPU or not",
            cpu_only=True,
        ),
        Hook(
            "torch.Tensor.pin_memory",
            HookType.REPLACE,
            lambda self, *args, **kwargs: self,
            "ScheduleBatch.prepare_for_decode pins host memory, which needs a GPU",
            cpu_only=True,
        ),
        Hook(
            "torch.tensor",
            HookType.AROUND,
            lambda original, *args, **kwargs: original(*args, **{**kwargs, "pin_memory": False}),
            "ForwardBatch.prepare_mlp_sync_batch of DP attention pins host memory, which needs a GPU",
            cpu_only=True,
        ),
        Hook(
            SRT + "distributed.parallel_state.inplace_all_reduce",
            HookType.REPLACE,
            collectives.sum_token_ids,
            "DP attention gathers token ids by it; SGLang's exists for GPUs only",
            cpu_only=True,
        ),
        Hook(
            SRT + "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            HookType.REPLACE,
            collectives.all_gather,
            "DP attention gathers tokens by it; SGLang's exists for GPUs only",
            cpu_only=True,
        ),
        Hook(
            SRT + "distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor",
            HookType.REPLACE,
            collectives.reduce_scatter,
            "DP attention over several processes a rank gathers tokens by it; SGLang's exists for GPUs only",
            cpu_only=True,
        ),
    )
    return tuple(hook for hook in table if hook.target and (on_cpu or not hook.cpu_only))


def sleep_hooks() -> tuple[Hook, ...]:
    """The part of the table for sleep and wake, and for new weights."""
    updater = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    return (
        Hook(
            updater + "release_memory_occupation",
            HookType.AROUND,
            sleep.fall_asleep,
            "the host keeps what the device gives back, and requests wait; SGLang would end a server that is not idle",
        ),
        Hook(
            updater + "resume_memory_occupation",
            HookType.AROUND,
            sleep.wake,
            "what was zero, or a table of numbers, when the pools were made has anything in it",
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.continue_generation",
            HookType.AROUND,
            sleep.stay_asleep,
            "a step of a server whose memory is given back would end it",
        ),
        *(
            Hook(
                updater + f"update_weights_from_{way}",
                HookType.AROUND,
                sleep.update_weights,
                "nothing of the old weights is served; SGLang keeps what a storage has, and all if it is not told to",
            )
            for way in ("disk", "distributed", "tensor", "ipc")
        ),
        Hook(
            compat.END_WEIGHT_UPDATE,
            HookType.AROUND,
            sleep.end_update,
            "the same where weights came past SGLang, and of steps while they had another form",
        ),
    )


def namespace_hooks() -> tuple[Hook, ...]:
    """The part of the table for tenants of a storage."""
    return (
        Hook(
            compat.HASH_PAGES,
            HookType.AROUND,
            namespaces.hash_pages,
            "keys of stored pages are hashes of tokens alone: tenants would share pages",
        ),
        Hook(
            compat.LOOK_UP_PAGES,
            HookType.AROUND,
            namespaces.look_up,
            "whose pages are looked up; SGLang knows it of the node that they hang on, and the root is nobody's",
        ),
        Hook(
            compat.PREFETCH_NAMESPACE,
            HookType.AROUND,
            namespaces.of_anchor,
            "the same, where SGLang asks for it",
        ),
    )


def disaggregation_hooks(launch: Launch) -> tuple[Hook, ...]:
    """The part of the table for servers that prefill or decode only."""
    return (
        Hook(
            compat.BUILD_DECODE_REQUEST_POOL,
            HookType.AROUND,
            launch.decode_request_pool,
            "our state slots on a decode server, some of them for requests that are on their way",
        ),
        Hook(
            SRT + "disaggregation.utils.is_mla_backend",
            HookType.AROUND,
            disaggregation.is_mla,
            "one vector is key and value; SGLang would take half of a pool's buffers for keys, the others for values",
        ),
        Hook(
            SRT + "disaggregation.common.conn.CommonKVManager.__init__",
            HookType.BEFORE,
            launch.name_cache,
            "servers that exchange blocks and slots must have the same ones; SGLang compares --kv-cache-dtype alone",
        ),
        Hook(
            SRT + "disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
            HookType.AROUND,
            disaggregation.reject_other_caches,
            "a prefill server with another cache costs the requests that it was asked for, not the decode server",
        ),
        Hook(
            SRT + "disaggregation.common.conn.CommonKVReceiver.__init__",
            HookType.AROUND,
            disaggregation.say_why,
            "of several processes one finds out that a request is rejected, and another answers",
        ),
        Hook(
            compat.KV_SENDER,
            HookType.AROUND,
            disaggregation.take_pageable_indices,
            "it lets a prefill server copy the numbers of blocks to pinned memory, which needs a GPU",
            cpu_only=True,
        ),
        Hook(
            SRT + "managers.scheduler.Scheduler.update_running_batch",
            HookType.AROUND,
            disaggregation.settle_before_retraction,
            "a decode server copies the state of retracted requests to the host; a step under way has moved it on",
        ),
    )
