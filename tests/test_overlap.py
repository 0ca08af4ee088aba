"""Work of a layer that overlaps on a GPU: `overlapping_layer.py`, in a process with SGLang's environment of a CPU."""

import os
import sys
from pathlib import Path

import pytest
from progress import run

from dsv4_sglang.srt.launch import cpu_environment


@pytest.mark.slow
def test_overlapping_layer() -> None:
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "overlapping_layer.py"],
        cwd=Path(__file__).parent,
        # It forks, and a fork of a process with OpenMP's threads waits for them for ever.
        env={**os.environ, **cpu_environment(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
