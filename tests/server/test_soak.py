"""The long run (tests/soak.py): pieces go on from each other, and each finds the fault that is planted in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soak
from support import server_forkserver
from support.server_plugin import broken

from benchmarks.environment import COMMIT_VARIABLE

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.slow]


def test_pieces_go_on_and_find_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second piece hits the pages of the first, and finds that the host loads wrong rows. The third finds that the
    pages are missing. Neither leaves a line."""
    monkeypatch.setenv(COMMIT_VARIABLE, "of the test")  # a piece does not expect the pages of another commit
    server_forkserver.fork_benchmarks(monkeypatch)
    monkeypatch.setattr(soak, "ENDING_SECONDS", 0.1)  # no server ends after its fault
    monkeypatch.setattr(soak, "QUIET_SECONDS", 0.5)
    folder, out = tmp_path / "soak", tmp_path / "soak.jsonl"
    arguments = ["--folder", str(folder), "--seconds", "1", "--out", str(out)]
    assert soak.main(arguments) == 0, capsys.readouterr().out
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["seeds"] == [1, 1] and line["lives"][0]["ended by"] == "SIGKILL"
    assert line["counters"]["requests"] >= soak.ON_CPU.burst // 2 and line["counters"]["checked idle"] > 0
    capsys.readouterr()
    with broken(folder / "plugin", "the row behind each"):
        assert soak.main(arguments) == 1
    found = capsys.readouterr().out
    assert found.startswith("seed 2, start: a prompt of the life of seed 1 (400 tokens): the warm answer differs")
    assert f"again: python tests/soak.py --folder {folder} --seed 2; logs: {folder}/logs" in found
    for page in (folder / "pages").glob("*.bin"):
        page.unlink()
    assert soak.main(arguments) == 1
    assert (
        "seed 2, start: a prompt of the life of seed 1 (400 tokens) found 0 tokens; expected 384"
        in capsys.readouterr().out
    )
    assert len(out.read_text().splitlines()) == 1


def test_slope_of_a_growing_process() -> None:
    assert soak.slope_per_hour([(0, 100.0), (60, 101.0), (120, 102.0)]) == 60.0
    assert soak.slope_per_hour([(0, 100.0), (60, 101.0)]) is None
    with pytest.raises(soak.Wrong, match=r"rss_mb grew from 100\.0 at first to 357\.0; expected at most 256\.0 more"):
        soak.Usage(357.0, 9, 9).require_near(soak.Usage(100.0, 9, 9), "at first")
