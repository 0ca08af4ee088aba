"""Flags that this cache cannot serve: one clear line each, before anything is loaded.

`flags` lists those that may only have their default; here are those of which some values are served.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

from sglang.srt.environ import envs

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS
from dsv4_sglang.model.v41 import MODEL_TYPES as V41_MODEL_TYPES
from dsv4_sglang.srt import compat, flags
from dsv4_sglang.srt.options import Options


class Limit(NamedTuple):
    """A field of which `serves` says whether a value other than the default is served; `reason` ends the sentence
    "--flag value is not supported: ".

    `as_given`: SGLang may change the field itself to what is not served, so only the flag as given is refused.
    """

    field: str
    serves: Callable[[Any], bool]
    reason: str
    as_given: bool = False


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def _on_grid(tokens: int) -> bool:
    """A multiple of a block; 0 and -1 say "no limit"."""
    return tokens <= 0 or tokens % BLOCK == 0


STORAGES = ("file", "nixl", "mooncake")
"""Behind the host tier."""
STORAGE_FOLDERS = {
    "file": envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR,
    "nixl": envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR,
}
"""The variable that names the folder of a storage. Without it, it is one that all servers of a machine share."""
_READ_BY = "this cache is read by its own backend"

LIMITS = (
    Limit(
        "chunked_prefill_size",
        _on_grid,
        f"chunks end at multiples of {BLOCK} tokens, where checkpoints are taken; give one, or -1",
    ),
    Limit(
        "mamba_track_interval",
        _one_of(BLOCK),
        f"a decoding request takes a checkpoint every {BLOCK} tokens and keeps those at multiples of the option "
        '"checkpoint_interval"; set that one instead',
    ),
    Limit(
        "mamba_radix_cache_strategy",
        _one_of("extra_buffer"),
        "checkpoints are taken into extra slots; give auto or extra_buffer",
    ),
    Limit("page_size", _one_of(BLOCK), f"a block of this cache has {BLOCK} tokens"),
    # On a CPU SGLang fills in the last two before it looks at the model.
    Limit("attention_backend", _one_of("dsv4_sglang", "intel_amx", "torch_native"), _READ_BY),
    Limit("prefill_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit("decode_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit("radix_cache_backend", _one_of("dsv4_sglang"), "checkpoints hang on SGLang's unified radix tree"),
    Limit("schedule_policy", lambda policy: policy != "dfs-weight", "it walks SGLang's plain radix tree"),
    Limit(
        "kv_cache_dtype",
        _one_of("fp8_e4m3", "bfloat16", "bf16"),
        "rows are FP8 or bfloat16; give auto, fp8_e4m3 or bfloat16",
    ),
    Limit("dtype", _one_of("bfloat16", "float32", "float"), "the kernels take bfloat16, on a CPU float32, too"),
    Limit("device", _one_of("cuda", "cpu"), "the kernels are for CUDA, the formulas for a CPU"),
    Limit("model_impl", _one_of("sglang"), "layers come from SGLang's implementation of the model"),
    Limit(
        "quantization",
        _one_of("fp8"),
        "weights are taken as the checkpoint has them; quantising them at start has not been tested",
        as_given=True,
    ),
    Limit(
        "speculative_algorithm",
        _one_of("EAGLE", "NEXTN", "DSPARK"),
        "drafts come from the model's own NextN layer or DSPARK head; give EAGLE or DSPARK",
    ),
    # SGLang sets it for the worker of DSPARK's draft model.
    Limit("speculative_draft_attention_backend", _one_of("dsv4_sglang"), _READ_BY),
    Limit(
        "speculative_eagle_topk",
        _one_of(1),
        "drafts are a chain, so that a request goes on from one of its lengths; give 1",
    ),
    Limit(
        "speculative_num_draft_tokens",
        lambda tokens: tokens <= MAX_DRAFT_TOKENS,
        f"rings and tails have room for {MAX_DRAFT_TOKENS} tokens of a request at once; give that or less",
    ),
    Limit(
        "speculative_dspark_block_size",
        lambda tokens: tokens < MAX_DRAFT_TOKENS,
        f"a block is verified with the token before it, and rings have room for {MAX_DRAFT_TOKENS} tokens of a request "
        f"at once; give {MAX_DRAFT_TOKENS - 1} or less",
    ),
    Limit("hicache_ratio", lambda ratio: ratio > 0, "the host has so many times what the device has; give more than 0"),
    Limit("hicache_size", lambda size: size >= 0, "it is a number of GB; give one, or 0 for --hicache-ratio"),
    Limit("hicache_io_backend", _one_of("kernel"), "copies are kernels of this package; give kernel"),
    Limit(
        "hicache_mem_layout",
        _one_of("page_first"),
        "a host block is one row of all layers; give page_first, which is the nearest to it",
    ),
    Limit(
        "hicache_storage_backend",
        _one_of(*STORAGES),
        "blocks and checkpoints have not been stored there; give file, nixl or mooncake",
    ),
    Limit(
        "disaggregation_transfer_backend",
        _one_of("mooncake", "mooncake_tcp", "nixl"),
        "blocks and state slots have travelled by Mooncake and NIXL only; give mooncake, mooncake_tcp or nixl",
    ),
    Limit(
        "num_reserved_decode_tokens",
        lambda tokens: tokens >= BLOCK,
        f"a request takes a block of {BLOCK} tokens at a time, and is aborted if there is none while all others are on "
        f"their way; give {BLOCK} or more",
    ),
    Limit("moe_a2a_backend", _one_of("deepep"), "tokens go to experts by all-reduce or DeepEP; give none or deepep"),
    Limit(
        "load_format",
        _one_of("safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer"),
        "weights in this form have not been tested",
        as_given=True,
    ),
)


def flag(field: str) -> str:
    """The flag of a field of ServerArgs."""
    return "--" + field.replace("_", "-").replace("ep-join", "elastic-ep-join")


def _named(field: str, value: object) -> str:
    return flag(field) if value is True else f"{flag(field)} {value}"


def _given(value: object, default: object) -> bool:
    """Whether a value is another than its default; None, False, 0 and "" are all "not given"."""
    return value != default and bool(value or default)


def _refused(args: Any, resolved: bool) -> Iterable[tuple[str, str]]:
    """(flag, reason) of what of `args` is not served; `resolved`: SGLang has filled in what follows from flags."""
    defaults = compat.flag_defaults()
    for group in flags.REFUSED:
        for field in group.fields.split():
            if field not in defaults:  # another release has it
                continue
            if not (resolved and group.ignored) and _given(value := getattr(args, field), defaults[field]):
                yield _named(field, value), group.reason
    for limit in LIMITS:
        value = getattr(args, limit.field)
        if not (resolved and limit.as_given) and _given(value, defaults[limit.field]) and not limit.serves(value):
            yield _named(limit.field, value), limit.reason
    graphs = args.cuda_graph_config
    if graphs is not None and graphs.prefill.backend not in ("breakable", "disabled"):
        backend = f"--cuda-graph-backend-prefill {graphs.prefill.backend}"
        yield backend, "a short prefill step is one breakable graph without breaks; give breakable or disabled"
    if graphs is not None and graphs.prefill.backend == "breakable" and args.device == "cpu":
        yield "--cuda-graph-backend-prefill breakable", "CUDA graphs need a GPU; leave it out"
    if graphs is not None and graphs.decode.backend not in ("full", "disabled"):
        backend = f"--cuda-graph-backend-decode {graphs.decode.backend}"
        yield backend, "a decode step, metadata included, is one graph; give full or disabled"
    if os.environ.get("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "").lower() in ("1", "true"):
        yield "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "checkpoints hang on SGLang's unified radix tree"
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true"):
        yield "SGLANG_RUST_SERVER", "its requests pass by the validation of their fields; leave it out"


def _unknown(args: Any) -> Iterable[tuple[str, str]]:
    """Flags that are given and that `flags` does not list."""
    listed = flags.known()
    for field, default in compat.flag_defaults().items():
        if field not in listed and _given(value := getattr(args, field), default):
            yield _named(field, value), f"it is not known to this package ({compat.version_note()})"


def _attention_ranks(args: Any) -> int:
    """Ranks of DP attention, each with a cache and requests of its own."""
    return args.dp_size if args.enable_dp_attention else 1


def _refused_in_parallel(args: Any) -> Iterable[tuple[str, str]]:
    """What does not fit the number of processes; `args` as given, since SGLang divides chunks by the ranks later."""
    ranks = _attention_ranks(args)
    if args.dp_size > ranks:
        yield (
            f"--dp-size {args.dp_size}",
            "copies of the model share nothing: start as many servers, or give --enable-dp-attention",
        )
    if ranks < 2:
        return
    if args.device != "cpu" and not compat.SERVES_DP_ATTENTION:
        reason = "its exchange of tokens adds up attention since SGLang 0.5.23, which has run on CPUs only; use 0.5.17"
        yield "--enable-dp-attention", reason
    if args.tp_size % ranks:
        yield f"--dp-size {ranks}", f"the {args.tp_size} processes of --tp-size are divided evenly among the ranks"
    chunk, running = args.chunked_prefill_size, args.max_running_requests
    if chunk is not None and _on_grid(chunk) and chunk > 0 and chunk % (ranks * BLOCK):
        yield (
            f"--chunked-prefill-size {chunk}",
            f"each of the {ranks} attention ranks takes a part, and parts end at multiples of {BLOCK} tokens; "
            f"give a multiple of {ranks * BLOCK}, or -1",
        )
    if running is not None and running < ranks:
        yield (
            f"--max-running-requests {running}",
            f"each of the {ranks} attention ranks serves a part; give {ranks} or more",
        )


def _refused_with_dspark(args: Any) -> Iterable[tuple[str, str]]:
    """What SGLang's DSPARK can, or asks for, and this cache does not serve."""
    if args.speculative_algorithm != "DSPARK":
        return
    if not compat.SERVES_DSPARK:
        reason = "its worker drafts in another way in SGLang 0.5.18 to 0.5.22; use 0.5.17 or 0.5.23"
        yield "--speculative-algorithm DSPARK", reason
    mode = os.environ.get("SGLANG_RAGGED_VERIFY_MODE", "static")
    if mode != "static":
        reason = "a verify step has as many tokens of each request; give static, or leave it out"
        yield f"SGLANG_RAGGED_VERIFY_MODE={mode}", reason
    if args.enable_dp_attention:
        reason = (
            "SGLang wants --enable-dp-lm-head with it, which has not been tested here; give EAGLE, or --tp-size alone"
        )
        yield "--speculative-algorithm DSPARK with --enable-dp-attention", reason


