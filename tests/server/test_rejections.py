"""Rejected launches: the last lines of the output are the reasons, one line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import server_forkserver
from liveness import run, wait
from server_harness import launched

from dsv4_sglang.srt.integration import launch_command

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-running-requests", "1000000"], "the state slots do not fit: 1000004 slots of "),
        (
            ["--enable-hierarchical-cache", "--hicache-ratio", "0.00001"],
            "the host cache would have 0 blocks and 0 snap",
        ),
    ],
)
def test_a_scheduler_rejects_a_launch_with_its_last_line(
    tiny: Callable[..., Path], tmp_path: Path, flags: list[str], said: str
) -> None:
    log = tmp_path / "log"
    with launched(tiny(), log, flags, {}) as process:
        assert wait(process, log) != 0
    text = log.read_text(errors="replace")
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith(f"dsv4_sglang: {said}"), text


def test_the_launcher_rejects_a_key_that_it_does_not_know(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A misspelt opt-in key is rejected; SGLang would serve its own cache."""
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny()), "--device", "cpu"]
    command = launch_command.Command(
        [*server, launch_command.OPT_IN_FLAG, '{"dsv4_sgalng": {}}'], launch_command.cpu_environment()
    )
    log = tmp_path / "log"
    assert wait(server_forkserver.start(command, log), log) == 1
    text = log.read_text(errors="replace")
    said = '"dsv4_sgalng" in --json-model-override-args is not a known key; '
    assert said in text.splitlines()[-1], text


def test_the_launcher_rejects_a_launch_with_its_last_lines(tiny: Callable[..., Path]) -> None:
    """A launch in a new process, as users start it, ends with one line per reason."""
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny()), "--device", "cpu"]
    server += ["--page-size", "64", "--max-running-requests", "-4", launch_command.OPT_IN_FLAG, '{"dsv4_sglang": {}}']
    done = run(server, env={**os.environ, **launch_command.cpu_environment()})
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in text
    said = ["--max-running-requests -4 is not supported: ", "--page-size 64 is not supported: "]
    last = done.stderr.splitlines()[-len(said) :]
    assert all(line.startswith(f"dsv4_sglang: {words}") for line, words in zip(last, said, strict=True)), text
