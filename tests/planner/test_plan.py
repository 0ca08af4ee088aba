"""Tests of `dsv4-sglang plan`: weights against measurements and SGLang, the cache against a server's sizing."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sglang.srt import runtime_context
from sglang.srt.arg_groups import memory_hook
from typer.testing import CliRunner

from benchmarks import capacity
from dsv4_sglang.cli import app
from dsv4_sglang.cli.plan import holds
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.planner import ask_sglang
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import BEFORE_WEIGHTS, BESIDE_WEIGHTS, GPUS
from dsv4_sglang.planner.models import Format, Model
from dsv4_sglang.planner.plan import attempt, plan
from dsv4_sglang.planner.recommend import GOALS, REQUESTS_OF_A_RANK, neighbours, recommend
from dsv4_sglang.planner.reserves import activation_bytes, graph_bytes, prefill_graph_bytes
from dsv4_sglang.planner.weights import DraftWeights, count_weights
from dsv4_sglang.srt.launch.options import Options, from_override_args
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.memory.sizing import GIB
from dsv4_sglang.srt.sglang.flags import flag_defaults
from dsv4_sglang.srt.sglang.planning import published
from dsv4_sglang.testing import tiny
from dsv4_sglang.testing.tiny_config import TinySpec, config_json
from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41
from dsv4_sglang.testing.tiny_v41 import config_json as v41_config_json


def changed(model: Model, **fields: object) -> Model:
    """Return the model with other fields in its config.json; None removes a field."""
    values = {name: value for name, value in {**model.values, **fields}.items() if value is not None}
    return Model(model.name, model.path, json.dumps(values))


ROOT = Path(__file__).parents[2]
FLASH, PRO = Model.of("flash"), Model.of("pro")
DSPARK = changed(
    FLASH,
    compress_ratios=[*FLASH.config.compress_ratios[:43], 0, 0, 0],
    dspark_target_layer_ids=[40, 41, 42],
    dspark_block_size=5,
    dspark_markov_rank=256,
    dspark_noise_token_id=1,
)
HALF = changed(FLASH, n_routed_experts=128)
SHAPES = Path(capacity.__file__).parent / "configs"
FLASHSHAPE = SHAPES / "flashshape" / "config.json"
V41 = Model.from_file(SHAPES / "v41wide" / "config.json")


@pytest.fixture(scope="module", autouse=True)
def prepared() -> Iterator[None]:
    """Prepare this process as the command would, but leave its GPUs visible to other tests.

    SGLang is imported before a command runs. transformers binds its log handler to the stderr of its first import;
    under CliRunner, that stderr is read as output and then closed.
    """
    importlib.import_module("sglang.srt.models.deepseek_v4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask_sglang, "import_sglang", lambda: None)
        yield


def draft_of(model: Model, experts: Format, tp: int) -> DraftWeights:
    draft = count_weights(model, experts, tp).draft
    assert draft is not None
    return draft


def choice(model: Model = FLASH, gpu: str = "h200", count: int = 2, **others: object) -> Choice:
    values: dict = {"tp": count, "dp": 1, "experts": model.experts, **others}
    return Choice(model, GPUS[gpu], count, **values)


WIDE = {"COLUMNS": "600"}


def invoke(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env=WIDE)
    assert result.exit_code == exit_code, result.output
    return result.output


def rejected(*arguments: str) -> str:
    """Return the error of the command. Required options have a default."""
    given = {"--gpu": "h200", "--count": "2", "--model": "flash"}
    words = [word for name, value in given.items() if name not in arguments for word in (name, value)]
    usage, hint, empty, *error = invoke(*words, *arguments, exit_code=2).splitlines()
    assert usage.startswith("Usage: ") and hint.startswith("Try '") and empty == "" and len(error) == 1
    return error[0]


# Weights


@pytest.mark.parametrize("make", [tiny.make_tiny, make_tiny_v41])
def test_weights_of_a_checkpoint(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The count equals every tensor of the tiny models, which are not quantised. SGLang keeps three kinds of tensors in
    a different type."""
    make(tmp_path / "tiny")
    stored = 0
    for file in (tmp_path / "tiny").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  `tensors` is not a dict.
                tensor = tensors.get_tensor(name)
                wider = any(part in name for part in ("compressor.norm", "indexer.k_norm", "tid2eid"))
                width = 4 if wider else tensor.element_size()
                stored += tensor.numel() * width
    model = Model.from_file(tmp_path / "tiny" / "config.json")
    counted = count_weights(model, Format.BF16, 1)
    tables = dict(counted.parts)["RoPE tables"]
    assert counted.bytes - tables == stored
    assert tables == 2 * 32768 * 32 * 8


