"""Tests of liveness checks: a process that works is waited for, and one that hangs raises a clear error."""

import subprocess
import sys
from pathlib import Path

import liveness
import pytest
from liveness import communicate, run, wait


def python(program: str, **options: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", program], text=True, **options)  # type: ignore[call-overload]


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "STUCK_SECONDS", 2.0)
    monkeypatch.setattr(liveness, "LITTLE_WORK", 0.02)
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.1)


# Works in a child process, as SGLang does, for longer than a process may hang.
WORK = "import time\nwhile time.process_time() < 3: pass"
PARENT = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {WORK!r}]) + 7)"


def test_a_working_process_is_waited_for(short_interval: None) -> None:
    assert wait(python(PARENT)) == 7
    assert run([sys.executable, "-c", "print('done')"]).stdout == "done\n"


def test_a_log_that_grows_is_progress_and_its_access_lines_are_not(short_interval: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import time\nfor _ in range({}): time.sleep(0.25); print({!r}, flush=True)"
    with log.open("w") as output:
        assert wait(python(program.format(12, "layer 3 loaded"), stdout=output), log) == 0
        with python(program.format(9999, '"GET /health HTTP/1.1" 503'), stdout=output) as process:
            with pytest.raises(AssertionError, match="the process lives"):
                wait(process, log)
            process.kill()


def test_a_stuck_process_is_not(short_interval: None) -> None:
    with python("import time; time.sleep(3600)", stdout=subprocess.PIPE) as process:
        with pytest.raises(AssertionError, match=r"the process lives, but in \d+ s it wrote nothing and used no more"):
            communicate(process)
        process.kill()
