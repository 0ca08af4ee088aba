"""A failing kernel makes the GPU unusable for its process. Every op must then raise instead of silently not writing."""

import re
import sys
from pathlib import Path

import pytest
from support.liveness import run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """Return what each op raises in a process whose GPU is lost."""
    done = run([sys.executable, str(Path(__file__).with_name("failing_kernel.py"))])
    found = dict(re.findall(r"^(\w+) raises (.*)$", done.stdout, re.MULTILINE))
    assert "illegal memory access" in found.get("synchronize", ""), "no kernel failed:\n" + done.stdout + done.stderr
    return found


WHAT = {
    "append": "the launch for 2 tokens of 2 requests, ratio 4, decode",
    "append_swa": "the launch for 2 tokens",
    "append_v41": "the launch for 2 tokens of 2 requests, ratio 1, decode",
    "append_v41_keys": "the launch for 2 tokens of 2 requests, ratio 1",
    "copy_state": "the launch for 1 pairs of slots in 1 tensors",
    "gather_tables": "the launch for 1 requests",
    "index_query": "the launch for 1 tokens of 64 heads",
}


@pytest.mark.parametrize("op", WHAT)
def test_the_next_launch_names_op_arguments_and_error(raised: dict[str, str], op: str) -> None:
    reason = "failed: an illegal memory access was encountered (cudaErrorIllegalAddress)"
    assert raised[op].startswith(f"{op}: {WHAT[op]} {reason}"), raised[op]


def test_swap_blocks_names_itself_and_the_error(raised: dict[str, str]) -> None:
    """CUDA decides if the look-up of host memory fails or the launch after it."""
    assert raised["swap_blocks"].startswith("swap_blocks: ") and "illegal memory access" in raised["swap_blocks"]
