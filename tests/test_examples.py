"""The scripts in examples/ that need no server run as they stand."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_two_requests(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "two_requests.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "layer 1 CSA, request in slot 0, 302 tokens: window of 128 rows, 75 entries" in lines[-4]
    assert "layer 2 HCA, request in slot 1, 206 tokens: window of 128 rows, 1 entries" in lines[-3]
    assert lines[-1] == "released: 16 blocks and 2 slots free"
