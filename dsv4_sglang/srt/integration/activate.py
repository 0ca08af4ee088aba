"""Put the cache in place in this process: configuration facts, backend, model, hooks."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration import compat, sglang_contract
from dsv4_sglang.srt.integration.flag_validation import reject_release
from dsv4_sglang.srt.integration.hooks import Hook, hooks_of
from dsv4_sglang.srt.integration.launch_command import config_of
from dsv4_sglang.srt.integration.launch_error import LaunchError
from dsv4_sglang.srt.integration.options import Options
from dsv4_sglang.srt.integration.server_context import ARCHITECTURE, BACKEND, PREFIX_CACHE, Launch

log = logging.getLogger(__name__)

MODEL_PACKAGE = "dsv4_sglang.srt.models"
FUSED_STREAM_THREADS = 256


def activate(launch: Launch, server_args: Any) -> None:
    """Once a process. Raises if anything that the cache relies on is not there."""
    config = config_of(server_args.model_path)
    reject_release(config.get("model_type"))
    hooks = hooks_of(launch, on_cpu=server_args.device == "cpu")
    sglang_contract.require([*sglang_contract.flag_differences(), *sglang_contract.hook_differences(hooks)])
    _set_environment(config)
    _declare_state()
    _register_backend()
    _register_prefix_cache(launch.options.snapshot_interval)
    if server_args.enable_hierarchical_cache:
        _register_host_cache(launch.options, server_args.hicache_storage_backend)
    _apply(hooks)
    _register_model()
    warn_of_release()


def warn_of_release() -> None:
    """Log one warning if the installed release, whose hooks are as expected, is not validated."""
    if compat.validation() is None:
        said = "dsv4_sglang: %s; its hooks are as expected, but flags that are new in it are not checked"
        log.warning(said, compat.version_note())


def _set_environment(config: dict[str, Any]) -> None:
    """SGLang reads these here and in the processes that inherit the environment, the first when its model module is
    imported."""
    if config and "quantization_config" not in config:
        # Its FP8 GEMM of wo_a, on by default, wants an FP8 checkpoint.
        os.environ.setdefault("SGLANG_OPT_FP8_WO_A_GEMM", "0")
    hidden = config.get("hidden_size", 0)
    if hidden % (FUSED_STREAM_THREADS * (8 if hidden <= 4096 else 4)):
        # SGLang's fused kernel of hyper-connections, on by default since 0.5.23, divides the hidden states of small
        # steps into 8 or 4 parts, and counts channels twice where a part does not fill its threads.
        os.environ.setdefault("SGLANG_OPT_FUSE_MHC_POST_PRE", "0")
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        # When a step of one process fails, the server would wait a minute for dumps that the others cannot make.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def _declare_state() -> None:
    """Give SGLang's config classes of this architecture what makes it a model with a recurrent state."""
    from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model

    for config_class in map(compat.config_class, compat.MODEL_TYPES):
        # Snapshots end at multiples of this many tokens.
        config_class.mamba_chunk_size = BLOCK
        config_class.full_attention_layer_ids = property(lambda config: list(range(config.num_hidden_layers)))
        register_linear_attn_model(
            LinearAttnModelSpec(
                config_class=config_class,
                backend_class_name=BACKEND,
                arch_names=[ARCHITECTURE],
                support_mamba_cache_extra_buffer=True,
            )
        )


def _register_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from dsv4_sglang.srt.attention.backend_v41 import backend_class

    register_attention_backend(BACKEND)(lambda runner: backend_class(runner.model_config.hf_config)(runner))


def _register_prefix_cache(interval: int) -> None:
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from dsv4_sglang.srt.prefix_cache.cache import build_prefix_cache

    register_radix_cache_backend(PREFIX_CACHE, partial(build_prefix_cache, interval=interval))


def _register_host_cache(options: Options, storage: str | None) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import register_stack_strategy

    from dsv4_sglang.srt.host_cache.storage import register_storages
    from dsv4_sglang.srt.host_cache.transfers import HostStack

    register_stack_strategy(HostStack(options.max_snapshots, options.host_snapshots))
    if storage is not None:
        register_storages()


def _apply(hooks: tuple[Hook, ...]) -> None:
    """Register and apply hooks; SGLang only logs one that fails, so each is looked up afterwards."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    sglangs_log = logging.getLogger(HookRegistry.__module__)
    level = sglangs_log.level
    sglangs_log.setLevel(logging.WARNING)  # a line a hook, in every process, would hide what else the log says
    try:
        HookRegistry.apply_hooks()
    finally:
        sglangs_log.setLevel(level)
    missing = [hook for hook in hooks if hook.target not in compat.applied_hooks()]
    if missing:
        raise LaunchError(*(f"cannot hook {hook.target}: {hook.reason} ({compat.version_note()})" for hook in missing))


def _register_model() -> None:
    """SGLang imports its model classes late, and not in the launcher: name our package for then, or add it now."""
    named = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    if named != MODEL_PACKAGE:
        raise LaunchError(f"SGLANG_EXTERNAL_MODEL_PACKAGE is {named}; expected {MODEL_PACKAGE}: unset the variable")
    registry = sys.modules.get("sglang.srt.models.registry")
    if registry is not None:
        registry.ModelRegistry.register(MODEL_PACKAGE, overwrite=True, strict=True)
