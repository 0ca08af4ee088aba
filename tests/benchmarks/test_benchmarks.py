"""Tests of benchmarks/ without servers: bytes and formulas against known figures, reports, and logs of servers."""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.liveness import LONG, wait

from benchmarks import (
    attend,
    capacity,
    disaggregation,
    full_pool,
    full_pool_tree,
    lifecycle,
    loads,
    move,
    move_in_tree,
    oracle_distance,
    profile_steps,
    report,
    retract,
    run,
    serve_plan,
    servers,
    timing,
    traffic,
)
from benchmarks.append_in_tree import bias_rows, page_bytes, window_page_slots
from benchmarks.report import RESULTS, ROOT
from dsv4_sglang.cli.check import ANSWER_TOKENS, Distance, too_far
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt.launch.command import flag_value
from dsv4_sglang.srt.memory import sizing

pytestmark = pytest.mark.full

FLASH = DSV4Config.flash()
FLASHSHAPE = Path(capacity.__file__).parent / "configs" / "flashshape" / "config.json"
FIGURES = ROOT / "docs" / "benchmarks"


def arguments(out: Path, *more: str) -> list[str]:
    return ["--dry-run", "--out", str(out), *more]


def result(out: Path, name: str) -> dict:
    return json.loads((out / f"{name}.json").read_text())


# Bytes and sizes against figures measured or logged on an H200


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
    """`--swa-prefix-tails` has no effect, because SGLang sets the ratio for this model."""
    sizes = partial(capacity.in_tree, FLASHSHAPE.read_text(), 78.82, 256, 0)
    rows = {name: sizes(**flags) for name, flags in capacity.in_tree_settings().items()}
    default = rows["in-tree, default"]
    assert rows["in-tree, windows for hits (0.5)"]["tokens"] < default["tokens"] / 2
    assert default["fixed GiB"] == pytest.approx(2.53, abs=0.005)
    assert default == sizes(swa_full_tokens_ratio=0.1)
    assert all(row == default for name, row in rows.items() if "tails" in name)
    assert all(row["tokens"] > 1.3 * default["tokens"] for name, row in rows.items() if "no ratio" in name)
    assert capacity.ours(FLASH, 256, 512).tokens(78.82 * capacity.GIB) >= 21_000_000


def test_attention_products_give_the_measured_rate() -> None:
    """The measurement was 102.6 us at 209 TFLOP/s (Flash, top 512, 256 requests)."""
    case = attend.Case("flash", 64, 512, "csa", 256, 131072)
    assert case.products() / 102.6e-6 / 1e12 == pytest.approx(209, rel=0.01)
    chunk = attend.Case("flash", 64, 512, "hca", 1, 8192, chunk=8192)
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
    bench = move.Bench(report.parser("x").parse_args([]))
    pieces = move_in_tree.pieces_of(bench.block_bytes)
    assert pieces == {32 * 584: 21, 32 * 72: 21, 592: 20}
    assert sum(map(sum, bench.block_bytes)) == 21 * 32 * (584 + 72) + 20 * 584


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

    report.Report("demo", report.parser("x").parse_args(given)).part("slow", slow)
    assert [row["us"] for row in result(tmp_path, "killed")["rows"]] == [1.0]
    again = report.Report("killed", report.parser("x").parse_args([*given, "--resume"]))
    again.part("slow", lambda: [{"us": 3.0}])
    assert [row["us"] for row in again.rows] == [3.0]


def test_a_failing_part_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def half() -> Iterator[dict[str, float]]:
        yield {"us": 2.0}
        raise RuntimeError("lost")

    made = report.Report("demo", report.parser("x").parse_args(arguments(tmp_path, "--parts", "good,half")))
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


@pytest.mark.parametrize("name", run.WITHOUT_SERVER)
def test_dry_run(name: str, tmp_path: Path) -> None:
    """Each program that needs no server runs with its smallest sizes, and its text names no failure."""
    assert importlib.import_module(f"benchmarks.{name}").main(arguments(tmp_path, "--quick")) == 0
    assert not result(tmp_path, name)["failures"]


def test_dry_run_of_full_trees(tmp_path: Path) -> None:
    assert full_pool.main(arguments(tmp_path, "--measure", "eviction")) == 0
    made = result(tmp_path, "full_pool")
    assert not made["failures"] and [row["subject"] for row in made["rows"]] == list(full_pool_tree.TREES)
    assert all(0 < row["p50 ms"] <= row["p95 ms"] <= row["max ms"] for row in made["rows"])


def test_conversations_overfill_the_pool() -> None:
    sent: list[list[list[int]]] = []
    server = types.SimpleNamespace(generate=lambda batch, tokens: sent.append(batch))
    bench = object.__new__(full_pool.Bench)  # without a model
    bench.seed, bench.vocab = 0, 100
    bench.fill(server, 100 * full_pool.FILL)
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
    late = "[2026-11-21 10:00:04] Prefill batch, #new-seq: 1, #running-req: 31, #queue-req: 0, cuda graph: False\n"
    assert servers.most_running(DECODE_LOG + late + DECODE_LOG) == 16


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
    assert servers.most_running(burst + decode_line(1, 2, 9.0)) == 16