@pytest.mark.parametrize(("model", "billions"), [(FLASH, 284), (PRO, 1573)], ids=["flash", "pro"])
def test_parameters_of_the_released_models(model: Model, billions: float) -> None:
    """Compare with the published 284 B and 1.6 T (1.57 T by its config). fp32 parameters count twice here, a small
    error."""
    whole = count_weights(changed(model, quantization_config=None), Format.BF16, 1)
    assert (whole.bytes - dict(whole.parts)["RoPE tables"]) / 2e9 == pytest.approx(billions, rel=0.003)


def test_the_configs_are_those_of_the_released_models() -> None:
    assert FLASH.config == DSV4Config.flash() and PRO.config == DSV4Config.pro()


def test_parts_of_a_split_add_up() -> None:
    """DP attention splits only the experts and the output head."""
    whole, half, ranks = (dict(count_weights(FLASH, Format.FP4, *split).parts) for split in ((1, 1), (2, 1), (2, 2)))
    for name in ("routed experts", "shared experts", "embedding, head"):
        assert half[name] == pytest.approx(whole[name] / 2, rel=1e-4), name
    for name in ("compressors, indexers", "routers, norms, streams", "RoPE tables"):
        assert half[name] == ranks[name] == whole[name], name
    assert ranks["attention"] == whole["attention"] > half["attention"] > whole["attention"] / 2
    assert ranks["routed experts"] == half["routed experts"]
    assert ranks["embedding, head"] == whole["embedding, head"] * 3 // 4
    fp8 = dict(count_weights(FLASH, Format.FP8, 2).parts)
    assert {name for name in fp8 if fp8[name] != half[name]} == {"routed experts"}
    values = 43 * 256 * 3 * 4096 * 2048
    assert whole["routed experts"] == values // 2 + values // 32
    assert fp8["routed experts"] == (values + values // 128**2 * 4) // 2


# Measured servers; docs/guides/planning.md lists some of the differences.


@pytest.mark.parametrize(
    ("model", "tp", "experts", "gib", "within"),
    [
        pytest.param(FLASH, 2, Format.FP4, 74.6, 0.002, id="Flash, FP4, 2 H200"),
        pytest.param(HALF, 2, Format.FP8, 71.1, 0.008, id="128 experts, FP8, 2 H200"),
        pytest.param(FLASH, 8, Format.FP8, 35.52, 0.008, id="Flash, FP8, 8 L20"),
    ],
)
def test_loaded_weights(model: Model, tp: int, experts: Format, gib: float, within: float) -> None:
    loaded = count_weights(model, experts, tp).bytes + BESIDE_WEIGHTS
    assert loaded / GIB == pytest.approx(gib, rel=within)


def measured(model: Model, experts: Format, snapshots: int, **others: object) -> Choice:
    """Return the choice of a measured launch with its number of snapshots. Snapshots took a tenth of the memory, more
    than today's default. The number follows from the tokens in the first launch and is in the log of the others."""
    return choice(model, experts=experts, options=Options(max_snapshots=snapshots), **others)


ALL_EXPERTS = measured(FLASH, Format.FP4, 1261)
HALF_OF_THEM = measured(HALF, Format.FP8, 1364)
EAGLE = measured(Model.from_file(FLASHSHAPE), Format.FP8, 2223, count=1, mem_fraction=0.6, draft_tokens=4)
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
    """docs/guides/planning.md lists the launches with the real widths."""
    made = plan(given).tokens
    assert made == pytest.approx(tokens, rel=within)
    row = f" | {tokens:,} | {made:,} | {100 * (made / tokens - 1):+.1f} % |"
    assert (row in PLANNING) == (given is not EAGLE)


def test_plan_equals_log_of_speculative_server() -> None:
    """The log gives 0.08 GiB for the draft model, the sizes of a slot and a snapshot, and 79.131 GiB with the
    blocks."""
    draft = draft_of(EAGLE.model, Format.FP8, 1)
    assert (draft.layer + draft.until_shared) / GIB == pytest.approx(0.08, abs=0.005)
    made = plan(EAGLE)
    assert (made.layout.slot_bytes, made.layout.snapshot_bytes) == (6_586_752, 3_821_952)
    blocks = sum(part.bytes for part in made.layout.block_parts(21_032_448 // 128 + 1))
    assert (made.demand.bytes(made.layout) + blocks) / GIB == pytest.approx(79.131, abs=0.0005)


def test_dspark() -> None:
    """Slots are as wide as for EAGLE with as many tokens, and have rings of three stages instead of one NextN layer. A
    server logged 8,200,064 bytes per slot."""
    made, eagle = (plan(choice(model, draft_tokens=8)) for model in (DSPARK, FLASH))
    ring = eagle.layout.schemas[0].kv_format.row_bytes * (128 + 8)
    assert made.layout.slot_bytes - eagle.layout.slot_bytes == 2 * ring
    assert made.layout.snapshot_bytes - eagle.layout.snapshot_bytes == 2 * ring
    assert made.layout.block_bytes == eagle.layout.block_bytes
    assert made.layout.slot_bytes == 8_200_064
    head = draft_of(DSPARK, Format.FP4, 2).layer
    assert made.weights["DSPARK head"] == head > 3 * 0.9 * draft_of(FLASH, Format.FP4, 2).layer
    assert sum(part.bytes for part in made.parts) == GPUS["h200"].memory
    assert made.tokens < eagle.tokens < plan(choice()).tokens


@pytest.mark.parametrize(
    ("gpu", "tp", "dp", "running", "chunk"),
    [("h200", 2, 1, 256, 8192), ("h200", 8, 1, 4096, 2048), ("h200", 8, 8, 2048, 8192), ("b200", 4, 2, 4096, 2048)],
)
def test_reserve_equals_that_of_sglang(gpu: str, tp: int, dp: int, running: int, chunk: int) -> None:
    """The estimates equal SGLang's. The capture batch size is given, because SGLang cannot know it
    without a GPU."""
    given = choice(gpu=gpu, count=tp, dp=dp, running=running, chunk=chunk, draft_tokens=4)
    server_args, *_ = ask_sglang.resolved_flags(
        FLASH.text,
        **given.sglang_fields(),
        cuda_graph_max_bs_decode=min(running // dp, 256 if tp < 4 else 512),
        cuda_graph_backend_prefill="disabled",
    )
    gpu_mib = given.gpu.memory / 2**20
    graphs = memory_hook.reserve_for_graph_mb(server_args)
    with published(server_args, tp, dp):
        activations = runtime_context.pre_capture_activation_reserve_mb(gpu_mib)
    assert graph_bytes(given) == graphs * 2**20
    if dp == 1:  # SGLang has divided the chunk by the ranks; here it is the chunk of all ranks.
        assert activation_bytes(given) == activations * 2**20


def test_prefill_graph_memory_is_near_measurements() -> None:
    results = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    measured = re.search(r"Prefill graphs took ([\d.]+) GB here", results)
    assert measured is not None
    assert 1 <= prefill_graph_bytes(choice()) / (float(measured[1]) * 1e9) < 1.1
    assert f"**CUDA graphs of prefill** ({prefill_graph_bytes(choice()) // GIB} GiB)" in PLANNING


# docs/guides/serving.md and planning.md

GUIDES = ROOT / "docs" / "guides"
RECIPES, PLANNING = ((GUIDES / page).read_text() for page in ("serving.md", "planning.md"))
HELD = re.compile(
    r"([\d,]+) tokens; ([\d,]+) requests of [\d,]+ \(([\d,]+) at once\); ([\d,]+) snapshots; weights ([\d.]+) of .*"
)


def recipes() -> list[tuple[str, str, str]]:
    """Return (GPUs as the tables name them, arguments of `plan`, command) for each recipe of the page."""
    plain = RECIPES.replace(" \\\n", "")
    return re.findall(
        r"^(.*\d [HB]200):\n\n    dsv4-sglang plan (.*)\n    (dsv4-sglang serve .*)$", plain, re.MULTILINE
    )


@pytest.mark.full
@pytest.mark.parametrize(("gpus", "arguments", "command"), recipes(), ids=[gpus for gpus, *_ in recipes()])
def test_recipe(gpus: str, arguments: str, command: str) -> None:
    lines = invoke(*shlex.split(arguments)).splitlines()
    held = HELD.fullmatch(lines[1])
    assert held is not None
    assert f"| {gpus} | {' | '.join(held.groups())} |\n" in RECIPES
    assert shlex.split(command) == shlex.split(lines[-1])
    assert "left for activations" not in "".join(line for line in lines if line.startswith("as given:"))


@pytest.mark.full
def test_long_contexts_of_a_recipe() -> None:
    """The page names them below the recipe."""
    [arguments] = [arguments for gpus, arguments, _ in recipes() if gpus == "Flash, 8 H200"]
    held = invoke(*shlex.split(arguments), "--max-running-requests", "256", "--context", "1048576").splitlines()[1]
    found = re.search(r"; ([\d,]+ requests of [\d,]+) ", held)
    assert found is not None
    assert f"With `--max-running-requests 256` they hold {found[1]} tokens." in RECIPES


def test_every_figure_of_the_tables_has_a_recipe() -> None:
    tables = re.findall(r"^\| ((?:[\w ]+, )*\d [HB]200) \| [\d,]+ \|", RECIPES, re.MULTILINE)
    assert sorted(tables) == sorted(gpus for gpus, *_ in recipes())
    assert len(tables) == 5 and len(SPLITS) == 2


SPLITS = re.findall(r"^\| `(--gpu .*)` \| ([\d,]+) \| ([\d,]+) \|$", PLANNING, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(("arguments", "here", "in_tree"), SPLITS, ids=[row[0] for row in SPLITS])
def test_splits_on_the_page(arguments: str, here: str, in_tree: str) -> None:
    lines = invoke(*shlex.split(arguments)).splitlines()
    assert lines[1].startswith(f"{here} tokens;")
    assert f"own cache with the same flags: {in_tree} tokens;" in lines[2]


def test_weights_of_pro_on_the_page() -> None:
    loaded = count_weights(PRO, Format.FP4, 4).bytes + BESIDE_WEIGHTS
    assert f"{loaded / GIB:.0f} GiB of each" in RECIPES


# The plan


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_the_parts_are_the_memory_of_a_gpu(gpu: str, drafts: int) -> None:
    made = plan(choice(gpu=gpu, count=4, draft_tokens=drafts))
    assert sum(part.bytes for part in made.parts) == GPUS[gpu].memory
    assert all(part.bytes > 0 for part in made.parts)
    within = sum(part.bytes for part in made.parts if part.group not in ("graphs", "reserve"))
    if drafts:  # The draft model frees this once the cache is allocated, after the fraction was computed.
        within += draft_of(FLASH, Format.FP4, 4).until_shared
    fraction = within / (GPUS[gpu].memory - made.parts[-3].bytes)
    assert made.parts[-3].name == "context, NCCL"
    # Blocks are whole, so up to two may be left over.
    assert 0 <= 0.85 - fraction < 3 * made.layout.block_bytes / within


def test_v41() -> None:
    """The tokens are those of `benchmarks.capacity` for the memory that the weights leave, ours and SGLang's. A plan
    has no drafts and no other formats, which a server rejects."""
    given = choice(V41, count=1, experts=Format.FP8, running=64, mem_fraction=0.66)
    made = plan(given)
    assert 78.82 < made.available_gib < 82 and made.tokens > 82_000_000
    memory = made.available_gib * GIB
    assert made.tokens == capacity.ours(V41.config, made.available_gib, 64, None).tokens(memory)
    assert made.in_tree_tokens == capacity.in_tree(V41.text, made.available_gib, 64, 0)["tokens"]
    assert sum(part.bytes for part in made.parts) == GPUS["h200"].memory
    changes = dict(neighbours(given))
    assert changes and not any("speculative" in change or "dtype" in change for change in changes)
    assert recommend(replace(given, count=2), "latency").choice.draft_tokens == 0
    halves = plan(replace(given, count=2, tp=2))
    assert made.tokens < halves.tokens < 2 * made.tokens
    hosted = plan(replace(given, host_gb=8))
    per_token = 8 * 10**9 / hosted.host_tokens  # blocks and snapshots
    assert made.layout.token_bytes < per_token < 2 * made.layout.token_bytes
    assert "--enable-hierarchical-cache --hicache-size 8" in hosted.choice.command()
    plain = count_weights(changed(V41, quantization_config=None), Format.BF16)
    assert plain.bytes > 1.8 * count_weights(V41, Format.FP8).bytes


def test_replicas_of_dp_attention_have_a_cache_each() -> None:
    """A replica is sized as a server of its own, with its share of requests and step tokens, and more weights."""
    made, plain = plan(choice(count=8, dp=4)), plan(choice(count=8))
    assert (made.demand.running, made.demand.staging) == (64, 16)
    assert made.total_tokens == 4 * made.tokens and made.snapshots == 4 * made.demand.snapshots
    assert made.at_once == 256
    grown = {name for name in made.weights if made.weights[name] > plain.weights[name]}
    assert grown == {"attention", "embedding, head"}, "experts are split over all"
    assert all(made.weights[name] == plain.weights[name] for name in set(plain.weights) - grown)
    assert plan(choice(count=4, tp=2)).total_tokens == 2 * plan(choice()).total_tokens, "two servers"


def test_flags_that_need_memory_reduce_tokens() -> None:
    """Other tests compare the default with measurements."""
    most = plan(choice()).tokens
    for less in ({"kv_cache_dtype": "bfloat16"}, {"draft_tokens": 4}, {"options": Options(max_snapshots=5000)}):
        assert plan(choice(**less)).tokens < most, less


def test_blocks_of_another_gpu_are_padded_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    there = served_layout(FLASH.config, torch.float8_e4m3fn, Options(), torch.device("cuda", 0))
    counted = plan(choice(gpu="b200")).layout
    assert (counted.block_bytes, counted.slot_bytes) == (there.block_bytes, there.slot_bytes)
    assert counted.snapshot_bytes == there.snapshot_bytes
    assert counted.block_bytes > plan(choice(gpu="h200")).layout.block_bytes


def test_requests_are_whole_blocks() -> None:
    made = plan(choice(running=8))
    assert made.requests == made.tokens // 32768 and made.at_once == 8
    odd = replace(made, choice=replace(made.choice, request=129))
    assert odd.requests == made.tokens // 256


def test_neighbours_differ_in_one_thing() -> None:
    given = choice(count=4)
    found = dict(neighbours(given))
    assert list(found) == [
        "--max-running-requests 128",
        "--max-running-requests 512",
        "--mem-fraction-static 0.80",
        "--mem-fraction-static 0.90",
        "--kv-cache-dtype bfloat16",
        "--speculative-num-draft-tokens 4",
        "--dp 4",
        "--tp 2",
        "--count 2",
        "--count 8",
    ]
    for other in found.values():
        differing = {name for name in vars(given) if vars(given)[name] != vars(other)[name]}
        assert len(differing) == 1 or differing == {"count", "tp"}
    assert "--tp 4" in dict(neighbours(replace(given, tp=2))), "two servers, or one"
    assert dict(neighbours(replace(given, draft_tokens=2)))["no speculation"] == given
    without_nextn = changed(FLASH, num_nextn_predict_layers=0)
    assert not any("speculative" in change for change in dict(neighbours(choice(without_nextn))))
    for other in (choice(count=8, dp=8), choice(PRO, count=8), choice(count=1, gpu="b200"), replace(given, running=1)):
        assert other not in dict(neighbours(other)).values()


def test_neighbours_of_a_model_with_a_dspark_head() -> None:
    """DSPARK is rejected with DP attention."""
    plain = choice(DSPARK, count=4)
    changes = dict(neighbours(plain))
    assert changes["--speculative-num-draft-tokens 6"] == replace(plain, draft_tokens=6) and "--dp 4" in changes
    assert not any(change.startswith("--dp") for change in dict(neighbours(replace(plain, draft_tokens=8))))
    assert not any("speculative" in change for change in dict(neighbours(choice(DSPARK, count=4, dp=4))))


def test_what_is_printed() -> None:
    made = plan(choice(count=4))
    printed = invoke("--gpu", "h200", "--count", "4", "--model", "flash")
    lines = printed.splitlines()
    assert lines[1] == holds(made)
    assert lines[-1] == made.choice.command()
    for part in made.parts:
        assert re.search(rf"{re.escape(part.name)} +{part.bytes / GIB:.2f} ", printed), part
    assert re.search(rf"as given +{made.total_tokens:,} +{made.requests} +256 +{made.snapshots:,}", printed)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_nothing_is_cut_on_a_narrow_terminal(columns: int) -> None:
    words = ("--gpu", "h200", "--count", "4", "--model", "flash")
    result = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": str(columns)})
    made = plan(choice(count=4))
    assert result.exit_code == 0 and "…" not in result.output
    for label, other in neighbours(made.choice):
        found = attempt(other)
        figures = "no room" if isinstance(found, str) else f"{found.total_tokens:,} .* {found.in_tree_tokens:,}"
        name, _, value = label.rpartition(" ")
        assert re.search(rf"^{name}( {value} +{figures}| +{figures} *\n{value} *)$", result.output, re.MULTILINE), label
    tables = result.output.split("\n\n")[1:3]
    assert max(len(line) for table in tables for line in table.splitlines()) <= 80


@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "DeepSeek-V4-Pro"])
def test_the_printed_model_is_accepted(name: str) -> None:
    """The command has the model's hub name, and `plan` takes it."""
    short = name.rpartition("-")[2].lower()
    model = Model.of(command_of(choice(Model.of(short), count=8).command())["--model-path"])
    assert model == Model.of(short) and model.name == name


def test_sglangs_own_cache_is_compared() -> None:
    """The tokens are those that SGLang's configurator gives with the same flags, summed over ranks."""
    made, ranks = plan(choice(count=8)), plan(choice(count=8, dp=8))
    for size, caches, requests in ((made, 1, 256), (ranks, 8, 32)):
        state = (requests + 3) * 128 * 2 * 512 * 4 * 20  # Raw HCA state in 20 layers, with SGLang's padding.
        expected = (size.available_gib * GIB - state) / 7086.75
        assert size.in_tree_tokens is not None
        assert size.in_tree_tokens / caches == pytest.approx(expected, rel=1e-3)
    printed = invoke("--gpu", "h200", "--count", "8", "--model", "flash")
    assert made.in_tree_tokens is not None
    times = f"here {made.total_tokens / made.in_tree_tokens:.2f} times as many"
    assert printed.splitlines()[2].endswith(f" with the same flags: {made.in_tree_tokens:,} tokens; {times}")
    assert re.search(rf"--dp 8 +{ranks.total_tokens:,} .* {ranks.in_tree_tokens:,}\n", printed)
    drafting = plan(choice(count=8, draft_tokens=4))
    assert drafting.in_tree_tokens is not None and drafting.in_tree_tokens < made.in_tree_tokens


def test_flags_that_sglang_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choice, "sglang_fields", lambda _choice: {"swa_full_tokens_ratio": 2.0})
    assert plan(choice()).in_tree_tokens is None


# A recommendation for a goal


def test_latency_is_one_server_with_drafts() -> None:
    made = recommend(choice(count=8), "latency").choice
    assert (made.tp, made.dp, made.draft_tokens, made.running) == (8, 1, 4, 32)
    assert recommend(choice(DSPARK, count=4), "latency").choice.draft_tokens == 6
    assert recommend(choice(changed(FLASH, num_nextn_predict_layers=0), count=4), "latency").choice.draft_tokens == 0


def test_throughput_holds_the_most_tokens() -> None:
    made = recommend(choice(count=8), "throughput")
    assert (made.choice.tp, made.choice.dp) == (8, 8)
    assert made.has_room_for_activations
    for tp, dp in ((8, 1), (4, 1), (2, 1), (8, 4), (4, 4)):
        try:
            other = plan(replace(made.choice, tp=tp, dp=dp))
        except ValueError:
            continue
        assert other.total_tokens <= made.total_tokens


@pytest.mark.full
def test_long_contexts_are_counted_as_whole_requests() -> None:
    """On this GPU more ranks hold more tokens, but fewer requests, because a request is on one rank."""
    h200 = choice(PRO, count=8, context_length=1 << 18)
    smaller = h200.gpu._replace(memory=h200.gpu.memory - int(1.8 * GIB))
    made = recommend(replace(h200, gpu=smaller), "long-context")
    assert made.choice.request == 1 << 18 and made.at_once == made.requests > 0
    assert made.choice.served_context == 1 << 18
    other = plan(replace(made.choice, dp=8, running=8 * REQUESTS_OF_A_RANK, mem_fraction=0.9))
    assert made.choice.dp == 2 and other.at_once < made.at_once and other.total_tokens > made.total_tokens


def test_weights_that_fill_nearly_all_memory() -> None:
    """Above 0.9 no memory fraction leaves room for activations, so the error names more GPUs instead."""
    weights = sum(plan(choice()).weights.values())
    for part, hint in ((0.87, "Raise --mem-fraction-static above 0.8"), (0.95, "What fits: --count 4")):
        memory = int((weights + BESIDE_WEIGHTS) / part) + BEFORE_WEIGHTS
        with pytest.raises(ValueError, match=hint):
            plan(replace(choice(), gpu=choice().gpu._replace(memory=memory)))


def test_recommendation_changes_the_memory_fraction() -> None:
    """V4-Pro on four of 8 H200 needs a memory fraction above 85 %, V4-Flash on H100 one below."""
    made = recommend(choice(PRO, count=8), "throughput").choice
    assert (made.tp, made.dp, made.mem_fraction) == (8, 4, 0.88)
    with pytest.raises(ValueError, match=r"Raise --mem-fraction-static|too small for one request"):
        plan(replace(made, mem_fraction=0.85))
    small = recommend(choice(gpu="h100", count=4), "latency")
    assert small.choice.mem_fraction == 0.8 and small.has_room_for_activations
    assert not plan(replace(small.choice, mem_fraction=0.85)).has_room_for_activations


def test_recommendation_spans_several_hosts() -> None:
    lines = invoke("--gpu", "h200", "--count", "16", "--model", "flash", "--goal", "throughput").splitlines()
    made = recommend(choice(count=16, tp=8), "throughput")
    assert lines[0] == "DeepSeek-V4-Flash, 16 x H200, --tp 8, --dp 8, 2 servers"
    assert lines[1] == holds(made)
    assert lines[3] == f"recommended for throughput: {GOALS['throughput']}"
    assert lines[-2:] == ["2 servers, each on 8 of the GPUs with its own --port:", made.choice.command()]


# The command


@pytest.mark.full
def test_the_command_runs_without_noise(tmp_path: Path) -> None:
    """Run the command as a user does: the process imports SGLang, which logs nothing. A model is a folder or a file."""
    folder = tiny.make_tiny(tmp_path / "mine", TinySpec())
    words = ("--gpu", "12", "--count", "1", "--context", "4096", "--model")
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_sglang", "plan", *words, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **WIDE},
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "mine, 1 x GPU of 12 GiB, --tp 1" and lines[-1].startswith("dsv4-sglang serve")
    assert invoke(*words, str(folder / "config.json")) == done.stdout


def command_of(printed: str) -> dict[str, str]:
    """Return the words of the printed command, each with the word after it. SGLang has all of its flags."""
    words = shlex.split(printed.splitlines()[-1])
    known = flag_defaults().keys()
    assert all(word[2:].replace("-", "_") in known for word in words if word.startswith("--"))
    return dict(pairwise([*words, ""]))


def test_the_command_has_every_choice() -> None:
    printed = invoke(
        *("--gpu", "140", "--count", "4", "--model", "flash", "--dp", "2", "--kv-cache-dtype", "bfloat16"),
        *("--max-snapshots", "400", "--experts", "fp8"),
        *("--max-running-requests", "64", "--chunked-prefill-size", "4096", "--mem-fraction-static", "0.9"),
        *("--context-length", "262144", "--hicache-size", "100"),
    )
    assert re.search(
        r"^host cache: [\d,]+ tokens in 200 GB \(2 caches of 100\), one copy for all processes of a machine; "
        r"with --\S+ shm the next start and other servers of the machine find them$",
        printed,
        re.MULTILINE,
    )
    values = command_of(printed)
    assert values["--tp-size"] == "4" and values["--dp-size"] == "2" and "--enable-dp-attention" in values
    assert values["--kv-cache-dtype"] == "bfloat16" and values["--context-length"] == "262144"
    assert values["--max-running-requests"] == "64" and values["--chunked-prefill-size"] == "4096"
    assert values["--mem-fraction-static"] == "0.9"
    assert values["--hicache-size"] == "100" and "--enable-hierarchical-cache" in values
    assert from_override_args(values["--json-model-override-args"]) == Options(max_snapshots=400)
    assert not any("speculative" in word for word in values)


def test_host_tokens_do_not_depend_on_the_processes() -> None:
    """64 GiB hold what docs/guides/host_cache.md says, for two processes and for eight that share them."""
    for count in ("2", "8"):
        printed = invoke("--gpu", "h200", "--count", count, "--model", "flash", "--hicache-size", "69")
        (tokens,) = re.findall(r"^host cache: ([\d,]+) tokens in 69 GB, one copy for all", printed, re.MULTILINE)
        assert int(tokens.replace(",", "")) // 10**5 == 173, tokens


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "tokens", "flags"),
    [
        (FLASH, 3, "EAGLE --speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"),
        (DSPARK, 6, "DSPARK"),
        (DSPARK, 8, "DSPARK --speculative-dspark-block-size 7"),
    ],
)
def test_the_command_with_speculation(model: Model, tokens: int, flags: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(model.text)
    drafts = ("--speculative-num-draft-tokens", str(tokens))
    printed = invoke("--gpu", "141", "--count", "4", "--model", str(tmp_path), *drafts)
    assert printed.splitlines()[0].endswith(" ".join(drafts))
    assert printed.endswith(f" --speculative-algorithm {flags}\n") and command_of(printed)
    assert ("NextN layer" in printed, "DSPARK head" in printed) == (model is FLASH, model is DSPARK)


TINY, V41_TINY = config_json(TinySpec()), v41_config_json(TinyV41Spec())
# Folders of config.json files for the errors below.
CONFIGS = {
    "tiny": TINY,
    "dspark": config_json(TinySpec(dspark=5)),
    "no-nextn": {**TINY, "num_nextn_predict_layers": 0},
    "missing": {**TINY, "hc_mult": None},
    "many": {**TINY, "n_routed_experts": "many"},
    "awq": {**TINY, "quantization_config": {"quant_method": "awq"}},
    "narrow": {**TINY, "head_dim": 128},
    "v41": V41_TINY,
    "v41-engram": {**V41_TINY, "text_config": {**V41_TINY["text_config"], "engram_layer_ids": [1]}},
    "v41-images": {**V41_TINY, "vision_config": {"num_hidden_layers": 1}},
    "v41-sources": {**V41_TINY, "text_config": {**V41_TINY["text_config"], "kv_source_layer_ids": [0]}},
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    for name, values in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--gpu h300", r"--gpu is 'h300'; expected h100, h200, b200, or GiB"),
        ("--gpu -3", r"--gpu is '-3'; expected"),
        ("--model lite", r"--model 'lite' is no file; expected flash, pro, deepseek-ai/\S+ or \S+, or a config.json"),
        ("--count 16", r"splits attention over 16 GPUs, which does not divide the 8 groups .* 1, 2, 4, 8"),
        ("--count 4 --tp 3", r"--count 4 is no multiple of --tp 3"),
        ("--count 4 --dp 3", r"--dp 3 does not divide --tp 4"),
        ("--count 0", r"Invalid value for '--count': .*greater than or equal to 1"),
        ("--model pro", r"DeepSeek-V4-Pro does not fit into 2 H200: its weights take 399.* --count 8"),
        ("--count 1", r"does not fit into 1 H200.* What fits: --count 2"),
        ("--model pro --count 8 --gpu h100", r"does not fit into 8 H100.* Take larger GPUs"),
        ("--mem-fraction-static 0.5", r"does not fit into 2 H200.* Raise --mem-fraction-static above 0.541"),
        ("--mem-fraction-static 1.5", r"--mem-fraction-static is 1.5; expected"),
        ("--mem-fraction-static 0.57", r"one request of the context length.* --context-length"),
        ("--max-running-requests 20000", r"state slots do not fit.* Lower --max-running-requests"),
        ("--count 4 --max-running-requests 3500 --mem-fraction-static 0.9", r"leaves .* GiB too little .* Lower it"),
        ("--max-running-requests 2 --count 4 --dp 4", r"--max-running-requests 2 is divided by --dp 4"),
        ("--max-running-requests 0", r"Invalid value for '--max-running-requests': .*greater than or equal to 1"),
        ("--max-snapshots 511", r"max_snapshots is 511; 256 running requests .* need at least 512"),
        ("--kv-cache-dtype fp4", r"'--kv-cache-dtype': .*'fp4' is not one of 'auto', 'fp8_e4m3', 'bfloat16'"),
        ("--speculative-num-draft-tokens 1", r"--speculative-num-draft-tokens 1: expected 2 to 9, .* or 0 for no"),
        ("--chunked-prefill-size 1000", r"--chunked-prefill-size 1000 is 1000 tokens .* multiple of 128"),
        ("--context-length 2000000", r"--context-length is 2000000; expected 1 to 1048576"),
        ("--experts bf16", r"the weights of DeepSeek-V4-Flash are quantised; give fp8 or fp4"),
        ("--goal latency --tp 2", r"--tp: --goal latency chooses it; give one of the two"),
        ("--context-length 4096", r"--context 32768 is longer than a request may be: 4096"),
        ("--model pro --count 4 --goal throughput", r"does not fit into 4 H200.* What fits: --count 8"),
        ("--model tiny --experts fp4", r"--experts fp4: the weights of tiny are not quantised; give bf16"),
        ("--model missing", r"config field 'hc_mult' is missing"),
        ("--model many", r"config field 'n_routed_experts' is 'many'; expected an integer"),
        ("--model awq", r"quant_method' is 'awq'; expected 'fp8'"),
        ("--model narrow", r"config field 'head_dim' is 128; this cache stores only 512"),
        ("--model no-nextn --speculative-num-draft-tokens 4", r"num-draft-tokens 4: .* has no NextN layer"),
        ("--model v41 --tp 1 --speculative-num-draft-tokens 4", r"speculation with DeepSeek-V4.1 is rejected at start"),
        ("--model v41 --kv-cache-dtype bfloat16", r"--kv-cache-dtype bfloat16: KV entries of DeepSeek-V4.1"),
        ("--model v41-engram", r"'engram_layer_ids': a server rejects DeepSeek-V4.1 with Engram layers"),
        ("--model v41-images", r"'vision_config': a server rejects DeepSeek-V4.1 with images"),
        ("--model v41-sources", r"'kv_source_layer_ids' has layer 0, whose compress ratio is 0"),
        ("--model dspark --speculative-num-draft-tokens 6 --dp 2", r"DSPARK with --dp 2 is rejected at start"),
    ],
)
def test_bad_input(arguments: str, complaint: str, configs: Path) -> None:
    said = rejected(*(str(configs / word) if word in CONFIGS else word for word in arguments.split()))
    assert re.search(complaint, said), said
