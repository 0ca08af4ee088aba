"""Rejection of unsupported flags, one line each, before anything is loaded.

`flag_table` has the flags that can be judged alone. This module checks flags that depend on other flags or on the
model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.utils import get_cpu_ids_by_node

from dsv4_sglang.cache.host_memory import available_bytes
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.v41 import MODEL_TYPES as V41_MODEL_TYPES
from dsv4_sglang.ops.cuda_index import CANDIDATE_ENTRIES, CANDIDATE_HEADS
from dsv4_sglang.srt.host_cache.folder import FOLDERS, own_folder
from dsv4_sglang.srt.host_cache.stored_segments import SHM, free_bytes, require_memory, unowned_bytes
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.sizing import require_snapshots, tokens_of_context
from dsv4_sglang.srt.plugin.flag_table import DENIED, LIMITS, REJECTION, on_grid
from dsv4_sglang.srt.sglang.flags import flag_defaults

# CUDA graphs of a phase: the only kind that is served, and the reason.
GRAPHS = (
    ("prefill", "breakable", "a short prefill step is one breakable graph without breaks"),
    ("decode", "full", "a decode step, metadata included, is one graph"),
)
# Environment variables that must not be on.
VARIABLES = {
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "snapshots need SGLang's unified radix tree",
    "SGLANG_RUST_SERVER": "its requests bypass the validation of fields",
}
# Settings of the host cache that SGLang does not derive itself.
HOST_CACHE_FLAGS = (
    "hicache_size",
    "hicache_ratio",
    "hicache_write_policy",
    "hicache_storage_backend",
    "hicache_storage_prefetch_policy",
    "hicache_storage_backend_extra_config",
)
# Variable with the cores of each process of a CPU server.
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
# The Python package of a storage, and what installs it.
STORAGE_PACKAGES = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine"}


def flag(field: str) -> str:
    """Return the flag of a field of ServerArgs."""
    return "--" + field.replace("_", "-").replace("ep-join", "elastic-ep-join")


def _named(field: str, value: object) -> str:
    return flag(field) if value is True else f"{flag(field)} {value}"


def _given(value: object, default: object) -> bool:
    """Return True if a value differs from its default; None, False, 0 and "" are all "not given"."""
    return value != default and bool(value or default)


def _rejected(args: Any, resolved: bool) -> Iterable[tuple[str, str]]:
    """Yield (flag, reason) of the unsupported flags. `resolved`: SGLang has derived values from the given flags."""
    yield from _denied(args, resolved)
    yield from _outside_limits(args, resolved)
    yield from _rejected_graphs(args)
    yield from _rejected_variables()


def _denied(args: Any, resolved: bool) -> Iterable[tuple[str, str]]:
    """Yield the flags of `DENIED` that do not have their default."""
    defaults = flag_defaults()
    for denied in DENIED:
        if resolved and denied.as_given:
            continue
        for field in denied.fields:
            # Fields that only another release has are skipped.
            if field in defaults and _given(value := getattr(args, field), defaults[field]):
                yield _named(field, value), denied.reason


def _outside_limits(args: Any, resolved: bool) -> Iterable[tuple[str, str]]:
    """Yield the flags of `LIMITS` with a value that is not served."""
    defaults = flag_defaults()
    for limit in LIMITS:
        value = getattr(args, limit.field)
        if not (resolved and limit.as_given) and value not in (None, defaults[limit.field]) and not limit.serves(value):
            yield _named(limit.field, value), limit.reason


def _rejected_graphs(args: Any) -> Iterable[tuple[str, str]]:
    """Yield kinds of CUDA graphs that are not served, or not on this device."""
    if (graphs := args.cuda_graph_config) is None:
        return
    for phase, served, reason in GRAPHS:
        if (backend := getattr(graphs, phase).backend) not in (served, "disabled"):
            yield f"--cuda-graph-backend-{phase} {backend}", f"{reason}; give {served} or disabled"
    if graphs.prefill.backend == "breakable" and args.device == "cpu":
        yield "--cuda-graph-backend-prefill breakable", "CUDA graphs need a GPU; leave it out"


def _rejected_variables() -> Iterable[tuple[str, str]]:
    """Yield the variables of `VARIABLES` that are on."""
    for variable, reason in VARIABLES.items():
        # What SGLang takes for true.
        if os.environ.get(variable, "").lower() in ("1", "true"):
            yield variable, f"{reason}; leave it out"


def _attention_ranks(args: Any) -> int:
    """Return the number of DP-attention ranks. Each has its own cache and requests."""
    return args.dp_size if args.enable_dp_attention else 1


def _groups_of_cores() -> int:
    """Return the number of processes that have cores of their own on a CPU: the groups of `CORES`, else NUMA nodes."""
    given = os.environ.get(CORES, "all")
    return len(get_cpu_ids_by_node()) if given == "all" else len(given.split("|"))


def _rejected_in_parallel(args: Any) -> Iterable[tuple[str, str]]:
    """Yield flags that do not fit the number of processes. `args` are the given flags: SGLang divides chunks by the
    ranks later."""
    ranks = _attention_ranks(args)
    if args.dp_size > ranks:
        yield (
            f"--dp-size {args.dp_size}",
            f"copies of the model share no cache: start {args.dp_size} servers, or give --enable-dp-attention",
        )
    if args.device == "cpu" and args.tp_size > 1 and args.tp_size > (groups := _groups_of_cores()):
        reason = f"there are cores for {groups} of the processes; set {CORES} to those of each, as in 0-3|4-7"
        yield f"--tp-size {args.tp_size}", reason
    if ranks < 2:
        return
    coordination = envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION
    if coordination.get():
        reason = "steps in which one rank prefills and another verifies drafts are untested with it; leave it out"
        yield f"{coordination.name} with --enable-dp-attention", reason
    if args.tp_size % ranks:
        yield f"--dp-size {ranks}", f"the {args.tp_size} processes of --tp-size are divided evenly among the ranks"
    chunk, running = args.chunked_prefill_size, args.max_running_requests
    if chunk is not None and on_grid(chunk) and chunk > 0 and chunk % (ranks * BLOCK):
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


def _rejected_with_eagle(args: Any) -> Iterable[tuple[str, str]]:
    """Yield numbers of drafts that are missing or contradict each other. `args` are the given flags."""
    if args.speculative_algorithm != "EAGLE":
        return
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    for field in ("speculative_num_steps", "speculative_eagle_topk"):
        if getattr(args, field) is None:
            yield (
                f"--speculative-algorithm EAGLE without {flag(field)}",
                "the number of drafts has no default; give for example --speculative-num-steps 3 "
                "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            )
    if steps is not None and tokens not in (None, steps + 1):
        yield (
            f"--speculative-num-draft-tokens {tokens} with --speculative-num-steps {steps}",
            f"a verify step has the last token and {steps} drafts; give {steps + 1}",
        )


def _rejected_with_dspark(args: Any) -> Iterable[tuple[str, str]]:
    """Yield features of SGLang's DSPARK that this cache does not support."""
    if args.speculative_algorithm != "DSPARK":
        return
    mode = os.environ.get("SGLANG_RAGGED_VERIFY_MODE", "static")
    if mode != "static":
        reason = "a verify step has the same number of tokens of each request; give static, or leave it out"
        yield f"SGLANG_RAGGED_VERIFY_MODE={mode}", reason
    if args.enable_dp_attention:
        reason = (
            "SGLang requires --enable-dp-lm-head with it, which has not been tested; give EAGLE, or --tp-size alone"
        )
        yield "--speculative-algorithm DSPARK with --enable-dp-attention", reason


