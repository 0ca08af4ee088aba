"""EAGLE in SGLang's scheduler, in a process with SGLang's environment of a CPU: all files on one scheduler."""

import os
import sys
from pathlib import Path

import pytest
from progress import run

from dsv4_sglang.srt.launch import cpu_environment

FILES = ("speculation_of_sglang.py", "speculation_faults_of_sglang.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Of an unquantised checkpoint; read when SGLang's models are imported.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    # Compiling takes longer than what it would make faster here.
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.mark.slow
def test_speculation() -> None:
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "speculation_judge", *FILES],
        cwd=Path(__file__).parent,
        env={**os.environ, **cpu_environment(), **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
