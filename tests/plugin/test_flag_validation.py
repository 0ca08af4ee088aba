"""The validation of each of SGLang's flags on its real ServerArgs, before SGLang resolves any of them."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.parallel_hook import handle_data_parallelism
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, default_cuda_graph_config
from sglang.srt.server_args import ServerArgs
from support.segments import VARIABLE as SEGMENTS
from support.segments import new_folder

from dsv4_sglang.srt.attention import prefill_graphs
from dsv4_sglang.srt.launch.command import CONFIG_FLAG, CPU_FLAGS, OPT_IN_FLAG
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.plugin import flag_validation, sglang_contract
from dsv4_sglang.srt.plugin.flag_table import DENIED, LIMITS
from dsv4_sglang.srt.plugin.flag_validation import (
    CORES,
    flag,
    reject_for_machine,
    reject_given,
    reject_resolved,
)
from dsv4_sglang.srt.plugin.server_context import ServerContext
from dsv4_sglang.srt.sglang.flags import current_flags, flag_defaults
from dsv4_sglang.srt.sglang.models import config_class
from dsv4_sglang.testing.tiny_config import TinySpec, config_json

DEFAULTS = flag_defaults()
# The denied fields that this release of SGLang has.
REJECTED = {field: group for group in DENIED for field in group.fields if field in DEFAULTS}
# Rejected values and accepted values of each limited flag.
LIMITED: dict[str, tuple[list[Any], list[Any]]] = {
    "tp_size": ([0, -1], [1, 2]),
    "dp_size": ([0, -2], [1]),
    "max_running_requests": ([-4, 0], [None, 1, 256]),
    "max_total_tokens": ([-1, 0], [None, 131072]),
    "context_length": ([-1, 0], [None, 4096]),
    "mem_fraction_static": ([0.0, 1.0, 7.0, -0.5], [None, 0.85]),
    "chunked_prefill_size": ([300, 64], [None, -1, 128, 8192]),
    "mamba_track_interval": ([512], [128, 256]),
    "mamba_radix_cache_strategy": (["no_buffer", "extra_buffer_lazy"], ["auto", "extra_buffer"]),
    "page_size": ([64, 256], [None, 128]),
    "attention_backend": (["triton", "dsv4"], [None, "dsv4_sglang"]),
    "prefill_attention_backend": (["fa3"], [None]),
    "decode_attention_backend": (["flashinfer"], [None]),
    "radix_cache_backend": (["other"], [None, "dsv4_sglang"]),
    "schedule_policy": (["dfs-weight"], ["fcfs", "lpm"]),
    "kv_cache_dtype": (["fp8_e5m2", "nvfp4"], ["auto", "fp8_e4m3", "bfloat16", "bf16"]),
    "dtype": (["half", "float16"], ["auto", "bfloat16", "float32"]),
    "device": (["xpu"], ["cuda", None]),
    "model_impl": (["transformers"], ["auto", "sglang"]),
    "quantization": (["awq"], [None, "fp8"]),
    "speculative_algorithm": (["EAGLE3", "NGRAM", "STANDALONE", "DFLASH", "NEXTN"], [None]),
    "speculative_draft_attention_backend": (["dsv4", "triton"], [None, "dsv4_sglang"]),
    "speculative_eagle_topk": ([4], [None, 1]),
    "speculative_num_steps": ([-1, 0, 9], [None, 1, 8]),
    "speculative_num_draft_tokens": ([10, 64], [None, 2, 4, 9]),
    "speculative_dspark_block_size": ([9, 64], [None, 5, 7, 8]),
    "hicache_ratio": ([-1.0], [2.0, 0.5]),
    "hicache_size": ([-1], [0, 64]),
    "hicache_io_backend": (["direct", "kernel_ascend"], ["kernel"]),
    "hicache_mem_layout": (["layer_first", "page_first_direct"], ["page_first"]),
    "hicache_storage_backend": (["eic", "hf3fs", "dynamic"], [None]),
    "disaggregation_transfer_backend": (["mori", "fake"], ["mooncake", "mooncake_tcp", "nixl"]),
    "num_reserved_decode_tokens": ([1, 127], [128, 512]),
    "moe_a2a_backend": (["megamoe", "mooncake"], ["none", "deepep"]),
    "load_format": (["gguf"], ["auto", "safetensors", "dummy"]),
}


def arguments(**given: Any) -> ServerArgs:
    """Return ServerArgs. SGLang resolves nothing for the model path "dummy"."""
    args = ServerArgs(**{"model_path": "dummy", "device": "cuda", **given})
    args._cuda_graph_config_locked = set()
    return args


def config(**values: Any) -> SimpleNamespace:
    """Return the part of the model's config that the validation reads."""
    facts = {
        "model_type": "deepseek_v4",
        "o_groups": 8,
        "max_position_embeddings": 65536,
        "context_len": 65536,
        "num_nextn_predict_layers": 1,
    }
    return SimpleNamespace(**{**facts, **values})


