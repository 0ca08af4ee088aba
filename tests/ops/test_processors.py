"""Run bounds of numerical tests with the kernels of other processors and with two threads.

Other processors and several threads add in a different order. To run a whole file or all tests by hand:
ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 pytest tests/ops/test_spec.py
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from support.liveness import run

pytestmark = pytest.mark.full

LEVELS = ("default", "avx2", "avx512")
NATIVE = torch.backends.cpu.get_cpu_capability().lower()
# The fast tests of each kind: the oracle, the ops against transformers, and rounded rows.
TESTS = (
    "reference/test_oracle.py::test_teacher_forced_equals_incremental",
    "ops/test_against_hf.py::test_any_chunking_equals_hf",
    "ops/test_spec.py::test_quantised_entries_equal_fake_quantised_hf",
)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_bounds_hold_whatever_the_order_of_sums(level: str) -> None:
    if level != "default" and (NATIVE not in LEVELS or LEVELS.index(level) > LEVELS.index(NATIVE)):
        pytest.skip(f"this processor has no {level}: {NATIVE}")
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS],
        cwd=Path(__file__).parents[1],
        # A waiting thread must not occupy the core of the thread that it waits for.
        env={**os.environ, "ATEN_CPU_CAPABILITY": level, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