def test_tokens_in_the_caches_of_all_ranks() -> None:
    states = [{"memory_usage": {"token_capacity": tokens}} for tokens in (1000, 900)]
    info = {"max_total_num_tokens": 1000, "internal_states": states}
    assert servers.cache_tokens(info, 2) == [1000, 900]
    assert servers.cache_tokens({**info, "internal_states": states[:1]}, 2) == [1000, 1000]


def serve_arguments(*given: str) -> argparse.Namespace:
    options = report.parser("x")
    options.add_argument("--servers", default="ours,in-tree")
    options.add_argument("--measure")
    options.add_argument("--flags", default="")
    serve_plan.add_options(options)
    args = options.parse_args(given)
    serve_plan.resolve(options, args)
    return args


def test_flags_of_the_served_configurations() -> None:
    small = serve_arguments()
    assert (small.memory, small.start_timeout, small.measure) == (0.6, 240, "decode,ttft,fit")
    assert "--tp-size" not in serve_plan.flags(small, 0.6)
    real = serve_arguments("--model", "v4flash", "--tp", "4", "--dp", "2", "--mem-fraction-static", "0.8")
    assert (real.memory, real.start_timeout, real.measure) == (0.8, 420, "decode,ttft")
    flags = serve_plan.flags(real, real.memory)
    assert (flag_value(flags, "--tp-size"), flag_value(flags, "--dp-size")) == ("4", "2")
    assert "--enable-dp-attention" in flags
    assert flag_value(flags, "--max-running-requests") == "256"  # for all ranks: SGLang divides it
    graphs = flags[flags.index("--cuda-graph-bs-decode") + 1 : flags.index("--tp-size")]
    assert (graphs[0], graphs[-1]) == ("1", "128")  # for one rank
    assert serve_plan.plan(serve_arguments("--model", "v4flash", "--decode", "64,256")).decode == {64: 160, 256: 160}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--tp 4 --dp 3", "expected --dp to divide the 4 GPUs evenly"),
        ("--tp 2 --gpus 2,x", "expected the numbers of 2 GPUs"),
        ("--decode 64,0", "--decode 64,0: expected numbers of 1 to 256 requests"),
        ("--measure ttfd", "--measure ttfd: expected some of decode"),
        ("--servers theirs", "--servers theirs: expected ours, in-tree or both"),
        ("--model v4flash --measure fit", "needs the small weights of flashshape"),
        ("--dry-run --tp 2", "--dry-run has one process"),
    ],
)
def test_conflicting_options_are_rejected(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_arguments(*given.split())
    assert said in capsys.readouterr().err


def test_times_between_tokens() -> None:
    """The gaps are those of tokens within the interval, per stream. Tokens of one delivery have a gap of 0."""
    streams = [[(0.0, 1), (1.0, 2), (1.5, 4), (9.0, 5)], [(0.5, 1), (0.75, 2), (0.75, 2)]]
    assert sorted(disaggregation.gaps(streams, 0.9, 5.0)) == [0.0, 0.5, 1.0]
    assert disaggregation.gaps(streams, 0.0, 0.8) == [0.25]
    found = disaggregation.of_gaps([0.01] * 99 + [0.2], 10)
    assert found == {"tokens/s": 10, "ms between tokens": 10, "p99": 200, "longest": 200}
    assert disaggregation.of_gaps([0.01] * 199 + [0.2], 10)["p99"] == 10


def test_sizes_of_both_servers_logs() -> None:
    """The line of our server is formatted from the source of `sizing.table`."""
    in_tree = "bytes_per_full_token=7705.45, available_bytes=78.82 GB, c128_state_fixed=2.53 GB, full_token=10631168"
    assert servers.sizes(in_tree) == {"tokens": 10631168, "bytes_a_token": 7705.45, "fixed_gib": 2.53, "gib": 78.82}
    assert servers.sizes("nothing") == {}
    [line] = re.findall(r'f"(dsv4_sglang cache: [^"]*)"\s+f"([^"]*)"', Path(sizing.__file__).read_text())
    ours = re.sub(r"\{[^}]*\}", "7", re.sub(r"\{[^}]*:\.2f\}", "3534.62", "".join(line)))
    assert servers.sizes(ours)["state_slots"] == 7


def test_commands_of_both_servers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    argv, environment = servers.command(tmp_path, ["--max-running-requests", "4"], ours=False, cpu=False)
    assert "--json-model-override-args" not in argv
    assert environment["SGLANG_OPT_FP8_WO_A_GEMM"] == "0"  # unquantised weights
    ours, _ = servers.command(tmp_path, ["--max-running-requests", "4"], ours=True, cpu=False)
    assert "dsv4_sglang" in ours[ours.index("--json-model-override-args") + 1]
    assert set(argv) <= set(ours)
    _, quantised = servers.command(serve_plan.MODELS["flashshape"].folder, [], ours=False, cpu=False)
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


# Scores tokens. Given a trace, also profiles: its decode line of two requests waits for /start_profile.
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
        n = asked["sampling_params"]["max_new_tokens"]
        pairs = [[-0.5 - i, 10 + i, None] for i in range(n)]
        sent = [[None if i == 0 else -1.0, t, None] for i, t in enumerate(asked["input_ids"])]
        self.answer({"meta_info": {"output_token_logprobs": pairs, "input_token_logprobs": sent}})
    def log_message(self, *args): print("asked", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_started_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server imports from its plugin folder, so nobody else may write there. The folder goes with the server."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os; print(os.environ['PYTHONPATH'], flush=True)" + FAKE
    server = servers.Server("fake", [sys.executable, "-c", program], {}, tmp_path / "logs" / "fake.log")
    with servers.running(server, LONG):
        [folder] = tmp_path.glob("dsv4_sglang_plugin_*")
        assert folder.stat().st_mode & 0o777 == 0o700 and f"{folder}{os.pathsep}" in server.lines()
        [distribution] = importlib.metadata.distributions(path=[str(folder)])
        assert [entry.value for entry in distribution.entry_points] == [servers.PLUGIN]
        process = server.process
        assert process is not None
        assert f" --port {server.port} --nccl-port {server.port + 1} " in server.lines()
        assert server.request("/server_info")["max_total_num_tokens"] == 1000
        mark = server.mark()
        answer = oracle_distance.ask(server, [5, 6], 3)
        assert "asked" in server.lines(mark)
    assert process.poll() is not None and not folder.exists()
    assert answer["tokens"] == [10, 11, 12]
    assert answer["decode"] == [-0.5, -1.5, -2.5]
    assert answer["prefill"] == [-1.0] * 3


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
        assert profile_steps.prefill(server, [3, 4, 5]).split == "whole trace"
    server.argv.append("--dp-size")
    assert profile_steps.on_first_rank(server, 1) == {"routed_dp_rank": 0}


# Comparisons


def test_distances_to_the_oracle() -> None:
    score = types.SimpleNamespace(
        logprobs=torch.tensor([-1.0, -2.0, -3.0]), margin=torch.tensor([0.0, 0.01, 2.0]), best=torch.tensor([1, 2, 3])
    )
    answer = {"decode": [-1.1, -2.0, -3.5]}
    found = oracle_distance.distances(answer, score, "decode")
    assert found["mean"] == pytest.approx(0.2)
    assert found["max"] == pytest.approx(0.5)
    assert (found["agree"], found["agree or near tie"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    row = {"kind": "prompt", "server": "fp8", "path": "decode", "prompt": 5, "seed": 0}
    [line] = oracle_distance.summary([row | found, row | found | {"seed": 1, "values": [1.0, 1.0, 1.0]}])
    assert (line["tokens"], line["seeds"], line["mean"], line["max"]) == (6, 2, pytest.approx(0.6), 1.0)


def test_time_limit_stops_servers_and_keeps_rows(tmp_path: Path) -> None:
    program = f"""
import signal, sys
from pathlib import Path
from benchmarks import report, servers
made = report.Report("demo", report.parser("x").parse_args(["--out", {str(tmp_path)!r}]))
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


def test_prompts_and_answers_fit_the_context() -> None:
    """This includes a request that continues the longest answer of the previous burst. A seed gives one list."""
    again = [list(itertools.islice(lifecycle.bursts(seed, lifecycle.Shape()), 4)) for seed in (3, 3, 4)]
    assert again[0] == again[1] != again[2]
    driver = lifecycle.Driver("http://127.0.0.1:9", seed=3, shape=lifecycle.Shape(context=700, burst=40))
    for burst in itertools.islice(lifecycle.bursts(3, driver.shape), 8):
        prompts = driver.prompts(burst)
        assert prompts == driver.prompts(burst)
        for ask in burst.asks:
            assert len(prompts[ask.number]) > 0 and len(prompts[ask.number]) + ask.count < 700
            assert len(prompts[ask.number]) + ANSWER_TOKENS <= 700 - lifecycle.SPARED, "not to be compared"
        driver.texts = {ask.number: prompts[ask.number] + [5] * ask.count for ask in burst.asks}
        goes_on = [ask for ask in burst.asks if ask.base is not None and ask.kept == 1.0 and ask.base in prompts]
        assert any(prompts[ask.number][: len(prompts[ask.base])] == prompts[ask.base] for ask in goes_on)


@pytest.mark.parametrize(
    ("warm", "worst", "tolerance", "far"),
    [(0.1, 0.2, None, False), (0.2, 0.2, None, True), (0.1, 0.2, 0.1, True), (float("nan"), 0.0, None, True)],
)
def test_tolerance_of_warm_answers(warm: float, worst: float, tolerance: float | None, far: bool) -> None:
    assert too_far(Distance(128, warm, worst, cold=0.0), noise=0.04, tolerance=tolerance) == far