def _rejected_with_host_cache(args: Any, options: Options) -> Iterable[tuple[str, str]]:
    """Yield settings of a host cache that there is not, and random weights in a storage that all servers share."""
    if not args.enable_hierarchical_cache:
        defaults, reason = flag_defaults(), "it is a setting of the host cache; give --enable-hierarchical-cache"
        for field in HOST_CACHE_FLAGS:
            if _given(value := getattr(args, field), defaults[field]):
                yield _named(field, value), reason
        for option in ("host_snapshots", "host_load_timeout_seconds"):
            if (value := getattr(options, option)) != getattr(Options(), option):
                yield f"the option {option} {value}", reason
        return
    if args.disable_radix_cache:
        reason = "the host cache extends the prefix cache; leave one of the two flags out"
        yield "--enable-hierarchical-cache with --disable-radix-cache", reason
    storage = args.hicache_storage_backend
    if storage == SHM and args.nnodes > 1:
        reason = "it shares the memory of one machine; give file with a folder that all machines share, or mooncake"
        yield f"--hicache-storage-backend {SHM} with --nnodes {args.nnodes}", reason
    if storage == SHM and "max_size" in (args.hicache_storage_backend_extra_config or ""):
        reason = "it has the size of the host cache; give --hicache-size"
        yield f"--hicache-storage-backend {SHM} with max_size", reason
    # Without the variable, all servers of a machine share a folder.
    variable, _ = FOLDERS.get(storage, ("", ""))
    if variable and args.load_format == "dummy" and not os.environ.get(variable):
        yield (
            f"--hicache-storage-backend {storage} with --load-format dummy",
            "results of random weights are stored only in a folder that is named; "
            f"set {variable}, or leave the storage out",
        )


