"""The commands with a stand-in for `sglang.launch_server`.

tests/server/test_commands.py runs them with the real one.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from argparse import ArgumentParser
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.server_args import ServerArgs
from support.liveness import LONG, communicate, has_ended, run, wait
from typer.main import get_command
from typer.testing import CliRunner

import dsv4_sglang
from dsv4_sglang.cli import app, client, conversation, demo, doctor
from dsv4_sglang.cli.server import running, stop, wait_ready
from dsv4_sglang.srt.launch import flag_names
from dsv4_sglang.srt.launch.command import OPT_IN_FLAG, cpu_environment, server_command
from dsv4_sglang.srt.sglang import targets
from dsv4_sglang.testing import selftest, tiny
from dsv4_sglang.testing.formula import layer_output
from dsv4_sglang.testing.tiny_config import TinySpec, config_json

COMMAND = [sys.executable, "-m", "dsv4_sglang"]
MODEL = "somebody/some-model"
OPTIONS = OPT_IN_FLAG
DATA = Path(__file__).parent / "data"
TLS = ("--ssl-keyfile", str(DATA / "server.key"), "--ssl-certfile", str(DATA / "server.crt"))
KEYS = ("--api-key", "of users", "--admin-api-key", "of admins")

STAND_IN = """
import http.server, json, os, signal, socket, ssl, sys, time

flags = sys.argv[1:]


def stop(number, frame):
    if "--stubborn" not in flags:
        os._exit(40 + number)


def flag(name, default=None):
    return flags[flags.index(name) + 1] if name in flags else default


# Before the line that tests wait for: they send signals as soon as they have read it.
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("STARTED", json.dumps([flags, os.environ.get("SGLANG_USE_CPU_ENGINE")]), flush=True)
if "--die" in flags:
    sys.exit(3)
time.sleep(0.3)


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        ranks = [{"kv_used": 0, "kv_evictable": 128, "kv_available": 900}] * 2
        rows = [(f'{name}_tokens{{dp_rank="{i}"}}', n) for i, values in enumerate(ranks) for name, n in values.items()]
        page = "".join(f"sglang:{row} {value}.0\\n" for row, value in rows)
        found = self.path == "/metrics" and "--enable-metrics" in flags
        self.answer(200 if found else 404, page + 'dsv4_snapshots 3.0\\n')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = flag("--api-key")
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(401, "no key")
        elif self.path != "/generate" or "--reject" in flags:
            self.answer(400, "too long")
        else:
            meta = {"prompt_tokens": len(body["text"]), "cached_tokens": 0}
            lines = [{"text": "ab"[:n], "meta_info": {**meta, "completion_tokens": n}} for n in (1, 2)]
            if "--break-off" in flags:
                lines = [{"error": {"message": "out of memory"}}]
            self.answer(200, "".join(f"data: {json.dumps(line)}\\n\\n" for line in lines) + "data: [DONE]\\n\\n")

    def log_message(self, form, *values):
        print("REQUEST", form % values, flush=True)


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in flag("--host", "") else socket.AF_INET


