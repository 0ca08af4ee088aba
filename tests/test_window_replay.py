"""Tests that windows recomputed from 128 tokens are inexact, so that snapshots must hold them
(docs/design/prefix_policy.md)."""

from __future__ import annotations

from benchmarks.agent_trace import load
from benchmarks.window_replay import EXACT_TOKENS, FORMS, distances, simulate
from dsv4_sglang.testing.tiny import TinySpec


def test_a_window_is_exact_from_127_tokens_a_layer_on() -> None:
    """Three layers need 381 tokens, and 128 tokens are far off. A stored window gives the same sums (SPEC 6.6)."""
    kept, short, exact = distances(TinySpec(heads=8, ratios=(0, 4, 128)), 384, (0, 128, 381), follow=8, seeds=1)
    assert kept["max"] == 0 and exact["max"] < 1e-4
    assert short["mean"] > 0.01


def test_tokens_computed_again_are_no_hits() -> None:
    """A hit saves its length minus the recomputed tokens. Small snapshots take less memory."""
    assert EXACT_TOKENS == 5461
    turns = load(20, 3, tokens=(2_000, 20_000), generate=(8, 16))
    rows = {form: simulate(turns, 1.0, form, 0.05) for form in FORMS}
    assert rows["stored"]["saved"] == rows["stored"]["hit"]
    assert rows["replay"]["hit"] >= rows["stored"]["hit"]
    assert rows["replay"]["saved"] < rows["replay"]["hit"]
    assert rows["exact"]["saved"] < rows["replay"]["saved"]
