"""Values that the installed SGLang computes from given flags without starting a server.

They are the resolved flags, its model config, and the capacity of its own cache.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from dsv4_sglang.srt.launch.command import prepare_this_process
from dsv4_sglang.srt.memory.sizing import GIB
from dsv4_sglang.srt.sglang.flags import resolve_flags
from dsv4_sglang.srt.sglang.planning import published, resolving_for_cuda

# Exceptions by which SGLang rejects flags.
REJECTIONS = (ValueError, AssertionError, RuntimeError)


def import_sglang() -> None:
    """Import SGLang in a process that only plans: no visible GPU, no logging."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    prepare_this_process(cpu=True)
    warnings.filterwarnings("ignore", module="sglang")
    # SGLang and its dependencies print warnings about what a machine without a GPU lacks.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import sglang.srt.models.deepseek_v4  # noqa: F401
    for name in ("sglang", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def resolved_flags(config_json: str, **given: Any) -> tuple[Any, Any, Any]:
    """Resolve the flags of a server on GPUs.

    Args:
        config_json: Text of the model's config.json.
        given: Fields of SGLang's ServerArgs.

    Returns:
        The ServerArgs, their flags as resolved, and SGLang's config of the model.

    Raises:
        REJECTIONS: SGLang rejects a flag.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder, resolving_for_cuda():
        (Path(folder) / "config.json").write_text(config_json)
        server_args = ServerArgs(
            **{"model_path": folder, "skip_tokenizer_init": True, "load_format": "dummy", "device": "cuda", **given}
        )
        flags = resolve_flags(server_args)
        return server_args, flags, ModelConfig.from_server_args(server_args)


class InTreeCapacity(NamedTuple):
    """Capacity of one process of SGLang's own cache."""

    tokens: int
    token_bytes: float  # bytes per token of context


def in_tree_capacity(config_json: str, available_gib: float, **given: Any) -> InTreeCapacity:
    """Compute the size of the pools of SGLang's own cache, with its `DSV4PoolConfigurator`.

    It is called with the flags as SGLang resolves them for this model, so that defaults that depend on the model, such
    as the ratio of the window pool, are those of a server.

    Args:
        config_json: Text of the model's config.json.
        available_gib: Memory that the weights leave for the cache of one process.
        given: Fields of SGLang's ServerArgs, as a user gives them.

    Raises:
        REJECTIONS: SGLang rejects a flag, or its pools do not fit.
    """
    server_args, flags, model_config = resolved_flags(config_json, **given)
    from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # The flag as given: SGLang resolves --dp-size with --enable-dp-attention to a different flag.
    ranks = given.get("dp_size", 1) if given.get("enable_dp_attention") else 1
    parallel = {"pp_size": 1, "attn_dp_size": ranks}
    configurator_input = SimpleNamespace(
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype_str=flags.kv_cache_dtype,
        layer_info=SimpleNamespace(start_layer=0, end_layer=model_config.num_hidden_layers),
        sliding_window_size=model_config.window_size,
        page_size=flags.page_size,
        spec_algorithm=SpeculativeAlgorithm.from_string(flags.speculative_algorithm),
        spec_aux_config=None,
        ps=SimpleNamespace(**parallel),
        **parallel,
    )
    with published(server_args, flags.tp_size, ranks):
        configurator = DSV4PoolConfigurator(configurator_input)
        sizes = configurator.calculate_pool_sizes(int(available_gib * GIB), flags.page_size)
    return InTreeCapacity(sizes.max_total_num_tokens, configurator.bytes_per_full_token)
