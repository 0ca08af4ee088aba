"""Tests of the benchmark of conversations of a million tokens: its rows on a real server, and the planned memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import server_forkserver
from support.server_forkserver import QUICK

from benchmarks import long_context
from dsv4_sglang.planner.gpus import GPUS

pytestmark = pytest.mark.full


@pytest.mark.server
@pytest.mark.parametrize("tier", ["device", "host"])
def test_rows_of_a_dry_run(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations hit in turn, in a pool for both and in a pool for one with a host cache."""
    server_forkserver.fork_benchmarks(monkeypatch)
    out = tmp_path / "rows.jsonl"
    given = ["--dry-run", "--tier", tier, "--out", str(out), QUICK, "--start-timeout", "400"]
    assert long_context.main(given) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    of_tier = {"device": ["cold", "turn", "turn", "decode tokens/s", "decode tokens/s", "cold", "two in turn"]}
    of_tier["host"] = ["cold", "cold", "two in turn", "retraction"]
    found = [row["measure"] for row in rows]
    assert found[: len(of_tier[tier]) + 1] == ["memory", *of_tier[tier]]
    for row in rows:
        if row["measure"] in ("turn", "two in turn"):
            assert row["cached"] == {"expected": 768, "turns": row["turns"], "low": 768, "high": 768}
            assert row["tier_share"] == 1.0
        elif row["measure"] == "cold":
            assert row["value"] > 0 and row["cached"] == 0
        elif row["measure"] == "decode tokens/s":
            assert row["value"] > 0
        elif row["measure"] == "retraction":
            # A snapshot is taken every 128 tokens. The request that takes the room evicts the retracted one.
            assert row["prompt"] == 820 and 0 <= row["computed again"] < 2 * 128
    assert any(row.get("room taken") for row in rows) == (tier == "host")


def test_planned_memory_is_that_of_a_measured_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of flashshape with 256 requests had 21,641,856 tokens on an H200 (docs/benchmarks/results.md)."""
    monkeypatch.setattr(long_context, "gpu", lambda: {"memory_bytes": GPUS["h200"].memory})
    made = long_context.Bench(long_context.parsed(["--out", str(tmp_path / "rows.jsonl")]), tmp_path)
    made.running = 256
    found = made.planned()
    assert found["planned_tokens"] == pytest.approx(21_641_856, rel=0.01)
    assert found["planned_gib"] < 0.7 * GPUS["h200"].memory / 2**30
    made.from_host = True
    assert made.planned() == {}


@pytest.mark.parametrize("tokens", ["999", "1000001"])
def test_a_length_beyond_the_context_is_rejected(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_context.parsed(["--out", "rows", "--tokens", tokens])
    assert f"--tokens {tokens}: expected 1000 to 1000000" in capsys.readouterr().err