def _refused_with_host_tier(args: Any) -> Iterable[tuple[str, str]]:
    """What the host tier has not been seen to do, and what is nothing without it."""
    if not args.enable_hierarchical_cache:
        if args.hicache_storage_backend in STORAGES:
            name = f"--hicache-storage-backend {args.hicache_storage_backend}"
            yield name, "it stands behind the host tier; give --enable-hierarchical-cache"
        return
    if not compat.SERVES_HOST_TIER:
        reason = "the tree and the controller of copies are others in SGLang 0.5.18 to 0.5.22; use 0.5.17 or 0.5.23"
        yield "--enable-hierarchical-cache", reason
    variable = STORAGE_FOLDERS.get(args.hicache_storage_backend)
    if variable is not None and args.load_format == "dummy" and not variable.get():
        yield (
            f"--hicache-storage-backend {args.hicache_storage_backend} with --load-format dummy",
            "what random weights compute is stored only in a folder that is named; "
            f"set {variable.name}, or leave the storage out",
        )


def _refused_with_disaggregation(args: Any) -> Iterable[tuple[str, str]]:
    """What a server that only prefills, or only decodes, has not been seen to do."""
    mode = args.disaggregation_mode
    if mode == "null":
        return
    if not compat.SERVES_DISAGGREGATION:
        reason = "what a retraction copies is other in SGLang 0.5.18 to 0.5.22; use 0.5.17 or 0.5.23"
        yield f"--disaggregation-mode {mode}", reason
    if args.device == "cpu" and args.disaggregation_transfer_backend == "nixl":
        yield "--disaggregation-transfer-backend nixl", "SGLang has it take memory of GPUs only; give mooncake_tcp"
    if args.enable_dp_attention:
        reason = "with --enable-dp-attention it has not been tested; give --tp-size alone"
        yield f"--disaggregation-mode {mode}", reason
    if args.speculative_algorithm == "DSPARK":
        reason = "with --speculative-algorithm DSPARK it has not been tested; give EAGLE if there is a NextN layer"
        yield f"--disaggregation-mode {mode}", reason
    if args.enable_hierarchical_cache and mode == "decode":
        yield "--enable-hierarchical-cache", "a decode server has no prefix cache; give it to the prefill server"


