"""Tests of benchmarks/ without servers: bytes and formulas against known figures, reports, and logs of servers."""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from support import server_forkserver
from support.liveness import LONG, wait
from support.server_forkserver import QUICK

from benchmarks import (
    attend_cases,
    bench,
    capacity,
    command_line,
    disaggregation,
    full_pool,
    host_cache,
    loads,
    move,
    move_in_tree,
    profile_steps,
    report,
    retract,
    run,
    servers,
    tier,
    timing,
    tokenizer_workers,
    traffic,
)
from benchmarks.append_in_tree import bias_rows, page_bytes, window_page_slots
from benchmarks.client import Answer
from benchmarks.command_line import RESULTS
from benchmarks.environment import ROOT
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.planner.ask_sglang import resolved_flags
from dsv4_sglang.srt.host_cache import transfers
from dsv4_sglang.srt.launch.command import flag_value
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory import sizing
from dsv4_sglang.srt.memory.served_layout import served_layout

pytestmark = pytest.mark.full

FLASH = DSV4Config.flash()
FLASHSHAPE = Path(capacity.__file__).parent / "configs" / "flashshape" / "config.json"
FIGURES = ROOT / "docs" / "benchmarks"


def arguments(out: Path, *more: str) -> list[str]:
    return ["--dry-run", "--out", str(out), *more]


def result(out: Path, name: str) -> dict:
    return json.loads((out / f"{name}.json").read_text())


# Bytes and sizes against figures measured or logged on an H200


def imports_of_sglang() -> list[tuple[str, str]]:
    """Return (module, name) of each import from SGLang in benchmarks/, those within functions included."""
    found = set()
    for file in Path(bench.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), imports_of_sglang())
def test_sglang_has_what_the_benchmarks_measure(module: str, name: str) -> None:
    """Most of these imports run on a GPU only. FlashMLA is not even installed elsewhere, so its interface is read."""
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        spec = importlib.util.find_spec(module)
        assert error.name == "flash_mla" and spec is not None and spec.origin is not None
        assert f"\ndef {name}(" in Path(spec.origin).read_text()
    else:
        if not hasattr(imported, name):
            importlib.import_module(f"{module}.{name}")


def test_prefill_bytes_are_those_of_the_measured_rate() -> None:
    """The measurement was 8192 tokens in 4.87 ms at 622 GB/s."""
    moved = traffic.prefill_bytes(FLASH, [8192], traffic.IN_TREE)
    assert moved / 4.87e-3 / 1e9 == pytest.approx(622, rel=0.01)


def test_decode_bytes_follow_the_windows_that_close() -> None:
    batch, context = 64, 4096
    none, csa, both = (
        traffic.decode_bytes(FLASH, kind(batch, context), traffic.IN_TREE)
        for kind in (loads.no_entry, loads.csa_entry, loads.both_entries)
    )
    assert csa - none == 21 * batch * (7 * 5120 + 584 + 132)
    assert both - csa == 20 * batch * (127 * 4096 + 584)
    online = traffic.decode_bytes(FLASH, loads.both_entries(batch, context), traffic.OURS)
    assert online < both / 5


def test_capacity_of_sglang_is_what_its_server_allocated() -> None:
    """The tolerance is half a unit of the last decimal of the memory in the log, 78.85 GiB."""
    found = capacity.in_tree(FLASHSHAPE.read_text(), 78.85, requests=64, drafts=0)
    assert found["tokens"] == pytest.approx(11_848_192, abs=0.5e-2 * capacity.GIB / found["B a token"] + 256)


def test_capacity_of_sglang_with_flags() -> None:
    sizes = partial(capacity.in_tree, FLASHSHAPE.read_text(), 78.82, 256, 0)
    rows = {name: sizes(**flags) for name, flags in capacity.in_tree_settings("flash").items()}
    default = rows["in-tree, default"]
    assert rows["in-tree, windows for hits (0.5)"]["tokens"] < default["tokens"] / 2
    assert default["fixed GiB"] == pytest.approx(2.53, abs=0.005)
    assert default == sizes(swa_full_tokens_ratio=0.1)
    assert capacity.ours(FLASH, 78.82, 256, 512).tokens(78.82 * capacity.GIB) >= 21_000_000


def test_capacity_of_v41() -> None:
    """A prefix that keeps its window costs SGLang a window and a page, of 585 bytes a token in each of 40 layers. Ours
    is what the functions of a server compute."""
    gib, requests = 78.82, 64
    rows = {row["setting"]: row for row in capacity.computed("v41", gib, requests, None, 0)}
    default, more = rows["in-tree, default"], rows["in-tree, 1,024 windows"]
    assert (rows["ours"]["B a token"], default["B a token"], more["B a token"]) == (900, 1632.5, 1632.5)
    windows = (1024 - 4 * requests) * (128 + 256) * 585 * 40
    assert default["tokens"] - more["tokens"] == pytest.approx(windows / 1632.5, abs=256)
    assert rows["in-tree, encoder replay"]["tokens"] > default["tokens"]
    assert more["tokens"] < 45_500_000 and rows["ours"]["tokens"] >= 82_000_000
    layout = served_layout(V41Config.flash(), torch.float8_e4m3fn, Options(), "cpu")
    demand = sizing.demand_of(layout, gib, running=requests, step_tokens=8192)
    left = sizing.memory_after_slots(layout, demand, gib)
    assert rows["ours"]["tokens"] == sizing.tokens_of_pool(layout, int(left * sizing.GIB), 1 << 20)


