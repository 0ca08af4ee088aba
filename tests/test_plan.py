"""`dsv4-sglang plan`: weights against what was measured and what SGLang makes, the cache against a server's sizing."""

import json
import re
import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import nursery
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from benchmarks import capacity
from dsv4_sglang.cli import app
from dsv4_sglang.cli.plan import holds
from dsv4_sglang.srt import compat
from dsv4_sglang.srt.layout import served_layout
from dsv4_sglang.srt.options import Options, from_override_args
from dsv4_sglang.srt.plan import BESIDE_WEIGHTS, GPUS, Choice, Gpu, activation_bytes, graph_bytes, others, plan
from dsv4_sglang.srt.sizing import GIB
from dsv4_sglang.srt.weights import (
    DSparkHead,
    Format,
    Model,
    Split,
    draft_weight_bytes,
    dspark_weight_bytes,
    weight_bytes,
)
from dsv4_sglang.testing import tiny

ROOT = Path(__file__).parent.parent
FLASH, PRO = Model.flash(), Model.pro()
DSPARK = replace(FLASH, dspark=DSparkHead(stages=3, block=5, markov_rank=256))
HALF = replace(FLASH, routed_experts=128)
FLASHSHAPE = Path(capacity.__file__).parent / "configs" / "flashshape" / "config.json"


def choice(model: Model = FLASH, gpu: str = "h200", count: int = 2, **others: object) -> Choice:
    values: dict = {"tp": count, "dp": 1, "experts": model.experts, **others}
    return Choice(model, GPUS[gpu], count, **values)


# Weights


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """Every tensor of the tiny checkpoint, which is not quantised; SGLang keeps two kinds in another type."""
    tiny.make_tiny(tmp_path / "tiny", tiny.TinySpec())
    stored = 0
    for file in (tmp_path / "tiny").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                tensor = tensors.get_tensor(name)
                width = 4 if "compressor.norm" in name or "tid2eid" in name else tensor.element_size()
                stored += tensor.numel() * width
    counted = weight_bytes(Model.from_file(tmp_path / "tiny" / "config.json"), Split(1), Format.BF16)
    assert sum(counted.values()) - counted["RoPE tables"] == stored
    assert counted["RoPE tables"] == 2 * 32768 * 32 * 8


@pytest.mark.parametrize(("model", "billions"), [(FLASH, 284), (PRO, 1573)], ids=["flash", "pro"])
def test_parameters_of_the_released_models(model: Model, billions: float) -> None:
    """284 B and 1.6 T (1.57 T by their config) as published; fp32 parameters count double here, which is little."""
    whole = weight_bytes(replace(model, quantised=False), Split(1), Format.BF16)
    assert (sum(whole.values()) - whole["RoPE tables"]) / 2e9 == pytest.approx(billions, rel=0.003)


@pytest.mark.slow
def test_weights_as_sglang_makes_them(tmp_path: Path) -> None:
    nursery.run_tests(tmp_path / "log", "weights_of_sglang.py")


# What was measured; docs/recipes.md names the runs and these distances.


@pytest.mark.parametrize(
    ("model", "split", "experts", "gib", "within"),
    [
        pytest.param(FLASH, Split(2), Format.FP4, 74.6, 0.002, id="Flash, FP4, 2 H200"),
        pytest.param(HALF, Split(2), Format.FP8, 71.1, 0.008, id="128 experts, FP8, 2 H200"),
        pytest.param(FLASH, Split(8), Format.FP8, 35.52, 0.008, id="Flash, FP8, 8 L20"),
    ],
)
def test_loaded_weights(model: Model, split: Split, experts: Format, gib: float, within: float) -> None:
    loaded = sum(weight_bytes(model, split, experts).values()) + BESIDE_WEIGHTS
    assert loaded / GIB == pytest.approx(gib, rel=within)