def _refused_with_memory_saver(args: Any) -> Iterable[tuple[str, str]]:
    """Where memory is not given back, or has not been seen to come again."""
    if not args.enable_memory_saver:
        return
    if args.device == "cpu":
        reason = "it gives back memory of a GPU; leave it out: a server without it sleeps and wakes, too"
        yield "--enable-memory-saver", reason
    if args.disaggregation_mode != "null":
        reason = f"with --disaggregation-mode {args.disaggregation_mode} it has not been tested"
        yield "--enable-memory-saver", reason


def _has_no_head(algorithm: str, hf_config: Any) -> str | None:
    """Why a checkpoint has no drafts for an algorithm. Both heads are stored under one name: it has one of them."""
    has_dspark = bool(getattr(hf_config, "dspark_target_layer_ids", None))
    if algorithm == "DSPARK":
        return None if has_dspark else "the checkpoint has no DSPARK head (dspark_target_layer_ids in its config.json)"
    if has_dspark:
        return "the checkpoint has a DSPARK head and no NextN layer; give DSPARK"
    return None if getattr(hf_config, "num_nextn_predict_layers", 0) else "the checkpoint has no NextN layer"


def _refused_for_model(args: Any, hf_config: Any) -> Iterable[tuple[str, str]]:
    """What the model's config has no place for."""
    own_drafts = args.speculative_draft_model_path in (None, args.model_path)
    if args.speculative_algorithm and own_drafts and (reason := _has_no_head(args.speculative_algorithm, hf_config)):
        yield f"--speculative-algorithm {args.speculative_algorithm}", reason
    if args.device == "cpu" and getattr(hf_config, "quantization_config", None) is not None:
        yield "--device cpu", "the checkpoint is quantised, and SGLang has no such layers without a GPU"
    if args.device == "cpu" and args.moe_a2a_backend != "none":
        yield f"--moe-a2a-backend {args.moe_a2a_backend}", "it sends tokens between GPUs; give none"
    groups, ranks = hf_config.o_groups, _attention_ranks(args)
    if args.tp_size % ranks == 0 and groups % (args.tp_size // ranks):
        fitting = " or ".join(str(n * ranks) for n in range(1, groups + 1) if groups % n == 0)
        among = f" among the processes of each of {ranks} attention ranks" if ranks > 1 else ""
        reason = f"the {groups} groups of output heads are divided evenly{among}; give {fitting}"
        yield f"--tp-size {args.tp_size}", reason
    if hf_config.context_len > hf_config.max_position_embeddings:
        yield (
            f"--context-length {hf_config.context_len}",
            f"the model has positions for {hf_config.max_position_embeddings} tokens, and rotations behind them are "
            'not in its tables; "max_position_embeddings" in --json-model-override-args makes these longer',
        )


def _refused_for_v41(args: Any, hf_config: Any, options: Options) -> Iterable[tuple[str, str]]:
    """What has not been seen to go with DeepSeek-V4.1, or does not exist for it."""
    if hf_config.model_type not in V41_MODEL_TYPES:
        return
    untested = "with DeepSeek-V4.1 it has not been tested"
    if args.device != "cpu":
        yield f"--device {args.device}", "DeepSeek-V4.1 has been served on a CPU only; give cpu"
    for field in ("speculative_algorithm", "enable_hierarchical_cache", "enable_dp_attention"):
        if value := getattr(args, field):
            yield _named(field, value), untested
    if args.disaggregation_mode != "null":
        yield _named("disaggregation_mode", args.disaggregation_mode), untested
    if args.tp_size > 1:
        yield _named("tp_size", args.tp_size), f"{untested}; give 1"
    if args.kv_cache_dtype not in ("auto", "fp8_e4m3"):
        reason = "rows of DeepSeek-V4.1 have the formats that it was trained with; leave it out"
        yield _named("kv_cache_dtype", args.kv_cache_dtype), reason
    for option in ("entry_format", "indexer_format", "hca_state"):
        if (value := getattr(options, option)) != getattr(Options(), option):
            yield f"the option {option} {value}", "DeepSeek-V4.1 has one format of each kind of rows; leave it out"
    if getattr(hf_config, "engram_layer_ids", None):
        yield "a checkpoint with Engram layers (engram_layer_ids)", f"without a GPU {untested}"
    if getattr(hf_config, "vision_n_layers", 0):
        yield "a checkpoint that takes images (vision_config)", untested


def refuse_release(model_type: str | None) -> None:
    """Raise if the SGLang that is installed has no such model."""
    if model_type in V41_MODEL_TYPES and not compat.SERVES_V41:
        _raise([("DeepSeek-V4.1", "SGLang has the model from 0.5.23 on; " + compat.version_note())])


def _raise(found: Iterable[tuple[str, str]]) -> None:
    if lines := [f"{what} is not supported: {reason}" for what, reason in found]:
        raise ValueError("dsv4_sglang refuses to start.\n" + "\n".join(lines))


def refuse_options(options: Options) -> None:
    """Raise if an option is refused."""
    if options.integrity_check and not compat.SERVES_INTEGRITY_CHECK:
        reason = "what requests and copies hold is kept in other ways in SGLang 0.5.18 to 0.5.22; use 0.5.17 or 0.5.23"
        _raise([("the option integrity_check", reason)])


def refuse_given(args: Any, hf_config: Any, options: Options) -> None:
    """Raise with every refused flag of `args`, SGLang's ServerArgs while the model's part of them is resolved."""
    found = (
        _refused(args, resolved=False),
        _unknown(args),
        _refused_in_parallel(args),
        _refused_with_dspark(args),
        _refused_with_host_tier(args),
        _refused_with_disaggregation(args),
        _refused_with_memory_saver(args),
        _refused_for_model(args, hf_config),
        _refused_for_v41(args, hf_config, options),
    )
    _raise(chain.from_iterable(found))


def refuse_resolved(args: Any) -> None:
    """Raise with every refused flag of `args` after SGLang has resolved them all."""
    _raise(_refused(args, resolved=True))
