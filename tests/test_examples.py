"""The scripts in examples/ that need no server run unchanged."""

import runpy
import sys
from pathlib import Path

import pytest

from dsv4_sglang.cli import demo

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_two_requests(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "two_requests.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "a prefix of 256 tokens: blocks [0, 1] and [0, 1]" in lines
    assert "restored: 262 tokens in blocks [4, 5, 6]" in lines
    assert "layer 1 CSA, request in slot 2, 402 tokens: window of 128 entries, 100 entries" in lines[-5]
    # The first entry belongs to the shared prefix and is the same in any block.
    firsts = {line.split("|entry 0| = ")[1] for line in lines if "|entry 0|" in line}
    assert len(firsts) == 1
    assert lines[-1] == "released: 24 blocks and 3 slots free"


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
