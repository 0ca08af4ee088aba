"""What becomes of each of SGLang's flags, on its real ServerArgs as given, before anything of them is resolved."""

from __future__ import annotations

from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, default_cuda_graph_config
from sglang.srt.server_args import ServerArgs

from dsv4_sglang.srt import compat, contracts, flags, launch
from dsv4_sglang.srt.decisions import Launch
from dsv4_sglang.srt.options import Options
from dsv4_sglang.srt.refusals import (
    LIMITS,
    flag,
    refuse_given,
    refuse_options,
    refuse_release,
    refuse_resolved,
)

DEFAULTS = compat.flag_defaults()
REFUSED = {field: group for group in flags.REFUSED for field in group.fields.split() if field in DEFAULTS}
"""Of the fields that this release has."""
LIMITED: dict[str, tuple[list[Any], list[Any]]] = {
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
    "speculative_algorithm": (["EAGLE3", "NGRAM", "STANDALONE", "DFLASH"], [None, "EAGLE", "NEXTN"]),
    "speculative_draft_attention_backend": (["dsv4", "triton"], [None, "dsv4_sglang"]),
    "speculative_eagle_topk": ([4], [None, 1]),
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
"""Values of each limited flag that are refused, and such that are not."""


def arguments(**given: Any) -> ServerArgs:
    """SGLang resolves nothing for a model path of "dummy"."""
    return ServerArgs(**{"model_path": "dummy", "device": "cuda", **given})


def config(**values: Any) -> SimpleNamespace:
    """As far as refusals look at the model's."""
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


def refusals(hf_config: SimpleNamespace | None = None, options: Options | None = None, **given: Any) -> list[str]:
    """The lines of the refusal of a launch with these flags, none if it is served."""
    try:
        refuse_given(arguments(**given), hf_config or config(), options or Options())
    except ValueError as error:
        first, *lines = str(error).splitlines()
        assert first == "dsv4_sglang refuses to start."
        return lines
    return []


def another(default: Any) -> Any:
    """A value of a flag that is not its default."""
    if default is None or isinstance(default, str):
        return "other"
    if isinstance(default, list):
        return ["other"]
    return True if default is False else default + 1


def test_every_flag_is_listed_once() -> None:
    """A flag of a newer SGLang belongs into one of the groups of `flags`."""
    assert len(set(flags.known())) == len(flags.known())
    assert sorted(DEFAULTS.keys() - set(flags.known())) == []
    assert all(group.reason for group in (*flags.SUPPORTED, *flags.WITHOUT_EFFECT, *flags.REFUSED))
    assert contracts.flag_differences() == []


def test_limits_are_of_supported_flags_and_have_cases() -> None:
    assert list(LIMITED) == [limit.field for limit in LIMITS]
    assert set(LIMITED) <= {field for group in flags.SUPPORTED for field in group.fields.split()}


def test_a_plain_launch_is_served() -> None:
    assert refusals() == []
    assert refusals(cuda_graph_config=graphs()) == []
    refuse_resolved(arguments())


@pytest.mark.parametrize("field", REFUSED)
def test_each_refused_flag_has_its_line(field: str) -> None:
    value = another(DEFAULTS[field])
    shown = flag(field) if value is True else f"{flag(field)} {value}"
    assert refusals(**{field: value}) == [f"{shown} is not supported: {REFUSED[field].reason}"]
    assert refusals(**{field: DEFAULTS[field]}) == []


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.field for limit in LIMITS])
def test_each_limit_has_its_line(limit: Any) -> None:
    bad, good = LIMITED[limit.field]
    for value in bad:
        (line,) = refusals(**{limit.field: value})
        assert line == f"{flag(limit.field)} {value} is not supported: {limit.reason}"
    for value in good:
        assert refusals(**{limit.field: value}) == []


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"prefill": "breakable"}, "--cuda-graph-backend-prefill breakable is not supported: "),
        ({"decode": "tc_piecewise"}, "--cuda-graph-backend-decode tc_piecewise is not supported: "),
    ],
)
def test_graphs(given: dict[str, str], line: str) -> None:
    (found,) = refusals(cuda_graph_config=graphs(**given))
    assert found.startswith(line)
    assert refusals(cuda_graph_config=graphs(decode="disabled")) == []