def _rejected_with_disaggregation(args: Any) -> Iterable[tuple[str, str]]:
    """Yield flags that have not been tested on a prefill or decode server."""
    mode = args.disaggregation_mode
    if mode == "null":
        return
    if args.device == "cpu" and args.disaggregation_transfer_backend == "nixl":
        yield (
            "--disaggregation-transfer-backend nixl",
            "SGLang registers only memory of GPUs with it; give mooncake_tcp",
        )
    if args.enable_dp_attention:
        reason = "with --enable-dp-attention it has not been tested; give --tp-size alone"
        yield f"--disaggregation-mode {mode}", reason
    if args.speculative_algorithm == "DSPARK":
        reason = "with --speculative-algorithm DSPARK it has not been tested; give EAGLE if there is a NextN layer"
        yield f"--disaggregation-mode {mode}", reason
    if args.enable_hierarchical_cache and mode == "decode":
        yield "--enable-hierarchical-cache", "a decode server has no prefix cache; give it to the prefill server"


def _rejected_with_memory_saver(args: Any) -> Iterable[tuple[str, str]]:
    """Yield the memory saver where it has no effect or has not been tested."""
    if not args.enable_memory_saver:
        return
    if args.device == "cpu":
        reason = "it releases memory of a GPU; leave it out: a server without it sleeps and wakes, too"
        yield "--enable-memory-saver", reason
    if args.disaggregation_mode != "null":
        reason = f"with --disaggregation-mode {args.disaggregation_mode} it has not been tested"
        yield "--enable-memory-saver", reason
    if args.cuda_graph_config is not None and args.cuda_graph_config.prefill.backend == "breakable":
        reason = (
            "SGLang cannot release the memory of breakable graphs; give disabled, or leave one of the two flags out"
        )
        yield "--cuda-graph-backend-prefill breakable with --enable-memory-saver", reason
    graphs = envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH
    if graphs.get() and args.tp_size > 1:
        reason = "releasing CUDA graphs ended a server of two GPUs; leave it out: weights and cache are still released"
        yield f"{graphs.name} with --tp-size {args.tp_size}", reason


def _has_no_head(algorithm: str, hf_config: Any) -> str | None:
    """Return why a model has no drafts for an algorithm, or None. A model has one of the two heads: they share a
    name."""
    has_dspark = bool(getattr(hf_config, "dspark_target_layer_ids", None))
    if algorithm == "DSPARK":
        return None if has_dspark else "the checkpoint has no DSPARK head (dspark_target_layer_ids in its config.json)"
    if has_dspark:
        return "the checkpoint has a DSPARK head and no NextN layer; give DSPARK"
    return None if getattr(hf_config, "num_nextn_predict_layers", 0) else "the checkpoint has no NextN layer"


def _rejected_for_model(args: Any, hf_config: Any) -> Iterable[tuple[str, str]]:
    """Yield flags that contradict the model's config."""
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
    needed = tokens_of_context(hf_config.context_len)
    if args.max_total_tokens is not None and args.max_total_tokens < needed:
        reason = f"one request of the context length {hf_config.context_len} needs {needed}; give that, or more, or a "
        yield f"--max-total-tokens {args.max_total_tokens}", reason + "smaller --context-length"
    if hf_config.context_len > hf_config.max_position_embeddings:
        yield (
            f"--context-length {hf_config.context_len}",
            f"the model has positions for {hf_config.max_position_embeddings} tokens; give that or less, or extend its "
            'RoPE tables with "max_position_embeddings" in --json-model-override-args',
        )