def graphs(**backends: str) -> CudaGraphConfig:
    made = default_cuda_graph_config()
    made.decode.backend, made.prefill.backend = "full", "disabled"
    for phase, backend in backends.items():
        getattr(made, phase).backend = backend
    return made


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has cores for every process."""
    monkeypatch.setenv(CORES, "|".join("0" * 64))


def rejections(hf_config: SimpleNamespace | None = None, options: Options | None = None, **given: Any) -> list[str]:
    """Return the lines of the validation error for a launch with these flags, or [] if the flags are valid."""
    try:
        reject_given(arguments(**given), hf_config or config(), options or Options())
    except LaunchError as error:
        return list(error.args)
    return []


def another(default: Any) -> Any:
    """Return a value of a flag that is not its default."""
    if default is None or isinstance(default, str):
        return "other"
    if isinstance(default, list):
        return ["other"]
    return True if default is False else default + 1


def test_a_flag_is_judged_once() -> None:
    judged = [*(field for group in DENIED for field in group.fields), *(limit.field for limit in LIMITS)]
    assert len(set(judged)) == len(judged)
    assert sglang_contract.flag_differences() == []


def test_flags_that_are_read_are_in_the_contract() -> None:
    """The flags are found by the names of ServerArgs variables in this package."""
    names = re.compile(r"\b(?:server_args|current_flags\([\w.]+\)|(?<![.\w])args)\.([a-z]\w+)")
    sources = [path.read_text() for path in Path(sglang_contract.__file__).parents[1].rglob("*.py")]
    read = {name for source in sources for name in names.findall(source)} & DEFAULTS.keys()
    assert read and read <= {*sglang_contract.FLAGS_READ, *(limit.field for limit in LIMITS)}


def test_a_plain_launch_is_served() -> None:
    assert rejections() == []
    assert rejections(cuda_graph_config=graphs()) == []
    reject_resolved(arguments())


@pytest.mark.parametrize("field", REJECTED)
def test_each_rejected_flag_has_its_line(field: str) -> None:
    value = another(DEFAULTS[field])
    shown = flag(field) if value is True else f"{flag(field)} {value}"
    assert rejections(**{field: value}) == [f"{shown} is not supported: {REJECTED[field].reason}"]
    assert rejections(**{field: DEFAULTS[field]}) == []


HOST_CACHE_FLAGS = {
    "hicache_size": 50,
    "hicache_ratio": 4.0,
    "hicache_write_policy": "write_back",
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": "{}",
}


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.field for limit in LIMITS])
def test_each_limit_has_its_line(limit: Any) -> None:
    bad, good = LIMITED[limit.field]
    for value in bad:
        (line,) = rejections(**{limit.field: value})
        assert line == f"{flag(limit.field)} {value} is not supported: {limit.reason}"
    host_cache = {"enable_hierarchical_cache": limit.field in HOST_CACHE_FLAGS}
    for value in good:
        assert rejections(**{limit.field: value, **host_cache}) == []


RANKS = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
TIER = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
DECODE = {"disaggregation_mode": "decode", "device": "cpu"}
NIXL = {"disaggregation_transfer_backend": "nixl"}
SAVER = {"enable_memory_saver": True}
DSPARK = {"speculative_algorithm": "DSPARK"}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
WITH_DSPARK = {"dspark_target_layer_ids": [40, 41, 42]}
# Fields of the model's config, flags, and the rejection (a regular expression).
REJECTED_TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"device": "cpu", "cuda_graph_config": graphs(prefill="breakable")}, "-prefill breakable .* need a GPU"),
    ({}, {"cuda_graph_config": graphs(prefill="full")}, "--cuda-graph-backend-prefill full .* one breakable graph "),
    ({}, {"cuda_graph_config": graphs(decode="tc_piecewise")}, "-decode tc_piecewise .* metadata included, is one "),
    (
        {},
        {**SAVER, "cuda_graph_config": graphs(prefill="breakable")},
        "-prefill breakable with .* leave one of the two",
    ),
    ({}, {**SAVER, "device": "cpu"}, "--enable-memory-saver .* releases memory of a GPU"),
    ({}, {**SAVER, "disaggregation_mode": "prefill"}, "--enable-memory-saver .* with --disaggregation-mode prefill "),
    *[
        ({}, {field: value}, f"{flag(field)} .* setting of the host cache; give --enable-hierarchical-cache$")
        for field, value in HOST_CACHE_FLAGS.items()
    ],
    (
        {},
        {**TIER, "disable_radix_cache": True},
        "-hierarchical-cache with --disable-radix-cache .* leave one of the two",
    ),
    ({}, {**DECODE, **NIXL}, "--disaggregation-transfer-backend nixl .* memory of GPUs"),
    ({}, {**DECODE, **RANKS}, "--disaggregation-mode decode .* with --enable-dp-attention "),
    ({}, {**DECODE, "disaggregation_mode": "prefill", **RANKS}, "--disaggregation-mode prefill .* with --enable-dp-"),
    ({}, {**DECODE, "enable_hierarchical_cache": True}, "--enable-hierarchical-cache .* a decode server has no prefix"),
    (WITH_DSPARK, {**DECODE, **DSPARK}, "--disaggregation-mode decode .* with --speculative-algorithm DSPARK "),
    (WITH_DSPARK, {**DSPARK, **RANKS, "device": "cpu"}, "--speculative-algorithm DSPARK with --enable-dp-attention "),
    (WITH_DSPARK, EAGLE, "a DSPARK head and no NextN layer; give DSPARK$"),
    ({}, {**DSPARK, "device": "cpu"}, "--speculative-algorithm DSPARK .* has no DSPARK head"),
    ({"num_nextn_predict_layers": 0}, EAGLE, "--speculative-algorithm EAGLE .* the checkpoint has no NextN layer$"),
    ({}, {**EAGLE, "speculative_num_steps": None}, "EAGLE without --speculative-num-steps .* give for example "),
    ({}, {**EAGLE, "speculative_eagle_topk": None}, "EAGLE without --speculative-eagle-topk .* give for example "),
    ({}, {**EAGLE, "speculative_num_draft_tokens": 7}, "-draft-tokens 7 with --speculative-num-steps 3 .*; give 4$"),
    ({}, {"tp_size": 3}, "--tp-size 3 .* the 8 groups .*give 1 or 2 or 4 or 8$"),
    ({}, {**RANKS, "tp_size": 64}, "--tp-size 64 .* the 8 groups .*give 4 or 8 or 16 or 32$"),
    ({}, {**RANKS, "tp_size": 6}, "--dp-size 4 .* the 6 processes of --tp-size are divided evenly among the ranks$"),
    ({}, {"dp_size": 2}, "--dp-size 2 .* --enable-dp-attention"),
    ({}, {**RANKS, "chunked_prefill_size": 256}, "--chunked-prefill-size 256 .* give a multiple of 512"),
    ({}, {**RANKS, "max_running_requests": 3}, "--max-running-requests 3 .*give 4 or more$"),
    ({}, {"device": "cpu", "tp_size": 2, "moe_a2a_backend": "deepep"}, "--moe-a2a-backend deepep .*give none$"),
    ({"quantization_config": {}}, {"device": "cpu"}, "--device cpu .* the checkpoint is quantised"),
    ({"context_len": 65537}, {}, "--context-length 65537 .* the model has positions for 65536 tokens"),
    ({"context_len": 1000}, {"max_total_tokens": 1279}, "--max-total-tokens 1279 .* length 1000 needs 1280"),
]
SERVED_TOGETHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"cuda_graph_config": graphs(prefill="breakable")}),
    ({}, {"cuda_graph_config": graphs(decode="disabled")}),
    ({}, {**SAVER, "cuda_graph_config": graphs()}),
    ({}, {"tp_size": 8}),
    ({}, {**TIER, **EAGLE}),
    ({}, {**EAGLE, "speculative_num_draft_tokens": 4}),
    (WITH_DSPARK, {**TIER, **DSPARK}),
    ({"num_nextn_predict_layers": 0}, {**EAGLE, "speculative_draft_model_path": "elsewhere"}),
    *[({}, {**more, "disaggregation_mode": mode}) for mode in ("prefill", "decode") for more in (DECODE, EAGLE)],
    ({}, {**DECODE, "disaggregation_mode": "prefill", "enable_hierarchical_cache": True}),
    ({}, RANKS),
    ({}, {**RANKS, "chunked_prefill_size": 512, "max_running_requests": 4}),
    ({}, {"tp_size": 8, "ep_size": 8, "moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}),
    ({"quantization_config": {}}, {}),
    ({"context_len": 1000}, {"max_total_tokens": 1280}),
]


@pytest.mark.parametrize(("facts", "given", "line"), [*REJECTED_TOGETHER, *((*row, None) for row in SERVED_TOGETHER)])
def test_flags_together(facts: dict[str, Any], given: dict[str, Any], line: str | None) -> None:
    found = rejections(config(**facts), **given)
    assert len(found) == (0 if line is None else 1)
    assert line is None or (" is not supported: " in found[0] and re.search(line, found[0])), found


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, "breakable"),
        (SAVER, "disabled"),
        ({"device": "cpu"}, "disabled"),
        (DECODE | {"device": "cuda"}, "disabled"),
    ],
)
def test_prefill_graphs_are_on_where_sglang_records_them(given: dict[str, Any], backend: str) -> None:
    asked = graphs()
    asked.prefill.max_bs = 1000
    args = arguments(cuda_graph_config=asked, **given)
    prefill_graphs.switch_on(args)
    found = current_flags(args).cuda_graph_config.prefill
    assert found.backend == backend
    if backend == "breakable":
        assert found.bs[:2] == [2, 4] and found.bs[-1] == found.max_bs == 1000


@pytest.mark.parametrize(
    ("chunk", "ranks", "longest"), [(8192, 1, 1920), (-1, 1, 1920), (2048, 1, 2048), (8192, 4, 2048), (8192, 8, 1024)]
)
def test_a_small_chunk_has_a_graph(chunk: int, ranks: int, longest: int) -> None:
    """SGLang divides the chunk among the ranks of DP attention, and keeps the sizes."""
    asked = graphs()
    asked.prefill.max_bs = 8192
    args = arguments(
        cuda_graph_config=asked, chunked_prefill_size=chunk, attn_dp_size=ranks, tp_size=ranks, max_running_requests=64
    )
    prefill_graphs.switch_on(args)
    if ranks > 1:
        handle_data_parallelism(args)
        assert current_flags(args).chunked_prefill_size == chunk // ranks
    found = current_flags(args).cuda_graph_config.prefill
    assert found.bs == [*(size for size in prefill_graphs.SIZES if size < longest), longest]
    assert found.max_bs == longest


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([2, 4, 6, 12, 23], None),
        ([256, 1920], "prefill steps of 1 to 127 and 257 to 959 tokens run eagerly"),
        ([3, 1, 9], "prefill steps of 4 to 4 tokens run eagerly"),
        (None, None),
    ],
)
def test_steps_between_prefill_graphs_are_named(
    sizes: list[int] | None, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = graphs()
    asked.prefill.max_bs = 1000
    args = arguments(cuda_graph_config=asked, device="cuda")
    prefill_graphs.switch_on(args)
    if sizes is not None:
        current_flags(args).cuda_graph_config.prefill.bs = sizes
    ServerContext(Options()).resolved(lambda _: None, args)
    assert bool(caplog.messages) == (said is not None)
    assert said is None or said in caplog.text


@pytest.mark.parametrize(
    ("device", "fields", "line"),
    [
        ("cuda", {"candidate_block_size": 4}, "a checkpoint with candidate_block_size 4 is not supported: .* it is 8"),
        ("cuda", {"index_n_heads": 64}, "a checkpoint with index_n_heads 64 is not supported: .* at most 32"),
        ("cuda", {"candidate_block_size": 8, "index_n_heads": 32}, None),
        ("cpu", {"candidate_block_size": 4, "index_n_heads": 64}, None),
    ],
)
def test_forms_of_selection_without_a_kernel(device: str, fields: dict[str, int], line: str | None) -> None:
    lines = rejections(config(model_type="deepseek_v41", **fields), device=device)
    found = [text for text in lines if "candidate_block_size" in text or "index_n_heads" in text]
    assert len(found) == (line is not None), lines
    assert line is None or re.match(line, found[0]), found


def test_coordination_of_ranks_is_rejected_with_dp_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rejections(**RANKS) == []
    monkeypatch.setenv("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "yes")
    (line,) = rejections(**RANKS)
    assert line.startswith("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION with --enable-dp-attention is not supported: ")
    assert rejections() == []


def test_cuda_graphs_of_several_gpus_are_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    (line,) = rejections(**SAVER, tp_size=2)
    assert line.startswith("SGLANG_MEMORY_SAVER_CUDA_GRAPH with --tp-size 2 is not supported: ")
    assert rejections(**SAVER) == []


@pytest.mark.parametrize("storage", ["file", "shm", "nixl", "mooncake"])
def test_random_weights_need_a_named_folder(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    variable = f"SGLANG_HICACHE_{storage.upper()}_BACKEND_STORAGE_DIR"
    monkeypatch.delenv(variable, raising=False)
    tier = {**TIER, "hicache_storage_backend": storage, "load_format": "dummy"}
    line = (
        f"--hicache-storage-backend {storage} with --load-format dummy is not supported: results of random weights "
        f"are stored only in a folder that is named; set {variable}, or leave the storage out"
    )
    # Mooncake is set up by name.
    assert rejections(**tier) == ([] if storage == "mooncake" else [line])
    monkeypatch.setenv(variable, "/pages")
    assert rejections(**tier) == []


@pytest.mark.parametrize(
    ("flags", "line", "folders"),
    [
        ({"hicache_size": 48, "tp_size": 4}, r"--hicache-size 48: 48 GB, but .* 47 GB of .*; give at most 47$", []),
        (
            {"hicache_size": 12, "tp_size": 8, "dp_size": 4, "enable_dp_attention": True},
            r"--hicache-size 12: 12 GB for each of 4 ranks of DP attention, but .* 47 GB of .*; give at most 11$",
            [],
        ),
        (
            {"hicache_size": 24, "tp_size": 8, "dp_size": 4, "enable_dp_attention": True, "nnodes": 2},
            r"--hicache-size 24: 24 GB for each of 2 ranks of DP attention, but .* 47 GB of .*; give at most 23$",
            [],
        ),
        ({"hicache_storage_backend": "nixl"}, r"-backend nixl: .* run `pip install nixl`", ["one", "two"]),
        ({"hicache_storage_backend": "mooncake"}, r"-backend mooncake: .* `pip install mooncake-transfer-engine`", []),
        ({"hicache_storage_backend": "file"}, r"folder /proc/one cannot be created: .*; set SGLANG_", ["one"]),
    ],
)
def test_impossible_host_cache_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, Any], line: str, folders: list[str]
) -> None:
    """The same flags are accepted on a machine with more memory, the package and a folder that can be created."""
    args = arguments(enable_hierarchical_cache=True, **flags)

    def machine(memory: int, package: object, root: Path) -> None:
        monkeypatch.setattr(flag_validation, "memory_gb", lambda: memory)
        monkeypatch.setattr(flag_validation, "find_spec", lambda name: package)
        monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", f"{root}/one")
        monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", f"{root}/one, {root}/two")

    machine(47, None, Path("/proc"))
    with pytest.raises(LaunchError, match=line):
        reject_for_machine(args)
    machine(48, "installed", tmp_path)
    reject_for_machine(args)
    assert sorted(path.name for path in tmp_path.iterdir()) == folders


def test_shared_memory_is_of_one_machine() -> None:
    (line,) = rejections(**{**TIER, "hicache_storage_backend": "shm", "nnodes": 2})
    assert line == (
        "--hicache-storage-backend shm with --nnodes 2 is not supported: it shares the memory of one machine; give "
        "file with a folder that all machines share, or mooncake"
    )
    assert rejections(**{**TIER, "hicache_storage_backend": "shm"}) == []


def test_size_of_shared_memory_is_that_of_the_host_cache() -> None:
    extra = {"hicache_storage_backend": "shm", "hicache_storage_backend_extra_config": '{"max_size": "2G"}'}
    assert rejections(**{**TIER, **extra}) == [
        "--hicache-storage-backend shm with max_size is not supported: it has the size of the host cache; give "
        "--hicache-size"
    ]


def test_impossible_shared_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of segments without an owner counts as free, and so does none of a folder that is not in memory."""
    with new_folder() as folder:
        args = arguments(enable_hierarchical_cache=True, hicache_size=48, hicache_storage_backend="shm")
        monkeypatch.setenv(SEGMENTS, str(folder))
        monkeypatch.setattr(flag_validation, "free_bytes", lambda folder: 40 * 10**9)
        monkeypatch.setattr(flag_validation, "unowned_bytes", lambda folder: 7 * 10**9)
        line = f"--hicache-size 48: 48 GB, but {folder} has 47 GB of memory left; give at most 47$"
        with pytest.raises(LaunchError, match=line):
            reject_for_machine(args)
        monkeypatch.setattr(flag_validation, "unowned_bytes", lambda folder: 8 * 10**9)
        reject_for_machine(args)
        monkeypatch.setattr(flag_validation, "free_bytes", lambda folder: -8 * 10**9)
        with pytest.raises(LaunchError, match="has 0 GB of memory left; free some, or leave out --enable-hier"):
            reject_for_machine(args)
        folder.chmod(0o770)
        with pytest.raises(LaunchError, match=f"{folder} has mode 0770: users other than its owner can write it"):
            reject_for_machine(args)
    monkeypatch.setenv(SEGMENTS, "/proc")
    with pytest.raises(LaunchError, match=f"/proc cannot be written|expected one in memory .tmpfs.: set {SEGMENTS}"):
        reject_for_machine(args)


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
        ("SGLANG_RUST_SERVER", "1", "SGLANG_RUST_SERVER"),
        ("SGLANG_RAGGED_VERIFY_MODE", "compact", "SGLANG_RAGGED_VERIFY_MODE=compact"),
        ("SGLANG_RAGGED_VERIFY_MODE", "static", None),
    ],
)
def test_variables(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, shown: str | None) -> None:
    monkeypatch.setenv(variable, value)
    lines = rejections(config(**WITH_DSPARK), **DSPARK)
    assert len(lines) == (0 if shown is None else 1)
    assert all(line.startswith(f"{shown} is not supported: ") for line in lines)
    assert "RAGGED" not in variable or rejections(**EAGLE) == []