def test_what_a_newer_release_serves_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SERVES_HOST_TIER", False)
    monkeypatch.setattr(compat, "SERVES_DSPARK", False)
    monkeypatch.setattr(compat, "SERVES_DISAGGREGATION", False)
    (line,) = refusals(device="cpu", disaggregation_mode="prefill")
    assert line.startswith("--disaggregation-mode prefill is not supported: ") and line.endswith("use 0.5.17 or 0.5.23")
    (line,) = refusals(device="cpu", enable_hierarchical_cache=True)
    assert line.startswith("--enable-hierarchical-cache is not supported: ") and line.endswith("use 0.5.17 or 0.5.23")
    (line,) = refusals(config(dspark_target_layer_ids=[40]), device="cpu", speculative_algorithm="DSPARK")
    assert line.startswith("--speculative-algorithm DSPARK is not supported: ")
    assert line.endswith("use 0.5.17 or 0.5.23")
    monkeypatch.setattr(compat, "SERVES_DP_ATTENTION", False)
    (line,) = refusals(tp_size=2, dp_size=2, enable_dp_attention=True)
    assert line.startswith("--enable-dp-attention is not supported: ") and line.endswith("use 0.5.17")
    assert refusals(device="cpu", tp_size=2, dp_size=2, enable_dp_attention=True) == []


def test_a_storage_wants_a_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SERVES_HOST_TIER", True)
    monkeypatch.setattr(compat, "SERVES_DSPARK", True)
    tier = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    assert refusals(**tier) == refusals(speculative_algorithm="EAGLE", **tier) == []
    assert refusals(config(dspark_target_layer_ids=[40, 41, 42]), speculative_algorithm="DSPARK", **tier) == []
    (line,) = refusals(hicache_storage_backend="file")
    assert line == (
        "--hicache-storage-backend file is not supported: it stands behind the host tier; "
        "give --enable-hierarchical-cache"
    )


@pytest.mark.parametrize("storage", ["file", "nixl", "mooncake"])
def test_random_weights_are_stored_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    monkeypatch.setattr(compat, "SERVES_HOST_TIER", True)
    variable = f"SGLANG_HICACHE_{storage.upper()}_BACKEND_STORAGE_DIR"
    monkeypatch.delenv(variable, raising=False)
    tier = {"enable_hierarchical_cache": True, "hicache_storage_backend": storage}
    assert refusals(**tier) == []
    lines = refusals(load_format="dummy", **tier)
    if storage == "mooncake":
        assert lines == [], "it is set up by name"
        return
    assert lines == [
        f"--hicache-storage-backend {storage} with --load-format dummy is not supported: what random weights compute "
        f"is stored only in a folder that is named; set {variable}, or leave the storage out"
    ]
    monkeypatch.setenv(variable, "/pages")
    assert refusals(load_format="dummy", **tier) == []


def test_servers_that_prefill_or_decode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for served in ("SERVES_DISAGGREGATION", "SERVES_HOST_TIER", "SERVES_DSPARK"):
        monkeypatch.setattr(compat, served, True)
    for mode in ("prefill", "decode"):
        apart = {"disaggregation_mode": mode, "device": "cpu"}
        assert refusals(**apart) == refusals(speculative_algorithm="EAGLE", **apart) == []
        by_nixl = {"disaggregation_mode": mode, "disaggregation_transfer_backend": "nixl"}
        assert refusals(disaggregation_mode=mode) == refusals(**by_nixl) == []
        (line,) = refusals(device="cpu", **by_nixl)
        assert line.startswith("--disaggregation-transfer-backend nixl is not supported: SGLang has it take memory of ")
        ranks = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
        (line,) = refusals(**ranks, **apart)
        assert line.startswith(f"--disaggregation-mode {mode} is not supported: with --enable-dp-attention ")
    (line,) = refusals(disaggregation_mode="decode", enable_hierarchical_cache=True, device="cpu")
    assert line == (
        "--enable-hierarchical-cache is not supported: a decode server has no prefix cache; "
        "give it to the prefill server"
    )
    assert refusals(disaggregation_mode="prefill", enable_hierarchical_cache=True, device="cpu") == []
    with_dspark = config(dspark_target_layer_ids=[40])
    (line,) = refusals(with_dspark, device="cpu", disaggregation_mode="decode", speculative_algorithm="DSPARK")
    assert line.startswith("--disaggregation-mode decode is not supported: with --speculative-algorithm DSPARK ")
    (line,) = refusals(device="cpu", disaggregation_mode="decode", disaggregation_decode_enable_radix_cache=True)
    assert line.startswith("--disaggregation-decode-enable-radix-cache is not supported: a request arrives with ")


