"""Work of a layer that overlaps on a GPU: `overlapping_layer.py`, in a process with SGLang's environment of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

from dsv4_sglang.srt.launch import cpu_environment


def test_overlapping_layer() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "overlapping_layer.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, **cpu_environment()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