def test_another_model() -> None:
    with pytest.raises(ValueError, match="the model is a LlamaForCausalLM; expected DeepseekV4ForCausalLM"):
        ServerContext(Options()).declarations(lambda *_: [], "LlamaForCausalLM", arguments(), SimpleNamespace())
    wider = config_class()(**{**config_json(TinySpec()), "sliding_window": 256})
    wider.context_len = 1024
    with pytest.raises(LaunchError, match=r"config\.json of dummy: config field 'sliding_window' is 256; this cache "):
        ServerContext(Options()).declarations(lambda *_: [], "DeepseekV4ForCausalLM", arguments(), wider)


V41: dict[str, dict[str, Any]] = {
    "--speculative-algorithm DSPARK": {"speculative_algorithm": "DSPARK"},
    "--disaggregation-mode prefill": {"disaggregation_mode": "prefill"},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "the option entry_format fp32": {"options": Options(entry_format="fp32")},
    "the option indexer_format nvfp4": {"options": Options(indexer_format="nvfp4")},
    "a checkpoint with Engram layers (engram_layer_ids)": {"facts": {"engram_layer_ids": [1, 14]}},
    "a checkpoint that takes images (vision_config)": {"facts": {"vision_n_layers": 32}},
}

V41_SERVED: list[dict[str, Any]] = [
    {"device": "cpu"},
    {"device": "cuda"},
    {"device": "cuda", "enable_hierarchical_cache": True},
    {"device": "cuda", **SAVER},
    {"device": "cuda", "tp_size": 2},
    {"device": "cuda", **RANKS},
]


