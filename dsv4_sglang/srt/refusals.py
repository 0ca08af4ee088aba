"""Flags that this cache cannot serve yet: one clear line each, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS as BLOCK


class Refusal(NamedTuple):
    """`applies` looks at SGLang's ServerArgs as given; `reason` ends the sentence "... is not supported: ".

    `flag` may have fields of the arguments in braces, `{args.page_size}`.
    """

    flag: str
    applies: Callable[[Any], bool]
    reason: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _count(args: Any, name: str) -> int:
    return getattr(args, name, 1) or 1


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: _count(args, name) > 1


def _changed(name: str) -> Callable[[Any], bool]:
    """Whether a flag has another value than its default."""
    return lambda args: getattr(args, name, None) != getattr(type(args), name, None)


def _off_grid(name: str) -> Callable[[Any], bool]:
    """Whether a number of tokens is given (not none or -1) and no multiple of a block."""
    return lambda args: (value := getattr(args, name, None) or 0) > 0 and value % BLOCK != 0


# On a CPU SGLang fills in the last two before it looks at the model.
_DEFAULT_BACKENDS = (None, "dsv4_sglang", "intel_amx", "torch_native")

REFUSALS = (
    Refusal(
        "--speculative-algorithm",
        _is_set("speculative_algorithm"),
        "rejected drafts would stay in the window ring and the compressor tails",
    ),
    Refusal(
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode != "null",
        "state slots and compressed blocks have no transfer between servers",
    ),
    Refusal("--pp-size above 1", _above_one("pp_size"), "pools are sized for all layers in one process"),
    Refusal("--dp-size above 1", _above_one("dp_size"), "it has not been tested"),
    Refusal("--ep-size above 1", _above_one("ep_size"), "it has not been tested"),
    Refusal("--enable-dp-attention", _is_set("enable_dp_attention"), "it has not been tested"),
    Refusal("--enable-prefill-cp", _is_set("enable_prefill_cp"), "a chunk's rows must lie in one process"),
    Refusal("--dcp-size above 1", _above_one("dcp_size"), "a block belongs to one process"),
    Refusal(
        "--enable-hierarchical-cache",
        _is_set("enable_hierarchical_cache"),
        "compressed blocks and checkpoints have no host pool in SGLang",
    ),
    Refusal(
        "--enable-lmcache", _is_set("enable_lmcache"), "it stores rows of one kind a token, which this cache has not"
    ),
    Refusal(
        "--enable-flexkv", _is_set("enable_flexkv"), "it stores rows of one kind a token, which this cache has not"
    ),
    Refusal("--enable-hisparse", _is_set("enable_hisparse"), "it moves rows of SGLang's own pool"),
    Refusal(
        "--radix-cache-backend",
        lambda args: getattr(args, "radix_cache_backend", None) not in (None, "dsv4_sglang"),
        "checkpoints hang on SGLang's unified radix tree",
    ),
    Refusal(
        "--enable-mixed-chunk",
        _is_set("enable_mixed_chunk"),
        "it moves chunks off the grid of blocks and would store wrong checkpoints",
    ),
    Refusal("--enable-dynamic-chunking", _is_set("enable_dynamic_chunking"), "it moves chunks off the grid of blocks"),
    Refusal(
        "--chunked-prefill-size {args.chunked_prefill_size}",
        _off_grid("chunked_prefill_size"),
        f"chunks end at multiples of {BLOCK} tokens, where checkpoints are taken; give one, or -1",
    ),
    Refusal(
        "--mamba-track-interval {args.mamba_track_interval}",
        lambda args: (
            getattr(args, "mamba_track_interval", BLOCK)
            not in (BLOCK, getattr(type(args), "mamba_track_interval", BLOCK))
        ),
        f"a decoding request takes a checkpoint every {BLOCK} tokens and keeps those at multiples of the option "
        '"checkpoint_interval"; set that one instead',
    ),
    Refusal(
        "--mamba-max-states-per-path {args.mamba_max_states_per_path}",
        _changed("mamba_max_states_per_path"),
        'checkpoints are evicted by what they are worth; cap their number with the option "max_checkpoints"',
    ),
    Refusal(
        "--enable-int8-mamba-checkpoint",
        lambda args: _is_set("enable_int8_mamba_checkpoint")(args) or _is_set("int8_mamba_ckpt_size")(args),
        'checkpoints keep the bytes of the state; set their number with the option "max_checkpoints"',
    ),
    Refusal(
        "--mamba-ssm-dtype {args.mamba_ssm_dtype}",
        _is_set("mamba_ssm_dtype"),
        "compressor tails are fp32 and window rows have the format of the entries",
    ),
    Refusal("--enable-two-batch-overlap", _is_set("enable_two_batch_overlap"), "one step has one metadata"),
    Refusal("--enable-pdmux", _is_set("enable_pdmux"), "prefill and decode share one metadata"),
    Refusal("--enable-unified-memory", _is_set("enable_unified_memory"), "it replaces the pools"),
    Refusal("--enable-page-major-kv-layout", _is_set("enable_page_major_kv_layout"), "it replaces the pools"),
    Refusal("--enable-memory-saver", _is_set("enable_memory_saver"), "the pools cannot be released and restored"),
    Refusal("--enable-streaming-session", _is_set("enable_streaming_session"), "it has not been tested"),
    Refusal("--enable-session-radix-cache", _is_set("enable_session_radix_cache"), "it has not been tested"),
    Refusal("--enable-lora", _is_set("enable_lora"), "it has not been tested"),
    Refusal("--enable-torch-compile", _is_set("enable_torch_compile"), "the step's metadata is not traceable"),
    Refusal(
        "--mamba-radix-cache-strategy other than auto and extra_buffer",
        lambda args: args.mamba_radix_cache_strategy not in ("auto", "extra_buffer"),
        "checkpoints are taken into extra slots",
    ),
    Refusal(
        "--max-mamba-cache-size",
        _is_set("max_mamba_cache_size"),
        'state slots follow from --max-running-requests and the option "max_checkpoints"',
    ),
    Refusal(
        "--mamba-full-memory-ratio",
        _changed("mamba_full_memory_ratio"),
        'state slots follow from --max-running-requests and the option "max_checkpoints"',
    ),
    Refusal(
        "--swa-full-tokens-ratio",
        _changed("swa_full_tokens_ratio"),
        "window rows are state of a request, of which there are as many as requests and checkpoints",
    ),
    Refusal(
        "--cpu-offload-gb", _is_set("cpu_offload_gb"), "projections of a layer lie side by side and cannot move apart"
    ),
    Refusal("--dllm-algorithm", _is_set("dllm_algorithm"), "it rewrites tokens that the tails have already taken up"),
    Refusal(
        "--prefill-only-disable-kv-cache",
        _is_set("prefill_only_disable_kv_cache"),
        "every chunk reads the state that the one before it left",
    ),
    Refusal(
        f"--page-size other than {BLOCK}",
        lambda args: args.page_size not in (None, BLOCK),
        f"a block of this cache has {BLOCK} tokens",
    ),
    Refusal(
        "--attention-backend",
        lambda args: any(
            getattr(args, name, None) not in _DEFAULT_BACKENDS
            for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        ),
        "this cache is read by its own backend",
    ),
    Refusal(
        "--cuda-graph-backend-prefill",
        lambda args: args.cuda_graph_config.prefill.backend != "disabled",
        "prefill steps have no fixed shape",
    ),
    Refusal(
        "--cuda-graph-backend-decode other than full and disabled",
        lambda args: args.cuda_graph_config.decode.backend not in ("full", "disabled"),
        "a decode step, metadata included, is one graph",
    ),
    Refusal(
        "--kv-cache-dtype other than auto, fp8_e4m3 and bfloat16",
        lambda args: args.kv_cache_dtype not in ("auto", "fp8_e4m3", "bfloat16", "bf16"),
        "rows have 584 or 1024 bytes",
    ),
    Refusal(
        "--enable-deepseek-v4-fp4-indexer",
        _is_set("enable_deepseek_v4_fp4_indexer"),
        'choose the keys with the option "indexer_format"',
    ),
    Refusal(
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        lambda args: os.environ.get("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "").lower() in ("1", "true"),
        "checkpoints hang on SGLang's unified radix tree",
    ),
)


def refuse_unsupported(args: Any, quantised: bool = False, output_groups: int | None = None) -> None:
    """Raise with every refused flag of `args`, one line each; `quantised`: the checkpoint's weights are;
    `output_groups`: of its attention's heads."""
    found = [f"{r.flag.format(args=args)} is not supported: {r.reason}" for r in REFUSALS if r.applies(args)]
    if quantised and args.device == "cpu":
        found.append(
            "--device cpu is not supported with a quantised checkpoint: SGLang has no such layers without a GPU"
        )
    processes = _count(args, "tp_size")
    if output_groups and output_groups % processes:
        found.append(
            f"--tp-size {processes} is not supported: the {output_groups} groups of output heads are divided evenly; "
            f"give {' or '.join(str(n) for n in range(1, output_groups + 1) if output_groups % n == 0)}"
        )
    if found:
        raise ValueError("dsv4_sglang refuses to start.\n" + "\n".join(found))