@pytest.mark.parametrize("variable", ["SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_RUST_SERVER"])
def test_variables(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    (line,) = refusals()
    assert line.startswith(f"{variable} is not supported: ")


def test_what_the_model_has_no_place_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SERVES_DSPARK", True)
    for processes in (1, 2, 4, 8):
        assert refusals(tp_size=processes) == []
    (line,) = refusals(tp_size=3)
    assert line.startswith("--tp-size 3 is not supported: the 8 groups ") and line.endswith("give 1 or 2 or 4 or 8")
    for drafts in (config(num_nextn_predict_layers=0), config(num_nextn_predict_layers=None)):
        (line,) = refusals(drafts, speculative_algorithm="EAGLE")
        assert line == "--speculative-algorithm EAGLE is not supported: the checkpoint has no NextN layer"
        assert refusals(drafts, speculative_algorithm="EAGLE", speculative_draft_model_path="elsewhere") == []
    with_dspark = config(num_nextn_predict_layers=1, dspark_target_layer_ids=[40, 41, 42])
    assert refusals(with_dspark, device="cpu", speculative_algorithm="DSPARK") == []
    (line,) = refusals(with_dspark, speculative_algorithm="EAGLE")
    assert line.endswith("the checkpoint has a DSPARK head and no NextN layer; give DSPARK")
    (line,) = refusals(device="cpu", speculative_algorithm="DSPARK")
    assert line.startswith("--speculative-algorithm DSPARK is not supported: the checkpoint has no DSPARK head")
    quantised = config(quantization_config={})
    assert refusals(quantised) == []
    (line,) = refusals(quantised, device="cpu")
    assert line.startswith("--device cpu is not supported: the checkpoint is quantised")
    (line,) = refusals(config(context_len=65537))
    assert line.startswith("--context-length 65537 is not supported: the model has positions for 65536 tokens")


def test_what_dspark_has_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SERVES_DSPARK", True)
    monkeypatch.setattr(compat, "SERVES_DP_ATTENTION", True)
    model = config(dspark_target_layer_ids=[40, 41, 42])
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    for where in ({}, {"device": "cpu"}):
        assert refusals(model, speculative_algorithm="DSPARK", **where) == []
    ranks = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "device": "cpu"}
    (line,) = refusals(model, speculative_algorithm="DSPARK", **ranks)
    assert line.startswith("--speculative-algorithm DSPARK with --enable-dp-attention is not supported: ")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    (line,) = refusals(model, device="cpu", speculative_algorithm="DSPARK")
    assert line.startswith("SGLANG_RAGGED_VERIFY_MODE=compact is not supported: ") and "give static" in line
    assert refusals(config(num_nextn_predict_layers=1), speculative_algorithm="EAGLE") == []