server = Server((flag("--host", "127.0.0.1"), int(flag("--port"))), Handler)
if flag("--ssl-certfile"):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(flag("--ssl-certfile"), flag("--ssl-keyfile"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for `sglang.launch_server` first on the path.

    It implements the part of HTTP that the commands use.
    """
    package = tmp_path / "stand_in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.fixture
def start(stand_in: None):
    """Return a function that starts `dsv4-sglang ...` in a new process group, which is killed after the test."""
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
    result = CliRunner().invoke(app, ["serve", "--model-path", MODEL, "--print", "--tp", "1", "--device", "cpu"])
    assert result.exit_code == 0
    words = shlex.split(result.output)
    assert words[words.index("--tp") + 1] == "1"
    assert "sglang.launch_server" in words
    assert f"PYTHONPATH={cpu_environment()['PYTHONPATH']}" in words


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the commands an environment in which torch and SGLang cannot be imported."""
    for name in ("torch", "sglang"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is imported')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        (
            "serve",
            (OPTIONS, '{"dsv4_sglang": {"indexer_formt": 1}}'),
            'unknown dsv4_sglang option "indexer_formt"; did you mean indexer_format? valid ',
        ),
        ("demo", (OPTIONS, "{"), f"{OPTIONS} '{{' is not JSON: "),
        ("serve", ("--model-path", "/nowhere/model"), "--model-path /nowhere/model: no such folder; give "),
        ("serve", ("--port", "70000"), "--port 70000: expected a number from 1 to 65535"),
        (
            "demo",
            ("--port", "{taken}"),
            "cannot listen on --host 127.0.0.1 --port {taken}: Address already in use; give another --port",
        ),
    ],
)
def test_unservable_model_gives_one_line_without_torch(
    without_torch: None, command: str, flags: tuple[str, str], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        words = [word.replace("{taken}", taken) for word in flags]
        done = run([*COMMAND, command, "--model-path", MODEL, *words])
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dsv4_sglang: {said.replace('{taken}', taken)}")


IMPORTING_NOTHING = """
import atexit, runpy, sys
atexit.register(lambda: print("imported", *{"torch", "sglang"}.intersection(sys.modules)))
sys.argv[0] = "dsv4-sglang"
runpy.run_module("dsv4_sglang", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp-sise", "2"], "unknown flag --tp-sise; did you mean --tp-size?"),
        (["--tp-sise=2"], "unknown flag --tp-sise; did you mean --tp-size?"),
        (["-tp", "2"], "unknown flag -tp; did you mean --tp?"),
        (["--max-tokns"], "unknown flag --max-tokns; did you mean --max-to"),
        (["--zzz"], "unknown flag --zzz; `python -m sglang.launch_server --help` lists all"),
        (
            ["--config", "{folder}/flags.yaml"],
            "unknown flag --max-runing-requests; did you mean --max-running-requests?",
        ),
        ([OPTIONS], f"{OPTIONS} has no value; give a JSON object such as "),
        ([OPTIONS, "null", f"{OPTIONS}=null"], f"{OPTIONS} is given 2 times; put all keys into one JSON object"),
        (["--config", "{folder}/empty.yaml"], "--model-path is missing; give "),
    ],
)
@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_wrong_command_line_gives_one_line(command: str, flags: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("max_runing_requests: 4\n")
    (tmp_path / "empty.yaml").touch()
    words = [word.format(folder=tmp_path) for word in flags]
    model = [] if "empty" in words[-1] else ["--model-path", MODEL]
    done = run([sys.executable, "-c", IMPORTING_NOTHING, command, *model, *words])
    assert (done.returncode, done.stdout) == (2, "imported\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dsv4_sglang: {said}")


def test_all_flags_of_sglang_are_known() -> None:
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {name for action in parser._actions for name in action.option_strings}
    assert flags - {"-h", "--help"} <= flag_names.flags_of_sglang()
    assert "--no-ple-offload-embedding" in flags
    words = [word for flag in flags for word in (flag, "-1", "a -b", "", f"{flag}=--x", flag[:-1])]
    assert flag_names.unknown_flags(words, flags) == []
    assert flag_names.unknown_flags(["--prnt"], flags, ["--print"]) == ["unknown flag --prnt; did you mean --print?"]


def test_the_model_may_be_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(f"model_path: {MODEL}\nmax-running-requests: 4\n")
    printed = [
        shlex.split(
            CliRunner().invoke(app, ["serve", "--print", "--device", "cpu", "--config", str(file), *more]).output
        )
        for more in ([], ["--model", "another/model"])
    ]
    models = [words[words.index("--model-path") + 1] for words in printed]
    assert models == [MODEL, "another/model"]
    assert all(words[words.index("--config") + 1] == str(file) for words in printed)


def test_serve_checks_the_files_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tiny.make_tiny(tmp_path / "cut", TinySpec(ratios=(0, 4), hidden=128))
    (tmp_path / "flags.yaml").write_text("skip-tokenizer-init: true\n")
    (folder / "tokenizer.json").unlink()
    os.truncate(folder / "model.safetensors", 100_000)
    for flags, said in (
        (
            [],
            rf"dsv4_sglang: {folder}/tokenizer.json \(the tokenizer\) cannot be read: No such file or directory; .*\n",
        ),
        (["--skip-tokenizer-init"], rf"dsv4_sglang: {folder}/model.safetensors has 100000 bytes, and .*\n"),
        (
            ["--config", str(tmp_path / "flags.yaml")],
            rf"dsv4_sglang: {folder}/model.safetensors has 100000 bytes, .*\n",
        ),
    ):
        result = CliRunner().invoke(app, ["serve", "--model-path", str(folder), *flags])
        assert result.exit_code == 2 and re.fullmatch(said, result.output), result.output


@pytest.mark.parametrize(("host", "reason"), [("192.0.2.1", "Cannot assign"), ("host..name", "not a host name")])
def test_serve_rejects_a_remote_host(host: str, reason: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--model-path", MODEL, "--host", host])
    assert result.exit_code == 2 and f"cannot listen on --host {host} --port 30000: {reason}" in result.output


# Python's import system takes a module that is None for one that is not installed.
WITHOUT = """
import runpy, sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
sys.argv[0] = "dsv4-sglang"
runpy.run_module("dsv4_sglang", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("torch,sglang", ["make-tiny", "{folder}/new"]),
        ("torch,sglang", ["plan", "--model", "flash", "--gpu", "h200", "--count", "2"]),
        ("torch,sglang", ["serve", "--model-path", MODEL]),
        ("sglang", ["serve", "--model-path", MODEL, "--device", "cpu"]),
        ("torch", ["serve", "--model-path", MODEL, "--print"]),
        ("torch,sglang", ["demo", "--model-path", MODEL]),
        ("torch,sglang", ["storage", "ls", "{folder}"]),
        ("safetensors", ["make-tiny", "{folder}/new"]),
        ("typer", ["plan"]),
        ("yaml", ["check", "http://127.0.0.1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_missing_package_is_named_in_one_line(absent: str, words: list[str], tmp_path: Path) -> None:
    done = run([sys.executable, "-c", WITHOUT, absent, *(word.format(folder=tmp_path) for word in words)])
    assert done.returncode in (1, 2) and done.stdout == ""
    (line,) = done.stderr.splitlines()
    names = absent.replace("yaml", "pyyaml").split(",")
    verb = "are" if len(names) > 1 else "is"
    assert re.match(rf"dsv4[-_]sglang[\w: -]* {', '.join(names)} {verb} not installed; run `pip install ", line), line
    assert all(f'"{name}' in line for name in names)


def test_doctor_lists_all_missing_packages() -> None:
    done = run([sys.executable, "-c", WITHOUT, "torch,sglang,triton", "doctor"])
    assert done.returncode == 1 and done.stderr == ""
    missing = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert missing == [f"fail  {name}: not installed" for name in ("torch", "sglang", "triton")]
    assert done.stdout.splitlines()[-1].startswith("torch, sglang are not installed; run `pip install ")


@pytest.mark.parametrize(
    ("allowed", "points", "said"),
    [
        ("one, other", metadata.entry_points(), "SGLANG_PLUGINS=one, other leaves out dsv4_sglang; "),
        (",", metadata.entry_points(), "SGLANG_PLUGINS=, leaves out dsv4_sglang; "),
        ("", metadata.EntryPoints(), "SGLang finds no entry point 'dsv4_sglang'; install "),
    ],
    ids=["not allowed", "none allowed", "not installed"],
)
def test_server_needs_the_plugin(
    allowed: str, points: metadata.EntryPoints, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the plugin, SGLang ignores the opt-in and serves with its own cache."""
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    monkeypatch.setattr(metadata, "entry_points", points.select)
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("a server was started"))
    for command in ("serve", "demo"):
        result = CliRunner().invoke(app, [command, "--model-path", MODEL])
        assert result.exit_code == 2 and result.output.startswith(f"dsv4_sglang: {said}"), result.output
    (finding,) = doctor.plugin(gpu=False)
    assert finding.state == "fail" and finding.found.startswith(said)


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["plan", "-h"], ["storage", "ls", "-h"]])
def test_help(words: list[str]) -> None:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "-h, --help" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_help_cuts_nothing_at_80_columns() -> None:
    commands = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "80"}).output.partition("Commands:")[2]
    assert "..." not in commands and "…" not in commands
    options = CliRunner().invoke(app, ["plan", "-h"], env={"COLUMNS": "80"}).output
    named = [option for parameter in get_command(app).commands["plan"].params for option in parameter.opts]
    assert len(named) > 15 and all(re.search(rf"{option}[ ,]", options) for option in named)


def test_version() -> None:
    done = run([*COMMAND, "--version"])
    assert (done.returncode, done.stdout) == (0, f"dsv4-sglang {dsv4_sglang.__version__}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_becomes_the_server(start, number: signal.Signals) -> None:
    port = demo.free_port()
    process = start("serve", "--model-path", MODEL, "--port", str(port), "--trust-remote-code")
    lines = _read_until(process, "STARTED")
    flags, engine = json.loads(lines[-1].removeprefix("STARTED "))
    assert flags[:2] == ["--model-path", MODEL]
    assert flags[-3:] == ["--port", str(port), "--trust-remote-code"]
    assert engine == (None if torch.cuda.is_available() else "1")
    assert shlex.split(lines[0])[-3:] == flags[-3:]
    process.send_signal(number)
    assert wait(process) == 40 + number


STARTING = """
import multiprocessing, sys, time

def child():
    print("CHILD", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    print("STARTED", process.pid, flush=True)
    process.join()
"""


def test_ctrl_c_during_start_prints_no_traceback(stand_in: None, start) -> None:
    """A terminal sends SIGINT to the server and its subprocesses. Python would print a traceback in each."""
    folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    (folder / "sglang" / "launch_server.py").write_text(STARTING)
    process = start("serve", "--model-path", MODEL, "--device", "cpu", "--port", str(demo.free_port()))
    pid = int(_read_until(process, "STARTED")[-1].split()[1])
    _read_until(process, "CHILD")
    child = psutil.Process(pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = communicate(process)
    assert (process.returncode, output) == (130, "dsv4-sglang: interrupted before the server was up\n")
    assert has_ended(child)


def test_ctrl_c_during_the_imports_prints_nothing() -> None:
    script = """
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "dsv4_sglang.cli.app":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from dsv4_sglang.__main__ import main
main()
"""
    done = run([sys.executable, "-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_early_ctrl_c_is_not_lost(stand_in: None) -> None:
    """The signal comes after Python's last instruction of `serve`, and waits for the server."""
    script = """
import os, signal, sys
become = os.execvpe
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    become(*arguments)
os.execvpe = interrupted
from dsv4_sglang.__main__ import main
main()
"""
    flags = ["serve", "--model-path", MODEL, "--device", "cpu", "--port", str(demo.free_port())]
    done = run([sys.executable, "-c", script, *flags])
    assert (done.returncode, done.stderr) == (130, "dsv4-sglang: interrupted before the server was up\n")


def test_ctrl_c_of_demo_stops_the_server(start) -> None:
    process = start("demo", "--model-path", MODEL, "--device", "cpu")
    _read_until(process, "STARTED")
    server = psutil.Process(process.pid).children()[0]
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process)
    assert process.returncode != 0 and "Traceback" not in output
    assert has_ended(server)


def test_asking_ends_with_the_server(start) -> None:
    process = start("serve", "--model-path", MODEL, "--port", str(demo.free_port()), "--ask", "abc", "--die")
    assert "no conversation: the server" in "".join(_read_until(process, "no conversation"))
    assert wait(process) == 3


def test_demo_prints_and_stops(start) -> None:
    process = start("demo", "--model-path", MODEL, "--prompt", "xyz", *KEYS, *TLS)
    output, _ = communicate(process)
    assert process.returncode == 0, output
    assert "turn 1: 'xyz' -> 'ab'" in output
    assert len(re.findall(r"turn \d: \d+ prompt tokens, 0 of them from the cache", output)) == 2
    assert output.count(": 0 of 2056 tokens used by running requests, 256 kept for requests to come, snapshots: 3") == 2
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--die", "ended before it was ready"),
        ("--reject", "answered 400: too long"),
        ("--break-off", "answered {'message': 'out of memory'}"),
    ],
)
def test_demo_fails_clearly(start, flag: str, said: str) -> None:
    """A stream may fail after SGLang has sent status 200."""
    process = start("demo", "--model-path", MODEL, flag)
    output, _ = communicate(process)
    assert process.returncode == 1
    assert "no conversation: the server" in output
    assert said in output


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (f"--ssl-certfile={DATA / 'server.key'}", "certificate"),
        ("--host=192.0.2.1", "Cannot assign requested address"),
    ],
)
def test_demo_rejects_unreachable_servers(flag: str, said: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--model-path", MODEL, flag])
    assert result.exit_code == 1
    assert "no conversation: " in result.output
    assert said in result.output
    assert "launch_server" not in result.output


def test_address() -> None:
    flags = [[], ["--host=localhost", "--port", "1"], ["--host", "0.0.0.0"], ["--host", "::"], ["--host", "::1", *TLS]]
    assert [client.Server.of(given).url for given in flags] == [
        "http://127.0.0.1:30000",
        "http://localhost:1",
        "http://127.0.0.1:30000",
        "http://[::1]:30000",
        "https://[::1]:30000",
    ]


def _hosts() -> list[str]:
    """Return this machine's loopback hosts and wildcard addresses. A kernel may lack IPv6."""
    hosts = ["127.0.0.1", "0.0.0.0"]
    try:
        demo.free_port("::1")
    except OSError:
        return hosts
    return [*hosts, "::1", "::"]


@pytest.mark.parametrize("host", _hosts())
def test_a_server_is_reached(stand_in: None, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests bypass proxies."""
    for name in ("https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{demo.free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    flags = ("--host", host, "--port", str(demo.free_port(host)), *KEYS, *TLS)
    with running(server_command("m", flags, cpu=True)) as process:
        server = client.Server.of(flags)
        wait_ready(server, lambda: process.poll() is None, LONG)
        assert server.generate("abc", 2).text == "ab"


def test_ports_that_are_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = demo.free_port()
    monkeypatch.setattr(demo, "PORTS", range(port, port + 1))
    assert demo.free_port() == port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match=f"all ports from {port} to {port}"):
        demo.free_port()


def test_wrong_keys_and_certificates_are_rejected(stand_in: None) -> None:
    """Without the key or the right certificate a client fails, so the test above is meaningful."""
    port = ("--port", str(demo.free_port()))
    with running(server_command("m", [*port, *KEYS, *TLS], cpu=True)) as process:
        wait_ready(client.Server.of([*port, *KEYS, *TLS]), lambda: process.poll() is None, LONG)
        with pytest.raises(RuntimeError, match="answered 401: no key"):
            client.Server.of([*port, *TLS]).generate("abc", 2)
        other = client.Server.of([*port, *KEYS, "--ssl-certfile", str(DATA / "other.crt")])
        with pytest.raises(RuntimeError, match=r"does not show the certificate .*other\.crt: .*verify failed"):
            wait_ready(other, lambda: True, LONG)


def test_a_stubborn_server_is_killed(stand_in: None) -> None:
    flags = ("--port", str(demo.free_port()))
    command = server_command("m", [*flags, "--stubborn"], cpu=True)
    with running(command, grace_seconds=0.5) as process:
        wait_ready(client.Server.of(flags), lambda: process.poll() is None, LONG)
    assert process.returncode == -signal.SIGKILL


def test_stopping_ends_the_whole_group() -> None:
    """The leader ends on SIGTERM and leaves a process that does not."""
    script = "trap '' TERM; sleep 1000 & trap - TERM; echo $!; wait"
    process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    left = psutil.Process(int(process.stdout.readline()))
    stop(process)
    assert has_ended(left) and process.returncode == -signal.SIGTERM


def test_demo_stops_at_its_time_limit(stand_in: None, start) -> None:
    folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    (folder / "sglang" / "launch_server.py").write_text("import time; time.sleep(1000)")
    process = start("demo", "--model-path", MODEL, "--device", "cpu", "--timeout", "1")
    output, _ = communicate(process)
    assert process.returncode == 1 and re.search(r"no conversation: no server answered at \S+ within 1 s", output)


def test_user_flags_follow_demo_flags() -> None:
    words = ["serve", "--model-path", MODEL, "--device", "cpu", "--print", "--ask", "x", "--decode-log-interval", "1"]
    printed = shlex.split(CliRunner().invoke(app, words).output)
    given = [i for i, word in enumerate(printed) if word == "--decode-log-interval"]
    assert len(given) == 2 and printed[given[-1] + 1] == "1" and "--enable-metrics" in printed


@pytest.mark.parametrize(("capability", "state"), [((7, 5), "fail"), ((8, 0), "ok"), ((9, 0), "ok")])
def test_doctor_says_which_gpus_are_too_old(
    capability: tuple[int, int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properties of GPUs that this machine may not have."""
    found = SimpleNamespace(name="a GPU", total_memory=80 << 30, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
    gpu = list(doctor.device(True))[-1]
    assert gpu.state == state and gpu.found.startswith(f"a GPU, sm_{capability[0]}{capability[1]}, 80 GiB")


def test_waiting_is_bounded() -> None:
    with pytest.raises(TimeoutError, match="within 0 s"):
        wait_ready(client.Server.of(["--port", str(demo.free_port())]), lambda: True, timeout=0.1)


def test_tiny_models_are_known(tmp_path: Path) -> None:
    assert not conversation.is_tiny(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_json(TinySpec(seed=3, ratios=(4, 0), hidden=128, heads=16, context=1024))))
    assert conversation.is_tiny(str(tmp_path))
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_routed_experts": 256}))
    assert not conversation.is_tiny(str(tmp_path))


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("formats", [selftest.EXACT, selftest.SERVED], ids=["exact", "served"])
def test_self_test(
    ratio: int, formats: selftest.Formats, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is small with the real ops and large with wrong inputs of the formulas."""
    exact = doctor.EXACT_GPU if device.type == "cuda" else doctor.EXACT_CPU
    tolerance = exact if formats is selftest.EXACT else doctor.SERVED
    assert selftest.layer_error(ratio, device, formats) < tolerance / 2

    def spoilt(x: selftest.FormulaInputs, *rest: Any) -> torch.Tensor:
        """Use token 60 instead of token 61, or swap the two roles of a CSA token, or swap k and z."""
        if x.kv_score is None:
            x = selftest.FormulaInputs(**{**vars(x), "kv": x.kv[[*range(61), 60, *range(62, len(x.kv))]]})
        else:
            x = selftest.FormulaInputs(**{**vars(x), "kv_score": x.kv_score.roll(512, 1)})
        return layer_output(x, *rest)

    monkeypatch.setattr(selftest, "layer_output", spoilt)
    assert selftest.layer_error(ratio, device, formats) > 2 * doctor.SERVED


def test_doctor_shows_the_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    (found,) = doctor.compiled_kernels(True)
    assert found.state == "note" and found.found.startswith(f"none in {tmp_path}; ")
    for name, size in (("deep_gemm/cache/a.cubin", 3 << 20), (".cache/flashinfer/norm.so", 2 << 20)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(size))
    (found,) = doctor.compiled_kernels(True)
    assert (found.state, found.found) == ("ok", f"FlashInfer 2 MiB, DeepGEMM 3 MiB in {tmp_path}")


def test_doctor_reports_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gpu: bool):
        yield doctor.Finding("fine", "1.0")
        raise ImportError("no module")

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    monkeypatch.setattr(doctor, "prepare_this_process", lambda cpu: None)
    assert [f.state for f in doctor.examine(False, doctor.CHECKS)] == ["ok", "fail"]
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "ImportError: no module" in result.output
    assert "1 of 2 checks failed" in result.output


DOCTOR_AND_BREAK_THINGS = """
import runpy
import sys
from dsv4_sglang.srt.launch.command import has_gpu
sys.argv = ["dsv4-sglang", "doctor"]
try:
    runpy.run_module("dsv4_sglang", run_name="__main__")
except SystemExit as end:
    print("exit code", end.code, flush=True)
from dsv4_sglang.srt.plugin import hooks, overrides, sglang_contract
whole = hooks.hooks_of
def broken(*arguments, **named):
    first, second, *rest = whole(*arguments, **named)
    return first._replace(target="sglang.srt.gone.Thing"), second._replace(function=lambda original, other: None), *rest
hooks.hooks_of = broken
sglang_contract.FLAGS_READ += ("renamed_flag",)
overrides.OVERRIDES += (overrides.OVERRIDES[0]._replace(method="_gone"),)
from dsv4_sglang.cli import doctor
for finding in doctor.sglang_contract(has_gpu()):
    print(finding.state, finding.what, finding.found)
"""


@pytest.mark.full
@pytest.mark.slow
def test_doctor_passes_and_detects_missing_parts() -> None:
    """Both runs share one process, because SGLang takes long to import."""
    done = run([sys.executable, "-c", DOCTOR_AND_BREAK_THINGS])
    whole, code, broken = done.stdout.partition("exit code 0\n")
    assert code, done.stdout + done.stderr
    for checked in ("python", "sglang", "plugin", "hooks", "flags", "overrides", "CSA layer", "HCA layer"):
        assert checked in whole
    for line in (
        "fail hook sglang.srt.gone.Thing does not exist",
        f"{targets.FLAGS_RESOLVED} takes (server_args",
        "fail flag ServerArgs.renamed_flag, which this cache reads, does not exist",
        "fail override sglang.srt.models.deepseek_v4.DeepseekV4DecoderLayer._gone does not exist",
    ):
        assert line in broken, done.stdout + done.stderr
