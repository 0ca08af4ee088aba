"""Installation of the cache in this process: configuration, backend, model, hooks."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.supported import CONFIGS
from dsv4_sglang.srt.launch.command import config_of
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.plugin import sglang_contract
from dsv4_sglang.srt.plugin.hooks import hooks_of
from dsv4_sglang.srt.plugin.server_context import ARCHITECTURE, BACKEND, PREFIX_CACHE, ServerContext
from dsv4_sglang.srt.sglang import hook_application, release
from dsv4_sglang.srt.sglang.models import config_class

log = logging.getLogger(__name__)

MODEL_PACKAGE = "dsv4_sglang.srt.models"
FUSED_STREAM_THREADS = 256


def activate(context: ServerContext, server_args: Any) -> None:
    """Install the cache, once in a process. Raise LaunchError if SGLang lacks anything that the cache relies on."""
    config = config_of(server_args.model_path, server_args.json_model_override_args)
    hooks = hooks_of(context, on_cpu=server_args.device == "cpu")
    sglang_contract.require([*sglang_contract.flag_differences(), *sglang_contract.hook_differences(hooks)])
    _set_environment(config)
    _declare_state()
    _register_caches(context.options, server_args)
    _apply(hooks)
    _register_model()
    warn_of_release()


def warn_of_release() -> None:
    """Log a warning if the installed release has all expected hooks but is not the supported one."""
    if not release.is_supported():
        said = "dsv4_sglang: %s; its hooks are as expected, but flags that are new in it are not checked"
        log.warning(said, release.version_note())


def _set_environment(config: dict[str, Any]) -> None:
    """Set variables that SGLang reads when its model module is imported, here and in processes that inherit them."""
    if config and "quantization_config" not in config:
        # SGLang's FP8 GEMM of wo_a, on by default, needs an FP8 checkpoint.
        os.environ.setdefault("SGLANG_OPT_FP8_WO_A_GEMM", "0")
    hidden = config.get("hidden_size", 0)
    if hidden % (FUSED_STREAM_THREADS * (8 if hidden <= 4096 else 4)):
        # SGLang's fused kernel of hyper-connections, on by default, divides the hidden dimension of small
        # steps into 8 or 4 parts. It counts channels twice if a part is not a multiple of its threads.
        os.environ.setdefault("SGLANG_OPT_FUSE_MHC_POST_PRE", "0")
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        # If a step of one process fails, the server would wait a minute for core dumps that the others cannot make.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def _declare_state() -> None:
    """Declare in SGLang's config classes of this architecture that the model has a recurrent state."""
    from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model

    for kind in map(config_class, CONFIGS):
        # Snapshots are taken at multiples of this many tokens.
        kind.mamba_chunk_size = BLOCK
        kind.full_attention_layer_ids = property(lambda config: list(range(config.num_hidden_layers)))
        register_linear_attn_model(
            LinearAttnModelSpec(
                config_class=kind,
                backend_class_name=BACKEND,
                arch_names=[ARCHITECTURE],
                support_mamba_cache_extra_buffer=True,
            )
        )


def _register_caches(options: Options, server_args: Any) -> None:
    """Register the attention backend, the prefix cache and, if used, the host cache and its storages."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from dsv4_sglang.srt.attention.backend import HybridCacheBackend
    from dsv4_sglang.srt.plugin.prefix_cache_factory import build_prefix_cache

    register_attention_backend(BACKEND)(HybridCacheBackend)
    build = partial(build_prefix_cache, interval=options.snapshot_interval, tenant_percent=options.tenant_percent)
    register_radix_cache_backend(PREFIX_CACHE, build)
    if server_args.enable_hierarchical_cache:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import register_stack_strategy

        from dsv4_sglang.srt.host_cache.storage import register_storages
        from dsv4_sglang.srt.host_cache.transfers import HostStack

        register_stack_strategy(HostStack(options.max_snapshots, options.host_snapshots))
        if server_args.hicache_storage_backend is not None:
            register_storages()


def _apply(hooks: tuple[sglang_contract.Hook, ...]) -> None:
    """Register and apply the hooks. Raise LaunchError if one was not applied, which SGLang only logs."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    sglangs_log = logging.getLogger(HookRegistry.__module__)
    level = sglangs_log.level
    sglangs_log.setLevel(logging.WARNING)  # one line per hook and process would hide the rest of the log
    try:
        hook_application.apply_hooks()
    finally:
        sglangs_log.setLevel(level)
    missing = [hook for hook in hooks if hook.target not in hook_application.applied_hooks()]
    if missing:
        raise LaunchError(*(f"cannot hook {hook.target}: {hook.reason} ({release.version_note()})" for hook in missing))


def _register_model() -> None:
    """Register the model package. SGLang imports its model classes late, and not at all in the launcher, so set its
    variable for a later import, or add the package to a registry that was imported already."""
    named = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    if named != MODEL_PACKAGE:
        raise LaunchError(f"SGLANG_EXTERNAL_MODEL_PACKAGE is {named}; expected {MODEL_PACKAGE}: unset the variable")
    registry = sys.modules.get("sglang.srt.models.registry")
    if registry is not None:
        registry.ModelRegistry.register(MODEL_PACKAGE, overwrite=True, strict=True)
