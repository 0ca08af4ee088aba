"""Commands and examples, run as a user does, against a real server."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.liveness import POLL_SECONDS, Progress, has_ended, run, wait
from typer.testing import CliRunner

from benchmarks import ports
from dsv4_sglang.cli import app
from dsv4_sglang.cli.conversation import QUESTION
from dsv4_sglang.cli.server import start, stop
from dsv4_sglang.srt.launch.command import Command

pytestmark = [pytest.mark.server, pytest.mark.full]

EXAMPLES = Path(__file__).parents[2] / "examples"
# Other tests fork the scheduler (server_forkserver.py); this server finds the plugin through its entry point.
FLAGS = ("--dtype", "float32", "--context-length", "2048", "--enable-cache-report", "--sleep-on-idle")
METRICS = ("--enable-metrics", "--decode-log-interval", "1")
KEY = "of users"
KEYS = ("--api-key", KEY, "--admin-api-key", "of admins")


def run_example(name: str, *arguments: str) -> str:
    result = run([sys.executable, str(EXAMPLES / name), *arguments])
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def process(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Yield (process, url, log) of `dsv4-sglang serve --ask` with API keys, after it has shown its conversation."""
    log = tmp_path_factory.mktemp("serve") / "log"
    serve = [sys.executable, "-m", "dsv4_sglang", "serve", "--model-path", str(tiny(seed=0))]
    with ports.reserved() as port, log.open("wb") as output:
        command = [*serve, *ports.flags(port), "--ask", QUESTION, *FLAGS, *KEYS, *METRICS]
        process = start(Command(command, {}), output)
        try:
            progress = Progress(process, log)
            while b"dsv4-sglang: serving at" not in log.read_bytes():
                progress.check()
                time.sleep(POLL_SECONDS / 2)
            yield process, f"http://127.0.0.1:{port}", log
        finally:
            stop(process, grace_seconds=0)


def test_conversation(process: tuple) -> None:
    log = process[2].read_text(errors="replace")
    assert log.splitlines()[0].endswith(" ".join(METRICS))
    assert "dsv4_sglang cache:" in log
    assert f"dsv4-sglang: turn 1: {QUESTION!r} -> " in log
    shown = r"turn \d: (\d+) prompt tokens, (\d+) of them from the cache; first token after .+ s, (\d+) tokens after"
    (first, first_cached, first_new), (second, second_cached, second_new) = (
        list(map(int, turn)) for turn in re.findall(shown, log)
    )
    assert second > first + first_new
    assert first_new == second_new == 16
    assert first_cached == 0
    assert second_cached == first // 128 * 128
    pools = re.findall(r"pools .*: (\d+) of 65536 tokens used by .*, (\d+) kept for .*, snapshots: (\d+)", log)
    assert [int(used) for used, _, _ in pools] == [0, 0]
    assert [int(kept) for _, kept, _ in pools] == [first // 128 * 128, second // 128 * 128]
    assert all(int(snapshots) > 0 for _, _, snapshots in pools)
    assert "dsv4-sglang: the answers are noise" in log
    assert " 503 " not in log


def test_chat(process: tuple) -> None:
    """The second turn hits the system prompt even if the questions are short."""
    out = run_example("chat_client.py", "Why?", "and now?", "--url", process[1], "--api-key", KEY, "--max-tokens", "8")
    turns = re.findall(r"\[(\d+) prompt tokens(?:, (\d+) of them from the cache)?; (\d+) new\]", out)
    (first, first_cached, first_new), (second, second_cached, second_new) = ([int(n or 0) for n in t] for t in turns)
    assert first_new == second_new == 8
    assert second > first > 128
    assert first_cached == 0
    assert second_cached == first // 128 * 128


def test_pools(process: tuple) -> None:
    # Answers long enough, and samples frequent enough, that a sample sees them on a fast machine.
    sizes = ("--prompt", "300", "140", "--new", "64", "--interval", "0.02")
    out = run_example("pools_filling.py", "--url", process[1], "--api-key", KEY, *sizes)
    lines = out.splitlines()[1:]
    rows = [list(map(int, re.findall(r" (\d+) +(\d+) kept", line)[i])) for line in lines for i in (0, 1)]
    tokens, slots = rows[0::2], rows[1::2]
    assert max(used for used, _ in tokens) >= 300
    assert max(used for used, _ in slots) >= 1
    assert tokens[-1][0] == slots[-1][0] == 0  # all tokens and slots are free or cached
    assert tokens[-1][1] > 0 == slots[-1][1] and int(lines[-1].split()[-1]) >= 2  # at least one snapshot per prompt


def test_check_says_how_to_turn_it_on(process: tuple) -> None:
    _, url, _ = process
    off = CliRunner().invoke(app, ["check", url, "--api-key", KEY])
    assert off.exit_code == 1 and "the integrity check of this server is off" in off.output
    assert '{"dsv4_sglang": {"integrity_check": true}}' in off.output
    rejected = CliRunner().invoke(app, ["check", url])
    assert rejected.exit_code == 1 and "the server answered 401" in rejected.output


def test_sigterm_stops_it(process: tuple) -> None:
    process[0].send_signal(signal.SIGTERM)
    assert wait(process[0]) in (0, -signal.SIGKILL)  # SGLang exits by killing its own process tree


def test_ctrl_c_while_it_starts(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A terminal sends SIGINT to all processes of the server. None of them prints a traceback or stays."""
    log = tmp_path / "log"
    serve = [sys.executable, "-m", "dsv4_sglang", "serve", "--model-path", str(tiny(seed=0))]
    with ports.reserved() as port, log.open("wb") as output:
        process = start(Command([*serve, *ports.flags(port), *FLAGS], {}), output)
        try:
            progress, leader = Progress(process, log), psutil.Process(process.pid)
            # The schedulers exist, and import or load something.
            while b"server_args=" not in log.read_bytes() or len(leader.children(recursive=True)) < 3:
                progress.check()
                time.sleep(POLL_SECONDS / 2)
            started = leader.children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)
            assert wait(process, log) == 130
        finally:
            stop(process, grace_seconds=0)
    text = log.read_text(errors="replace")
    # The main thread may log until the process exits.
    assert "dsv4-sglang: interrupted before the server was up" in text.splitlines() and "Traceback" not in text
    assert all(map(has_ended, started))


def test_offline_generation(tiny: Callable[..., Path]) -> None:
    out = run_example("offline_generate.py", str(tiny(seed=0)), "--max-tokens", "4")
    # The repr of a text that contains a quote has double quotes.
    assert len(re.findall(r"""^'.+' -> ['"].*['"]$""", out, re.MULTILINE)) == 3