def measured(model: Model, experts: Format, checkpoints: int, **others: object) -> Choice:
    """A launch that was measured. A tenth of its memory was in checkpoints, which is more than the default is now, so
    it has as many as were there. In the first that follows from its tokens; the others' logs say it."""
    return choice(model, experts=experts, options=Options(max_checkpoints=checkpoints), **others)


ALL_EXPERTS = measured(FLASH, Format.FP4, 1261)
HALF_OF_THEM = measured(HALF, Format.FP8, 1364)
ONE_GPU = choice(Model.from_file(FLASHSHAPE), count=1, mem_fraction=0.6, experts=Format.FP8)
EAGLE = measured(ONE_GPU.model, Format.FP8, 2223, count=1, mem_fraction=0.6, draft_tokens=4)
EAGLE_REAL_WIDTHS = choice(HALF, experts=Format.FP8, mem_fraction=0.75, draft_tokens=4)


@pytest.mark.parametrize(
    ("given", "tokens", "within"),
    [
        pytest.param(ALL_EXPERTS, 11_287_808, 0.002, id="256 experts, FP4"),
        pytest.param(HALF_OF_THEM, 12_244_608, 0.013, id="128 experts, FP8"),
        pytest.param(EAGLE, 21_032_448, 0.01, id="small widths, EAGLE 3/1/4"),
        pytest.param(EAGLE_REAL_WIDTHS, 7_898_496, 0.01, id="128 experts, FP8, EAGLE 3/1/4"),
    ],
)
def test_tokens_of_a_server(given: Choice, tokens: int, within: float) -> None:
    assert plan(given).tokens == pytest.approx(tokens, rel=within)


def test_memory_for_the_cache_on_one_gpu() -> None:
    assert plan(ONE_GPU).available_gib == pytest.approx(78.82, rel=0.005)


