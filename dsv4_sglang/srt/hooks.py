"""Every place where SGLang is changed, in one table, with the reason.

Nothing here is applied before a launch has opted in. A target that does not exist stops the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS as BLOCK
from dsv4_sglang.srt.checks import check_started
from dsv4_sglang.srt.compat import model_config
from dsv4_sglang.srt.configurator import BlockConfigurator
from dsv4_sglang.srt.layout import served_layout
from dsv4_sglang.srt.prefix import schedule
from dsv4_sglang.srt.refusals import refuse_unsupported
from dsv4_sglang.srt.sizing import GIB, StateDemand, default_checkpoints, memory_after_slots, state_demand, table
from dsv4_sglang.srt.state import current

ARCHITECTURE = "DeepseekV4ForCausalLM"
BACKEND = "dsv4_sglang"
PREFIX_CACHE = "dsv4_sglang"
SRT = "sglang.srt."
CONFIGURATOR = SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator."


class Hook(NamedTuple):
    target: str
    kind: HookType
    function: Callable[..., Any]
    reason: str
    cpu_only: bool = False


def _declarations(original: Callable[..., Any], architecture: str, server_args: Any, hf_config: Any) -> Any:
    quantised = getattr(hf_config, "quantization_config", None) is not None
    refuse_unsupported(server_args, quantised, getattr(hf_config, "o_groups", None))
    # Decoding requests take a rolling checkpoint at the end of every block.
    server_args.mamba_track_interval = BLOCK
    server_args.radix_cache_backend = PREFIX_CACHE
    ours = {"page_size": BLOCK, "attention_backend": BACKEND}
    # SGLang splits its memory between window pages and the rest; this cache has no window pages.
    declared = [
        (source, {k: v for k, v in values.items() if k != "swa_full_tokens_ratio"})
        for source, values in original(architecture, server_args, hf_config)
    ]
    return [*declared, ("dsv4_sglang", ours)]


def _extra_buffer(original: Callable[..., bool], view: Any, architecture: str) -> bool:
    return architecture == ARCHITECTURE or original(view, architecture)


def _is_hybrid_swa(original: Callable[..., bool], architectures: list[str], *args: Any, **kwargs: Any) -> bool:
    return ARCHITECTURE not in architectures and original(architectures, *args, **kwargs)


def _unwrapped_backend(original: Callable[..., Any], runner: Any, backend: Any) -> Any:
    return backend


def _layout(configurator: Any) -> CacheLayout:
    """The layout of this launch; the dtype of the rows is known once the model is loaded."""
    launch = current()
    if launch.layout is None:
        launch.layout = served_layout(
            model_config(configurator.model_config.hf_config),
            configurator.kv_cache_dtype,
            launch.options,
            configurator.device,
        )
    return launch.layout


def _state_slots(original: Callable[..., float], configurator: Any, rest_gib: float) -> float:
    """Choose the number of state slots; return the memory that is left for blocks, in GiB."""
    from sglang.srt.runtime_context import get_context, get_memory, get_schedule

    launch, layout, options = current(), _layout(configurator), current().options
    settings, memory = get_schedule(), get_memory()
    running = settings.max_running_requests
    if memory.disable_radix_cache:
        if options.max_checkpoints:
            raise ValueError(
                f"dsv4_sglang option max_checkpoints is {options.max_checkpoints}, but --disable-radix-cache is given"
            )
        launch.demand = StateDemand(running)
    else:
        available = int(rest_gib * GIB)
        if limit := configurator.server_args.max_total_tokens:
            available = min(available, int(limit * layout.token_bytes))
        step_tokens = settings.chunked_prefill_size or 0
        launch.demand = state_demand(
            running,
            step_tokens=step_tokens if step_tokens > 0 else settings.max_prefill_tokens,
            default=default_checkpoints(layout, running, available),
            max_checkpoints=options.max_checkpoints,
        )
    get_context().override("dsv4_sglang.state_slots", max_mamba_cache_size=running)
    return memory_after_slots(layout, launch.demand, rest_gib)


def _slots_of_request(original: Callable[..., int], configurator: Any) -> int:
    """SGLang divides the slots by this to cap the running requests, which were given to begin with."""
    demand = current().demand
    return original(configurator) if demand is None else 1


def _pool_configurator(original: Callable[..., Any], configurator: Any) -> BlockConfigurator:
    return BlockConfigurator(_layout(configurator), configurator.model_config.context_len)


def _request_pool(
    original: Callable[..., Any], configurator: Any, *, max_num_reqs: int, extra_max_context_len: int
) -> Any:
    from sglang.srt.runtime_context import get_exec, get_schedule

    from dsv4_sglang.srt.pools import StateParams, StateReqToTokenPool

    layout, demand = _layout(configurator), current().demand
    assert demand is not None, "state slots are chosen before pools are built"
    return StateReqToTokenPool(
        size=max_num_reqs,
        mamba_size=get_schedule().max_mamba_cache_size,
        mamba_spec_state_size=max_num_reqs,
        max_context_len=configurator.model_config.context_len + extra_max_context_len,
        device=configurator.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
        cache_params=StateParams.of(layout, demand.staging, demand.checkpoints),
        mamba_layer_ids=list(range(len(layout.schemas))),
        enable_mamba_extra_buffer=configurator.server_args.enable_mamba_extra_buffer(),
        enable_overlap_schedule=not get_schedule().disable_overlap_schedule,
    )


def _kv_pool(
    original: Callable[..., Any], configurator: Any, *, sizes: Any, req_to_token_pool: Any, **kwargs: Any
) -> Any:
    import logging

    from dsv4_sglang.srt.pools import CacheKVPool, CompressedKVPool

    launch, layout = current(), _layout(configurator)
    compressed = CompressedKVPool(
        size=sizes.max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        layout=layout,
        device=configurator.device,
    )
    assert launch.demand is not None, "state slots are chosen before blocks"
    logging.getLogger(__name__).info(table(layout, sizes.max_total_num_tokens, launch.demand))
    return CacheKVPool(compressed, req_to_token_pool.mamba_pool)


HOOKS = (
    Hook(
        SRT + "arg_groups.overrides.collect_model_override_declarations",
        HookType.AROUND,
        _declarations,
        "blocks of 128 tokens and our backend instead of 256 and SGLang's; refuse flags before anything is loaded",
    ),
    Hook(
        SRT + "arg_groups.overrides.supports_mamba_cache_extra_buffer",
        HookType.AROUND,
        _extra_buffer,
        "checkpoints are taken into extra slots; SGLang allows that for a fixed list of architectures",
    ),
    Hook(
        SRT + "configs.model_config.is_hybrid_swa_model",
        HookType.AROUND,
        _is_hybrid_swa,
        "window rows are state of the request, not pages of a second pool",
    ),
    Hook(
        SRT + "model_executor.model_runner_components.attention_backend_setup.attn_backend_wrapper",
        HookType.AROUND,
        _unwrapped_backend,
        "one backend serves all layers; SGLang would wrap it in its dispatcher for linear-attention layers",
    ),
    Hook(
        CONFIGURATOR + "_handle_max_mamba_cache",
        HookType.AROUND,
        _state_slots,
        "state slots for the running requests and checkpoints first, not a fixed share of memory",
    ),
    Hook(
        CONFIGURATOR + "_calculate_mamba_ratio",
        HookType.AROUND,
        _slots_of_request,
        "the cap on running requests follows from the slots chosen above",
    ),
    Hook(
        SRT + "model_executor.pool_configurator.create_memory_pool_configurator",
        HookType.AROUND,
        _pool_configurator,
        "bytes of a block of this cache; an error if one request of the context length does not fit",
    ),
    Hook(CONFIGURATOR + "_build_hybrid_req_pool", HookType.AROUND, _request_pool, "our state slots behind requests"),
    Hook(CONFIGURATOR + "_build_token_to_kv_pool", HookType.AROUND, _kv_pool, "our blocks behind slot indices"),
    Hook(
        SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        HookType.AROUND,
        schedule.prepare_for_extend,
        "a prefill step takes several checkpoints of a request; SGLang knows one",
    ),
    Hook(
        SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        HookType.AROUND,
        schedule.hand_over,
        "which checkpoints a prefill step takes goes from the scheduler's batch to the backend",
    ),
    Hook(
        SRT + "managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        HookType.REPLACE,
        schedule.plan_request,
        "where checkpoints are taken, and that they go to slots of the checkpoint pool",
    ),
    Hook(
        SRT + "managers.schedule_batch.set_mamba_track_indices_from_reqs",
        HookType.REPLACE,
        schedule.plan_decode,
        "decoding requests keep one rolling checkpoint instead of two slots that alternate",
    ),
    Hook(
        SRT + "managers.schedule_batch.ScheduleBatch.release_req",
        HookType.AROUND,
        schedule.retract_for_memory,
        "tells a retraction for memory from one of all requests",
    ),
    Hook(
        SRT + "managers.schedule_batch.release_kv_cache",
        HookType.AROUND,
        schedule.keep_on_retraction,
        "a retracted request resumes from its last checkpoint if memory allows; SGLang would drop what it generated",
    ),
    Hook(
        SRT + "managers.scheduler.Scheduler.get_init_info",
        HookType.BEFORE,
        check_started,
        "the last moment before a scheduler reports ready: pools, tree, backend and model must be ours",
    ),
    Hook(
        SRT + "server_args.ServerArgs._validate_mamba_extra_buffer",
        HookType.REPLACE,
        lambda self, view, architecture: None,
        "it asks for a GPU because SGLang's own models of this kind have no other kernels",
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
        "torch.Tensor.pin_memory",
        HookType.REPLACE,
        lambda self, *args, **kwargs: self,
        "ScheduleBatch.prepare_for_decode pins host memory, which needs a GPU",
        cpu_only=True,
    ),
)


def hooks_for(on_cpu: bool) -> tuple[Hook, ...]:
    return tuple(hook for hook in HOOKS if on_cpu or not hook.cpu_only)