def _rejected_for_v41(args: Any, hf_config: Any, options: Options) -> Iterable[tuple[str, str]]:
    """Yield flags that do not exist for DeepSeek-V4.1 or have not been tested with it."""
    if hf_config.model_type not in V41_MODEL_TYPES:
        return
    served: dict[str, object] = {"speculative_algorithm": None, "disaggregation_mode": "null"}
    if args.device == "cuda":
        if (size := getattr(hf_config, "candidate_block_size", CANDIDATE_ENTRIES)) != CANDIDATE_ENTRIES:
            yield f"a checkpoint with candidate_block_size {size}", f"on a GPU it is {CANDIDATE_ENTRIES}"
        if (heads := getattr(hf_config, "index_n_heads", CANDIDATE_HEADS)) > CANDIDATE_HEADS:
            yield f"a checkpoint with index_n_heads {heads}", f"on a GPU there are at most {CANDIDATE_HEADS}"
    for field, tested in served.items():
        if (value := getattr(args, field)) != tested:
            yield _named(field, value), "it has not been tested with DeepSeek-V4.1; leave it out"
    if args.kv_cache_dtype not in ("auto", "fp8_e4m3"):
        reason = "KV entries of DeepSeek-V4.1 have the formats that it was trained with; leave it out"
        yield _named("kv_cache_dtype", args.kv_cache_dtype), reason
    for option in ("entry_format", "indexer_format"):
        if (value := getattr(options, option)) != getattr(Options(), option):
            yield f"the option {option} {value}", "DeepSeek-V4.1 has one format for each kind of entry; leave it out"
    if getattr(hf_config, "engram_layer_ids", None):
        yield "a checkpoint with Engram layers (engram_layer_ids)", "it has been tested without these layers only"
    if getattr(hf_config, "vision_n_layers", 0):
        yield "a checkpoint that takes images (vision_config)", "it has been tested with text only"


def _raise(found: Iterable[tuple[str, str]]) -> None:
    if lines := [REJECTION.format(flag=what, reason=reason) for what, reason in found]:
        raise LaunchError(*lines)


def reject_given(args: Any, hf_config: Any, options: Options) -> None:
    """Raise LaunchError with all unsupported flags, before SGLang has resolved them all.

    Combinations are checked only if each flag alone is supported.

    Args:
        args: SGLang's ServerArgs, while their model-dependent part is resolved.
        hf_config: SGLang's config of the model.
        options: options of this package.
    """
    _raise(_rejected(args, resolved=False))
    combined = (
        _rejected_in_parallel(args),
        _rejected_with_eagle(args),
        _rejected_with_dspark(args),
        _rejected_with_host_cache(args, options),
        _rejected_with_disaggregation(args),
        _rejected_with_memory_saver(args),
        _rejected_for_model(args, hf_config),
        _rejected_for_v41(args, hf_config, options),
    )
    _raise(chain.from_iterable(combined))
    prefix_cache = not args.disable_radix_cache and args.disaggregation_mode != "decode"
    if prefix_cache and args.max_running_requests is not None and options.max_snapshots is not None:
        running = args.max_running_requests // _attention_ranks(args)
        require_snapshots(options.max_snapshots, running)


def memory_gb() -> int:
    """Return the memory that this machine and this container have left, in GB (10^9 bytes)."""
    return available_bytes() // 10**9


def reject_for_machine(args: Any) -> None:
    """Raise LaunchError if this machine lacks what the host cache needs: memory, or the storage's package or folder.

    Create the folder of the storage if it does not exist.
    """
    if not args.enable_hierarchical_cache:
        return
    storage = args.hicache_storage_backend
    if storage in STORAGE_PACKAGES and find_spec(storage) is None:
        raise LaunchError(
            f"--hicache-storage-backend {storage}: the Python package {storage} is not installed; run "
            f"`pip install {STORAGE_PACKAGES[storage]}`, or give file"
        )
    variable, default = FOLDERS.get(storage, ("", ""))
    named, memory = os.environ.get(variable, ""), memory_gb()
    if storage == SHM:
        require_memory(folder := own_folder(named, default, variable, by_group=False), variable)
        # Segments that no process uses are taken over, or removed if there is no memory left.
        memory = (free_bytes(folder) + unowned_bytes(folder)) // 10**9
    # SGLang also reads a folder of `file` from the configuration, which FileStorage checks.
    elif variable and (named or args.hicache_storage_backend_extra_config is None):
        for name in named.split(",") if storage == "nixl" else [named]:
            own_folder(name.strip(), default, variable, by_group=storage != "nixl")
    _reject_host_size(args, memory, f"{named or default} has" if storage == SHM else "this machine has")


def _reject_host_size(args: Any, memory: int, where: str) -> None:
    """Raise LaunchError if --hicache-size exceeds `memory` GB. `where`: the words before this number."""
    # The processes of a rank of DP attention share one host cache, on each of their machines.
    size, caches = args.hicache_size, max(1, _attention_ranks(args) // args.nnodes)
    if size * caches > memory:
        of_ranks = f" for each of {caches} ranks of DP attention" if caches > 1 else ""
        most = memory // caches
        advice = f"give at most {most}" if most else "free some, or leave out --enable-hierarchical-cache"
        raise LaunchError(
            f"--hicache-size {size}: {size} GB{of_ranks}, but {where} {memory} GB of memory left; {advice}"
        )


def reject_resolved(args: Any) -> None:
    """Raise LaunchError with all unsupported flags, after SGLang has resolved them all."""
    _raise(_rejected(args, resolved=True))