def test_attention_products_give_the_measured_rate() -> None:
    """The measurement was 102.6 us at 209 TFLOP/s (Flash, top 512, 256 requests)."""
    case = attend_cases.Case("flash", 64, 512, "csa", 256, 131072)
    assert case.products() / 102.6e-6 / 1e12 == pytest.approx(209, rel=0.01)
    chunk = attend_cases.Case("flash", 64, 512, "hca", 1, 8192, chunk=8192)
    assert chunk.lengths()[-1] == 64
    assert chunk.lengths()[126] == 0
    assert chunk.rows_read() == sum(min(t + 1, 128) + (t + 1) // 128 for t in range(8192))


def test_in_tree_pages_are_those_of_its_pools() -> None:
    assert [page_bytes(n) for n in (256, 64, 2)] == [149760, 37440, 1728]
    assert window_page_slots(torch.tensor([0, 127, 128, 255, 256, 300]), 2).tolist() == [0, 127, 128, 255, 0, 44]
    ape = torch.arange(4 * 8.0).view(4, 8)
    assert bias_rows(ape, 4).tolist() == torch.cat([ape[:, :4], ape[:, 4:]]).tolist()
    assert torch.equal(bias_rows(ape, 8), ape)


# Inputs


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_steady_loads_close_windows_as_servers_do(batch: int) -> None:
    drawn = loads.steady(batch, 4096)
    weight = sum(load.weight for load in drawn) * batch
    csa = sum(load.csa_due * load.weight for load in drawn) / weight
    hca = sum(load.hca_due * load.weight for load in drawn) / weight
    tolerance = 1e-9 if batch == 1 else 0.05
    assert csa == pytest.approx(1 / 4, abs=tolerance)
    assert hca == pytest.approx(1 / 128, abs=tolerance)
    assert all(load.prefix_lens.min() >= 0 and load.prefix_lens.max() < 4095 for load in drawn)


# Moves


def run_lengths(ids: torch.Tensor) -> list[int]:
    """Return the lengths of the runs that are contiguous on both sides."""
    breaks = (ids.diff(dim=1) != 1).any(0).nonzero().flatten() + 1
    return torch.tensor([0, *breaks.tolist(), ids.shape[1]]).diff().tolist()


def test_ids_form_runs_of_exactly_their_length() -> None:
    for length in (1, 8, 512):
        ids = move.run_ids(512, length)
        assert run_lengths(ids) == [length] * (512 // length)
        assert all(sorted(side) == list(range(512)) for side in ids.tolist())


def test_pieces_of_sglangs_pools_are_counted() -> None:
    made = move.Bench(command_line.report_parser("x").parse_args([]))
    pieces = move_in_tree.pieces_of(made.block_bytes)
    assert pieces == {32 * 584: 21, 32 * 72: 21, 592: 20}
    assert sum(map(sum, made.block_bytes)) == 21 * 32 * (584 + 72) + 20 * 584


# Statistics and reports


def test_statistics() -> None:
    timing_of = timing.summarise([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing_of.us, timing_of.samples) == (3.0, 5)
    assert timing_of.low <= timing_of.us <= timing_of.high
    assert timing.weighted([timing.Timing(2, 2, 2, 1), timing.Timing(10, 10, 10, 1)], [3, 1]) == 4
    assert timing.floor_us(8e6, 3, copy_gbs=4000, launch_us=0.5) == pytest.approx(2.0)
    assert timing.floor_us(8e6, 43, copy_gbs=4000, launch_us=0.5) == pytest.approx(21.5)


def test_killed_run_keeps_rows_and_is_repeated(tmp_path: Path) -> None:
    """A result file of a run that was killed after its first row keeps the row. `--resume` repeats the part."""
    given = arguments(tmp_path)

    def slow() -> Iterator[dict[str, float]]:
        yield {"us": 1.0}
        (tmp_path / "killed.json").write_bytes((tmp_path / "demo.json").read_bytes())
        yield {"us": 2.0}

    report.Report("demo", command_line.report_parser("x").parse_args(given)).part("slow", slow)
    assert [row["us"] for row in result(tmp_path, "killed")["rows"]] == [1.0]
    again = report.Report("killed", command_line.report_parser("x").parse_args([*given, "--resume"]))
    again.part("slow", lambda: [{"us": 3.0}])
    assert [row["us"] for row in again.rows] == [3.0]


def test_a_failing_part_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def half() -> Iterator[dict[str, float]]:
        yield {"us": 2.0}
        raise RuntimeError("lost")

    made = report.Report(
        "demo", command_line.report_parser("x").parse_args(arguments(tmp_path, "--parts", "good,half"))
    )
    made.part("good", lambda: [{"us": 1.0}])
    made.part("half", half)
    made.part("other", lambda: [{"us": 3.0}])
    made.part("setting", lambda: [{"us": 1234.5}], setup=True)
    assert made.close() == 0
    data = result(tmp_path, "demo")
    assert [row["us"] for row in data["rows"]] == [1.0, 2.0, 1234.5]
    [failure] = data["failures"]
    assert (failure["part"], failure["error"]) == ("half", "RuntimeError: lost")
    assert "RuntimeError: lost" in capsys.readouterr().out


# Programs


@pytest.mark.parametrize("name", [*run.NAMES, "prefix_simulation", "v41"])
def test_dry_run(name: str, tmp_path: Path) -> None:
    """Each program that needs no server runs with its smallest sizes, and its text names no failure."""
    assert importlib.import_module(f"benchmarks.{name}").main(arguments(tmp_path, "--quick")) == 0
    assert not result(tmp_path, name)["failures"]


def test_ranks_copy_at_once(tmp_path: Path) -> None:
    """Each of two processes saves its part of shared rows and loads all, which the program compares."""
    assert tier.main(arguments(tmp_path, "--ranks", "2", "--parts", "ranks")) == 0
    made = result(tmp_path, "tier")
    one, (save, load) = made["rows"][0], [row for row in made["rows"] if row["subject"] == "2 ranks"]
    assert not made["failures"]
    assert [row["move"] for row in (save, load)] == ["save", "load"]
    assert load["MB"] == 2 * save["MB"] == 2 * one["MB"]
    assert all(row["GB/s"] == pytest.approx(row["MB"] / row["us"] * 1e3) for row in (save, load))


@pytest.mark.server
@pytest.mark.slow
def test_dry_run_of_a_host_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes take the memory of one copy, and a restart finds all conversations in memory."""
    if os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 2 * host_cache.GB:
        pytest.skip("/dev/shm has less than 2 GB")
    server_forkserver.fork_benchmarks(monkeypatch)
    out = tmp_path / "rows.jsonl"
    given = ["--dry-run", "--out", str(out), "--measure", "memory,restart", "--storages", "shm", QUICK]
    assert host_cache.main(given) == 0
    memory, found, cold = map(json.loads, out.read_text().splitlines())
    assert memory["copies"] == pytest.approx(1, abs=0.2), memory
    assert memory["value"] == pytest.approx(memory["tokens"] / memory["GB"])
    assert (found["at"], cold["at"]) == ("shm", "cold")
    assert found["from_storage"] == found["cached"] == [768] * 3 and not any(cold["cached"])
    assert found["first_token_ms"]["p50"] < cold["first_token_ms"]["p50"]


@pytest.mark.server
def test_dry_run_of_tokenizer_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server rejects the requests, and the processes that handle them use CPU time."""
    server_forkserver.fork_benchmarks(monkeypatch)
    assert tokenizer_workers.main(arguments(tmp_path)) == 0
    made = result(tmp_path, "tokenizer_workers")
    assert not made["failures"]
    assert [(row["kind"], row["at_once"]) for row in made["rows"]] == [("ids", 1), ("ids", 2), ("text", 1), ("text", 2)]
    assert all(0 < row["rejected_ms"]["p50"] <= row["all_ms"]["high"] for row in made["rows"])
    assert all(row["cpu_ms"].keys() == {"http", "scheduler", "detokenizer"} for row in made["rows"])


def test_dry_run_of_full_trees(tmp_path: Path) -> None:
    assert full_pool.main(arguments(tmp_path, "--measure", "eviction,turn")) == 0
    made = result(tmp_path, "full_pool")
    assert not made["failures"]
    found = [(row["subject"], row.get("call", "eviction")) for row in made["rows"]]
    assert found[:3] == [(tree, "eviction") for tree in full_pool.TREES]
    assert found[3:] == [(tree, call) for tree in full_pool.TREES for call in ("lookup", "lookup again", "insertion")]
    assert all(0 < row["p50 ms"] <= row["p95 ms"] <= row["max ms"] for row in made["rows"])


def test_conversations_overfill_the_pool() -> None:
    sent: list[list[list[int]]] = []
    server = types.SimpleNamespace(generate=lambda batch, tokens: sent.append(batch))
    made = object.__new__(full_pool.Bench)  # without a model
    made.seed, made.vocab = 0, 100
    made.fill(server, 100 * full_pool.FILL)
    prompts = [tuple(prompt) for batch in sent for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 111 and {len(prompt) for prompt in prompts} == {full_pool.FILL}


def test_page_figures_equal_the_results(tmp_path: Path) -> None:
    """matplotlib writes each text of a figure as a comment. The values above the bars are among them."""
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    written = plots.draw(RESULTS, tmp_path)
    assert [file.stem for file in written] == list(plots.DRAWN)
    for file in written:
        texts = [re.findall("<!-- (.*) -->", (folder / file.name).read_text()) for folder in (tmp_path, FIGURES)]
        assert texts[0] == texts[1] and len(texts[0]) > 5, f"{file.name}: draw it again, python -m benchmarks.plots"


# Merged starts


def rows_of_start(
    date: str, subject: str, first: float, rate: float, model: str = "m", **environment: object
) -> list[dict]:
    """Return rows as `turns` writes them, of one start."""
    common = {
        "environment": {"date": date, "commit": "abc", "gpu": {"name": "GPU 1"}, **environment},
        "server": {"subject": subject, "flags": ""},
        "settings": {"model": model, "tp": 2},
        "start": 1,
    }
    times = {"p50": first, "p95": 2 * first}
    return [
        {"measure": "turn", "load": "20+2x1", "tier": "device", "first_token_ms": times, "turn_ms": times, **common},
        {"measure": "decode tokens/s", "at": 16, "value": rate, "step_ms": None, **common},
    ]


def merge(tmp_path: Path, rows: list[dict], *arguments: str) -> int:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report.main([str(file), "--servers", "ours,sglang", *arguments])


def test_three_starts_are_merged_by_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starts are paired in the order of their dates. The ratios are 0.25, 1 and 0.5; of sorted values, 0.33 to 0.75."""
    ours = [rows_of_start(f"2026-01-0{day}", "ours", ms, 100.0) for day, ms in ((3, 5.0), (1, 10.0), (2, 30.0))]
    theirs = [rows_of_start(f"2026-01-0{day}", "sglang", ms, 80.0) for day, ms in ((1, 40.0), (2, 30.0), (3, 10.0))]
    assert merge(tmp_path, [row for rows in [*ours, *theirs] for row in rows]) == 0
    lines = capsys.readouterr().out.splitlines()
    case, mine, other, ratio, starts = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert (case, starts) == ("turn 20+2x1 device, first_token_ms.p50 (GPU 1, m, 2 GPUs)", "3 and 3")
    assert (mine, other, ratio) == ("10 (5 to 30)", "30 (10 to 40)", "0.5 (0.25 to 1)")
    rates = "100 (100 to 100) | 80 (80 to 80) | 1.25 (1.25 to 1.25)"
    assert lines[-1] == f"| decode tokens/s 16 (GPU 1, m, 2 GPUs) | {rates} | 3 and 3 |"


@pytest.mark.parametrize("other", [{"gpu": {"name": "GPU 2"}}, {"model": "n"}])
def test_starts_on_another_gpu_or_model_are_no_pair(
    other: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = rows_of_start("2026-01-01", "sglang", 20.0, 80.0, **other)
    with pytest.raises(SystemExit):
        merge(tmp_path, [*rows_of_start("2026-01-01", "ours", 10.0, 90.0), *elsewhere])
    assert "no row of ours has a row of sglang beside it" in capsys.readouterr().err


def test_rows_of_two_commits_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of_start("2026-01-01", "ours", 10.0, 90.0) + rows_of_start("2026-01-01", "sglang", 10.0, 90.0)
    older = rows_of_start("2025-01-01", "ours", 1.0, 1.0, commit="old")
    with pytest.raises(SystemExit):
        merge(tmp_path, [*older, *rows])
    assert "rows of ours have commit ['abc', 'old']" in capsys.readouterr().err
    assert merge(tmp_path, [*older, *rows], "--commit", "ab") == 0
    assert "| 10 | 10 | 1 | 1 and 1 |" in capsys.readouterr().out


def test_published_rows_can_be_merged(capsys: pytest.CaptureFixture[str]) -> None:
    file = RESULTS / "turns_v4flash_tp2_earlier.jsonl"
    assert report.main([str(file), "--servers", "ours,sglang-best"]) == 0
    assert "decode tokens/s 256 (NVIDIA H200, v4flash) | 15,242 (15,224 to 15,260) |" in capsys.readouterr().out


# Servers


DECODE_LOG = """
[2026-11-21 10:00:00] Decode batch, #running-req: 16, #token: 16384, token usage: 0.00, cuda graph: True, \
gen throughput (token/s): 90.10, #queue-req: 0
[2026-11-21 10:00:01] Decode batch, #running-req: 16, #token: 16704, token usage: 0.00, cuda graph: True, \
gen throughput (token/s): 2800.00, #queue-req: 0
[2026-11-21 10:00:02] Decode batch, #running-req: 16, #token: 17024, token usage: 0.00, cuda graph: True, \
gen throughput (token/s): 2810.00, #queue-req: 0
[2026-11-21 10:00:03] Decode batch, #running-req: 7, #token: 7024, token usage: 0.00, cuda graph: True, \
gen throughput (token/s): 1000.00, #queue-req: 0
"""


def test_decode_lines_of_the_log() -> None:
    of_steps = (16e3 / 2800 + 16e3 / 2810) / 2
    assert servers.decode_rate(DECODE_LOG, 16) == servers.DecodeRate(2805, 2800, 2810, 2, pytest.approx(of_steps))
    turns = DECODE_LOG.replace("cuda graph", "accept len: 2.50, accept rate: 0.50, cuda graph")
    assert servers.decode_rate(turns, 16).step_ms == pytest.approx(2.5 * of_steps)
    assert servers.decode_rate(DECODE_LOG, 7) is None  # a single line counts the time since the previous burst
    of_tensor_parallelism = DECODE_LOG.replace("] Decode", " TP0] Decode").replace("Decode batch,", "Decode batch [7],")
    assert servers.decode_rate(of_tensor_parallelism, 16) == servers.decode_rate(DECODE_LOG, 16)


def decode_line(rank: int, requests: int, rate: float) -> str:
    """Return a log line of SGLang with `--tp-size 2 --dp-size 2 --enable-dp-attention`."""
    return (
        f"[2026-11-22 10:00:00 DP{rank} TP{rank}] Decode batch, #running-req: {requests}, #token: 9, "
        f"token usage: 0.00, cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0\n"
    )


def test_decode_lines_of_ranks_are_added() -> None:
    burst = "".join(
        decode_line(rank, 8, rate)
        for rates in ((3.0, 5.0), (100.0, 200.0), (110.0, 220.0), (120.0, 210.0))
        for rank, rate in enumerate(rates)
    )
    assert servers.decode_rate(burst, 16) == servers.DecodeRate(
        320, 300, 340, 3, pytest.approx(1e3 * 8 * (1 / 120 + 1 / 200) / 2)
    )
    assert servers.decode_rate(burst, 8) is None  # the line of one rank is not a burst of 8
    # the other rank has no line
    assert servers.decode_rate(decode_line(0, 8, 3.0) + decode_line(0, 8, 4.0), 16) is None
    one = decode_line(1, 1, 3.0) + decode_line(1, 1, 131.0) + decode_line(0, 0, 0.0)
    assert servers.decode_rate(one, 1) == servers.DecodeRate(131, 131, 131, 1, pytest.approx(1e3 / 131))
    assert servers.running_now(burst + decode_line(1, 2, 9.0)) == 10


def test_tokens_in_the_caches_of_all_ranks() -> None:
    states = [{"memory_usage": {"token_capacity": tokens}} for tokens in (1000, 900)]
    info = {"max_total_num_tokens": 1000, "internal_states": states}
    assert servers.cache_tokens(info, 2) == [1000, 900]
    assert servers.cache_tokens({**info, "internal_states": states[:1]}, 2) == [1000, 1000]


def serve_arguments(*given: str) -> argparse.Namespace:
    options = command_line.report_parser("x")
    command_line.add_servers(options, "ours,in-tree")
    command_line.add_decode(options)
    args = options.parse_args(given)
    command_line.resolve(options, args)
    return args


def test_flags_of_the_served_configurations(tmp_path: Path) -> None:
    small = serve_arguments()
    assert (small.memory, small.start_timeout, small.servers) == (0.6, 240, ["ours", "in-tree"])
    real = serve_arguments("--model", "v4flash", "--tp", "4", "--dp", "2", "--mem-fraction-static", "0.8")
    assert (real.memory, real.start_timeout) == (0.8, 420)
    made = bench.Bench(real, tmp_path)
    flags = made.flags(made.base())
    assert (flag_value(flags, "--tp-size"), flag_value(flags, "--dp-size")) == ("4", "2")
    assert "--enable-dp-attention" in flags
    assert flag_value(flags, "--max-running-requests") == "256"  # for all ranks: SGLang divides it
    graphs = flags[flags.index("--cuda-graph-bs-decode") + 1 : flags.index("--decode-log-interval")]
    assert (graphs[0], graphs[-1]) == ("1", "128")  # for one rank
    assert bench.sizes_of(serve_arguments("--model", "v4flash", "--tp", "2", "--decode", "64,256")).decode == {
        64: 160,
        256: 160,
    }


@pytest.mark.parametrize(
    ("model", "experts", "fp4", "runner"), [("v4flash", 128, "0", []), ("v4flash_fp4", 256, "1", ["marlin"])]
)
def test_experts_of_the_served_configurations(
    model: str, experts: int, fp4: str, runner: list[str], tmp_path: Path
) -> None:
    made = bench.Bench(serve_arguments("--model", model, "--tp", "4"), tmp_path)
    server = made.server("ours", "x", made.base())
    assert json.loads((made.model / "config.json").read_text())["n_routed_experts"] == experts
    assert server.environment["SGLANG_DSV4_FP4_EXPERTS"] == fp4
    assert [value for flag, value in pairwise(server.argv) if flag == "--moe-runner-backend"] == runner


# Layers 20 to 39 for the last 128 tokens of a step only, the same at prefix hits, and prefixes that keep their windows.
V41_MODES = {
    "sglang": (True, False, None),
    "sglang-full": (False, False, None),
    "sglang-tails": (True, False, 1024),
    "sglang-encoder-replay": (True, True, None),
    "sglang-best-tails": (True, False, 1024),
    "sglang-best-full": (False, False, 1024),
}


@pytest.mark.parametrize("name", V41_MODES)
def test_sglang_accepts_its_modes_of_v41(name: str, tmp_path: Path) -> None:
    """SGLang resolves the flags of each mode to what its name says."""
    args = serve_arguments("--model", "v41wide", "--servers", name)
    made = bench.Bench(args, tmp_path)
    argv = made.server(name, "x", made.base()).argv
    parsed = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parsed)
    words = vars(parsed.parse_args(argv[argv.index("--model-path") :]))
    given = {field: value for field, value in words.items() if value != parsed.get_default(field)}
    for of_machine in ("model_path", "decode_log_interval"):
        del given[of_machine]
    _, flags, _ = resolved_flags((made.model / "config.json").read_text(), **given)
    replays = flags.enable_decoder_swa_bounded_replay, flags.enable_encoder_swa_bounded_replay
    assert (*replays, flags.swa_prefix_tails) == V41_MODES[name]
    assert flags.max_running_requests == max(flags.cuda_graph_config.decode.bs) == 64
    assert (flags.cuda_graph_config.prefill.backend == "breakable") == name.startswith("sglang-best")


def test_sizes_of_v41_are_those_of_its_requests(tmp_path: Path) -> None:
    args = serve_arguments("--model", "v41wide")
    assert (args.memory, list(bench.sizes_of(args).decode)) == (0.66, [1, 16, 64])
    assert bench.Bench(args, tmp_path).vocab == 4096


def test_flags_of_the_command_line_win(tmp_path: Path) -> None:
    """SGLang takes the last value of a flag that is given twice."""
    made = bench.Bench(serve_arguments("--flags", "--max-running-requests 7 --sleep-on-idle"), tmp_path)
    argv = made.server("sglang-best", "x", made.base()).argv
    assert argv[argv.index(command_line.BEST_FLAGS.split()[-1]) + 1 :] == [
        "--max-running-requests",
        "7",
        "--sleep-on-idle",
    ]
    assert "--json-model-override-args" not in argv
    ours = made.server("ours-eager", "x", made.base())
    assert flag_value(ours.argv, "--cuda-graph-backend-prefill") == "disabled"
    assert "--json-model-override-args" in ours.argv and ours.log == tmp_path / "logs" / "x-ours-eager.log"


def test_every_second_start_reverses_the_servers() -> None:
    args = serve_arguments("--starts", "3", "--servers", "ours,sglang")
    order = ((1, "ours"), (1, "sglang"), (2, "sglang"), (2, "ours"), (3, "ours"), (3, "sglang"))
    assert command_line.orders(args) == list(order)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--tp 4 --dp 3", "expected --dp to divide the 4 GPUs evenly"),
        ("--tp 2 --gpus 2,x", "expected the numbers of 2 GPUs"),
        ("--decode 64,0", "--decode 64,0: expected numbers of 1 to 256 requests"),
        ("--servers theirs", "--servers theirs: expected some of ours, ours-eager"),
        (
            "--servers sglang-full",
            "--servers sglang-full: expected some of ours, ours-eager, in-tree, sglang, sglang-b",
        ),
        ("--model v41wide --decode 256", "--decode 256: expected numbers of 1 to 64 requests"),
        ("--dry-run --servers theirs", "--servers theirs: expected some of ours, ours-eager"),
        ("--model v4flash", "--model v4flash --tp 1: expected at least 2 GPUs"),
        ("--starts 0", "--starts 0: expected at least 1"),
        ("--dry-run --tp 2", "--dry-run has one process"),
        ("--flags=--max-runing-requests", "unknown flag --max-runing-requests; did you mean --max-running-requests?"),
    ],
)
def test_conflicting_options_are_rejected(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_arguments(*given.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("serve", "--measure ttfd", "--measure ttfd: expected some of decode"),
        ("serve", "--measure ttft --cold 8K", "--cold 8K: expected positive numbers"),
        ("retract", "--servers theirs", "--servers theirs: expected some of"),
        ("full_pool", "--trees theirs", "--trees theirs: expected some of ours"),
        ("full_pool", "--conversations 5k", "--conversations 5k: expected positive numbers"),
        ("host_cache", "--out x --measure copies", "--measure copies: expected some of memory, decode, restart"),
        ("host_cache", "--out x --storages nixl", "--storages nixl: expected some of shm, file"),
        ("tier", "--ranks 0", "--ranks 0: expected at least 1"),
        ("disaggregation", "--rate 0", "--rate 0.0: expected numbers above 0"),
        ("disaggregation", "--tp 3", "--tp 3: expected an even number of GPUs"),
        ("disaggregation", "--sides apart,together", "--sides together: expected some of apart, tp"),
        (
            "turns",
            "--out x --model v4flash --tp 2 --dp 2 --tier host",
            "--tier host --dp 2: the device is filled on one rank only",
        ),
        ("turns", "--out x --tier host --loads=", "--tier host without --loads"),
        ("turns", "--out x --turnover 8192x64", "turnover 8192x64: expected PROMPT+ANSWERxCLIENTS"),
        ("turns", "--out x --turnover 8192+1x64", "turnover 8192+1x64: expected PROMPT+ANSWERxCLIENTS"),
        ("trace", "none.jsonl --out x --closed 1", "none.jsonl"),
        ("prefix_trace", "trace --active 1 2 --visits 3", "expected as many visits as loads"),
    ],
)
def test_programs_reject_arguments_before_a_start(
    name: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        importlib.import_module(f"benchmarks.{name}").main(given.split())
    assert error.value.code == 2 and said in capsys.readouterr().err


def test_a_missing_transfer_backend_is_named_before_a_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disaggregation, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        disaggregation.main(["--dry-run"])
    assert "the transfer backend mooncake_tcp is not installed" in capsys.readouterr().err


def test_times_between_tokens_leave_out_the_first_quarter() -> None:
    arrivals = [0.0, 9.0, 10.0, 10.1, 10.2, 10.3, 10.4, 10.6]
    found = bench.between_tokens(Answer([0] * 8, 0, {}, 0.0, 10.6, arrivals))
    assert found == {"p50": 100.0, "p95": 200.0, "p99": 200.0, "low": 100.0, "high": 200.0}
    assert bench.between_tokens(Answer([0], 0, {}, 0.0, 1.0, [1.0])) is None


def test_a_warm_up_ends_when_times_settle() -> None:
    times = iter([9.0, 2.0, 0.5, 0.4, 0.1])
    assert bench.settle(lambda: next(times), faster=3, most=9) == 4
    assert bench.settle(lambda: 1.0, faster=3, most=9) == 2
    halves = iter(2.0**-i for i in range(9))
    assert bench.settle(lambda: next(halves), faster=1.5, most=5) == 5
    assert bench.settle(lambda: 1.0, faster=3, most=1) == 1


def test_times_between_tokens() -> None:
    """The gaps are those of tokens within the interval, per stream. Tokens of one delivery have a gap of 0."""
    streams = [[(0.0, 1), (1.0, 2), (1.5, 4), (9.0, 5)], [(0.5, 1), (0.75, 2), (0.75, 2)]]
    assert sorted(disaggregation.gaps(streams, 0.9, 5.0)) == [0.0, 0.5, 1.0]
    assert disaggregation.gaps(streams, 0.0, 0.8) == [0.25]
    found = disaggregation.of_gaps([0.01] * 99 + [0.2], 10)
    assert found == {"tokens/s": 10, "ms between tokens": 10, "p99": 200, "longest": 200}
    assert disaggregation.of_gaps([0.01] * 199 + [0.2], 10)["p99"] == 10


def test_sizes_of_both_servers_logs() -> None:
    """The lines of our server are formatted from the sources of `sizing.table` and of `transfers`."""
    memory = (
        "DSV4 memory calculation: unified=False, unified_fp8=False, dspark_draft_bf16=False, "
        "bytes_per_full_token=7086.75, available_bytes=4.62 GB, c128_state_fixed=0.11 GB, c2_state_fixed=0.02 GB, "
        "full_token=684032"
    )
    pools = "DSV4 pool sizes: full=684032, swa=68352\nDSV4 pool sizes: full=139264, swa=13824, c4=34816, c128=1088"
    in_tree = {"tokens": 139264, "bytes_a_token": 7086.75, "fixed_gib": 0.13, "gib": 1.049}
    assert servers.sizes(f"{memory}\n{pools}") == in_tree
    host = (
        "Allocating 4.28 GB host memory for V4 paged pool 'deepseek_v4_c4' (layers=21)",
        "Allocating 0.74 GB host memory for V4 state pool 'deepseek_v4_c4_state' (layers=21)",
    )
    assert servers.sizes("\n".join([memory, pools, *host])) == in_tree | {"host_gb": 5.02}
    assert servers.sizes("nothing") == {}
    lines = re.findall(r'f"(dsv4_sglang cache: [^"]*)"\s+' + 3 * r'f"([^"]*)"\s*', Path(sizing.__file__).read_text())
    values = {"{layout.token_bytes:.2f}": "3534.62", "{sum(part.bytes for part in parts) / GIB:.3f}": "1.500"}
    [log] = map("".join, lines)
    for name, value in values.items():
        log = log.replace(name, value)
    log = re.sub(r"\{[^}]*\}", "7", log)
    ours = {"tokens": 7, "bytes_a_token": 3534.62, "state_slots": 7, "fixed_gib": 1.5, "gib": 1.5}
    assert servers.sizes(log) == ours
    [line] = re.findall(r'"(dsv4_sglang host cache of %s: [^"]*)"\s+"([^"]*)"', Path(transfers.__file__).read_text())
    line = re.sub(r"%d", "7", "".join(line)).replace("%.3f", "20.000").replace("%s", "this process", 1)
    assert servers.sizes(f"{log}\n{line}") == ours | {"host_gb": 21.475}
    shared = line.replace("this process", "2 processes")
    assert servers.sizes(f"{log}\n{shared}\n{shared}") == ours | {"host_gb": 21.475}


def test_commands_of_both_servers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    argv, environment = servers.command(tmp_path, ["--max-running-requests", "4"], ours=False, cpu=False)
    assert "--json-model-override-args" not in argv
    assert environment["SGLANG_OPT_FP8_WO_A_GEMM"] == "0"  # unquantised weights
    ours, _ = servers.command(tmp_path, ["--max-running-requests", "4"], ours=True, cpu=False)
    assert "dsv4_sglang" in ours[ours.index("--json-model-override-args") + 1]
    assert set(argv) <= set(ours)
    _, quantised = servers.command(command_line.MODELS["flashshape"].folder, [], ours=False, cpu=False)
    assert "SGLANG_OPT_FP8_WO_A_GEMM" not in quantised
    with pytest.raises(ValueError, match="needs a GPU"):
        servers.command(tmp_path, [], ours=False, cpu=True)


def test_metrics_are_added_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """# HELP dsv4_host_saved_bytes_total bytes copied to the host
dsv4_host_saved_bytes_total{dp_rank="0"} 4.5e+06
dsv4_host_saved_bytes_total{dp_rank="1"} 500.0
dsv4_host_tokens{dp_rank="0"} 896.0
dsv4_hit_tokens_total{dp_rank="0",source="host"} 128.0
dsv4_host_load_seconds_bucket{dp_rank="0",le="0.1"} 2.0
dsv4_host_load_seconds_sum{dp_rank="0"} 0.25
sglang:gen_throughput{engine_type="unified"} 3.0
"""
    monkeypatch.setattr(servers.Endpoint, "request", lambda *_, **__: text)
    hits = {"hit_tokens": 128, "hit_tokens_host": 128}
    assert servers.metrics("") == {"host_saved_bytes": 4_500_500, "host_tokens": 896, "host_load_seconds": 0.25, **hits}
    assert servers.host_copies("") == {"saved_bytes": 4_500_500, "tokens": 896, "load_seconds": 0.25}


def test_retraction_cost_counts_from_free_room() -> None:
    times = [10.0, 10.1, 10.2, 13.0, 13.1, 13.2, 13.5, 13.6]
    step, rows = retract.resumed(times, [0, 0, 0, 1, 1, 1, 2, 2], took_room_until=12.9)
    assert step == pytest.approx(100)
    taken, not_taken = rows
    assert taken == {"room taken": True, "since": 12.9, "until": 13.0, "tokens": 3}
    assert not_taken == {"room taken": False, "since": 13.2, "until": 13.5, "tokens": 6}
    # Another request, whose tokens arrive between and around the given times.
    assert retract.longest_pause([10.0, 12.92, 12.93, 12.99, 13.02, 14.0], 12.9, 13.0) == pytest.approx(60)
    assert retract.longest_pause([12.0, 12.8], 12.9, 13.0) is None


# Answers requests. Given a trace, also profiles: its decode line of two requests waits for /start_profile.
FAKE = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
started = threading.Event()
class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({"max_total_num_tokens": 1000})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/start_profile":
            for rank in (0, 1):
                path = Path(asked["output_dir"], f"1.5-TP-{rank}-DP-{rank}.trace.json.gz")
                path.write_bytes(b"" if rank else Path(sys.argv[1]).read_bytes())
            started.set()
        if self.path != "/generate": return self.answer({})
        if asked["input_ids"] == [[3], [4]]:
            print("[2026-11-22 10:00:00] Decode batch, #running-req: 2, gen throughput (token/s): 1.00, ", flush=True)
            started.wait(20)
        self.answer({})
    def log_message(self, *args): print("asked", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_started_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server imports from its plugin folder, so nobody else may write there. The folder goes with the server."""
    monkeypatch.setattr(importlib.metadata, "entry_points", importlib.metadata.EntryPoints().select)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    program = "import os; print(os.environ['PYTHONPATH'], 'loads', os.environ['SGLANG_PLUGINS'], flush=True)" + FAKE
    server = servers.Server("fake", [sys.executable, "-c", program], {}, tmp_path / "logs" / "fake.log")
    with servers.running(server, LONG):
        [folder] = tmp_path.glob("dsv4_sglang_plugin_*")
        assert folder.stat().st_mode & 0o777 == 0o700 and f"{folder}{os.pathsep}" in server.lines()
        [distribution] = importlib.metadata.distributions(path=[str(folder)])
        assert [entry.value for entry in distribution.entry_points] == [servers.REGISTER]
        assert f" loads another,{servers.PLUGIN}\n" in server.lines()
        process = server.process
        assert process is not None
        assert f" --port {server.port} --nccl-port {server.port + 1} " in server.lines()
        assert server.request("/server_info")["max_total_num_tokens"] == 1000
        mark = server.mark()
        server.generate([5, 6], 3)
        assert "asked" in server.lines(mark)
    assert process.poll() is not None and not folder.exists()


def test_rows_have_the_facts_of_their_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the model and not its folder, which is different on each machine."""

    def fake(model: Path, flags: list[str], ours: bool, cpu: bool) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", FAKE, "--model-path", str(model), *flags], {}

    monkeypatch.setattr(servers, "command", fake)
    made = bench.Bench(serve_arguments("--flags=--sleep-on-idle", "--start-timeout", str(LONG)), tmp_path)
    with made.serving("sglang-best", "x", ["--context-length", "7"]) as (server, facts):
        assert server.log == tmp_path / "logs" / "x-sglang-best.log" and server.log.is_file()
    assert (facts["subject"], facts["max_total_num_tokens"]) == ("sglang-best", 1000)
    assert facts["flags"] == f"{command_line.BEST_FLAGS} --sleep-on-idle" and facts["start_s"] > 0
    of_program = "--model-path flashshape --load-format dummy --context-length 7"
    assert facts["command"].endswith(f"{of_program} {facts['flags']}") and str(made.model) not in facts["command"]
    made.args.deadline = 0.0
    with pytest.raises(bench.OutOfTime), made.serving("ours", "x", []):
        pass


def test_rows_of_each_start_are_appended_and_failures_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that fails costs its rows only."""

    def measure(subject: str, number: int) -> Iterator[dict[str, int]]:
        yield {"value": number}
        if (subject, number) == ("ours", 2):
            raise RuntimeError("lost")
        if number == 3:
            raise bench.OutOfTime("skipped: more")
        yield {"value": -number}

    args = serve_arguments("--starts", "3", "--servers", "ours,sglang")
    args.out, shown = tmp_path / "new" / "rows.jsonl", []
    assert bench.append_rows(args, measure, lambda row, line: shown.append((row, line)), settings={"a": 1}) == 1
    lines = args.out.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["start"], row["value"]) for row in rows] == [(1, 1), (1, -1)] * 2 + [
        (2, 2),
        (2, -2),
        (2, 2),
        (3, 3),
        (3, 3),
    ]
    assert all(row["input"] == "ids" and row["settings"] == {"a": 1} and row["environment"]["commit"] for row in rows)
    assert shown == [({"value": row["value"]}, line) for row, line in zip(rows, lines)]
    said = capsys.readouterr().err
    assert "ours failed: lost" in said and said.count("is over. skipped: more") == 2


def test_a_server_that_ends_says_why(tmp_path: Path, only_ports: int) -> None:
    """The error contains the end of the log, and the port is free for the next server."""
    broken = [sys.executable, "-c", "print('ValueError: no such flag'); raise SystemExit(3)"]
    server = servers.Server("broken", broken, {}, tmp_path / "broken.log")
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match=r"ready with 3: .*no such flag"),
            servers.running(server, LONG),
        ):
            pass
        assert server.process is None and server.port == only_ports