@pytest.mark.parametrize("named", V41)
def test_flags_unsupported_with_v41_are_rejected(named: str) -> None:
    def lines(model_type: str, facts: dict[str, Any], options: Options, **given: Any) -> list[str]:
        model = config(model_type=model_type, dspark_target_layer_ids=[0, 1, 2], **facts)
        return rejections(model, options=options, **{"device": "cpu", **given})

    asked = {"facts": {}, "options": Options(), **V41[named]}
    said = [line for line in lines("deepseek_v41", **asked) if line.startswith(f"{named} is not supported: ")]
    assert said, lines("deepseek_v41", **asked)
    assert not any(lines("deepseek_v41", {}, Options(), **served) for served in V41_SERVED)
    assert not [line for line in lines("deepseek_v4", **asked) if line in said]


def test_processes_of_a_cpu_server_need_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives each process the cores of a NUMA node, or those of a variable. Otherwise it fails late."""
    monkeypatch.delenv(CORES)
    assert not rejections(device="cpu", tp_size=1)
    monkeypatch.setattr(flag_validation, "get_cpu_ids_by_node", lambda: ["0,1"])
    said = f"--tp-size {{}} is not supported: there are cores for {{}} of the processes; set {CORES} to those of each, "
    assert rejections(device="cpu", tp_size=2) == [said.format(2, 1) + "as in 0-3|4-7"]
    monkeypatch.setenv(CORES, "0|1|0")
    assert rejections(device="cpu", tp_size=4) == [said.format(4, 3) + "as in 0-3|4-7"]
    monkeypatch.setenv(CORES, "0|1|0|1")
    assert not rejections(device="cpu", tp_size=4)


@pytest.mark.parametrize("option", ["host_snapshots", "host_load_timeout_seconds"])
def test_host_cache_flags_need_a_host_cache(option: str) -> None:
    options = Options(**{option: 7})
    line = (
        f"the option {option} 7 is not supported: it is a setting of the host cache; give --enable-hierarchical-cache"
    )
    assert rejections(options=options) == [line]
    assert rejections(options=options, enable_hierarchical_cache=True) == []


def test_snapshots_for_the_running_requests() -> None:
    ranks = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "device": "cpu"}
    few = Options(max_snapshots=7)
    (line,) = rejections(options=few, max_running_requests=4)
    assert line.startswith("dsv4_sglang option max_snapshots is 7; 4 running requests") and "at least 8" in line
    for given in ({}, {"max_running_requests": 3}, {"max_running_requests": 6, **ranks}):
        assert rejections(options=few, **given) == []
    for without in ({"disable_radix_cache": True}, {"disaggregation_mode": "decode", "device": "cpu"}):
        assert rejections(options=few, max_running_requests=4, **without) == []


def test_a_renamed_flag_is_seen_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_contract, "FLAGS_READ", (*sglang_contract.FLAGS_READ, "something_renamed"))
    with pytest.raises(LaunchError, match=r"ServerArgs\.something_renamed, which this cache reads, does not exist"):
        sglang_contract.require(sglang_contract.flag_differences())


def test_resolved_flags() -> None:
    """A flag that SGLang may set and that this package does not read is rejected only as given by the user."""
    reject_resolved(arguments(triton_attention_num_kv_splits=16, quantization="modelopt_fp4", pp_size=1))
    with pytest.raises(ValueError, match="--pp-size 2 is not supported"):
        reject_resolved(arguments(pp_size=2))
    # SGLang has divided the chunks by the attention ranks, and set a flag from an environment variable.
    reject_resolved(arguments(tp_size=2, dp_size=2, enable_dp_attention=True, chunked_prefill_size=128))
    with pytest.raises(ValueError, match="--moe-a2a-backend megamoe is not supported"):
        reject_resolved(arguments(moe_a2a_backend="megamoe"))


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    made = ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_flags_have_their_names_in_sglang(parser: ArgumentParser) -> None:
    shown, own = parser.format_help(), {action.dest for action in parser._actions}
    # Some fields have no flag.
    fields = [field for field in (*REJECTED, *LIMITED, "context_length", "tp_size") if field in own]
    assert len(fields) > 0.9 * len({*REJECTED, *LIMITED})
    assert [field for field in fields if flag(field) not in shown] == []


def test_flags_that_are_read_have_no_prefixes(parser: ArgumentParser) -> None:
    """This package reads some flags without SGLang's parser."""
    options = [option for action in parser._actions for option in action.option_strings]
    read = [OPT_IN_FLAG, CONFIG_FLAG, *CPU_FLAGS]
    read += ["--host", "--port", "--api-key", "--ssl-certfile", "--ssl-ca-certs"]
    for name in read:
        assert [option for option in options if option.startswith("--") and name.startswith(option)] == [name]
