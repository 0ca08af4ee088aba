"""What a launch that cannot be served says: its reasons alone, one line each, as the last lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from liveness import run, wait
from server_harness import launched

from dsv4_sglang.srt.integration import launch_command

pytestmark = pytest.mark.server


def test_a_scheduler_rejects_a_launch_with_its_last_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(tiny(), log, ["--max-running-requests", "1000000"], {}) as process:
        assert wait(process, log) != 0
    text = log.read_text(errors="replace")
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith("dsv4_sglang: the state slots do not fit: 1000004 slots of "), text


@pytest.mark.parametrize(
    ("flags", "overrides", "said"),
    [
        ([], {"dsv4_sgalng": {}}, ['"dsv4_sgalng" in --json-model-override-args is no key that this launch knows; ']),
        (
            ["--page-size", "64", "--max-running-requests", "-4"],
            {"dsv4_sglang": {}},
            ["--max-running-requests -4 is not supported: ", "--page-size 64 is not supported: "],
        ),
    ],
    ids=["key", "flags"],
)
def test_the_launcher_rejects_a_launch_with_its_last_lines(
    tiny: Callable[..., Path], flags: list[str], overrides: dict[str, object], said: list[str]
) -> None:
    """As a user starts it, in a process of its own."""
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny()), "--device", "cpu", *flags]
    done = run(
        [*server, launch_command.OPT_IN_FLAG, json.dumps(overrides)],
        env={**os.environ, **launch_command.cpu_environment()},
    )
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in text
    last = done.stderr.splitlines()[-len(said) :]
    assert all(line.startswith(f"dsv4_sglang: {words}") for line, words in zip(last, said, strict=True)), text
