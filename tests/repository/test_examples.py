"""The scripts in examples/ that need no server run unchanged."""

import runpy
import sys
from pathlib import Path

import pytest

from dsv4_sglang.cli import demo

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_requests(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "two_requests.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "a third request has slot 1 of the second one" in lines
    assert "layer 1 CSA, request in slot 0, 402 tokens: window of 128 entries, 100 entries" in lines[-5]
    assert lines[-2].startswith("  layer 2 HCA, request in slot 1, 128 tokens: window of 128 entries, 1 entries of 128")
    # An entry stays as it was written.
    firsts = {line.split("|entry 0| = ")[1] for line in lines if "|entry 0|" in line and "slot 0" in line}
    assert len(firsts) == 1
    assert lines[-1] == "released: 16 blocks and 2 slots free"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "chat_client.py",
            ["Why?"],
            "no answer from the server at {url}: Connection error.",
        ),
        ("pools_filling.py", [], "no pools at {url}/metrics ("),
    ],
)
def test_a_wrong_url_gives_one_line(
    name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{demo.free_port()}"
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--url", url])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and len(lines) == 1 and lines[0].startswith(said.format(url=url))
