"""The commands, against a stand-in for `sglang.launch_server`; the real one is in test_cli_server.py."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from progress import LONG, communicate, run, wait
from typer.testing import CliRunner

from dsv4_sglang.cli import app, demo, doctor
from dsv4_sglang.cli.client import complete
from dsv4_sglang.srt import launch
from dsv4_sglang.testing import selftest
from dsv4_sglang.testing.formula import layer_output

COMMAND = [sys.executable, "-m", "dsv4_sglang.cli"]

STAND_IN = """
import http.server, json, os, signal, sys, time

flags = sys.argv[1:]


def stop(number, frame):
    if "--stubborn" not in flags:
        os._exit(40 + number)


# Before the line that tests wait for: they send signals as soon as they have read it.
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("STARTED", json.dumps([flags, os.environ.get("SGLANG_USE_CPU_ENGINE")]), flush=True)
if "--die" in flags:
    sys.exit(3)


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.answer(200 if time.time() > ready else 503, {})

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if "--refuse" in flags:
            self.answer(400, {"error": "too long"})
        else:
            self.answer(200, {"choices": [{"text": prompt[::-1]}], "usage": {"completion_tokens": 5}})

    def log_message(self, *args):
        pass


ready = time.time() + 1
http.server.HTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a `sglang.launch_server` first on the path that speaks just enough HTTP."""
    package = tmp_path / "stand_in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.fixture
def start(stand_in: None):
    """Starts `dsv4-sglang ...` in a process group of its own, which is gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} did not come in {lines}")


def test_print_only_prints() -> None:
    result = CliRunner().invoke(app, ["serve", "--model-path", "m", "--print", "--tp", "1", "--device", "cpu"])
    assert result.exit_code == 0
    words = shlex.split(result.output)
    assert words[words.index("--tp") + 1] == "1"
    assert "sglang.launch_server" in words
    assert f"PYTHONPATH={launch.cpu_environment()['PYTHONPATH']}" in words


def test_bad_overrides_are_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["serve", "--model-path", "m", launch.OPT_IN_FLAG, "{"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not JSON" in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_becomes_the_server(start, number: signal.Signals) -> None:
    port = demo.free_port()
    process = start("serve", "--model-path", "m", "--port", str(port), "--trust-remote-code")
    lines = _read_until(process, "STARTED")
    flags, engine = json.loads(lines[-1].removeprefix("STARTED "))
    assert flags[:2] == ["--model-path", "m"]
    assert flags[-3:] == ["--port", str(port), "--trust-remote-code"]
    assert engine == (None if torch.cuda.is_available() else "1")
    assert shlex.split(lines[0])[-3:] == flags[-3:]
    process.send_signal(number)
    assert wait(process) == 40 + number


def test_serve_can_ask_and_stays_up(start) -> None:
    port = demo.free_port()
    process = start("serve", "--model-path", "m", "--port", str(port), "--ask", "abc")
    lines = _read_until(process, "serving at")
    assert any("'abc' -> 'cba' (5 tokens" in line for line in lines)
    assert complete(f"http://127.0.0.1:{port}", "de", 5).text == "ed"
    assert process.poll() is None


def test_asking_ends_with_the_server(start) -> None:
    process = start("serve", "--model-path", "m", "--port", str(demo.free_port()), "--ask", "abc", "--die")
    assert "no completion: the server" in "".join(_read_until(process, "no completion"))
    assert wait(process) == 3


def test_demo_prints_and_stops(start) -> None:
    process = start("demo", "--model-path", "m", "--prompt", "xyz")
    output, _ = communicate(process)
    assert process.returncode == 0
    assert "'xyz' -> 'zyx'" in output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("flag", "said"), [("--die", "ended before it was ready"), ("--refuse", 'answered 400: {"error": "too long"}')]
)
def test_demo_fails_clearly(start, flag: str, said: str) -> None:
    process = start("demo", "--model-path", "m", flag)
    output, _ = communicate(process)
    assert process.returncode == 1
    assert said in output


def test_a_stubborn_server_is_killed(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STOP_SECONDS", 0.5)
    port = demo.free_port()
    command = launch.server_command("m", ["--port", str(port), "--stubborn"], cpu=True)
    with demo.running(command) as server:
        demo.wait_ready(f"http://127.0.0.1:{port}", lambda: server.poll() is None, LONG)
    assert server.returncode == -signal.SIGKILL


def test_waiting_is_bounded() -> None:
    with pytest.raises(TimeoutError, match="within 0 s"):
        demo.wait_ready(f"http://127.0.0.1:{demo.free_port()}", lambda: True, timeout=0.1)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("formats", [selftest.EXACT, selftest.SERVED], ids=["exact", "served"])
def test_self_test(
    ratio: int, formats: selftest.Formats, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right on the ops as they are, and wrong if the formulas are given other rows."""
    exact = doctor.EXACT_GPU if device.type == "cuda" else doctor.EXACT_CPU
    tolerance = exact if formats is selftest.EXACT else doctor.SERVED
    assert selftest.layer_error(ratio, device, formats) < tolerance / 2

    def spoilt(x: selftest.FormulaInputs, *rest: Any) -> torch.Tensor:
        """Token 60 in place of token 61, or the two roles of a CSA token swapped, or k in place of z."""
        if x.kv_score is None:
            x = selftest.FormulaInputs(**{**vars(x), "kv": x.kv[[*range(61), 60, *range(62, len(x.kv))]]})
        else:
            x = selftest.FormulaInputs(**{**vars(x), "kv_score": x.kv_score.roll(512, 1)})
        return layer_output(x, *rest)

    monkeypatch.setattr(selftest, "layer_output", spoilt)
    assert selftest.layer_error(ratio, device, formats) > 2 * doctor.SERVED


def test_doctor_reports_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gpu: bool):
        yield doctor.Finding("fine", "1.0")
        raise ImportError("no module")

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    monkeypatch.setattr(launch, "prepare_this_process", lambda cpu: None)
    assert [f.state for f in doctor.examine(False)] == ["ok", "fail"]
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "ImportError: no module" in result.output
    assert "1 of 2 checks failed" in result.output


BREAK_A_HOOK = """
import sys
from dsv4_sglang.srt import launch
launch.prepare_this_process(cpu=not launch.has_gpu())
from dsv4_sglang.srt import hooks
hooks.HOOKS = (hooks.HOOKS[0]._replace(target="sglang.srt.gone.Thing"), *hooks.HOOKS[1:])
from dsv4_sglang.cli import doctor
print([f for f in doctor.hooks(launch.has_gpu())])
"""


@pytest.mark.slow
def test_doctor_passes_here_and_sees_a_missing_hook() -> None:
    whole = run([*COMMAND, "doctor"])
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for check in ("python", "sglang", "plugin", "hooks", "CSA layer", "HCA layer"):
        assert check in whole.stdout
    hook = run([sys.executable, "-c", BREAK_A_HOOK])
    assert "sglang.srt.gone.Thing does not exist" in hook.stdout, hook.stderr
    assert "state='fail'" in hook.stdout