# Profiles


def event(category: str, name: str, begin: float, us: float, **args: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": us, "args": args}


def decode_trace(launches: bool = True) -> list[dict]:
    """Return a trace as torch's profiler writes it.

    Each step takes 200 us (the third 300 us) and is one graph of three kernels, one of them on a second stream parallel
    to the first. A sampling kernel follows the graph and begins before the graph ends. A small graph runs before the
    first step.
    """
    graph = {"graph id": 9}
    events = [event("cuda_runtime", "cudaGraphLaunch", 1, 2, correlation=5)] if launches else []
    events.append(event("kernel", "small", 10, 5, stream=7, correlation=5, **graph, **{"graph node id": 77}))
    begin = 1000.0
    for i in range(4):
        ids = {"correlation": 100 + i} if launches else {"correlation": 100}
        if launches:
            events.append(event("cuda_runtime", "cudaGraphLaunch", begin - 20, 2, **ids))
        node = iter(range(1, 9))
        for name, at, us, stream in (
            ("void ns::product<256, float>(float*)", 0, 40, 7),
            ("void ns::side<4>(int)", 10, 20, 8),
            ("Memcpy DtoD (Device -> Device)", 60, 10, 7),
        ):
            category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            events.append(event(category, name, begin + at, us, stream=stream, **ids, **{"graph node id": next(node)}))
        events.append(event("kernel", "sample", begin + 65, 55, stream=7, correlation=1000 + i))
        events.append(event("cpu_op", "aten::add", begin, 500))
        begin += 300 if i == 2 else 200
    events.append({"ph": "M", "name": "process_name", "args": {}})
    return events


def written(path: Path, events: list[dict]) -> Path:
    data = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("launches", [True, False])
def test_steps_of_a_trace(launches: bool, tmp_path: Path) -> None:
    summary = profile_steps.summarise(written(tmp_path / "a.trace.json.gz", decode_trace(launches=launches)))
    assert summary.split == ("graph launches" if launches else "graph nodes")
    assert (summary.steps, summary.period_us, summary.wall_us) == (3, 200, 120)
    assert summary.kernels == {
        "sample": [1, 55],
        "product<256>": [1, 40],
        "side": [1, 20],
        "Memcpy DtoD (Device -> Device)": [1, 10],
    }
    assert (summary.kernel_us, summary.busy_us, summary.idle_us) == (125, 100, 20)


def test_prefill_ends_at_the_first_decode_step(tmp_path: Path) -> None:
    launch = [event("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=at) for at in (1, 2, 50)]
    kernels = [
        event("kernel", "k", at, us, stream=7, correlation=c) for at, us, c in ((5, 20, 1), (40, 30, 2), (80, 9, 50))
    ]
    step = event("user_annotation", "step[DECODE bs=1]", 45, 20)
    trace = written(tmp_path / "a.json", [*launch, *kernels, step])
    summary = profile_steps.summarise(trace, whole=True)
    assert (summary.steps, summary.wall_us, summary.idle_us) == (1, 65, 15)
    assert summary.kernels == {"k": [2, 50]}  # the second was launched before the interval and runs beyond it


def test_profile_waits_for_requests_and_reads_rank_0(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.json.gz", decode_trace())
    server = servers.Server("fake", [sys.executable, "-c", FAKE, str(trace)], {}, tmp_path / "fake.log")
    with servers.running(server, LONG):
        assert profile_steps.decode(server, [[3], [4]], 100).steps == 3
        with pytest.raises(RuntimeError, match="3 requests never decoded together"):
            profile_steps.decode(server, [[3]] * 3, 100)
        assert profile_steps.prefill(server, [[3, 4, 5]]).split == "whole trace"
    server.argv.append("--dp-size")
    assert profile_steps.on_first_rank(server, 1) == {"routed_dp_rank": 0}


# Time limits


def test_time_limit_stops_servers_and_keeps_rows(tmp_path: Path) -> None:
    program = f"""
import signal, sys
from pathlib import Path
from benchmarks import command_line, report, servers
made = report.Report("demo", command_line.report_parser("x").parse_args(["--out", {str(tmp_path)!r}]))
server = servers.Server("fake", [sys.executable, "-c", {FAKE!r}], {{}}, Path({str(tmp_path)!r}) / "fake.log")
def part():
    with servers.running(server, {LONG}):
        yield {{"us": 1.0}}
        print("pid", server.process.pid, flush=True)
        signal.pause()
made.part("slow", part)
"""
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    line = next(line for line in running.stdout if line.startswith("pid"))
    running.terminate()
    assert wait(running) == 143
    running.stdout.close()
    assert [row["us"] for row in result(tmp_path, "demo")["rows"]] == [1.0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)
