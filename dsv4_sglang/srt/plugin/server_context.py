"""Decisions of one server in this process, and the hooks through which SGLang gets them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.config import ModelConfig
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.srt.attention import prefill_graphs
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.configurator import BlockConfigurator
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.memory.sizing import StateDemand, demand_of, memory_after_slots, table
from dsv4_sglang.srt.plugin.flag_validation import reject_for_machine, reject_given, reject_resolved
from dsv4_sglang.srt.plugin.startup_check import check_started
from dsv4_sglang.srt.sglang.flags import current_flags, flags_are_resolved, set_flags
from dsv4_sglang.srt.sglang.models import model_config

if TYPE_CHECKING:
    from dsv4_sglang.srt.memory.pools import CacheKVPool

log = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV4ForCausalLM"
DRAFT_ARCHITECTURES = ("DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark")
BACKEND = "dsv4_sglang"
PREFIX_CACHE = "dsv4_sglang"
GREEDY_ON_CPU = (
    "dsv4_sglang: with --speculative-algorithm %s on a CPU, all tokens of an answer after the first are chosen "
    "greedily, whatever the sampling parameters of a request: SGLang has no other way to verify drafts on a CPU"
)
EAGER_STEPS = (
    "dsv4_sglang: prefill steps of %s tokens run eagerly, which takes longer: a graph serves steps of at least half "
    "its tokens. Let each size of --cuda-graph-bs-prefill be at most twice the one before it"
)


class ServerContext:
    """A server in this process: its options, and the decisions that follow from them.

    The methods are hooks of the table in `hooks`, which gives the reason for each. Their parameters have SGLang's
    names, which is checked at start. The layout and the number of slots are known once the pools are sized.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.model: ModelConfig | None = None
        self.layout: CacheLayout | None = None
        self.demand: StateDemand | None = None
        self.pool: CacheKVPool | None = None

    def begin(self, server_args: Any) -> None:
        """Check the flags when a model config is built. In a scheduler process this is the first time that they are
        available, already resolved."""
        if flags_are_resolved(server_args):
            reject_resolved(current_flags(server_args))

    def declarations(self, original: Callable[..., Any], architecture: str, server_args: Any, hf_config: Any) -> Any:
        """Check the flags, and add the settings of this cache to SGLang's declarations for the model.

        Raises:
            LaunchError: the flags or the model are not supported.
        """
        if architecture != ARCHITECTURE:
            raise LaunchError(f"the model is a {architecture}; expected {ARCHITECTURE}")
        reject_given(server_args, hf_config, self.options)
        reject_for_machine(server_args)
        try:
            model = model_config(hf_config)
        except (KeyError, TypeError, ValueError) as error:
            raise LaunchError(f"config.json of {server_args.model_path}: {error.args[0]}") from None
        prefill_graphs.switch_on(server_args)
        if isinstance(model, V41Config):
            # On a GPU SGLang computes layers 20 to 39 for the last 128 tokens of a prompt only, which is not exact.
            set_flags(server_args, enable_decoder_swa_bounded_replay=False)
        # A decoding request takes a rolling snapshot at the end of every block.
        set_flags(server_args, mamba_track_interval=BLOCK, radix_cache_backend=PREFIX_CACHE)
        if not server_args.disable_radix_cache:
            # SGLang may have chosen a strategy before the page size was known.
            set_flags(server_args, mamba_radix_cache_strategy="extra_buffer")
        ours = {"page_size": BLOCK, "attention_backend": BACKEND}
        # SGLang divides its memory between window pages and other pages. This cache has no window pages.
        declared = [
            (source, {k: v for k, v in values.items() if k != "swa_full_tokens_ratio"})
            for source, values in original(architecture, server_args, hf_config)
        ]
        return [*declared, ("dsv4_sglang", ours)]

    def resolved(self, original: Callable[..., None], server_args: Any) -> None:
        """Check the resolved flags."""
        original(server_args)
        args = current_flags(server_args)
        reject_resolved(args)
        if args.device == "cpu" and args.speculative_algorithm is not None:
            log.warning(GREEDY_ON_CPU, args.speculative_algorithm)
        if eager := prefill_graphs.steps_without_graph(server_args):
            log.warning(EAGER_STEPS, " and ".join(f"{first} to {last}" for first, last in eager))

    def is_hybrid_swa(
        self, original: Callable[..., bool], model_architectures: list[str], *args: Any, **kwargs: Any
    ) -> bool:
        """Return False for this package's models, whose window is not a second pool of pages."""
        ours = {ARCHITECTURE, *DRAFT_ARCHITECTURES}.intersection(model_architectures)
        return not ours and original(model_architectures, *args, **kwargs)

    def layout_for(self, configurator: Any) -> CacheLayout:
        """Return the cache layout. The dtype of the entries is known only after the model is loaded."""
        if self.layout is None:
            args = current_flags(configurator.server_args)
            draft_layers = 0 if args.speculative_algorithm is None else 1
            if args.speculative_algorithm == "DSPARK":
                # DSPARK has a stage for each layer of the served model that it reads.
                draft_layers = len(configurator.spec_aux_config.dflash_target_layer_ids)
            self.model = model_config(configurator.model_config.hf_config)
            self.layout = served_layout(
                self.model,
                configurator.kv_cache_dtype,
                self.options,
                configurator.device,
                draft_tokens=args.speculative_num_draft_tokens or 0,
                draft_layers=draft_layers,
            )
        return self.layout

    def state_slots(self, original: Callable[..., float], configurator: Any, total_rest_memory: float) -> float:
        """Choose the number of state slots. Return the GiB that are left for blocks."""
        from sglang.srt.runtime_context import get_context, get_disagg, get_memory, get_parallel, get_schedule

        layout, settings, disaggregation = self.layout_for(configurator), get_schedule(), get_disagg()
        # Each rank of DP attention runs its share of the requests.
        running = settings.max_running_requests // get_parallel().attn_dp_size
        arriving = (
            disaggregation.disaggregation_decode_extra_slots if disaggregation.disaggregation_mode == "decode" else 0
        )
        step_tokens = settings.chunked_prefill_size or 0
        self.demand = demand_of(
            layout,
            total_rest_memory,
            running=running,
            arriving=arriving,
            step_tokens=step_tokens if step_tokens > 0 else settings.max_prefill_tokens,
            max_snapshots=self.options.max_snapshots,
            max_total_tokens=current_flags(configurator.server_args).max_total_tokens,
            prefix_cache=not get_memory().disable_radix_cache,
        )
        get_context().override("dsv4_sglang.state_slots", max_mamba_cache_size=running + arriving)
        return memory_after_slots(layout, self.demand, total_rest_memory)

    def slots_of_request(self, original: Callable[..., int], configurator: Any) -> int:
        """Return 1 once the slots are chosen. SGLang divides the slots by this to limit the running requests, but the
        slots were chosen for a given number of requests."""
        return original(configurator) if self.demand is None else 1

    def pool_configurator(self, original: Callable[..., Any], kvc: Any) -> BlockConfigurator:
        """Return the configurator that sizes the block pool."""
        return BlockConfigurator(self.layout_for(kvc), kvc.model_config.context_len)

    def pools_on_cpu(self, original: Callable[..., Any], configurator: Any, *, pre_model_load_memory: int) -> Any:
        """Hide an FP8 dtype while SGLang configures the pools. Only the layout needs the dtype, and it is built
        before."""
        self.layout_for(configurator)
        dtype, configurator.kv_cache_dtype = configurator.kv_cache_dtype, torch.bfloat16
        try:
            return original(configurator, pre_model_load_memory=pre_model_load_memory)
        finally:
            configurator.kv_cache_dtype = dtype

    def request_pool(
        self,
        original: Callable[..., Any],
        configurator: Any,
        *,
        max_num_reqs: int,
        extra_max_context_len: int,
        **of_decode: int,
    ) -> Any:
        """Build the request pool. `of_decode`: the slots for arriving requests of a decode server."""
        from sglang.srt.runtime_context import get_exec, get_schedule

        from dsv4_sglang.srt.features.disaggregation import DecodeStateReqToTokenPool
        from dsv4_sglang.srt.memory.pools import StateParams, StateReqToTokenPool

        layout, demand = self.layout_for(configurator), self.demand
        assert demand is not None, "state slots are chosen before pools are built"
        kind: Callable[..., Any] = StateReqToTokenPool
        more: dict[str, int | None] = {"mamba_spec_state_size": max_num_reqs}
        if of_decode:
            kind, more = DecodeStateReqToTokenPool, {**of_decode, "speculative_num_draft_tokens": None}
        return kind(
            size=max_num_reqs,
            mamba_size=get_schedule().max_mamba_cache_size,
            max_context_len=configurator.model_config.context_len + extra_max_context_len,
            device=configurator.device,
            enable_memory_saver=get_exec().features.enable_memory_saver,
            cache_params=StateParams.of(layout, demand.staging, demand.snapshots),
            mamba_layer_ids=list(range(len(layout.schemas))),
            # SGLang would give every request two more slots for snapshots.
            enable_mamba_extra_buffer=False,
            enable_overlap_schedule=not get_schedule().disable_overlap_schedule,
            **more,
        )

    def kv_pool(
        self, original: Callable[..., Any], configurator: Any, *, sizes: Any, req_to_token_pool: Any, **kwargs: Any
    ) -> Any:
        """Build the KV pool. A draft model shares that of the served model."""
        from sglang.srt.runtime_context import get_exec

        from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool

        if configurator.is_draft_worker:
            assert self.pool is not None, "the pools of the served model are built before those of the draft model"
            return self.pool
        layout = self.layout_for(configurator)
        compressed = CompressedKVPool(
            size=sizes.max_total_num_tokens,
            page_size=configurator.pool_page_size,
            dtype=configurator.kv_cache_dtype,
            layout=layout,
            device=configurator.device,
            enable_memory_saver=get_exec().features.enable_memory_saver,
        )
        assert self.demand is not None, "state slots are chosen before blocks"
        log.info(table(layout, sizes.max_total_num_tokens, self.demand))
        self.pool = CacheKVPool(compressed, req_to_token_pool.mamba_pool)
        return self.pool

    def started(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Check the classes of a scheduler before it reports ready, let it answer lookups, take hints and flush, and
        start the watchdog of loads."""
        from dsv4_sglang.srt.features.flush import settle_before_flushes
        from dsv4_sglang.srt.features.hints import limit_pins, receive_times
        from dsv4_sglang.srt.features.lookup import answer_lookups
        from dsv4_sglang.srt.host_cache.cache import HostPrefixCache

        check_started(scheduler)
        answer_lookups(scheduler)
        receive_times(scheduler)
        settle_before_flushes(scheduler)
        limit_pins(scheduler, self.options.pin_percent, self.options.tenant_percent)
        if isinstance(scheduler.tree_cache, HostPrefixCache):
            scheduler.tree_cache.cache_controller.watch.start(scheduler, self.options.host_load_timeout_seconds)
        return original(scheduler)

    def name_cache(self, original: Callable[..., None], manager: Any, args: Any, *arguments: Any, **named: Any) -> None:
        """Append the name of the cache layout to the KV cache dtype, which both servers of a transfer compare."""
        from dsv4_sglang.srt.features.disaggregation import cache_name

        assert self.layout is not None and self.model is not None, "pools are built before they are offered"
        name = cache_name(self.layout, self.model)
        args.kv_cache_dtype_str = f"{args.kv_cache_dtype_str} ({name})"
        original(manager, args, *arguments, **named)