def test_attention_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dp-size` with `--enable-dp-attention`; heads are divided among the processes of a rank only."""

    monkeypatch.setattr(compat, "SERVES_DP_ATTENTION", True)

    def ranked(**given: Any) -> list[str]:
        return refusals(**{"tp_size": 4, "dp_size": 4, "enable_dp_attention": True, **given})

    assert ranked() == ranked(tp_size=32) == ranked(chunked_prefill_size=512, max_running_requests=4) == []
    assert ranked(ep_size=4) == ranked(moe_a2a_backend="deepep", ep_size=4) == ranked(chunked_prefill_size=-1) == []
    assert refusals(tp_size=8, ep_size=8, moe_a2a_backend="deepep", deepep_mode="low_latency") == []
    (line,) = refusals(dp_size=2)
    assert line.startswith("--dp-size 2 is not supported: ") and "--enable-dp-attention" in line
    (line,) = ranked(tp_size=6)
    assert line == "--dp-size 4 is not supported: the 6 processes of --tp-size are divided evenly among the ranks"
    (line,) = ranked(tp_size=64)
    assert line.startswith("--tp-size 64 is not supported: the 8 groups ") and line.endswith("give 4 or 8 or 16 or 32")
    (line,) = ranked(chunked_prefill_size=256)
    assert line.startswith("--chunked-prefill-size 256 is not supported: ") and "give a multiple of 512" in line
    (line,) = ranked(max_running_requests=3)
    assert line.startswith("--max-running-requests 3 is not supported: ") and line.endswith("give 4 or more")
    (line,) = refusals(device="cpu", tp_size=2, moe_a2a_backend="deepep")
    assert line.startswith("--moe-a2a-backend deepep is not supported: ") and line.endswith("give none")


def test_another_model() -> None:
    with pytest.raises(ValueError, match="the model is a LlamaForCausalLM; expected DeepseekV4ForCausalLM"):
        Launch(Options()).declarations(lambda *_: [], "LlamaForCausalLM", arguments(), SimpleNamespace())
    newer = SimpleNamespace(model_type="deepseek_v5")
    with pytest.raises(ValueError, match=r"'model_type' is 'deepseek_v5'; expected 'deepseek_v4'"):
        Launch(Options()).declarations(lambda *_: [], "DeepseekV4ForCausalLM", arguments(), newer)


V41: dict[str, dict[str, Any]] = {
    "--device cuda": {"device": "cuda"},
    "--speculative-algorithm DSPARK": {"speculative_algorithm": "DSPARK"},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--disaggregation-mode prefill": {"disaggregation_mode": "prefill"},
    "--tp-size 2": {"tp_size": 2},
    "--enable-dp-attention": {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "the option entry_format fp32": {"options": Options(entry_format="fp32")},
    "the option indexer_format nvfp4": {"options": Options(indexer_format="nvfp4")},
    "the option hca_state raw": {"options": Options(hca_state="raw")},
    "a checkpoint with Engram layers (engram_layer_ids)": {"facts": {"engram_layer_ids": [1, 14]}},
    "a checkpoint that takes images (vision_config)": {"facts": {"vision_n_layers": 32}},
}


@pytest.mark.parametrize("named", V41)
def test_what_does_not_go_with_v41(named: str) -> None:
    def lines(model_type: str, facts: dict[str, Any], options: Options, **given: Any) -> list[str]:
        model = config(model_type=model_type, dspark_target_layer_ids=[0, 1, 2], **facts)
        return refusals(model, options=options, **{"device": "cpu", **given})

    asked = {"facts": {}, "options": Options(), **V41[named]}
    said = [line for line in lines("deepseek_v41", **asked) if line.startswith(f"{named} is not supported: ")]
    assert said, lines("deepseek_v41", **asked)
    assert lines("deepseek_v41", {}, Options()) == []
    assert not [line for line in lines("deepseek_v4", **asked) if line in said]


def test_a_release_without_v41(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SERVES_V41", False)
    with pytest.raises(ValueError, match=r"DeepSeek-V4.1 is not supported: SGLang has the model from 0.5.23 on"):
        refuse_release("deepseek_v41")
    refuse_release("deepseek_v4")
    refuse_release(None)
    monkeypatch.setattr(compat, "SERVES_V41", True)
    refuse_release("deepseek_v41")


def test_all_at_once() -> None:
    changed = {field: another(DEFAULTS[field]) for field in REFUSED}
    limited = {field: bad[0] for field, (bad, _) in LIMITED.items()}
    assert len(refusals(**changed, **limited)) == len(changed) + len(limited)


def test_a_flag_that_is_not_listed_is_refused_when_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "WITHOUT_EFFECT", flags.WITHOUT_EFFECT[1:])
    assert refusals() == []
    (line,) = refusals(tokenizer_worker_num=2)
    assert line.startswith("--tokenizer-worker-num 2 is not supported: it is not known to this package (this is SGLang")


def test_a_renamed_flag_is_seen_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is read; what is refused is refused by its new name, too."""
    monkeypatch.setattr(flags, "SUPPORTED", (*flags.SUPPORTED, flags.Group("read", "something_renamed")))
    with pytest.raises(RuntimeError, match=r"ServerArgs\.something_renamed, which this cache reads, does not exist"):
        contracts.require(contracts.flag_differences())


def test_resolved_flags() -> None:
    """What SGLang may fill in by itself and nothing here reads is refused as given only."""
    refuse_resolved(arguments(triton_attention_num_kv_splits=16, quantization="modelopt_fp4", pp_size=1))
    with pytest.raises(ValueError, match="--pp-size 2 is not supported"):
        refuse_resolved(arguments(pp_size=2))
    # SGLang has divided chunks by the attention ranks, and turned an environment variable into a flag.
    refuse_resolved(arguments(tp_size=2, dp_size=2, enable_dp_attention=True, chunked_prefill_size=128))
    with pytest.raises(ValueError, match="--moe-a2a-backend megamoe is not supported"):
        refuse_resolved(arguments(moe_a2a_backend="megamoe"))


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    made = ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_flags_are_called_what_sglang_calls_them(parser: ArgumentParser) -> None:
    shown, own = parser.format_help(), {action.dest for action in parser._actions}
    # Some fields of newer releases have no flag.
    fields = [field for field in (*REFUSED, *LIMITED, "context_length", "tp_size") if field in own]
    assert len(fields) > 0.9 * len({*REFUSED, *LIMITED})
    assert [field for field in fields if flag(field) not in shown] == []


def test_abbreviations_are_those_of_the_parser(parser: ArgumentParser) -> None:
    """The shortest one of each flag that a launch looks at, and none that means another flag."""
    options = [option for action in parser._actions for option in action.option_strings]
    for name, shortest in launch.ABBREVIATED.items():
        unique = [n for n in range(3, len(name) + 1) if [o for o in options if o.startswith(name[:n])] == [name]]
        assert shortest == name[: unique[0]], name


def test_the_integrity_check_is_of_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SERVES_INTEGRITY_CHECK", False)
    refuse_options(Options())
    with pytest.raises(ValueError, match=r"the option integrity_check is not supported: .*; use 0.5.17 or 0.5.23"):
        refuse_options(Options(integrity_check=True))