def test_what_the_log_of_the_run_with_speculation_said() -> None:
    """The draft model took 0.08 GiB; slots and checkpoints of these sizes, and with the blocks 79.131 GiB in all."""
    draft = draft_weight_bytes(EAGLE.model, Split(1), Format.FP8)
    assert sum(draft) / GIB == pytest.approx(0.08, abs=0.005)
    made = plan(EAGLE)
    assert (made.layout.slot_bytes, made.layout.checkpoint_bytes) == (6_586_752, 3_821_952)
    blocks = sum(part.bytes for part in made.layout.block_parts(21_032_448 // 128 + 1))
    assert (made.demand.bytes(made.layout) + blocks) / GIB == pytest.approx(79.131, abs=0.0005)


@pytest.mark.parametrize("block", [5, 7])
def test_dspark(block: int) -> None:
    """Slots as wide as for EAGLE with as many tokens, and rings of three stages in the place of a NextN layer's one.
    8,200,064 bytes are those of a server (docs/speculation.md)."""
    made, eagle = (plan(choice(model, draft_tokens=block + 1)) for model in (DSPARK, FLASH))
    rows = (block + 1) + (block + 1) % 2 + 128
    ring = eagle.layout.schemas[0].row_format.row_bytes * rows
    assert made.layout.slot_bytes - eagle.layout.slot_bytes == 2 * ring
    assert made.layout.checkpoint_bytes - eagle.layout.checkpoint_bytes == 2 * ring
    assert made.layout.block_bytes == eagle.layout.block_bytes
    assert block == 5 or made.layout.slot_bytes == 8_200_064
    head = dspark_weight_bytes(DSPARK, Split(2), Format.FP4)
    assert made.weights["DSPARK head"] == head > 3 * 0.9 * draft_weight_bytes(FLASH, Split(2), Format.FP4).layer
    assert sum(part.bytes for part in made.parts) == GPUS["h200"].memory
    assert made.tokens < eagle.tokens < plan(choice()).tokens


def test_what_sglang_reckons_with_outside_of_the_pools() -> None:
    """The estimates are SGLang's own, which are the same with speculation."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.server_args import ServerArgs

    for gpu, tp, dp, running in (("h200", 2, 1, 256), ("h200", 8, 8, 2048), ("b200", 4, 2, 4096)):
        given = choice(gpu=gpu, count=tp, dp=dp, running=running, chunk=dp * 1024, draft_tokens=4)
        arguments = SimpleNamespace(
            disaggregation_mode="null",
            speculative_num_draft_tokens=4,
            chunked_prefill_size=given.chunk,
            tp_size=tp,
            pp_size=1,
            dp_size=dp,
            _resolved=lambda dp=dp: SimpleNamespace(enable_dp_attention=dp > 1),
            cuda_graph_config=SimpleNamespace(
                decode=SimpleNamespace(backend=Backend.FULL, max_bs=min(running // dp, 256 if tp < 4 else 512)),
                prefill=SimpleNamespace(backend=Backend.DISABLED),
            ),
        )
        reserve = ServerArgs.pre_capture_activation_reserve_mb(arguments, given.gpu.memory / 2**20)  # type: ignore[arg-type]
        assert activation_bytes(given) == reserve * 2**20
        assert graph_bytes(given) == ServerArgs.reserve_for_graph_mb(arguments) * 2**20  # type: ignore[arg-type]


# docs/recipes.md

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
HELD = re.compile(
    r"([\d,]+) tokens; ([\d,]+) requests of 32,768 \(([\d,]+) at once\); ([\d,]+) checkpoints; weights ([\d.]+) of .*"
)


def recipes() -> list[tuple[str, str, str]]:
    """(GPUs as the tables name them, arguments of `plan`, command) of each recipe of the page."""
    plain = RECIPES.replace(" \\\n", "")
    return re.findall(
        r"^(.*\d [HB]200):\n\n    dsv4-sglang plan (.*)\n    (dsv4-sglang serve .*)$", plain, re.MULTILINE
    )


@pytest.mark.parametrize(("gpus", "arguments", "command"), recipes(), ids=[gpus for gpus, *_ in recipes()])
def test_recipe(gpus: str, arguments: str, command: str) -> None:
    lines = invoke(*shlex.split(arguments)).splitlines()
    held = HELD.fullmatch(lines[1])
    assert held is not None
    assert f"| {gpus} | {' | '.join(held.groups())} |\n" in RECIPES
    assert shlex.split(command) == shlex.split(lines[-1])
    assert "left for activations" not in "".join(line for line in lines if line.startswith("as given:"))


def test_every_figure_of_the_tables_has_a_recipe() -> None:
    tables = re.findall(r"^\| ((?:[\w ]+, )*\d [HB]200) \| [\d,]+ \|", RECIPES, re.MULTILINE)
    assert sorted(tables) == sorted(gpus for gpus, *_ in recipes())
    assert len(tables) == 22


def test_distances_on_the_page() -> None:
    def row(measured: float, computed: float, form: str) -> str:
        return f" | {measured:{form}} | {computed:{form}} | {100 * (computed / measured - 1):+.1f} % |"

    def loaded(model: Model, split: Split, experts: Format) -> float:
        return (sum(weight_bytes(model, split, experts).values()) + BESIDE_WEIGHTS) / GIB

    for expected in (
        row(11_287_808, plan(ALL_EXPERTS).tokens, ","),
        row(74.6, loaded(FLASH, Split(2), Format.FP4), ".1f"),
        row(12_244_608, plan(HALF_OF_THEM).tokens, ","),
        row(71.1, loaded(HALF, Split(2), Format.FP8), ".1f"),
        row(78.82, plan(ONE_GPU).available_gib, ".2f"),
        row(21_032_448, plan(EAGLE).tokens, ","),
        row(7_898_496, plan(EAGLE_REAL_WIDTHS).tokens, ","),
        row(35.52, loaded(FLASH, Split(8), Format.FP8), ".2f"),
    ):
        assert expected in RECIPES
    assert f"{loaded(PRO, Split(4), Format.FP4):.0f} GiB of a GPU on four" in RECIPES


# The plan


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_the_parts_are_the_memory_of_a_gpu(gpu: str, drafts: int) -> None:
    made = plan(choice(gpu=gpu, count=4, draft_tokens=drafts))
    assert sum(part.bytes for part in made.parts) == GPUS[gpu].memory
    assert all(part.bytes > 0 for part in made.parts)
    within = sum(part.bytes for part in made.parts if part.group not in ("graphs", "reserve"))
    if drafts:  # What the draft model gives back once the cache is there, the fraction counted.
        within += draft_weight_bytes(FLASH, Split(4), Format.FP4).until_shared
    fraction = within / (GPUS[gpu].memory - made.parts[-3].bytes)
    assert made.parts[-3].name == "context, NCCL"
    # Whole blocks: up to two are left over.
    assert 0 <= 0.85 - fraction < 3 * made.layout.block_bytes / within


def test_more_holds_more() -> None:
    def tokens(**values: object) -> int:
        return plan(choice(**values)).total_tokens  # type: ignore[arg-type]

    counts = [tokens(count=count) for count in (2, 4, 8)]
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[2]
    assert tokens(gpu="b200") > tokens(gpu="h200")
    assert tokens(mem_fraction=0.8) < tokens() < tokens(mem_fraction=0.9)
    assert tokens(running=512) < tokens() < tokens(running=128)
    assert tokens(kv_cache_dtype="bfloat16") < tokens()
    assert tokens(options=Options(hca_state="raw")) < tokens()
    assert tokens(draft_tokens=8) < tokens(draft_tokens=4) < tokens(draft_tokens=2) < tokens()
    assert tokens(options=Options(max_checkpoints=5000)) < tokens() < tokens(options=Options(max_checkpoints=600))
    assert tokens(count=4, tp=2) == 2 * tokens(), "two servers"
    assert plan(choice(PRO, count=8)).total_tokens < plan(choice(count=8)).total_tokens


def test_replicas_of_dp_attention_have_a_cache_each() -> None:
    """A replica is sized as a server of its own with its share of the requests and of a step, and more weights."""
    made, plain = plan(choice(count=8, dp=4)), plan(choice(count=8))
    assert (made.demand.running, made.demand.staging) == (64, 16)
    assert made.total_tokens == 4 * made.tokens and made.checkpoints == 4 * made.demand.checkpoints
    assert made.at_once == 256
    grown = {name for name in made.weights if made.weights[name] > plain.weights[name]}
    assert grown == {"attention", "embedding, head"}, "experts are split over all"
    assert all(made.weights[name] == plain.weights[name] for name in set(plain.weights) - grown)


def test_blocks_of_another_gpu_are_padded_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    there = served_layout(FLASH.config, torch.float8_e4m3fn, Options(), torch.device("cuda", 0))
    counted = plan(choice(gpu="b200")).layout
    assert (counted.block_bytes, counted.slot_bytes) == (there.block_bytes, there.slot_bytes)
    assert counted.checkpoint_bytes == there.checkpoint_bytes
    assert counted.block_bytes > plan(choice(gpu="h200")).layout.block_bytes


def test_requests_are_whole_blocks() -> None:
    made = plan(choice(running=8))
    assert made.requests == made.tokens // 32768 and made.at_once == 8
    odd = replace(made, choice=replace(made.choice, request=129))
    assert odd.requests == made.tokens // 256


def test_neighbours_differ_in_one_thing() -> None:
    given = choice(count=4)
    found = dict(others(given))
    assert list(found) == [
        "--max-running-requests 128",
        "--max-running-requests 512",
        "--mem-fraction-static 0.80",
        "--mem-fraction-static 0.90",
        "--kv-cache-dtype bfloat16",
        "--hca-state raw",
        "--speculative-num-draft-tokens 4",
        "--dp 4",
        "--tp 2",
        "--count 2",
        "--count 8",
    ]
    for other in found.values():
        changed = {name for name in vars(given) if vars(given)[name] != vars(other)[name]}
        assert len(changed) == 1 or changed == {"count", "tp"}
    assert "--tp 4" in dict(others(replace(given, tp=2))), "two servers, or one"
    drafting = dict(others(replace(given, draft_tokens=2)))
    assert drafting["no speculation"] == given and "--hca-state raw" not in drafting
    raw = replace(given, options=Options(hca_state="raw"))
    assert not any("speculative" in change for change in dict(others(raw)))
    for other in (choice(count=8, dp=8), choice(PRO, count=8), choice(count=1, gpu="b200"), replace(given, running=1)):
        assert other not in dict(others(other)).values(), "every one of them can be made, and differs"


def test_neighbours_of_a_model_with_a_dspark_head() -> None:
    """The other way to draft is not for its checkpoint, and replicas of DP attention are refused with this one."""
    plain = choice(DSPARK, count=4)
    changes = dict(others(plain))
    assert changes["--speculative-algorithm DSPARK"] == replace(plain, draft_tokens=6)
    assert "--dp 4" in changes and not any("num-draft-tokens" in change for change in changes)
    drafting = dict(others(replace(plain, draft_tokens=8)))
    assert drafting["no speculation"] == plain
    assert not any(change.startswith("--dp") for change in drafting)
    assert not any("DSPARK" in change for change in dict(others(choice(DSPARK, count=4, dp=4))))


# The command


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.output


def test_what_is_printed() -> None:
    made = plan(choice(count=4))
    printed = invoke("--gpu", "h200", "--count", "4", "--model", "flash")
    lines = printed.splitlines()
    assert lines[1] == holds(made)
    assert lines[-1] == made.choice.command()
    for part in made.parts:
        assert re.search(rf"{re.escape(part.name)} +{part.bytes / GIB:.2f} ", printed), part
    assert re.search(rf"as given +{made.total_tokens:,} +{made.requests} +256 +{made.checkpoints:,}", printed)


def test_the_command_has_every_choice() -> None:
    printed = invoke(
        *("--gpu", "140", "--count", "4", "--model", "flash", "--dp", "2", "--kv-cache-dtype", "bfloat16"),
        *("--indexer-format", "nvfp4", "--hca-state", "raw", "--max-checkpoints", "400", "--experts", "fp8"),
        *("--max-running-requests", "64", "--chunked-prefill-size", "4096", "--mem-fraction-static", "0.9"),
        *("--context-length", "262144"),
    )
    words = shlex.split(printed.splitlines()[-1])
    values = dict(pairwise(words))
    assert values["--tp-size"] == "4" and values["--dp-size"] == "2" and "--enable-dp-attention" in words
    assert values["--kv-cache-dtype"] == "bfloat16" and values["--context-length"] == "262144"
    assert values["--max-running-requests"] == "64" and values["--chunked-prefill-size"] == "4096"
    assert values["--mem-fraction-static"] == "0.9"
    options = from_override_args(values["--json-model-override-args"])
    assert options == Options(indexer_format="nvfp4", hca_state="raw", max_checkpoints=400)
    assert not any("speculative" in word for word in words)
    known = compat.flag_defaults().keys()
    assert all(word[2:].replace("-", "_") in known for word in words if word.startswith("--"))


def test_the_command_with_speculation() -> None:
    printed = invoke("--gpu", "h200", "--count", "4", "--model", "flash", "--speculative-num-draft-tokens", "3")
    lines = printed.splitlines()
    assert lines[0].endswith("--speculative-num-draft-tokens 3")
    assert lines[-1].endswith(
        "--speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3"
    )
    assert re.search(r"NextN layer +0\.8\d ", printed)


@pytest.mark.parametrize("given", [None, 5, 7])
def test_the_command_with_dspark(given: int | None, tmp_path: Path) -> None:
    tiny.make_tiny(tmp_path / "mine", tiny.TinySpec(dspark=5))
    words = () if given is None else ("--speculative-dspark-block-size", str(given))
    common = ("--gpu", "8", "--count", "1", "--model", str(tmp_path / "mine"), "--context", "4096")
    printed = invoke(*common, "--max-running-requests", "4", "--speculative-algorithm", "DSPARK", *words)
    lines = printed.splitlines()
    assert lines[0].endswith(f", --speculative-algorithm DSPARK, blocks of {given or 5}")
    ending = " --speculative-dspark-block-size 7" if given == 7 else ""
    assert lines[-1].endswith(f" --speculative-algorithm DSPARK{ending}")
    assert "DSPARK head" in printed and "NextN" not in printed


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("DSPARK", "--speculative-dspark-block-size", "9"), r"block-size 9: expected 1 to 8"),
        (("DSPARK", "--speculative-dspark-block-size", "-1"), r"block-size -1: expected at least 1"),
        (("DSPARK", "--speculative-num-draft-tokens", "5"), r"num-draft-tokens 5: .* leave it out, or give 6"),
        (("DSPARK", "--dp", "2", "--count", "2"), r"DSPARK with --dp 2 is refused at start"),
        (("EAGLE", "--speculative-num-draft-tokens", "4"), r"mine has a DSPARK head and no NextN layer"),
        (("MEDUSA",), r"--speculative-algorithm is 'MEDUSA'; expected EAGLE, NEXTN or DSPARK"),
    ],
)
def test_bad_input_about_dspark(words: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(tiny.config_json(tiny.TinySpec(dspark=5))))
    count = () if "--count" in words else ("--count", "1")
    arguments = ["plan", "--gpu", "8", *count, "--model", str(tmp_path / "mine"), "--speculative-algorithm", *words]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "600"})
    assert result.exit_code == 2
    assert re.search(complaint, " ".join(result.output.replace("│", " ").split())), result.output


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    tiny.make_tiny(tmp_path / "mine", tiny.TinySpec())
    arguments = ("--gpu", "8", "--count", "1", "--context", "4096", "--max-running-requests", "4")
    printed = [invoke(*arguments, "--model", str(path)) for path in (tmp_path / "mine", tmp_path / "mine/config.json")]
    assert printed[0] == printed[1]
    assert "mine, 1 x GPU of 8 GiB" in printed[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "h300"], r"--gpu is 'h300'; expected h100, h200, b200, or GiB"),
        (["--gpu", "-3"], r"--gpu is '-3'; expected"),
        (["--model", "lite"], r"--model 'lite' is no file; expected flash, pro, or a config.json"),
        (["--count", "16"], r"splits attention over 16 GPUs, which does not divide the 8 groups .* 1, 2, 4, 8"),
        (["--count", "4", "--tp", "3"], r"--count 4 is no multiple of --tp 3"),
        (["--count", "4", "--dp", "3"], r"--dp 3 does not divide --tp 4"),
        (["--count", "0"], r"--count is 0; expected at least 1"),
        (["--model", "pro"], r"DeepSeek-V4-Pro does not fit into 2 H200: its weights take 399.* --count 8"),
        (["--count", "1"], r"does not fit into 1 H200.* What fits: --count 2"),
        (["--model", "pro", "--count", "8", "--gpu", "h100"], r"does not fit into 8 H100.* Take larger GPUs"),
        (["--mem-fraction-static", "0.5"], r"does not fit into 2 H200.* Raise --mem-fraction-static above 0.541"),
        (["--mem-fraction-static", "1.5"], r"--mem-fraction-static is 1.5; expected"),
        (["--mem-fraction-static", "0.57"], r"one request of the context length.* --context-length"),
        (["--max-running-requests", "20000"], r"state slots do not fit.* Lower --max-running-requests"),
        (
            ["--count", "4", "--max-running-requests", "3500", "--mem-fraction-static", "0.9"],
            r"leaves .* GiB too little .* Lower it",
        ),
        (
            ["--max-running-requests", "2", "--count", "4", "--dp", "4"],
            r"--max-running-requests 2 is divided by --dp 4",
        ),
        (["--max-checkpoints", "511"], r"max_checkpoints is 511; 256 running requests .* need at least 512"),
        (["--kv-cache-dtype", "fp4"], r"--kv-cache-dtype is 'fp4'; expected one of auto, fp8_e4m3, bfloat16"),
        (["--hca-state", "none"], r'option hca_state is "none"; expected "online" \| "raw"'),
        (["--experts", "int4"], r"--experts is 'int4'; expected one of bf16, fp8, fp4"),
        (["--speculative-num-draft-tokens", "1"], r"--speculative-num-draft-tokens 1: expected 2 to 9, .* or 0 for no"),
        (["--speculative-num-draft-tokens", "10"], r"--speculative-num-draft-tokens 10: expected 2 to 9"),
        (
            ["--speculative-num-draft-tokens", "4", "--hca-state", "raw"],
            r"--speculative-num-draft-tokens 4: .* --hca-state raw; give online",
        ),
        (["--speculative-algorithm", "DSPARK"], r"DeepSeek-V4-Flash has no DSPARK head .* give EAGLE, or --model the"),
        (["--speculative-algorithm", "EAGLE"], r"--speculative-algorithm EAGLE: give --speculative-num-draft-tokens"),
        (["--speculative-dspark-block-size", "5"], r"block-size 5: give --speculative-algorithm DSPARK with it"),
        (["--chunked-prefill-size", "1000"], r"--chunked-prefill-size 1000 is 1000 tokens .* multiple of 128"),
        (["--context-length", "2000000"], r"--context-length is 2000000; expected 1 to 1048576"),
        (["--context-length", "4096"], r"--context 32768 is longer than a request may be: 4096"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments: list[str], complaint: str) -> None:
    given = {"--gpu": "h200", "--count": "2", "--model": "flash"}
    words = [word for name, value in given.items() if name not in arguments for word in (name, value)]
    result = CliRunner().invoke(app, ["plan", *words, *arguments], env={"COLUMNS": "600"})
    assert result.exit_code == 2
    assert re.search(complaint, " ".join(result.output.replace("│", " ").split())), result.output


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hc_mult": None}, "config field 'hc_mult' is missing"),
        ({"n_routed_experts": "many"}, "config field 'n_routed_experts' is 'many'; expected an integer"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method' is 'awq'; expected 'fp8'"),
        ({"head_dim": 128}, "config field 'head_dim' is 128; this cache stores only 512"),
    ],
)
def test_a_config_that_is_wrong(change: dict[str, object], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**tiny.config_json(tiny.TinySpec()), **change}))
    result = CliRunner().invoke(
        app, ["plan", "--gpu", "h200", "--count", "1", "--model", str(file)], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 2 and complaint in result.output


def test_a_model_without_a_nextn_layer_does_not_draft(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**tiny.config_json(tiny.TinySpec()), "num_nextn_predict_layers": 0}))
    model = Model.from_file(file)
    with pytest.raises(ValueError, match=r"num-draft-tokens 4: .* has no NextN layer .*num_nextn_predict_layers"):
        choice(model, count=1, draft_tokens=4)
    assert not any("speculative" in change for change in dict(others(choice(model, count=1))))


def test_experts_of_an_unquantised_model_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny.config_json(tiny.TinySpec())))
    with pytest.raises(ValueError, match="are not quantised, and this package serves them as they are; give bf16"):
        choice(Model.from_file(file), count=1, experts=Format.FP4)


def test_another_gpu_by_its_memory() -> None:
    same = plan(replace(choice(), gpu=Gpu("x", GPUS["h200"].memory, "")))
    assert same.tokens == plan(choice()).tokens


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"memory.{suffix}"
    invoke("--gpu", "h200", "--count", "4", "--model", "flash", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_plot_of_an_unknown_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["plan", "--gpu", "h200", "--count", "4", "--model", "flash", "--plot", str(tmp_path / "memory.xyz")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "'xyz' is not supported" in result.output


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["plan", "--gpu", "h200", "--count", "4", "--model", "flash", "--plot", str(tmp_path / "memory.png")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "pip install 'dsv4-sglang[plot]'" in result.output
